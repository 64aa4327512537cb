"""The interface of a strategy: a function from a call to programs.

Call        the work of one rank: `ring_attn.call`
Program     the ops of one rank: `core.program`
machines    run a program on tensors, count, time, check and draw it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from ring_attn.backends import get_backend
from ring_attn.call import Call, GradientPlan
from ring_attn.core import program as ops
from ring_attn.core.messages import Message
from ring_attn.core.program import Array, Buffer, Channel, Copy, Op, Operand, Program, View
from ring_attn.core.sizes import SHARD, result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Strategy
from ring_attn.core.tiles import Side, StepTiles, check_fit

# The tensors that every core's forward saves.
SAVED = ("q", "k", "v", "out", "lse")


class StrategyCode:
    """A core: how keys and values reach the ranks, forward and backward.

    A subclass with a name, `program` and `why_not_same_bits` is a strategy: machines run, count,
    time, check and draw its programs. The other members serve the planner.

    Attributes:
        name: the core of `Strategy`, and a name for `strategy=`.
        options: fields of `Strategy` that this core takes in addition to the fields of all cores.
        sparse: whether "auto" considers the core only if most pairs of ranks see nothing of each
            other.
        at_once: whether one launch of the backend covers the shards of all ranks.
    """

    name: str
    options: tuple[str, ...] = ()
    sparse = False
    at_once = False

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        """Return the program of the call's rank in one direction.

        Args:
            call: the call.
            backward: the direction.
            rounded: True rounds dq, dk and dv to the dtypes of q, k and v. False keeps them in the
                accumulation type, for exchanges around the core that add to them.
        """
        raise NotImplementedError

    def why_not_same_bits(self, call: Call) -> str | None:
        """Return None if a call has the same bits at every world size, else the reason why not."""
        raise NotImplementedError

    def check(self, call: Call) -> None:
        """Raise an error if the strategy does not support a call, before any communication."""
        check_fit(*call.layouts, call.mask)

    def full_name(self, strategy: Strategy) -> str:
        """Return the name with the options, for tables.

        The first word of it is a name for `strategy=`.
        """
        return self.name

    def core(self, call: Call) -> Call:
        """Return the call without exchanges around the core, on the rank with most heads."""
        return call

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        """Return names of the call's inputs and results that the backward reads as they are.

        The forward saves tensors of its own instead of all others.
        """
        return SAVED

    # -- for the planner

    def candidates(
        self, spec: AttentionSpec, world_size: int, node_size: int
    ) -> Iterator[Strategy]:
        """Yield the core with all sensible options."""
        yield Strategy(self.name)

    def num_steps(self, call: Call) -> int:
        """Return an upper bound of the steps of a call without exchanges around the core."""
        return call.world_size

    def gradients(self, call: Call) -> GradientPlan:
        """Return which side is sent in the backward, and the order of its sums."""
        return GradientPlan(sent_side=None, in_order=self.why_not_same_bits(call) is None)

    def share_at_queries(self, call: Call) -> float:
        """Return the fraction of the backward's FLOPs done on the rank that holds the queries."""
        return 0.0 if self.gradients(call).sent_side == "q" else 1.0

    def launch_spec(self, call: Call) -> AttentionSpec:
        """Return the spec of the launch with the fewest kv heads."""
        return call.spec

    def launch_rows(self, call: Call) -> int:
        """Return the rows of keys of the smallest usual launch, on any rank.

        Launches at the edge of a mask may have fewer.
        """
        _, layout_kv = call.layouts
        fewest = min((rows for rows in layout_kv.shard_lens if rows), default=0)
        has_one_run = layout_kv.kind in ("contiguous", "boundaries", "striped")
        if has_one_run or not call.mask.has_upper_bounds:
            return fewest
        # Zigzag: most launches of a causal mask see the rows of one run, half of a shard.
        return fewest // 2

    def decisive_rows(self, call: Call) -> int | None:
        """Return the rows of keys by which the backward's kernel is chosen; equal on all ranks.

        They are None if the results have the same bits at every world size: then the kernel must
        not depend on the number of ranks.
        """
        if call.options.same_bits is not False and self.why_not_same_bits(call) is None:
            return None
        core = self.core(call)
        return _code_of_core(core).launch_rows(core)

    def in_one_pass(self, call: Call) -> bool:
        """Return whether the launches of the backward compute all gradients at once."""
        if call.in_one_pass is not None:
            return call.in_one_pass
        core = self.core(call)
        code, backend = _code_of_core(core), get_backend(call.backend)
        spec = code.launch_spec(core)
        if backend.in_one_pass(spec):
            return True
        if not backend.in_one_pass(spec, code.launch_rows(core)):
            return False
        return self.decisive_rows(call) is not None

    def sends_together(self, call: Call) -> bool:
        """Return whether the backward sends gradients together with shards, on one communicator.

        It is equal on all ranks.
        """
        return False

    def fullest_ranks(self, call: Call) -> set[int]:
        """Return ranks of which one holds the most memory: the first and the last with most rows.

        Of the ranks with equally many rows, the first and the last one differ from the others in
        what they send.
        """
        layout_q, layout_kv = call.layouts
        nheads, nheads_kv = call.spec.nheads, call.spec.nheads_kv
        elements = [
            rows_q * nheads + rows_kv * nheads_kv
            for rows_q, rows_kv in zip(layout_q.shard_lens, layout_kv.shard_lens, strict=True)
        ]
        most = max(elements)
        fullest = [rank for rank, number in enumerate(elements) if number == most]
        return {fullest[0], fullest[-1]}


