"""Recurrent layers on a split sequence: linear attention, state spaces, causal convolutions.

A recurrence maps its state along a run of positions by `end = A start + B`. Each rank computes A
and B of its runs by the layer's own kernel, from a state of zeros. These pairs, whose size does not
depend on the length, travel to the ranks of later runs, each of which composes the start states of
its own runs, in the order of positions (`core.runs` says how).

    zigzag, 2 ranks     rank 0    rank 1    rank 1    rank 0
    positions           0 1       2 3       4 5       6 7
    travel              B0        A1 B1     A2 B2
    start states        0         B0        A1 B0 + B1    A2 (A1 B0 + B1) + B2

A document starts from zeros: it cuts a run into pieces, and no state passes its first position.
What a start state contributes is added to outputs, which are affine in it (`recurrence`), or the
kernel runs again from the start state (`linear_attention`). In the backward gradients of start
states travel to earlier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn import groups, refusals
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import Piece, last_run, pieces_of, runs_of
from ring_attn.core.values import as_int, check_type
from ring_attn.neighbours import halo
from ring_attn.states import applied, no_autocast, start_states, with_end_gradients
from ring_attn.transport.p2p import tell_refusal

__all__ = ["LinearKernel", "Part", "Piece", "causal_conv", "linear_attention", "recurrence"]

# Stands for the runs of a rank that has no rows.
NO_RUNS = ((Piece(0, 0, True, 0),),)


class Part(NamedTuple):
    """Results of a layer for one piece, from a state of zeros.

    Attributes:
        out: (batch, rows, ...), the outputs.
        end: the state after the piece.
        decay: A of `end = A start + B`: a factor of the state, of a shape that broadcasts to it;
            of a matrix recurrence (..., d, d), multiplied from the left, or None if `first`.
        add: out and a start state -> out of that start state.
    """

    out: Tensor
    end: Tensor
    decay: Tensor | None
    add: Callable[[Tensor, Tensor], Tensor]


class LinearKernel(Protocol):
    """Linear attention as in flash-linear-attention's chunked functions."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        initial_state: Tensor | None,
        output_final_state: bool,
        **rows: Any,
    ) -> tuple[Tensor, Tensor]:
        """(batch, rows, heads, headdim) -> out like v, state (batch, heads, headdim, headdim_v)."""


