"""The start states of a rank's runs, from the maps of all runs: an exchange, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.profiling import Direction, observe
from ring_attn.sequence.halo import exchanged
from ring_attn.sequence.runs import Travel, pieces_of, travel
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting


class Maps(NamedTuple):
    """The runs of all ranks, documents that start at `cuts`, and whether decays are matrices."""

    layout: SequenceLayout
    cuts: tuple[int, ...]
    group: dist.ProcessGroup
    matrix: bool = False


class StartStates(torch.autograd.Function):
    """(runs, *decay), (runs, *state) -> start states of this rank's runs; decays are factors."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, end: Tensor, maps: Maps) -> Tensor:
        starts = entering("forward", decay, end, maps)
        ctx.save_for_backward(decay, starts)
        ctx.maps = maps
        return starts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstarts: Tensor) -> tuple[Tensor | None, ...]:
        decay, starts = ctx.saved_tensors
        dends = entering("backward", decay, dstarts, ctx.maps)
        # Where a document starts in a run, this is no gradient, but the run's decay is no variable.
        return (dends * starts).sum_to_size(decay.shape), dends, None


class WithEndGradients(torch.autograd.Function):
    """`out`, whose backward gives `ends` the gradients that come from later runs.

    The kernel's own backward has the gradients of start states only after it got those of end
    states, which depend on the former of other ranks. `reads` break this circle: (batch, rows,
    heads, headdim), of each run that no document starts, times its start state what that
    contributes to the run's first piece.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, ends: Tensor, decay: Tensor, maps: Maps, *reads: Tensor
    ) -> Tensor:
        ctx.save_for_backward(decay, *reads)
        ctx.maps = maps
        return out.clone()  # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        decay, *reads = ctx.saved_tensors
        layout, cuts, group, _ = ctx.maps
        dstarts = decay.new_zeros(*decay.shape[:-1], dout.size(-1))
        runs = enumerate(pieces_of(layout, dist.get_rank(group), cuts))
        entered = [(n, first) for n, (first, *_) in runs if not first.first]
        for (n, first), read in zip(entered, reads, strict=True):
            rows, douts = (x.to(decay.dtype).transpose(1, 2) for x in (read, first.of(dout)))
            dstarts[n] = applied(rows.mT, douts, True)
        dends = entering("backward", decay.mT, dstarts, ctx.maps)
        return dout, dends, None, None, *[None] * len(reads)


def entering(direction: Direction, decay: Tensor, end: Tensor, maps: Maps) -> Tensor:
    """The states that enter this rank's runs, in a direction."""
    checks.check_capture("recurrence", end)
    layout, cuts, group, matrix = maps
    shapes = decay.shape[1:], end.shape[1:]
    described = {
        "dtype": end.dtype, "shapes of decay and state": shapes, "layout": layout,
        "cu_seqlens": cuts, "matrix": matrix, "direction": direction,
    }  # fmt: skip
    nbytes = sum(shape.numel() for shape in shapes) * end.element_size()
    way = travel(layout, cuts, nbytes, backward=direction == "backward")
    with reporting(group):
        transport = open_p2p(group, TransportOptions())
        with (
            transport.call("recurrence", Agreement(described), end.device),
            observe(direction, end.device, transport.stats),
        ):
            return composed(way, decay, end, matrix, transport)


def composed(way: Travel, decay: Tensor, end: Tensor, matrix: bool, transport: Transport) -> Tensor:
    """States that enter this rank's runs: the maps before each in a direction, applied to zeros.

    A window is a row: its decay, then its state.
    """
    shapes = decay.shape[1:], end.shape[1:]
    sizes = [shape.numel() for shape in shapes]
    rows = torch.cat([decay.flatten(1), end.flatten(1)], 1)

    def parts(window: Tensor) -> list[Tensor]:
        return [x.view(shape) for x, shape in zip(window.split(sizes), shapes, strict=True)]

    def of_sequence(windows: Sequence[Tensor]) -> Tensor:
        """The map of windows in sequence, of which the nearest is the first."""
        factor, state = parts(windows[-1])
        for window in reversed(windows[:-1]):
            near, add = parts(window)
            factor, state = applied(near, factor, matrix), add + applied(near, state, matrix)
        return torch.cat([factor.flatten(), state.flatten()])

    ranks, rank = range(transport.world_size), transport.rank
    own = {i: run.number for i, run in enumerate(way.runs) if run.rank == rank}
    held, entered = {i: rows[n] for i, n in own.items()}, dict[int, Tensor]()
    for number, step in enumerate(way.rounds):
        known = dict(held)
        if step.parcels:
            sent = [step.parcels.get((rank, r), []) for r in ranks]
            received = [step.parcels.get((r, rank), []) for r in ranks]
            given = torch.cat([rows[:0], *(held[j][None] for j in chain(*sent))])
            there, here = ([*map(len, parcels)] for parcels in (sent, received))
            got = exchanged(given, there, here, transport, number)
            known.update(zip(chain(*received), got, strict=True))
        for i in own:
            windows = [entered[i]] if i in entered else []
            if windows := windows + [known[j] for j in step.taken[i]]:
                entered[i] = of_sequence(windows)
        held = entered
    starts = torch.zeros_like(end)
    for i, window in entered.items():
        starts[own[i]] = parts(window)[1]
    return starts


def applied(decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
    with no_autocast(state):
        return decay @ state if matrix else decay * state


def no_autocast(x: Tensor) -> Any:
    """A context in which products with states stay in their dtype."""
    return torch.autocast(x.device.type, enabled=False)
