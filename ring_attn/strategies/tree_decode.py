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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ring_attn.backends import choose_backend, get_backend
from ring_attn.backends.base import decodes
from ring_attn.core.layout import Segment
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Band, Tile, make_tile
from ring_attn.core.spec import AttentionSpec, Packet, Scores
from ring_attn.core.state import State
from ring_attn.strategies.messages import Message
from ring_attn.strategies.observed import observed, observed_backend, observed_merge
from ring_attn.transport.base import Transport

ALL_ROWS = slice(None)


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
    return DecodeCall(spec, scale, choose_backend(spec, backend).name)


def hides_nothing(mask: Mask) -> bool:
    """Whether every query sees the whole cache, however long it is and whoever holds what."""
    return mask.left is None and (mask.right is None or mask.right >= mask.seqlen_q - 1)


def decode_tiles(segments: Sequence[Segment], mask: Mask) -> tuple[Tile, ...]:
    """The tiles of all queries x one rank's rows.

    It takes one pass over the segments of that rank. Neighbours that every query sees are one tile:
    of a causal cache that has grown in a thousand segments all but the last few.

    Args:
        segments: of the rank.
        mask: over all queries and the whole cache, one document.

    Returns:
        Tiles in folding order, as `plan.pair_tiles` has them.

    Example:
        >>> segments = [Segment(0, 4), Segment(9, 3)]
        >>> tiles = decode_tiles(segments, Mask(2, 12, causal=True))  # queries 10 and 11
        >>> [(tile.kv, tile.kind.name) for tile in tiles]
        [(slice(4, 7, None), 'CAUSAL'), (slice(0, 4, None), 'FULL')]
    """
    rows, diagonal = mask.seqlen_q, mask.seqlen_k - mask.seqlen_q
    every_q = slice(0, rows)
    # What a query sees moves on with it. Some query sees a position in [any_from, any_to); all see
    # those from where the last begins to see to where the first ends, [all_from, all_to).
    any_from, all_from, all_to, any_to = 0, 0, mask.seqlen_k, mask.seqlen_k
    if mask.left is not None:
        any_from = diagonal - mask.left
        all_from = any_from + rows - 1
    if mask.right is not None:
        all_to = diagonal + mask.right + 1
        any_to = all_to + rows - 1
    tiles: list[Tile] = []
    run, row = 0, 0  # rows [run, row) are seen by every query
    for segment in segments:
        stop = row + segment.length
        last = segment.start + (segment.length - 1) * segment.stride
        if segment.start < all_from or last >= all_to:
            tiles += _full(every_q, run, row)
            if last >= any_from and segment.start < any_to:
                tiles += _cut(segment, row, mask)
            run = stop
        row = stop
    tiles += _full(every_q, run, row)
    return tuple(sorted(tiles, key=lambda tile: (tile.q.start, -tile.kv.start)))


def _full(q: slice, run: int, row: int) -> list[Tile]:
    return [Tile(q, slice(run, row), Band(None, None))] if run < row else []


def _cut(segment: Segment, row: int, mask: Mask) -> list[Tile]:
    """The tiles of a segment, at that local row, which not every query sees all of."""
    diagonal = mask.seqlen_k - mask.seqlen_q
    if segment.stride == 1:
        shift = row + diagonal - segment.start  # of local j - i
        lo = None if mask.left is None else shift - mask.left
        hi = None if mask.right is None else shift + mask.right
        kv = slice(row, row + segment.length)
        tile = make_tile(slice(0, mask.seqlen_q), kv, lo, hi)
        return [] if tile is None else [tile]
    # Queries that follow one another against every P-th key are no band: query by query.
    tiles = []
    for i in range(mask.seqlen_q):
        start = 0 if mask.left is None else i + diagonal - mask.left
        stop = mask.seqlen_k if mask.right is None else i + diagonal + mask.right + 1
        first, end = segment.rows_between(start, stop)
        tiles += _full(slice(i, i + 1), row + first, row + end)
    return tiles


@lru_cache(maxsize=256)
def decode_packet(spec: AttentionSpec, rows: int) -> Packet:
    """The message of a rank: its partial out and lse of so many queries."""
    shapes = (spec.batch, rows, spec.nheads, spec.headdim_v), (spec.batch, spec.nheads, rows)
    return Packet(shapes, (spec.accum_dtype, spec.accum_dtype))


