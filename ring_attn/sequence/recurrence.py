"""Recurrent layers on a split sequence: linear attention, state spaces, causal convolutions.

A recurrence maps its state along a run of positions by `end = A start + B`. Each rank computes A
and B of its runs by the layer's own kernel, from a state of zeros. These pairs travel to the ranks
of later runs, which compose start states, in the order of positions (`core.runs` says how).

    zigzag, 2 ranks     rank 0    rank 1    rank 1    rank 0
    positions           0 1       2 3       4 5       6 7
    maps                A0 B0     A1 B1     A2 B2
    start states        0         B0        A1 B0 + B1    A2 (A1 B0 + B1) + B2

A document starts from zeros: it cuts a run into pieces. What a start state contributes is added to
outputs, which are affine in it (`recurrence`), or the kernel runs again from the start state
(`linear_attention`). In the backward gradients of start states travel to earlier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.sequence.halo import halo
from ring_attn.sequence.runs import Piece, last_run, pieces_of
from ring_attn.sequence.states import Maps, StartStates, WithEndGradients, entering, no_autocast
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type
from ring_attn.values.compiling import left_out_of_graphs

__all__ = ["Part", "Piece", "causal_conv", "linear_attention", "recurrence"]

NOT_COMPILED = left_out_of_graphs("recurrences on split rows are not compiled: leave fullgraph out")

# Stands for the runs of a rank that has no rows.
NO_RUNS = ((Piece(0, 0, 0, True, 0),),)


class Part(NamedTuple):
    """Results of a layer for one piece, from a state of zeros.

    Attributes:
        out: (batch, rows, ...), the outputs.
        end: the state after the piece.
        decay: A of `end = A start + B`: a factor of the state, of a shape that broadcasts to it.
        add: out and a start state -> out of that start state.
    """

    out: Tensor
    end: Tensor
    decay: Tensor
    add: Callable[[Tensor, Tensor], Tensor]


@NOT_COMPILED
def recurrence(
    run: Callable[[Piece], Part],
    layout: SequenceLayout,
    *,
    cu_seqlens: Tensor | None = None,
    group: Group = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of a recurrent layer on this rank's rows, from what it computes of single pieces.

    Every rank of the group must call it, and take part in a backward. `docs/hybrid.md` has an
    example.

    Args:
        run: computes a piece of the shard from a state of zeros. A rank without rows calls it for
            a piece of length 0, of which `Piece.of` makes one row of zeros.
        layout: how the sequence is split. A striped layout has as many runs as rows, and exchanges
            a state for each.
        cu_seqlens: boundaries of documents in the whole sequence.
        group: as for `ring_attention`.
        output_final_state: whether to return a final state, which has no gradient.

    Returns:
        The outputs, (batch, rows, ...), and the state after the sequence's last row, equal on all
        ranks, or None. States are composed in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: rows, cu_seqlens, layout or a decay do not fit.
        NotImplementedError: a final state whose gradient autograd would need.
        RuntimeError: states of pieces or ranks differ in shape; else as `ring_attention`.
    """
    with _checked(layout, cu_seqlens, group) as (maps, runs):
        parts = [[run(piece) for piece in pieces] for pieces in runs or NO_RUNS]
        passing = [len(pieces) == 1 and not pieces[0].first for pieces in runs or NO_RUNS]
        lasts = [of_run[-1] for of_run in parts]
        ends = _stacked([part.end for part in lasts], len(runs))
        factors = [_decay(part, on) for part, on in zip(lasts, passing, strict=True)]
        decays = _stacked(factors, len(runs)).to(ends.dtype)
        starts = StartStates.apply(decays, ends, maps)

        def after(n: int) -> Tensor:
            return ends[n] + decays[n] * starts[n] if passing[n] else ends[n]

        final = _final_state(after, ends, maps) if output_final_state else None
    # No rows, but they depend on the start states: so every rank takes part in the backward.
    out = parts[0][0].out
    outs = [out[:, :0] + starts[:0].sum().to(out.dtype)]
    for n, (first, *rest) in enumerate(parts[: len(runs)]):
        with no_autocast(starts):
            outs.append(first.out if runs[n][0].first else first.add(first.out, starts[n]))
        outs += [part.out for part in rest]
    return torch.cat(outs, 1), final


