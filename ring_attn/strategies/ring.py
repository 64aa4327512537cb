"""Ring attention: KV shards go round, each rank folds them into the state of its own queries.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Of a shard those rows travel that another rank needs. Forward: KV travels, the state (acc, m, l)
stays and is normalised and rounded once, at the end. Backward: delta = rowsum(dO * O) once, global
lse; either KV or the Q side travels, whichever costs fewer bytes. Its float32 gradients follow, in
a channel of their own, in one of two orders.

Added up: the sums of the ranks on the way follow one step behind the shard, and are added at home
to what the owner has computed. A step computes into cleared bytes while the sums of the step before
are on their way, and adds the two when both are there: so that transfer is hidden.

    owner r       own -------------------------------------------> + = dK, dV (or dQ)
    rank r+1             0 + own --.                              |
    rank r+2                        `-> + own --.                 |
    rank r+3                                     `-> + own -------'   home

In order: KV travels, and dK and dV with it, from their owner on. Every rank accumulates into what
it has received, so the queries of all ranks are folded in the order of the ring: for a causal mask
over contiguous shards that is the order of one process, and with a backend that folds in order the
bits are the same at every world size. A step computes dQ while dK and dV are on their way: so that
transfer is hidden too. It is one message more, that of the first step, and one pass less over each:
nothing is cleared, nothing added up in memory.

    owner r       own --.                                          = dK, dV
    rank r+1             `-> + own --.                            |
    rank r+2                          `-> + own --.               |
    rank r+3                                       `-> + own -----'   home

Double ring (`inner_degree`): inner rings in the nodes, an outer ring between them. A rank passes
shards on in its inner ring, and the first shard of a round goes to the next node meanwhile; so the
slow link has a whole round for one shard. Sums go home after every round, from wherever in the node
they are then, and have the next round for it; home adds up the rounds. With one inner ring the
messages are those of the plain ring.

    inner_degree = 3, P = 6: whose shard rank (o, i) holds, all ranks a row

        step             0 1 2   3 4 5       inner ring: one rank on, in the node, at every step
        (0, 0)           0 2 1 | 3 5 4       outer ring: 0 -> 3, of steps 0 to 3; as long as a round
        (0, 1)           1 0 2 | 4 3 5
        ...              round 0 round 1

Shards that no rank needs at some distance are jumped over, by every rank alike, so sends and
receives match by construction: a window of w positions over contiguous shards of c makes
ceil(w / c) hops, in either direction.

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
from ring_attn.backends.base import folds_in_order, in_one_pass
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

# Rows of KV, counted for each head, of which dK and dV give every multiprocessor of an H100 a block
# of 128. Of fewer they leave some without work, which dQ beside them takes: in a simulated step of
# 8k rows, 8 / 1 heads, that is a quarter to a half of the time, and transfers are 2 %.
MANY_ROWS = 128 * 132


def check(call: Call) -> None:
    """Refuses layouts, masks and degrees that no ring can be made of."""
    ring_grid(call.world_size, call.strategy.inner_degree)
    check_fit(*call.layouts, call.mask)


def why_not_same_bits(call: Call) -> str | None:
    """Why a ring has other bits at other world sizes."""
    if not choose_gradients(call)[1]:
        return "gradients are added up: same_bits=False"
    return _why_not_in_order(call)


def _why_not_in_order(call: Call) -> str | None:
    heads = (call.spec.nheads, call.spec.nheads_kv)
    unit = bits_unit(call.backend)
    return order.why_not_in_order(call.strategy, heads, call.layouts, call.mask, call.backend, unit)


def choose_gradients(call: Call) -> tuple[Traveller, bool]:
    """Chooses the side that travels in the backward, and whether gradients are summed in order.

    Where KV travels anyway, an in-order backend accumulates into the travelling dK and dV in
    place, which saves three reads and writes a step. With a window there is too little to compute
    at a step to hide them behind its dQ. `same_bits=False` adds them up, behind whole steps, for
    links that are too slow for that.
    """
    if call.gradients is not None:
        return call.gradients
    if call.same_bits or (call.same_bits is None and _why_not_in_order(call) is None):
        return "kv", True
    travels = choose_traveller(call.spec, *call.layouts, call.mask)
    grid = ring_grid(call.world_size, call.strategy.inner_degree)
    plain = grid.outer == 1 and not call.mask.has_windows
    in_order = folds_in_order(get_backend(call.backend)) and plain and travels == "kv"
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
    """One step of one rank, as tables and pictures have it.

    Attributes:
        source: whose shard is held (KV, or the Q side where that travels).
        rows: the rows of that shard that are held: all of one's own, then those that travel.
        tiles: in folding order; the travelling side is counted from the first row that is held.
        kind: FULL, CAUSAL or NO_ATTENTION of the whole rectangle.
        hop: from the holder of a shard at this step to its holder at the next; None at the last.
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
        rank: whose steps.
        travels: the side that is sent round; "q" is for the backward.
        inner_degree: ranks of an inner ring; 1, or all, is one plain ring.

    Raises:
        ValueError: layouts and mask that do not fit each other, a rank that does not exist, or an
            `inner_degree` that does not divide the number of ranks.
        NotImplementedError: layouts whose strides differ (striped against another kind).

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
    """An exchange: what belongs to one step is sent, what belongs to another is received.

    `outer` is an exchange between inner rings, which is under way for as long as a whole round is
    computed. `brings` is 0 for sums that arrive at their owner.
    """

    outer: bool
    sends: int
    brings: int


