"""Ring attention: KV shards travel round the ring; each rank folds them into its queries' state.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Only rows that another rank needs travel. Forward: KV is sent; the state (acc, m, l) stays, and is
normalised and rounded once, at the end. Backward: delta = rowsum(dO * O) is computed once, and lse
is global; KV or the Q side is sent, whichever costs fewer bytes. Its float32 gradients follow, in a
separate channel, in one of two orders.

Added up: sums of gradients follow the shard one step later, and the owner adds them to its own
gradients. A step computes into cleared memory while the previous step's sums are under way, then
adds the two: so the transfer is hidden.

    owner r       own -------------------------------------------> + = dK, dV (or dQ)
    rank r+1             0 + own --.                              |
    rank r+2                        `-> + own --.                 |
    rank r+3                                     `-> + own -------'   home

In order: KV is sent, and dK and dV with it, from their owner on. Every rank accumulates into
the received dK and dV, so the queries of all ranks are folded in the order of the ring. For a
causal mask over contiguous shards this is the order of one process: with a backend that folds in
order the bits are the same at every world size. A step computes dQ while dK and dV are under way,
so the transfer is hidden too. This takes one message more, in the first step, and fewer passes over
memory: nothing is cleared, nothing added up.

    owner r       own --.                                          = dK, dV
    rank r+1             `-> + own --.                            |
    rank r+2                          `-> + own --.               |
    rank r+3                                       `-> + own -----'   home

Together: long steps can hide both messages one after the other. Then sums start with the next
shard, as one exchange on one channel, and the shard waits for the sums.

    step i       post sums i-1 and shard i+1 together, compute, wait for both
    step i+1     post sums i and shard i+2 together, compute, wait for both

Double ring (`inner_degree`): inner rings in the nodes, an outer ring between the nodes. A rank
passes shards on in its inner ring; meanwhile the first shard of the round goes to the next node. So
the slow link has a whole round for one shard. After every round the sums return to their owner,
which takes the next round; the owner adds up the rounds. With one inner ring the messages are those
of the plain ring.

    inner_degree = 3, P = 6: owner of the shard that rank (o, i) holds, one row a step

        step             0 1 2   3 4 5       inner ring: one rank on, in the node, at every step
        (0, 0)           0 2 1 | 3 5 4       outer ring: 0 -> 3, of steps 0 to 3; as long as a round
        (0, 1)           1 0 2 | 4 3 5
        ...              round 0 round 1

If no rank needs a shard at some distance, all ranks skip that distance, so sends and receives match
by construction. A window of w positions over contiguous shards of c positions takes ceil(w / c)
hops, in either direction.

(Ring Attention, Liu et al., arXiv 2310.01889; the sent Q side, BurstAttention, arXiv
2403.09347; the double ring, LoongTrain, arXiv 2406.18485.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

from ring_attn.call import Call, GradientPlan
from ring_attn.core import program as ops
from ring_attn.core import sizes
from ring_attn.core.messages import Message, largest_nbytes
from ring_attn.core.program import Array, Buffer, Copy, Op, Operand, Program, View
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Named, Strategy
from ring_attn.core.tiles import Displacement, Grid, Side, StepTiles, ring_grid
from ring_attn.strategies import base
from ring_attn.strategies.base import StrategyCode, differentiate
from ring_attn.strategies.order import why_not_in_order

# KV rows x heads with which dK and dV fill the 132 SMs of an H100 with blocks of 128 rows. With
# fewer rows, dQ runs next to them on the idle SMs. In a simulated step of 8k rows with 8 / 1 heads
# this saves a quarter to a half of the time, while transfers take 2 %.
SPLIT_FROM_ROWS = 128 * 132


# Where shards and gradients are sent together, the exchanges of a channel start on another one.
TOGETHER: dict[ops.Channel, ops.Channel] = {"gradients": "shards", "outer_gradients": "outer"}

# FLOPs of a step for each byte of its two messages, from which they are sent together. A B200's
# backward, at most 1,046 TFLOP/s, then hides them even if NCCL copies them on one channel of 22
# GB/s (estimates). By the model, plans with more are 0.1 % slower to 0.1 % faster than with two
# communicators, those with 27,000 up to 27 % slower (bench/results/NOTES.md).
TOGETHER_FROM = 50_000


class Ring(StrategyCode):
    name = "ring"
    options = ("inner_degree",)

    def why_not_same_bits(self, call: Call) -> str | None:
        reason = why_not_in_order(call, _why_not_by_arrival)
        if reason is None and not self.gradients(call).in_order:
            return "gradients are added up: same_bits=False"
        return reason

    def gradients(self, call: Call) -> GradientPlan:
        """Choose the side that is sent in the backward, and the order of its sums.

        Sums are made in order only for the same bits at every world size. By the model, on 8 and
        more H100 and A100, they then take 3 % less to 9 % more time within a node, and 3 % less to
        29 % more between nodes: only the computation of dQ hides the transfer of dK and dV, while
        in the other order a whole step does.
        """
        if call.gradients is not None:
            return call.gradients
        in_order = call.options.same_bits
        if in_order is None:
            in_order = why_not_in_order(call, _why_not_by_arrival) is None
        if in_order:
            return GradientPlan(sent_side="kv", in_order=True)
        layout_q, layout_kv = call.layouts
        sent_side = sizes.choose_sent_side(call.spec, layout_q, layout_kv, call.mask)
        return GradientPlan(sent_side, in_order=False)

    def sends_together(self, call: Call) -> bool:
        """Choose whether a step's messages are one exchange, after which it must not wait longer.

        Sums in order never are: only the computation of dQ hides them, not a whole step.
        """
        if call.sends_together is not None:
            return call.sends_together
        if call.options.transport.one_communicator is not None:
            return call.options.transport.one_communicator
        plan = self.gradients(call)
        if call.spec.device_type == "cpu" or plan.in_order:
            return False
        sent_side = plan.sent_side or "kv"
        grid = ring_grid(call.world_size, call.strategy.inner_degree)
        num_steps = len(call.ranks.order(grid, sent_side))
        rows = max(call.layouts[0 if sent_side == "q" else 1].shard_lens)
        nbytes = (
            sizes.shard_packet(call.spec, sent_side, rows).nbytes
            + sizes.gradient_packet(call.spec, sent_side, rows).nbytes
        )
        of_call = sizes.flops(call.mask.area, call.spec, backward=True)
        return of_call >= TOGETHER_FROM * nbytes * num_steps * call.world_size

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        grid = ring_grid(call.world_size, call.strategy.inner_degree)
        plan = self.gradients(call) if backward else GradientPlan("kv", in_order=False)
        sent_side = plan.sent_side or "kv"
        steps = _Steps(call, grid, sent_side, order=call.ranks.order(grid, sent_side))
        arrays = base.input_arrays(call, backward=backward)
        if not backward:
            return base.core_program(call, arrays, _forward(call, steps), backward=False)
        backward_steps = _backward(call, steps, arrays, in_order=plan.in_order, rounded=rounded)
        if self.sends_together(call):
            backward_steps = _together(backward_steps)
        return base.core_program(call, arrays, backward_steps, backward=True)

    def full_name(self, strategy: Strategy) -> str:
        degree = strategy.inner_degree
        return self.name if degree == 1 else f"double_ring {degree}"


def double_rings(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    """Yield double rings whose inner rings fit the nodes.

    The inner rings have the ranks of a node, of half a node or of two nodes, else as close to a
    node as possible. Within one node, the grid of inner and outer ring is as square as possible.
    """
    divisors = [d for d in range(2, world_size) if world_size % d == 0]
    if not divisors:
        return
    if world_size <= node_size:
        degrees = [min(divisors, key=lambda d: (abs(d * d - world_size), d))]
    else:
        degrees = [d for d in divisors if d in (node_size, node_size // 2, 2 * node_size)]
    if not degrees:
        degrees = [min(divisors, key=lambda d: (abs(d - node_size), d))]
    for degree in degrees:
        yield Strategy(inner_degree=degree)


def _why_not_by_arrival(call: Call) -> str | None:
    """Return None if shards arrive in the order of their positions, else the reason why not."""
    layout_q, layout_kv = call.layouts
    if call.world_size == 1:
        return None
    if not call.mask.is_causal:
        return f"the mask must be causal, without window and documents, got {call.mask.words}"
    grid = ring_grid(call.world_size, call.strategy.inner_degree)
    if grid.outer > 1:
        return (
            f"the ring must be a plain one, got {grid.outer} inner rings of {grid.inner} ranks: "
            "shards of a double ring do not arrive in the order of their positions"
        )
    if layout_q.shard_lens != layout_kv.shard_lens:
        return f"q and kv must have one layout, got {layout_q} and {layout_kv}"
    return None


class _Leg(NamedTuple):
    """An exchange of a shard, or of sums, between the ranks that hold it at two steps.

    Attributes:
        outer: whether ranks of two inner rings exchange, during the compute of a whole round.
        sends: the step whose shard or sums this rank sends.
        brings: the step whose shard or sums this rank receives; 0 for sums that arrive at their
            owner.
    """

    outer: bool
    sends: int
    brings: int


@dataclass(frozen=True)
class _Steps:
    """The steps of a ring: the shard held at each step, its exchanges, and the messages.

    `order` has the displacement of a shard's holder from its owner at each step, first (0, 0).
    """

    call: Call
    grid: Grid
    sent_side: Side
    order: tuple[Displacement, ...]

    @property
    def num(self) -> int:
        return len(self.order)

    def hop(self, here: int, there: int) -> ops.Hop:
        """Return the hop from the holder of a shard at step `here` to its holder at `there`."""
        outer_here, inner_here = self.order[here]
        outer_there, inner_there = self.order[there]
        displacement = (outer_there - outer_here, inner_there - inner_here)
        return self.call.ranks.hop(self.grid, displacement)

    def among(self, leg: _Leg) -> tuple[int, ...] | None:
        """Return the ranks whose connections an exchange uses; None is all ranks.

        An exchange within an inner ring uses the connections of only its ranks. NCCL gives a
        communicator as few channels for each peer as its slowest kind of peer has. So with ranks of
        several nodes, it would copy over NVLink on 1 or 2 channels (`transport.nccl_channels`).
        """
        stays_within = self.order[leg.sends][0] == self.order[leg.brings][0]
        if self.grid.outer == 1 or not stays_within:
            return None
        inner = self.grid.inner
        first = self.call.rank // inner * inner
        return tuple(range(first, first + inner))

    def route(self, leg: _Leg) -> ops.Hop:
        """Return the hop of an exchange, numbered as the ranks of `among`."""
        hop = self.hop(leg.sends, leg.brings)
        ranks = self.among(leg)
        if ranks is None:
            return hop
        return ops.Hop(ranks.index(hop.send_to), ranks.index(hop.recv_from))

    def messages(self, packet: sizes.MakePacket) -> list[Message]:
        """Return the message with the shard, or its gradients, at each step.

        There are no messages in a single step.
        """
        if self.num == 1:
            return []
        make = partial(packet, self.call.spec, self.sent_side)
        return self.call.ranks.moving_messages(self.grid, self.sent_side, make, self.order)

    def tiles(self, index: int) -> StepTiles:
        return self.call.ranks.tiles(self.grid, self.sent_side, self.order[index])

    def copies(self, names: tuple[str, ...], *, add: bool = False) -> tuple[Copy, ...]:
        """Return the copies between a message and the sent rows of the own tensors."""
        rows = self.call.ranks.moving(self.grid, self.sent_side, (0, 0))
        return tuple(Copy(i, View(name, rows), add=add) for i, name in enumerate(names))

    def shard_legs(self, index: int) -> list[_Leg]:
        """Return the exchanges of shards that start at a step.

        The exchange of the outer ring comes first: it has the slower link.
        """
        legs = []
        next_round = self.rounds.get(index)
        if next_round is not None:
            legs.append(_Leg(outer=True, sends=index, brings=next_round))
        if index + 1 < self.num and index + 1 not in self.rounds:
            legs.append(_Leg(outer=False, sends=index, brings=index + 1))
        return legs

    def sums_leg(self, index: int) -> _Leg:
        """Return the exchange of a step's sums: to the next rank, or after a round to the owner."""
        if index + 1 < self.num and index + 1 not in self.rounds:
            return _Leg(outer=False, sends=index, brings=index + 1)
        is_first_round = self.order[index][0] == self.order[0][0]
        return _Leg(outer=not is_first_round, sends=index, brings=0)

    @cached_property
    def rounds(self) -> dict[int, int | None]:
        """First step of each round -> first step of the next round, None for the last round."""
        outer = [displacement[0] for displacement in self.order]
        firsts = [i for i in range(self.num) if i == 0 or outer[i] != outer[i - 1]]
        return dict(zip_longest(firsts, firsts[1:]))


