"""Runs a ring of the triton backend in this process, over any tensors, for the kernel tests."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import make_call
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
    """Joins the results of all ranks, forward and backward; all memory starts as NaN.

    `travels` overrides `make_call`'s choice of the side that travels in the backward.
    """
    spec = AttentionSpec.of(*inputs[:3], softcap, sinks)

    def make(rank: int) -> Call:
        call = make_call(
            Strategy(),
            spec,
            layouts,
            mask,
            rank,
            softmax_scale=scale,
            backend="triton",
            same_bits=same_bits,
        )  # fmt: skip
        return call if travels is None else replace(call, gradients=(travels, False))

    calls = [make(rank) for rank in range(layouts[0].world_size)]
    return whole_of(run_calls(calls, inputs, layouts, sinks, noncontiguous=strided), layouts)
