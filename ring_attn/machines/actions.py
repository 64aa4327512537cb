"""Turns the ops of a program into actions of all ranks: exchanges, waits, compute and copies.

One list of actions serves all ranks: every action holds tensors with a number for each rank, so
thousands of ranks cost as many tensor operations as one. `machines.time` simulates the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.core.messages import Number
from ring_attn.core.program import (
    Add,
    Attend,
    Channel,
    Clear,
    Collective,
    Delta,
    Differentiate,
    Finish,
    Inner,
    New,
    Op,
    Pack,
    Post,
    Program,
    Round,
    Start,
    Step,
    Unpack,
    part_of_heads,
)
from ring_attn.core.program import Wait as WaitOp
from ring_attn.core.sizes import flops, merged_bytes
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.work import StepWork
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import program_of_every_rank

# If dq is computed apart from dk and dv, its pass has 3 of 7 matrix products, since both passes
# recompute the scores and dp. Rates of devices count a backward as one pass of 5 products.
SHARE_OF_DQ = 3 / 7

# Number of operators in `State.fold`, most of them over the statistics.
FOLD = 14


Exchange = Literal["shift", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Posts an exchange.

    Attributes:
        channel: name to wait for; a channel has one exchange under way at a time.
        op: "shift" sends one message to one rank, the others are collectives.
        nbytes: (P,) int64 bytes that leave each rank, as transports count them.
        to: (P,) int64 receiver of each rank's message; empty for collectives.
        groups: (groups, ranks) int64 groups of a collective; empty for shifts.
        active: (P,) bool ranks that take part.
    """

    channel: Channel
    op: Exchange
    nbytes: Tensor
    to: Tensor
    groups: Tensor
    active: Tensor


@dataclass(frozen=True, eq=False)
class Wait:
    """Waits on the (P,) `active` ranks until the channel's exchange is complete."""

    channel: Channel
    active: Tensor


@dataclass(frozen=True, eq=False)
class Compute:
    """Computes the tiles of a step, in the only pass or in one of several passes.

    Attributes:
        backward: whether this is part of a backward.
        area: (P,) int64 visible pairs.
        edge: (P,) int64 rows that the mask cuts.
        rows: (P,) int64 rows whose state is loaded and stored; backward the mean of both sides.
        per_pair: (P,) int64 operations for a pair in all heads, over all passes of the direction.
        state: (P,) int64 bytes of sums loaded from other steps and stored for other steps.
        share: fraction of the operations in this pass.
        window: whether the mask has windows.
    """

    backward: bool
    area: Tensor
    edge: Tensor
    rows: Tensor
    per_pair: Tensor
    state: Tensor
    share: float = 1.0
    window: bool = False

    @property
    def flops(self) -> Tensor:
        """(P,) float64 operations."""
        return self.area.double() * self.per_pair * self.share


@dataclass(frozen=True, eq=False)
class Move:
    """Passes over memory, for packing, adding or rounding.

    Attributes:
        label: purpose of the passes.
        nbytes: (P,) int64 bytes that are read and written.
        count: number of operators.
    """

    label: str
    nbytes: Tensor
    count: int = 1


Action = Transfer | Wait | Compute | Move


