"""The exchange that computes the start states of a rank's runs from the maps of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import StateRound, StatesPlan, pieces_of, plan_states
from ring_attn.profiling import Direction, observe
from ring_attn.torch_private import Context
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.transport.rows import exchange_rows


class Maps(NamedTuple):
    """The layout of the runs, the starts of documents, and whether decays are matrices."""

    layout: SequenceLayout
    cuts: tuple[int, ...]
    group: dist.ProcessGroup
    matrix: bool = False


class StartStates(torch.autograd.Function):
    """Start states of this rank's runs, from decays (runs, *decay) and end states (runs, *state).

    Decays are factors, not matrices.
    """

    @staticmethod
    def forward(ctx: Context, decay: Tensor, end: Tensor, maps: Maps) -> Tensor:
        starts = entering("forward", decay, end, maps)
        ctx.save_for_backward(decay, starts)
        ctx.maps = maps
        return starts

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dstarts: Tensor) -> tuple[Tensor | None, ...]:
        decay, starts = ctx.saved_tensors
        dends = entering("backward", decay, dstarts, ctx.maps)
        # This is not the gradient of a run in which a document starts, but the decay of such a run
        # needs no gradient.
        return (dends * starts).sum_to_size(decay.shape), dends, None


class WithEndGradients(torch.autograd.Function):
    """`out`, whose backward adds the gradients from later runs to the end states `ends`.

    The backward of the kernel needs the gradients of end states before it can compute those of
    start states, but the gradients of end states depend on gradients of start states on other
    ranks. `reads` breaks this cycle. There is one for each run that does not start a document,
    (batch, rows, heads, headdim). Its product with the start state of the run is the contribution
    of the start state to the output of the first piece.
    """

    @staticmethod
    def forward(
        ctx: Context, out: Tensor, ends: Tensor, decay: Tensor, maps: Maps, *reads: Tensor
    ) -> Tensor:
        ctx.save_for_backward(decay, *reads)
        ctx.maps = maps
        return out.clone()  # because a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        decay, *reads = ctx.saved_tensors
        maps: Maps = ctx.maps
        runs = pieces_of(maps.layout, dist.get_rank(maps.group), maps.cuts)
        first_pieces = [(number, first) for number, (first, *_) in enumerate(runs)]
        entered = [(number, first) for number, first in first_pieces if not first.first]
        dstarts = decay.new_zeros(*decay.shape[:-1], dout.size(-1))
        for (number, first), read in zip(entered, reads, strict=True):
            # (batch, rows, heads, dim) -> (batch, heads, rows, dim)
            rows = read.to(decay.dtype).transpose(1, 2)
            douts = first.of(dout).to(decay.dtype).transpose(1, 2)
            dstarts[number] = applied(rows.mT, douts, matrix=True)
        dends = entering("backward", decay.mT, dstarts, maps)
        no_gradients = [None] * len(reads)
        return dout, dends, None, None, *no_gradients


def entering(direction: Direction, decay: Tensor, end: Tensor, maps: Maps) -> Tensor:
    """Exchange maps in a direction; return the states that enter this rank's runs."""
    checks.check_capture("recurrence", end)
    shapes = (decay.shape[1:], end.shape[1:])
    # The ranks compare these values.
    described = {
        "dtype": end.dtype,
        "shapes of decay and state": shapes,
        "layout": maps.layout,
        "cu_seqlens": maps.cuts,
        "matrix": maps.matrix,
        "direction": direction,
    }
    nbytes = sum(shape.numel() for shape in shapes) * end.element_size()
    plan = plan_states(maps.layout, maps.cuts, nbytes, backward=direction == "backward")
    with reporting(maps.group):
        transport = open_p2p(maps.group, TransportOptions())
        with (
            transport.call("recurrence", Agreement(described), end.device),
            observe(direction, end.device, transport.stats),
        ):
            return composed(plan, decay, end, maps.matrix, transport)


def composed(
    plan: StatesPlan, decay: Tensor, end: Tensor, matrix: bool, transport: Transport
) -> Tensor:
    """Compose the maps before each of this rank's runs and apply them to zeros.

    Returns:
        (runs, *state), the states that enter this rank's runs.
    """
    windows = _Windows(decay.shape[1:], end.shape[1:], matrix)
    rows = torch.cat([decay.flatten(1), end.flatten(1)], 1)  # (runs, numbers of a window)
    # The number on this rank of each of its runs among all runs.
    own = {i: run.number for i, run in enumerate(plan.runs) if run.rank == transport.rank}
    held = {i: rows[number] for i, number in own.items()}
    entered: dict[int, Tensor] = {}  # the windows that end before each run
    for number, exchange in enumerate(plan.rounds):
        known = dict(held)
        if exchange.parcels:
            known |= _received(exchange, held, empty=rows[:0], transport=transport, step=number)
        for i in own:
            taken = [known[j] for j in exchange.taken[i]]
            if i in entered:
                taken.insert(0, entered[i])
            if taken:
                entered[i] = windows.joined(taken)
        held = entered
    starts = torch.zeros_like(end)
    for i, window in entered.items():
        _, starts[own[i]] = windows.parts(window)
    return starts


def _received(
    exchange: StateRound,
    held: Mapping[int, Tensor],
    *,
    empty: Tensor,
    transport: Transport,
    step: int,
) -> dict[int, Tensor]:
    """Exchange the windows of a round; return those that this rank receives, by run.

    `empty` is (0, numbers of a window), for a rank that sends no window.
    """
    rank, ranks = transport.rank, range(transport.world_size)
    sent = [exchange.parcels.get((rank, receiver), []) for receiver in ranks]
    received = [exchange.parcels.get((sender, rank), []) for sender in ranks]
    windows = torch.cat([empty, *(held[j][None] for j in chain(*sent))])
    got = exchange_rows(
        windows,
        sent=[len(parcel) for parcel in sent],
        received=[len(parcel) for parcel in received],
        transport=transport,
        step=step,
    )
    return dict(zip(chain(*received), got, strict=True))


class _Windows(NamedTuple):
    """Windows as rows of numbers: the decay, and then the state."""

    decay_shape: torch.Size
    state_shape: torch.Size
    matrix: bool

    def parts(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decay and the state of a window."""
        decay, state = window.split([self.decay_shape.numel(), self.state_shape.numel()])
        return decay.view(self.decay_shape), state.view(self.state_shape)

    def joined(self, windows: Sequence[Tensor]) -> Tensor:
        """Return the map of consecutive windows, of which the nearest to the run is the first."""
        decay, state = self.parts(windows[-1])
        for window in reversed(windows[:-1]):
            near_decay, near_state = self.parts(window)
            state = near_state + applied(near_decay, state, self.matrix)
            decay = applied(near_decay, decay, self.matrix)
        return torch.cat([decay.flatten(), state.flatten()])


def applied(decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
    """Return the product of a decay, which is a matrix or a factor, and a state."""
    with no_autocast(state):
        return decay @ state if matrix else decay * state


def no_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which products with states stay in their dtype."""
    return torch.autocast(x.device.type, enabled=False)
