r"""Rectangles of queries and keys that exist between ranks: pure data, no processes.

`pair_tiles` turns two layouts and a mask into the tiles of one rank's queries and another's keys.
The chunk-level rule

    kv chunk entirely before the q chunk   FULL           no mask
    the two overlap                        CAUSAL         masked on the diagonal
    kv chunk entirely after the q chunk    NO_ATTENTION   no tile; not sent if no rank needs it

follows from one fact. Between two segments of equal stride, a slice of the mask is two runs of rows
and a band of local indices: `lo <= j - i <= hi` holds for rows as for positions, with other bounds.
So a tile is two runs and two integers, whatever the layout and the mask.

    zigzag, P = 2, causal, what rank 0 (chunks 0 and 3) computes:

        with its own kv 0 3         with rank 1's kv 1 2
             k 0  3                      k 1  2
         q 0   \ .                   q 0   .  .
         q 3   # \                   q 3   #  #
        one CAUSAL tile             one FULL tile: second half of q x all kv
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.segments import Segment, pairs_up_to

Traveller = Literal["kv", "q"]


# Distance from one rank of a grid to another: (inner rings, ranks within a ring).
Displacement = tuple[int, int]


class MaskKind(enum.Enum):
    """Kinds of tiles: all visible, cut by a diagonal, or by a window."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"


class Tile(Slice):
    """A slice of local rows: the rectangle that one backend call computes.

    Row i of the q shard sees row j of the kv shard iff the slice holds (i, j). Every row and every
    column of a tile holds a visible pair, and a bound that cuts nothing off is None.
    """

    __slots__ = ()

    @property
    def q(self) -> slice:
        return slice(self.q_start, self.q_end)

    @property
    def kv(self) -> slice:
        return slice(self.k_start, self.k_end)

    @property
    def rows(self) -> int:
        return self.q_end - self.q_start

    @property
    def cols(self) -> int:
        return self.k_end - self.k_start

    @property
    def corner_band(self) -> tuple[int | None, int | None]:
        """The bounds of the band counted from the tile's own top left corner."""
        corner = self.moved(-self.q_start, -self.k_start)
        return corner.lo, corner.hi

    @property
    def kind(self) -> MaskKind:
        if self.lo is not None:
            return MaskKind.WINDOW
        return MaskKind.FULL if self.hi is None else MaskKind.CAUSAL

    @property
    def area(self) -> int:
        lo, hi = self.corner_band
        area = self.rows * self.cols if hi is None else pairs_up_to(self.rows, self.cols, hi)
        return area - (0 if lo is None else pairs_up_to(self.rows, self.cols, lo - 1))

    @property
    def edge(self) -> int:
        """Rows that a bound of the band cuts, counted once for each bound."""
        lo, hi = self.corner_band
        below = 0 if lo is None else min(self.rows - 1 + lo, self.rows)
        return below + (0 if hi is None else min(self.cols - 1 - hi, self.rows))


class Sizes(NamedTuple):
    """Sizes of the tiles of a step.

    Attributes:
        area: visible pairs.
        edge: rows that the mask cuts.
        rows: query rows with a visible key.
        cols: key rows that a query sees.
    """

    area: int
    edge: int
    rows: int
    cols: int


class StepTiles:
    """The tiles of a step: sizes, which take no listing, and tiles, listed at the first use."""

    def __init__(self, sizes: Sizes, listing: Callable[[], tuple[Tile, ...]]) -> None:
        self.sizes, self._listing = sizes, listing

    @classmethod
    def of(cls, tiles: tuple[Tile, ...]) -> StepTiles:
        q, kv = (
            max((side.stop for side in sides), default=0) - min((s.start for s in sides), default=0)
            for sides in ([tile.q for tile in tiles], [tile.kv for tile in tiles])
        )
        area, edge = sum(tile.area for tile in tiles), sum(tile.edge for tile in tiles)
        return cls(Sizes(area, edge, q, kv), lambda: tiles)

    @cached_property
    def listed(self) -> tuple[Tile, ...]:
        return self._listing()

    def __bool__(self) -> bool:
        return self.sizes.area > 0

    def __len__(self) -> int:
        return len(self.listed)

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.listed)

    def __repr__(self) -> str:
        return repr(self.listed)


NO_TILES = StepTiles(Sizes(0, 0, 0, 0), tuple)


