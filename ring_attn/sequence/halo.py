"""`halo` adds the neighbouring rows to each run of a shard; `roll` shifts a sharded sequence.

They are for layers other than attention that look a few positions back or ahead: convolutions of
hybrid layers, and predictions of several tokens across the edge of a shard.

    contiguous, 2 ranks, left=2, right=1        rank 0             rank 1
    positions                                   0 1 2 3            4 5 6 7
    halo                                        . . 0 1 2 3 4      2 3 4 5 6 7 .

Each row is sent once to each rank that needs it, directly from its owner, in one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import runs_of
from ring_attn.profiling import observe
from ring_attn.torch_private import Context, Untyped
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.cached import Cached
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.transport.rows import exchange_rows
from ring_attn.values.checks import as_int, check_type


class PlanKey(NamedTuple):
    """The values from which an exchange of neighbouring rows follows."""

    layout: SequenceLayout
    left: int
    right: int
    rank: int

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each run with its neighbours."""
        runs = runs_of(self.layout, self.rank)
        return [self.left + run.length + self.right for run in runs]


# Longer than 60 lines, of which most are its documentation.
def halo(
    x: Tensor,
    layout: SequenceLayout,
    left: int,
    right: int = 0,
    *,
    group: Group = None,
    dim: int = 1,
) -> tuple[Tensor, ...]:
    """Return each run of this rank's rows with `left` rows before it and `right` rows after it.

    Every rank of the group must call it. Apply a layer that looks at positions
    `i - left .. i + right` to each of the results, without padding, to get the rank's shard:

        torch.cat([conv(run) for run in ring_attn.halo(x, layout, left=3)], dim=1)

    Args:
        x: this rank's shard, (batch, rows, ...) with the sequence in `dim`; any dtype.
        layout: how the sequence is split. A contiguous shard is one run. A zigzag shard is two
            runs, or one run on the last rank. In a striped layout every row is a run.
        left: number of rows before each run, at least 0.
        right: number of rows after each run, at least 0.
        group: as in `ring_attention`.
        dim: the sequence dim.

    Returns:
        For each run of consecutive positions, in the order of the shard, a tensor with the run and
        its neighbours: `left + length + right` rows in `dim`. Rows outside the sequence are zeros.
        A rank without rows gets a run of length 0. Gradients are sent back to the owners of the
        rows, which sum them in an order that does not depend on timing. They can be differentiated
        again. If one rank runs a backward, all ranks must.

    Raises:
        ValueError: a wrong number of rows, a negative count, or a dim that x lacks.
        TypeError: a wrong type, such as a layout given by name.
        RuntimeError: there is no process group, or a reason of `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.contiguous(8, 2)
        >>> x = layout.shard(torch.arange(8.0)[None], rank)
        >>> ring_attn.halo(x, layout, left=2, right=1)[0].tolist()  # on rank 1
        [[2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]]
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        left, right = as_int("left", left, least=0), as_int("right", right, least=0)
        rank = checks.check_shard(x, dim, layout, process_group)
    rows_first = x.movedim(dim, 0)
    other_dims = rows_first.shape[1:]
    rows = rows_first.reshape(rows_first.size(0), math.prod(other_dims))  # (rows, features)
    around: Tensor = halo_operator(
        rows,
        layout=list(layout.numbers),
        left=left,
        right=right,
        group=process_group.group_name,
        back=False,
        # The ranks must agree on the dim, and on the shape without the rows.
        shape=[dim % x.ndim, *other_dims],
    )
    lengths = PlanKey(layout, left, right, rank).lengths
    whole = around.view(sum(lengths), *other_dims)
    return whole.movedim(0, dim).split(lengths, dim)


def roll(
    x: Tensor,
    layout: SequenceLayout,
    shift: int,
    *,
    cu_seqlens: Tensor | None = None,
    fill: float = 0,
    group: Group = None,
    dim: int = 1,
) -> Tensor:
    """Return this rank's rows of the sequence shifted by `shift` positions, like `torch.roll`.

    Every rank of the group must call it. The row at position p is the row that was at `p - shift`:
    with `shift=-1` each row gets its next token, as needed for predictions of several tokens. Only
    the rows that cross an edge of a run are sent. Rows do not wrap around; see `fill`.

    Args:
        x: this rank's shard, (batch, rows, ...) with the sequence in `dim`; any dtype.
        layout: how the sequence is split.
        shift: number of positions; if positive, rows move towards the end of the sequence.
        cu_seqlens: boundaries of documents, which no row leaves or enters.
        fill: the value of rows from outside the sequence or the document.
        group: as in `ring_attention`.
        dim: the sequence dim.

    Returns:
        A tensor like x, differentiable.

    Raises:
        ValueError, TypeError, RuntimeError: as in `halo`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> ids = layout.shard(torch.arange(8)[None], rank)
        >>> rolled = ring_attn.roll(ids, layout, shift=-1, fill=-100)
        >>> ring_attn.unshard(rolled, layout).tolist()
        [[1, 2, 3, 4, 5, 6, 7, -100]]
    """
    with reporting(group):
        shift = as_int("shift", shift)
        check_type("layout", layout, SequenceLayout)
        cuts = checks.check_cu_seqlens("cu_seqlens", cu_seqlens)
        if cuts and cuts[-1] > layout.seqlen:
            raise ValueError(
                f"cu_seqlens must end within the layout's {layout.seqlen} rows, got {cuts[-1]}"
            )
    left, right = max(0, shift), max(0, -shift)
    runs = halo(x, layout, left, right, group=group, dim=dim)
    rows = [run.narrow(dim, right, run.size(dim) - abs(shift)) for run in runs]
    rolled = torch.cat(rows, dim)
    positions = layout.position_ids(dist.get_rank(groups.check_group(group)), x.device)
    ends = torch.tensor(sorted({0, *(cuts or ()), layout.seqlen}), device=x.device)
    # The number of the document of each row, and of the row that moves there.
    own = torch.searchsorted(ends, positions, right=True)
    source = torch.searchsorted(ends, positions - shift, right=True)
    shape = [1] * x.ndim
    shape[dim] = -1
    inside = (own == source).view(shape)  # broadcasts to x
    return rolled.where(inside, torch.tensor(fill, dtype=x.dtype, device=x.device))


# A custom operator, so that torch.compile keeps it whole in a graph.
@torch.library.custom_op("ring_attn::halo", mutates_args=())
def halo_operator(
    x: Tensor,
    layout: Sequence[int],
    left: int,
    right: int,
    group: str,
    back: bool,
    shape: Sequence[int],
) -> Tensor:
    """Return the runs with their neighbours, or with `back` the gradients of the rows.

    Args:
        x: this rank's rows, (rows, features); with `back` the gradients of the result.
        layout: numbers of the layout.
        left, right: numbers of neighbouring rows.
        group: name of the process group.
        back: whether x is gradients.
        shape: the dim of the rows in the caller's tensor, and the sizes of its other dims.
    """
    checks.check_capture("halo", x)
    process_group = groups.group_named(group)
    rank = dist.get_rank(process_group)
    key = PlanKey(SequenceLayout.from_numbers(layout), left, right, rank)
    # The ranks compare these values.
    described = {
        "dtype": x.dtype,
        "dim and shape": tuple(shape),
        "layout": key.layout,
        "left": left,
        "right": right,
        "back": back,
    }
    plan = halo_plan(key, x.device).get()
    with reporting(process_group):
        transport = open_p2p(process_group, TransportOptions())
        with (
            transport.call("halo", Agreement(described), x.device),
            observe("backward" if back else "forward", x.device, transport.stats),
        ):
            return plan.return_gradients(x, transport) if back else plan.gather(x, transport)


@halo_operator.register_fake
def _(
    x: Tensor,
    layout: Sequence[int],
    left: int,
    right: int,
    group: str,
    back: bool,
    shape: Sequence[int],
) -> Tensor:
    rank = dist.get_rank(groups.group_named(group))
    key = PlanKey(SequenceLayout.from_numbers(layout), left, right, rank)
    rows = key.layout.shard_len(rank) if back else sum(key.lengths)
    return x.new_empty(rows, x.size(-1))


def _setup(ctx: Context, inputs: tuple[Untyped, ...], output: Tensor) -> None:
    _, *place, back, shape = inputs
    ctx.place = place
    ctx.back = back
    ctx.shape = shape


def _gradient(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx: Tensor = halo_operator(dout.contiguous(), *ctx.place, not ctx.back, ctx.shape)
    return (dx, None, None, None, None, None, None)


halo_operator.register_autograd(_gradient, setup_context=_setup)


# -- the exchange


class HaloPlan(NamedTuple):
    """Rows that one rank sends and receives, as indices on a device.

    A place is an index among the own rows, then the received rows, and then a row of zeros.

    Attributes:
        own: number of own rows.
        around: the place of each row of the runs with their neighbours.
        sums: rounds of (places, rows of the runs) in which gradients are added to places; no round
            has a place twice.
        sent: own rows for each rank.
        received: number of rows from each rank.
    """

    own: int
    around: Tensor
    sums: tuple[tuple[Tensor, Tensor], ...]
    sent: tuple[Tensor, ...]
    received: tuple[int, ...]

    def gather(self, x: Tensor, transport: Transport) -> Tensor:
        """Return the runs with their neighbours, from the rows of all ranks."""
        sent = x[torch.cat(self.sent)]
        counts = [len(rows) for rows in self.sent]
        received = exchange_rows(sent, counts, self.received, transport)
        zeros = x.new_zeros(1, x.size(1))  # the neighbours of the ends of the sequence
        return torch.cat([x, received, zeros])[self.around]

    def return_gradients(self, around: Tensor, transport: Transport) -> Tensor:
        """Return the gradients of the own rows, summed in the order of the ranks."""
        sums = around.new_zeros(self.own + sum(self.received), around.size(1))
        for places, rows in self.sums:
            sums[places] += around[rows]
        own, others = sums.split([self.own, sum(self.received)])
        counts = [len(rows) for rows in self.sent]
        returned = exchange_rows(others, self.received, counts, transport)
        own = own.clone()
        for rows, part in zip(self.sent, returned.split(counts), strict=True):
            own[rows] += part
        return own


@lru_cache(maxsize=256)
def halo_plan(key: PlanKey, device: torch.device) -> Cached[HaloPlan]:
    layout, left, right, rank = key
    ranks = range(layout.world_size)
    num_own = layout.shard_len(rank)
    # The rank that holds each position, and the row there.
    owners, rows = torch.full((2, layout.seqlen), -1)
    for owner in ranks:
        held = layout.position_ids(owner)
        owners[held] = owner
        rows[held] = torch.arange(len(held))

    def needed(receiver: int) -> Tensor:
        """Return the positions of a rank's runs with their neighbours; -1 outside the sequence."""
        spans = [
            torch.arange(run.start - left, run.start + run.length + right)
            for run in runs_of(layout, receiver)
        ]
        positions = torch.cat(spans)
        end = layout.seqlen if layout.shard_len(receiver) else 0
        return positions.masked_fill_(positions >= end, -1).clamp_(min=-1)

    def sent(sender: int, receiver: int) -> Tensor:
        """Return the positions of the rows that a rank sends to another rank."""
        positions = needed(receiver).unique()
        positions = positions[positions >= 0]
        if sender == receiver:
            return positions[:0]
        return positions[owners[positions] == sender]

    received = [sent(sender, rank) for sender in ranks]
    num_places = num_own + sum(len(positions) for positions in received)
    # The last place is the row of zeros, for position -1.
    places = torch.full((layout.seqlen + 1,), num_places)
    places[layout.position_ids(rank)] = torch.arange(num_own)
    places[torch.cat(received)] = torch.arange(num_own, num_places)
    around = places[needed(rank)]
    # The round of a row of the runs is the number of earlier rows that have its place.
    order = around.argsort(stable=True)
    order = order[around[order] < num_places]
    rounds = torch.arange(len(order)) - torch.searchsorted(around[order], around[order])
    sums = [order[rounds == number] for number in rounds.unique().tolist()]
    plan = HaloPlan(
        own=num_own,
        around=around.to(device),
        sums=tuple((around[index].to(device), index.to(device)) for index in sums),
        sent=tuple(rows[sent(rank, receiver)].to(device) for receiver in ranks),
        received=tuple(len(positions) for positions in received),
    )
    return Cached(plan, (plan.around, *chain(*plan.sums), *plan.sent), device)
