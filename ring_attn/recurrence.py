"""Recurrent layers on a split sequence: linear attention, state spaces, causal convolutions.

A recurrence maps its state along a run of positions by `end = A start + B`. Each rank computes A
and B of its runs by the layer's own kernel, from a state of zeros. The ranks gather these pairs,
whose size does not depend on the length, and each composes the start states of its own runs, in the
order of positions. Outputs are affine in the start state, so what it contributes is added.

    zigzag, 2 ranks     rank 0    rank 1    rank 1    rank 0
    positions           0 1       2 3       4 5       6 7
    gathered            B0        A1 B1     A2 B2     A3 B3
    start states        0         B0        A1 B0 + B1    A2 (A1 B0 + B1) + B2

A document starts from zeros: it cuts a run into pieces, and no state passes its first position.
The backward gathers gradients of start states, and composes them in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn import groups, refusals
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.values import as_int, check_type
from ring_attn.neighbours import halo, runs_of
from ring_attn.profiling import Direction, observe
from ring_attn.torch_private import group_by_name
from ring_attn.transport.base import Agreement
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, tell_refusal

__all__ = ["LinearKernel", "Part", "Piece", "causal_conv", "linear_attention", "recurrence"]


class Piece(NamedTuple):
    """Rows [start, start + length) of a shard: consecutive positions of one document.

    Attributes:
        first: the rows start a document, so that their start state is zeros.
        rows: number of rows of the whole shard.
    """

    start: int
    length: int
    first: bool
    rows: int

    def of(self, x: Tensor) -> Tensor:
        """The piece's rows of a shard, (batch, rows, ...); one row of zeros if there are none."""
        if x.size(1) != self.rows:
            raise ValueError(
                f"the shard must have {self.rows} rows in dim 1 for its layout, got {x.size(1)}: "
                "cut it by layout.shard"
            )
        if self.length:
            return x.narrow(1, self.start, self.length)
        return functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, 1))


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
) -> Tensor:
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

    Returns:
        The outputs, (batch, rows, ...). States are composed in float32 (float64 for float64).

    Raises:
        ValueError: a wrong number of rows, or cu_seqlens end beyond the layout.
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
        >>> ring_attn.unshard(recurrence(running_sum, layout), layout).tolist()
        [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]
    """
    process_group = groups.check_group(group)
    try:
        cuts = _boundaries(layout, cu_seqlens, process_group)
        runs = _pieces_of(layout, dist.get_rank(process_group), cuts)
        pieces = [piece for run_pieces in runs for piece in run_pieces]
        parts = [run(piece) for piece in pieces or (Piece(0, 0, True, 0),)]
        # A state enters a run at its first piece, and what leaves the run is of its last.
        after = list(accumulate(map(len, runs)))
        entered = {i: n for n, i in enumerate([0, *after][: len(runs)])}
        leaving = [parts[i - 1] for i in after] or parts
        wide = _wide(parts[0].end)
        ends = torch.stack([part.end.to(wide) for part in leaving])[: len(runs)]
        decays = torch.stack([_decay(part, matrix).to(wide) for part in leaving])[: len(runs)]
    except Exception as error:
        tell_refusal(error, process_group)
        raise
    place = list(layout.numbers), list(cuts), matrix, process_group.group_name
    starts = _start_states(decays, ends, *place)[0]
    outs = []
    for i, (piece, part) in enumerate(zip(pieces, parts, strict=False)):
        enters = i in entered and not piece.first
        with _no_autocast(starts):
            outs.append(part.add(part.out, starts[entered[i]]) if enters else part.out)
    # No rows, but they depend on the start states: so every rank takes part in the backward.
    none = parts[0].out[:, :0] + starts[:0].sum()
    return torch.cat([*outs, none.to(outs[0].dtype)], 1) if outs else none


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
    float32: bool = True,
    **options: Any,
) -> Tensor:
    """Linear attention of any kind on this rank's rows, by a kernel that takes a state.

    For the gated delta rule, Kimi's delta attention and others whose state is multiplied by a
    matrix. One run of the kernel gives all: values get `headdim` columns of zeros, whose start
    state is the unit matrix. Their end state is A, and their outputs times a start state are what
    that contributes.

    Args:
        kernel: such as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.
        q, k, v: this rank's rows, (batch, rows, heads, headdim); v (batch, rows, heads_v,
            headdim_v). The state has the heads of v.
        layout: how the sequence is split.
        rows: other tensors that the kernel takes, (batch, rows, ...), by name: `g`, `beta`.
        cu_seqlens: boundaries of documents in the whole sequence.
        group: as for `ring_attention`.
        float32: whether pieces with a start state are computed in float32 where inputs have 16
            bits, so that what a start state contributes is rounded once, with the output. For
            kernels that refuse float32, as fla's, False.
        options: handed on to the kernel.

    Returns:
        (batch, rows, heads_v, headdim_v), like v.

    Raises:
        ValueError, TypeError, RuntimeError: as `recurrence`, or from the kernel.
    """
    headdim, headdim_v = k.size(-1), v.size(-1)

    def run(piece: Piece) -> Part:
        cut = {name: piece.of(x) for name, x in {"q": q, "k": k, "v": v, **rows}.items()}
        start = None
        if not piece.first:
            if float32:
                cut = {name: x.to(_wide(x)) for name, x in cut.items()}
            unit = torch.eye(headdim, dtype=_wide(v), device=v.device)
            start = functional.pad(unit, (headdim_v, 0))
            start = start.expand(v.size(0), v.size(2), headdim, headdim_v + headdim).contiguous()
            cut["v"] = functional.pad(cut["v"], (0, headdim))
        q_, k_, v_ = (cut.pop(name) for name in "qkv")
        states = {"initial_state": start, "output_final_state": True}
        given: dict[str, Any] = states | cut | options
        out, end = kernel(q_, k_, v_, **given)
        if start is None:
            return Part(out, end, None, _adds_nothing)
        sizes = [headdim_v, headdim]
        (out, reads), (end, decay) = out.split(sizes, -1), end.split(sizes, -1)

        def add(out: Tensor, start: Tensor) -> Tensor:
            return (out + torch.einsum("blhk,bhkv->blhv", reads.to(start), start)).to(v.dtype)

        return Part(out, end, decay, add)

    return recurrence(run, layout, matrix=True, cu_seqlens=cu_seqlens, group=group)


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
    for (run, whole), pieces in zip(held, _pieces_of(layout, rank, cuts), strict=True):
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


@lru_cache(maxsize=256)
def _pieces_of(
    layout: SequenceLayout, rank: int, cuts: tuple[int, ...]
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each run of a rank's shard, in the order of its rows."""
    row, runs = 0, []
    for run in runs_of(layout, rank):
        stop = run.start + run.length
        within = [run.start, *(c for c in cuts if run.start < c < stop), stop]
        if run.length:
            runs.append(
                tuple(
                    Piece(row + a - run.start, b - a, a in cuts, layout.shard_len(rank))
                    for a, b in pairwise(within)
                )
            )
        row += run.length
    return tuple(runs)


