r"""The work between all pairs of ranks at once, in closed form: the sizes of their tiles.

`tiles.pair_tiles` lists the tiles of one pair of ranks. This module counts the tiles of all pairs
(queries of rank a, keys of rank b) as tensors, by the same rule: two segments of one stride and a
slice of the mask make one rectangle with a band, whose pairs, rows and edges are arithmetic.

    area   visible pairs                                   k 0 1 2 3 4
    edge   rows that a bound of the band cuts, counted     q \ . . . .
           once for each bound: kernels compute              # \ . . .     area 15, edge 4,
           partly masked blocks there                        # # \ . .     q rows 0..4,
    q, kv  the rows that see, or are seen by, any            # # # \ .     kv rows 0..4
           row of the other side                             # # # # \ <- not cut
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.core.host import on_host
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.segments import pairs_up_to
from ring_attn.core.tiles import Displacement, Grid, Side, Sizes, check_fit, ring_grid

# Stands for "no row" under a minimum: larger than any row.
NO_ROW = torch.iinfo(torch.int32).max

# An index of (P, P) tables: slices of ranks, tensors of ranks, or `...`. The type of
# indices is private to torch.
Pairs = Any

# Pairs computed at a time: with all intermediate results they fit into a CPU core's cache, and are
# so few that torch computes them in one thread.
CHUNK = 1 << 15

# Tables of up to SMALL ranks (7 MB each) are kept while a plan comes back to them; of more ranks, a
# plan keeps few tables, and computes single lines without a table.
SMALL = 512


@dataclass(frozen=True)
class Rows:
    """Runs of local rows, `[start, stop)` for each pair or rank; empty runs are 0, 0."""

    start: Tensor
    stop: Tensor

    @property
    def count(self) -> Tensor:
        """Number of rows, int64."""
        return (self.stop - self.start).long()


class Work(NamedTuple):
    """Sizes of tiles, as `Sizes` has them, of many ranks or pairs: tensors of one shape."""

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
        q: (P, P) the run around all rows of a that see a row of b.
        kv: (P, P) the run around all rows of b that a row of a sees.
    """

    area: Tensor
    edge: Tensor
    q: Rows
    kv: Rows

    def at(self, pairs: Pairs) -> Work:
        """The work of some pairs; `pairs` indexes (P, P) tables."""
        q, kv = (rows.stop[pairs] - rows.start[pairs] for rows in (self.q, self.kv))
        return Work(self.area[pairs], self.edge[pairs], q, kv)


