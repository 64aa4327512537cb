"""Recurrent layers on a split sequence: linear attention, state spaces, causal convolutions.

A recurrence maps its state along a run of positions by `end = A start + B`. Each rank computes A
and B of its runs by the kernel of the layer, from a state of zeros. These pairs are sent to the
ranks of later runs, which compose the start states in the order of positions (see `core.runs`).

    zigzag, 2 ranks     rank 0    rank 1    rank 1    rank 0
    positions           0 1       2 3       4 5       6 7
    maps                A0 B0     A1 B1     A2 B2
    start states        0         B0        A1 B0 + B1    A2 (A1 B0 + B1) + B2

A document starts from zeros, and so cuts a run into pieces. `recurrence` adds the contribution of
the start state to outputs, which are affine in it; `linear_attention` runs the kernel again, from
the start state. In the backward, gradients of start states are sent to earlier runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import Piece, last_run, pieces_of
from ring_attn.sequence.halo import halo
from ring_attn.sequence.states import Maps, StartStates, WithEndGradients, entering, no_autocast
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type
from ring_attn.values.compiling import left_out_of_graphs

__all__ = ["Part", "Piece", "causal_conv", "linear_attention", "recurrence"]

NOT_COMPILED = left_out_of_graphs("recurrences on split rows are not compiled: leave fullgraph out")

# The runs of a rank without rows: a layer must be called on every rank.
NO_RUNS = ((Piece(start=0, length=0, position=0, first=True, rows=0),),)


class Part(NamedTuple):
    """The results of a layer for one piece, from a state of zeros.

    Attributes:
        out: the outputs, (batch, rows, ...).
        end: the state after the piece.
        decay: A of `end = A start + B`, a factor whose shape broadcasts to that of the state.
        add: returns the outputs from `out` and a start state.
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
    """Run a recurrent layer on this rank's rows, piece by piece.

    Every rank of the group must call it, and must run the backward if one rank does.
    `docs/hybrid.md` has an example.

    Args:
        run: computes a piece of the shard from a state of zeros. A rank without rows calls it for
            a piece of length 0, of which `Piece.of` makes one row of zeros.
        layout: how the sequence is split. A striped layout has as many runs as rows, and exchanges
            a state for each.
        cu_seqlens: boundaries of documents in the whole sequence.
        group: as in `ring_attention`.
        output_final_state: whether to return a final state, which has no gradient.

    Returns:
        The outputs, (batch, rows, ...), and the state after the last row of the sequence, which is
        the same on all ranks, or None. States are composed in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: rows, cu_seqlens, layout or a decay do not fit.
        NotImplementedError: a final state is requested whose gradient autograd would need.
        RuntimeError: states of pieces or ranks have different shapes, or a reason of
            `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> x = layout.shard(torch.arange(8.0)[None], rank)
        >>> def running_sum(piece):
        ...     out = piece.of(x).cumsum(1)
        ...     add = lambda out, start: out + start[:, None]
        ...     return ring_attn.recurrence.Part(out, end=out[:, -1], decay=torch.ones(1), add=add)
        >>> out, _ = ring_attn.recurrence.recurrence(running_sum, layout)
        >>> ring_attn.unshard(out, layout).tolist()
        [[0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0]]
    """
    with _checked(layout, cu_seqlens, group) as (maps, runs):
        parts = [[run(piece) for piece in pieces] for pieces in runs or NO_RUNS]
        # Whether the state passes through a run, because no document starts in it.
        passes = [len(pieces) == 1 and not pieces[0].first for pieces in runs or NO_RUNS]
        lasts = [of_run[-1] for of_run in parts]
        ends = _stacked([part.end for part in lasts], len(runs))
        factors = [
            _decay(part, passes=through) for part, through in zip(lasts, passes, strict=True)
        ]
        decays = _stacked(factors, len(runs)).to(ends.dtype)
        starts = StartStates.apply(decays, ends, maps)

        def state_after(number: int) -> Tensor:
            end = ends[number]
            return end + decays[number] * starts[number] if passes[number] else end

        final = _final_state(state_after, ends, maps) if output_final_state else None
    # A tensor without rows that depends on the start states, so that every rank runs the backward.
    out = parts[0][0].out
    outs = [out[:, :0] + starts[:0].sum().to(out.dtype)]
    for number, (first, *rest) in enumerate(parts[: len(runs)]):
        starts_document = runs[number][0].first
        with no_autocast(starts):
            outs.append(first.out if starts_document else first.add(first.out, starts[number]))
        outs += [part.out for part in rest]
    return torch.cat(outs, 1), final