@NOT_COMPILED
def linear_attention(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    rows: Mapping[str, Tensor],
    cu_seqlens: Tensor | None = None,
    group: Group = None,
    output_final_state: bool = False,
    float32: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention of any kind on this rank's rows, by a kernel that takes a state.

    For delta rules and others whose state is multiplied by a matrix. The kernel runs once without
    gradients for A and B: values get `headdim` columns of zeros, whose start state is the unit
    matrix and whose end state is A. Then it runs from the start states.

    Args:
        kernel: maps q, k, v, `rows`, `initial_state` and `output_final_state` to outputs and a
            state (batch, heads, headdim, headdim_v), as fla's `chunk_gated_delta_rule` and others.
        q, k, v: this rank's rows, (batch, rows, heads, headdim); v (batch, rows, heads_v,
            headdim_v). The state has the heads of v.
        layout: how the sequence is split.
        rows: other tensors that the kernel takes, (batch, rows, ...), by name: `g`, `beta`.
        cu_seqlens: boundaries of documents in the whole sequence.
        group, output_final_state: as for `recurrence`.
        float32: whether A and B of inputs of 16 bits are computed in float32, so that gradients
            through states are not rounded twice. False for kernels that refuse it, as fla's.
        options: handed on to the kernel.

    Returns:
        (batch, rows, heads_v, headdim_v), like v, and the final state or None as `recurrence`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `recurrence`, or from `kernel`.
    """
    headdim, headdim_v = k.size(-1), v.size(-1)

    def run(piece: Piece, start: Tensor | None, *, wide: bool = False) -> tuple[Tensor, Tensor]:
        cut = {name: piece.of(x) for name, x in {"q": q, "k": k, "v": v, **rows}.items()}
        if wide:
            cut = {name: x.to(_wide(x)) for name, x in cut.items()} if float32 else cut
            cut["v"] = functional.pad(cut["v"], (0, headdim))
        q_, k_, v_ = (cut.pop(name) for name in "qkv")
        given = {"initial_state": start, "output_final_state": True, **cut, **options}
        out, end = kernel(q_, k_, v_, **given)
        if end.shape[-2:] != (wanted := (headdim, v_.size(-1))):
            raise ValueError(f"the kernel's state must end in {wanted}, got {tuple(end.shape)}")
        return out, end

    with _checked(layout, cu_seqlens, group, matrix=True) as (maps, runs):
        unit = functional.pad(torch.eye(headdim, dtype=_wide(v), device=v.device), (headdim_v, 0))
        unit = unit.expand(v.size(0), v.size(2), -1, -1).contiguous()
        pieces = [piece for of_run in runs or NO_RUNS for piece in of_run]
        done = {piece: run(piece, None) for piece in pieces if piece.first}
        with torch.no_grad():
            probes = {first: run(first, unit, wide=True) for first, *_ in runs if not first.first}
        reads = [out[..., headdim_v:].contiguous() for out, _ in probes.values()]
        known = {piece: end for piece, (_, end) in probes.items()}
        del probes  # the outputs are as large as the values
        for piece, (_, end) in done.items():  # they start documents, so that A is zero
            known[piece] = functional.pad(end.detach(), (0, headdim))
        lasts = [of_run[-1] for of_run in runs or NO_RUNS]
        states = _stacked([known[last] for last in lasts], len(runs))
        ends, decays = states.split([headdim_v, headdim], -1)
        starts = entering("forward", decays, ends, maps)
        for (first, *_), start in zip(runs, starts, strict=True):
            if not first.first:
                done[first] = run(first, start)
        ends = _stacked([done[last][1] for last in lasts], len(runs))
        final = _final_state(ends.__getitem__, ends, maps) if output_final_state else None
        out = torch.cat([done[piece][0] for piece in pieces], 1).narrow(1, 0, q.size(1))
        return WithEndGradients.apply(out, ends, decays, maps, *reads), final


def causal_conv(
    conv: Callable[[Tensor], Tensor],
    x: Tensor,
    width: int,
    *,
    layout: SequenceLayout,
    cu_seqlens: Tensor | None = None,
    group: Group = None,
    dim: int = 1,
) -> Tensor:
    """A causal convolution of this rank's rows, which sees the rows before its runs.

    Args:
        conv: maps rows to as many rows, each of which sees itself and `width - 1` rows before it,
            in place of missing ones zeros.
        x: this rank's shard, with the sequence in `dim`.
        width: number of rows that one row sees, at least 1.
        layout: how the sequence is split.
        cu_seqlens: boundaries of documents in the whole sequence, which no row sees across.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        A tensor like `conv(x)`.

    Raises:
        ValueError, TypeError, RuntimeError: as `halo`.
    """
    with _checked(layout, cu_seqlens, group) as (maps, runs):
        before = as_int("width", width, least=1) - 1
        around = halo(x, layout, before, group=group, dim=dim)
        outs = [] if runs else [conv(around[0]).narrow(dim, 0, 0)]
        for whole, pieces in zip(around, runs, strict=False):
            for piece in pieces:
                # Rows of the document before the piece: those of others count as zeros.
                begins = max(c for c in maps.cuts if c <= piece.position)
                known = min(before, piece.position - begins)
                row = before + piece.start - pieces[0].start
                seen = whole.narrow(dim, row - known, known + piece.length)
                outs.append(conv(seen).narrow(dim, known, piece.length))
        return torch.cat(outs, dim)


@contextmanager
def _checked(
    layout: SequenceLayout, cu_seqlens: Tensor | None, group: Group, matrix: bool = False
) -> Iterator[tuple[Maps, tuple[tuple[Piece, ...], ...]]]:
    """Checks what all layers get; gives this rank's runs. Tells other ranks of errors within."""
    process_group = groups.check_group(group)
    with reporting(process_group):
        check_type("layout", layout, SequenceLayout)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        given = checks.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
        rows = layout.shard_len(rank) if rank < layout.world_size else 0
        checks.check_layout("x", layout, rows, max(given, default=None), rank, world_size)
        cuts = tuple(sorted({0, *given, layout.seqlen}))
        yield Maps(layout, cuts, process_group, matrix), pieces_of(layout, rank, cuts)


