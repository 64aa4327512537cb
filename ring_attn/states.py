"""The start states of a rank's runs, from the maps of all runs: operators, and their exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import refusals
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import Round, Travel, pieces_of, travel
from ring_attn.neighbours import exchanged
from ring_attn.profiling import Direction, observe
from ring_attn.torch_private import group_by_name
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, tell_refusal

Numbers = Sequence[int]


class Window(NamedTuple):
    """The map of runs in sequence; None is the decay of a closed one."""

    decay: Tensor | None
    end: Tensor


# Custom operators, so that torch.compile keeps them whole in a graph. `layout` are its numbers,
# `cuts` the starts of documents.
@torch.library.custom_op("ring_attn::start_states", mutates_args=())
def start_states(
    decay: Tensor, end: Tensor, layout: Numbers, cuts: Numbers, matrix: bool, group: str
) -> Tensor:
    """(runs, *A), (runs, *state) -> the start states of this rank's runs."""
    return _exchange("forward", decay, end, layout, cuts, matrix, group)


@torch.library.custom_op("ring_attn::end_gradients", mutates_args=())
def _end_gradients(
    decay: Tensor, dstarts: Tensor, layout: Numbers, cuts: Numbers, matrix: bool, group: str
) -> Tensor:
    """The gradients of the states that leave this rank's runs."""
    adjoint = decay.mT if matrix else decay
    return _exchange("backward", adjoint, dstarts, layout, cuts, matrix, group)


# The kernel's own backward has the gradients of start states only after it got those of end states,
# which depend on the former of other ranks. `reads` breaks this circle.
@torch.library.custom_op("ring_attn::with_end_gradients", mutates_args=())
def with_end_gradients(
    out: Tensor, ends: Tensor, reads: Sequence[Tensor], decay: Tensor, layout: Numbers,
    cuts: Numbers, group: str,
) -> Tensor:  # fmt: skip
    """`out`, whose backward gives `ends` the gradients that come from later runs.

    `reads` (batch, rows, heads, headdim) times a run's start state is what that contributes to the
    run's first piece; without rows if the run starts a document.
    """
    return out.clone()


def _exchange(
    direction: Direction, decay: Tensor, end: Tensor, layout: Numbers, cuts: Numbers, matrix: bool,
    group: str,
) -> Tensor:  # fmt: skip
    refusals.check_capture("recurrence", end)
    process_group, whole = group_by_name(group), SequenceLayout.from_numbers(layout)
    shapes = decay.shape[1:], end.shape[1:]
    described = {
        "dtype": end.dtype, "shapes of decay and state": shapes, "layout": whole,
        "cu_seqlens": tuple(cuts), "matrix": matrix, "direction": direction,
    }  # fmt: skip
    nbytes = sum(shape.numel() for shape in shapes) * end.element_size()
    way = travel(whole, tuple(cuts), nbytes, backward=direction == "backward")
    try:
        transport = open_p2p(process_group, TransportOptions())
        with (
            transport.call("recurrence", Agreement(described), end.device),
            observe(direction, end.device, transport.stats),
        ):
            return entering(way, decay, end, matrix, transport)
    except BaseException as error:
        tell_refusal(error, process_group)
        raise


def entering(way: Travel, decay: Tensor, end: Tensor, matrix: bool, transport: Transport) -> Tensor:
    """States that enter this rank's runs: the maps before each in a direction, applied to zeros."""
    own = {i: run.number for i, run in enumerate(way.runs) if run.rank == transport.rank}
    held = {i: Window(decay[n], end[n]) for i, n in own.items()}
    entered = dict[int, Window]()
    for number, step in enumerate(way.rounds):
        known = _exchanged(held, step, number, transport, decay, end)
        for i in own:
            taken = [entered[i]] if i in entered else []
            taken += [known[j] for j in step.taken[i]]
            if taken:
                entered[i] = _composed(taken, matrix)
        held = entered
    starts = torch.zeros_like(end)
    for i, window in entered.items():
        starts[own[i]] = window.end
    return starts


