"""Ring attention: KV shards travel round the ring; each rank folds them into its queries' state.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Only rows that another rank needs travel. Forward: KV travels; the state (acc, m, l) stays, and is
normalised and rounded once, at the end. Backward: delta = rowsum(dO * O) is computed once, and lse
is global; KV or the Q side travels, whichever costs fewer bytes. Its float32 gradients follow, in a
separate channel, in one of two orders.

Added up: sums of gradients follow the shard one step behind, and the owner adds them to its own
gradients. A step computes into cleared memory while the previous step's sums are under way, then
adds the two: so the transfer is hidden.

    owner r       own -------------------------------------------> + = dK, dV (or dQ)
    rank r+1             0 + own --.                              |
    rank r+2                        `-> + own --.                 |
    rank r+3                                     `-> + own -------'   home

In order: KV travels, and dK and dV travel with it, from their owner on. Every rank accumulates into
the received dK and dV, so the queries of all ranks are folded in the order of the ring. For a
causal mask over contiguous shards this is the order of one process: with a backend that folds in
order the bits are the same at every world size. A step computes dQ while dK and dV are under way,
so the transfer is hidden too. This takes one message more, in the first step, and fewer passes over
memory: nothing is cleared, nothing added up.

    owner r       own --.                                          = dK, dV
    rank r+1             `-> + own --.                            |
    rank r+2                          `-> + own --.               |
    rank r+3                                       `-> + own -----'   home

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

(Ring Attention, Liu et al., arXiv 2310.01889; the travelling Q side, BurstAttention, arXiv
2403.09347; the double ring, LoongTrain, arXiv 2406.18485.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from ring_attn.backends import bits_unit, get_backend
from ring_attn.core import order
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Message
from ring_attn.core.program import (
    Add,
    Array,
    Attend,
    Buffer,
    Channel,
    Clear,
    Copy,
    Delta,
    Differentiate,
    Entry,
    Finish,
    Free,
    Hop,
    Op,
    Operand,
    Pack,
    Post,
    Program,
    Start,
    Step,
    Unpack,
    View,
    Wait,
)
from ring_attn.core.ranks import OneRank, Ranks
from ring_attn.core.sizes import MOVING, SHARD, choose_traveller, gradient_packet, shard_packet
from ring_attn.core.tiles import (
    Displacement,
    Grid,
    MaskKind,
    Tile,
    Traveller,
    check_fit,
    kind_of,
    ring_grid,
)
from ring_attn.strategies.base import (
    Call,
    StrategyCode,
    differentiate,
    input_arrays,
    new_sums,
    result_arrays,
    rounded_sums,
    sums_of,
)

# KV rows x heads with which dK and dV fill the 132 SMs of an H100 with blocks of 128 rows. With
# fewer rows, dQ runs beside them on the idle SMs: in a simulated step of 8k rows with 8 / 1 heads
# that is worth a quarter to a half of the time, while transfers take 2 %.
MANY_ROWS = 128 * 132


def check(call: Call) -> None:
    """Refuses layouts, masks and degrees that do not fit a ring."""
    ring_grid(call.world_size, call.strategy.inner_degree)
    check_fit(*call.layouts, call.mask)


def why_not_same_bits(call: Call) -> str | None:
    """None if a ring has the same bits at every world size, else the reason why not."""
    reason = _why_not_in_order(call)
    if reason is None and not choose_gradients(call)[1]:
        return "gradients are added up: same_bits=False"
    return reason


def _why_not_in_order(call: Call) -> str | None:
    heads = (call.spec.nheads, call.spec.nheads_kv)
    unit = bits_unit(call.backend)
    return order.why_not_in_order(call.strategy, heads, call.layouts, call.mask, call.backend, unit)


def choose_gradients(call: Call) -> tuple[Traveller, bool]:
    """Chooses the side that travels in the backward, and whether gradients are summed in order.

    When KV travels, an in-order backend accumulates into the travelling dK and dV in place, which
    saves three reads and writes a step. With a window, a step's dQ is too short to hide their
    transfer. `same_bits=False` adds them up instead, hidden behind whole steps, for slow links.
    """
    if call.gradients is not None:
        return call.gradients
    if call.same_bits or (call.same_bits is None and _why_not_in_order(call) is None):
        return "kv", True
    travels = choose_traveller(call.spec, *call.layouts, call.mask)
    grid = ring_grid(call.world_size, call.strategy.inner_degree)
    plain = grid.outer == 1 and not call.mask.has_windows
    in_order = get_backend(call.backend).in_order and plain and travels == "kv"
    return travels, call.same_bits is None and in_order


def program(call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True) -> Program:
    """The program of a ring, in one direction."""
    grid = ring_grid(ranks.world_size, call.strategy.inner_degree)
    travels, in_order = choose_gradients(call) if backward else ("kv", False)
    steps = Steps(call, ranks, grid, travels, ranks.order(grid, travels))
    arrays = input_arrays(call.spec, ranks, backward=backward)
    if backward:
        ops = tuple(_backward(call, steps, arrays, in_order=in_order, rounded=rounded))
        return Program(ranks.world_size, ranks.rank, True, ops, arrays)
    ops = tuple(_forward(call, steps))
    saved = ("q", "k", "v", "out", "lse")
    return Program(ranks.world_size, ranks.rank, False, ops, arrays, saved)


class RingStep(NamedTuple):
    """One step of one rank, for tables and pictures.

    Attributes:
        source: owner of the shard (KV, or the travelling Q side) that the rank holds.
        rows: rows of the shard that the rank holds: all of its own, of others those that travel.
        tiles: tiles in folding order; travelling rows count from the first row held.
        kind: FULL, CAUSAL or NO_ATTENTION of the whole rectangle.
        hop: peers of the hop to the next step; None at the last step.
    """

    source: int
    rows: slice
    tiles: tuple[Tile, ...]
    kind: MaskKind
    hop: Hop | None


def ring_steps(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    rank: int,
    travels: Traveller = "kv",
    inner_degree: int = 1,
) -> list[RingStep]:
    """The steps of one rank: its own shard first, then those of rank - 1, rank - 2, ...

    Args:
        layout_q: where the queries are.
        layout_kv: where the keys are; the same number of ranks and strides as `layout_q`.
        mask: over the same lengths as the layouts.
        rank: the rank.
        travels: the side that travels; "q" is for the backward.
        inner_degree: ranks of an inner ring; 1, or all, is one plain ring.

    Raises:
        ValueError: layouts and mask do not fit each other, the rank does not exist, or
            `inner_degree` does not divide the number of ranks.
        NotImplementedError: the strides of the layouts differ (striped against another kind).

    Example:
        >>> layout = SequenceLayout.contiguous(1024, 4)
        >>> steps = ring_steps(layout, layout, Mask(1024, 1024, causal=True), rank=2)
        >>> [(step.source, step.kind.name) for step in steps]
        [(2, 'CAUSAL'), (1, 'FULL'), (0, 'FULL'), (3, 'NO_ATTENTION')]
        >>> steps[0].hop
        Hop(send_to=3, recv_from=1)
    """
    world_size = layout_q.world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    ranks, grid = OneRank((layout_q, layout_kv), mask, rank), ring_grid(world_size, inner_degree)
    order = ranks.order(grid, travels)
    moving = layout_kv if travels == "kv" else layout_q
    steps = []
    for index, by in enumerate(order):
        source = grid.moved(rank, by, -1)
        rows = ranks.moving(grid, travels, by) if index else slice(0, moving.shard_len(source))
        tiles = ranks.tiles(grid, travels, by)
        pair = (rank, source) if travels == "kv" else (source, rank)
        rectangle = layout_q.shard_len(pair[0]) * layout_kv.shard_len(pair[1])
        kind = kind_of(sum(tile.area for tile in tiles), rectangle)
        hop = None
        if index + 1 < len(order):
            (a, b), (c, d) = by, order[index + 1]
            hop = ranks.hop(grid, (c - a, d - b))
        steps.append(RingStep(source, rows, tiles, kind, hop))
    return steps


@dataclass(frozen=True)
class Transfer:
    """An exchange: sends the shard or sums of step `sends`, receives those of step `brings`.

    `outer` is an exchange between inner rings, under way during the compute of a whole round.
    `brings` is 0 for sums that arrive at their owner.
    """

    outer: bool
    sends: int
    brings: int


@dataclass(frozen=True)
class Steps:
    """The steps of a ring: the shard held at each, its hops, and the lengths of messages.

    Attributes:
        call: the call.
        ranks: the rank, or every rank.
        grid: the ranks as inner rings.
        travels: the side that travels.
        order: displacement of the holder from the owner at each step; the first is (0, 0).
    """

    call: Call
    ranks: Ranks
    grid: Grid
    travels: Traveller
    order: tuple[Displacement, ...]

    @property
    def num(self) -> int:
        """Number of steps."""
        return len(self.order)

    def hop(self, here: int, there: int) -> Hop:
        """The hop from the holder of a shard at step `here` to its holder at step `there`."""
        (a, b), (c, d) = self.order[here], self.order[there]
        return self.ranks.hop(self.grid, (c - a, d - b))

    def shards(self) -> list[Message]:
        """The message with the shard held at each step; none if there is a single step."""
        spec, travels = self.call.spec, self.travels
        return self._messages(lambda rows: shard_packet(spec, travels, rows))

    def gradients(self) -> list[Message]:
        """The message with the gradients of the shard held at each step."""
        spec, travels = self.call.spec, self.travels
        return self._messages(lambda rows: gradient_packet(spec, travels, rows))

    def _messages(self, make: Callable[[int], Message]) -> list[Message]:
        if self.num == 1:
            return []
        return list(map(self.ranks.moving_messages(self.grid, self.travels, make), self.order))

    def tiles(self, index: int) -> object:
        """The tiles of a step."""
        return self.ranks.tiles(self.grid, self.travels, self.order[index])

    def copies(self, names: tuple[str, ...]) -> tuple[Copy, ...]:
        """Copies between a message and the travelling rows of the rank's own tensors."""
        rows = self.ranks.moving(self.grid, self.travels, (0, 0))
        return tuple(Copy(i, View(name, rows)) for i, name in enumerate(names))

    def shard_transfers(self, index: int) -> list[Transfer]:
        """The exchanges of shards that start at a step; the outer ring's exchange comes first."""
        following = index + 1
        transfers = []
        next_round = self.rounds.get(index)
        if next_round is not None:
            transfers.append(Transfer(True, index, next_round))
        if following < self.num and following not in self.rounds:
            transfers.append(Transfer(False, index, following))
        return transfers

    def sums_transfer(self, index: int) -> Transfer:
        """The exchange of a step's sums: to the next rank, or after a round to the owner."""
        following = index + 1
        if following < self.num and following not in self.rounds:
            return Transfer(False, index, following)
        first_round = self.order[index][0] == self.order[0][0]
        return Transfer(not first_round, index, 0)

    @cached_property
    def rounds(self) -> dict[int, int | None]:
        """First step of each round -> first step of the next round, None for the last."""
        firsts = [i for i, (a, _) in enumerate(self.order) if i == 0 or a != self.order[i - 1][0]]
        return dict(zip_longest(firsts, firsts[1:]))