def _blocks(world_size: int, chunks: int = 1) -> Iterator[slice]:
    """Blocks of ranks, whose rows of a (P, P) table are about so many chunks."""
    size = max(1, chunks * CHUNK // world_size)
    for begin in range(0, world_size, size):
        yield slice(begin, min(begin + size, world_size))


def _owners(grid: Grid, ranks: slice) -> Tensor:
    """(n, P) int64 owner of the shard that each of n ranks holds at each displacement."""
    rank = torch.arange(ranks.start, ranks.stop)[:, None, None]
    outer = (rank // grid.inner - torch.arange(grid.outer)[:, None]) % grid.outer
    inner = (rank % grid.inner - torch.arange(grid.inner)) % grid.inner
    return (outer * grid.inner + inner).flatten(1)


def pair_work(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> PairWork:
    """The work of all pairs of ranks."""
    check_fit(layout_q, layout_kv, mask)
    table = _small_table if layout_q.world_size <= SMALL else _large_table
    return table(layout_q, layout_kv, mask)


@on_host()
def compute_pair_work(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> PairWork:
    """Return the work of all pairs of ranks, without a cache; see `pair_work`."""
    return _work_between(
        _SegmentTable.of(layout_q), _SegmentTable.of(layout_kv, by_position=True), mask
    )


_small_table = lru_cache(maxsize=32)(compute_pair_work)
_large_table = lru_cache(maxsize=4)(compute_pair_work)


def _work_between(q: _SegmentTable, kv: _SegmentTable, mask: Mask) -> PairWork:
    shape = q.num_ranks, kv.num_ranks
    area = torch.zeros(shape, dtype=torch.int64)
    edge, *ends = (torch.zeros(shape, dtype=torch.int32) for _ in range(5))
    for table in mask.tables:
        pieces, columns = _pieces(q, table)
        for pair, tiles in _tiles_of_pieces(pieces, kv, columns, *_seen(pieces, kv, columns)):
            area.view(-1).index_add_(0, pair, tiles.area)
            edge.view(-1).index_add_(0, pair, tiles.edge.int())
            for table_of_ends, of_tiles in zip(ends, tiles.ends, strict=True):
                table_of_ends.view(-1).scatter_reduce_(0, pair, of_tiles, "amax")
    q0, q1, k0, k1 = ends
    for start, stop in ((q0, q1), (k0, k1)):
        torch.sub(NO_ROW, start, out=start).mul_(stop > 0)
    return PairWork(area, edge, Rows(q0, q1), Rows(k0, k1))


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over the other side's ranks: lines of the table of all pairs, added up.

    Attributes:
        seen: (P, P) whether any query of rank a sees a key of rank b.
        work: by the side that is gathered, the work of each rank with all shards of that side.
        num_seen: by side, (P,) number of its shards that each rank sees, or that see its keys.
        moving: by side, (P,) the run around all rows of a shard that another rank needs.
    """

    seen: Tensor
    work: dict[Side, Work]
    num_seen: dict[Side, Tensor]
    moving: dict[Side, Rows]


@lru_cache(maxsize=64)
@on_host()
def totals(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> Totals:
    """The sums of the table of all pairs, which for many ranks is made in blocks and not kept."""
    check_fit(layout_q, layout_kv, mask)
    each_q: list[tuple[Tensor, ...]] = []
    sums, starts, stops = [], [], []
    for ranks, block in _table_blocks(layout_q, layout_kv, mask):
        seen = block.area > 0
        needed = seen.clone()
        needed.diagonal(ranks.start).fill_(False)
        tables = *block.at(...), seen
        q_start, kv_start = (
            rows.start.where(needed, NO_ROW).amin(dim)
            for rows, dim in ((block.q, 1), (block.kv, 0))
        )
        q_stop, kv_stop = (
            rows.stop.where(needed, 0).amax(dim) for rows, dim in ((block.q, 1), (block.kv, 0))
        )
        each_q.append((seen, q_start, q_stop, *(table.sum(1) for table in tables)))
        sums.append(torch.stack([table.sum(0) for table in tables]))
        starts.append(kv_start)
        stops.append(kv_stop)
    seen, q_start, q_stop, *of_q = map(torch.cat, zip(*each_q, strict=True))
    of_kv = [*torch.stack(sums).sum(0)]
    kv_start, kv_stop = torch.stack(starts).amin(0), torch.stack(stops).amax(0)
    return Totals(
        seen,
        {"kv": Work(*of_q[:4]), "q": Work(*of_kv[:4])},
        {"kv": of_q[4], "q": of_kv[4]},
        {"kv": _run(kv_start, kv_stop), "q": _run(q_start, q_stop)},
    )


def _run(start: Tensor, stop: Tensor) -> Rows:
    return Rows(torch.where(stop > 0, start, 0).long(), stop.long())


def _table_blocks(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask
) -> Iterator[tuple[slice, PairWork]]:
    """Blocks of ranks of the queries with their lines of the table of all pairs."""
    if layout_q.world_size <= SMALL:
        yield slice(0, layout_q.world_size), pair_work(layout_q, layout_kv, mask)
        return
    q, kv = _SegmentTable.of(layout_q), _SegmentTable.of(layout_kv, by_position=True)
    for ranks in _blocks(layout_q.world_size, 8):
        yield ranks, _work_between(q.among(ranks), kv, mask)


@lru_cache(maxsize=1024)
@on_host()
def needed_displacements(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, inner_degree: int = 1
) -> tuple[Displacement, ...]:
    """All displacements from a KV owner to a rank that attends to it, and (0, 0); sorted."""
    grid = ring_grid(layout_q.world_size, inner_degree)
    seen = totals(layout_q, layout_kv, mask).seen
    needed = torch.zeros(len(seen), dtype=torch.bool)
    needed[0] = True
    # The last ranks first: under a causal mask they see most.
    for ranks in reversed(list(_blocks(len(seen)))):
        needed |= seen[ranks].gather(1, _owners(grid, ranks)).any(0)
        if needed.all():
            break
    return tuple(divmod(by, grid.inner) for by in needed.nonzero().flatten().tolist())


@lru_cache(maxsize=64)
def sent_runs(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, sent_side: Side
) -> list[slice]:
    """The run around all rows of each rank's shard that another rank needs."""
    rows = totals(layout_q, layout_kv, mask).moving[sent_side]
    bounds = zip(rows.start.tolist(), rows.stop.tolist(), strict=True)
    return [slice(start, stop) for start, stop in bounds]


@lru_cache(maxsize=1024)
@on_host()
def sizes_with(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, rank: int, sent_side: Side
) -> list[Sizes]:
    """Sizes of the tiles between a rank's shard and each rank's shard of the side that is sent."""
    check_fit(layout_q, layout_kv, mask)
    has_queries = sent_side == "kv"  # the rank's own shard; the other shards have the keys
    if layout_q.world_size <= SMALL:
        table = pair_work(layout_q, layout_kv, mask)
        work = table.at((rank, slice(None)) if has_queries else (slice(None), rank))
    else:
        q, kv = _SegmentTable.of(layout_q), _SegmentTable.of(layout_kv, by_position=True)
        own = slice(rank, rank + 1)
        if has_queries:
            q = q.among(own)
        else:
            kv = kv.among(own)
        work = Work(*(x.flatten() for x in _work_between(q, kv, mask).at(...)))
    columns = [column.tolist() for column in work]
    return [Sizes(*sizes) for sizes in zip(*columns, strict=True)]


@dataclass(frozen=True)
class _SegmentTable:
    """Segments of a layout, or pieces of them: rank, first row in its shard, and positions."""

    num_ranks: int
    stride: int
    rank: Tensor
    first: Tensor
    start: Tensor
    length: Tensor

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: SequenceLayout, *, by_position: bool = False) -> _SegmentTable:
        """All segments, in the order of the ranks or of their positions."""
        rows = []
        for rank in range(layout.world_size):
            first = 0
            for segment in layout.segments(rank):
                rows.append((rank, first, segment.start, segment.length))
                first += segment.length
        if by_position:
            rows.sort(key=lambda row: row[2])
        columns = torch.tensor(rows, dtype=torch.int64).view(-1, 4).t().contiguous()
        return cls(layout.world_size, layout.stride, *columns)

    def among(self, ranks: slice) -> _SegmentTable:
        """The segments of some ranks, which count from 0."""
        some = self.chosen((self.rank >= ranks.start) & (self.rank < ranks.stop))
        return replace(some, num_ranks=ranks.stop - ranks.start, rank=some.rank - ranks.start)

    def chosen(self, here: Tensor) -> _SegmentTable:
        columns = (self.rank, self.first, self.start, self.length)
        return _SegmentTable(self.num_ranks, self.stride, *(x[here] for x in columns))

    @property
    def end(self) -> Tensor:
        return self.start + (self.length - 1) * self.stride + 1

    def rows_between(self, index: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Rows within each indexed segment whose positions lie in `[start, stop)`."""
        begin, length = self.start[index], self.length[index]
        first = _ceil_div(start - begin, self.stride).clamp_(min=0)
        last = torch.minimum(length, _ceil_div(stop - begin, self.stride))
        return first, torch.maximum(first, last)


class _Tiles(NamedTuple):
    """Many tiles `[q0, q1) x [k0, k1)`, in rows of segments or shards; area 0 if empty."""

    area: Tensor
    edge: Tensor
    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor

    def moved(self, q: Tensor, kv: Tensor) -> _Tiles:
        return _Tiles(*self[:2], self.q0 + q, self.q1 + q, self.k0 + kv, self.k1 + kv)

    @property
    def ends(self) -> tuple[Tensor, ...]:
        """Ends of the runs of rows, as numbers whose maximum over tiles surrounds all of them."""
        return NO_ROW - self.q0.int(), self.q1.int(), NO_ROW - self.k0.int(), self.k1.int()


def _tiles(q: tuple[Tensor, ...], kv: tuple[Tensor, ...], lo: Tensor, hi: Tensor) -> _Tiles:
    """`Tile.trimmed` and `Tile.area` for many rectangles."""
    (q0, q1), (k0, k1) = q, kv
    q0, q1 = torch.maximum(q0, k0 - hi), torch.minimum(q1, k1 - lo)
    k1 = torch.minimum(k1, q1 + hi)
    k0 = torch.maximum(k0, q0 + lo)
    exists = (q0 < q1) & (k0 < k1)
    rows, cols = q1 - q0, k1 - k0
    shift = q0 - k0
    hi = torch.minimum(hi + shift, cols - 1)
    lo = torch.maximum(lo + shift, 1 - rows)
    area = rows * cols
    cut = ((hi < cols - 1) | (lo > 1 - rows)).nonzero().flatten()  # few of many ranks' tiles
    sizes = rows[cut], cols[cut]
    area[cut] = pairs_up_to(*sizes, hi[cut]) - pairs_up_to(*sizes, lo[cut] - 1)
    edge = torch.minimum(cols - 1 - hi, rows) + torch.minimum(rows - 1 + lo, rows)
    return _Tiles(area * exists, edge, q0, q1, k0, k1)


def _seen(pieces: _SegmentTable, kv: _SegmentTable, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The run of segments that any query of a piece may see, for each piece."""
    k_start, k_stop, lo, hi = columns
    last = pieces.start + (pieces.length - 1) * pieces.stride
    reach = kv.end.cummax(0).values if len(kv.end) else kv.end
    seen = torch.searchsorted(reach, torch.maximum(k_start, pieces.start + lo), right=True)
    return seen, torch.searchsorted(kv.start, torch.minimum(k_stop, last + hi + 1))


def _tiles_of_pieces(
    pieces: _SegmentTable, kv: _SegmentTable, columns: Tensor, begin: Tensor, end: Tensor
) -> Iterator[tuple[Tensor, _Tiles]]:
    """Yields pairs of ranks, and tiles, of pieces with their runs of segments `[begin, end)`."""
    k_start, k_stop, lo, hi = columns
    # A piece sees [full_from, full_to) of its run entirely: most of it, where ranks are many.
    full_from = full_to = end
    if kv.stride == 1:
        last = pieces.start + pieces.length - 1
        full_from = torch.searchsorted(kv.start, torch.maximum(k_start, last + lo))
        full_to = torch.searchsorted(
            kv.end, torch.minimum(k_stop, pieces.start + hi + 1), right=True
        )
        full_from = full_from.clamp(begin, end)
        full_to = full_to.clamp(full_from, end)
    for piece, at in _expanded(full_from, full_to):
        rows, cols, q0, k0 = pieces.length[piece], kv.length[at], pieces.first[piece], kv.first[at]
        uncut = torch.zeros(1, dtype=torch.int32).expand_as(rows)
        tiles = _Tiles(rows * cols, uncut, q0, q0 + rows, k0, k0 + cols)
        yield pieces.rank[piece] * kv.num_ranks + kv.rank[at], tiles
    for index, at in _expanded(torch.cat((begin, full_to)), torch.cat((full_from, end))):
        piece = index % len(begin)
        length, gap = pieces.length[piece], pieces.start[piece] - kv.start[at]
        kv_rows = kv.rows_between(at, k_start[piece], k_stop[piece])
        # Bounds on `j - i` in rows of segments whose starts are `gap` positions apart.
        band = _ceil_div(gap + lo[piece], kv.stride), _floor_div(gap + hi[piece], kv.stride)
        tiles = _tiles((torch.zeros_like(length), length), kv_rows, *band)
        pair = pieces.rank[piece] * kv.num_ranks + kv.rank[at]
        tiles = tiles.moved(pieces.first[piece], kv.first[at])
        seen = tiles.area > 0
        if not bool(seen.all()):
            pair, tiles = pair[seen], _Tiles(*(x[seen] for x in tiles))
        yield pair, tiles


@lru_cache(maxsize=64)
@on_host()
def needed_rows(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, sent_side: Side
) -> Tensor:
    """(P, P) int32 rows of one side that each pair of different ranks [q rank, kv rank] needs.

    Only rows that see, or are seen, count; the runs of `PairWork` also hold the rows in between.
    """
    check_fit(layout_q, layout_kv, mask)
    one_each = all(
        len(layout.segments(rank)) <= 1
        for layout in (layout_q, layout_kv)
        for rank in range(layout.world_size)
    )
    if one_each and len(mask.slices) <= 1:
        # A pair has at most one tile, so its runs hold no other rows.
        work = pair_work(layout_q, layout_kv, mask)
        run = work.kv if sent_side == "kv" else work.q
        return (run.stop - run.start).fill_diagonal_(0)
    q, kv = _SegmentTable.of(layout_q), _SegmentTable.of(layout_kv, by_position=True)
    world_size = q.num_ranks
    # Row r of pair p has the number p * room + r, so that all pairs are counted at once.
    room = 1 + max(*layout_q.shard_lens, *layout_kv.shard_lens)
    cut = [_pieces(q, table) for table in mask.tables]
    counts = torch.zeros(world_size * world_size, dtype=torch.int64)
    for ranks in _blocks(world_size):
        runs = [torch.empty(2, 0, dtype=torch.int64)]
        for pieces, columns in cut:
            here = (pieces.rank >= ranks.start) & (pieces.rank < ranks.stop)
            some, columns = pieces.chosen(here), columns[:, here]
            begin, end = _seen(some, kv, columns)
            for pair, tiles in _tiles_of_pieces(some, kv, columns, begin, end):
                side = (tiles.k0, tiles.k1) if sent_side == "kv" else (tiles.q0, tiles.q1)
                runs.append(torch.stack(side) + pair * room)
        start, new_rows = _new_rows(torch.cat(runs, 1))
        counts.index_add_(0, start // room, new_rows)
    return counts.view(world_size, world_size).int().fill_diagonal_(0)


def _new_rows(runs: Tensor) -> tuple[Tensor, Tensor]:
    """Sort (2, n) runs by their starts; return the starts, and the rows that only each run adds."""
    start, order = runs[0].sort()
    stop = runs[1][order]
    reached = stop.cummax(0).values if len(stop) else stop
    before = torch.cat((start[:1], reached[:-1]))
    return start, (reached - torch.maximum(start, before)).clamp_(min=0)


def _pieces(q: _SegmentTable, table: Tensor) -> tuple[_SegmentTable, Tensor]:
    """The queries' segments cut where slices of a layer end, and (4, n) keys and band of each."""
    # The slices of a layer are sorted by queries: a segment touches a run of slices.
    first = torch.searchsorted(table[1], q.start, right=True)
    last = torch.searchsorted(table[0], q.end)
    parts = [torch.empty(8, 0, dtype=torch.int64)]
    for segment, index in _expanded(first, last):
        q_start, q_stop, *keys_and_band = table[:, index]
        start, stop = q.rows_between(segment, q_start, q_stop)
        first_row = q.first[segment] + start
        position = q.start[segment] + start * q.stride
        piece = (q.rank[segment], first_row, position, stop - start)
        parts.append(torch.stack((*piece, *keys_and_band))[:, start < stop])
    columns = torch.cat(parts, 1)
    return _SegmentTable(q.num_ranks, q.stride, *columns[:4]), columns[4:]


def _expanded(begin: Tensor, end: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (number of its run, index) for all indices in many runs `[begin, end)`, in chunks."""
    count = (end - begin).clamp_(min=0)
    before = count.cumsum(0) - count
    sizes = (before // CHUNK).unique_consecutive(return_counts=True)[1].tolist()
    for run in torch.arange(len(count)).split(sizes):
        owner = torch.repeat_interleave(run, count[run])
        yield owner, torch.arange(len(owner)) + (begin - before)[owner] + before[run[0]]


def _floor_div(x: Tensor, stride: int) -> Tensor:
    return x if stride == 1 else x.div(stride, rounding_mode="floor")


def _ceil_div(x: Tensor, stride: int) -> Tensor:
    return x.clone() if stride == 1 else -(-x).div(stride, rounding_mode="floor")
