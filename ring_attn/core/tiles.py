r"""Tiles, the rectangles of queries and keys that exist between ranks: pure data.

`pair_tiles` converts two layouts and a mask to the tiles between the queries of one rank and the
keys of another. The chunk-level rule

    kv chunk entirely before the q chunk   FULL           no mask
    the two overlap                        CAUSAL         masked on the diagonal
    kv chunk entirely after the q chunk    NO_ATTENTION   no tile; not sent if no rank needs it

follows from one fact: between two segments of equal stride, a slice of the mask is two runs of rows
and a band of local indices, because `lo <= j - i <= hi` holds for rows as for positions, with other
bounds. Thus a tile is two runs and two integers, for every layout and mask.

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

# The side whose shards are sent.
Side = Literal["kv", "q"]

# Distance from one rank of a grid to another: (inner rings, ranks within a ring).
Displacement = tuple[int, int]


class MaskKind(enum.Enum):
    """Kinds of tiles: entirely visible, cut by a diagonal, or cut by a window."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"


class Tile(Slice):
    """A slice of local rows: the rectangle that one backend call computes.

    Row i of the q shard sees row j of the kv shard iff the slice contains (i, j). Every row and
    every column of a tile has a visible pair, and a bound that hides no pair is None.
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
        """The bounds of the band, relative to the top left corner of the tile."""
        corner = self.moved(-self.q_start, -self.k_start)
        return corner.lo, corner.hi

    @property
    def kind(self) -> MaskKind:
        if self.lo is not None:
            return MaskKind.WINDOW
        return MaskKind.FULL if self.hi is None else MaskKind.CAUSAL

    @property
    def area(self) -> int:
        """The number of visible pairs."""
        lo, hi = self.corner_band
        up_to_hi = self.rows * self.cols if hi is None else pairs_up_to(self.rows, self.cols, hi)
        below_lo = 0 if lo is None else pairs_up_to(self.rows, self.cols, lo - 1)
        return up_to_hi - below_lo

    @property
    def edge(self) -> int:
        """The number of rows that a bound of the band cuts, counted once for each bound."""
        lo, hi = self.corner_band
        cut_by_lo = 0 if lo is None else min(self.rows - 1 + lo, self.rows)
        cut_by_hi = 0 if hi is None else min(self.cols - 1 - hi, self.rows)
        return cut_by_lo + cut_by_hi


class Sizes(NamedTuple):
    """Sizes of the tiles of a step.

    Attributes:
        area: number of visible pairs.
        edge: number of rows that the mask cuts.
        rows: number of query rows with a visible key.
        cols: number of key rows that a query sees.
    """

    area: int
    edge: int
    rows: int
    cols: int


class StepTiles:
    """The tiles of a step. Their sizes are known at once; the tiles are listed at the first use."""

    def __init__(self, sizes: Sizes, listing: Callable[[], tuple[Tile, ...]]) -> None:
        self.sizes = sizes
        self._listing = listing

    @classmethod
    def of(cls, tiles: tuple[Tile, ...]) -> StepTiles:
        """Return the step of tiles that are listed already."""
        sizes = Sizes(
            area=sum(tile.area for tile in tiles),
            edge=sum(tile.edge for tile in tiles),
            rows=_span([tile.q for tile in tiles]),
            cols=_span([tile.kv for tile in tiles]),
        )
        return cls(sizes, lambda: tiles)

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


def _span(runs: list[slice]) -> int:
    """Return the number of rows from the first to the last row of the runs."""
    first = min((run.start for run in runs), default=0)
    stop = max((run.stop for run in runs), default=0)
    return int(stop - first)


NO_TILES = StepTiles(Sizes(0, 0, 0, 0), tuple)


class Grid(NamedTuple):
    """Ranks as `outer` inner rings of `inner` ranks each: rank = o * inner + i."""

    outer: int
    inner: int

    def moved(self, rank: int, by: Displacement, sign: int = 1) -> int:
        """Return the rank at displacement `by` after `rank`; with `sign=-1`, before it."""
        ring, place = divmod(rank, self.inner)
        rings, places = by
        ring = (ring + sign * rings) % self.outer
        place = (place + sign * places) % self.inner
        return ring * self.inner + place


def ring_grid(world_size: int, inner_degree: int = 1) -> Grid:
    """Return the ranks as inner rings of `inner_degree` ranks; a degree of 1 is one plain ring."""
    inner = world_size if inner_degree == 1 else inner_degree
    return Grid(world_size // inner, inner)


@lru_cache(maxsize=16384)
def needed_runs(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    pair: tuple[int, int],
    sent_side: Side,
) -> tuple[slice, ...]:
    """Return the runs of rows of one side that a pair (rank of q, rank of kv) needs, ascending."""
    q_rank, kv_rank = pair
    # Not of joined tiles: joining does not change the rows, and a striped shard has thousands.
    tiles = (tile for _, tile in _raw_tiles(layout_q, layout_kv, mask, q_rank, kv_rank))
    sides = (_side(tile, sent_side) for tile in tiles)
    rows = sorted((side.start, side.stop) for side in sides)
    runs: list[slice] = []
    for start, stop in rows:
        if runs and start <= runs[-1].stop:
            before = runs.pop()
            start, stop = before.start, max(stop, before.stop)
        runs.append(slice(start, stop))
    return tuple(runs)


def among_runs(runs: tuple[slice, ...], tile: Tile, sent_side: Side) -> Tile:
    """Return the tile with its received rows numbered as in a message that has only `runs`."""
    before = 0
    for run in runs:
        if _side(tile, sent_side).start < run.stop:
            break
        before += run.stop - run.start
    return counted_from(run.start - before, tile, sent_side)


@lru_cache(maxsize=16384)
def pair_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> tuple[Tile, ...]:
    """Return the fewest tiles with all visible pairs of one rank's queries and another's keys."""
    with_slices = _tiles_of_slices(layout_q, layout_kv, mask, q_rank, kv_rank)
    return _in_order(tile for _, tile in with_slices)


def _tiles_of_slices(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> list[tuple[Slice, Tile]]:
    """Return the tiles of a pair of ranks, each with the slice of the mask it comes from."""
    by_slice: dict[Slice, list[Tile]] = {}
    for piece, tile in _raw_tiles(layout_q, layout_kv, mask, q_rank, kv_rank):
        by_slice.setdefault(piece, []).append(tile)
    return [(piece, tile) for piece, tiles in by_slice.items() for tile in _merged(tiles)]


def _in_order(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """Return the tiles sorted by their first query, and then by their first key, descending."""
    return tuple(sorted(tiles, key=lambda tile: (tile.q_start, -tile.k_start)))


@lru_cache(maxsize=4096)
def gathered_tiles(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    rank: int,
    rows: int,
    gathers: Side = "kv",
) -> tuple[Tile, ...]:
    """Return the tiles between one rank's shard and the gathered shards of all ranks.

    The gathered shards are in the order of the ranks, each in `rows` rows. If contiguous shards
    fill these rows, they are in the order of positions, and neighbouring tiles of a slice become
    one tile, as in one process: sums then have the same order, and the same bits.
    """
    check_fit(layout_q, layout_kv, mask)
    # The tiles by their slice and by the gathered row at which they end.
    by_end: dict[tuple[Slice, int], list[Tile]] = {}
    for source in range(layout_q.world_size):
        q_rank, kv_rank = (rank, source) if gathers == "kv" else (source, rank)
        for piece, tile in _tiles_of_slices(layout_q, layout_kv, mask, q_rank, kv_rank):
            tile = counted_from(-source * rows, tile, gathers)
            start = piece, _side(tile, gathers).start
            for before in by_end.get(start, ()):
                both = _surrounding(before, tile)
                if both.area == before.area + tile.area:
                    by_end[start].remove(before)
                    tile = both
                    break
            stop = piece, _side(tile, gathers).stop
            by_end.setdefault(stop, []).append(tile)
    return _in_order(tile for tiles in by_end.values() for tile in tiles)


def counted_from(first: int, tile: Tile, sent_side: Side) -> Tile:
    """Return the tile with the rows of one side counted from row `first`."""
    return tile.moved(q=0, k=-first) if sent_side == "kv" else tile.moved(q=-first, k=0)


def _side(tile: Tile, side: Side) -> slice:
    """Return the rows of one side of a tile."""
    return tile.kv if side == "kv" else tile.q


def _raw_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> Iterator[tuple[Slice, Tile]]:
    """Yield (slice, tile) for each q segment x kv segment x slice that has visible pairs."""
    # First and last position, first row, and segment.
    kv_rows = [
        (kv_seg.start, kv_seg.start + (kv_seg.length - 1) * kv_seg.stride, kv_first, kv_seg)
        for kv_first, kv_seg in with_first_row(layout_kv.segments(kv_rank))
    ]
    for q_first, q_seg in with_first_row(layout_q.segments(q_rank)):
        last = q_seg.start + (q_seg.length - 1) * q_seg.stride
        for piece in mask.overlapping(q_seg.start, last + 1):
            # Nearly all of thousands of documents are on other ranks.
            near = [
                (kv_first, kv_seg)
                for first_position, last_position, kv_first, kv_seg in kv_rows
                if first_position < piece.k_end and last_position >= piece.k_start
            ]
            if not near:
                continue
            q_start, q_end = q_seg.rows_between(piece.q_start, piece.q_end)
            for kv_first, kv_seg in near:
                k_start, k_end = kv_seg.rows_between(piece.k_start, piece.k_end)
                lo, hi = _local_band(q_seg, kv_seg, piece, shift=kv_first - q_first)
                tile = Tile(
                    q_start=q_first + q_start,
                    q_end=q_first + q_end,
                    k_start=kv_first + k_start,
                    k_end=kv_first + k_end,
                    lo=lo,
                    hi=hi,
                ).trimmed
                if tile is not None:
                    yield piece, tile


def _local_band(
    q_seg: Segment, kv_seg: Segment, piece: Slice, shift: int
) -> tuple[int | None, int | None]:
    """Return the band of a slice between two segments: bounds on local `j - i`, rounded inwards."""
    gap = q_seg.start - kv_seg.start
    lo = None if piece.lo is None else -(-(piece.lo + gap) // q_seg.stride) + shift
    hi = None if piece.hi is None else (piece.hi + gap) // q_seg.stride + shift
    return lo, hi


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Join pairs of tiles as long as one tile has exactly the visible pairs of two.

    The next pair to join is always the first in order. After two tiles were joined, only pairs with
    the joined tile can be joined that could not be before, so the search goes on from there.
    """
    tiles = list(tiles)
    at = 0
    while at < len(tiles):
        for other in range(len(tiles)):
            both = _joined(tiles[at], tiles[other]) if other != at else None
            if both is not None:
                at, removed = sorted((at, other))
                tiles[at] = both
                del tiles[removed]
                break
        else:
            at += 1
    return tiles