class _Shards:
    """The shards of the side that is sent: ops before and after each step, and its operands."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._names = sizes.SHARD[steps.sent_side]
        self._messages = steps.messages(sizes.shard_packet)
        nbytes = largest_nbytes(*self._messages)
        self._buffers = [Buffer(f"shard {i}", nbytes) for i in range(len(self._messages))]
        self._coming: dict[int, _Leg] = {}
        # A shard's buffer is freed one step after its compute and its sends are done. So the shard
        # after the next one arrives in a third buffer, and does not wait for this step's attention.
        until = list(range(steps.num))
        for index in range(steps.num):
            for leg in steps.shard_legs(index):
                self._coming[leg.brings] = leg
                until[leg.sends] = max(until[leg.sends], leg.brings - 1)
        self._done: dict[int, list[Buffer]] = {}
        for buffer, last in zip(self._buffers, until, strict=False):
            self._done.setdefault(min(last + 1, steps.num - 1), []).append(buffer)

    def before(self, index: int) -> Iterator[Op]:
        """Pack the own shard at the first step, and start the exchanges that the step hides."""
        steps, buffers, messages = self._steps, self._buffers, self._messages
        if index == 0 and steps.num > 1:
            yield ops.Pack(buffers[0], messages[0], steps.copies(self._names))
        for leg in steps.shard_legs(index):
            yield ops.Post(
                channel="outer" if leg.outer else "shards",
                step=index,
                route=steps.route(leg),
                send=buffers[leg.sends],
                recv=buffers[leg.brings],
                message=messages[leg.brings],
                nbytes=messages[leg.sends].nbytes,
                ranks=steps.among(leg),
            )

    def held(self, index: int) -> tuple[Operand, ...]:
        """Return the tensors of the shard that this rank holds at a step."""
        if index == 0:
            return tuple(View(name) for name in self._names)
        return ops.entries(self._buffers[index], len(self._names))

    def after(self, index: int) -> Iterator[Op]:
        """Wait for the next shard, and free shards that are no longer used."""
        if index + 1 in self._coming:
            leg = self._coming[index + 1]
            yield ops.Wait("outer" if leg.outer else "shards", self._steps.among(leg))
        if index in self._done:
            yield ops.Free(tuple(self._done[index]))


def _forward(call: Call, steps: _Steps) -> Iterator[Op]:
    yield base.start(call)
    shards = _Shards(steps)
    last = max((index for index in range(steps.num) if steps.tiles(index)), default=0)
    for index in range(steps.num):
        yield ops.Step(f"step {index}", index)
        yield from shards.before(index)
        k, v = shards.held(index)
        yield ops.Attend(steps.tiles(index), View("q"), k, v, last=index == last)
        yield from shards.after(index)
    yield ops.Step("end")
    yield base.finish(call)


def _backward(
    call: Call, steps: _Steps, arrays: dict[str, Array], *, in_order: bool, rounded: bool
) -> Iterator[Op]:
    yield ops.Delta(arrays["lse"])
    shards = _Shards(steps)
    sums = _InOrder(steps) if in_order else _AddedUp(steps)
    grads = base.sums_of(call.spec, arrays)
    yield from base.new_sums(grads)
    for index in range(steps.num):
        yield ops.Step(f"step {index}", index)
        yield from shards.before(index)
        work = differentiate(
            steps.sent_side,
            steps.tiles(index),
            shards.held(index),
            sums.held(index),
            own=index == 0,
        )
        yield from sums.compute(index, work)
        yield from sums.after(index)
        yield from shards.after(index)
    yield ops.Step("end")
    yield from sums.end()
    yield from base.rounded_sums(grads, call.spec, rounded=rounded)


class _Link(NamedTuple):
    """A channel that carries shards and gradients, and the ranks among which it does."""

    channel: ops.Channel
    ranks: tuple[int, ...] | None


def _link_of(op: ops.Post | ops.Wait) -> _Link:
    return _Link(TOGETHER.get(op.channel, op.channel), op.ranks)


def _together(steps: Iterator[Op]) -> Iterator[Op]:
    """Yield the ops of a backward, with gradients that start together with the next shard.

    Gradients that no shard follows start alone, before the next kernel. The first wait for a part
    of an exchange is for all of it.
    """
    ready: dict[_Link, ops.Post] = {}  # gradients that have not started
    under_way: dict[_Link, list[ops.Post]] = {}

    def start(link: _Link, *posts: ops.Post) -> Iterator[Op]:
        if link in under_way:
            del under_way[link]
            yield ops.Wait(link.channel, link.ranks)
        under_way[link] = [*posts]
        is_one_shard = len(posts) == 1 and posts[0].channel == link.channel
        yield posts[0] if is_one_shard else ops.PostTogether(link.channel, posts)

    for op in steps:
        if isinstance(op, ops.Differentiate):
            while ready:
                yield from start(*ready.popitem())
        if isinstance(op, ops.Post) and op.channel in TOGETHER:
            ready[_link_of(op)] = op
        elif isinstance(op, ops.Post):
            link = _link_of(op)
            gradients = [ready.pop(link)] if link in ready else []
            yield from start(link, *gradients, op)
        elif isinstance(op, ops.Wait):
            link = _link_of(op)
            if link in ready and op.channel == ready[link].channel:
                yield from start(link, ready.pop(link))
            if any(post.channel == op.channel for post in under_way.get(link, ())):
                del under_way[link]
                yield ops.Wait(link.channel, link.ranks)
        else:
            yield op


class _Sums:
    """The sums for the gradients of the side that is sent: ops of each step."""

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps
        self.names = tuple(f"{name} sum" for name in sizes.MOVING[steps.sent_side])
        self.messages = steps.messages(sizes.gradient_packet)
        self.nbytes = largest_nbytes(*self.messages)
        self.buffers = [Buffer(f"sums {i}", self.nbytes) for i in range(steps.num)]

    def held(self, index: int) -> tuple[Operand, ...]:
        """Return the sums that a step adds to; the first step adds to the rank's own sums."""
        if index == 0:
            return tuple(View(name) for name in self.names)
        return ops.entries(self.buffers[index], len(self.names))

    def post(self, leg: _Leg, recv: Buffer) -> ops.Post:
        """Start an exchange of sums."""
        return ops.Post(
            channel=_gradients(leg.outer),
            step=leg.sends,
            route=self.steps.route(leg),
            send=self.buffers[leg.sends],
            recv=recv,
            message=self.messages[leg.brings],
            nbytes=self.messages[leg.sends].nbytes,
            ranks=self.steps.among(leg),
        )

    def unpack(self, buffer: Buffer, *, add: bool) -> ops.Unpack:
        """Add a returned message to the rank's own sums, or replace the sums by it."""
        return ops.Unpack(buffer, self.messages[0], self.steps.copies(self.names, add=add))


