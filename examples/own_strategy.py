"""A custom strategy: every rank sends its shard directly to every other rank.

    python examples/own_strategy.py                                        checks it on 4 ranks
    ring-attn plan --load examples/own_strategy.py --strategy star --check \\
        --seqlen 1k --world-size 4 --heads 4 --head-dim 16                 plans it, with costs

    step       0          1               2               3
    rank r     own KV     KV of r-1       KV of r-2       KV of r-3
    on wire               to r+1          to r+2          to r+3

A strategy is an object with a name, and a function from a call to the ops of its rank. From these
ops the package runs it, counts its bytes and memory, predicts its time on a cluster, finds races
and deadlocks, and draws it. While it is registered, `strategy="auto"` can choose it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ring_attn.call import Call
from ring_attn.core.messages import largest_nbytes
from ring_attn.core.program import (
    Array,
    Attend,
    Buffer,
    Clear,
    Copy,
    Delta,
    Entry,
    Free,
    Op,
    Operand,
    Post,
    Program,
    Step,
    Unpack,
    View,
    Wait,
)
from ring_attn.core.sizes import gradient_packet, shard_packet
from ring_attn.core.tiles import Grid
from ring_attn.strategies import base
from ring_attn.strategies.base import StrategyCode
from ring_attn.strategies.registry import registered


class Star(StrategyCode):
    name = "star"

    def why_not_same_bits(self, call: Call) -> str | None:
        return "a star sums gradients in the order of its steps"

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        arrays, star = base.input_arrays(call, backward=backward), _Shards(call)
        made = star.backward(arrays, rounded=rounded) if backward else star.forward()
        return base.core_program(call, arrays, made, backward=backward)


class _Shards:
    def __init__(self, call: Call) -> None:
        self.call, self.spec, self.ranks = call, call.spec, call.ranks
        self.grid = Grid(1, call.world_size)  # one ring of all ranks
        self.rows = self.ranks.moving(self.grid, "kv", (0, 0))  # own rows that other ranks need
        # The message at each distance: to a rank `by` ranks on, from one `by` ranks before.
        order = [(0, by) for by in range(call.world_size)]
        self.shards, self.sums = (
            self.ranks.moving_messages(self.grid, "kv", partial(packet, self.spec, "kv"), order)
            for packet in (shard_packet, gradient_packet)
        )

    def steps(self) -> Iterator[tuple[int, list[Op], tuple[Operand, ...]]]:
        """Yield each distance, the ops that receive a shard from there, and its K and V."""
        yield 0, [Step("own", 0)], (View("k"), View("v"))
        send, room = Buffer("own shard", largest_nbytes(*self.shards)), largest_nbytes(*self.shards)
        copies = (Copy(0, View("k", self.rows)), Copy(1, View("v", self.rows)))
        for by in range(1, self.call.world_size):
            recv = Buffer(f"shard {by}", room)
            exchange = base.pack_and_post(
                "shards",
                by,
                self.ranks.hop(self.grid, (0, by)),
                message=self.shards[0],
                copies=copies,
                send=send,
                recv=recv,
                receives=self.shards[by],
            )
            # A real strategy would compute between the post and the wait.
            ops = [Step(f"step {by}", by), *exchange, Wait("shards"), Free((send,))]
            yield by, ops, (Entry(recv, 0), Entry(recv, 1))

    def forward(self) -> Iterator[Op]:
        yield base.start(self.call)
        for by, ops, (k, v) in self.steps():
            yield from ops
            yield Attend(self.ranks.tiles(self.grid, "kv", (0, by)), View("q"), k, v)
            if isinstance(k, Entry):
                yield Free((k.buffer,))
        yield base.finish(self.call)

    def backward(self, arrays: dict[str, Array], *, rounded: bool) -> Iterator[Op]:
        gradients = base.sums_of(self.spec, arrays)
        own = View("dk sum"), View("dv sum")
        yield Delta(arrays["lse"])
        yield from base.new_sums(gradients)
        for by, ops, kv in self.steps():
            yield from ops
            tiles = self.ranks.tiles(self.grid, "kv", (0, by))
            if not isinstance(kv[0], Entry):
                yield base.differentiate("kv", tiles, kv, own, own=True)
                continue
            # dK and dV of the received shard: summed in cleared memory, then sent to its rank.
            sums, home = (Buffer(f"{x} {by}", largest_nbytes(*self.sums)) for x in ("sums", "home"))
            yield Clear(sums, self.sums[by])
            yield base.differentiate("kv", tiles, kv, (Entry(sums, 0), Entry(sums, 1)), own=False)
            yield Post(
                channel="gradients",
                step=by,
                route=self.ranks.hop(self.grid, (0, -by)),
                send=sums,
                recv=home,
                message=self.sums[0],
                nbytes=self.sums[by].nbytes,
            )
            yield Wait("gradients")
            yield Free((kv[0].buffer, sums))
            copies = (Copy(i, View(x.name, self.rows), add=True) for i, x in enumerate(own))
            yield Unpack(home, self.sums[0], tuple(copies))
        yield from base.rounded_sums(gradients, self.spec, rounded=rounded)


STAR = Star()


def main() -> None:
    from ring_attn.testing import Case, run_all_ranks

    with registered(STAR):
        ran = run_all_ranks(Case("causal", "zigzag", "star", "reference", "float32", seqlen=97), 4)
        print("\n".join(str(verdict) for verdict in ran.verdicts))
    raise SystemExit(len(ran.failures))


if __name__ == "__main__":
    main()
