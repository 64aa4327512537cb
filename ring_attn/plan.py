r"""Which rectangles exist at each step of the ring, and what is sent: pure data, no processes.

`plan_ring` turns two layouts and a mask into one rank's steps. The chunk-level rule

    kv chunk entirely before the q chunk   FULL           no mask
    the two overlap                        CAUSAL         masked on the diagonal
    kv chunk entirely after the q chunk    NO_ATTENTION   not computed; not sent if no rank needs it

falls out of one fact. Segments of equal stride turn every mask (causal, window, documents, striped
order) into a *band* of local indices, `lo <= j - i <= hi`, and a document into a pair of slices.
So a tile is two slices and two integers, whatever the layout and the mask.

    zigzag, P = 2, causal, what rank 0 (chunks 0 and 3) does:

        step 0, its own kv 0 3      step 1, rank 1's kv 1 2
             k 0  3                      k 1  2
         q 0   \ .                   q 0   .  .
         q 3   # \                   q 3   #  #
        one CAUSAL tile             one FULL tile: second half of q x all kv
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ring_attn.layout import Segment, SequenceLayout
from ring_attn.mask import Document, Mask

Traveller = Literal["kv", "q"]


class MaskKind(enum.Enum):
    """What a rectangle needs: no mask, a diagonal, a window's edge, or nothing at all."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"
    NO_ATTENTION = "no_attention"


class Band(NamedTuple):
    """`lo <= j - i <= hi`; None is unbounded."""

    lo: int | None
    hi: int | None


@dataclass(frozen=True)
class Tile:
    """A rectangle of local rows that one backend call folds: q rows x kv rows within a band.

    `band` is in the same local indices as the slices: row i of the q shard sees row j of the kv
    shard iff both lie in the slices and `band.lo <= j - i <= band.hi`. Every row and every column
    of a tile holds a visible pair, and a bound that cuts nothing off is None.
    """

    q: slice
    kv: slice
    band: Band

    @property
    def rows(self) -> int:
        """Number of q rows."""
        return int(self.q.stop - self.q.start)

    @property
    def cols(self) -> int:
        """Number of kv rows."""
        return int(self.kv.stop - self.kv.start)

    @property
    def corner_band(self) -> Band:
        """The band counted from the tile's own top left corner."""
        shift = self.q.start - self.kv.start
        lo, hi = self.band
        return Band(None if lo is None else lo + shift, None if hi is None else hi + shift)

    @property
    def kind(self) -> MaskKind:
        """FULL, CAUSAL or WINDOW: an existing tile is never NO_ATTENTION."""
        if self.band.lo is not None:
            return MaskKind.WINDOW
        return MaskKind.FULL if self.band.hi is None else MaskKind.CAUSAL

    @property
    def area(self) -> int:
        """Visible pairs."""
        lo, hi = self.corner_band
        area = self.rows * self.cols if hi is None else _pairs_up_to(self.rows, self.cols, hi)
        return area - (0 if lo is None else _pairs_up_to(self.rows, self.cols, lo - 1))


@dataclass(frozen=True)
class Hop:
    """One symmetric exchange: every rank of the ring sends and receives one message."""

    send_to: int
    recv_from: int


@dataclass(frozen=True)
class Step:
    """One step of a rank: the tiles it computes, and the exchange that it posts before computing.

    Attributes:
        index: 0 for the rank's own shard, then upwards.
        source: whose shard is held during this step (kv, or the q side where that travels).
        rows: which rows of that shard are held: all of one's own, then those that travel.
        tiles: in folding order: by first q row, then kv from the last row down; the travelling
            side is counted from the first row that is held.
        hop: brings the next step's shard; None at the last step.
        area: visible pairs of all tiles.
        kind: FULL / CAUSAL / NO_ATTENTION of the whole rectangle of this step.
    """

    index: int
    source: int
    rows: slice
    tiles: tuple[Tile, ...]
    hop: Hop | None
    area: int
    kind: MaskKind