@dataclass(frozen=True, eq=False)
class Phase:
    """A step in pictures and tables: a name and actions."""

    label: str
    actions: tuple[Action, ...]

    @property
    def posts(self) -> tuple[Transfer, ...]:
        """Exchanges that the phase posts."""
        return tuple(action for action in self.actions if isinstance(action, Transfer))

    @property
    def waits(self) -> tuple[Channel, ...]:
        """Channels whose exchanges the phase waits for."""
        return tuple(action.channel for action in self.actions if isinstance(action, Wait))

    @property
    def computes(self) -> tuple[Compute, ...]:
        """Computations of the phase."""
        return tuple(action for action in self.actions if isinstance(action, Compute))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of all ranks in one direction of a call.

    Attributes:
        strategy: strategy of the call.
        world_size: number of ranks, P.
        backward: whether this is the backward.
        phases: the phases, in order.
    """

    strategy: Strategy
    world_size: int
    backward: bool
    phases: tuple[Phase, ...]

    def actions(self) -> Iterator[Action]:
        """Yields all actions in order."""
        for phase in self.phases:
            yield from phase.actions

    @property
    def bytes_sent(self) -> Tensor:
        """(P,) int64 bytes that leave each rank."""
        total = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                total += post.nbytes * post.active
        return total

    def bytes_by_link(self, node_size: int) -> tuple[Tensor, Tensor]:
        """(P,) int64 bytes that each rank sends within its node, and to ranks of other nodes.

        A rank's bytes of a collective are divided equally among the other ranks of the group.

        Args:
            node_size: number of consecutive ranks in a node.

        Raises:
            ValueError: `node_size` below 1.
        """
        if node_size < 1:
            raise ValueError(f"node_size must be at least 1, got {node_size}")
        node = torch.arange(self.world_size) // node_size
        between = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                nbytes = post.nbytes * post.active
                if post.op == "shift":
                    between += nbytes * (node != node[post.to])
                    continue
                members = post.groups
                away = (node[members][:, :, None] != node[members][:, None, :]).sum(2)
                others = max(members.size(1) - 1, 1)
                between[members] += nbytes[members] * away // others
        return self.bytes_sent - between, between

    @property
    def messages(self) -> Tensor:
        """(P,) int64 number of exchanges in which each rank takes part; a collective is one."""
        total = torch.zeros(self.world_size, dtype=torch.int64)
        for phase in self.phases:
            for post in phase.posts:
                total += post.active
        return total

    @property
    def flops(self) -> Tensor:
        """(P,) float64 operations of each rank."""
        total = torch.zeros(self.world_size, dtype=torch.float64)
        for phase in self.phases:
            for compute in phase.computes:
                total += compute.flops
        return total


def schedule_of(call: Call, *, backward: bool) -> Schedule:
    """Actions of all ranks in one direction of a call.

    Raises:
        ValueError: layouts and mask do not fit each other, or degrees do not divide.
        NotImplementedError: the strides of the layouts differ.

    Example:
        >>> from ring_attn.core.layout import SequenceLayout
        >>> from ring_attn.core.mask import Mask
        >>> from ring_attn.strategies.registry import make_call
        >>> layout = SequenceLayout.zigzag(seqlen=1 << 12, world_size=4)
        >>> spec = AttentionSpec("cpu", torch.bfloat16, 1, 32, 8, 128, 128)
        >>> mask = Mask(1 << 12, 1 << 12, causal=True)
        >>> call = make_call(Strategy(), spec, (layout, layout), mask, rank=0)
        >>> schedule = schedule_of(call, backward=False)
        >>> len(schedule.phases), schedule.bytes_sent.tolist()
        (5, [10485760, 10485760, 10485760, 12582912])
    """
    program = program_of_every_rank(call, backward=backward)
    carries = get_backend(call.backend).carries_state
    phases = _phases(program, call.spec, carries, window=call.mask.has_windows)
    return Schedule(call.strategy, call.world_size, backward, tuple(phases))


def _phases(
    program: Program, spec: AttentionSpec, carries: bool, *, window: bool
) -> Iterator[Phase]:
    """Yields a phase for the ops before the first step, then one for each step."""
    actions = _Actions(program, spec, carries, window)
    label, pending = "start", list[Action]()
    for op in program.ops:
        if isinstance(op, Step | Inner) and pending:
            yield Phase(label, tuple(pending))
            pending = []
        if isinstance(op, Step):
            label = op.label
        elif isinstance(op, Inner):
            phases = _phases(op.program, op.spec, carries, window=window)
            if op.members is not None:
                phases = map(_Spread(op.members, op.degree).phase, phases)
            yield from phases
        else:
            pending += actions.of(op)
    if pending:
        yield Phase(label, tuple(pending))


class _Actions:
    """Turns the ops of a program into actions.

    If the backend's kernels carry the state, the first kernel makes it and the last one writes the
    results: then merging and finalizing take no passes of their own.
    """

    def __init__(self, program: Program, spec: AttentionSpec, carries: bool, window: bool) -> None:
        self._size, self._spec, self._window = program.world_size, spec, window
        self._carries, self._first = carries, True
        self._everyone = torch.ones(program.world_size, dtype=torch.bool)
        self._out = program.arrays.get("out")

    def of(self, op: Op) -> list[Action]:
        """The actions of an op; none if it moves no bytes."""
        spec = self._spec
        wide = spec.accum_dtype.itemsize
        both = 1 + wide / spec.dtype.itemsize
        match op:
            case Pack():
                return self._move("pack", 2 * op.message.nbytes)
            case Post():
                return [self._transfer(op)]
            case WaitOp():
                return [Wait(op.channel, self._everyone if op.active is None else op.active)]
            case Clear():
                return self._move("clear", op.message.nbytes)
            case Add():
                return self._move("add", 3 * op.message.nbytes)
            case Unpack():
                passes = 3 if any(copy.add for copy in op.copies) else 2
                return self._move("unpack", passes * op.message.nbytes)
            case New():
                return self._move("clear", op.array.nbytes) if op.zero else []
            case Start():
                self._first = True
            case Attend():
                return self._attend(op)
            case Finish() if not self._carries:
                return self._move("finalize", op.out_array.nbytes * both)
            case Delta() if self._out is not None:
                return self._move("delta", 2 * self._out.nbytes)
            case Differentiate():
                share = {"all": 1.0, "q": SHARE_OF_DQ, "kv": 1 - SHARE_OF_DQ}[op.part]
                return [self._compute(op, share)]
            case Round():
                elements = op.array.nbytes // op.array.dtype.itemsize
                return self._move("round", elements * (wide + op.array.dtype.itemsize))
        return []

    def _each(self, value: Number) -> Tensor:
        """The value of each rank, (P,) int64."""
        if isinstance(value, Tensor):
            return value.long()
        return torch.full((self._size,), int(value), dtype=torch.int64)

    def _move(self, label: str, nbytes: Number) -> list[Action]:
        return [Move(label, self._each(nbytes))]

    def _transfer(self, op: Post) -> Transfer:
        nothing = torch.empty(0, dtype=torch.int64)
        active = self._everyone if op.active is None else op.active
        nbytes = self._each(op.nbytes)
        if isinstance(op.route, Collective):
            assert op.route.groups is not None, "a program of every rank has groups"
            return Transfer(op.channel, op.route.op, nbytes, nothing, op.route.groups, active)
        groups = nothing.view(0, 0)
        return Transfer(op.channel, "shift", nbytes, op.route.send_to, groups, active)

    def _compute(self, op: Attend | Differentiate, share: float) -> Compute:
        work: StepWork = op.tiles
        backward = isinstance(op, Differentiate)
        operations = flops(1, part_of_heads(op, self._spec), backward=backward)
        rows = (work.rows + work.cols) // 2 if backward else work.rows
        per_pair = torch.full_like(work.area, operations)
        state = self._state(op, work) if self._carries else torch.zeros_like(work.area)
        return Compute(backward, work.area, work.edge, rows, per_pair, state, share, self._window)

    def _attend(self, op: Attend) -> list[Action]:
        """Computes a step's tiles; from the second step on, merges the result into the state."""
        actions: list[Action] = [self._compute(op, 1.0)]
        if not self._carries and not self._first:
            spec = part_of_heads(op, self._spec)
            elements = op.tiles.rows.long() * (spec.batch * spec.nheads * spec.headdim_v)
            actions.append(Move("merge", elements * merged_bytes(spec), FOLD))
        self._first = False
        return actions

    def _state(self, op: Attend | Differentiate, work: StepWork) -> Tensor:
        """(P,) int64 bytes of sums that a kernel loads and stores, for rows that take part."""
        spec = part_of_heads(op, self._spec)
        wide = spec.batch * spec.accum_dtype.itemsize
        if isinstance(op, Attend):
            passes = (not self._first) + (not op.last)
            return work.rows.long() * (passes * wide * spec.nheads * (spec.headdim_v + 2))
        q = work.rows.long() * (2 * wide * spec.nheads * spec.headdim)
        kv = work.cols.long() * (2 * wide * spec.nheads_kv * (spec.headdim + spec.headdim_v))
        return {"all": q + kv, "q": q, "kv": kv}[op.part]


