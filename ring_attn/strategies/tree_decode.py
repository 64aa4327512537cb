"""Decoding: a few queries that every rank has, against a KV cache that is split over the ranks.

    rank 0   q x its rows of the cache -> out 0, lse 0 --.               .-> merge -> out, lse
    rank 1   q x its rows of the cache -> out 1, lse 1 --+-- all_gather -+-> merge -> out, lse
    rank 2   q x its rows of the cache -> out 2, lse 2 --'               `-> merge -> out, lse

K and V stay where they are. What travels is a partial result in the type of the state: n = batch *
seqlen_q * nheads * (headdim_v + 1) numbers of a rank, out and lse in one message. Every rank merges
all P of them in the same fixed tree, the lower half with the upper one, ceil(log2(P)) deep: so all
ranks have the same bits, which an all-reduce does not promise, and sinks count once, at the root.

Tree Attention (Shyam et al., arXiv 2408.04093) reduces in the network instead: the maximum of lse,
then numerator and denominator, 3 all-reduces of which the second waits for the first. That is
2 (P - 1) / P * n numbers sent and received by each rank where a gather receives (P - 1) n: fewer
from P = 3 on, in at least 2 rounds of 2 messages' latency rather than in one of one. A token of 32
heads of 128 is 16 KiB: with 8 ranks 7 of them arrive, which 50 GB/s take 2 us for, less than the
latency of any collective. With 64 tokens and 64 ranks it is 66 MB and 1.3 ms; there a chunk of
queries, split over the ranks, belongs into `ring_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.backends.base import decodes
from ring_attn.core.layout import Segment
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.messages import Gathered
from ring_attn.core.program import (
    Array,
    Attend,
    Buffer,
    Collective,
    Copy,
    Decode,
    Finish,
    Free,
    Merge,
    Op,
    Pack,
    Post,
    Program,
    Start,
    View,
    Wait,
)
from ring_attn.core.spec import AttentionSpec, Packet, Scores
from ring_attn.core.tiles import Band, Tile, make_tile
from ring_attn.transport.base import Transport


@dataclass(frozen=True)
class DecodeCall:
    """One call as plain data, the same on every rank.

    Attributes:
        spec: sizes and types.
        softmax_scale: factor of the scores.
        backend: name of the backend.
    """

    spec: AttentionSpec
    softmax_scale: float
    backend: str

    @property
    def scores(self) -> Scores:
        """How products become scores."""
        return Scores(self.softmax_scale, self.spec.softcap)


def make_call(
    spec: AttentionSpec, *, softmax_scale: float | None = None, backend: str = "auto"
) -> DecodeCall:
    """The call with its choices made; errors as `choose_backend`."""
    scale = 1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale
    return DecodeCall(spec, scale, choose_backend(spec, backend, Purpose(decoding=True)).name)


def program(
    call: DecodeCall, tiles: tuple[Tile, ...], rows: int, rows_kv: int, rank: int, world_size: int
) -> Program:
    """The program of one rank: attend to its rows, gather all partial results, merge them.

    Args:
        call: the same on every rank.
        tiles: of all queries x this rank's rows.
        rows: number of queries.
        rows_kv: rows of the cache on this rank.
        rank: whose program.
        world_size: number of ranks.
    """
    spec, q = call.spec, View("q")
    out, lse = _partial(spec, rows)
    ops: list[Op]
    if tiles and decodes(get_backend(call.backend)):
        ops = [Decode(tiles, q, View("k"), View("v"))]
    else:
        # Not rounded to the type of q: that is done once, at the root of the tree.
        ops = [Start(q, spec.headdim_v, out)]
        if tiles:
            ops.append(Attend(tiles, q, View("k"), View("v")))
        ops.append(Finish("partial out", "partial lse", out, lse))
    arrays = {
        "q": Array(spec.batch, rows, spec.nheads, spec.headdim, spec.dtype),
        "k": Array(spec.batch, rows_kv, spec.nheads_kv, spec.headdim, spec.dtype),
        "v": Array(spec.batch, rows_kv, spec.nheads_kv, spec.headdim_v, spec.dtype),
    }
    return Program(world_size, rank, False, (*ops, *_merging(spec, rows, world_size)), arrays)


def _partial(spec: AttentionSpec, rows: int) -> tuple[Array, Array]:
    """Sizes of a rank's partial out and lse."""
    wide = spec.accum_dtype
    out = Array(spec.batch, rows, spec.nheads, spec.headdim_v, wide)
    return out, Array(spec.batch, rows, spec.nheads, None, wide)