@dataclass(frozen=True)
class Plan:
    """What one rank does in one direction of a ring call.

    Attributes:
        rank: whose plan.
        world_size: number of ranks.
        travels: "kv" (always so in the forward) or "q", the side that is sent round.
        sends: the rows of the rank's own shard that travel.
        steps: at least one, the rank's own shard.
        home: the last exchange of the backward, which brings the travelling gradients back to
            their owner; None where nothing travelled.
    """

    rank: int
    world_size: int
    travels: Traveller
    sends: slice
    steps: tuple[Step, ...]
    home: Hop | None

    @property
    def area(self) -> int:
        """Visible pairs that this rank computes."""
        return sum(step.area for step in self.steps)

    def rows_moving(self, index: int) -> int:
        """Rows in the message that is passed on at a step: of the shard that is held then."""
        rows = self.steps[index].rows if index else self.sends
        return int(rows.stop - rows.start)

    @property
    def num_hops(self) -> int:
        """Exchanges that bring shards; the same on every rank."""
        return len(self.steps) - 1


@lru_cache(maxsize=4096)
def plan_ring(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    rank: int,
    travels: Traveller = "kv",
) -> Plan:
    """The steps of one rank: own shard first, then those of rank-1, rank-2, ...

    Shards that no rank of the ring needs at some distance are jumped over, by every rank alike, so
    sends and receives match by construction: a window of w positions over contiguous shards of c
    makes ceil(w / c) hops, in either direction. Of a shard only those rows travel that any other
    rank needs: of a window its halo, of a causal zigzag's rank 0 the first half.

    Args:
        layout_q: where the queries are.
        layout_kv: where the keys are; the same number of ranks and strides as `layout_q`.
        mask: over the same lengths as the layouts.
        rank: whose plan.
        travels: what is sent round; "q" is for the backward.

    Raises:
        ValueError: layouts and mask that do not fit each other, or a rank that does not exist.
        NotImplementedError: layouts whose strides differ (striped against another kind).

    Example:
        >>> layout = SequenceLayout.contiguous(1024, 4)
        >>> plan = plan_ring(layout, layout, Mask(1024, 1024, causal=True), rank=2)
        >>> [(step.source, step.kind.name) for step in plan.steps]
        [(2, 'CAUSAL'), (1, 'FULL'), (0, 'FULL'), (3, 'NO_ATTENTION')]
        >>> plan.steps[0].hop
        Hop(send_to=3, recv_from=1)
    """
    world_size = layout_q.world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    distances = needed_distances(layout_q, layout_kv, mask)
    if travels == "q":
        distances = tuple(sorted((-d) % world_size for d in distances))
    steps = []
    for index, distance in enumerate(distances):
        source = (rank - distance) % world_size
        q_rank, kv_rank = (rank, source) if travels == "kv" else (source, rank)
        moving = layout_kv if travels == "kv" else layout_q
        rows = slice(0, moving.shard_len(source))
        tiles = pair_tiles(layout_q, layout_kv, mask, q_rank, kv_rank)
        if index:
            rows = travelling_rows(layout_q, layout_kv, mask, source, travels)
            tiles = tuple(_counted_from(rows.start, tile, travels) for tile in tiles)
        area = sum(tile.area for tile in tiles)
        hop = None
        if index + 1 < len(distances):
            jump = distances[index + 1] - distance
            hop = Hop((rank + jump) % world_size, (rank - jump) % world_size)
        rectangle = layout_q.shard_len(q_rank) * layout_kv.shard_len(kv_rank)
        kind = _kind_of(area, rectangle)
        steps.append(Step(index, source, rows, tiles, hop, area, kind))
    last = distances[-1]
    home = Hop((rank - last) % world_size, (rank + last) % world_size) if last else None
    sends = travelling_rows(layout_q, layout_kv, mask, rank, travels)
    return Plan(rank, world_size, travels, sends, tuple(steps), home)


