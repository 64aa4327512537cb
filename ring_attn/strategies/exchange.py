"""Exchange: every rank gets exactly the rows that it needs, once, straight from their owners.

    turn t     |  post turn t+2  |  compute tiles of turn t  |  wait for turn t+1
    rank r        rows of r that rank s needs ------> s
                                      rows of u that r needs <------ u

No rank forwards rows. This pays if most ranks need nothing of most others: documents on a few ranks
each, chunks, windows over scattered shards. A ring would pass shards through all ranks, with all
rows between the first and the last that any rank needs. `core.turns` sorts the pairs of ranks into
turns. Two turns are under way while one is computed, so a rank holds the received rows of three
turns and the sent rows of two.

Backward: KV travels again, or the Q side, whichever costs fewer bytes. Gradients return straight to
the owner, one message for each message of rows. The owner adds them in the order of the turns,
which the call fixes, so bits do not depend on the order of arrival. A rank waits for them two turns
later.

(MagiAttention's group cast and group reduce are such an exchange; `planning.placement` makes
layouts that profit from it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from ring_attn.core.messages import Message, Number, lengths
from ring_attn.core.program import (
    Array,
    Attend,
    Buffer,
    Channel,
    Clear,
    Delta,
    Entry,
    Finish,
    Free,
    Join,
    Op,
    Operand,
    Pack,
    Post,
    Program,
    Start,
    Step,
    Tiles,
    Unpack,
    View,
    Wait,
    copies_of_runs,
)
from ring_attn.core.ranks import Ranks, Turn
from ring_attn.core.sizes import (
    MOVING,
    SHARD,
    choose_sender,
    gradient_packet,
    shard_packet,
)
from ring_attn.core.tiles import Grid, Traveller, check_fit
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

# Turn t uses lane t % 2: two turns are under way at a time.
SHARD_LANES: tuple[Channel, Channel] = ("shards", "outer")
GRADIENT_LANES: tuple[Channel, Channel] = ("gradients", "outer_gradients")


def check(call: Call) -> None:
    """Refuses layouts and masks that do not fit."""
    check_fit(*call.layouts, call.mask)


def why_not_same_bits(call: Call) -> str | None:
    """The reason why an exchange has other bits at other world sizes."""
    return "an exchange adds gradients up in the order of its turns; use 'ring' or 'all_gather'"


def program(call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True) -> Program:
    """The program of an exchange, in one direction."""
    arrays = input_arrays(call.spec, ranks, backward=backward)
    if backward:
        ops = tuple(_backward(call, ranks, arrays, rounded=rounded))
        return Program(ranks.world_size, ranks.rank, True, ops, arrays)
    ops = tuple(_forward(call, ranks))
    saved = ("q", "k", "v", "out", "lse")
    return Program(ranks.world_size, ranks.rank, False, ops, arrays, saved)


def _forward(call: Call, ranks: Ranks) -> Iterator[Op]:
    spec, rows = call.spec, ranks.rows("q")
    state = Array(spec.batch, rows, spec.nheads, spec.headdim_v, spec.accum_dtype)
    results = result_arrays(spec, rows)
    turns = _Turns(call, ranks, "kv")
    yield Start(View("q"), spec.headdim_v, state, slice(None))
    yield from turns.begin()
    last = turns.last_with_tiles
    yield Attend(turns.own_tiles, View("q"), View("k"), View("v"), last=last < 0)
    for number in range(turns.num):
        yield from turns.arrived(number)
        if turns.takes_part(number):
            k, v = turns.held(number)
            yield Attend(turns.tiles(number), View("q"), k, v, last=number == last)
            yield from turns.free(number)
    yield Step("end")
    yield Finish("out", "lse", results["out"], results["lse"])


def _backward(call: Call, ranks: Ranks, arrays: dict[str, Array], *, rounded: bool) -> Iterator[Op]:
    turns = _Turns(call, ranks, choose_traveller(call))
    travels, sums = turns.travels, sums_of(call.spec, arrays)
    yield Delta(arrays["lse"])
    yield from new_sums(sums)
    yield from turns.begin()
    own = (tuple(map(View, SHARD[travels])), turns.own_sums)
    yield differentiate(travels, turns.own_tiles, *own, own=True)
    for number in range(turns.num):
        yield from turns.arrived(number)
        if turns.takes_part(number):
            yield from turns.clear(number)
            received = turns.held(number), turns.sums(number)
            yield differentiate(travels, turns.tiles(number), *received, own=False)
            yield from turns.free(number)
        yield from turns.add_returned(number - 2)
        yield from turns.return_sums(number)
    yield Step("end")
    for number in range(turns.num - 2, turns.num):
        yield from turns.add_returned(number)
    yield from rounded_sums(sums, call.spec, rounded=rounded)


def choose_traveller(call: Call) -> Traveller:
    """Chooses the side that travels in the backward."""
    if call.gradients is not None:
        return call.gradients[0]
    return choose_sender(call.spec, *call.layouts, call.mask)


class _Turns:
    """The turns of a call: ops that bring rows, and ops that return the gradients."""

    def __init__(self, call: Call, ranks: Ranks, travels: Traveller) -> None:
        self.call, self.ranks, self.travels = call, ranks, travels
        self.turns = ranks.turns(travels)
        self.num = len(self.turns)
        spec = call.spec
        self._shards = _Messages("rows", self.turns, lambda n: shard_packet(spec, travels, n))
        self._sums = _Messages("sums", self.turns, lambda n: gradient_packet(spec, travels, n))

    @property
    def own_tiles(self) -> Tiles:
        """Tiles with the own shard."""
        return self.ranks.tiles(Grid(1, self.ranks.world_size), self.travels, (0, 0))

    @property
    def own_sums(self) -> tuple[Operand, ...]:
        """The rank's own sums for the gradients of the travelling side."""
        return tuple(View(f"{name} sum") for name in MOVING[self.travels])

    @property
    def last_with_tiles(self) -> int:
        """The last turn with tiles; -1 if no turn has tiles."""
        if self.ranks.rank is None:
            return self.num - 1
        return max((i for i, turn in enumerate(self.turns) if turn.tiles), default=-1)

    def takes_part(self, number: int) -> bool:
        """Whether the rank sends or receives in a turn; True for every rank at once."""
        rank = self.ranks.rank
        return rank is None or bool(self.turns[number].hop.send_to != rank)

    def tiles(self, number: int) -> Tiles:
        """Tiles with the rows received in a turn."""
        return self.turns[number].tiles

    def held(self, number: int) -> tuple[Operand, ...]:
        """The tensors received in a turn."""
        names = SHARD[self.travels]
        return tuple(Entry(self._shards.received(number), i) for i in range(len(names)))

    def sums(self, number: int) -> tuple[Operand, ...]:
        """The sums for the gradients of the rows received in a turn."""
        names = MOVING[self.travels]
        return tuple(Entry(self._sums.received(number), i) for i in range(len(names)))

    def begin(self) -> Iterator[Op]:
        """Starts the first turns."""
        yield Step("own", 0)
        for number in range(min(2, self.num)):
            yield from self._post(number)

    def _post(self, number: int) -> Iterator[Op]:
        """Packs the rows that leave in a turn, and starts the turn."""
        turn, lane = self.turns[number], SHARD_LANES[number % 2]
        if not self.takes_part(number):
            yield Join(lane)
            return
        shards = self._shards
        names = SHARD[self.travels]
        yield Pack(shards.sent(number), shards.out[number], copies_of_runs(names, turn.runs))
        yield Post(
            lane, number, turn.hop, shards.sent(number), shards.received(number),
            shards.into[number], shards.out[number].nbytes, None, turn.active,
        )  # fmt: skip

    def arrived(self, number: int) -> Iterator[Op]:
        """Waits for a turn, and starts the turn after the next."""
        yield Step(f"turn {number}", number + 1)
        if self.takes_part(number):
            yield Wait(SHARD_LANES[number % 2], None, self.turns[number].active)
            yield Free((self._shards.sent(number),))
        if number + 2 < self.num:
            yield from self._post(number + 2)

    def free(self, number: int) -> Iterator[Op]:
        """Frees the rows received in a turn."""
        yield Free((self._shards.received(number),))

    # -- gradients

    def clear(self, number: int) -> Iterator[Op]:
        """Clears the sums for the gradients of the rows received in a turn."""
        yield Clear(self._sums.received(number), self._sums.into[number])

    def return_sums(self, number: int) -> Iterator[Op]:
        """Sends the gradients of the rows received in a turn back to their owner."""
        turn, sums, lane = self.turns[number], self._sums, GRADIENT_LANES[number % 2]
        if not self.takes_part(number):
            yield Join(lane)
            return
        back = turn.hop._replace(send_to=turn.hop.recv_from, recv_from=turn.hop.send_to)
        yield Post(
            lane, number, back, sums.received(number), sums.sent(number), sums.out[number],
            sums.into[number].nbytes, None, turn.active,
        )  # fmt: skip

    def add_returned(self, number: int) -> Iterator[Op]:
        """Waits for the gradients of the rows sent in a turn, and adds them to the rank's sums."""
        if number < 0 or not self.takes_part(number):
            return
        turn, sums = self.turns[number], self._sums
        yield Wait(GRADIENT_LANES[number % 2], None, turn.active)
        yield Free((sums.received(number),))
        names = tuple(f"{name} sum" for name in MOVING[self.travels])
        yield Unpack(
            sums.sent(number), sums.out[number], copies_of_runs(names, turn.runs, add=True)
        )


class _Messages:
    """Messages out and in of every turn, and their buffers, all with room for the longest."""

    def __init__(self, name: str, turns: tuple[Turn, ...], make: Callable[[int], Message]) -> None:
        def message(rows: Number) -> Message:
            return lengths(make, rows) if isinstance(rows, Tensor) else make(rows)

        self.out = [message(turn.sent) for turn in turns]
        self.into = [message(turn.received) for turn in turns]
        sizes = [message.nbytes for message in (*self.out, *self.into)]
        self._name, self._room = name, max((n for n in sizes if isinstance(n, int)), default=0)

    def sent(self, number: int) -> Buffer:
        """The buffer for the rows sent in a turn."""
        return Buffer(f"{self._name} out {number}", self._room)

    def received(self, number: int) -> Buffer:
        """The buffer for the rows received in a turn."""
        return Buffer(f"{self._name} in {number}", self._room)


CODE = StrategyCode(program, why_not_same_bits, check)