def _code_of_core(call: Call) -> StrategyCode:
    return cast(StrategyCode, CORES[call.strategy.core])


def input_arrays(call: Call, *, backward: bool) -> dict[str, Array]:
    """Return sizes of a program's inputs: q, k, v; in the backward also out, lse and dout."""
    spec = call.spec
    rows_q, rows_kv = call.ranks.rows("q"), call.ranks.rows("kv")
    arrays = {
        "q": Array(spec.batch, rows_q, spec.nheads, spec.headdim, spec.dtype),
        "k": Array(spec.batch, rows_kv, spec.nheads_kv, spec.headdim, spec.dtype),
        "v": Array(spec.batch, rows_kv, spec.nheads_kv, spec.headdim_v, spec.dtype),
    }
    if backward:
        arrays |= result_arrays(spec, rows_q)
        arrays["dout"] = arrays["out"]
    return arrays


def core_program(
    call: Call, arrays: dict[str, Array], steps: Iterable[Op], *, backward: bool
) -> Program:
    """Return the program of these ops; its forward saves the inputs and the results."""
    return Program(
        world_size=call.world_size,
        rank=call.rank,
        backward=backward,
        ops=tuple(steps),
        arrays=arrays,
        saved=() if backward else SAVED,
        in_one_pass=backward and _code_of_core(call).in_one_pass(call),
    )


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
    """Yield ops that pack a message and post its exchange for another message.

    Args:
        channel, step, route, send, recv: as in `ops.Post`.
        message: the message to send.
        copies: the copies of tensors to it.
        receives: the message to receive.
        nbytes: bytes that leave the rank; None means all of the message.
    """
    yield ops.Pack(send, message, copies)
    yield ops.Post(
        channel=channel,
        step=step,
        route=route,
        send=send,
        recv=recv,
        message=receives,
        nbytes=message.nbytes if nbytes is None else nbytes,
    )


def start(call: Call) -> ops.Start:
    """Return the op that makes the state of all queries."""
    spec = call.spec
    out = result_arrays(spec, call.ranks.rows("q"))["out"]
    state = replace(out, dtype=spec.accum_dtype)
    all_heads = slice(None)
    return ops.Start(View("q"), spec.headdim_v, state, sinks=all_heads)


def finish(call: Call) -> ops.Finish:
    """Return the op that makes the results from the state."""
    results = result_arrays(call.spec, call.ranks.rows("q"))
    return ops.Finish("out", "lse", results["out"], results["lse"])


def differentiate(
    sent_side: Side,
    tiles: StepTiles,
    held: tuple[Operand, ...],
    into: tuple[Operand, ...],
    *,
    own: bool,
) -> ops.Differentiate:
    """Return the op for the gradients of tiles with a shard of the side that is sent.

    Args:
        sent_side: the side that is sent.
        tiles: tiles of this rank's rows and the shard.
        held: tensors of the shard.
        into: sums for the shard's gradients. Gradients of the other side go to this rank's sums.
        own: whether this rank owns the shard.
    """
    if sent_side == "kv":
        k, v = held
        dk, dv = into
        return ops.Differentiate(
            part="all",
            tiles=tiles,
            q_side=tuple(View(name) for name in SHARD["q"]),
            kv=(k, v),
            dq=View("dq sum"),
            dkv=(dk, dv),
            out=View("out"),
        )
    (dq,) = into
    return ops.Differentiate(
        part="all",
        tiles=tiles,
        q_side=held,
        kv=(View("k"), View("v")),
        dq=dq,
        dkv=(View("dk sum"), View("dv sum")),
        out=View("out") if own else None,
    )


def sums_of(spec: AttentionSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """Return sizes of a rank's sums for dq, dk and dv."""
    return {f"d{name}": replace(arrays[name], dtype=spec.accum_dtype) for name in ("q", "k", "v")}


def new_sums(sums: dict[str, Array]) -> Iterator[Op]:
    """Yield ops that make sums of zeros."""
    for name, array in sums.items():
        yield ops.New(f"{name} sum", array, zero=True)


def rounded_sums(sums: dict[str, Array], spec: AttentionSpec, *, rounded: bool) -> Iterator[Op]:
    """Yield ops that make the results from the sums.

    One result is made after another: only one of them is in memory together with its sum.
    """
    dtype = spec.dtype if rounded else spec.accum_dtype
    for name in ("dv", "dk", "dq"):
        result = replace(sums[name], dtype=dtype)
        yield ops.Round(View(name), View(f"{name} sum"), result, scaled=name != "dv")