class _Spread:
    """Expands actions with a number for each group to actions with a number for each rank.

    Only the `members` of a group act. Tensors shared by several actions are expanded once.
    """

    def __init__(self, members: Tensor, degree: int) -> None:
        self._members, self._degree = members, degree
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}

    def phase(self, phase: Phase) -> Phase:
        """The phase with a number for each rank."""
        return Phase(phase.label, tuple(self._action(action) for action in phase.actions))

    def _action(self, action: Action) -> Action:
        match action:
            case Wait():
                return replace(action, active=self._once(action.active, self._placed))
            case Move():
                return replace(action, nbytes=self._placed(action.nbytes))
            case Compute():
                return replace(
                    action,
                    area=self._placed(action.area),
                    edge=self._placed(action.edge),
                    rows=self._placed(action.rows),
                    per_pair=self._placed(action.per_pair),
                    state=self._placed(action.state),
                )
            case Transfer():
                return replace(
                    action,
                    nbytes=self._placed(action.nbytes),
                    to=self._once(action.to, self._receivers),
                    groups=self._once(action.groups, self._groups),
                    active=self._once(action.active, self._placed),
                )

    def _once(self, values: Tensor, spread: Callable[[Tensor], Tensor]) -> Tensor:
        # Keeps the tensor alive, so that no other tensor gets its id.
        if id(values) not in self._spread:
            self._spread[id(values)] = values, spread(values)
        return self._spread[id(values)][1]

    def _placed(self, values: Tensor) -> Tensor:
        if len(self._members) == self._degree:
            return values.repeat_interleave(self._degree)
        whole = torch.zeros(len(values), self._degree, dtype=values.dtype)
        whole[:, self._members] = values[:, None]
        return whole.flatten()

    def _receivers(self, to: Tensor) -> Tensor:
        """The receiver of each rank: the same member of the receiving group."""
        return (to[:, None] * self._degree + torch.arange(self._degree)).flatten()

    def _groups(self, groups: Tensor) -> Tensor:
        return (groups[:, None, :] * self._degree + self._members[:, None]).flatten(0, 1)