# Every token has a program of its own, of which this part is the same.
@lru_cache(maxsize=256)
def _merging(spec: AttentionSpec, rows: int, world_size: int) -> tuple[Op, ...]:
    """Gathers and merges the partial results of all ranks."""
    packet = decode_packet(spec, rows)
    everyone = Gathered(packet, world_size)
    send, recv = Buffer("partial", packet.nbytes), Buffer("partials", everyone.nbytes)
    others = packet.nbytes * (world_size - 1)
    copies = (Copy(0, View("partial out")), Copy(1, View("partial lse")))
    return (
        Pack(send, packet, copies),
        Post("shards", 0, Collective("all_gather"), send, recv, everyone, others),
        Wait("shards"),
        Free((send,)),
        Merge(recv, everyone, "out", "lse"),
    )


def decode_tiles(segments: Sequence[Segment], mask: Mask) -> tuple[Tile, ...]:
    """The tiles of all queries x one rank's rows.

    It takes one pass over the segments of that rank. Neighbours that every query sees are one tile:
    of a causal cache that has grown in a thousand segments all but the last few.

    Args:
        segments: of the rank.
        mask: over all queries and the whole cache.

    Returns:
        Tiles in folding order, as `tiles.pair_tiles` has them.

    Example:
        >>> segments = [Segment(0, 4), Segment(9, 3)]
        >>> tiles = decode_tiles(segments, Mask(2, 12, causal=True))  # queries 10 and 11
        >>> [(tile.kv, tile.kind.name) for tile in tiles]
        [(slice(4, 7, None), 'CAUSAL'), (slice(0, 4, None), 'FULL')]
    """
    tiles = [tile for one in mask.slices for tile in _slice_tiles(segments, one)]
    return tuple(sorted(tiles, key=lambda tile: (tile.q.start, -tile.kv.start)))


def _slice_tiles(segments: Sequence[Segment], one: Slice) -> Iterator[Tile]:
    """The tiles of a slice's queries x one rank's rows."""
    every_q = slice(one.q_start, one.q_end)
    # What a query sees moves on with it. Some query sees a position in [any_from, any_to); all see
    # those from where the last begins to see to where the first ends, [all_from, all_to).
    any_from = all_from = one.k_start
    any_to = all_to = one.k_end
    if one.lo is not None:
        any_from = max(any_from, one.q_start + one.lo)
        all_from = max(all_from, one.q_end - 1 + one.lo)
    if one.hi is not None:
        all_to = min(all_to, one.q_start + one.hi + 1)
        any_to = min(any_to, one.q_end + one.hi)
    run, row = 0, 0  # rows [run, row) are seen by every query
    for segment in segments:
        stop = row + segment.length
        last = segment.start + (segment.length - 1) * segment.stride
        if segment.start < all_from or last >= all_to:
            yield from _full(every_q, run, row)
            if last >= any_from and segment.start < any_to:
                yield from _cut(segment, row, one)
            run = stop
        row = stop
    yield from _full(every_q, run, row)


def _full(q: slice, run: int, row: int) -> list[Tile]:
    return [Tile(q, slice(run, row), Band(None, None))] if run < row else []


def _cut(segment: Segment, row: int, one: Slice) -> Iterator[Tile]:
    """The tiles of a segment, at that local row, which not every query sees all of."""
    if segment.stride == 1:
        shift = row - segment.start  # of local j - i
        first, end = segment.rows_between(one.k_start, one.k_end)
        lo, hi = (None if bound is None else bound + shift for bound in (one.lo, one.hi))
        kv = slice(row + first, row + end)
        tile = make_tile(slice(one.q_start, one.q_end), kv, lo, hi)
        if tile is not None:
            yield tile
        return
    # Queries that follow one another against every P-th key are no band: query by query.
    for i in range(one.q_start, one.q_end):
        start = one.k_start if one.lo is None else max(one.k_start, i + one.lo)
        stop = one.k_end if one.hi is None else min(one.k_end, i + one.hi + 1)
        first, end = segment.rows_between(start, stop)
        yield from _full(slice(i, i + 1), row + first, row + end)


@lru_cache(maxsize=256)
def decode_packet(spec: AttentionSpec, rows: int) -> Packet:
    """The message of a rank: its partial out and lse of so many queries."""
    shapes = (spec.batch, rows, spec.nheads, spec.headdim_v), (spec.batch, spec.nheads, rows)
    return Packet(shapes, (spec.accum_dtype, spec.accum_dtype))


def gather_numbers(
    numbers: tuple[int, int], device: torch.device, transport: Transport
) -> list[tuple[int, int]]:
    """Two numbers of each rank: a message of 16 bytes, which on CUDA the host waits for."""
    mine = torch.tensor(numbers, device=device).view(torch.uint8)
    everyone = mine.new_empty(transport.world_size * mine.numel())
    transport.all_gather("shards", 0, mine, everyone)
    transport.wait("shards")
    return [(first, second) for first, second in everyone.view(torch.int64).view(-1, 2).tolist()]
