"""Decoding: a few queries, equal on every rank, against a KV cache split over the ranks.

    rank 0   q x its rows of the cache -> out 0, lse 0 --.               .-> merge -> out, lse
    rank 1   q x its rows of the cache -> out 1, lse 1 --+-- all_gather -+-> merge -> out, lse
    rank 2   q x its rows of the cache -> out 2, lse 2 --'               `-> merge -> out, lse

K and V stay in place. Partial results travel, in the type of the state: each rank sends out and lse
in one message of n = batch * seqlen_q * nheads * (headdim_v + 1) numbers. Every rank merges all P
results in the same tree, the lower half with the upper half, ceil(log2(P)) deep. So all ranks have
the same bits, which an all-reduce does not promise, and sinks count once, at the root.

Tree Attention (Shyam et al., arXiv 2408.04093) reduces in the network instead: the maximum of lse,
then numerator and denominator, in 3 all-reduces of which the second waits for the first. There each
rank sends and receives 2 (P - 1) / P * n numbers; in a gather it receives (P - 1) n. That is fewer
from P = 3 on, but takes at least 2 rounds with the latency of 2 messages, rather than one with the
latency of 1. A token of 32 heads of 128 is 16 KiB: with 8 ranks 7 messages arrive, in 2 us at
50 GB/s, less than the latency of any collective. With 64 tokens and 64 ranks it is 66 MB and
1.3 ms: so many queries are better split over the ranks, with `ring_attention`.
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


# Inputs that say how long sequences are, and in which pages of a rank's pool their rows stand.
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
    """The program of one rank: attend to its rows, gather all partial results, merge them.

    Args:
        call: the call.
        tiles: all queries x this rank's rows of the cache, if there are no `sequences`.
        shape: number of queries, and dims 0 and 1 of k and v.
        rank: this rank.
        world_size: number of ranks.
        sequences: what this rank has of sequences, of which the first `num_tables` tables tell.
    """
    (rows, *kv), spec, q = shape, call.spec, View("q")
    partial = result_arrays(replace(spec, dtype=spec.accum_dtype), rows)
    made: list[Op]
    if sequences is not None or (tiles and get_backend(call.backend).decodes):
        tables = tuple(map(View, TABLES[:num_tables]))
        made = [ops.Decode(tiles, q, View("k"), View("v"), sequences, tables)]
    else:
        # In the type of the state: the root of the tree rounds once.
        made = [ops.Start(q, spec.headdim_v, partial["out"])]
        if tiles:
            made.append(ops.Attend(StepTiles.of(tiles), q, View("k"), View("v")))
        made.append(ops.Finish("partial out", "partial lse", partial["out"], partial["lse"]))
    arrays = {
        "q": Array(spec.batch, rows, spec.nheads, spec.headdim, spec.dtype),
        "k": Array(kv[0], kv[1], spec.nheads_kv, spec.headdim, spec.dtype),
        "v": Array(kv[0], kv[1], spec.nheads_kv, spec.headdim_v, spec.dtype),
    }
    return Program(world_size, rank, False, (*made, *_merging(spec, rows, world_size)), arrays)


# Cached: every token has a new program, but this part does not change.
@lru_cache(maxsize=256)
def _merging(spec: AttentionSpec, rows: int, world_size: int) -> tuple[Op, ...]:
    packet = decode_packet(spec, rows)
    everyone = Gathered(packet, world_size)
    send, recv = Buffer("partial", packet.nbytes), Buffer("partials", everyone.nbytes)
    copies = (Copy(0, View("partial out")), Copy(1, View("partial lse")))
    posted = pack_and_post(
        "shards", 0, ops.Collective("all_gather"), message=packet, copies=copies, send=send,
        recv=recv, receives=everyone, nbytes=packet.nbytes * (world_size - 1),
    )  # fmt: skip
    return (
        *posted,
        ops.Wait("shards"),
        ops.Free((send,)),
        ops.Merge(recv, everyone, "out", "lse"),
    )


def decode_tiles(segments: Sequence[Segment], mask: Mask) -> tuple[Tile, ...]:
    """The tiles of all queries x one rank's rows, in folding order; the mask is over the cache.

    Takes one pass over the segments. Neighbouring segments that every query sees become one tile:
    in a causal cache of a thousand segments, all but the last few.
    """
    tiles = [tile for piece in mask.slices for tile in _slice_tiles(segments, piece)]
    return tuple(sorted(tiles, key=lambda tile: (tile.q_start, -tile.k_start)))


def _slice_tiles(segments: Sequence[Segment], piece: Slice) -> Iterator[Tile]:
    every_q = piece.q_start, piece.q_end
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
    run, row = 0, 0  # rows [run, row) are seen by every query
    for segment in segments:
        stop = row + segment.length
        last = segment.start + (segment.length - 1) * segment.stride
        if segment.start < all_from or last >= all_to:
            yield from _full(every_q, run, row)
            if last >= any_from and segment.start < any_to:
                yield from _cut(segment, row, piece)
            run = stop
        row = stop
    yield from _full(every_q, run, row)


def _full(q: tuple[int, int], run: int, row: int) -> list[Tile]:
    return [Tile(*q, run, row)] if run < row else []


def _cut(segment: Segment, row: int, piece: Slice) -> Iterator[Tile]:
    """Yields the tiles of a partly visible segment, which starts at local row `row`."""
    if segment.stride == 1:
        rows = Slice(piece.q_start, piece.q_end, segment.start, segment.start + segment.length)
        seen = piece & rows
        tile = None if seen is None else Tile(*seen.moved(0, row - segment.start))
        if tile is not None:
            yield tile
        return
    # Consecutive queries against every P-th key form no band: one tile for each query.
    for i in range(piece.q_start, piece.q_end):
        start = piece.k_start if piece.lo is None else max(piece.k_start, i + piece.lo)
        stop = piece.k_end if piece.hi is None else min(piece.k_end, i + piece.hi + 1)
        first, end = segment.rows_between(start, stop)
        yield from _full((i, i + 1), row + first, row + end)


@lru_cache(maxsize=256)
def decode_packet(spec: AttentionSpec, rows: int) -> Packet:
    """The message with a rank's partial out and lse of `rows` queries."""
    partial = result_arrays(replace(spec, dtype=spec.accum_dtype), rows)
    return packet_of([(x.shape, x.dtype) for x in partial.values()])
