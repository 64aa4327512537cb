"""Which rank computes which documents of a batch: `pack`.

    a to f of 8 4 4 2 2 2 rows, causal       rank 0        rank 1          rank 2       max / mean
    zigzag, packed as they come              a0-3 e1 f     a4-7 d e0       b c          1.48
    pack                                     a1 a2 a6 c    a3 a4 a5 d e    a0 a7 b f    1.02

Attention within documents needs no rows of others, so a document that is whole on a rank is never
sent. Long ones are cut into as few shares as let every rank compute as much as the others; short
ones fill up, whole. One call of `ring_attention` computes them all.

Documents are placed one after another, those with most visible pairs first, each whole where that
leaves the rank within both bounds: pairs, and rows. What does not fit anywhere is shared by the
fewest neighbouring ranks that have room: the rows level the ranks' rows, the pairs their pairs, and
a rank gets a run from the head of what is left and one from its tail, as in zigzag, in the one
proportion that has so many rows and so many pairs:

    queries of a document     0 . . . . . . . . . . . . . . L
    first rank                # #                     # # #     rows and pairs as wanted
    second rank                   # # #         # # #
    last rank                           # # # #                 what is left

If some rank has too many pairs in the end, because rows kept them from ranks that have room, all is
placed again with smaller shares of the long documents, over more ranks.

(Documents with ranks of their own: Flexible Context Parallelism, arXiv 2605.08524, and Dynamic
Context Parallelism, arXiv 2510.10620.)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from ring_attn.check import check_window
from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.values import as_int, as_tuple, check_int
from ring_attn.planning.balance import Balance, check_max_balance

# Shares that a document has of one rank, at most: the next where the balance is not reached.
SHARES = tuple(Fraction(1, n) for n in (1, 2, 4, 8, 16))

# Where documents x ranks are few, every document over all ranks is tried too.
FEW = 1 << 12

# From so many ranks on, a document has as many as the mean asks for: what one more would have to be
# sent is little, and the bound would leave some of them with nothing to do.
MANY = 8

# Documents that are cut only since no rank has room for them, for each rank at most; then others
# are added whole, and what their ranks have too much of makes the placement fail.
MOST_FORCED = 2

# Of what the bounds allow beyond the mean, what a rank may miss to have one run instead of two.
ONE_RUN = Fraction(1, 8)

Window = tuple[int, int]
Run = tuple[int, int]


@dataclass(frozen=True)
class Packing:
    """Documents one after another, and who computes what of them.

    Attributes:
        layout: of the packed sequence, for `ring_attention` and `shard_batch`.
        cu_seqlens: boundaries of the documents in the packed sequence.
        order: the documents in the packed sequence, as numbers of `lengths`.
        balance: visible pairs and rows of every rank.
        crossing: KV rows of other ranks that the queries of each rank see.
        num_cut: documents that several ranks share.
    """

    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    order: tuple[int, ...]
    balance: Balance
    crossing: tuple[int, ...]
    num_cut: int

    def kv_bytes(
        self, nheads_kv: int, headdim: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, ...]:
        """Bytes of the keys and values that each rank receives in a forward, sent once.

        A ring forwards rows, and other strategies send more: `ring_attn.explain` has the bytes of
        each over this layout.
        """
        check_int("nheads_kv", nheads_kv, least=1)
        check_int("headdim", headdim, least=1)
        return tuple(2 * n * nheads_kv * headdim * dtype.itemsize for n in self.crossing)

    def __str__(self) -> str:
        return (
            f"{len(self.order)} documents, {self.layout.seqlen} rows on {self.layout.world_size} "
            f"ranks: {self.num_cut} cut, work {self.balance.of_work:.3f} and rows "
            f"{self.balance.of_rows:.3f} of the mean at most, {sum(self.crossing)} KV rows cross"
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
    """Places the documents of a batch: short ones whole on one rank, long ones over several.

    No rank has more than `max_rows` rows, and none computes more than `max_balance` times the mean,
    wherever the lengths allow that; within these bounds few documents are cut. A function of the
    arguments alone: every rank finds the same.

    Args:
        lengths: rows of each document, zero too.
        world_size: number of ranks.
        causal: as for `ring_attention`.
        window_size: likewise.
        max_balance: the most visible pairs of a rank, over the mean.
        max_rows: the most rows of a rank; None aims at `max_balance` times the mean.
        align: documents are cut at multiples of it, counted from their beginnings.

    Returns:
        The layout, the boundaries and the order of the documents, and the figures.

    Raises:
        ValueError: no documents, numbers out of range, or ranks that cannot hold all rows.
        TypeError: lengths that are no ints.

    Example:
        >>> import torch
        >>> from ring_attn import shard_batch
        >>> packing = pack([300, 9000, 200, 500, 100], world_size=2)
        >>> print(packing)
        5 documents, 10100 rows on 2 ranks: 1 cut, work 1.001 and rows 1.010 of the mean at most, \