class _Run(NamedTuple):
    """A run among those of all ranks: its rank, and its number there."""

    rank: int
    number: int
    passes: bool  # no document starts in it, so what leaves it depends on what enters it


@lru_cache(maxsize=256)
def _order(layout: SequenceLayout, cuts: tuple[int, ...]) -> tuple[_Run, ...]:
    """The runs of all ranks, in the order of positions."""
    found = []
    for rank in range(layout.world_size):
        held = [run for run in runs_of(layout, rank) if run.length]
        runs = _pieces_of(layout, rank, cuts)
        for number, (run, pieces) in enumerate(zip(held, runs, strict=True)):
            passes = len(pieces) == 1 and not pieces[0].first
            found.append((run.start, _Run(rank, number, passes)))
    return tuple(run for _, run in sorted(found))


def _decay(part: Part, matrix: bool) -> Tensor:
    if part.decay is None and matrix:
        return part.end.new_zeros(*part.end.shape[:-1], part.end.size(-2))
    if part.decay is None:
        raise TypeError("decay must be a tensor, got None: only matrices may be left out")
    return part.decay


def _no_autocast(x: Tensor) -> Any:
    """A context in which products with states stay in their dtype."""
    return torch.autocast(x.device.type, enabled=False)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _adds_nothing(out: Tensor, start: Tensor) -> Tensor:
    return out


# -- the exchange


# Custom operators, so that torch.compile keeps them whole in a graph.
@torch.library.custom_op("ring_attn::start_states", mutates_args=())
def _start_states(
    decay: Tensor, end: Tensor, layout: Sequence[int], cuts: Sequence[int], matrix: bool, group: str
) -> tuple[Tensor, Tensor]:
    """(runs, *A), (runs, *state) -> the start states of this rank's runs, and all runs' decays."""
    whole = SequenceLayout.from_numbers(layout)
    shapes = (decay.shape[1:], end.shape[1:])
    sizes = [shape.numel() for shape in shapes]
    pairs = zip((decay, end), sizes, strict=True)
    flat = torch.cat([x.reshape(len(x), size) for x, size in pairs], 1)
    gathered = _gathered(flat, shapes, whole, tuple(cuts), matrix, group, "forward")
    decays, ends = (
        x.unflatten(-1, shape) if shape else x[..., 0]
        for x, shape in zip(gathered.split(sizes, -1), shapes, strict=True)
    )
    rank = dist.get_rank(group_by_name(group))
    starts, state = torch.zeros_like(end), torch.zeros_like(ends[0, 0])
    for run in _order(whole, tuple(cuts)):
        if run.rank == rank:
            starts[run.number] = state
        left = ends[run.rank, run.number]
        if run.passes:
            left = left + _applied(decays[run.rank, run.number], state, matrix)
        state = left
    return starts, decays.contiguous()


