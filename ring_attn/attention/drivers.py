"""Drivers: forward, backward and decoding, from a call's programs to its results.

Drivers know the strategies and stand above the machines, which know programs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.call import Call, DecodeCall
from ring_attn.core.cache import Sequences
from ring_attn.core.tiles import Tile
from ring_attn.machines.run import execute
from ring_attn.strategies.registry import program_of
from ring_attn.strategies.tree_decode import TABLES, program
from ring_attn.transport.base import Transport

# Step number of the exchange of greatest scores; larger than the program's step numbers.
MAXIMA = 1 << 20


class Forward(NamedTuple):
    """Results of a forward.

    Attributes:
        out: (batch, rows, nheads, headdim_v) in the dtype of q.
        lse: (batch, nheads, rows) in the type of the state.
        saved: tensors that the backward needs, in the order of the program's `saved`; none is a
            communication buffer.
        max_logits: (nheads,) greatest scores over all ranks; empty if not requested.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]
    max_logits: Tensor


class Gradients(NamedTuple):
    """Gradients of this rank's shards, and its share of the gradient of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None = None
) -> Forward:
    """Attention of this rank's queries to all keys.

    The shards are (batch, rows, heads, dim). Sinks (nheads,) are the same on every rank, and are
    used in the type of the state.
    """
    steps = call.programs.get(False) or program_of(call, backward=False)
    inputs = {"q": q, "k": k, "v": v}
    run = execute(steps, call, inputs, transport, sinks, call.strategy)
    saved = tuple(map(run.tensors.__getitem__, steps.saved))
    lse = run.tensors["lse"]
    max_logits = run.max_logits
    if call.spec.max_logits and max_logits is None:  # a rank without heads
        max_logits = lse.new_full((call.spec.nheads,), -torch.inf)
    max_logits = (
        lse.new_empty(0) if max_logits is None else transport.gather(max_logits, MAXIMA).amax(0)
    )
    return Forward(run.tensors["out"], lse, saved, max_logits)


def backward(
    call: Call,
    saved: tuple[Tensor, ...],
    dout: Tensor,
    transport: Transport,
    sinks: Tensor | None = None,
) -> Gradients:
    """Gradients of this rank's shards, accumulated in float32 and rounded once.

    The forward's saved tensors are neither changed nor kept.
    """
    names = (call.programs.get(False) or program_of(call, backward=False)).saved
    inputs = {**dict(zip(names, saved, strict=True)), "dout": dout}
    steps = call.programs.get(True) or program_of(call, backward=True)
    run = execute(steps, call, inputs, transport, sinks, call.strategy)
    dsinks, tensors = run.dsinks, run.tensors
    if sinks is not None and dsinks is None:  # a rank without heads
        dsinks = torch.zeros_like(sinks)
    return Gradients(tensors["dq"], tensors["dk"], tensors["dv"], dsinks)


def decode(
    call: DecodeCall,
    tiles: tuple[Tile, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    sinks: Tensor | None = None,
    sequences: Sequences | None = None,
    tables: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of all queries over the whole cache, with the same bits on every rank.

    The queries and the sinks are the same on every rank; k and v are this rank's rows of the
    cache, and may have none. `tiles` are all queries x these rows; or there are
    `sequences` with `tables`, their lengths and perhaps their pages.
    """
    # No operator takes a strided last dim.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    shape = (q.size(1), *k.shape[:2])
    steps = program(
        call, tiles, shape, transport.rank, transport.world_size, sequences, len(tables)
    )
    inputs = {"q": q, "k": k, "v": v, **dict(zip(TABLES, tables, strict=False))}
    run = execute(steps, call, inputs, transport, sinks, "decode")
    return run.tensors["out"], run.tensors["lse"]
