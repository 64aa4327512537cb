"""Turns the ops of a program into actions of all ranks: exchanges, waits, compute and copies.

One list of actions serves all ranks: every action holds tensors with a number for each rank, so
thousands of ranks cost as many tensor operations as one. `machines.time` simulates the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.messages import Number
from ring_attn.core.program import Channel, Op, Program, part_of_heads
from ring_attn.core.ranks import EveryRank
from ring_attn.core.sizes import SHARE_OF_DQ, flops, merged_bytes
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.work import StepWork
from ring_attn.strategies.registry import programs
from ring_attn.strategies.strategy import Strategy

# Number of operators in `State.fold`, most of them over the statistics.
FOLD = 14


Exchange = Literal["shift", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Posts an exchange: "shift" sends one message to one rank, the others are collectives.

    Attributes:
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
    """Computes the tiles of a step, in the only pass or in one of several passes; (P,) int64 each.

    Attributes:
        area: visible pairs.
        edge: rows that the mask cuts.
        rows: rows whose state is loaded and stored; backward the mean of both sides.
        per_pair: operations for a pair in all heads, over all passes of the direction.
        state: bytes of sums loaded from other steps and stored for other steps.
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


@dataclass(frozen=True, eq=False)
class Move:
    """Passes of `count` operators over memory, such as packing; (P,) int64 bytes moved."""

    label: str
    nbytes: Tensor
    count: int = 1


Action = Transfer | Wait | Compute | Move


