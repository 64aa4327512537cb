"""Decoding: a few queries, equal on every rank, against a KV cache split over the ranks.

    rank 0   q x its rows of the cache -> out 0, lse 0 --.               .-> merge -> out, lse
    rank 1   q x its rows of the cache -> out 1, lse 1 --+-- all_gather -+-> merge -> out, lse
    rank 2   q x its rows of the cache -> out 2, lse 2 --'               `-> merge -> out, lse

K and V stay in place. Partial results are sent in the type of the state: each rank sends out and
lse in one message of n = batch * seqlen_q * nheads * (headdim_v + 1) numbers. Every rank merges all
P results in the same tree, the lower half with the upper half, ceil(log2(P)) deep. So all ranks
have the same bits, which an all-reduce does not guarantee, and sinks count once, at the root.

Tree Attention (Shyam et al., arXiv 2408.04093) reduces in the network instead: the maximum of lse,
then numerator and denominator, in 3 all-reduces of which the second waits for the first. In that
scheme each rank sends and receives 2 (P - 1) / P * n numbers; in a gather it receives (P - 1) n.
The all-reduces transfer less from P = 3 on, but they take at least 2 rounds with the latency of 2
messages, while a gather takes one round with the latency of 1. A token of 32 heads of 128 is
16 KiB: with 8 ranks 7 messages arrive, in 2 us at 50 GB/s (an estimate), less than the latency of
any collective. With 64 tokens and 64 ranks a gather transfers 66 MB, in 1.3 ms at this estimate.
For so many queries it is better to split them over the ranks, with `ring_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.call import DecodeCall, Options
from ring_attn.core import program as ops
from ring_attn.core.cache import Sequences
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.messages import Gathered, Packet, packet_of
from ring_attn.core.program import Array, Buffer, Copy, Op, Program, View
from ring_attn.core.segments import Segment
from ring_attn.core.sizes import result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import StepTiles, Tile
from ring_attn.strategies.base import pack_and_post


def make_call(
    spec: AttentionSpec, *, softmax_scale: float | None = None, backend: str = "auto"
) -> DecodeCall:
    """Return a call to decode, with its backend chosen; errors as `choose_backend`."""
    options = Options(softmax_scale=softmax_scale, softcap=spec.softcap, backend=backend)
    chosen = choose_backend(spec, backend, Purpose(decoding=True)).name
    return DecodeCall(options=options, spec=spec, backend=chosen)


# Inputs with the lengths of sequences, and with the pages of a rank's pool that hold their rows.
TABLES = ("cache_seqlens", "block_table")


def program(
    call: DecodeCall,
    tiles: tuple[Tile, ...],
    shape: tuple[int, int, int],
    rank: int,
    world_size: int,
    sequences: Sequences | None = None,
    num_tables: int = 0,
) -> Program:
    """Return the program of one rank: attend to its rows, gather all partial results, merge them.

    Args:
        call: the call.
        tiles: all queries x this rank's rows of the cache, if there are no `sequences`.
        shape: number of queries, and dims 0 and 1 of k and v.
        rank: this rank.
        world_size: number of ranks.
        sequences: the parts of sequences on this rank; None if all have one length.
        num_tables: how many of `TABLES` describe the sequences.
    """
    spec = call.spec
    num_queries, kv_dim_0, kv_dim_1 = shape
    arrays = {
        "q": Array(spec.batch, num_queries, spec.nheads, spec.headdim, spec.dtype),
        "k": Array(kv_dim_0, kv_dim_1, spec.nheads_kv, spec.headdim, spec.dtype),
        "v": Array(kv_dim_0, kv_dim_1, spec.nheads_kv, spec.headdim_v, spec.dtype),
    }
    if sequences is not None or (tiles and get_backend(call.backend).decodes):
        tables = tuple(View(name) for name in TABLES[:num_tables])
        steps: list[Op] = [ops.Decode(tiles, View("q"), View("k"), View("v"), sequences, tables)]
    else:
        steps = _attending(spec, num_queries, tiles)
    steps += _merging(spec, num_queries, world_size)
    return Program(
        world_size=world_size, rank=rank, backward=False, ops=tuple(steps), arrays=arrays
    )


def _attending(spec: AttentionSpec, num_queries: int, tiles: tuple[Tile, ...]) -> list[Op]:
    """Return ops that compute partial results as a step of a ring does."""
    # Partial results have the type of the state: only the root of the tree rounds.
    partial = result_arrays(replace(spec, dtype=spec.accum_dtype), num_queries)
    steps: list[Op] = [ops.Start(View("q"), spec.headdim_v, partial["out"])]
    if tiles:
        steps.append(ops.Attend(StepTiles.of(tiles), View("q"), View("k"), View("v")))
    steps.append(ops.Finish("partial out", "partial lse", partial["out"], partial["lse"]))
    return steps


# Cached: every token has a new program, but this part does not change.
@lru_cache(maxsize=256)
def _merging(spec: AttentionSpec, num_queries: int, world_size: int) -> tuple[Op, ...]:
    """Return ops that gather the partial results of all ranks and merge them."""
    packet = decode_packet(spec, num_queries)
    all_packets = Gathered(packet, world_size)
    send = Buffer("partial", packet.nbytes)
    recv = Buffer("partials", all_packets.nbytes)
    posted = pack_and_post(
        channel="shards",
        step=0,
        route=ops.Collective("all_gather"),
        message=packet,
        copies=(Copy(0, View("partial out")), Copy(1, View("partial lse"))),
        send=send,
        recv=recv,
        receives=all_packets,
        nbytes=packet.nbytes * (world_size - 1),
    )
    return (
        *posted,
        ops.Wait("shards"),
        ops.Free((send,)),
        ops.Merge(recv, all_packets, "out", "lse"),
    )


def decode_tiles(segments: Sequence[Segment], mask: Mask) -> tuple[Tile, ...]:
    """Return the tiles of all queries x one rank's rows, in the order in which they are folded.

    The mask is over the whole cache. This takes one pass over the segments. Neighbouring segments
    that every query sees become one tile: in a causal cache of a thousand segments, all segments
    but the last few.
    """
    tiles = [tile for piece in mask.slices for tile in _slice_tiles(segments, piece)]
    return tuple(sorted(tiles, key=lambda tile: (tile.q_start, -tile.k_start)))


def _slice_tiles(segments: Sequence[Segment], piece: Slice) -> Iterator[Tile]:
    """Yield the tiles of one slice of the mask."""
    queries = piece.q_start, piece.q_end
    # Some query sees positions [any_from, any_to). All queries see [all_from, all_to): from the
    # first key of the last query to the last key of the first query.
    any_from = all_from = piece.k_start
    any_to = all_to = piece.k_end
    if piece.lo is not None:
        any_from = max(any_from, piece.q_start + piece.lo)
        all_from = max(all_from, piece.q_end - 1 + piece.lo)
    if piece.hi is not None:
        all_to = min(all_to, piece.q_start + piece.hi + 1)
        any_to = min(any_to, piece.q_end + piece.hi)
    first_row, row = 0, 0  # every query sees the rows [first_row, row)
    for segment in segments:
        next_row = row + segment.length
        last = segment.start + (segment.length - 1) * segment.stride
        if segment.start < all_from or last >= all_to:
            yield from _full_tile(queries, first_row, row)
            if last >= any_from and segment.start < any_to:
                yield from _cut_tiles(segment, row, piece)
            first_row = next_row
        row = next_row
    yield from _full_tile(queries, first_row, row)


def _full_tile(queries: tuple[int, int], first_row: int, end_row: int) -> Iterator[Tile]:
    """Yield the tile in which every query sees all of these rows, if there are any."""
    if first_row < end_row:
        q_start, q_end = queries
        yield Tile(q_start, q_end, first_row, end_row)


def _cut_tiles(segment: Segment, row: int, piece: Slice) -> Iterator[Tile]:
    """Yield the tiles of a partly visible segment, which starts at local row `row`."""
    if segment.stride == 1:
        end = segment.start + segment.length
        visible = piece & Slice(piece.q_start, piece.q_end, segment.start, end)
        if visible is not None:
            yield Tile(*visible.moved(0, row - segment.start))
        return
    # Consecutive queries against every P-th key form no band: one tile for each query.
    for query in range(piece.q_start, piece.q_end):
        start = piece.k_start if piece.lo is None else max(piece.k_start, query + piece.lo)
        stop = piece.k_end if piece.hi is None else min(piece.k_end, query + piece.hi + 1)
        first, end = segment.rows_between(start, stop)
        yield from _full_tile((query, query + 1), row + first, row + end)


@lru_cache(maxsize=256)
def decode_packet(spec: AttentionSpec, num_queries: int) -> Packet:
    """Return the message with a rank's partial out and lse."""
    partial = result_arrays(replace(spec, dtype=spec.accum_dtype), num_queries)
    return packet_of([(array.shape, array.dtype) for array in partial.values()])