@dataclass(frozen=True)
class Steps:
    """The steps of a ring: which shard is held, where it goes, and how long messages are.

    Attributes:
        call: the call.
        ranks: whose steps.
        grid: inner rings and the outer one.
        travels: the side that travels.
        order: displacement of the holder from the owner, step by step; the first is (0, 0).
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
        """Brings what is held at one step to where it is held at another."""
        (a, b), (c, d) = self.order[here], self.order[there]
        return self.ranks.hop(self.grid, (c - a, d - b))

    def shards(self) -> list[Message]:
        """The message of the shard that is held at each step; none where nothing travels."""
        spec, travels = self.call.spec, self.travels
        return self._messages(lambda rows: shard_packet(spec, travels, rows))

    def gradients(self) -> list[Message]:
        """The messages of their gradients."""
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
        """A message's tensors and the rows of the rank's own that travel."""
        rows = self.ranks.moving(self.grid, self.travels, (0, 0))
        return tuple(Copy(i, View(name, rows)) for i, name in enumerate(names))

    def shard_transfers(self, index: int) -> list[Transfer]:
        """Exchanges of shards that begin with a step, the outer ring's first."""
        following = index + 1
        transfers = []
        next_round = self.rounds.get(index)
        if next_round is not None:
            transfers.append(Transfer(True, index, next_round))
        if following < self.num and following not in self.rounds:
            transfers.append(Transfer(False, index, following))
        return transfers

    def sums_transfer(self, index: int) -> Transfer:
        """Exchange of a step's sums: on in the inner ring, after a round to the owner."""
        following = index + 1
        if following < self.num and following not in self.rounds:
            return Transfer(False, index, following)
        first_round = self.order[index][0] == self.order[0][0]
        return Transfer(not first_round, index, 0)

    @cached_property
    def rounds(self) -> dict[int, int | None]:
        """First steps of the rounds, and of the round after each; 0 alone of a plain ring."""
        firsts = [i for i, (a, _) in enumerate(self.order) if i == 0 or a != self.order[i - 1][0]]
        return dict(zip_longest(firsts, firsts[1:]))


