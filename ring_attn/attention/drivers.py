"""Drivers: forward, backward and decoding, from a call's programs to its results.

Drivers use the strategies and the machines; the machines know only programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.call import Call, DecodeCall
from ring_attn.core.cache import Sequences
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Tile
from ring_attn.machines.run import execute
from ring_attn.strategies import tree_decode
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.transport.base import Transport

# Step number of the exchange of greatest scores; larger than the step numbers of programs.
MAX_LOGITS_STEP = 1 << 20


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


def calls_of_ranks(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    *,
    softmax_scale: float | None,
    backend: str,
    same_bits: bool | None,
) -> list[Call]:
    """Return the calls of all ranks of the layouts; the arguments are those of `make_call`."""
    return [
        make_call(
            strategy,
            spec,
            layouts,
            mask,
            rank,
            softmax_scale=softmax_scale,
            backend=backend,
            same_bits=same_bits,
        )
        for rank in range(layouts[0].world_size)
    ]


class Gradients(NamedTuple):
    """Gradients of this rank's shards, and its share of the gradient of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None = None
) -> Forward:
    """Compute attention of this rank's queries to all keys.

    The shards are (batch, rows, heads, dim). Sinks (nheads,) are the same on every rank, and are
    used in the type of the state.
    """
    # Read from the call first: `program_of` takes longer.
    program = call.programs.get(False) or program_of(call, backward=False)
    inputs = {"q": q, "k": k, "v": v}
    run = execute(program, call, inputs, transport, sinks, kind=call.strategy)
    lse = run.tensors["lse"]
    max_logits = lse.new_empty(0)
    if call.spec.max_logits:
        own_max_logits = run.max_logits
        if own_max_logits is None:  # a rank without heads
            own_max_logits = lse.new_full((call.spec.nheads,), -torch.inf)
        # (world_size, nheads) -> (nheads,)
        max_logits = transport.gather(own_max_logits, MAX_LOGITS_STEP).amax(0)
    return Forward(
        out=run.tensors["out"],
        lse=lse,
        saved=tuple(map(run.tensors.__getitem__, program.saved)),
        max_logits=max_logits,
    )


def backward(
    call: Call,
    saved: tuple[Tensor, ...],
    dout: Tensor,
    transport: Transport,
    sinks: Tensor | None = None,
) -> Gradients:
    """Compute the gradients of this rank's shards, accumulated in float32 and rounded once.

    The forward's saved tensors are neither changed nor kept.
    """
    forward_program = call.programs.get(False) or program_of(call, backward=False)
    inputs = dict(zip(forward_program.saved, saved, strict=True))
    inputs["dout"] = dout
    program = call.programs.get(True) or program_of(call, backward=True)
    run = execute(program, call, inputs, transport, sinks, kind=call.strategy)
    dsinks = run.dsinks
    if sinks is not None and dsinks is None:  # a rank without heads
        dsinks = torch.zeros_like(sinks)
    return Gradients(
        dq=run.tensors["dq"], dk=run.tensors["dk"], dv=run.tensors["dv"], dsinks=dsinks
    )


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
    """Compute `out` and `lse` of all queries over the whole cache.

    The results have the same bits on every rank.

    Args:
        call: the call.
        tiles: all queries x this rank's rows; empty if there are `sequences`.
        q: the queries, the same on every rank.
        k, v: this rank's rows of the cache; there may be none.
        transport: the connections to the other ranks.
        sinks: (nheads,), the same on every rank.
        sequences: the parts of sequences on this rank, if sequences have different lengths.
        tables: the lengths of sequences and, if rows are in pages, the pages.
    """
    # No operator supports a strided last dim.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    kv_dim_0, kv_dim_1 = k.shape[:2]
    program = tree_decode.program(
        call,
        tiles,
        shape=(q.size(1), kv_dim_0, kv_dim_1),
        rank=transport.rank,
        world_size=transport.world_size,
        sequences=sequences,
        num_tables=len(tables),
    )
    inputs = {"q": q, "k": k, "v": v}
    inputs |= dict(zip(tree_decode.TABLES, tables, strict=False))
    run = execute(program, call, inputs, transport, sinks, kind="decode")
    return run.tensors["out"], run.tensors["lse"]