@lru_cache(maxsize=1024)
def needed_distances(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask
) -> tuple[int, ...]:
    """Ring distances `(q_rank - kv_rank) mod P` at which any rank sees anything; 0 always."""
    _check(layout_q, layout_kv, mask)
    world_size = layout_q.world_size
    return (
        0,
        *(
            distance
            for distance in range(1, world_size)
            if any(
                next(_raw_tiles(layout_q, layout_kv, mask, r, (r - distance) % world_size), None)
                for r in range(world_size)
            )
        ),
    )


@lru_cache(maxsize=16384)
def travelling_rows(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    source: int,
    travels: Traveller = "kv",
) -> slice:
    """The rows of a rank's shard that any other rank needs: one run, empty if there are none."""
    needed = []
    for other in range(layout_q.world_size):
        if other != source:
            ranks = (other, source) if travels == "kv" else (source, other)
            tiles = pair_tiles(layout_q, layout_kv, mask, *ranks)
            needed += [tile.kv if travels == "kv" else tile.q for tile in tiles]
    if not needed:
        return slice(0, 0)
    return slice(min(rows.start for rows in needed), max(rows.stop for rows in needed))


@lru_cache(maxsize=16384)
def pair_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> tuple[Tile, ...]:
    """The fewest tiles that hold every visible pair of one rank's queries and another's keys."""
    by_document: dict[Document, list[Tile]] = {}
    for document, tile in _raw_tiles(layout_q, layout_kv, mask, q_rank, kv_rank):
        by_document.setdefault(document, []).append(tile)
    tiles = [tile for found in by_document.values() for tile in _merged(found)]
    return tuple(sorted(tiles, key=lambda tile: (tile.q.start, -tile.kv.start)))


def make_tile(q: slice, kv: slice, lo: int | None, hi: int | None) -> Tile | None:
    """The rectangle cut down to the rows and columns that the band touches; None if it misses."""
    q0, q1, k0, k1 = q.start, q.stop, kv.start, kv.stop
    if q0 >= q1 or k0 >= k1 or (lo is not None and hi is not None and lo > hi):
        return None
    if hi is not None:
        q0 = max(q0, k0 - hi)
    if lo is not None:
        q1 = min(q1, k1 - lo)
    if hi is not None:
        k1 = min(k1, q1 + hi)
    if lo is not None:
        k0 = max(k0, q0 + lo)
    if q0 >= q1 or k0 >= k1:
        return None
    if lo is not None and lo <= k0 - (q1 - 1):
        lo = None
    if hi is not None and hi >= (k1 - 1) - q0:
        hi = None
    return Tile(slice(q0, q1), slice(k0, k1), Band(lo, hi))


def _counted_from(first: int, tile: Tile, travels: Traveller) -> Tile:
    """The tile with its travelling side counted from that row."""
    lo, hi = tile.band
    moved = tile.kv if travels == "kv" else tile.q
    moved = slice(moved.start - first, moved.stop - first)
    shift = -first if travels == "kv" else first  # of j - i
    band = Band(None if lo is None else lo + shift, None if hi is None else hi + shift)
    return Tile(tile.q, moved, band) if travels == "kv" else Tile(moved, tile.kv, band)


def _raw_tiles(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, q_rank: int, kv_rank: int
) -> Iterator[tuple[Document, Tile]]:
    """One tile for each q segment x kv segment x document that sees anything."""
    kv_rows = _with_first_row(layout_kv.segments(kv_rank))
    for q_first, q_seg in _with_first_row(layout_q.segments(q_rank)):
        last = q_seg.start + (q_seg.length - 1) * q_seg.stride
        for document in mask.documents_overlapping(q_seg.start, last + 1):
            qa, qb = q_seg.rows_between(document.q_start, document.q_end)
            for kv_first, kv_seg in kv_rows:
                ka, kb = kv_seg.rows_between(document.k_start, document.k_end)
                lo, hi = _local_band(q_seg, kv_seg, document, mask, kv_first - q_first)
                q = slice(q_first + qa, q_first + qb)
                tile = make_tile(q, slice(kv_first + ka, kv_first + kb), lo, hi)
                if tile is not None:
                    yield document, tile