class Phase(NamedTuple):
    """A step in pictures and tables: a name and actions."""

    label: str
    actions: tuple[Action, ...]

    @property
    def posts(self) -> Iterator[Transfer]:
        return (action for action in self.actions if isinstance(action, Transfer))

    @property
    def computes(self) -> Iterator[Compute]:
        return (action for action in self.actions if isinstance(action, Compute))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of all P ranks in one direction of a call."""

    strategy: Strategy
    world_size: int
    backward: bool
    phases: tuple[Phase, ...]

    def actions(self) -> Iterator[Action]:
        return (action for phase in self.phases for action in phase.actions)

    @property
    def bytes_sent(self) -> Tensor:
        """(P,) int64 bytes that leave each rank."""
        return self._total(post.nbytes * post.active for p in self.phases for post in p.posts)

    @property
    def messages(self) -> Tensor:
        """(P,) int64 number of exchanges in which each rank takes part; a collective is one."""
        return self._total(post.active for phase in self.phases for post in phase.posts)

    def _total(self, values: Iterable[Tensor]) -> Tensor:
        return sum(values, torch.zeros(self.world_size, dtype=torch.int64))


def schedule_of(call: Call, *, backward: bool) -> Schedule:
    """Actions of all ranks in one direction of a call."""
    program = programs(call, EveryRank(call.layouts, call.mask), backward=backward)
    carries = get_backend(call.backend).carries_state
    phases = _phases(_Actions(program, call.spec, carries, call.mask.has_windows))
    return Schedule(call.strategy, call.world_size, backward, tuple(phases))


def _phases(actions: _Actions) -> Iterator[Phase]:
    """Yields a phase for the ops before the first step, then one for each step."""
    label, pending = "start", list[Action]()
    for op in actions.program.ops:
        if isinstance(op, ops.Step | ops.Inner) and pending:
            yield Phase(label, tuple(pending))
            pending = []
        if isinstance(op, ops.Step):
            label = op.label
        elif isinstance(op, ops.Inner):
            yield from _phases(actions.of_inner(op))
        else:
            pending += actions.of(op)
    if pending:
        yield Phase(label, tuple(pending))


class _Actions:
    """Turns the ops of a program into actions.

    If the backend's kernels carry the state, the first kernel makes it and the last one writes the
    results: then merging and finalizing take no passes of their own. In a program of groups of
    `degree` ranks, only the `members` of each group act.
    """

    def __init__(
        self,
        program: Program,
        spec: AttentionSpec,
        carries: bool,
        window: bool,
        members: Tensor | None = None,
        degree: int = 1,
    ) -> None:
        self.program, self._spec = program, spec
        self._carries, self._window, self._first = carries, window, True
        self._members, self._degree = members, degree
        self._spread: dict[int, tuple[Tensor, Tensor]] = {}
        self._everyone = self._each(torch.ones(program.world_size, dtype=torch.bool))
        self._out = program.arrays.get("out")

    def of_inner(self, op: ops.Inner) -> _Actions:
        """The actions of an inner program."""
        return _Actions(op.program, op.spec, self._carries, self._window, op.members, op.degree)

    def of(self, op: Op) -> list[Action]:
        """The actions of an op; none if it moves no bytes."""
        spec = self._spec
        wide = spec.accum_dtype.itemsize
        both = 1 + wide // spec.dtype.itemsize
        match op:
            case ops.Pack():
                return self._move("pack", 2 * op.message.nbytes)
            case ops.Post():
                return [self._transfer(op)]
            case ops.Wait():
                return [Wait(op.channel, self._active(op))]
            case ops.Clear():
                return self._move("clear", op.message.nbytes)
            case ops.Add():
                return self._move("add", 3 * op.message.nbytes)
            case ops.Unpack():
                passes = 3 if any(copy.add for copy in op.copies) else 2
                return self._move("unpack", passes * op.message.nbytes)
            case ops.New():
                return self._move("clear", op.array.nbytes) if op.zero else []
            case ops.Start():
                self._first = True
            case ops.Attend():
                return self._attend(op)
            case ops.Finish() if not self._carries:
                return self._move("finalize", op.out_array.nbytes * both)
            case ops.Delta() if self._out is not None:
                return self._move("delta", 2 * self._out.nbytes)
            case ops.Differentiate():
                share = {"all": 1.0, "q": SHARE_OF_DQ, "kv": 1 - SHARE_OF_DQ}[op.part]
                return [self._compute(op, share)]
            case ops.Round():
                elements = op.array.nbytes // op.array.dtype.itemsize
                return self._move("round", elements * (wide + op.array.dtype.itemsize))
        return []

    def _placed(self, values: Tensor) -> Tensor:
        whole = torch.zeros(len(values), self._degree, dtype=values.dtype)
        whole[:, self._members] = values[:, None]
        return whole.flatten()

    def _receivers(self, to: Tensor) -> Tensor:
        """The receiver of each rank: the same member of the receiving group."""
        return (to[:, None] * self._degree + torch.arange(self._degree)).flatten()

    def _groups(self, groups: Tensor) -> Tensor:
        assert self._members is not None
        return (groups[:, None, :] * self._degree + self._members[:, None]).flatten(0, 1)

    def _each(self, value: Number, spread: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The value of each rank, from one number, or from that of each rank or group."""
        if not isinstance(value, Tensor):
            value = torch.full((self.program.world_size,), int(value))
        if self._members is None:
            return value
        # A tensor of several actions is spread once, and kept, so that no other gets its id.
        if id(value) not in self._spread:
            self._spread[id(value)] = value, (spread or self._placed)(value)
        return self._spread[id(value)][1]

    def _move(self, label: str, nbytes: Number) -> list[Action]:
        return [Move(label, self._each(nbytes))]

    def _transfer(self, op: ops.Post) -> Transfer:
        nothing = torch.empty(0, dtype=torch.int64)
        active, nbytes = self._active(op), self._each(op.nbytes)
        if isinstance(op.route, ops.Collective):
            assert op.route.groups is not None, "a program of every rank has groups"
            groups = self._each(op.route.groups, self._groups)
            return Transfer(op.channel, op.route.op, nbytes, nothing, groups, active)
        to = self._each(op.route.send_to, self._receivers)
        return Transfer(op.channel, "shift", nbytes, to, nothing.view(0, 0), active)

    def _active(self, op: ops.Post | ops.Wait) -> Tensor:
        return self._everyone if op.active is None else self._each(op.active)

    def _compute(self, op: ops.Attend | ops.Differentiate, share: float) -> Compute:
        work: StepWork = op.tiles
        backward = isinstance(op, ops.Differentiate)
        rows = (work.rows + work.cols) // 2 if backward else work.rows
        per_pair = flops(1, part_of_heads(op, self._spec), backward=backward)
        state = self._state(op, work) if self._carries else 0
        area, edge, rows = map(self._each, (work.area, work.edge, rows))
        numbers = self._each(per_pair), self._each(state)
        return Compute(backward, area, edge, rows, *numbers, share, self._window)

    def _attend(self, op: ops.Attend) -> list[Action]:
        """Computes a step's tiles; from the second step on, merges the result into the state."""
        actions: list[Action] = [self._compute(op, 1.0)]
        if not self._carries and not self._first:
            spec = part_of_heads(op, self._spec)
            elements = op.tiles.rows.long() * (spec.batch * spec.nheads * spec.headdim_v)
            actions.append(Move("merge", self._each(elements * merged_bytes(spec)), FOLD))
        self._first = False
        return actions

    def _state(self, op: ops.Attend | ops.Differentiate, work: StepWork) -> Tensor:
        """(P,) int64 bytes of sums that a kernel loads and stores, for rows that take part."""
        spec = part_of_heads(op, self._spec)
        wide = spec.batch * spec.accum_dtype.itemsize
        if isinstance(op, ops.Attend):
            passes = (not self._first) + (not op.last)
            return work.rows.long() * (passes * wide * spec.nheads * (spec.headdim_v + 2))
        q = work.rows.long() * (2 * wide * spec.nheads * spec.headdim)
        kv = work.cols.long() * (2 * wide * spec.nheads_kv * (spec.headdim + spec.headdim_v))
        return {"all": q + kv, "q": q, "kv": kv}[op.part]