def _gradients(outer: bool) -> ops.Channel:
    return "outer_gradients" if outer else "gradients"


class _InOrder(_Sums):
    """Sums start at their owner; every rank adds its gradients to the received sums."""

    def __init__(self, steps: _Steps) -> None:
        super().__init__(steps)
        self._home = Buffer("sums home", self.nbytes)
        call = steps.call
        _, layout_kv = call.layouts
        rows_x_heads = max(layout_kv.shard_lens) * call.spec.batch * call.spec.nheads_kv
        has_two_passes = not CODE.in_one_pass(call)
        self._split = has_two_passes and rows_x_heads >= SPLIT_FROM_ROWS

    def compute(self, index: int, work: ops.Differentiate) -> Iterator[Op]:
        """Compute dQ while the sums are under way, and then dK and dV.

        All three are computed together in the first step, and if dK and dV would not fill a GPU.
        """
        if not self._split or index == 0:
            yield from self._arrived(index)
            yield work
            return
        yield work._replace(part="q", dkv=None)
        yield from self._arrived(index)
        yield work._replace(part="kv", dq=None)

    def after(self, index: int) -> Iterator[Op]:
        """Send the sums on; the sums of the last step return to their owner."""
        if self.steps.num == 1:
            return
        if index == 0:
            yield ops.Pack(self.buffers[0], self.messages[0], self.steps.copies(self.names))
        following = (index + 1) % self.steps.num
        recv = self._home if following == 0 else self.buffers[following]
        yield self.post(_Leg(outer=False, sends=index, brings=following), recv)

    def end(self) -> Iterator[Op]:
        """Replace the rank's own sums by the sums that returned with its shard."""
        if self.steps.num > 1:
            to_owner = _Leg(outer=False, sends=self.steps.num - 1, brings=0)
            yield ops.Wait("gradients", self.steps.among(to_owner))
            yield ops.Free((self.buffers[-1],))
            yield self.unpack(self._home, add=False)

    def _arrived(self, index: int) -> Iterator[Op]:
        """Wait for the sums that a step adds to."""
        if index > 0:
            leg = _Leg(outer=False, sends=index - 1, brings=index)
            yield ops.Wait("gradients", self.steps.among(leg))
            yield ops.Free((self.buffers[index - 1],))