# Longer than 60 lines, of which half are its documentation.
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
    **options: Any,  # of a kernel of another package
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention of any kind on this rank's rows, by a kernel that takes a state.

    It is for delta rules and other kinds whose state is multiplied by a matrix. The kernel runs
    once without gradients, to compute A and B: the values get `headdim` more columns, of zeros,
    whose start state is the unit matrix and whose end state is A. Then it runs from the start
    states.

    Args:
        kernel: maps q, k, v, `rows`, `initial_state` and `output_final_state` to outputs and a
            state (batch, heads, headdim, headdim_v), such as fla's `chunk_gated_delta_rule`.
        q, k: this rank's rows, (batch, rows, heads, headdim).
        v: this rank's rows, (batch, rows, heads_v, headdim_v). The state has the heads of v.
        layout: how the sequence is split.
        rows: other tensors that the kernel takes, (batch, rows, ...), by name: `g`, `beta`.
        cu_seqlens: boundaries of documents in the whole sequence.
        group, output_final_state: as in `recurrence`.
        float32: whether A and B of 16-bit inputs are computed in float32, so that gradients through
            states are not rounded twice. Pass False for kernels that refuse float32, such as fla's.
        options: further arguments of the kernel.

    Returns:
        The outputs, (batch, rows, heads_v, headdim_v), and the final state or None, as in
        `recurrence`.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as in `recurrence`, or from
            `kernel`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> def kernel(q, k, v, initial_state, output_final_state):
        ...     states = torch.einsum("bthi,bthj->bthij", k, v).cumsum(1)
        ...     if initial_state is not None:
        ...         states = states + initial_state[:, None]
        ...     return torch.einsum("bthi,bthij->bthj", q, states), states[:, -1]
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> q = k = v = layout.shard(torch.ones(1, 8, 1, 1), rank)
        >>> linear = ring_attn.recurrence.linear_attention
        >>> out, _ = linear(kernel, q, k, v, layout=layout, rows={})
        >>> ring_attn.unshard(out, layout).flatten().tolist()
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    layer = _LinearAttention(kernel, {"q": q, "k": k, "v": v, **rows}, float32, options)
    headdim, headdim_v = k.size(-1), v.size(-1)
    with _checked(layout, cu_seqlens, group, matrix=True) as (maps, runs):
        pieces = [piece for of_run in runs or NO_RUNS for piece in of_run]
        lasts = [of_run[-1] for of_run in runs or NO_RUNS]
        done = {piece: layer.run(piece, start=None) for piece in pieces if piece.first}
        with torch.no_grad():
            probes = {first: layer.probe(first) for first, *_ in runs if not first.first}
        reads = [out[..., headdim_v:].contiguous() for out, _ in probes.values()]
        # B and A of each piece, (batch, heads_v, headdim, headdim_v + headdim).
        known = {piece: end for piece, (_, end) in probes.items()}
        del probes  # the outputs are as large as the values
        for piece, (_, end) in done.items():  # they start documents, so that A is zero
            known[piece] = functional.pad(end.detach(), (0, headdim))
        states = _stacked([known[last] for last in lasts], len(runs))
        ends, decays = states.split([headdim_v, headdim], -1)
        starts = entering("forward", decays, ends, maps)
        for (first, *_), start in zip(runs, starts, strict=True):
            if not first.first:
                done[first] = layer.run(first, start)
        ends = _stacked([done[last][1] for last in lasts], len(runs))
        final = _final_state(ends.__getitem__, ends, maps) if output_final_state else None
        # Without the row of zeros of a rank that has no rows.
        out = torch.cat([done[piece][0] for piece in pieces], 1).narrow(1, 0, q.size(1))
        return WithEndGradients.apply(out, ends, decays, maps, *reads), final


