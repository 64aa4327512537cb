"""Closed-form sizes: messages of a ring, results, operations, and bytes that a step merges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Packet
from ring_attn.core.program import Array
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import Side
from ring_attn.core.work import needed_rows, totals

# If dq is computed apart from dk and dv, its pass has 3 of 7 matrix products, since both passes
# recompute the scores and dp. Rates of devices count a backward as one pass of 5 products.
SHARE_OF_DQ = 3 / 7

# Names of the tensors in messages with a shard and with its gradients, by the side that is sent.
SHARD: dict[Side, tuple[str, ...]] = {"kv": ("k", "v"), "q": ("q", "dout", "lse", "delta")}
MOVING: dict[Side, tuple[str, ...]] = {"kv": ("dk", "dv"), "q": ("dq",)}


# Makes a message from a spec, the side that is sent and a number of rows.
MakePacket = Callable[[AttentionSpec, Side, int], Packet]


@lru_cache(maxsize=4096)
def shard_packet(spec: AttentionSpec, sent_side: Side, rows: int) -> Packet:
    """The message with `rows` rows of the side that is sent: K and V, or Q, dO, lse and delta."""
    batch, dtype, wide = spec.batch, spec.dtype, spec.accum_dtype
    if sent_side == "kv":
        k = (batch, rows, spec.nheads_kv, spec.headdim)
        v = (batch, rows, spec.nheads_kv, spec.headdim_v)
        return Packet((k, v), (dtype, dtype))
    q = (batch, rows, spec.nheads, spec.headdim)
    dout = (batch, rows, spec.nheads, spec.headdim_v)
    lse = delta = (batch, spec.nheads, rows)
    return Packet((q, dout, lse, delta), (dtype, dtype, wide, wide))


@lru_cache(maxsize=4096)
def gradient_packet(spec: AttentionSpec, sent_side: Side, rows: int) -> Packet:
    """The message with gradients of the side that is sent, in the accumulation type."""
    if sent_side == "kv":
        return shard_packet(replace(spec, dtype=spec.accum_dtype), sent_side, rows)
    return Packet(((spec.batch, rows, spec.nheads, spec.headdim),), (spec.accum_dtype,))


@lru_cache(maxsize=1024)
def choose_sent_side(
    spec: AttentionSpec,
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    *,
    direct: bool = False,
) -> Side:
    """The side whose travel costs fewer bytes in the backward, over all ranks; KV if equal.

    `direct`: each rank gets the rows that it needs straight from their owner; else shards go round
    a ring, in as many hops for both sides. With 16-bit tensors and float32 gradients, KV costs 12
    bytes an element of each row and KV head, and the Q side 8 an element of each row and head. So
    KV is sent with grouped heads, and Q with few queries or ungrouped heads.
    """

    def cost(side: Side) -> int:
        if direct:
            rows = needed_rows(layout_q, layout_kv, mask, side)
        else:
            rows = totals(layout_q, layout_kv, mask).moving[side].count
        return _backward_bytes(spec, side, rows)

    return "q" if cost("q") < cost("kv") else "kv"


def _backward_bytes(spec: AttentionSpec, sent_side: Side, rows: Tensor) -> int:
    """Bytes of messages with these numbers of rows of a side, and of their gradients."""
    counts = torch.bincount(rows.flatten())
    return sum(
        int(counts[n])
        * (shard_packet(spec, sent_side, n).nbytes + gradient_packet(spec, sent_side, n).nbytes)
        for n in counts.nonzero().flatten().tolist()
    )


def result_arrays(spec: AttentionSpec, rows: int) -> dict[str, Array]:
    """Sizes of out and lse with `rows` rows."""
    return {
        "out": Array(spec.batch, rows, spec.nheads, spec.headdim_v, spec.dtype),
        "lse": Array(spec.batch, rows, spec.nheads, None, spec.accum_dtype),
    }


def flops(area: int, spec: AttentionSpec, *, backward: bool) -> int:
    """Return the floating point operations for `area` visible pairs: 2 matmuls forward, 5 backward.

    `backward` True counts the backward alone, False the forward.
    """
    qk, pv = 2 * spec.headdim, 2 * spec.headdim_v
    per_pair = 3 * qk + 2 * pv if backward else qk + pv
    return area * per_pair * spec.batch * spec.nheads


def merged_bytes(spec: AttentionSpec) -> int:
    """Bytes that `State.fold` moves per element of a step's result.

    The fold casts the result, scales the state in place, and adds the result to the state.
    """
    narrow, wide = spec.dtype.itemsize, spec.accum_dtype.itemsize
    return 5 * wide + (narrow + wide if narrow < wide else 0)
