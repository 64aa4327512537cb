"""A ring of the triton backend in this process, over any tensors, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.core.plan import Traveller
from ring_attn.core.spec import AttentionSpec
from ring_attn.strategies.ring import RingCall, make_call
from ring_attn.testing import Expected, Inputs, Layouts, run_calls, whole_of


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

    With `travels` that side travels in the backward, whatever `make_call` chooses.
    """
    spec = AttentionSpec.of(*inputs[:3], softcap, sinks)

    def make(rank: int) -> RingCall:
        call = make_call(
            spec, layouts, mask, rank, softmax_scale=scale, backend="triton", same_bits=same_bits
        )
        return call if travels is None else replace(call, travels_back=travels, in_order=False)

    calls = [make(rank) for rank in range(layouts[0].world_size)]
    return whole_of(run_calls(calls, inputs, layouts, sinks, noncontiguous=strided), layouts)