@torch.library.custom_op("ring_attn::start_states_backward", mutates_args=())
def _start_states_backward(
    dstarts: Tensor,
    starts: Tensor,
    decays: Tensor,
    layout: Sequence[int],
    cuts: Sequence[int],
    matrix: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's decays and ends."""
    whole, shape = SequenceLayout.from_numbers(layout), dstarts.shape[1:]
    shapes = (decays.shape[2:], shape)
    flat = dstarts.reshape(len(dstarts), shape.numel())
    gathered = _gathered(flat, shapes, whole, tuple(cuts), matrix, group, "backward")
    gathered = gathered.unflatten(-1, shape) if shape else gathered[..., 0]
    rank = dist.get_rank(group_by_name(group))
    ddecay, dend = dstarts.new_zeros(len(starts), *decays.shape[2:]), torch.zeros_like(dstarts)
    dleft = torch.zeros_like(gathered[0, 0])  # of the state that leaves the run
    for run in reversed(_order(whole, tuple(cuts))):
        decay = decays[run.rank, run.number]
        if run.rank == rank:
            dend[run.number] = dleft
            if run.passes:
                ddecay[run.number] = _decay_gradient(dleft, starts[run.number], decay, matrix)
        adjoint = decay.mT if matrix else decay
        through = _applied(adjoint, dleft, matrix) if run.passes else 0
        dleft = gathered[run.rank, run.number] + through
    return ddecay, dend


def _applied(decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
    with _no_autocast(state):
        return decay @ state if matrix else decay * state


def _decay_gradient(dleft: Tensor, start: Tensor, decay: Tensor, matrix: bool) -> Tensor:
    with _no_autocast(start):
        return dleft @ start.mT if matrix else (dleft * start).sum_to_size(decay.shape)


def _gathered(
    x: Tensor,
    shapes: tuple[torch.Size, torch.Size],
    layout: SequenceLayout,
    cuts: tuple[int, ...],
    matrix: bool,
    group: str,
    direction: Direction,
) -> Tensor:
    """(runs, numbers) of each rank, as (ranks, most runs of a rank, numbers)."""
    refusals.check_capture("recurrence", x)
    process_group = group_by_name(group)
    described = {
        "dtype": x.dtype, "shapes of decay and state": shapes, "layout": layout,
        "cu_seqlens": cuts, "matrix": matrix, "direction": direction,
    }  # fmt: skip
    most = max(len(_pieces_of(layout, r, cuts)) for r in range(layout.world_size))
    try:
        transport = open_p2p(process_group, TransportOptions())
        with (
            transport.call("recurrence", Agreement(described), x.device),
            observe(direction, x.device, transport.stats),
        ):
            padded = functional.pad(x, (0, 0, 0, most - len(x)))
            return transport.gather(padded.contiguous())
    except BaseException as error:
        tell_refusal(error, process_group)
        raise


@_start_states.register_fake
def _(
    decay: Tensor, end: Tensor, layout: Sequence[int], cuts: Sequence[int], matrix: bool, group: str
) -> tuple[Tensor, Tensor]:
    whole = SequenceLayout.from_numbers(layout)
    ranks = range(whole.world_size)
    most = max(len(_pieces_of(whole, r, tuple(cuts))) for r in ranks)
    return torch.empty_like(end), decay.new_empty(len(ranks), most, *decay.shape[1:])


@_start_states_backward.register_fake
def _(
    dstarts: Tensor,
    starts: Tensor,
    decays: Tensor,
    layout: Sequence[int],
    cuts: Sequence[int],
    matrix: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dstarts.new_empty(len(starts), *decays.shape[2:]), torch.empty_like(dstarts)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.place = inputs[2:]


def _gradient(ctx: Any, dstarts: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = _start_states_backward(dstarts.contiguous(), *saved, *ctx.place)
    return (*gradients, None, None, None, None)


_start_states.register_autograd(_gradient, setup_context=_setup)
