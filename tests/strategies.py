"""Calls of any strategy with all ranks in this process, held against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.base import Call
from ring_attn.testing import (
    Expected,
    Inputs,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from ring_attn.transport.local import LocalTransport, run_local

Layouts = tuple[SequenceLayout, SequenceLayout]
Config = tuple[tuple[str, Any], ...]

DOCUMENTS = (0, 9, 9, 10, 40, 61)

MASKS = {
    "full": Mask(61, 61),
    "causal": Mask(61, 61, causal=True),
    "causal window": Mask(61, 61, causal=True, window_size=(11, -1)),
    "window": Mask(61, 61, window_size=(5, 7)),
    "longer kv": Mask(37, 61, causal=True),
    "rows that see nothing": Mask(61, 37, causal=True),
    "documents": Mask(61, 61, True, (-1, -1), DOCUMENTS, DOCUMENTS),
    "documents of other lengths": Mask(61, 50, False, (9, -1), DOCUMENTS, (0, 9, 12, 12, 30, 50)),
    "fewer rows than ranks": Mask(3, 3, causal=True),
    "no keys": Mask(7, 0),
}

LAYOUTS = ("contiguous", "zigzag", "striped", "boundaries")


def config(**sizes: Any) -> Config:
    """Sizes as `random_qkv` takes them, hashable."""
    return tuple(sorted({"nheads": 4, "nheads_kv": 2, "headdim": 8, **sizes}.items()))


@cache
def case(
    mask: Mask, sizes: Config, softcap: float = 0.0, with_sinks: bool = False
) -> tuple[Inputs, Expected, Expected]:
    """Inputs, the oracle and plain PyTorch."""
    inputs = random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **dict(sizes))
    scores = {"softcap": softcap, "sinks": sinks_of(inputs) if with_sinks else None}
    oracle, plain = (f(*inputs, mask, **scores) for f in (dense_gradients, plain_gradients))
    return inputs, oracle, plain


def sinks_of(inputs: Inputs) -> Tensor:
    return random_sinks(inputs.q.size(2), seed=1)


def spec_of(inputs: Inputs, softcap: float = 0.0, with_sinks: bool = False) -> AttentionSpec:
    q, k, v, _ = inputs
    return AttentionSpec(
        q.device.type, q.dtype, q.size(0), q.size(2), k.size(2), q.size(3), v.size(3),
        softcap, with_sinks,
    )  # fmt: skip


def layout_of(kind: str, seqlen: int, world_size: int) -> SequenceLayout:
    """By name; "boundaries" has everything on the first and the last rank, and nothing between."""
    if kind != "boundaries":
        return SequenceLayout.from_name(kind, seqlen, world_size)
    return SequenceLayout.boundaries([0] + [seqlen // 3] * (world_size - 1) + [seqlen])


def layouts_of(kind: str, mask: Mask, world_size: int) -> Layouts:
    """Of queries and keys."""
    q, kv = (layout_of(kind, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
    return q, kv


def run_calls(
    make: Callable[[int], Call],
    inputs: Inputs,
    layouts: Layouts,
    sinks: Tensor | None = None,
    stored: Callable[[Tensor], Tensor] = lambda x: x,
) -> Expected:
    """What all ranks of a call compute, put together; what they allocate starts as NaN.

    Args:
        make: a rank's call.
        inputs: whole q, k, v, dout.
        layouts: of queries and keys.
        sinks: (nheads,).
        stored: a shard with other strides.
    """
    layout_q, layout_kv = layouts
    sides = (layout_q, layout_kv, layout_kv, layout_q)

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor | None, ...]:
        call = make(rank)
        q, k, v, dout = (stored(x.shard(t, rank)) for t, x in zip(inputs, sides, strict=True))
        out, lse, saved = call.forward(q, k, v, transport, sinks)
        return out, lse, *call.backward(saved, dout, transport, sinks)

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


def assert_holds(
    make: Callable[[AttentionSpec, Layouts, int], Call],
    mask: Mask,
    layouts: Layouts,
    sizes: Config,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> Expected:
    """Runs a call on every rank and holds all results within the bound.

    Args:
        make: from spec, layouts and rank, that rank's call.
        mask: over the lengths of the layouts.
        layouts: of queries and keys.
        sizes: of `config`.
        softcap: as for `ring_attention`.
        with_sinks: likewise.
    """
    inputs, oracle, plain = case(mask, sizes, softcap, with_sinks)
    spec = spec_of(inputs, softcap, with_sinks)
    sinks = sinks_of(inputs) if with_sinks else None
    got = run_calls(lambda rank: make(spec, layouts, rank), inputs, layouts, sinks)
    verdicts = check_all(got, oracle, plain)
    assert all(verdict.ok for verdict in verdicts), [str(v) for v in verdicts if not v.ok]
    return got
