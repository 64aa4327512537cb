"""`pack`: places the documents of a batch on ranks.

    a to f of 8 4 4 2 2 2 rows, causal       rank 0        rank 1          rank 2       max / mean
    zigzag, packed in the given order        a0-3 e1 f     a4-7 d e0       b c          1.48
    pack                                     a1 a2 a6 c    a3 a4 a5 d e    a0 a7 b f    1.02

A document never attends to another, so a document that is whole on a rank is never sent. Long
documents are cut into the fewest shares that balance the work; short documents stay whole and fill
up the ranks. One call of `ring_attention` computes them all.

Documents are placed one after another, those with most visible pairs first. A document stays whole
if some rank then keeps both bounds, pairs and rows. Otherwise the fewest neighbouring ranks with
room share it, so that their rows and their pairs become level. Each rank takes a run from the head
and a run from the tail of the remaining rows, as in zigzag; the split between head and tail gives
the rank its number of pairs:

    queries of a document     0 . . . . . . . . . . . . . . L
    first rank                # #                     # # #     its number of rows and of pairs
    second rank                   # # #         # # #
    last rank                           # # # #                 the rest

If a rank has too many pairs in the end (ranks with room for pairs had none for rows), everything is
placed again with smaller shares of the long documents, over more ranks.

(Others choose ranks for each document too: Flexible Context Parallelism, arXiv 2605.08524, and
Dynamic Context Parallelism, arXiv 2510.10620.)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from torch import Tensor

from ring_attn.checks.attention import check_window
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.planning.balance import Balance, check_max_balance
from ring_attn.values.checks import as_int, as_tuple, check_int

# Most of a rank that one document may fill; the next value is tried if a placement is unbalanced.
MAX_SHARES = tuple(Fraction(1, n) for n in (1, 2, 4, 8, 16))

# Up to this many documents x ranks, every document over all ranks is tried too.
MAX_EXHAUSTIVE = 1 << 12

# A document that needs at least this many ranks gets as many as its pairs / the mean: sending to
# one more rank costs little, and filling ranks up to the bound would leave others without work.
SPREAD_FROM = 8

# Most documents per rank that are cut only because no rank has room for them. Further documents
# stay whole, even above the bounds, and the placement counts as unbalanced.
MAX_FORCED = 2

# The time grows with documents x ranks: 2,000 documents take 22 s on 4,096 ranks.
MAX_RANKS = 1 << 14

# Fraction of the tolerance (bound - mean) that a rank may miss to have one run instead of two.
RUN_TOLERANCE = Fraction(1, 8)

Window = tuple[int, int]
RowRange = tuple[int, int]


@dataclass(frozen=True)
class Packing:
    """The order of the packed documents, and the rank of each row.

    Attributes:
        layout: layout of the packed sequence, for `ring_attention` and `shard_batch`.
        cu_seqlens: boundaries of the documents in the packed sequence.
        order: indices into `lengths`, in the order of the packed sequence.
        balance: visible pairs and rows of every rank.
        num_cut: number of documents that several ranks share.
    """

    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    order: tuple[int, ...]
    balance: Balance
    num_cut: int

    def __str__(self) -> str:
        return (
            f"{len(self.order)} documents, {self.layout.seqlen} rows on {self.layout.world_size} "
            f"ranks: {self.num_cut} cut, work {self.balance.of_work:.3f} and rows "
            f"{self.balance.of_rows:.3f} of the mean at most"
        )


def pack(
    lengths: Tensor | Sequence[int],
    world_size: int,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    max_balance: float = 1.05,
    max_rows: int | None = None,
    align: int = 1,
) -> Packing:
    """Place the documents of a batch: short ones whole on one rank, long ones over several.

    No rank has more than `max_balance` times the mean of the visible pairs, or more than `max_rows`
    rows, if the lengths allow that; within these bounds few documents are cut. The result depends
    only on the arguments, so it is the same on every rank.

    Args:
        lengths: rows of each document; may be 0.
        world_size: number of ranks, at most 16,384.
        causal: as for `ring_attention`.
        window_size: as for `ring_attention`.
        max_balance: the most visible pairs of a rank, as a multiple of the mean; without
            `max_rows` also its most rows.
        max_rows: the most rows of a rank, such as the rows that its memory holds.
        align: documents are cut only at multiples of it, counted from their first rows.

    Returns:
        The layout, the boundaries and the order of the documents, and the figures.

    Raises:
        ValueError: no documents, numbers out of range, or more rows than the ranks may have.
        TypeError: lengths, `max_rows` or `align` are not ints.

    Example:
        >>> import torch
        >>> from ring_attn import shard_batch
        >>> packing = pack([300, 9000, 200, 500, 100], world_size=2)
        >>> print(packing)
        5 documents, 10100 rows on 2 ranks: 1 cut, work 1.001 and rows 1.010 of the mean at most
        >>> packing.order, packing.cu_seqlens
        ((1, 3, 0, 2, 4), (0, 9000, 9500, 9800, 10000, 10100))
        >>> tokens = [torch.full((n,), i) for i, n in enumerate([300, 9000, 200, 500, 100])]
        >>> batch = {"input_ids": torch.cat([tokens[i] for i in packing.order])[None]}
        >>> part = shard_batch(batch, packing.layout, rank=0, cu_seqlens=packing.cu_seqlens)
        >>> part["position_ids"].shape[1] == packing.balance.rows[0]
        True
    """
    rows = [as_int("each of lengths", n, least=0) for n in as_tuple("lengths", lengths)]
    if not rows:
        raise ValueError("lengths must be of at least one document, got none")
    check_int("world_size", world_size, least=1)
    if world_size > MAX_RANKS:
        raise ValueError(f"world_size must be at most {MAX_RANKS:,}, got {world_size:,}")
    check_int("align", align, least=1)
    check_max_balance(max_balance)
    left, right = check_window(window_size, causal)
    window = left, 0 if causal else right
    most_rows = _most_rows(sum(rows), world_size, max_balance, max_rows)
    pairs_of = {n: pairs_before(n, window, n) for n in set(rows)}
    pairs = [pairs_of[n] for n in rows]
    mean = Fraction(sum(pairs), world_size)
    most_pairs = max(math.floor(Fraction(max_balance) * mean), math.ceil(mean))
    miss = int((most_pairs - mean) * RUN_TOLERANCE)
    bounds = _Bounds(most_pairs, most_rows, mean, miss, world_size)
    documents = sorted((i for i, n in enumerate(rows) if n), key=lambda i: (-pairs[i], -rows[i], i))
    shares = (*MAX_SHARES, Fraction(0)) if len(rows) * world_size <= MAX_EXHAUSTIVE else MAX_SHARES
    best: _Placement | None = None
    for share in shares:
        placed = _Placement(bounds, window, align, share)
        for index in documents:
            placed.add(index, rows[index], pairs[index])
            if best is not None and placed.excess >= best.excess:
                break  # later documents never lower the excess
        else:
            best = placed
            if best.excess == (0, 0):
                break
    assert best is not None, "there are shares"
    if max_rows is not None and max(best.rows) > max_rows:
        raise ValueError(
            f"max_rows is {max_rows}, but with cuts at multiples of align={align} a rank has "
            f"{max(best.rows)} rows: allow as many, or pass a smaller align"
        )
    return best.packing(rows)


def _most_rows(total: int, world_size: int, max_balance: float, max_rows: int | None) -> int:
    """Return the bound of a rank's rows; refuse a bound within which the ranks cannot hold all."""
    if max_rows is None:
        return math.ceil(Fraction(max_balance) * total / world_size)
    check_int("max_rows", max_rows, least=1)
    if max_rows * world_size < total:
        least_rows, least_ranks = -(-total // world_size), -(-total // max_rows)
        raise ValueError(
            f"max_rows is {max_rows}, so {world_size} ranks hold {max_rows * world_size} of "
            f"{total} rows: allow {least_rows} rows, or use {least_ranks} ranks"
        )
    return max_rows


def pairs_before(length: int, window: Window, row: int) -> int:
    """Visible pairs of the queries before `row` of a document.

    Example:
        >>> pairs_before(5, (-1, 0), 3), pairs_before(5, (1, 1), 5)
        (6, 13)
    """
    left, right = window
    stops = row * length
    if right >= 0:
        inside = min(row, max(0, length - right))
        stops -= inside * (length - right - 1) - inside * (inside - 1) // 2
    hidden = max(0, row - 1 - left) if left >= 0 else 0
    return stops - hidden * (hidden + 1) // 2


@dataclass(frozen=True)
class _Bounds:
    """Most pairs and rows of a rank, mean pairs, and the pairs that a share may miss its aim by."""

    pairs: int
    rows: int
    mean: Fraction
    miss: int
    world_size: int


@dataclass(frozen=True)
class _Cut:
    """A document that several ranks share: its index, and each rank's rows as runs."""

    index: int
    length: int
    runs: dict[int, list[RowRange]]


class _Placement:
    """The documents that are placed so far, and each rank's share of them."""

    def __init__(self, bounds: _Bounds, window: Window, align: int, share: Fraction) -> None:
        size = bounds.world_size
        self.bounds, self.window, self.align = bounds, window, align
        # Most pairs, rows and mean pairs that one rank may have of one document.
        self._share = [int(share * most) for most in (bounds.pairs, bounds.rows, bounds.mean)]
        self.pairs, self.rows = [0] * size, [0] * size
        self.whole: list[list[int]] = [[] for _ in range(size)]
        self.cut: list[_Cut] = []
        self.num_forced = 0
        # All ranks, the emptiest first.
        self._levels = [(0.0, rank) for rank in range(size)]

    @property
    def excess(self) -> tuple[int, int]:
        """Rows and pairs of the fullest ranks beyond the bounds."""
        rows, pairs = self.bounds.rows, self.bounds.pairs
        return max(0, max(self.rows) - rows), max(0, max(self.pairs) - pairs)

    def add(self, index: int, rows: int, pairs: int) -> None:
        ranks, blocks = self.bounds.world_size, self._blocks(rows)
        most_pairs, most_rows, mean = self._share
        needed = max(_parts(pairs, most_pairs), _parts(rows, most_rows))
        if needed >= SPREAD_FROM:
            needed = max(needed, _parts(pairs, mean))
        if needed <= 1 or min(ranks, blocks) == 1:
            rank = self._rank_for(rows, pairs)
            if rank is None and self.num_forced >= MAX_FORCED * ranks:
                rank = self._rank_for(rows, -sum(self.pairs))
            if rank is None and min(ranks, blocks) == 1:
                rank = self._levels[0][1]
            if rank is not None:
                self.whole[rank].append(index)
                self._fill(rank, rows, pairs)
                return
            self.num_forced += 1
        least = max(2, min(needed, ranks, blocks))
        self._add_shared(index, rows, pairs, self._ranks_for(blocks, pairs, least))

    def _blocks(self, rows: int) -> int:
        """Return the number of blocks of `align` rows that hold so many rows."""
        return -(-rows // self.align)

    def _room(self, rank: int) -> int:
        """Return the number of whole blocks for which a rank has room."""
        return max(0, self.bounds.rows - self.rows[rank]) // self.align

    def _level(self, rank: int) -> float:
        """Fill of a rank relative to its bounds, by pairs or by rows, whichever is greater."""
        return max(
            self.pairs[rank] / max(self.bounds.pairs, 1), self.rows[rank] / max(self.bounds.rows, 1)
        )

    def _rank_for(self, rows: int, pairs: int) -> int | None:
        most_pairs, most_rows = self.bounds.pairs - pairs, self.bounds.rows - rows
        for _, rank in self._levels:
            if self.pairs[rank] <= most_pairs and self.rows[rank] <= most_rows:
                return rank
        return None

    def _fill(self, rank: int, rows: int, pairs: int) -> None:
        self._levels.remove((self._level(rank), rank))
        self.pairs[rank] += pairs
        self.rows[rank] += rows
        insort(self._levels, (self._level(rank), rank))

    def _ranks_for(self, blocks: int, pairs: int, least: int) -> list[int]:
        """The fewest ranks with room for a cut document; neighbours, unless that takes many more.

        Neighbours lie within an aligned run of 2, 4, 8 ... ranks, so that they share a node if a
        node has room.
        """
        size = self.bounds.world_size
        free = [
            (max(0, self.bounds.pairs - self.pairs[rank]), self._room(rank)) for rank in range(size)
        ]
        free_pairs_before, free_blocks_before = (
            list(accumulate((of_rank[i] for of_rank in free), initial=0)) for i in (0, 1)
        )
        for count in range(least, min(2 * least, size) + 1):
            run = 1 << (count - 1).bit_length()
            starts = [s for s in range(size - count + 1) if s // run == (s + count - 1) // run]
            shares = []  # of the document for which the ranks from each start have room
            for start in starts:
                stop = start + count
                share_of_pairs = (free_pairs_before[stop] - free_pairs_before[start]) / pairs
                share_of_blocks = (free_blocks_before[stop] - free_blocks_before[start]) / blocks
                shares.append(min(share_of_pairs, share_of_blocks))
            if shares and max(shares) >= 1:
                start = starts[shares.index(max(shares))]
                return list(range(start, start + count))
        emptiest = [rank for _, rank in self._levels]
        sums = [accumulate([free[rank][i] for rank in emptiest]) for i in (0, 1)]
        for count, (free_pairs, free_blocks) in enumerate(zip(*sums, strict=True), 1):
            if count >= least and free_pairs >= pairs and free_blocks >= blocks:
                return sorted(emptiest[:count])
        return list(range(size))

    def _add_shared(self, index: int, rows: int, pairs: int, ranks: list[int]) -> None:
        blocks = self._blocks(rows)
        free = [self._room(rank) for rank in ranks]
        if sum(free) < blocks:
            free = [blocks] * len(ranks)
        document = _Document(rows, self.window, self.align)
        held = [self._blocks(self.rows[rank]) for rank in ranks]
        counts = _levelled(held, blocks, [0] * len(ranks), free)
        ends = [sorted(document.pairs_of_ends(count)) for count in counts]
        low, high = ([end[side] for end in ends] for side in (0, 1))
        aims = _levelled([self.pairs[r] for r in ranks], pairs, low, high)
        runs = document.shared(counts, aims, self.bounds.miss)
        by_rank = {rank: of_rank for rank, of_rank in zip(ranks, runs, strict=True) if of_rank}
        for rank, of_rank in by_rank.items():
            num_rows = sum(stop - start for start, stop in of_rank)
            self._fill(rank, num_rows, sum(document.pairs(*run) for run in of_rank))
        if len(by_rank) == 1:
            self.whole[next(iter(by_rank))].append(index)
        else:
            self.cut.append(_Cut(index, rows, by_rank))

    def packing(self, lengths: Sequence[int]) -> Packing:
        """Packs cut documents first, then the whole ones of rank 0, of rank 1, and so on.

        So the rows that other ranks may need are the first rows of a shard.
        """
        size = self.bounds.world_size
        parts: list[list[Segment]] = [[] for _ in range(size)]
        order: list[int] = []
        start = 0
        for cut in sorted(self.cut, key=lambda cut: (min(cut.runs), cut.index)):
            order.append(cut.index)
            for rank, runs in cut.runs.items():
                parts[rank] += [Segment(start + a, b - a) for a, b in runs]
            start += cut.length
        for rank, whole in enumerate(self.whole):
            order += sorted(whole)
            rows = sum(lengths[index] for index in whole)
            if rows:
                parts[rank].append(Segment(start, rows))
            start += rows
        order += [index for index, n in enumerate(lengths) if not n]
        boundaries = accumulate((lengths[index] for index in order), initial=0)
        return Packing(
            SequenceLayout.from_segments(parts),
            tuple(boundaries),
            tuple(order),
            Balance(tuple(self.pairs), tuple(self.rows)),
            len(self.cut),
        )


@dataclass(frozen=True)
class _Document:
    """A document that several ranks share, in blocks of `align` rows; the last may be shorter."""

    length: int
    window: Window
    align: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.align)

    def rows(self, start: int, stop: int) -> RowRange:
        """Return the rows of the blocks `[start, stop)`."""
        return min(start * self.align, self.length), min(stop * self.align, self.length)

    def pairs(self, start: int, stop: int) -> int:
        """Return the visible pairs of the queries in rows `[start, stop)`."""
        before, upto = (pairs_before(self.length, self.window, row) for row in (start, stop))
        return upto - before

    def pairs_of_ends(self, count: int) -> tuple[int, int]:
        """Return the visible pairs of the first, and of the last, `count` blocks."""
        head, tail = self.rows(0, count), self.rows(self.blocks - count, self.blocks)
        return self.pairs(*head), self.pairs(*tail)

    def shared(self, counts: Sequence[int], aims: Sequence[int], miss: int) -> list[list[RowRange]]:
        """Return each rank's runs of rows: `counts` blocks with about `aims` pairs.

        The ranks whose pairs per block are farthest from the mean choose first.
        """
        mean = sum(aims) / self.blocks
        ranks = [i for i, count in enumerate(counts) if count]
        ranks.sort(key=lambda i: (-abs(aims[i] / counts[i] - mean), i))
        shares: list[list[RowRange]] = [[] for _ in counts]
        start, stop, wanted = 0, self.blocks, max(1, sum(aims[i] for i in ranks))
        for i in ranks:
            head = counts[i]
            if i != ranks[-1]:
                left = self.pairs(*self.rows(start, stop))
                head = self._head(start, stop, head, aims[i] * left // wanted, miss)
            wanted = max(1, wanted - aims[i])
            tail = stop - (counts[i] - head)
            runs = [self.rows(start, start + head), self.rows(tail, stop)]
            shares[i] = [run for run in runs if run[0] < run[1]]
            start, stop = start + head, tail
        return shares

    def _head(self, start: int, stop: int, count: int, aim: int, miss: int) -> int:
        """Return how many blocks to take from the head of `[start, stop)`, the rest from its tail.

        More blocks from the head mean fewer pairs.
        """

        def off(head: int) -> int:
            tail = stop - (count - head)
            pairs_of_head = self.pairs(*self.rows(start, start + head))
            return pairs_of_head + self.pairs(*self.rows(tail, stop)) - aim

        for one_run in (count, 0):
            if abs(off(one_run)) <= miss:
                return one_run
        low = bisect_left(range(count), True, key=lambda head: off(head) <= 0)
        return min((low, max(0, low - 1)), key=lambda head: abs(off(head)))


def _parts(amount: int, most: int) -> int:
    """Number of ranks that a document needs; `amount + 1` if a rank may have none of it."""
    return -(-amount // most) if most else amount + 1


def _levelled(
    held: Sequence[int], amount: int, low: Sequence[int], high: Sequence[int]
) -> list[int]:
    """Splits an amount into shares, within [low, high], that bring `held` to one level.

    Example:
        >>> _levelled([5, 1, 3], 4, [0, 0, 0], [9, 9, 9])
        [0, 3, 1]
    """

    # As the level rises, a share grows from its `low` event to its `high` event.
    begins = [(h + least, 1) for h, least in zip(held, low, strict=True)]
    ends = [(h + greatest, -1) for h, greatest in zip(held, high, strict=True)]
    events = sorted(begins + ends)
    level, growing, left = events[0][0], 0, amount - sum(low)
    for at, more in events:
        if growing * (at - level) > left:
            break
        left -= growing * (at - level)
        level, growing = at, growing + more
    level += left // growing if growing else 0
    shares = [min(max(level - h, a), b) for h, a, b in zip(held, low, high, strict=True)]
    left = amount - sum(shares)
    for i, h in enumerate(held):
        if left > 0 and low[i] <= level - h < high[i]:
            shares[i], left = shares[i] + 1, left - 1
    return shares