6750 KV rows cross
        >>> packing.kv_bytes(nheads_kv=8, headdim=128)
        (18432000, 9216000)
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
    check_int("align", align, least=1)
    check_max_balance(max_balance)
    left, right = check_window(window_size, causal)
    window = left, 0 if causal else right
    most = _most_rows(sum(rows), world_size, max_balance, max_rows)
    found = {n: pairs_before(n, window, n) for n in set(rows)}
    pairs = [found[n] for n in rows]
    bounds = _Bounds.of(sum(pairs), most, world_size, max_balance)
    documents = sorted((i for i, n in enumerate(rows) if n), key=lambda i: (-pairs[i], -rows[i], i))
    shares = (*SHARES, Fraction(0)) if len(rows) * world_size <= FEW else SHARES
    best: _Placement | None = None
    for share in shares:
        placed = _Placement(bounds, window, align, share)
        for index in documents:
            placed.add(index, rows[index], pairs[index])
            if best is not None and placed.excess >= best.excess:
                break  # what is too much stays
        else:
            best = placed
            if best.excess == (0, 0):
                break
    assert best is not None, "there are shares"
    if max_rows is not None and max(best.rows) > most:
        raise ValueError(
            f"max_rows is {most}, and documents that are cut at multiples of {align} were placed "
            f"with {max(best.rows)} rows at most: allow so many, or a smaller align"
        )
    return best.packing(rows)


def pairs_before(length: int, window: Window, row: int) -> int:
    """Visible pairs of the first queries of a document, those before `row`.

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


def _most_rows(total: int, world_size: int, max_balance: float, max_rows: int | None) -> int:
    """The bound on a rank's rows; refuses one that cannot hold all."""
    if max_rows is None:
        return math.ceil(Fraction(max_balance) * total / world_size)
    check_int("max_rows", max_rows, least=0)
    if max_rows * world_size < total:
        ranks = f", or {-(-total // max_rows)} ranks" if max_rows else ""
        raise ValueError(
            f"max_rows is {max_rows}, and {world_size} ranks hold {max_rows * world_size} of "
            f"{total} rows: allow {-(-total // world_size)} rows{ranks}"
        )
    return max_rows


@dataclass(frozen=True)
class _Bounds:
    """The most pairs and rows of a rank, mean pairs, and by how many a share may miss its aim."""

    pairs: int
    rows: int
    mean: Fraction
    miss: int
    world_size: int

    @classmethod
    def of(cls, pairs: int, rows: int, world_size: int, max_balance: float) -> _Bounds:
        mean = Fraction(pairs, world_size)
        most = max(math.floor(Fraction(max_balance) * mean), math.ceil(mean))
        return cls(most, rows, mean, int((most - mean) * ONE_RUN), world_size)


@dataclass(frozen=True)
class _Cut:
    """A document that several ranks share: its number, and the rows of each rank, as runs."""

    index: int
    length: int
    runs: dict[int, list[Run]]