class _AddedUp(_Sums):
    """Ranks add up gradients for other owners in cleared memory; the owner adds the result."""

    def __init__(self, steps: _Steps) -> None:
        super().__init__(steps)
        # By `outer`: the exchange under way on the inner or the outer ring, and its buffer.
        self._under_way: dict[bool, tuple[_Leg, Buffer]] = {}

    def compute(self, index: int, work: ops.Differentiate) -> Iterator[Op]:
        """Compute into a cleared buffer, but in the first step into the rank's own sums."""
        if index > 0:
            yield ops.Clear(self.buffers[index], self.messages[index])
        yield work

    def after(self, index: int) -> Iterator[Op]:
        """Add the received sums to the step's sums, and send the total on."""
        if index == 0:
            return
        leg = self.steps.sums_leg(index)
        for other, recv in list(self._under_way.values()):
            if other.outer == leg.outer or other.brings == index:
                yield from self._land(other.outer)
                if other.brings == index:
                    yield ops.Add(self.buffers[index], recv, self.messages[index])
        recv = Buffer(f"received {index}", self.nbytes)
        yield self.post(leg, recv)
        self._under_way[leg.outer] = leg, recv

    def end(self) -> Iterator[Op]:
        """Wait for the sums that are still under way."""
        for outer in list(self._under_way):
            yield from self._land(outer)

    def _land(self, outer: bool) -> Iterator[Op]:
        """Wait for an exchange, and add sums that are at their owner to the owner's sums."""
        leg, recv = self._under_way.pop(outer)
        yield ops.Wait(_gradients(outer), self.steps.among(leg))
        yield ops.Free((self.buffers[leg.sends],))
        if leg.brings == 0:
            yield self.unpack(recv, add=True)


CODE = Ring()
DOUBLE_RING = Named(double_rings, core=CODE.name, degree="inner_degree", needed=True)