class _Messages:
    """The shards of the travelling side: ops before and after each step, and a step's operands."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._names = SHARD[steps.travels]
        self._messages = steps.shards()
        room = _room(self._messages)
        self._buffers = [Buffer(f"shard {i}", room) for i in range(len(self._messages))]
        self._coming: dict[int, Transfer] = {}
        # A shard's buffer is freed one step after its compute and its sends are done. So the shard
        # after the next arrives in a third buffer, and need not wait for this step's attention.
        until = list(range(steps.num))
        for index in range(steps.num):
            for transfer in steps.shard_transfers(index):
                self._coming[transfer.brings] = transfer
                until[transfer.sends] = max(until[transfer.sends], transfer.brings - 1)
        self._done: dict[int, list[Buffer]] = {}
        for buffer, last in zip(self._buffers, until, strict=False):
            self._done.setdefault(min(last + 1, steps.num - 1), []).append(buffer)

    def before(self, index: int) -> Iterator[Op]:
        """Packs the own shard at the first step, and starts the exchanges that the step hides."""
        steps = self._steps
        if index == 0 and steps.num > 1:
            yield Pack(self._buffers[0], self._messages[0], steps.copies(self._names))
        for transfer in steps.shard_transfers(index):
            yield _post(
                "outer" if transfer.outer else "shards",
                index,
                steps.hop(transfer.sends, transfer.brings),
                (self._buffers[transfer.sends], self._messages[transfer.sends]),
                (self._buffers[transfer.brings], self._messages[transfer.brings]),
            )

    def held(self, index: int) -> tuple[Operand, ...]:
        """The tensors of the shard held at a step."""
        if index == 0:
            return tuple(View(name) for name in self._names)
        return tuple(Entry(self._buffers[index], i) for i in range(len(self._names)))

    def after(self, index: int) -> Iterator[Op]:
        """Waits for the next shard, and frees shards that are no longer used."""
        if index + 1 in self._coming:
            yield Wait("outer" if self._coming[index + 1].outer else "shards")
        if index in self._done:
            yield Free(tuple(self._done[index]))


def _room(messages: list[Message]) -> int:
    sizes = [message.nbytes for message in messages]
    return max(sizes) if sizes and isinstance(sizes[0], int) else 0


def _post(
    channel: Channel,
    index: int,
    hop: Hop,
    send: tuple[Buffer, Message],
    recv: tuple[Buffer, Message],
) -> Post:
    return Post(channel, index, hop, send[0], recv[0], recv[1], send[1].nbytes)


def _forward(call: Call, steps: Steps) -> Iterator[Op]:
    spec = call.spec
    rows = steps.ranks.rows("q")
    state = Array(spec.batch, rows, spec.nheads, spec.headdim_v, spec.accum_dtype)
    results = result_arrays(spec, rows)
    yield Start(View("q"), spec.headdim_v, state, slice(None))
    shards = _Messages(steps)
    last = _last_with_tiles(steps)
    for index in range(steps.num):
        yield Step(f"step {index}", index)
        yield from shards.before(index)
        k, v = shards.held(index)
        yield Attend(steps.tiles(index), View("q"), k, v, last=index == last)
        yield from shards.after(index)
    yield Step("end")
    yield Finish("out", "lse", results["out"], results["lse"])


def _last_with_tiles(steps: Steps) -> int:
    if steps.ranks.rank is None:
        return steps.num - 1
    return max((i for i in range(steps.num) if steps.tiles(i)), default=0)


def _backward(
    call: Call, steps: Steps, arrays: dict[str, Array], *, in_order: bool, rounded: bool
) -> Iterator[Op]:
    yield Delta(arrays["lse"])
    shards = _Messages(steps)
    sums = _InOrder(steps) if in_order else _AddedUp(steps)
    grads = sums_of(call.spec, arrays)
    yield from new_sums(grads)
    for index in range(steps.num):
        yield Step(f"step {index}", index)
        yield from shards.before(index)
        work = differentiate(
            steps.travels, steps.tiles(index), shards.held(index), sums.held(index), own=index == 0
        )
        yield from sums.compute(index, work)
        yield from sums.after(index)
        yield from shards.after(index)
    yield Step("end")
    yield from sums.end()
    yield from rounded_sums(grads, call.spec, rounded=rounded)


class _Sums:
    """The sums for the gradients of the travelling side: ops of each step."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.names = MOVING[steps.travels]
        self.messages = steps.gradients()
        self.room = _room(self.messages)

    def buffer(self, name: str) -> Buffer:
        """A buffer for a message of gradients."""
        return Buffer(name, self.room)

    def own(self) -> tuple[Operand, ...]:
        """The rank's own sums."""
        return tuple(View(f"{name} sum") for name in self.names)

    def unpack(self, buffer: Buffer, *, add: bool) -> Unpack:
        """Adds a returned message to the rank's own sums, or replaces the sums by it."""
        names = tuple(f"{name} sum" for name in self.names)
        copies = tuple(copy._replace(add=add) for copy in self.steps.copies(names))
        return Unpack(buffer, self.messages[0], copies)

    def entries(self, buffer: Buffer) -> tuple[Operand, ...]:
        """The tensors of the message in a buffer."""
        return tuple(Entry(buffer, i) for i in range(len(self.names)))