class Grid(NamedTuple):
    """Ranks as `outer` inner rings of `inner` ranks each: rank = o * inner + i."""

    outer: int
    inner: int

    def moved(self, rank: int, by: Displacement, sign: int = 1) -> int:
        """The rank at displacement `by` after `rank`; with `sign=-1`, before it."""
        o, i = divmod(rank, self.inner)
        a, b = by
        return (o + sign * a) % self.outer * self.inner + (i + sign * b) % self.inner


def ring_grid(world_size: int, inner_degree: int = 1) -> Grid:
    """The ranks as inner rings of `inner_degree` ranks each; a degree of 1 is one plain ring."""
    inner = world_size if inner_degree == 1 else inner_degree
    return Grid(world_size // inner, inner)


@lru_cache(maxsize=16384)
def needed_runs(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    pair: tuple[int, int],
    travels: Traveller,
) -> tuple[slice, ...]:
    """Ascending runs of rows of one side that a pair (rank of q, rank of kv) needs."""
    # Tiles that could be joined need the same rows, and a striped shard has thousands.
    tiles = (tile for _, tile in _raw_tiles(layout_q, layout_kv, mask, *pair))
    rows = sorted((s.start, s.stop) for s in (t.kv if travels == "kv" else t.q for t in tiles))
    runs: list[slice] = []
    for start, stop in rows:
        if runs and start <= runs[-1].stop:
            start, stop = runs[-1].start, max(stop, runs.pop().stop)
        runs.append(slice(start, stop))
    return tuple(runs)


def among_runs(runs: tuple[slice, ...], tile: Tile, travels: Traveller) -> Tile:
    """The tile with its travelling rows numbered as in a message that holds only `runs`."""
    before = 0
    for run in runs:
        if (tile.kv if travels == "kv" else tile.q).start < run.stop:
            break
        before += run.stop - run.start
    return counted_from(run.start - before, tile, travels)


@lru_cache(maxsize=16384)
def pair_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> tuple[Tile, ...]:
    """The fewest tiles that hold every visible pair of one rank's queries and another's keys."""
    return _in_order(
        tile for _, tile in _tiles_of_slices(layout_q, layout_kv, mask, q_rank, kv_rank)
    )


def _tiles_of_slices(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> list[tuple[Slice, Tile]]:
    """The tiles of a pair of ranks, each with its slice of the mask."""
    by_slice: dict[Slice, list[Tile]] = {}
    for piece, tile in _raw_tiles(layout_q, layout_kv, mask, q_rank, kv_rank):
        by_slice.setdefault(piece, []).append(tile)
    return [(piece, tile) for piece, tiles in by_slice.items() for tile in _merged(tiles)]


def _in_order(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """The tiles sorted by their first q row, and then by keys, descending."""
    return tuple(sorted(tiles, key=lambda tile: (tile.q_start, -tile.k_start)))


@lru_cache(maxsize=4096)
def gathered_tiles(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    rank: int,
    rows: int,
    gathers: Traveller = "kv",
) -> tuple[Tile, ...]:
    """The tiles between one rank's shard and the shards of all ranks of the side that is gathered.

    The gathered shards follow one another in the order of the ranks, each in `rows` rows. If
    contiguous shards fill these rows, they are in the order of positions, and neighbouring tiles of
    a slice become one tile, as in one process: sums then have the same order, and the same bits.
    """
    check_fit(layout_q, layout_kv, mask)
    by_end: dict[tuple[Slice, int], list[Tile]] = {}
    for source in range(layout_q.world_size):
        ranks = (rank, source) if gathers == "kv" else (source, rank)
        for piece, tile in _tiles_of_slices(layout_q, layout_kv, mask, *ranks):
            tile = counted_from(-source * rows, tile, gathers)
            start = piece, (tile.kv if gathers == "kv" else tile.q).start
            for before in by_end.get(start, ()):
                both = _surrounding(before, tile)
                if both.area == before.area + tile.area:
                    by_end[start].remove(before)
                    tile = both
                    break
            stop = piece, (tile.kv if gathers == "kv" else tile.q).stop
            by_end.setdefault(stop, []).append(tile)
    return _in_order(tile for tiles in by_end.values() for tile in tiles)


def counted_from(first: int, tile: Tile, travels: Traveller) -> Tile:
    """The tile with its travelling rows counted from row `first`."""
    return tile.moved(0, -first) if travels == "kv" else tile.moved(-first, 0)


def _raw_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> Iterator[tuple[Slice, Tile]]:
    """Yields a tile, with its slice, for each q segment x kv segment x slice with visible pairs."""
    kv_rows = [
        (kv_seg.start, kv_seg.start + (kv_seg.length - 1) * kv_seg.stride, kv_first, kv_seg)
        for kv_first, kv_seg in with_first_row(layout_kv.segments(kv_rank))
    ]
    for q_first, q_seg in with_first_row(layout_q.segments(q_rank)):
        last = q_seg.start + (q_seg.length - 1) * q_seg.stride
        for piece in mask.overlapping(q_seg.start, last + 1):
            # Of thousands of documents nearly all are on other ranks.
            near = [kv for kv in kv_rows if kv[0] < piece.k_end and kv[1] >= piece.k_start]
            if not near:
                continue
            qa, qb = q_seg.rows_between(piece.q_start, piece.q_end)
            for _, _, kv_first, kv_seg in near:
                ka, kb = kv_seg.rows_between(piece.k_start, piece.k_end)
                lo, hi = _local_band(q_seg, kv_seg, piece, kv_first - q_first)
                q, kv = (q_first + qa, q_first + qb), (kv_first + ka, kv_first + kb)
                tile = Tile(*q, *kv, lo, hi).touched
                if tile is not None:
                    yield piece, tile


def _local_band(
    q_seg: Segment, kv_seg: Segment, piece: Slice, shift: int
) -> tuple[int | None, int | None]:
    """The band of a slice between two segments, as bounds on local `j - i`, rounded inwards."""
    gap = q_seg.start - kv_seg.start
    lo = None if piece.lo is None else -(-(piece.lo + gap) // q_seg.stride) + shift
    hi = None if piece.hi is None else (piece.hi + gap) // q_seg.stride + shift
    return lo, hi


def _merged(tiles: list[Tile]) -> list[Tile]:
    """The tiles, pairs of them joined where one tile holds exactly the visible pairs of both.

    The next pair to join is always the first in order. Of pairs before it only those with the last
    joined tile can have become one.
    """
    tiles, a = list(tiles), 0
    while a < len(tiles):
        for b in (b for b in range(len(tiles)) if b != a):
            both = _joined(tiles[a], tiles[b])
            if both is not None:
                a, b = sorted((a, b))
                tiles[a] = both
                del tiles[b]
                break
        else:
            a += 1
    return tiles


def _joined(a: Tile, b: Tile) -> Tile | None:
    """The tile of exactly the visible pairs of both, if there is one.

    Rows or columns between the tiles would hold further pairs. `_surrounding` holds at least the
    pairs of both tiles, so equal areas prove equality.
    """
    if a.q_end < b.q_start or b.q_end < a.q_start or a.k_end < b.k_start or b.k_end < a.k_start:
        return None
    both = _surrounding(a, b)
    return both if both.area == a.area + b.area else None


def _surrounding(a: Tile, b: Tile) -> Tile:
    """The smallest rectangle and band that hold both tiles."""
    (a_lo, a_hi), (b_lo, b_hi) = _extent(a), _extent(b)
    tile = Tile(
        min(a.q_start, b.q_start), max(a.q_end, b.q_end),
        min(a.k_start, b.k_start), max(a.k_end, b.k_end),
        min(a_lo, b_lo), max(a_hi, b_hi),
    ).touched  # fmt: skip
    assert tile is not None, "a band that surrounds tiles cannot miss their rectangle"
    return tile


def _extent(tile: Tile) -> tuple[int, int]:
    """Smallest and largest `j - i` of the tile's pairs."""
    return (
        tile.k_start - (tile.q_end - 1) if tile.lo is None else tile.lo,
        (tile.k_end - 1) - tile.q_start if tile.hi is None else tile.hi,
    )


def with_first_row(segments: tuple[Segment, ...]) -> list[tuple[int, Segment]]:
    """Each segment with the local row at which it begins."""
    rows, first = [], 0
    for segment in segments:
        rows.append((first, segment))
        first += segment.length
    return rows


def check_fit(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> None:
    if layout_q.world_size != layout_kv.world_size:
        raise ValueError(f"layouts must have the same ranks, got {layout_q} and {layout_kv}")
    lens = (layout_q.seqlen, layout_kv.seqlen)
    if lens != (mask.seqlen_q, mask.seqlen_k):
        raise ValueError(
            f"mask is over ({mask.seqlen_q}, {mask.seqlen_k}) positions, the layouts over {lens}"
        )
    if layout_q.stride != layout_kv.stride and layout_q.seqlen and layout_kv.seqlen:
        raise NotImplementedError(
            f"q and kv must both be striped or neither, got {layout_q} and {layout_kv}: a mask "
            "between rows of different strides is not a band"
        )
