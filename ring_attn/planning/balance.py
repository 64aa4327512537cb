"""Layouts from content: where to cut a sequence so that every rank has as much to do.

    by_area        as many visible pairs on every rank, of any mask
    by_documents   packed documents: the cheapest cuts that keep the work balanced
    by_separators  cuts only after given tokens (ends of sentences, of turns)
    by_cost        any cost per token
    by_memory      shards in proportion to the free memory of their ranks

Each gives `SequenceLayout.boundaries(...)`, the same on every rank, and the ring runs it as it runs
any layout. `balance_of` says how good it is: max / mean of the work, and of the rows.

    causal, 12 rows, 3 ranks        rank 0           rank 1     rank 2         work   max / mean
    equal rows                      0 1 2 3          4 5 6 7    8 9 10 11      10 26 42   1.62
    by_area                         0 1 2 3 4 5 6    7 8 9      10 11          28 27 23   1.08

Equal work is unequal memory: there rank 0 holds 7 of 12 rows. Over a causal mask without documents
`SequenceLayout.zigzag` balances both; boundaries are for what a fixed pattern cannot know.

Work is the keys that each query sees, in exact integers. Cutting it into contiguous parts so that
the greatest is least (the linear partition problem) is solved exactly: a binary search for the
greatest part, each probe a greedy walk of bisections, in
O(seqlen + log(greatest item) * world_size * log(seqlen)).

A cut costs the KV rows that must cross it: rows on one side that a query on the other side sees.
Within a document that is `min(rows before, left) + min(rows after, right)` of the window, and
nothing between documents.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.check import check_cu_seqlens, check_window
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.values import (
    as_int,
    as_tuple,
    check_int,
    check_number,
    check_tensor,
    check_type,
)

# Positions inside documents that `by_documents` considers, beside all ends of documents: all of a
# sequence up to this length, and in longer ones at least 16 for each of 4096 ranks.
MAX_INNER_CUTS = 1 << 16

# How far from its place in equal work `by_documents` looks for a boundary, in ranks' work: with 5 %
# imbalance that excludes nothing up to 160 ranks, and keeps the search short beyond.
MAX_DRIFT = 8

# Above any cost of cuts, and with room to add one.
_NO_WAY = 1 << 62


# -- how good a layout is


@dataclass(frozen=True)
class Balance:
    """Each rank's share of a sequence.

    Attributes:
        work: per rank, visible pairs or summed costs.
        rows: per rank, rows of the shard: its share of the memory.
    """

    work: tuple[float, ...]
    rows: tuple[int, ...]

    @property
    def of_work(self) -> float:
        """max / mean of the work: 1.0 is perfect, `world_size` is all of it on one rank."""
        return _max_over_mean(self.work)

    @property
    def of_rows(self) -> float:
        """max / mean of the rows."""
        return _max_over_mean(self.rows)


def balance_of(layout: SequenceLayout, work: Mask | Tensor | Sequence[float]) -> Balance:
    """Work and rows of every rank, for a layout of any kind.

    Args:
        layout: of the queries.
        work: a mask over as many queries, whose visible pairs are the work; or (seqlen,) costs,
            finite and not negative.

    Example:
        >>> causal = Mask(12, 12, causal=True)
        >>> balance_of(SequenceLayout.contiguous(12, 3), causal).work
        (10, 26, 42)
        >>> balance_of(by_area(causal, 3), causal)
        Balance(work=(28, 27, 23), rows=(7, 3, 2))
    """
    costs = _work("work", work)
    check_type("layout", layout, SequenceLayout)
    _check_length(costs.numel(), layout)
    own = [costs[layout.position_ids(rank)].tolist() for rank in range(layout.world_size)]
    # Floats are rounded once: the order of the rows makes no difference.
    total: Callable[[list[Any]], float] = math.fsum if costs.is_floating_point() else sum
    return Balance(tuple(map(total, own)), layout.shard_lens)


def visible_keys(mask: Mask) -> Tensor:
    """(seqlen_q,) int64: how many keys each query sees, which is what its attention costs.

    Example:
        >>> visible_keys(Mask(5, 5, causal=True, window_size=(2, -1))).tolist()
        [1, 2, 3, 3, 3]
    """
    start, stop = mask.visible_runs(torch.arange(mask.seqlen_q))
    return stop - start


def crossing_rows(mask: Mask) -> Tensor:
    """(seqlen + 1,) int64: KV rows that must cross a cut before each position, either way.

    Queries and keys of the mask must be split alike: equal lengths, the same documents.

    Example:
        >>> crossing_rows(Mask(7, 7, True, (-1, -1), (0, 3, 7), (0, 3, 7))).tolist()
        [0, 1, 2, 0, 1, 2, 3, 0]
    """
    _check_self_attention(mask)
    ends = torch.tensor([0] + [doc.q_end for doc in mask.documents])
    cuts = torch.arange(mask.seqlen_q + 1)
    document = torch.searchsorted(ends, cuts, right=True).clamp(max=len(ends) - 1)
    before, after = cuts - ends[document - 1], ends[document] - cuts
    inside = (before > 0) & (after > 0)
    if mask.left is not None:
        before = before.clamp(max=mask.left)
    if mask.right is not None:
        after = after.clamp(max=mask.right)
    return torch.where(inside, before + after, 0)


# -- layouts


def by_area(mask: Mask, world_size: int, *, align: int = 1) -> SequenceLayout:
    """Boundaries that balance the visible pairs of any mask: no others have a smaller maximum.

    Args:
        mask: of any kind; the layout is of its queries.
        world_size: number of ranks; those beyond the number of rows get none.
        align: every shard begins at a multiple of it, as kernels and `same_bits` like it (128).

    Example:
        >>> print(by_area(Mask(1024, 1024, causal=True), world_size=4, align=128))
        boundaries([0, 512, 768, 896, 1024])
    """
    check_type("mask", mask, Mask)
    _check_counts(world_size=world_size, align=align)
    return _balanced(_sums(visible_keys(mask)), _places(mask.seqlen_q, align), world_size)[0]


def by_cost(cost: Tensor | Sequence[float], world_size: int, *, align: int = 1) -> SequenceLayout:
    """Boundaries that balance a cost per token: no others have a smaller maximum.

    Costs are added up exactly, floating point ones too, so that every rank finds the same cuts.

    Args:
        cost: (seqlen,) finite and not negative, of any integer or floating dtype.
        world_size: number of ranks.
        align: every shard begins at a multiple of it.

    Example:
        >>> by_cost([1.0, 1.0, 1.0, 1.0, 4.0, 0.5], world_size=2).cuts
        (0, 4, 6)
    """
    _check_counts(world_size=world_size, align=align)
    sums = _sums(_checked_costs("cost", cost))
    return _balanced(sums, _places(len(sums) - 1, align), world_size)[0]


def by_separators(
    token_ids: Tensor | Sequence[int],
    separators: Collection[int],
    world_size: int,
    *,
    work: Mask | Tensor | Sequence[float] | None = None,
    max_balance: float | None = None,
) -> SequenceLayout:
    """Boundaries that fall right after separator tokens, of these the best balanced ones.

    Args:
        token_ids: (seqlen,) integers.
        separators: ids after which the sequence may be cut: newline, end of turn, end of text.
        world_size: number of ranks; where there are fewer separators, some get no rows.
        work: what is balanced: a mask's visible pairs, or (seqlen,) costs; None is rows.
        max_balance: refuse max / mean of the work above it; None takes what the separators allow.

    Example:
        >>> by_separators([5, 6, 0, 7, 0, 8, 9, 8, 0, 3], {0}, world_size=3).cuts
        (0, 3, 5, 10)
    """
    _check_counts(world_size=world_size)
    ids = _integers("token_ids", token_ids)
    ends = _integers("separators", as_tuple("separators", separators))
    if not len(ends):
        raise ValueError("separators must hold at least one token id, got none")
    items = torch.ones_like(ids) if work is None else _work("work", work)
    if items.numel() != ids.numel():
        raise ValueError(f"work is over {items.numel()} positions, token_ids over {ids.numel()}")
    after = torch.isin(ids, ends).nonzero().flatten() + 1
    cuts = sorted({0, *after.tolist(), ids.numel()})
    sums = _sums(items)
    layout, greatest = _balanced(sums, cuts, world_size)
    if max_balance is not None:
        _check_max_balance(max_balance)
        reached = greatest * world_size / sums[-1] if sums[-1] else 1.0
        if reached > max_balance:
            raise ValueError(
                f"max_balance is {max_balance}, and of all cuts after separators the best balance "
                f"over {world_size} ranks is {reached:.4g}; allow that, add separators, or use "
                "by_area or by_cost"
            )
    return layout


def by_documents(
    cu_seqlens: Tensor | Sequence[int],
    world_size: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    max_balance: float = 1.05,
    align: int = 1,
) -> SequenceLayout:
    """Boundaries for packed documents: those cuts that cost least, among all that balance the work.

    A rank's visible pairs are at most `max_balance` times the mean; where the lengths do not allow
    that, at most what the best cuts of all reach (then `balance_of` says more than `max_balance`).
    Within that limit the KV rows that cross the cuts are fewest: ends of documents cost nothing,
    and where they alone keep to the limit, the best balanced of them are taken. The minimum is over
    all ends of documents, and `MAX_INNER_CUTS` positions evenly between or all positions.

    Args:
        cu_seqlens: (documents + 1,) boundaries of the documents, from 0 to the length.
        world_size: number of ranks.
        causal, window_size: as for `ring_attention`.
        max_balance: imbalance of the work, as max / mean, that cheaper cuts may bring; 1.0 buys
            none: the work is balanced first, and cuts are chosen among the best balanced.
        align: every shard begins at a multiple of it; ends of documents elsewhere are not used.

    Example:
        >>> by_documents([0, 100, 140, 200], world_size=2, causal=True).cuts
        (0, 86, 200)
        >>> by_documents([0, 100, 140, 200], world_size=2, causal=True, max_balance=1.4).cuts
        (0, 100, 200)
    """
    _check_counts(world_size=world_size, align=align)
    _check_max_balance(max_balance)
    boundaries = check_cu_seqlens("cu_seqlens", _integers("cu_seqlens", cu_seqlens))
    assert boundaries is not None, "only None gives None"
    seqlen = boundaries[-1]
    window = check_window(window_size, causal)
    mask = Mask(seqlen, seqlen, causal, window, boundaries, boundaries)
    if not seqlen:
        return SequenceLayout.boundaries([0] * (world_size + 1))
    sums = torch.nn.functional.pad(visible_keys(mask).cumsum(0), (1, 0))
    anywhere = _places(seqlen, align)
    at_any = sums[torch.tensor(anywhere)].tolist()
    best = _least_maximum(at_any, world_size)
    limit = max(best, math.floor(Fraction(max_balance) * at_any[-1] / world_size))

    ends = torch.tensor(boundaries).unique()
    ends = ends[(ends % align == 0) | (ends == seqlen)]
    at_ends = sums[ends].tolist()
    greatest = _least_maximum(at_ends, world_size)
    if greatest <= limit:
        return SequenceLayout.boundaries(_even_cuts(at_ends, ends.tolist(), world_size, greatest))

    step = align * -(-(len(anywhere) - 1) // MAX_INNER_CUTS)
    balanced = torch.tensor(_even_cuts(at_any, anywhere, world_size, best))
    positions = torch.cat([ends, torch.arange(0, seqlen, step), balanced]).unique()
    costs = crossing_rows(mask)[positions]
    feasible = torch.searchsorted(positions, balanced).tolist()
    chosen = _cheapest_cuts(sums[positions], costs, limit, feasible)
    return SequenceLayout.boundaries(positions[chosen].tolist())


def by_memory(
    seqlen: int, free_bytes: Sequence[int], bytes_per_token: int, *, align: int = 1
) -> SequenceLayout:
    """Shards in proportion to the memory that each rank has free, none longer than fits there.

    In proportion to the row, or to the block of `align` rows. What is left of a last block ends the
    sequence: on the last rank, or on the last before it that has room.

    Args:
        seqlen: positions to place.
        free_bytes: per rank, what a shard may take; the same list on every rank (all-gather it).
        bytes_per_token: what one row takes there, activations and KV of all layers that are held.
        align: every shard begins at a multiple of it.

    Example:
        >>> by_memory(1000, [8 << 30, 8 << 30, 4 << 30], bytes_per_token=1 << 20).shard_lens
        (400, 400, 200)
    """
    _check_counts(bytes_per_token=bytes_per_token, align=align)
    free_bytes = as_tuple("free_bytes", free_bytes)
    _check_counts(0, seqlen=seqlen, **{f"free_bytes[{r}]": b for r, b in enumerate(free_bytes)})
    if not len(free_bytes):
        raise ValueError("free_bytes must name the free memory of at least one rank, got none")
    room = [free // bytes_per_token for free in free_bytes]
    blocks, tail = divmod(seqlen, align)
    last = _rank_of_the_tail(room, blocks, tail, align)
    if last is None:
        aligned = f", {sum(r // align for r in room)} blocks of {align}" if align > 1 else ""
        raise ValueError(
            f"seqlen {seqlen} at {bytes_per_token} bytes a token needs {seqlen * bytes_per_token} "
            f"bytes; the {len(room)} ranks have {sum(free_bytes)} free, room for {sum(room)} "
            f"tokens{aligned}: take more ranks, or fewer bytes a token"
        )
    wanted = [seqlen * free for free in free_bytes[: last + 1]]  # in 1 / sum(free_bytes) rows
    whole = max(sum(free_bytes[: last + 1]), 1)
    wanted[last] -= tail * whole
    space = [r // align for r in room[:last]] + [(room[last] - tail) // align]
    lens = [align * n for n in _apportioned(wanted, align * whole, space, blocks)]
    lens[last] += tail
    lens += [0] * (len(room) - len(lens))
    return SequenceLayout.boundaries(list(accumulate(lens, initial=0)))


# -- how many ranks, and what reaches across their boundaries


class Size(NamedTuple):
    """How many ranks a sequence needs, and the most rows that one of them then holds."""

    world_size: int
    tokens_per_rank: int


def least_world_size(
    seqlen: int, bytes_per_rank: int, bytes_per_token: int, world_size: int
) -> Size:
    """The fewest ranks that hold a sequence in equal shards.

    Args:
        seqlen: positions to place.
        bytes_per_rank: memory that a shard may take on each rank.
        bytes_per_token: what one row takes there.
        world_size: how many ranks there are.

    Example:
        >>> least_world_size(10_000, 8 << 30, 1 << 10, world_size=4)
        Size(world_size=1, tokens_per_rank=10000)
        >>> least_world_size(1_000_000, 80 << 30, 512 << 10, world_size=64)
        Size(world_size=7, tokens_per_rank=142858)
    """
    _check_counts(bytes_per_token=bytes_per_token, world_size=world_size)
    _check_counts(0, seqlen=seqlen, bytes_per_rank=bytes_per_rank)
    room = bytes_per_rank // bytes_per_token
    if seqlen > world_size * room:
        raise ValueError(
            f"seqlen {seqlen} at {bytes_per_token} bytes a token needs {seqlen * bytes_per_token} "
            f"bytes; {world_size} ranks of {bytes_per_rank} bytes hold {room} tokens each, "
            f"{world_size * room} in all"
            + (f": {-(-seqlen // room)} ranks would do" if room else "")
        )
    ranks = max(1, -(-seqlen // room)) if seqlen else 1
    return Size(ranks, -(-seqlen // ranks))


def halo(layout: SequenceLayout, mask: Mask, rank: int) -> tuple[int, int]:
    """KV rows right before and right after its shard that a rank's queries see, on other ranks.

    The overlap of neighbouring chunks: of a window exactly the rows that the plan of the ring has
    travel to this rank, and nothing is computed twice for them.

    Args:
        layout: of queries and keys; each rank holds one run of positions, or none.
        mask: over queries and keys of the layout's length.
        rank: whose halo.

    Example:
        >>> layout = SequenceLayout.contiguous(1000, 4)
        >>> halo(layout, Mask(1000, 1000, causal=True, window_size=(96, -1)), rank=2)
        (96, 0)
    """
    check_type("layout", layout, SequenceLayout)
    check_type("mask", mask, Mask)
    _check_length(mask.seqlen_q, layout)
    _check_length(mask.seqlen_k, layout)
    segments = layout.segments(rank)
    if not segments:
        return 0, 0
    if len(segments) > 1 or segments[0].stride > 1 < segments[0].length:
        raise ValueError(f"halo needs shards that are one run of positions each, got {layout}")
    first, last = segments[0].start, segments[0].start + segments[0].length
    start, stop = mask.visible_runs(segments[0].positions())
    seeing = stop > start
    if not bool(seeing.any()):
        return 0, 0
    return max(0, first - int(start[seeing].min())), max(0, int(stop[seeing].max()) - last)


def check_halo(layout: SequenceLayout, mask: Mask) -> None:
    """Refuses a layout where a rank needs a neighbour's whole shard, or rows beyond it.

    The ring runs without this check, in more hops. It is for users whose neighbours must exchange
    rows with each other alone, in one hop, as an overlap shorter than a chunk promises.
    """
    check_type("layout", layout, SequenceLayout)
    for rank in range(layout.world_size):
        sides = zip(
            halo(layout, mask, rank), (rank - 1, rank + 1), ("before", "after"), strict=True
        )
        for rows, neighbour, side in sides:
            if rows and rows >= layout.shard_len(neighbour):
                raise ValueError(
                    f"the overlap must be shorter than a chunk: rank {rank} needs {rows} rows "
                    f"{side} its shard and rank {neighbour} holds {layout.shard_len(neighbour)}, "
                    f"in {layout}; use a smaller window or fewer ranks"
                )


def local_rows(layout: SequenceLayout, rank: int, start: int, stop: int) -> slice:
    """Where a rank's shard holds the global positions `[start, stop)`, as one run of rows.

    Example:
        >>> local_rows(SequenceLayout.zigzag(16, 2), rank=0, start=13, stop=16)
        slice(5, 8, None)
    """
    check_type("layout", layout, SequenceLayout)
    start, stop = as_int("start", start), as_int("stop", stop)
    if not 0 <= start <= stop <= layout.seqlen:
        raise ValueError(
            f"start and stop must lie within [0, {layout.seqlen}], got [{start}, {stop})"
        )
    positions = layout.position_ids(rank)
    rows = ((positions >= start) & (positions < stop)).nonzero().flatten()
    if rows.numel() < stop - start:
        raise ValueError(
            f"positions [{start}, {stop}) are not local to rank {rank}: it holds {rows.numel()} "
            f"of them in {layout}"
        )
    first = int(rows[0]) if rows.numel() else 0
    if not torch.equal(positions[first : first + rows.numel()], torch.arange(start, stop)):
        raise ValueError(
            f"positions [{start}, {stop}) are not one run of rank {rank}'s rows in {layout}"
        )
    return slice(first, first + rows.numel())


# -- the linear partition


def _places(seqlen: int, align: int) -> list[int]:
    """Positions where a sequence may be cut."""
    return [*range(0, seqlen, align), seqlen]


def _balanced(sums: list[int], cuts: list[int], world_size: int) -> tuple[SequenceLayout, int]:
    """Boundaries at some of the cuts whose greatest part is least, and that part."""
    at_cuts = [sums[cut] for cut in cuts]
    greatest = _least_maximum(at_cuts, world_size)
    return SequenceLayout.boundaries(_even_cuts(at_cuts, cuts, world_size, greatest)), greatest


def _least_maximum(sums: list[int], parts: int) -> int:
    """The least value that the greatest of so many contiguous parts can have."""
    total = sums[-1]
    greatest_item = max(map(sub, sums[1:], sums), default=0)
    # A part that is filled until the next item would pass the mean exceeds it by less than an item.
    low = max(greatest_item, -(-total // parts))
    high = -(-total // parts) + greatest_item
    while low < high:
        middle = (low + high) // 2
        if _suffice(sums, parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _suffice(sums: list[int], parts: int, limit: int) -> bool:
    """Whether so many parts, each at most `limit`, hold everything."""
    cut, end = 0, len(sums) - 1
    for _ in range(parts):
        cut = bisect_right(sums, sums[cut] + limit, cut) - 1
        if cut == end:
            return True
    return False


def _even_cuts(sums: list[int], positions: list[int], parts: int, limit: int) -> list[int]:
    """`parts + 1` of the positions with no part above `limit`, each as near to equal parts as can.

    `sums` is the work before each position. The greedy walk would fill the first ranks to the limit
    and leave the last ones with nothing.
    """
    earliest = _earliest_cuts(sums, parts, limit)
    chosen = [0]
    for part in range(1, parts):
        done, left = chosen[-1], parts - part + 1
        low = max(earliest[part], done)
        high = bisect_right(sums, sums[done] + limit, low) - 1
        target = sums[done] + (sums[-1] - sums[done]) // left
        cut = bisect_left(sums, target, low, high)
        if cut > low and target - sums[cut - 1] < sums[cut] - target:
            cut -= 1
        # Rows without work cost memory all the same: share these by their number.
        first = bisect_left(sums, sums[cut], low, high)
        last = bisect_right(sums, sums[cut], low, high + 1) - 1
        middle = positions[done] + (positions[-1] - positions[done]) // left
        chosen.append(bisect_left(positions, middle, first, last))
    return [positions[cut] for cut in [*chosen, len(sums) - 1]]


def _earliest_cuts(sums: list[int], parts: int, limit: int) -> list[int]:
    """For each cut, the first index from which the parts after it can hold the rest."""
    cuts = [len(sums) - 1]
    for _ in range(parts):
        cuts.append(bisect_left(sums, sums[cuts[-1]] - limit, 0, cuts[-1]))
    return cuts[::-1]


# -- the cheapest cuts within a limit


def _cheapest_cuts(sums: Tensor, costs: Tensor, limit: int, feasible: list[int]) -> list[int]:
    """Indices of cuts that cost least in all, with no part above `limit`; then nearest to equal.

    Dynamic programming over the cuts: the cost up to cut r at x is that of x and the least up to
    cut r - 1 at any y <= x from which the part [y, x) is within the limit: a minimum over a range.
    `sums` is the work before each candidate, `costs` the rows that cross a cut there, and
    `feasible` are cuts within the limit, which bound the search.
    """
    parts = len(feasible) - 1
    mean = int(sums[-1]) / parts
    # One integer orders by cost, then by distance from equal parts: all distances of a choice
    # together stay below one row of cost.
    finest = ((_NO_WAY >> 1) // (parts * (int(costs.max()) + 1)) - 1) // parts
    finest = max(0, min(finest, 1024 * MAX_DRIFT))
    row = parts * finest + 1
    first = torch.searchsorted(sums, sums - limit)
    windows = _windows(sums.tolist(), limit, feasible)
    minima = _RangeMinima(first)
    least = [torch.zeros(1, dtype=torch.int64)]
    for part in range(1, parts + 1):
        low, high = windows[part]
        distance = (sums[low : high + 1] - part * mean).abs() * (1024 / mean)
        key = costs[low : high + 1] * row + distance.long().clamp(max=finest)
        before = minima(least[-1], windows[part - 1][0], low, high)
        least.append((before + key).clamp(max=_NO_WAY))

    chosen = [windows[parts][0]]
    for part in range(parts - 1, -1, -1):
        low, high = windows[part]
        begin, end = max(low, int(first[chosen[-1]])), min(high, chosen[-1]) + 1
        chosen.append(begin + int(least[part][begin - low : end - low].argmin()))
    return chosen[::-1]


def _windows(sums: list[int], limit: int, feasible: list[int]) -> list[tuple[int, int]]:
    """For each cut, first and last index where it may be: reached from both ends, and near."""
    parts, end = len(feasible) - 1, len(sums) - 1
    earliest = _earliest_cuts(sums, parts, limit)
    windows, latest = [(0, 0)], 0
    for part in range(1, parts):
        latest = bisect_right(sums, sums[latest] + limit, latest) - 1
        near = bisect_left(sums, (part - MAX_DRIFT) * sums[-1] // parts)
        far = bisect_right(sums, (part + MAX_DRIFT) * sums[-1] // parts) - 1
        low = max(earliest[part], min(near, feasible[part]))
        windows.append((low, min(latest, max(far, feasible[part]))))
    return [*windows, (end, end)]


class _RangeMinima:
    """Minima of values over `[first[x], x]`, for many x at a time.

    From minima of all runs of 1, 2, 4, ... values: two runs that overlap cover any range.
    """

    def __init__(self, first: Tensor) -> None:
        last = torch.arange(first.numel())
        self.level = torch.frexp((last - first + 1).double()).exponent.long() - 1
        self.left = first
        self.right = last + 1 - (1 << self.level)

    def __call__(self, values: Tensor, start: int, low: int, high: int) -> Tensor:
        """For x in `[low, high]`; `values[0]` is at `start`, and all others are `_NO_WAY`."""
        base, level = int(self.left[low]), self.level[low : high + 1]
        tables = values.new_full((int(level.max()) + 1, high + 1 - base), _NO_WAY)
        begin, end = max(base, start), min(high + 1, start + values.numel())
        tables[0, begin - base : end - base] = values[begin - start : end - start]
        for n in range(1, len(tables)):
            half = 1 << (n - 1)
            torch.minimum(tables[n - 1, :-half], tables[n - 1, half:], out=tables[n, :-half])
        left, right = (at[low : high + 1] - base for at in (self.left, self.right))
        return torch.minimum(tables[level, left], tables[level, right])


# -- memory


def _rank_of_the_tail(room: list[int], blocks: int, tail: int, align: int) -> int | None:
    """The last rank that takes rows, which has the block that is not whole; None if none can."""
    whole = list(accumulate((rows // align for rows in room), initial=0))
    for rank in range(len(room) - 1, -1, -1):
        if room[rank] >= tail and whole[rank] + (room[rank] - tail) // align >= blocks:
            return rank
    return None


def _apportioned(wanted: list[int], unit: int, space: list[int], blocks: int) -> list[int]:
    """Blocks per rank, as near to `wanted / unit` as `space` allows: largest remainders first."""
    given = [min(space[r], max(0, want // unit)) for r, want in enumerate(wanted)]
    missing = [(given[r] * unit - want, r) for r, want in enumerate(wanted) if given[r] < space[r]]
    heapify(missing)
    for _ in range(blocks - sum(given)):
        _, rank = heappop(missing)
        given[rank] += 1
        if given[rank] < space[rank]:
            heappush(missing, (given[rank] * unit - wanted[rank], rank))
    return given


# -- numbers


def _sums(costs: Tensor) -> list[int]:
    """What lies before each position, exactly, in some unit: one longer than the (n,) costs.

    A float is an integer of 53 bits times a power of two: the least one here is the unit.
    """
    if not costs.is_floating_point():
        return list(accumulate(costs.tolist(), initial=0))
    mantissa, exponent = torch.frexp(costs)
    least = int(exponent[costs > 0].min()) if bool((costs > 0).any()) else 0
    integers = (mantissa * 2.0**53).long().tolist()
    shifts = (exponent - least).clamp(min=0).tolist()
    return list(accumulate((m << e for m, e in zip(integers, shifts, strict=True)), initial=0))


def _max_over_mean(shares: Sequence[float]) -> float:
    total = math.fsum(shares)
    return max(shares) * len(shares) / total if total else 1.0


# -- checks


def _work(name: str, work: Mask | Tensor | Sequence[float]) -> Tensor:
    return visible_keys(work) if isinstance(work, Mask) else _checked_costs(name, work)


def _check_counts(least: int = 1, **counts: int) -> None:
    for name, count in counts.items():
        check_int(name, count, least=least)


def _check_max_balance(max_balance: float) -> None:
    check_number("max_balance", max_balance)
    if not (math.isfinite(max_balance) and max_balance >= 1):
        raise ValueError(f"max_balance is max / mean, finite and at least 1, got {max_balance}")


def _check_length(length: int, layout: SequenceLayout) -> None:
    if length != layout.seqlen:
        raise ValueError(
            f"mask or costs are over {length} positions, the layout over {layout.seqlen}"
        )


def _check_self_attention(mask: Mask) -> None:
    if mask.seqlen_q != mask.seqlen_k or any(
        (doc.q_start, doc.q_end) != (doc.k_start, doc.k_end) for doc in mask.documents
    ):
        raise ValueError(
            "cuts cross rows where queries and keys are split alike: the mask must have one length "
            f"and the same documents on both sides, got {mask.seqlen_q} queries and "
            f"{mask.seqlen_k} keys"
        )


def _integers(name: str, values: Tensor | Sequence[int]) -> Tensor:
    """(n,) int64 on the host."""
    if not isinstance(values, Tensor):
        numbers = [as_int(f"each of {name}", value) for value in as_tuple(name, values)]
        values = torch.tensor(numbers, dtype=torch.int64)
    check_tensor(name, values)
    if values.dtype == torch.bool or values.is_floating_point() or values.is_complex():
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(values.shape)}")
    return values.to("cpu", torch.int64)


def _checked_costs(name: str, cost: Tensor | Sequence[float]) -> Tensor:
    """(seqlen,) int64 or float64 on the host, finite and not negative."""
    if not isinstance(cost, Tensor):
        cost = as_tuple(name, cost)
        for value in cost:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be real numbers, got a {type(value).__name__}")
        whole = all(isinstance(value, int) for value in cost)
        cost = torch.tensor(cost, dtype=torch.int64 if whole else torch.float64)
    check_tensor(name, cost)
    if cost.is_complex() or cost.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers, got {cost.dtype}")
    if cost.ndim != 1:
        raise ValueError(f"{name} must be 1-D, one for each token, got shape {tuple(cost.shape)}")
    cost = cost.detach().to("cpu", torch.float64 if cost.is_floating_point() else torch.int64)
    wrong = ~(cost.isfinite() & (cost >= 0))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} must be finite and not negative, got {cost[index].item()} at {index}"
        )
    return cost
