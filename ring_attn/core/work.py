r"""The work between all pairs of ranks at once, in closed form: what their plans hold.

`plan_ring` lists one rank's tiles. This counts them for every pair (queries of rank a, keys of rank
b), as tensors, by the same rule: two segments of one stride and a document make one rectangle with
a band, and the pairs, rows and edges of that are arithmetic.

    area   visible pairs                                   k 0 1 2 3 4
    edge   rows that a bound of the band cuts, once        q \ . . . .
           for each bound: blocks there are computed         # \ . . .     area 15, edge 4,
           in part in vain                                   # # \ . .     q rows 0..4,
    q, kv  the rows that see, and are seen by, any           # # # \ .     kv rows 0..4
           row of the other side                             # # # # \ <- not cut
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Displacement, Grid, Traveller, check_fit

# A bound of a band that is none. Small enough that sums of it with positions do not overflow.
UNBOUNDED = 1 << 50

# Pairs of segments computed at a time: what fits in a core's cache, with its intermediate results.
CHUNK = 1 << 16


@dataclass(frozen=True)
class Rows:
    """Runs of local rows, `[start, stop)` for each pair or rank; empty ones are 0, 0."""

    start: Tensor
    stop: Tensor

    @property
    def count(self) -> Tensor:
        """int64 number of rows."""
        return self.count_int32.long()

    @property
    def count_int32(self) -> Tensor:
        """The same in half the memory where the ends are int32."""
        return self.stop - self.start


@dataclass(frozen=True)
class StepWork:
    """What each rank computes in one step.

    Attributes:
        area: (P,) int64 visible pairs.
        edge: (P,) int32 or int64 rows that the mask cuts.
        rows: (P,) likewise rows of the queries that take part.
        cols: (P,) likewise rows of the keys that take part.
    """

    area: Tensor
    edge: Tensor
    rows: Tensor
    cols: Tensor


@dataclass(frozen=True, eq=False)
class PairWork:
    """The work of (queries of rank a) x (keys of rank b) for all a and b.

    Attributes:
        area: (P, P) int64 visible pairs.
        edge: (P, P) int32 rows that the mask cuts.
        q: (P, P) the rows of a that see any of b, one run around them.
        kv: (P, P) the rows of b that any of a sees.
    """

    area: Tensor
    edge: Tensor
    q: Rows
    kv: Rows

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.area.size(0)

    def by_displacement(self, grid: Grid, travels: Traveller = "kv") -> list[StepWork]:
        """What each rank computes when it holds the shard of the rank that is displaced so far.

        Args:
            grid: of the ranks.
            travels: the side that is held.

        Returns:
            For each displacement `(a, b)` at index `a * grid.inner + b`.
        """
        tables = (self.area, self.edge, self.q.count_int32, self.kv.count_int32)
        found = [_turned(x if travels == "kv" else x.t().contiguous(), grid) for x in tables]
        return [StepWork(*(x[by] for x in found)) for by in range(self.world_size)]

    def gathered(self, gathers: Traveller = "kv") -> StepWork:
        """What each rank computes with the shards of all ranks at once."""
        dim = 1 if gathers == "kv" else 0
        tables = (self.area, self.edge, self.q.count_int32, self.kv.count_int32)
        return StepWork(*(x.sum(dim) for x in tables))

    def displacements(self, grid: Grid) -> tuple[Displacement, ...]:
        """`plan.needed_displacements`: by what q ranks are after kv ranks that they see; (0, 0)."""
        needed = torch.zeros(grid.outer, grid.inner, dtype=torch.bool)
        for rank in range(self.world_size):
            needed |= _seen_from(self.area[rank] > 0, rank, grid)
        needed[0, 0] = True
        return tuple(divmod(by, grid.inner) for by in needed.flatten().nonzero().flatten().tolist())

    def travelling(self, travels: Traveller) -> Rows:
        """(P,) of each rank's shard the rows that any other rank needs."""
        side, dim = (self.kv, 0) if travels == "kv" else (self.q, 1)
        unseen = self.area == 0
        unseen.fill_diagonal_(True)
        start = side.start.masked_fill(unseen, torch.iinfo(side.start.dtype).max).amin(dim)
        stop = side.stop.masked_fill(unseen, 0).amax(dim)
        return Rows(torch.where(stop > 0, start, 0).long(), stop.long())


def _seen_from(row: Tensor, rank: int, grid: Grid) -> Tensor:
    """(outer, inner): at (a, b) the entry of the rank that is so far before this one."""
    o, i = divmod(rank, grid.inner)
    return row.view(grid.outer, grid.inner).flip(0, 1).roll((o + 1, i + 1), (0, 1))