@dataclass(frozen=True)
class _LinearAttention:
    """A kernel and its arguments on this rank's rows: `tensors` are q, k, v and others by name."""

    kernel: Callable[..., tuple[Tensor, Tensor]]
    tensors: Mapping[str, Tensor]
    float32: bool
    options: Mapping[str, Any]  # of a kernel of another package

    def run(self, piece: Piece, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the end state of a piece."""
        rows = {name: piece.of(x) for name, x in self.tensors.items()}
        return self._called(rows, start)

    def probe(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return the outputs and the end state of a piece whose values have columns for A."""
        rows = {name: piece.of(x) for name, x in self.tensors.items()}
        if self.float32:
            rows = {name: x.to(_wide(x)) for name, x in rows.items()}
        headdim = rows["k"].size(-1)
        batch, _, heads_v, headdim_v = rows["v"].shape
        rows["v"] = functional.pad(rows["v"], (0, headdim))
        unit = torch.eye(headdim, dtype=_wide(rows["v"]), device=rows["v"].device)
        start = functional.pad(unit, (headdim_v, 0))  # (headdim, headdim_v + headdim)
        return self._called(rows, start.expand(batch, heads_v, -1, -1).contiguous())

    def _called(self, rows: dict[str, Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = rows.pop("q"), rows.pop("k"), rows.pop("v")
        state = {"initial_state": start, "output_final_state": True}
        out, end = self.kernel(q, k, v, **{**state, **rows, **self.options})
        expected = (k.size(-1), v.size(-1))
        if end.shape[-2:] != expected:
            raise ValueError(
                f"the kernel's state must have the last dims {expected}, got {tuple(end.shape)}"
            )
        return out, end


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
    """Run a causal convolution on this rank's rows, with the rows before each of its runs.

    Args:
        conv: maps rows to the same number of rows. Each sees itself and `width - 1` rows before it;
            missing rows count as zeros.
        x: this rank's shard, with the sequence in `dim`.
        width: number of rows that one row sees, at least 1.
        layout: how the sequence is split.
        cu_seqlens: boundaries of documents in the whole sequence; no row sees another document.
        group: as in `ring_attention`.
        dim: the sequence dim.

    Returns:
        This rank's rows of the result, with the shape of `conv(x)`.

    Raises:
        ValueError, TypeError, RuntimeError: as in `halo`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> x = layout.shard(torch.arange(8.0)[None], rank)
        >>> add_row_before = lambda x: x + F.pad(x, (1, 0))[:, :-1]
        >>> out = ring_attn.recurrence.causal_conv(add_row_before, x, 2, layout=layout)
        >>> ring_attn.unshard(out, layout).tolist()
        [[0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]]
    """
    with _checked(layout, cu_seqlens, group) as (maps, runs):
        before = as_int("width", width, least=1) - 1
        around = halo(x, layout, before, group=group, dim=dim)
        outs = [] if runs else [_without_rows(conv, around[0], dim)]
        for whole, pieces in zip(around, runs, strict=False):
            for piece in pieces:
                # Rows of the same document before the piece; rows of other documents count as
                # zeros.
                document_start = max(cut for cut in maps.cuts if cut <= piece.position)
                known = min(before, piece.position - document_start)
                row = before + piece.start - pieces[0].start
                seen = whole.narrow(dim, row - known, known + piece.length)
                outs.append(conv(seen).narrow(dim, known, piece.length))
        return torch.cat(outs, dim)


def _without_rows(conv: Callable[[Tensor], Tensor], around: Tensor, dim: int) -> Tensor:
    """Run a convolution on a rank without rows, and return a result without rows.

    `around` has the `width - 1` zeros before the empty run. One row is added, because torch's
    convolutions refuse inputs without rows.
    """
    shape = list(around.shape)
    shape[dim] = 1
    row_of_zeros = around.new_zeros(shape)
    return conv(torch.cat([around, row_of_zeros], dim)).narrow(dim, 0, 0)


@contextmanager
def _checked(
    layout: SequenceLayout, cu_seqlens: Tensor | None, group: Group, matrix: bool = False
) -> Iterator[tuple[Maps, tuple[tuple[Piece, ...], ...]]]:
    """Check the arguments that all layers have; yield this rank's maps and runs.

    An error in the block is reported to the other ranks.
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        check_type("layout", layout, SequenceLayout)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        given = checks.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
        rows = layout.shard_len(rank) if rank < layout.world_size else 0
        checks.check_layout("x", layout, rows, max(given, default=None), rank, world_size)
        checks.warn_if_local("cu_seqlens", max(given, default=None), layout)
        cuts = tuple(sorted({0, *given, layout.seqlen}))
        yield Maps(layout, cuts, process_group, matrix), pieces_of(layout, rank, cuts)


def _final_state(after: Callable[[int], Tensor], ends: Tensor, maps: Maps) -> Tensor:
    """Return the state after the sequence, on all ranks.

    `after(number)` returns the state after a run of this rank.
    """
    owner, number = last_run(maps.layout)
    if ends.requires_grad:
        raise NotImplementedError(
            "the final state of a recurrence on split rows has no gradient, got states that need "
            "one: call it under torch.no_grad, or leave out output_final_state"
        )
    owns = dist.get_rank(maps.group) == owner
    end = after(number).contiguous() if owns else ends.new_empty(ends.shape[1:])
    groups.from_owner(end, maps.group, owner)
    return end


def _decay(part: Part, passes: bool) -> Tensor:
    """Return the decay with as many dims as the state, without a gradient if no state passes."""
    check_type("decay", part.decay, Tensor)
    shape, given = tuple(part.end.shape), tuple(part.decay.shape)
    whole = (1,) * (len(shape) - len(given)) + given
    broadcasts = len(whole) == len(shape) and all(
        size in (1, wanted) for size, wanted in zip(whole, shape, strict=True)
    )
    if not broadcasts:
        raise ValueError(
            f"decay must broadcast to the shape of the state, {shape}, got shape {given}"
        )
    decay = part.decay if passes else part.decay.detach()
    return decay.view(whole)


def _stacked(each: list[Tensor], num: int) -> Tensor:
    """Stack the tensors of the first `num` runs, in the dtype in which states are composed."""
    return torch.stack(each)[:num].to(_wide(each[0]))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