class _InOrder(_Sums):
    """Sums start at their owner; every rank adds its gradients to the received sums."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._buffers = [self.buffer(f"sums {i}") for i in range(steps.num)]
        self._home = self.buffer("sums home")
        call = steps.call
        rows = max(call.layouts[1].shard_lens) * call.spec.batch * call.spec.nheads_kv
        apart = not get_backend(call.backend).in_one_pass(call.spec)
        self._split = apart and rows >= MANY_ROWS

    def held(self, index: int) -> tuple[Operand, ...]:
        """The sums of a step: the rank's own at first, then the received ones."""
        return self.entries(self._buffers[index]) if index else self.own()

    def compute(self, index: int, work: Differentiate) -> Iterator[Op]:
        """Computes dQ while the sums are under way, and then dK and dV.

        Computes all three side by side in the first step, and if dK and dV would not fill a GPU.
        """
        if not self._split or not index:
            yield from self._arrived(index)
            yield work
            return
        yield work._replace(part="q", dkv=None)
        yield from self._arrived(index)
        yield work._replace(part="kv", dq=None)

    def after(self, index: int) -> Iterator[Op]:
        """Sends the sums on."""
        steps = self.steps
        if steps.num == 1:
            return
        last = index + 1 == steps.num
        if index == 0:
            names = tuple(f"{name} sum" for name in self.names)
            yield Pack(self._buffers[0], self.messages[0], steps.copies(names))
        following = 0 if last else index + 1
        recv = self._home if last else self._buffers[following]
        yield _post(
            "gradients",
            index,
            steps.hop(index, following),
            (self._buffers[index], self.messages[index]),
            (recv, self.messages[following]),
        )

    def end(self) -> Iterator[Op]:
        """Replaces the rank's own sums by the sums that returned with its shard."""
        if self.steps.num > 1:
            yield Wait("gradients")
            yield Free((self._buffers[-1],))
            yield self.unpack(self._home, add=False)

    def _arrived(self, index: int) -> Iterator[Op]:
        if index:
            yield Wait("gradients")
            yield Free((self._buffers[index - 1],))