def _turned(table: Tensor, grid: Grid) -> Tensor:
    """(P, P) of ranks and sources -> (P, P) of displacements and ranks.

    In blocks of ranks: so that what is written lies together.
    """
    world_size, block = table.size(0), 64
    turned = torch.empty_like(table)
    for begin in range(0, world_size, block):
        ranks = range(begin, min(begin + block, world_size))
        rows = [_seen_from(table[rank], rank, grid).flatten() for rank in ranks]
        turned[:, begin : begin + block] = torch.stack(rows, 1)
    return turned


@lru_cache(maxsize=4)
def pair_work(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> PairWork:
    """The work of all pairs of ranks.

    Args:
        layout_q: where the queries are.
        layout_kv: where the keys are; the same number of ranks and stride.
        mask: over the lengths of the layouts.

    Raises:
        ValueError: layouts and mask that do not fit each other.
        NotImplementedError: layouts whose strides differ.

    Example:
        >>> layout = SequenceLayout.contiguous(8, 2)
        >>> pair_work(layout, layout, Mask(8, 8, causal=True)).area.tolist()
        [[10, 0], [16, 10]]
    """
    check_fit(layout_q, layout_kv, mask)
    total = _Totals(layout_q.world_size)
    sides = _Side.of(layout_q), _Side.of(layout_kv)
    documents = torch.tensor(
        [[d.q_start, d.q_end, d.k_start, d.k_end, d.diagonal] for d in mask.documents],
        dtype=torch.int64,
    )
    if len(documents) == 1:
        _add_whole(total, sides, mask, documents[0])
    else:
        _add_documents(total, sides, mask, documents)
    return total.done()


@dataclass(frozen=True)
class _Side:
    """All segments of a layout: (slots, P) tensors, short ranks padded with segments of no rows."""

    first: Tensor
    start: Tensor
    length: Tensor
    stride: int

    @classmethod
    def of(cls, layout: SequenceLayout) -> _Side:
        world_size = layout.world_size
        found = [layout.segments(rank) for rank in range(world_size)]
        slots = max(1, max(len(segments) for segments in found))
        table = torch.zeros(3, slots, world_size, dtype=torch.int64)
        for rank, segments in enumerate(found):
            first = 0
            for slot, segment in enumerate(segments):
                table[:, slot, rank] = torch.tensor((first, segment.start, segment.length))
                first += segment.length
        return cls(table[0], table[1], table[2], layout.stride)

    def rows_between(self, start: Tensor, stop: Tensor, at: Any) -> tuple[Tensor, ...]:
        """Rows of some segments, counted in each, whose positions lie in `[start, stop)`."""
        begin, length = self.start[at], self.length[at]
        first = _ceil_div(start - begin, self.stride).clamp_(min=0)
        last = torch.minimum(length, _ceil_div(stop - begin, self.stride))
        return first, torch.maximum(first, last)


class _Totals:
    """The tables while tiles are added to them."""

    def __init__(self, world_size: int) -> None:
        shape = (world_size, world_size)
        most = torch.iinfo(torch.int32).max
        self.area = torch.zeros(shape, dtype=torch.int64)
        self.edge = torch.zeros(shape, dtype=torch.int32)
        self.q = Rows(*(torch.full(shape, x, dtype=torch.int32) for x in (most, 0)))
        self.kv = Rows(*(torch.full(shape, x, dtype=torch.int32) for x in (most, 0)))

    def done(self) -> PairWork:
        """Runs that nothing was added to become 0, 0."""
        for rows in (self.q, self.kv):
            rows.start.masked_fill_(rows.stop == 0, 0)
        return PairWork(self.area, self.edge, self.q, self.kv)


@dataclass(frozen=True)
class _Tiles:
    """Rectangles cut to what their bands touch, in rows of segments; empty ones have area 0."""

    area: Tensor
    edge: Tensor
    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor


def _tiles(q: tuple[Tensor, ...], kv: tuple[Tensor, ...], lo: Tensor, hi: Tensor) -> _Tiles:
    """`plan.make_tile` and `Tile.area` for many rectangles, which broadcast."""
    (q0, q1), (k0, k1) = q, kv
    some = (q0 < q1) & (k0 < k1)
    q0, q1 = torch.maximum(q0, k0 - hi), torch.minimum(q1, k1 - lo)
    k1 = torch.minimum(k1, q1 + hi)
    k0 = torch.maximum(k0, q0 + lo)
    some &= (q0 < q1) & (k0 < k1)
    rows, cols = q1 - q0, k1 - k0
    shift = q0 - k0
    hi = torch.minimum(hi + shift, cols - 1)
    lo = torch.maximum(lo + shift, 1 - rows)
    area = _pairs_up_to(rows, cols, hi) - _pairs_up_to(rows, cols, lo - 1)
    edge = torch.minimum(cols - 1 - hi, rows) + torch.minimum(rows - 1 + lo, rows)
    return _Tiles(area.mul_(some), edge.mul_(some), q0, q1, k0, k1)


def _pairs_up_to(rows: Tensor, cols: Tensor, hi: Tensor) -> Tensor:
    """Pairs of rows x cols rectangles with `j - i <= hi`."""

    def below(x: Tensor) -> Tensor:  # sum over t <= x of clip(t, 0, cols)
        x = x.clamp(min=0)
        inside = torch.minimum(x, cols)
        return inside * (inside + 1) // 2 + cols * (x - inside)

    return below(hi + rows) - below(hi)


def _band(
    mask: Mask, q_start: Tensor, kv_start: Tensor, diagonal: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """The mask between two segments as bounds on `j - i`, rows of theirs: `plan._local_band`."""
    gap = q_start + diagonal - kv_start
    lo = (
        torch.full_like(gap, -UNBOUNDED)
        if mask.left is None
        else _ceil_div(gap - mask.left, stride)
    )
    hi = (
        torch.full_like(gap, UNBOUNDED)
        if mask.right is None
        else _floor_div(gap + mask.right, stride)
    )
    return lo, hi


def _add_whole(total: _Totals, sides: tuple[_Side, _Side], mask: Mask, document: Tensor) -> None:
    """One document: every segment of the queries against every one of the keys, as dense tables."""
    q, kv = sides
    world_size = q.start.size(1)
    block = max(1, CHUNK // (4 * world_size))
    for q_slot, kv_slot in product(range(q.start.size(0)), range(kv.start.size(0))):
        for begin in range(0, world_size, block):
            ranks = slice(begin, min(begin + block, world_size))
            whole, cut = _columns((q, kv), (q_slot, kv_slot), ranks, mask, document)
            for columns in _runs(whole):
                _add_block(total, (q, kv), (q_slot, kv_slot), (ranks, columns), None, document)
            for columns in _runs(cut):
                _add_block(total, (q, kv), (q_slot, kv_slot), (ranks, columns), mask, document)


def _columns(
    sides: tuple[_Side, _Side],
    slots: tuple[int, int],
    ranks: slice,
    mask: Mask,
    document: Tensor,
) -> tuple[Tensor, Tensor]:
    """(P,) which ranks' keys all of these queries see whole, and which some of them see in part."""
    (q, kv), (q_slot, kv_slot) = sides, slots
    begin, length = q.start[q_slot, ranks], q.length[q_slot, ranks]
    end = begin + (length - 1) * q.stride
    diagonal = int(document[4])
    # Ranks without rows add nothing, and must not widen the block.
    begin, end = begin[length > 0], end[length > 0]
    first, length_kv = kv.start[kv_slot], kv.length[kv_slot]
    last = first + (length_kv - 1) * kv.stride
    if not len(begin):
        none = torch.zeros_like(first, dtype=torch.bool)
        return none, none
    low, high = int(begin.min()) + diagonal, int(end.max()) + diagonal
    left = UNBOUNDED if mask.left is None else mask.left
    right = UNBOUNDED if mask.right is None else mask.right
    some = (first <= high + right) & (last >= low - left) & (length_kv > 0)
    whole = (last <= low + right) & (first >= high - left)
    return some & whole, some & ~whole


def _runs(chosen: Tensor) -> Iterator[slice]:
    """The runs of True."""
    padded = torch.zeros(len(chosen) + 2, dtype=torch.int8)
    padded[1:-1] = chosen
    steps = padded.diff()
    for start, stop in zip((steps == 1).nonzero(), (steps == -1).nonzero(), strict=True):
        yield slice(int(start), int(stop))


def _add_block(
    total: _Totals,
    sides: tuple[_Side, _Side],
    slots: tuple[int, int],
    block: tuple[slice, slice],
    mask: Mask | None,
    document: Tensor,
) -> None:
    """Adds one segment of some ranks' queries against one of some ranks' keys; no mask is FULL."""
    (q, kv), (ranks, columns) = sides, block
    at_q, at_kv = (slots[0], ranks), (slots[1], columns)
    q_start, q_stop, k_start, k_stop, diagonal = document
    q0, q1 = (x[:, None] for x in q.rows_between(q_start, q_stop, at_q))
    k0, k1 = kv.rows_between(k_start, k_stop, at_kv)
    if mask is None:
        area = (q1 - q0) * (k1 - k0)
        found = _Tiles(area, torch.zeros((), dtype=torch.int64), q0, q1, k0, k1)
    else:
        band = _band(mask, q.start[at_q][:, None], kv.start[at_kv], diagonal, q.stride)
        found = _tiles((q0, q1), (k0, k1), *band)
    total.area[block] += found.area
    total.edge[block] += found.edge.int()
    none = found.area == 0
    most = torch.iinfo(torch.int32).max
    for rows, first, start, stop in (
        (total.q, q.first[at_q][:, None], found.q0, found.q1),
        (total.kv, kv.first[at_kv], found.k0, found.k1),
    ):
        lowest, highest = rows.start[block], rows.stop[block]
        begin = (start + first).int().expand_as(none).masked_fill(none, most)
        end = (stop + first).int().expand_as(none).masked_fill(none, 0)
        torch.minimum(lowest, begin, out=lowest)
        torch.maximum(highest, end, out=highest)


def _add_documents(
    total: _Totals, sides: tuple[_Side, _Side], mask: Mask, documents: Tensor
) -> None:
    """Many documents: only the segments that a document lies in meet each other."""
    q, kv = sides
    q_meets = _overlaps(q, documents[:, 0], documents[:, 1])
    kv_meets = _overlaps(kv, documents[:, 2], documents[:, 3])
    world_size = q.start.size(1)
    for document, at_q, at_kv in _joined(q_meets, kv_meets, len(documents)):
        bounds = documents[document]
        q_rows = q.rows_between(bounds[:, 0], bounds[:, 1], at_q)
        kv_rows = kv.rows_between(bounds[:, 2], bounds[:, 3], at_kv)
        band = _band(mask, q.start[at_q], kv.start[at_kv], bounds[:, 4], q.stride)
        found = _tiles(q_rows, kv_rows, *band)
        keep = found.area > 0
        pair = (at_q[1] * world_size + at_kv[1])[keep]
        total.area.view(-1).index_add_(0, pair, found.area[keep])
        total.edge.view(-1).index_add_(0, pair, found.edge[keep].int())
        for rows, first, start, stop in (
            (total.q, q.first[at_q], found.q0, found.q1),
            (total.kv, kv.first[at_kv], found.k0, found.k1),
        ):
            begin, end = ((x + first)[keep].int() for x in (start, stop))
            rows.start.view(-1).scatter_reduce_(0, pair, begin, "amin")
            rows.stop.view(-1).scatter_reduce_(0, pair, end, "amax")


# (n,) documents, and for each (slot, rank) of a segment that has rows of it.
_Meets = tuple[Tensor, tuple[Tensor, Tensor]]


def _overlaps(side: _Side, starts: Tensor, stops: Tensor) -> _Meets:
    """Documents and the segments that have rows of them, in the order of the documents."""
    begin = side.start.flatten()
    end = begin + (side.length.flatten() - 1) * side.stride + 1
    # Documents follow one another: those that a segment reaches into are a run.
    first = torch.searchsorted(stops.contiguous(), begin, right=True)
    last = torch.searchsorted(starts.contiguous(), end)
    count = (last - first).clamp_(min=0) * (side.length.flatten() > 0)
    segment = torch.repeat_interleave(torch.arange(len(begin)), count)
    offset = torch.arange(len(segment)) - (count.cumsum(0) - count)[segment]
    document = first[segment] + offset
    order = torch.argsort(document, stable=True)
    slot, rank = segment[order] // side.start.size(1), segment[order] % side.start.size(1)
    return document[order], (slot, rank)


def _joined(
    q: _Meets, kv: _Meets, num_documents: int
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Every segment of the queries with every one of the keys in the same document, in chunks."""
    per_document = torch.bincount(kv[0], minlength=num_documents)
    first_kv = per_document.cumsum(0) - per_document
    count = per_document[q[0]]
    ends = count.cumsum(0)
    begin = 0
    while begin < len(count):
        done = int(ends[begin - 1]) if begin else 0
        stop = int(torch.searchsorted(ends, done + CHUNK, right=True))
        stop = max(stop, begin + 1)
        meeting = torch.repeat_interleave(torch.arange(begin, stop), count[begin:stop])
        if len(meeting):
            document = q[0][meeting]
            before = (ends - count)[meeting] - done
            other = first_kv[document] + torch.arange(len(meeting)) - before
            yield document, (q[1][0][meeting], q[1][1][meeting]), (kv[1][0][other], kv[1][1][other])
        begin = stop


def _floor_div(x: Tensor, stride: int) -> Tensor:
    return x if stride == 1 else x.div(stride, rounding_mode="floor")


def _ceil_div(x: Tensor, stride: int) -> Tensor:
    return x.clone() if stride == 1 else -(-x).div(stride, rounding_mode="floor")
