"""A ring of the triton backend in this process, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Traveller
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.ring import RingCall, make_call, ring_backward, ring_forward
from ring_attn.testing import Expected, Inputs, poisoned_empty
from ring_attn.transport.local import LocalTransport, run_local

Layouts = tuple[SequenceLayout, SequenceLayout]


def layouts_of(kind: str, mask: Mask, world_size: int) -> Layouts:
    """The same kind for queries and keys."""
    q, k = (SequenceLayout.from_name(kind, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
    return q, k


def spec_of(inputs: Inputs, softcap: float = 0.0, sinks: Tensor | None = None) -> AttentionSpec:
    """Sizes and options of a call."""
    q, k, v, _ = inputs
    return AttentionSpec(
        q.device.type, q.dtype, q.size(0), q.size(2), k.size(2), q.size(3), v.size(3), softcap,
        sinks is not None,
    )  # fmt: skip


def ring(
    inputs: Inputs,
    mask: Mask,
    layouts: Layouts,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    same_bits: bool | None = None,
    travels: Traveller | None = None,
    strided: bool = False,
) -> Expected:
    """Forward and backward of all ranks, put together; all memory starts as NaN.

    Args:
        inputs: of the whole.
        mask: over the whole.
        layouts: of queries and keys.
        scale: softmax_scale.
        softcap: 0 is none.
        sinks: (nheads,) float32 or None.
        same_bits: as for `make_call`.
        travels: what travels in the backward instead of what `make_call` chooses.
        strided: shards get the strides of `random_qkv(noncontiguous=True)`.
    """
    q, k, v, dout = inputs
    layout_q, layout_kv = layouts
    sides = (layout_q, layout_kv, layout_kv, layout_q)

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor | None, ...]:
        call = make_call(
            spec_of(inputs, softcap, sinks), layouts, mask, rank, softmax_scale=scale,
            backend="triton", same_bits=same_bits,
        )  # fmt: skip
        if travels is not None:
            call = replace(call, travels_back=travels, same_bits=False)
        shards = [layout.shard(x, rank) for x, layout in zip(inputs, sides, strict=True)]
        if strided:
            shards = [_strided(x) for x in shards]
        return _rank(Inputs(*shards), call, transport, sinks)

    with poisoned_empty():
        results = run_local(layout_q.world_size, work)
    out, lse, dq, dk, dv, dsinks = zip(*results, strict=True)
    return Expected(
        layout_q.unshard(out),
        layout_q.unshard(lse, 2),
        layout_q.unshard(dq),
        layout_kv.unshard(dk),
        layout_kv.unshard(dv),
        None if sinks is None else torch.stack(dsinks).sum(0),
    )


def _rank(
    shards: Inputs, call: RingCall, transport: LocalTransport, sinks: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, dout = shards
    out, lse = ring_forward(q, k, v, call, transport, sinks)
    return out, lse, *ring_backward(q, k, v, out, lse, dout, call, transport, sinks)


def _strided(x: Tensor) -> Tensor:
    spread = x.new_zeros(*x.transpose(1, 2).shape[:-1], 2 * x.size(-1))
    spread[..., ::2] = x.transpose(1, 2)
    return spread[..., ::2].transpose(1, 2)