class _Messages:
    """The travelling side: ops before and after each step, and what a step computes with."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._names = SHARD[steps.travels]
        self._messages = steps.shards()
        room = _room(self._messages)
        self._buffers = [Buffer(f"shard {i}", room) for i in range(len(self._messages))]
        self._coming: dict[int, Transfer] = {}
        # A shard is kept until it has been computed with and all that send it have been waited for,
        # and for one step more: so the next shard but one comes into a third buffer, and need not
        # wait for the attention of this step.
        until = list(range(steps.num))
        for index in range(steps.num):
            for transfer in steps.shard_transfers(index):
                self._coming[transfer.brings] = transfer
                until[transfer.sends] = max(until[transfer.sends], transfer.brings - 1)
        self._done: dict[int, list[Buffer]] = {}
        for buffer, last in zip(self._buffers, until, strict=False):
            self._done.setdefault(min(last + 1, steps.num - 1), []).append(buffer)

    def before(self, index: int) -> Iterator[Op]:
        """Packs the own shard, and starts the exchanges that the step hides."""
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
        """The tensors of the shard that a step computes with."""
        if index == 0:
            return tuple(View(name) for name in self._names)
        return tuple(Entry(self._buffers[index], i) for i in range(len(self._names)))

    def after(self, index: int) -> Iterator[Op]:
        """Waits for the next shard, and frees those that are no longer used."""
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
    """The gradients of the travelling side: ops of each step, and where a step adds its own."""

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
        """Adds what came home to the rank's own sums, or puts it in their place."""
        names = tuple(f"{name} sum" for name in self.names)
        copies = tuple(copy._replace(add=add) for copy in self.steps.copies(names))
        return Unpack(buffer, self.messages[0], copies)

    def entries(self, buffer: Buffer) -> tuple[Operand, ...]:
        """The tensors of a buffer."""
        return tuple(Entry(buffer, i) for i in range(len(self.names)))


class _InOrder(_Sums):
    """Gradients start at their owner; every rank adds its own to what it has received."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._buffers = [self.buffer(f"sums {i}") for i in range(steps.num)]
        self._home = self.buffer("sums home")
        call = steps.call
        rows = max(call.layouts[1].shard_lens) * call.spec.batch * call.spec.nheads_kv
        apart = not in_one_pass(get_backend(call.backend), call.spec)
        self._split = apart and rows >= MANY_ROWS

    def held(self, index: int) -> tuple[Operand, ...]:
        """The rank's own at first, then what has been received."""
        return self.entries(self._buffers[index]) if index else self.own()

    def compute(self, index: int, work: Differentiate) -> Iterator[Op]:
        """dQ while what is added to is on its way, then dK and dV.

        Side by side where nothing is on its way, and where dK and dV alone would not fill a GPU.
        """
        if not self._split or not index:
            yield from self._arrived(index)
            yield work
            return
        yield work._replace(part="q", dkv=None)
        yield from self._arrived(index)
        yield work._replace(part="kv", dq=None)

    def after(self, index: int) -> Iterator[Op]:
        """Sends on what has been added to."""
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
        """Replaces the rank's own gradients by those that its shard has brought back."""
        if self.steps.num > 1:
            yield Wait("gradients")
            yield Free((self._buffers[-1],))
            yield self.unpack(self._home, add=False)

    def _arrived(self, index: int) -> Iterator[Op]:
        if index:
            yield Wait("gradients")
            yield Free((self._buffers[index - 1],))


class _AddedUp(_Sums):
    """Every rank adds up for others in cleared bytes, and home adds the sum to its own."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._buffers = [self.buffer(f"sums {i}") for i in range(steps.num)]
        # What is under way on the inner ring (False) and on the outer one (True).
        self._under_way: dict[bool, tuple[Transfer, Buffer, Buffer]] = {}

    def held(self, index: int) -> tuple[Operand, ...]:
        """The rank's own at first, then bytes of its own for every step."""
        return self.entries(self._buffers[index]) if index else self.own()

    def compute(self, index: int, work: Differentiate) -> Iterator[Op]:
        """Into cleared bytes."""
        if index:
            yield Clear(self._buffers[index], self.messages[index])
        yield work

    def after(self, index: int) -> Iterator[Op]:
        """Adds what has arrived to what was computed, and sends it on."""
        if index == 0:
            return
        transfer = self.steps.sums_transfer(index)
        for outer, (other, _, recv) in list(self._under_way.items()):
            if outer == transfer.outer or other.brings == index:
                yield from self._land(outer)
                if other.brings == index:
                    yield Add(self._buffers[index], recv, self.messages[index])
        recv = self.buffer(f"received {index}")
        mine = self._buffers[index]
        yield _post(
            "outer_gradients" if transfer.outer else "gradients",
            index,
            self.steps.hop(index, transfer.brings),
            (mine, self.messages[index]),
            (recv, self.messages[transfer.brings]),
        )
        self._under_way[transfer.outer] = transfer, mine, recv

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
