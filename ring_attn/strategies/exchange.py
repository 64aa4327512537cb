"""Exchange: every rank gets exactly the rows that it needs, once, directly from their owners.

    turn t     |  post turn t+2  |  compute tiles of turn t  |  wait for turn t+1
    rank r        rows of r that rank s needs ------> s
                                      rows of u that r needs <------ u

No rank forwards rows. This is faster than a ring if most ranks need nothing from most other ranks:
for documents on a few ranks each, for chunks, and for windows over scattered shards. A ring would
pass shards through all ranks, with all rows between the first and the last one that any rank needs.
`core.turns` sorts the pairs of ranks into turns. Two turns are under way while one is computed, so
a rank holds the received rows of three turns and the sent rows of two.

Backward: KV is sent again, or the Q side, whichever costs fewer bytes. Gradients return directly to
the owner, one message for each message of rows. The owner adds them in the order of the turns,
which the call fixes, so the bits do not depend on the order of arrival. A rank waits for them two
turns later.

(MagiAttention's group cast and group reduce are such an exchange; `planning.placement` makes
layouts that profit from it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ring_attn.call import Call, GradientPlan
from ring_attn.core import program as ops
from ring_attn.core.messages import Message, largest_nbytes
from ring_attn.core.program import Array, Buffer, Channel, Op, Operand, Program, View, entries
from ring_attn.core.ranks import RowExchange
from ring_attn.core.sizes import MOVING, SHARD, choose_sent_side, gradient_packet, shard_packet
from ring_attn.core.tiles import Grid, Side
from ring_attn.strategies import base
from ring_attn.strategies.base import StrategyCode, differentiate

# Turn t uses channel t % 2, since two turns are under way at a time.
SHARD_CHANNELS: tuple[Channel, Channel] = ("shards", "outer")
GRADIENT_CHANNELS: tuple[Channel, Channel] = ("gradients", "outer_gradients")


class Exchange(StrategyCode):
    name = "exchange"
    sparse = True

    def why_not_same_bits(self, call: Call) -> str | None:
        return "an exchange adds gradients up in the order of its turns; use 'ring' or 'all_gather'"

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        arrays = base.input_arrays(call, backward=backward)
        if not backward:
            return base.core_program(call, arrays, _forward(call), backward=False)
        sent_side = self.gradients(call).sent_side or "kv"
        steps = _backward(call, sent_side, arrays, rounded=rounded)
        return base.core_program(call, arrays, steps, backward=True)

    def gradients(self, call: Call) -> GradientPlan:
        """Choose the side that is sent in the backward."""
        if call.gradients is not None:
            return call.gradients
        layout_q, layout_kv = call.layouts
        sent_side = choose_sent_side(call.spec, layout_q, layout_kv, call.mask, direct=True)
        return GradientPlan(sent_side, in_order=False)


def _forward(call: Call) -> Iterator[Op]:
    turns = _Turns(call, "kv")
    yield base.start(call)
    yield from turns.begin()
    with_tiles = [number for number, turn in enumerate(turns.turns) if turn.tiles]
    last = with_tiles[-1] if with_tiles else None
    yield ops.Attend(turns.own_tiles, View("q"), View("k"), View("v"), last=last is None)
    for number, turn in enumerate(turns.turns):
        yield from turns.arrived(number)
        if turns.takes_part(number):
            k, v = turns.held(number)
            yield ops.Attend(turn.tiles, View("q"), k, v, last=number == last)
            yield ops.Free((turns.shards.received(number),))
    yield ops.Step("end")
    yield base.finish(call)


def _backward(
    call: Call, sent_side: Side, arrays: dict[str, Array], *, rounded: bool
) -> Iterator[Op]:
    turns = _Turns(call, sent_side)
    sums = base.sums_of(call.spec, arrays)
    yield ops.Delta(arrays["lse"])
    yield from base.new_sums(sums)
    yield from turns.begin()
    own_shard = tuple(View(name) for name in SHARD[sent_side])
    own_sums = tuple(View(name) for name in turns.own_sums)
    yield differentiate(sent_side, turns.own_tiles, own_shard, own_sums, own=True)
    for number, turn in enumerate(turns.turns):
        yield from turns.arrived(number)
        if turns.takes_part(number):
            gradients = turns.gradients
            yield ops.Clear(gradients.received(number), gradients.into[number])
            yield differentiate(
                sent_side, turn.tiles, turns.held(number), turns.sums(number), own=False
            )
            yield ops.Free((turns.shards.received(number),))
        yield from turns.add_returned(number - 2)
        yield from turns.return_sums(number)
    yield ops.Step("end")
    for number in range(turns.num - 2, turns.num):
        yield from turns.add_returned(number)
    yield from base.rounded_sums(sums, call.spec, rounded=rounded)


class _Turns:
    """The turns of a call: ops that exchange rows, and ops that return their gradients."""

    def __init__(self, call: Call, sent_side: Side) -> None:
        spec = call.spec
        own = (0, 0)  # no displacement between the holder of a shard and its owner
        self.rank = call.rank
        self.sent_side = sent_side
        self.turns = call.ranks.row_exchanges(sent_side)
        self.num = len(self.turns)
        self.own_tiles = call.ranks.tiles(Grid(1, call.world_size), sent_side, own)
        self.own_sums = tuple(f"{name} sum" for name in MOVING[sent_side])
        self.shards = _Messages("rows", self.turns, partial(shard_packet, spec, sent_side))
        self.gradients = _Messages("sums", self.turns, partial(gradient_packet, spec, sent_side))

    def takes_part(self, number: int) -> bool:
        """Return whether this rank exchanges rows in a turn."""
        return self.turns[number].hop.send_to != self.rank

    def held(self, number: int) -> tuple[Operand, ...]:
        """Return the tensors that this rank receives in a turn."""
        return entries(self.shards.received(number), len(SHARD[self.sent_side]))

    def sums(self, number: int) -> tuple[Operand, ...]:
        """Return the sums for the gradients of these tensors."""
        return entries(self.gradients.received(number), len(self.own_sums))

    def begin(self) -> Iterator[Op]:
        """Start the first two turns."""
        yield ops.Step("own", 0)
        for number in range(min(2, self.num)):
            yield from self._post(number)

    def _post(self, number: int) -> Iterator[Op]:
        """Pack the rows to send in a turn, and start the turn."""
        turn, shards = self.turns[number], self.shards
        channel = SHARD_CHANNELS[number % 2]
        if not self.takes_part(number):
            yield ops.Join(channel)
            return
        yield from base.pack_and_post(
            channel=channel,
            step=number,
            route=turn.hop,
            message=shards.out[number],
            copies=ops.copies_of_runs(SHARD[self.sent_side], turn.runs),
            send=shards.sent(number),
            recv=shards.received(number),
            receives=shards.into[number],
        )

    def arrived(self, number: int) -> Iterator[Op]:
        """Wait for a turn, and start the turn after the next."""
        yield ops.Step(f"turn {number}", number + 1)
        if self.takes_part(number):
            yield ops.Wait(SHARD_CHANNELS[number % 2])
            yield ops.Free((self.shards.sent(number),))
        if number + 2 < self.num:
            yield from self._post(number + 2)

    # -- gradients

    def return_sums(self, number: int) -> Iterator[Op]:
        """Send the gradients of the rows received in a turn back to their owner."""
        turn, sums = self.turns[number], self.gradients
        channel = GRADIENT_CHANNELS[number % 2]
        if not self.takes_part(number):
            yield ops.Join(channel)
            return
        # Gradients take the way of the rows back: the received buffer of the turn is sent.
        yield ops.Post(
            channel=channel,
            step=number,
            route=ops.Hop(send_to=turn.hop.recv_from, recv_from=turn.hop.send_to),
            send=sums.received(number),
            recv=sums.sent(number),
            message=sums.out[number],
            nbytes=sums.into[number].nbytes,
        )

    def add_returned(self, number: int) -> Iterator[Op]:
        """Wait for the gradients of the rows sent in a turn, and add them to this rank's sums."""
        if number < 0 or not self.takes_part(number):
            return
        turn, sums = self.turns[number], self.gradients
        yield ops.Wait(GRADIENT_CHANNELS[number % 2])
        yield ops.Free((sums.received(number),))
        copies = ops.copies_of_runs(self.own_sums, turn.runs, add=True)
        yield ops.Unpack(sums.sent(number), sums.out[number], copies)


class _Messages:
    """The messages sent and received in every turn, and buffers of the size of the longest one.

    `make` returns the message with a number of rows.
    """

    def __init__(
        self, name: str, turns: tuple[RowExchange, ...], make: Callable[[int], Message]
    ) -> None:
        self.out = [make(turn.sent) for turn in turns]
        self.into = [make(turn.received) for turn in turns]
        self._name = name
        self._nbytes = largest_nbytes(*self.out, *self.into)

    def sent(self, number: int) -> Buffer:
        return Buffer(f"{self._name} out {number}", self._nbytes)

    def received(self, number: int) -> Buffer:
        return Buffer(f"{self._name} in {number}", self._nbytes)


CODE = Exchange()