class _Placement:
    """The documents that are placed so far, and what every rank has of them."""

    def __init__(self, bounds: _Bounds, window: Window, align: int, share: Fraction) -> None:
        size = bounds.world_size
        self.bounds, self.window, self.align = bounds, window, align
        # What one rank may have of a document.
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
        """Places a document."""
        ranks, blocks = self.bounds.world_size, -(-rows // self.align)
        most_pairs, most_rows, mean = self._share
        needed = max(_parts(pairs, most_pairs), _parts(rows, most_rows))
        if needed >= MANY:
            needed = max(needed, _parts(pairs, mean))
        if needed <= 1 or min(ranks, blocks) == 1:
            rank = self._rank_for(rows, pairs)
            if rank is None and self.num_forced >= MOST_FORCED * ranks:
                rank = self._rank_for(rows, -sum(self.pairs))
            if rank is None and min(ranks, blocks) == 1:
                rank = self._levels[0][1]
            if rank is not None:
                self._add_whole(rank, index, rows, pairs)
                return
            self.num_forced += 1
        least = max(2, min(needed, ranks, blocks))
        self._add_shared(index, rows, pairs, self._ranks_for(blocks, pairs, least))

    def _level(self, rank: int) -> float:
        """How full a rank is, by what it has more of."""
        return max(
            self.pairs[rank] / max(self.bounds.pairs, 1), self.rows[rank] / max(self.bounds.rows, 1)
        )

    def _rank_for(self, rows: int, pairs: int) -> int | None:
        """The emptiest rank that has room for a whole document."""
        most_pairs, most_rows = self.bounds.pairs - pairs, self.bounds.rows - rows
        for _, rank in self._levels:
            if self.pairs[rank] <= most_pairs and self.rows[rank] <= most_rows:
                return rank
        return None

    def _add_whole(self, rank: int, index: int, rows: int, pairs: int) -> None:
        self.whole[rank].append(index)
        self._fill(rank, rows, pairs)

    def _fill(self, rank: int, rows: int, pairs: int) -> None:
        self._levels.remove((self._level(rank), rank))
        self.pairs[rank] += pairs
        self.rows[rank] += rows
        insort(self._levels, (self._level(rank), rank))

    def _ranks_for(self, blocks: int, pairs: int, least: int) -> list[int]:
        """The fewest ranks with room for a document that is cut: neighbours, if few more do.

        Neighbours lie within a run of 2, 4, 8 ... ranks that begins at a multiple of its length: so
        they share a node wherever a node has room for them.
        """
        size = self.bounds.world_size
        room = [
            (max(0, self.bounds.pairs - self.pairs[r]),
             max(0, self.bounds.rows - self.rows[r]) // self.align) for r in range(size)
        ]  # fmt: skip
        before = [list(accumulate((one[side] for one in room), initial=0)) for side in (0, 1)]
        for count in range(least, min(2 * least, size) + 1):
            run = 1 << (count - 1).bit_length()
            starts = [s for s in range(size - count + 1) if s // run == (s + count - 1) // run]
            rooms = [
                min((sums[s + count] - sums[s]) / amount
                    for sums, amount in zip(before, (pairs, blocks), strict=True)) for s in starts
            ]  # fmt: skip
            if rooms and max(rooms) >= 1:
                start = starts[rooms.index(max(rooms))]
                return list(range(start, start + count))
        emptiest = [rank for _, rank in self._levels]
        sums = [accumulate([room[rank][side] for rank in emptiest]) for side in (0, 1)]
        for count, (free_pairs, free_blocks) in enumerate(zip(*sums, strict=True), 1):
            if count >= least and free_pairs >= pairs and free_blocks >= blocks:
                return sorted(emptiest[:count])
        return list(range(size))

    def _add_shared(self, index: int, rows: int, pairs: int, ranks: list[int]) -> None:
        blocks = -(-rows // self.align)
        blocks_held = [-(-self.rows[r] // self.align) for r in ranks]
        room = [max(0, self.bounds.rows - self.rows[r]) // self.align for r in ranks]
        if sum(room) < blocks:
            room = [blocks] * len(ranks)
        document = _Document(rows, self.window, self.align)
        counts = _levelled(blocks_held, blocks, [0] * len(ranks), room)
        ends = [sorted(document.of_ends(n)) for n in counts]
        low, high = ([end[side] for end in ends] for side in (0, 1))
        aims = _levelled([self.pairs[r] for r in ranks], pairs, low, high)
        runs = document.shared(counts, aims, self.bounds.miss)
        of_rank = {rank: found for rank, found in zip(ranks, runs, strict=True) if found}
        for rank, found in of_rank.items():
            held = sum(stop - start for start, stop in found)
            self._fill(rank, held, sum(document.pairs(*run) for run in found))
        if len(of_rank) == 1:
            self.whole[next(iter(of_rank))].append(index)
        else:
            self.cut.append(_Cut(index, rows, of_rank))

    def packing(self, lengths: Sequence[int]) -> Packing:
        """Documents that are cut come first, then those of rank 0, of rank 1, and so on.

        So the rows of a rank that others may need are the first ones of its shard.
        """
        size = self.bounds.world_size
        parts: list[list[Segment]] = [[] for _ in range(size)]
        crossing = [0] * size
        order: list[int] = []
        start = 0
        for cut in sorted(self.cut, key=lambda cut: (min(cut.runs), cut.index)):
            order.append(cut.index)
            for rank, runs in cut.runs.items():
                parts[rank] += [Segment(start + a, b - a) for a, b in runs]
                crossing[rank] += _rows_seen(runs, cut.length, self.window) - sum(
                    b - a for a, b in runs
                )
            start += cut.length
        for rank, whole in enumerate(self.whole):
            order += sorted(whole)
            rows = sum(lengths[index] for index in whole)
            parts[rank] += [Segment(start, rows)] * (rows > 0)
            start += rows
        order += [index for index, n in enumerate(lengths) if not n]
        boundaries = accumulate((lengths[index] for index in order), initial=0)
        return Packing(
            SequenceLayout.from_segments(parts),
            tuple(boundaries),
            tuple(order),
            Balance(tuple(self.pairs), tuple(self.rows)),
            tuple(crossing),
            len(self.cut),
        )


@dataclass(frozen=True)
class _Document:
    """A document that is cut into blocks of `align` rows, of which the last may be shorter."""

    length: int
    window: Window
    align: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.align)

    def pairs(self, start: int, stop: int) -> int:
        """Visible pairs of the queries in `[start, stop)`."""
        before, upto = (pairs_before(self.length, self.window, row) for row in (start, stop))
        return upto - before

    def run(self, start: int, stop: int) -> Run:
        """Rows of the blocks `[start, stop)`."""
        return min(start * self.align, self.length), min(stop * self.align, self.length)

    def of_ends(self, count: int) -> tuple[int, int]:
        """Pairs of so many blocks at the head, and at the tail."""
        head, tail = self.run(0, count), self.run(self.blocks - count, self.blocks)
        return self.pairs(*head), self.pairs(*tail)

    def shared(self, counts: Sequence[int], aims: Sequence[int], miss: int) -> list[list[Run]]:
        """Runs of each rank, with so many blocks and about so many pairs.

        Ranks that want the most or the fewest pairs for their rows choose first.
        """
        mean = sum(aims) / self.blocks
        ranks = [i for i, count in enumerate(counts) if count]
        ranks.sort(key=lambda i: (-abs(aims[i] / counts[i] - mean), i))
        found: list[list[Run]] = [[] for _ in counts]
        start, stop, wanted = 0, self.blocks, max(1, sum(aims[i] for i in ranks))
        for i in ranks:
            head = counts[i]
            if i != ranks[-1]:
                left = self.pairs(*self.run(start, stop))
                head = self._head(start, stop, head, aims[i] * left // wanted, miss)
            wanted = max(1, wanted - aims[i])
            tail = stop - (counts[i] - head)
            runs = [self.run(start, start + head), self.run(tail, stop)]
            found[i] = [run for run in runs if run[0] < run[1]]
            start, stop = start + head, tail
        return found

    def _head(self, start: int, stop: int, count: int, aim: int, miss: int) -> int:
        """How many of `count` blocks to take from the head of `[start, stop)`, others from its end.

        The more of them, the fewer pairs they have.
        """

        def off(head: int) -> int:
            tail = self.run(stop - (count - head), stop)
            return self.pairs(*self.run(start, start + head)) + self.pairs(*tail) - aim

        for one_run in (count, 0):
            if abs(off(one_run)) <= miss:
                return one_run
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if off(middle) > 0:
                low = middle + 1
            else:
                high = middle
        return min((low, max(0, low - 1)), key=lambda head: abs(off(head)))


def _parts(amount: int, most: int) -> int:
    """Ranks that a document needs; more than there can be where each may have nothing."""
    return -(-amount // most) if most else amount + 1


def _levelled(
    held: Sequence[int], amount: int, low: Sequence[int], high: Sequence[int]
) -> list[int]:
    """Shares of an amount, each within its bounds, that bring what is held to one level.

    Example:
        >>> _levelled([5, 1, 3], 4, [0, 0, 0], [9, 9, 9])
        [0, 3, 1]
    """

    # Every share grows with the level from one event to another.
    events = sorted(
        (h + end, more) for h, ends in zip(held, zip(low, high, strict=True), strict=True)
        for end, more in zip(ends, (1, -1), strict=True)
    )  # fmt: skip
    level, growing, left = events[0][0], 0, amount - sum(low)
    for at, more in events:
        if growing * (at - level) > left:
            break
        left -= growing * (at - level)
        level, growing = at, growing + more
    level += left // growing if growing else 0
    found = [min(max(level - h, a), b) for h, a, b in zip(held, low, high, strict=True)]
    left = amount - sum(found)
    for i, h in enumerate(held):
        if left > 0 and low[i] <= level - h < high[i]:
            found[i], left = found[i] + 1, left - 1
    return found


def _rows_seen(runs: Sequence[Run], length: int, window: Window) -> int:
    """Keys that the queries of some runs, in order, see."""
    left, right = window
    seen = end = 0
    for start, stop in runs:
        first = 0 if left < 0 else max(0, start - left)
        last = length if right < 0 else min(length, stop + right)
        seen += max(0, last - max(first, end))
        end = max(end, last)
    return seen
