"""A ring of the triton backend in this process, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Traveller
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.ring import RingCall, make_call
from ring_attn.testing import Expected, Inputs
from tests.strategies import run_calls

Layouts = tuple[SequenceLayout, SequenceLayout]


def layouts_of(kind: str, mask: Mask, world_size: int) -> Layouts:
    """The same kind for queries and keys."""
    q, k = (SequenceLayout.from_name(kind, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
    return q, k


def spec_of(inputs: Inputs, softcap: float = 0.0, sinks: Tensor | None = None) -> AttentionSpec:
    """Sizes and options of a call."""
    return AttentionSpec.of(*inputs[:3], softcap, sinks)


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
    spec = spec_of(inputs, softcap, sinks)

    def make(rank: int) -> RingCall:
        call = make_call(
            spec, layouts, mask, rank, softmax_scale=scale, backend="triton", same_bits=same_bits
        )
        return call if travels is None else replace(call, travels_back=travels, in_order=False)

    if strided:
        return run_calls(make, inputs, layouts, sinks, _strided)
    return run_calls(make, inputs, layouts, sinks)


def _strided(x: Tensor) -> Tensor:
    spread = x.new_zeros(*x.transpose(1, 2).shape[:-1], 2 * x.size(-1))
    spread[..., ::2] = x.transpose(1, 2)
    return spread[..., ::2].transpose(1, 2)
