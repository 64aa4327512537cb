"""`halo`: a shard with the neighbouring rows before and after each of its runs; `roll` shifts it.

For layers other than attention that look a few positions back or ahead: convolutions of hybrid
layers, predictions of several tokens across the edge of a shard.

    contiguous, 2 ranks, left=2, right=1        rank 0             rank 1
    positions                                   0 1 2 3            4 5 6 7
    halo                                        . . 0 1 2 3 4      2 3 4 5 6 7 .

Each row travels once to each rank that needs it, straight from its owner, in one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.program import Collective
from ring_attn.profiling import observe
from ring_attn.sequence.runs import runs_of
from ring_attn.torch_private import group_by_name
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.cached import Cached
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.values.checks import as_int, check_type

# (layout, rows before, rows after, rank)
PlanKey = tuple[SequenceLayout, int, int, int]


def halo(
    x: Tensor,
    layout: SequenceLayout,
    left: int,
    right: int = 0,
    *,
    group: Group = None,
    dim: int = 1,
) -> tuple[Tensor, ...]:
    """Each run of this rank's rows, with `left` rows before it and `right` rows after it.

    Every rank of the group must call it. Apply a layer that looks at positions
    `i - left .. i + right` to each of the results, without padding, to get the rank's shard:

        torch.cat([conv(run) for run in ring_attn.halo(x, layout, left=3)], dim=1)

    Args:
        x: this rank's shard, (batch, rows, ...) with the sequence in `dim`; any dtype.
        layout: how the sequence is split. A contiguous shard is one run; a zigzag shard is two
            runs, on the last rank one; in a striped layout every row is a run.
        left: number of rows before each run, at least 0.
        right: number of rows after each run, at least 0.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        For each run of consecutive positions, in the order of the shard, a tensor with the run and
        its neighbours: `left + length + right` rows in `dim`. Rows outside of the sequence are
        zeros. A rank without rows gets a run of length 0. Gradients travel back to the rows'
        owners, which add them up in an order that does not depend on timing; they can be
        differentiated again. All ranks must take part in a backward.

    Raises:
        ValueError: a wrong number of rows, a negative count, or a dim that x lacks.
        TypeError: a type that is not accepted, such as a layout given by name.
        RuntimeError: no process group, or as `ring_attention`.

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
    rows = x.movedim(dim, 0)
    flat = rows.reshape(rows.size(0), math.prod(rows.shape[1:]))
    numbers = list(layout.numbers)
    # With the dim in its place: ranks must agree on it, and on the shape but for the rows.
    shape_told = [dim % x.ndim, *rows.shape[1:]]
    place = (numbers, left, right, process_group.group_name)
    around: Tensor = _halo(flat, *place, False, shape_told)
    lengths = _lengths((layout, left, right, rank))
    shape = (sum(lengths), *rows.shape[1:])
    return around.view(shape).movedim(0, dim).split(lengths, dim)


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
    """This rank's rows of a sequence that is shifted by `shift` positions, as the last axis rolls.

    Every rank of the group must call it. The row at position p is the one that was at `p - shift`:
    with `shift=-1` each row gets its next token, as predictions of several tokens need. Only the
    rows that cross an edge of a run travel.

    Args:
        x: this rank's shard, (batch, rows, ...) with the sequence in `dim`; any dtype.
        layout: how the sequence is split.
        shift: number of positions, to the end of the sequence if positive.
        cu_seqlens: boundaries of documents, which no row leaves or enters.
        fill: the value of rows that come from outside of the sequence, or of the document.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        A tensor like x, differentiable.

    Raises:
        ValueError, TypeError, RuntimeError: as `halo`.

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
    sides = (shift, 0) if shift > 0 else (0, -shift)
    runs = halo(x, layout, *sides, group=group, dim=dim)
    start = max(0, -shift)
    rows = [run.narrow(dim, start, run.size(dim) - abs(shift)) for run in runs]
    rolled = torch.cat(rows, dim)
    positions = layout.position_ids(dist.get_rank(groups.check_group(group)), x.device)
    ends = torch.tensor(sorted({0, *(cuts or ()), layout.seqlen}), device=x.device)
    own, source = (torch.searchsorted(ends, p, right=True) for p in (positions, positions - shift))
    inside = (own == source).view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    return rolled.where(inside, torch.tensor(fill, dtype=x.dtype, device=x.device))


# A custom operator, so that torch.compile keeps it whole in a graph.
@torch.library.custom_op("ring_attn::halo", mutates_args=())
def _halo(
    x: Tensor, layout: Sequence[int], left: int, right: int, group: str, back: bool,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    """(rows, features) -> the runs with their neighbours; `back` maps gradients back.

    `shape` is the dim of the rows in the caller's tensor, and its other dims.
    """
    checks.check_capture("halo", x)
    process_group = group_by_name(group)
    rank = dist.get_rank(process_group)
    place: PlanKey = SequenceLayout.from_numbers(layout), left, right, rank
    described = {
        "dtype": x.dtype, "dim and shape": tuple(shape), "layout": place[0], "left": left,
        "right": right, "back": back,
    }  # fmt: skip
    plan = _plan(place, x.device).get()
    with reporting(process_group):
        transport = open_p2p(process_group, TransportOptions())
        with (
            transport.call("halo", Agreement(described), x.device),
            observe("backward" if back else "forward", x.device, transport.stats),
        ):
            return plan.return_gradients(x, transport) if back else plan.gather(x, transport)


@_halo.register_fake
def _(
    x: Tensor, layout: Sequence[int], left: int, right: int, group: str, back: bool,
    shape: Sequence[int],
) -> Tensor:  # fmt: skip
    whole, rank = SequenceLayout.from_numbers(layout), dist.get_rank(group_by_name(group))
    rows = whole.shard_len(rank) if back else sum(_lengths((whole, left, right, rank)))
    return x.new_empty(rows, x.size(-1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place, ctx.back, ctx.shape = inputs[1:5], *inputs[5:]


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dx = _halo(dout.contiguous(), *ctx.place, not ctx.back, ctx.shape)
    return (dx, None, None, None, None, None, None)


_halo.register_autograd(_gradient, setup_context=_setup)


# -- rows that travel


class _Plan(NamedTuple):
    """Rows that one rank sends and receives, as indices on a device."""

    own: int  # number of own rows
    # The place of each row of the runs: among the own, then the received rows, then a row of zeros.
    around: Tensor
    # Rounds of (places, rows of the runs) to add gradients up: no round has a place twice.
    sums: tuple[tuple[Tensor, Tensor], ...]
    sent: tuple[Tensor, ...]  # own rows for each rank
    received: tuple[int, ...]  # number of rows from each rank

    def gather(self, x: Tensor, transport: Transport) -> Tensor:
        """The runs with their neighbours, from the rows of all ranks."""
        counts = [len(rows) for rows in self.sent]
        received = exchanged(x[torch.cat(self.sent)], counts, self.received, transport)
        return torch.cat([x, received, x.new_zeros(1, x.size(1))])[self.around]

    def return_gradients(self, around: Tensor, transport: Transport) -> Tensor:
        """The gradients of the own rows, added up in the order of the ranks."""
        sums = around.new_zeros(self.own + sum(self.received), around.size(1))
        for places, rows in self.sums:
            sums[places] += around[rows]
        own, others = sums.split([self.own, sum(self.received)])
        counts = [len(rows) for rows in self.sent]
        returned = exchanged(others, self.received, counts, transport)
        own = own.clone()
        for rows, part in zip(self.sent, returned.split(counts), strict=True):
            own[rows] += part
        return own


def exchanged(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], transport: Transport, step: int = 0
) -> Tensor:
    """Sends rows, sorted by ranks, so many to each rank; returns the received rows, likewise."""
    got = rows.new_empty(sum(received), rows.size(1))
    if rows.size(1):
        row_bytes = rows.size(1) * rows.element_size()
        send, recv = (x.contiguous().view(-1).view(torch.uint8) for x in (rows, got))
        send_counts, recv_counts = (tuple(row_bytes * n for n in each) for each in (sent, received))
        route = Collective("all_to_all", torch.uint8, send_counts, recv_counts)
        transport.post("shards", step, route, send, recv)
        transport.wait("shards")
    return got


@lru_cache(maxsize=256)
def _plan(place: PlanKey, device: torch.device) -> Cached[_Plan]:
    layout, left, right, rank = place
    ranks, num_own = range(layout.world_size), layout.shard_len(rank)
    owners, rows = torch.full((2, layout.seqlen), -1)
    for r in ranks:
        held = layout.position_ids(r)
        owners[held], rows[held] = r, torch.arange(len(held))

    def wanted(r: int) -> Tensor:
        """Positions of a rank's runs with their neighbours; -1 outside of the sequence."""
        runs = runs_of(layout, r)
        spans = [torch.arange(x.start - left, x.start + x.length + right) for x in runs]
        positions = torch.cat(spans)
        end = layout.seqlen if layout.shard_len(r) else 0
        return positions.masked_fill_(positions >= end, -1).clamp_(min=-1)

    def sent(source: int, r: int) -> Tensor:
        """Positions of the rows that a rank sends to another rank."""
        positions = wanted(r).unique()
        positions = positions[positions >= 0]
        return positions[(owners[positions] == source) & (source != r)]

    received = [sent(r, rank) for r in ranks]
    num_places = num_own + sum(map(len, received))
    # The last place is the row of zeros, for position -1.
    places = torch.full((layout.seqlen + 1,), num_places)
    places[layout.position_ids(rank)] = torch.arange(num_own)
    places[torch.cat(received)] = torch.arange(num_own, num_places)
    around = places[wanted(rank)]
    # A row of the runs is in the round of as many earlier rows as have its place.
    order = around.argsort(stable=True)
    order = order[around[order] < num_places]
    rounds = torch.arange(len(order)) - torch.searchsorted(around[order], around[order])
    sums = [order[rounds == n] for n in rounds.unique().tolist()]
    plan = _Plan(
        num_own,
        around.to(device),
        tuple((around[index].to(device), index.to(device)) for index in sums),
        tuple(rows[sent(rank, r)].to(device) for r in ranks),
        tuple(map(len, received)),
    )
    return Cached(plan, (plan.around, *chain(*plan.sums), *plan.sent), device)


def _lengths(place: PlanKey) -> list[int]:
    layout, left, right, rank = place
    return [run.length + left + right for run in runs_of(layout, rank)]