class _AddedUp(_Sums):
    """Ranks add up gradients for other owners in cleared memory; the owner adds the result."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._buffers = [self.buffer(f"sums {i}") for i in range(steps.num)]
        # Exchange under way on the inner ring (False) and on the outer ring (True).
        self._under_way: dict[bool, tuple[Transfer, Buffer, Buffer]] = {}

    def held(self, index: int) -> tuple[Operand, ...]:
        """The sums of a step: the rank's own at first, then a separate buffer for every step."""
        return self.entries(self._buffers[index]) if index else self.own()

    def compute(self, index: int, work: Differentiate) -> Iterator[Op]:
        """Computes into a cleared buffer; the first step into the rank's own sums."""
        if index:
            yield Clear(self._buffers[index], self.messages[index])
        yield work

    def after(self, index: int) -> Iterator[Op]:
        """Adds the received sums to the step's sums, and sends the total on."""
        if index == 0:
            return
        transfer = self.steps.sums_transfer(index)
        for outer, (other, _, recv) in list(self._under_way.items()):
            if outer == transfer.outer or other.brings == index:
                yield from self._land(outer)
                if other.brings == index:
                    yield Add(self._buffers[index], recv, self.messages[index])
        recv = self.buffer(f"received {index}")
        send = self._buffers[index]
        yield _post(
            "outer_gradients" if transfer.outer else "gradients",
            index,
            self.steps.hop(index, transfer.brings),
            (send, self.messages[index]),
            (recv, self.messages[transfer.brings]),
        )
        self._under_way[transfer.outer] = transfer, send, recv

    def end(self) -> Iterator[Op]:
        """Receives the last sums."""
        for outer in list(self._under_way):
            yield from self._land(outer)

    def _land(self, outer: bool) -> Iterator[Op]:
        transfer, sent, recv = self._under_way.pop(outer)
        yield Wait("outer_gradients" if outer else "gradients")
        yield Free((sent,))
        if transfer.brings == 0:
            yield self.unpack(recv, add=True)


CODE = StrategyCode(program, why_not_same_bits, check)