@observed("forward")
def tree_decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: tuple[Tile, ...],
    call: DecodeCall,
    transport: Transport,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of all queries to the whole cache, on every rank.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the same on every rank.
        k: (batch, rows, nheads_kv, headdim), this rank's rows of the cache; it may be none.
        v: (batch, rows, nheads_kv, headdim_v).
        tiles: of all queries x this rank's rows.
        call: the same on every rank.
        transport: of this rank.
        sinks: (nheads,), the same on every rank; used in the type of the state.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) in the dtype of q, `lse` (batch, nheads,
        seqlen_q); the same bits on every rank.
    """
    backend = observed_backend(get_backend(call.backend), transport)
    # Not rounded to the type of q: that is done once, at the root of the tree.
    if tiles and decodes(backend):
        partial = backend.decode(q, k, v, tiles, scores=call.scores)
    else:
        state = backend.new_state(q, v.size(-1))
        if tiles:
            state = backend.forward(q, k, v, tiles, state, scores=call.scores)
        partial = backend.finalize(state, call.spec.accum_dtype)
    packet = decode_packet(call.spec, q.size(1))
    out, lse = _gathered(packet, partial, transport)
    with observed_merge(transport, transport.world_size):
        return _merged(out, lse, sinks, q.dtype)


def gather_lengths(rows: int, device: torch.device, transport: Transport) -> list[int]:
    """Rows of the cache on each rank: a message of 16 bytes, which on CUDA the host waits for."""
    mine = torch.tensor([rows, 0], device=device).view(torch.uint8)
    everyone = mine.new_empty(transport.world_size * mine.numel())
    transport.all_gather("shards", 0, mine, everyone)
    transport.wait("shards")
    lengths: list[int] = everyone.view(torch.int64)[::2].tolist()
    return lengths


def _gathered(
    packet: Packet, partial: tuple[Tensor, Tensor], transport: Transport
) -> tuple[Tensor, Tensor]:
    """`out` (P, batch, seqlen_q, nheads, headdim_v) and `lse` (P, batch, nheads, seqlen_q)."""
    world_size = transport.world_size
    send = torch.empty(packet.nbytes, dtype=torch.uint8, device=partial[0].device)
    Message(packet, send).pack(partial, ALL_ROWS)
    recv = send.new_empty(world_size * packet.nbytes)
    transport.all_gather("shards", 0, send, recv)
    transport.wait("shards")
    numbers = recv.view(world_size, -1).view(packet.dtypes[0])
    out, lse = (
        numbers[:, offset // numbers.itemsize :][:, : math.prod(shape)].unflatten(1, shape)
        for offset, shape in zip(packet.offsets, packet.shapes, strict=False)
    )
    return out, lse


def _merged(
    out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The partial results of all ranks as one, in a tree: each level is one merge of many states.

    Element by element, hence the same bits whatever the number of threads.
    """
    world_size, batch = out.shape[:2]
    acc, m = out.flatten(0, 1), lse.flatten(0, 1)
    l = torch.ones_like(m)
    left = world_size
    while left > 1:
        half = -(-left // 2)
        lower, upper = slice(0, (left - half) * batch), slice(half * batch, left * batch)
        state = _state_of(acc[lower])
        # The first of all rows is taken over, not copied: the second is merged into acc, m and l.
        state.fold(ALL_ROWS, acc[lower], m[lower], l[lower])
        state.fold(ALL_ROWS, acc[upper], m[upper], l[upper])
        left = half
    sinks = None if sinks is None else sinks.to(acc.dtype)
    root = _state_of(acc[:batch], sinks)
    # Of its own memory: a result must not keep those of all ranks alive.
    root.fold(ALL_ROWS, *(x[:batch].clone() for x in (acc, m, l)))
    return root.finalize(dtype)


def _state_of(acc: Tensor, sinks: Tensor | None = None) -> State:
    batch, rows, nheads, headdim_v = acc.shape
    return State((batch, rows, nheads, headdim_v), acc.dtype, acc.device, sinks)