def _joined(a: Tile, b: Tile) -> Tile | None:
    """Return the tile with exactly the visible pairs of both tiles, if there is one.

    Rows or columns between the tiles would have further pairs. `_surrounding` has at least the
    pairs of both tiles, so equal areas prove equality.
    """
    if a.q_end < b.q_start or b.q_end < a.q_start or a.k_end < b.k_start or b.k_end < a.k_start:
        return None
    both = _surrounding(a, b)
    return both if both.area == a.area + b.area else None


def _surrounding(a: Tile, b: Tile) -> Tile:
    """Return the smallest rectangle and band that contain both tiles."""
    a_lo, a_hi = _extent(a)
    b_lo, b_hi = _extent(b)
    tile = Tile(
        q_start=min(a.q_start, b.q_start),
        q_end=max(a.q_end, b.q_end),
        k_start=min(a.k_start, b.k_start),
        k_end=max(a.k_end, b.k_end),
        lo=min(a_lo, b_lo),
        hi=max(a_hi, b_hi),
    ).trimmed
    assert tile is not None, "a band that surrounds tiles cannot miss their rectangle"
    return tile


def _extent(tile: Tile) -> tuple[int, int]:
    """Return the smallest and largest `j - i` of the tile's pairs."""
    smallest = tile.k_start - (tile.q_end - 1) if tile.lo is None else tile.lo
    largest = (tile.k_end - 1) - tile.q_start if tile.hi is None else tile.hi
    return smallest, largest


def with_first_row(segments: tuple[Segment, ...]) -> list[tuple[int, Segment]]:
    """Return (first local row, segment) of each segment."""
    rows = []
    first = 0
    for segment in segments:
        rows.append((first, segment))
        first += segment.length
    return rows


def check_fit(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> None:
    """Refuse layouts and a mask that do not fit each other."""
    if layout_q.world_size != layout_kv.world_size:
        raise ValueError(
            f"layouts must have the same number of ranks, got {layout_q} and {layout_kv}"
        )
    lens = (layout_q.seqlen, layout_kv.seqlen)
    mask_lens = (mask.seqlen_q, mask.seqlen_k)
    if lens != mask_lens:
        raise ValueError(
            f"mask and layouts must have equal lengths, got mask {mask_lens} and layouts {lens}"
        )
    if layout_q.stride != layout_kv.stride and layout_q.seqlen and layout_kv.seqlen:
        raise NotImplementedError(
            "the layouts of q and kv must both be striped, or neither of them, because a mask "
            f"between rows of different strides is not a band; got {layout_q} and {layout_kv}"
        )