def _exchanged(
    held: Mapping[int, Window], step: Round, number: int, transport: Transport, decay: Tensor,
    end: Tensor,
) -> dict[int, Window]:  # fmt: skip
    """This rank's windows, and those that it takes from others."""
    known = {
        i: Window(None if step.closed[i] else window.decay, window.end)
        for i, window in held.items()
    }
    if not step.parcels:
        return known
    ranks, rank = range(transport.world_size), transport.rank
    sent = [step.parcels.get((rank, r), []) for r in ranks]
    received = [step.parcels.get((r, rank), []) for r in ranks]
    shapes = decay.shape[1:], end.shape[1:]

    def sizes(parcels: Sequence[Sequence[int]]) -> list[list[int]]:
        """Numbers of the tensors of all windows, the decays of closed ones of none."""
        a, b = (shape.numel() for shape in shapes)
        return [[x for j in parcel for x in (a * (not step.closed[j]), b)] for parcel in parcels]

    flat = [x.reshape(-1) for parcel in sent for j in parcel for x in known[j] if x is not None]
    there, here = sizes(sent), sizes(received)
    got = exchanged(
        torch.cat([end.new_empty(0), *flat])[:, None], list(map(sum, there)), list(map(sum, here)),
        transport, number,
    )  # fmt: skip
    parts = iter(got.split(list(chain(*here))))
    for j in chain(*received):
        first, last = next(parts), next(parts)
        known[j] = Window(None if step.closed[j] else first.view(shapes[0]), last.view(shapes[1]))
    return known


def _composed(windows: Sequence[Window], matrix: bool) -> Window:
    """The map of windows in sequence, of which the nearest is the first."""
    decay, end = windows[-1]
    for near, add in reversed(windows[:-1]):
        assert near is not None, "no window is taken beyond a closed one"
        end = add + applied(near, end, matrix)
        decay = None if decay is None else applied(near, decay, matrix)
    return Window(decay, end)


def applied(decay: Tensor, state: Tensor, matrix: bool) -> Tensor:
    with no_autocast(state):
        return decay @ state if matrix else decay * state


def no_autocast(x: Tensor) -> Any:
    """A context in which products with states stay in their dtype."""
    return torch.autocast(x.device.type, enabled=False)


@start_states.register_fake
@_end_gradients.register_fake
def _(
    decay: Tensor, end: Tensor, layout: Numbers, cuts: Numbers, matrix: bool, group: str
) -> Tensor:
    return torch.empty_like(end)


def _setup_starts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.place = inputs[2:]


def _gradients_of_maps(ctx: Any, dstarts: Tensor) -> tuple[Any, ...]:
    decay, starts = ctx.saved_tensors
    layout, cuts, matrix, group = ctx.place
    dends = _end_gradients(decay, dstarts.contiguous(), *ctx.place)
    rank, ddecay = dist.get_rank(group_by_name(group)), torch.zeros_like(decay)
    for n, pieces in enumerate(pieces_of(SequenceLayout.from_numbers(layout), rank, tuple(cuts))):
        if len(pieces) == 1 and not pieces[0].first:
            with no_autocast(starts):
                products = dends[n] @ starts[n].mT if matrix else dends[n] * starts[n]
            ddecay[n] = products.sum_to_size(ddecay[n].shape)
    return ddecay, dends, None, None, None, None


start_states.register_autograd(_gradients_of_maps, setup_context=_setup_starts)


@with_end_gradients.register_fake
def _(
    out: Tensor, ends: Tensor, reads: Sequence[Tensor], decay: Tensor, layout: Numbers,
    cuts: Numbers, group: str,
) -> Tensor:  # fmt: skip
    return torch.empty_like(out)


def _setup_ends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ends, reads, decay, *ctx.place = inputs
    ctx.save_for_backward(ends, decay, *reads)


def _gradients_of_ends(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    ends, decay, *reads = ctx.saved_tensors
    layout, cuts, group = ctx.place
    rank, dstarts = dist.get_rank(group_by_name(group)), torch.zeros_like(ends)
    runs = pieces_of(SequenceLayout.from_numbers(layout), rank, tuple(cuts))
    entered = [(n, pieces[0]) for n, pieces in enumerate(runs) if not pieces[0].first]
    for (n, piece), read in zip(entered, reads, strict=True):
        with no_autocast(ends):
            rows = (x.to(ends.dtype) for x in (read, piece.of(dout)))
            dstarts[n] = torch.einsum("blhk,blhv->bhkv", *rows)
    dends = _end_gradients(decay, dstarts, layout, cuts, True, group)
    return dout, dends, [None] * len(reads), None, None, None, None


with_end_gradients.register_autograd(_gradients_of_ends, setup_context=_setup_ends)