def recurrence(
    run: Callable[[Piece], Part],
    layout: SequenceLayout,
    *,
    matrix: bool = False,
    cu_seqlens: Tensor | None = None,
    group: Group = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs of a recurrent layer on this rank's rows, from what it computes of single pieces.

    Every rank of the group must call it, and take part in a backward.

    Args:
        run: computes a piece of the shard from a state of zeros. A rank without rows calls it for
            a piece of length 0, of which `Piece.of` makes one row of zeros.
        layout: how the sequence is split. A striped layout has as many runs as rows, and exchanges
            a state for each.
        matrix: whether `decay` is a matrix, as of a delta rule.
        cu_seqlens: boundaries of documents in the whole sequence.
        group: as for `ring_attention`.
        output_final_state: whether to return a final state, which has no gradient.

    Returns:
        The outputs, (batch, rows, ...), and the state after the sequence's last row, equal on all
        ranks, or None. States are composed in float32 (float64 for float64).

    Raises:
        ValueError: a wrong number of rows, cu_seqlens that end beyond the layout, a decay that does
            not fit its state, or a final state of no rows.
        NotImplementedError: a final state whose gradient autograd would need.
        TypeError: a type that is not accepted, such as a layout given by name.
        RuntimeError: states of pieces or ranks differ in shape; else as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> from ring_attn.recurrence import Part, recurrence
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> x = layout.shard(torch.ones(1, 8), rank)
        >>> def running_sum(piece):
        ...     out = piece.of(x).cumsum(1)
        ...     return Part(out, out[:, -1], torch.ones(1), lambda out, start: out + start[:, None])
        >>> out, _ = recurrence(running_sum, layout)
        >>> ring_attn.unshard(out, layout).tolist()
        [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]
    """
    process_group = groups.check_group(group)
    try:
        cuts = _boundaries(layout, cu_seqlens, process_group)
        runs = pieces_of(layout, dist.get_rank(process_group), cuts)
        parts = [[run(piece) for piece in pieces] for pieces in runs or NO_RUNS]
        wide = _wide(parts[0][0].end)
        ends = torch.stack([of_run[-1].end.to(wide) for of_run in parts])[: len(runs)]
        decays = torch.stack([_decay(of_run[-1], matrix).to(wide) for of_run in parts])
        place = list(layout.numbers), list(cuts), matrix, process_group.group_name
        starts = start_states(decays[: len(runs)], ends, *place)

        def after(n: int) -> Tensor:
            passes = len(runs[n]) == 1 and not runs[n][0].first
            return ends[n] + applied(decays[n], starts[n], matrix) if passes else ends[n]

        final = _final_state(after, ends, layout, process_group) if output_final_state else None
    except Exception as error:
        tell_refusal(error, process_group)
        raise
    outs = []
    for n, pieces in enumerate(runs):
        first, *rest = parts[n]
        with no_autocast(starts):
            outs.append(first.out if pieces[0].first else first.add(first.out, starts[n]))
        outs += [part.out for part in rest]
    # No rows, but they depend on the start states: so every rank takes part in the backward.
    none = parts[0][0].out[:, :0] + starts[:0].sum()
    return torch.cat([*outs, none.to(outs[0].dtype)], 1) if outs else none, final


def linear_attention(
    kernel: LinearKernel,
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

    For the gated delta rule, Kimi's delta attention and others whose state is multiplied by a
    matrix. The kernel runs once without gradients for A and B of this rank's runs: values get
    `headdim` columns of zeros, whose start state is the unit matrix and whose end state is A. Then
    it runs from the start states. A run that starts a document needs only one of both.

    Args:
        kernel: such as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.
        q, k, v: this rank's rows, (batch, rows, heads, headdim); v (batch, rows, heads_v,
            headdim_v). The state has the heads of v.
        layout: how the sequence is split.
        rows: other tensors that the kernel takes, (batch, rows, ...), by name: `g`, `beta`.
        cu_seqlens: boundaries of documents in the whole sequence.
        group, output_final_state: as for `recurrence`.
        float32: whether the first run is computed in float32 where inputs have 16 bits, so that
            gradients through states are not rounded twice. For kernels that refuse float32, as
            fla's, False.
        options: handed on to the kernel.

    Returns:
        (batch, rows, heads_v, headdim_v), like v, and the final state or None as `recurrence`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `recurrence`, or from `kernel`.
    """
    process_group, headdim, headdim_v = groups.check_group(group), k.size(-1), v.size(-1)

    def run(piece: Piece, start: Tensor | None, *, wide: bool = False) -> tuple[Tensor, Tensor]:
        cut = {name: piece.of(x) for name, x in {"q": q, "k": k, "v": v, **rows}.items()}
        if wide:
            cut = {name: x.to(_wide(x)) for name, x in cut.items()} if float32 else cut
            cut["v"] = functional.pad(cut["v"], (0, headdim))
        q_, k_, v_ = (cut.pop(name) for name in "qkv")
        given: dict[str, Any] = {"initial_state": start, "output_final_state": True, **cut}
        return kernel(q_, k_, v_, **given, **options)

    try:
        cuts = _boundaries(layout, cu_seqlens, process_group)
        runs = pieces_of(layout, dist.get_rank(process_group), cuts)
        place = list(layout.numbers), list(cuts)
        unit = functional.pad(torch.eye(headdim, dtype=_wide(v), device=v.device), (headdim_v, 0))
        unit = unit.expand(v.size(0), v.size(2), -1, -1).contiguous()
        done = {piece: run(piece, None) for piece in chain(*runs or NO_RUNS) if piece.first}
        maps, reads = [], []
        for pieces in runs or NO_RUNS:
            if not pieces[0].first:
                with torch.no_grad():
                    out, end = run(pieces[0], unit, wide=True)
                reads.append(out[..., headdim_v:].contiguous())
                end, decay = end.split([headdim_v, headdim], -1)
            if pieces[-1].first:
                end = done[pieces[-1]][1].detach()
                decay = end.new_zeros(*end.shape[:-1], headdim)
            maps.append((decay.to(_wide(v)), end.to(_wide(v))))
        decays, ends = (torch.stack(x)[: len(runs)] for x in zip(*maps, strict=True))
        starts = start_states(decays, ends, *place, True, process_group.group_name)
        outs, last = [], []
        for n, pieces in enumerate(runs or NO_RUNS):
            for piece in pieces:
                out, end = done.get(piece) or run(piece, starts[n])
                outs.append(out)
            last.append(end.to(starts.dtype))
        out = torch.cat(outs, 1).narrow(1, 0, q.size(1))
        ends = torch.stack(last)[: len(runs)]
        final = None
        if output_final_state:
            final = _final_state(ends.__getitem__, ends, layout, process_group)
        out = with_end_gradients(out, ends, reads, decays, *place, process_group.group_name)
        return out, final
    except Exception as error:
        tell_refusal(error, process_group)
        raise


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
    process_group = groups.check_group(group)
    try:
        before = as_int("width", width, least=1) - 1
        cuts = _boundaries(layout, cu_seqlens, process_group)
    except Exception as error:
        tell_refusal(error, process_group)
        raise
    rank = dist.get_rank(process_group)
    around = halo(x, layout, before, group=group, dim=dim)
    outs = []
    held = [(run, x) for run, x in zip(runs_of(layout, rank), around, strict=True) if run.length]
    for (run, whole), pieces in zip(held, pieces_of(layout, rank, cuts), strict=True):
        row = 0  # in `whole`, which begins `before` rows ahead
        for piece in pieces:
            # Rows of the document before the piece: those of others count as zeros.
            begins = max(c for c in cuts if c <= run.start + row)
            known = min(before, run.start + row - begins)
            seen = whole.narrow(dim, before + row - known, known + piece.length)
            outs.append(conv(seen).narrow(dim, known, piece.length))
            row += piece.length
    if outs:
        return torch.cat(outs, dim)
    return conv(around[0]).narrow(dim, 0, 0)


def _boundaries(
    layout: SequenceLayout, cu_seqlens: Tensor | None, group: dist.ProcessGroup
) -> tuple[int, ...]:
    """Positions at which documents start, and the sequence's end; checked."""
    check_type("layout", layout, SequenceLayout)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    cuts = refusals.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
    rows = layout.shard_len(rank) if rank < layout.world_size else 0
    refusals.check_layout("x", layout, rows, max(cuts, default=None), rank, world_size)
    return tuple(sorted({0, *cuts, layout.seqlen}))


def _final_state(
    after: Callable[[int], Tensor], ends: Tensor, layout: SequenceLayout, group: dist.ProcessGroup
) -> Tensor:
    """The state after the sequence, on all ranks; `after(n)` is that after run n of this rank."""
    owner, number = last_run(layout)
    if dist.get_rank(group) == owner:
        end = after(number).contiguous()
    else:
        end = ends.new_empty(ends.shape[1:])
    if ends.requires_grad:
        raise NotImplementedError(
            "the end state of a recurrence on split rows has no gradient: call under torch.no_grad"
        )
    groups.from_owner(end, group, owner)
    return end


def _decay(part: Part, matrix: bool) -> Tensor:
    shape = (*part.end.shape[:-1], part.end.size(-2)) if matrix else tuple(part.end.shape)
    if part.decay is None and matrix:
        return part.end.new_zeros(shape)
    if part.decay is None:
        raise TypeError("decay must be a tensor, got None: only matrices may be left out")
    given = tuple(part.decay.shape)
    broadcast = zip(given[::-1], shape[::-1], strict=False)
    fits = len(given) <= len(shape) and all(n in (1, most) for n, most in broadcast)
    if not fits or matrix and given[-2:] != shape[-2:]:
        raise ValueError(f"decay must have the shape {shape} or broadcast to it, got {given}")
    return part.decay


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
