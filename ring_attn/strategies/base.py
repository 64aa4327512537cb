"""The interface of a strategy: a function from a call to programs.

Call        what a rank is asked to compute: `ring_attn.call`
Program     the ops of one rank: `core.program`
machines    run a program on tensors, count, time, check and draw it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ring_attn.call import Call, GradientPlan
from ring_attn.core import program as ops
from ring_attn.core.messages import Message
from ring_attn.core.program import Array, Buffer, Channel, Copy, Op, Operand, Program, View
from ring_attn.core.sizes import SHARD, result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import StepTiles, Traveller, check_fit

# The tensors that every core's forward saves.
SAVED = ("q", "k", "v", "out", "lse")


class StrategyCode:
    """The ways of keys and values to the ranks, forward and backward: all that is known of a core.

    A subclass with a name, `program` and `why_not_same_bits` is a strategy: machines run, count,
    time, check and draw its programs. The other members serve the planner.

    Attributes:
        name: the core of `Strategy`, and a name for `strategy=`.
        options: fields of `Strategy` that the core takes, beside the fields that all cores take.
        sparse: whether "auto" considers the core only where most pairs of ranks see nothing.
        at_once: whether one launch of the backend covers the shards of all ranks.
    """

    name: str
    options: tuple[str, ...] = ()
    sparse = False
    at_once = False

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        """The program of the call's rank in one direction.

        `rounded` True rounds dq, dk and dv to the dtypes of q, k and v; False keeps them in the
        accumulation type, for exchanges around the core that add to them.
        """
        raise NotImplementedError

    def why_not_same_bits(self, call: Call) -> str | None:
        """None if a call has the same bits at every world size, else the reason why not."""
        raise NotImplementedError

    def check(self, call: Call) -> None:
        """Raises for a call that the strategy does not take, before anything is sent."""
        check_fit(*call.layouts, call.mask)

    def label(self, strategy: Strategy) -> str:
        """The name with the options, for tables; its first word is a name for `strategy=`."""
        return self.name

    def core(self, call: Call) -> Call:
        """The call without exchanges around the core, on the rank with most heads."""
        return call

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        """Names of the call's inputs and results that the backward reads; it saves all others."""
        return SAVED

    # -- for the planner

    def candidates(
        self, spec: AttentionSpec, world_size: int, node_size: int
    ) -> Iterator[Strategy]:
        """Yields the core with all sensible options."""
        yield Strategy(self.name)

    def num_steps(self, call: Call) -> int:
        """Upper bound of the steps of a call without exchanges around the core."""
        return call.world_size

    def gradients(self, call: Call) -> GradientPlan:
        return GradientPlan(None, self.why_not_same_bits(call) is None)

    def share_at_queries(self, call: Call) -> float:
        """Fraction of the backward's FLOPs done on the rank that holds the queries."""
        return 0.0 if self.gradients(call).travels == "q" else 1.0

    def launch_spec(self, call: Call) -> AttentionSpec:
        """The spec of the launch with fewest kv heads."""
        return call.spec

    def fullest_ranks(self, call: Call) -> set[int]:
        """Ranks of which one holds most memory: the first and the last with most rows."""
        spec = call.spec
        rows = [
            q * spec.nheads + kv * spec.nheads_kv
            for q, kv in zip(*(layout.shard_lens for layout in call.layouts), strict=True)
        ]
        return {rows.index(max(rows)), len(rows) - 1 - rows[::-1].index(max(rows))}


def input_arrays(call: Call, *, backward: bool) -> dict[str, Array]:
    """Sizes of a program's inputs: q, k, v, and in the backward also out, lse and dout."""
    spec, q, kv = call.spec, call.ranks.rows("q"), call.ranks.rows("kv")
    batch, dtype = spec.batch, spec.dtype
    arrays = {
        "q": Array(batch, q, spec.nheads, spec.headdim, dtype),
        "k": Array(batch, kv, spec.nheads_kv, spec.headdim, dtype),
        "v": Array(batch, kv, spec.nheads_kv, spec.headdim_v, dtype),
    }
    if backward:
        arrays |= result_arrays(spec, q)
        arrays["dout"] = arrays["out"]
    return arrays


def core_program(
    call: Call, arrays: dict[str, Array], made: Iterable[Op], *, backward: bool
) -> Program:
    """The program of these ops; its forward saves the inputs and the results."""
    saved = () if backward else SAVED
    return Program(call.world_size, call.rank, backward, tuple(made), arrays, saved)


def pack_and_post(
    channel: Channel,
    step: int,
    route: ops.Hop | ops.Collective,
    *,
    message: Message,
    copies: tuple[Copy, ...],
    send: Buffer,
    recv: Buffer,
    receives: Message,
    nbytes: int | None = None,
) -> Iterator[Op]:
    """Packs tensors into a message, and posts the exchange of the message for another one.

    Args:
        message, copies: sent, from these tensors.
        receives: the message that comes.
        nbytes: bytes that leave the rank; None is the message's.
    """
    nbytes = message.nbytes if nbytes is None else nbytes
    yield ops.Pack(send, message, copies)
    yield ops.Post(
        channel=channel, step=step, route=route, send=send, recv=recv, message=receives,
        nbytes=nbytes,
    )  # fmt: skip


def start(call: Call) -> ops.Start:
    """Makes the state of all queries."""
    spec = call.spec
    out = result_arrays(spec, call.ranks.rows("q"))["out"]
    return ops.Start(View("q"), spec.headdim_v, replace(out, dtype=spec.accum_dtype), slice(None))


def finish(call: Call) -> ops.Finish:
    """Makes the results from the state."""
    results = result_arrays(call.spec, call.ranks.rows("q"))
    return ops.Finish("out", "lse", results["out"], results["lse"])


def differentiate(
    travels: Traveller,
    tiles: StepTiles,
    held: tuple[Operand, ...],
    into: tuple[Operand, ...],
    *,
    own: bool,
) -> ops.Differentiate:
    """The op for the gradients of tiles with a shard of the travelling side.

    Args:
        held: tensors of the shard.
        into: sums for the shard's gradients; gradients of the other side go to the rank's sums.
        own: whether the shard is the rank's own.
    """
    if travels == "kv":
        own_q = tuple(map(View, SHARD["q"]))
        kv, dkv = (held[0], held[1]), (into[0], into[1])
        return ops.Differentiate("all", tiles, own_q, kv, View("dq sum"), dkv, View("out"))
    kv, dkv = (View("k"), View("v")), (View("dk sum"), View("dv sum"))
    return ops.Differentiate("all", tiles, held, kv, into[0], dkv, View("out") if own else None)


def sums_of(spec: AttentionSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """Sizes of a rank's sums for dq, dk and dv."""
    return {f"d{name}": replace(arrays[name], dtype=spec.accum_dtype) for name in ("q", "k", "v")}


def new_sums(sums: dict[str, Array]) -> Iterator[Op]:
    """Yields ops that make the sums, of zeros."""
    for name, array in sums.items():
        yield ops.New(f"{name} sum", array, zero=True)


def rounded_sums(sums: dict[str, Array], spec: AttentionSpec, *, rounded: bool) -> Iterator[Op]:
    """Yields ops that make the results from the sums, one by one, so that little is held twice."""
    dtype = spec.dtype if rounded else spec.accum_dtype
    for name in ("dv", "dk", "dq"):
        result = replace(sums[name], dtype=dtype)
        yield ops.Round(View(name), View(f"{name} sum"), result, scaled=name != "dv")