def _local_band(
    q_seg: Segment, kv_seg: Segment, document: Document, mask: Mask, shift: int
) -> tuple[int | None, int | None]:
    """The mask between two segments as bounds on local `j - i`.

    With positions `start + stride * row` on both sides, `-left <= position_j - position_i -
    diagonal <= right` becomes a bound on `row_j - row_i`: rounded up below, rounded down above.
    """
    stride = q_seg.stride
    gap = q_seg.start + document.diagonal - kv_seg.start
    lo = None if mask.left is None else -((mask.left - gap) // stride) + shift
    hi = None if mask.right is None else (mask.right + gap) // stride + shift
    return lo, hi


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Tiles joined where one band over their common rectangle holds the same pairs and no other.

    Each tile lies inside the rectangle and the band that surround both, so equal area is proof.
    """
    tiles = list(tiles)
    joined = True
    while joined:
        joined = False
        for a in range(len(tiles)):
            for b in range(a + 1, len(tiles)):
                both = _surrounding(tiles[a], tiles[b])
                if both.area == tiles[a].area + tiles[b].area:
                    tiles[a] = both
                    del tiles[b]
                    joined = True
                    break
            if joined:
                break
    return tiles


def _surrounding(a: Tile, b: Tile) -> Tile:
    q = slice(min(a.q.start, b.q.start), max(a.q.stop, b.q.stop))
    kv = slice(min(a.kv.start, b.kv.start), max(a.kv.stop, b.kv.stop))
    (a_lo, a_hi), (b_lo, b_hi) = _extent(a), _extent(b)
    tile = make_tile(q, kv, min(a_lo, b_lo), max(a_hi, b_hi))
    assert tile is not None, "a band that surrounds tiles cannot miss their rectangle"
    return tile


def _extent(tile: Tile) -> tuple[int, int]:
    """Smallest and largest `j - i` of the tile's pairs."""
    lo, hi = tile.band
    return (
        tile.kv.start - (tile.q.stop - 1) if lo is None else lo,
        (tile.kv.stop - 1) - tile.q.start if hi is None else hi,
    )


def _pairs_up_to(rows: int, cols: int, hi: int) -> int:
    """Pairs of a rows x cols rectangle with `j - i <= hi`, in closed form."""

    def below(x: int) -> int:  # sum over t <= x of clip(t, 0, cols)
        if x <= 0:
            return 0
        return x * (x + 1) // 2 if x <= cols else cols * (cols + 1) // 2 + cols * (x - cols)

    return below(hi + rows) - below(hi)


def _kind_of(area: int, rectangle: int) -> MaskKind:
    if area == 0:
        return MaskKind.NO_ATTENTION
    return MaskKind.FULL if area == rectangle else MaskKind.CAUSAL


def _with_first_row(segments: tuple[Segment, ...]) -> list[tuple[int, Segment]]:
    """Each segment with the local row at which it begins."""
    rows, first = [], 0
    for segment in segments:
        rows.append((first, segment))
        first += segment.length
    return rows


def _check(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> None:
    if layout_q.world_size != layout_kv.world_size:
        raise ValueError(f"layouts must have the same ranks, got {layout_q} and {layout_kv}")
    lens = (layout_q.seqlen, layout_kv.seqlen)
    if lens != (mask.seqlen_q, mask.seqlen_k):
        raise ValueError(
            f"mask is over ({mask.seqlen_q}, {mask.seqlen_k}) positions, the layouts over {lens}"
        )
    if layout_q.stride != layout_kv.stride:
        raise NotImplementedError(
            f"q and kv must both be striped or neither, got {layout_q} and {layout_kv}: a mask "
            "between rows of different strides is not a band"
        )