def _final_state(after: Callable[[int], Tensor], ends: Tensor, maps: Maps) -> Tensor:
    """The state after the sequence, on all ranks; `after(n)` is that after run n of this rank."""
    owner, number = last_run(maps.layout)
    if ends.requires_grad:
        raise NotImplementedError(
            "the end state of a recurrence on split rows has no gradient: call under torch.no_grad"
        )
    owns = dist.get_rank(maps.group) == owner
    end = after(number).contiguous() if owns else ends.new_empty(ends.shape[1:])
    groups.from_owner(end, maps.group, owner)
    return end


def _decay(part: Part, passes: bool) -> Tensor:
    """The decay with as many dims as the state; no variable where no state passes."""
    check_type("decay", part.decay, Tensor)
    shape, given = tuple(part.end.shape), tuple(part.decay.shape)
    whole = (1,) * (len(shape) - len(given)) + given
    if len(whole) > len(shape) or any(n not in (1, m) for n, m in zip(whole, shape, strict=True)):
        raise ValueError(f"decay must have the shape {shape} or broadcast to it, got {given}")
    return (part.decay if passes else part.decay.detach()).view(whole)


def _stacked(each: list[Tensor], num: int) -> Tensor:
    """The tensors of the first `num` runs, in the dtype in which states are composed."""
    return torch.stack(each)[:num].to(_wide(each[0]))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
