"""The programs of calls in which every rank holds some rows: time, bytes and memory.

    own rows of q, k, v  ->  attention of the owners  ->  gather replicated rows  ->  out

`attention.joint` runs these steps; the ops here have their messages and their tensors. The backward
sums the shares of the gradient of out at the owners, differentiates the attention, and makes the
gradients of whole shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.messages import Gathered, Packet, Parcels, packet_of
from ring_attn.core.program import Array, Buffer, Op, Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.time import simulate
from ring_attn.planning.calls import call_of
from ring_attn.planning.choice import Candidate, DirectionCost, Problem
from ring_attn.strategies.registry import both_programs


def replicated_costs(problem: Problem, candidate: Candidate) -> tuple[DirectionCost, ...]:
    """Return the costs of each direction of a plan; none if no rows are replicated."""
    if not problem.replicated:
        return ()
    call = call_of(problem, candidate)
    costs = []
    for backward in problem.directions:
        programs = [
            replicated_program(problem.replicated, problem.spec, rank, backward=backward)
            for rank in range(problem.world_size)
        ]
        costs.append(DirectionCost.of(simulate(programs, call, problem.cluster)))
    return tuple(costs)


def replicated_program(
    counts: Sequence[int], spec: AttentionSpec, rank: int, *, backward: bool
) -> Program:
    """Return the program of one rank.

    Args:
        counts: the number of replicated rows that each rank owns.
        spec: sizes of the call.
        rank: the rank.
        backward: whether gradients are summed at their owners; else rows are gathered.
    """
    rows = _Rows(counts, spec, rank)
    steps = _sum_shares(rows) if backward else _gather(rows)
    return Program(
        world_size=len(counts), rank=rank, backward=backward, ops=tuple(steps), arrays={}
    )


def joint_programs(call: Call, counts: Sequence[int], *, backward: bool) -> list[Program]:
    """Return the forward, or forward and backward, of a call with replicated rows.

    Args:
        call: the call of the owners; if every rank holds all rows, that of `core.copies`, in which
            each rank attends to its own keys.
        counts: the number of replicated rows that each rank owns; empty if there are none.
        backward: whether a backward follows.
    """
    both = both_programs(call, backward=backward)
    if not counts:
        return both
    rows = _Rows(counts, call.spec, call.rank, local_keys=sum(counts) == call.layouts[0].seqlen)
    forward, *backwards = both
    inputs = forward.arrays
    saved = tuple(map(rows.own_name, forward.saved)) if backwards else ()
    joint_forward = replace(
        forward,
        ops=tuple(_forward(forward, saved, rows)),
        arrays={
            name: rows.of_shard(own) if name in rows.owned_inputs else own
            for name, own in inputs.items()
        },
        saved=saved,
    )
    joint_backwards = [
        replace(
            backward,
            ops=tuple(_backward(backward, inputs, rows)),
            arrays={"dout": rows.of_shard(rows.of_out(inputs["q"].rows))},
        )
        for backward in backwards
    ]
    return [joint_forward, *joint_backwards]


@dataclass(frozen=True)
class _Rows:
    """The replicated rows of a call, on one rank.

    Attributes:
        counts: how many of them each rank owns.
        spec: sizes of the call.
        rank: the rank.
        local_keys: whether the rank attends to all keys, which it holds, and not to its own ones.
    """

    counts: Sequence[int]
    spec: AttentionSpec
    rank: int
    local_keys: bool = False

    @property
    def owned_inputs(self) -> tuple[str, ...]:
        """The inputs of which the rank takes its own rows."""
        return ("q",) if self.local_keys else ("q", "k", "v")

    def own_name(self, name: str) -> str:
        """Return the name of the own rows of a tensor; a tensor without others keeps its name."""
        is_owned = name.removeprefix("d") in ("out", *self.owned_inputs)
        return f"own {name}" if is_owned else name

    @property
    def own(self) -> int:
        """How many of them this rank owns."""
        return self.counts[self.rank]

    @property
    def total(self) -> int:
        """How many of them there are."""
        return sum(self.counts)

    def of_out(self, num_rows: int) -> Array:
        """Return so many rows of out, or of its gradient."""
        spec = self.spec
        return Array(spec.batch, num_rows, spec.nheads, spec.headdim_v, spec.dtype)

    def message(self, num_rows: int) -> Packet:
        """Return the message with so many rows of out, or of its gradient."""
        return packet_of([(self.of_out(num_rows).shape, self.spec.dtype)])

    def of_shard(self, own: Array) -> Array:
        """Return the shard of a tensor of which the rank owns some rows."""
        return replace(own, rows=own.rows - self.own + self.total)


def _forward(program: Program, saved: tuple[str, ...], rows: _Rows) -> Iterator[Op]:
    """Yield the ops of the forward, after which the tensors named in `saved` are held."""
    own_rows = program.arrays["q"].rows
    yield ops.Step("own rows")
    for name in rows.owned_inputs:
        yield ops.New(rows.own_name(name), program.arrays[name])
    results = dict.fromkeys(("out", "lse", *(program.saved if saved else ())))
    yield ops.Inner(
        program,
        rows.spec,
        ranks=None,
        inputs=tuple((name, rows.own_name(name)) for name in program.arrays),
        results=tuple((name, rows.own_name(name)) for name in results),
    )
    if "lse" not in saved:
        yield ops.Free(("lse",))
    yield from _gather(rows)
    yield ops.New("rows in order", rows.of_out(rows.total))
    yield ops.New("out", rows.of_shard(rows.of_out(own_rows)))
    owned = {rows.own_name(name) for name in (*rows.owned_inputs, *results)}
    yield ops.Free(("rows of all", "rows in order", *sorted(owned.difference(saved))))


def _gather(rows: _Rows) -> Iterator[Op]:
    """Gather the owned rows of out, padded to the most that a rank owns."""
    world_size = len(rows.counts)
    message = rows.message(max(rows.counts))
    nbytes = rows.of_out(max(rows.counts)).nbytes  # the rows as they are: no message is padded
    send = Buffer("replicated rows", nbytes)
    recv = Buffer("gathered rows", world_size * nbytes)
    yield ops.Step("gather replicated rows")
    yield ops.New("own replicated rows", rows.of_out(rows.own))
    if rows.spec.batch > 1:
        yield ops.New("rows before batch", rows.of_out(rows.own))
    yield ops.Pack(send, message)
    yield ops.Post(
        channel="shards",
        step=0,
        route=ops.Collective("all_gather"),
        send=send,
        recv=recv,
        message=Gathered(message, world_size),
        nbytes=nbytes * (world_size - 1),
    )
    yield ops.Wait("shards")
    yield ops.New("rows of all", rows.of_out(rows.total))
    yield ops.Free((send, recv, "own replicated rows", "rows before batch"))


def _backward(program: Program, inputs: Mapping[str, Array], rows: _Rows) -> Iterator[Op]:
    """Yield the ops of the backward; `inputs` are the own rows of q, k and v."""
    own_rows = inputs["q"].rows
    # Autograd fills the gradient of a part with zeros for the other rows: here the replicated ones.
    yield ops.New("zeros", rows.of_out(rows.own))
    yield ops.New("own dout", rows.of_out(own_rows))
    yield ops.Free(("zeros",))
    yield from _sum_shares(rows)
    yield ops.New("zeros", rows.of_out(own_rows - rows.own))
    yield ops.New("added to own dout", rows.of_out(own_rows))
    yield ops.Free(("zeros", "sums of own rows", "added to own dout"))
    yield ops.Inner(
        program,
        rows.spec,
        ranks=None,
        inputs=tuple((name, rows.own_name(name)) for name in program.arrays),
        results=tuple((name, rows.own_name(name)) for name in ("dq", "dk", "dv")),
    )
    yield ops.Step("gradients of shards")
    names = [name for name in program.arrays if name in rows.owned_inputs or name not in inputs]
    yield ops.Free(tuple(map(rows.own_name, names)))
    for name in reversed(rows.owned_inputs):  # as autograd does: the last first
        own = inputs[name]
        yield ops.New("zeros", replace(own, rows=rows.total))
        yield ops.New(f"d{name}", rows.of_shard(own))
        yield ops.Free(("zeros", rows.own_name(f"d{name}")))


def _sum_shares(rows: _Rows) -> Iterator[Op]:
    """Send each owner this rank's shares of the gradient of out, and sum those of own rows."""
    counts = rows.counts
    # One message for each number of rows: plans have the programs of up to thousands of ranks.
    messages = {count: rows.message(count) for count in set(counts)}
    sent = Parcels(tuple(messages[count] for count in counts))
    received = Parcels((messages[rows.own],) * len(counts))
    row = rows.of_out(1).nbytes
    send_counts = tuple(row * count for count in counts)
    recv_counts = (row * rows.own,) * len(counts)
    send = Buffer("shares", sum(send_counts))
    recv = Buffer("shares of own rows", sum(recv_counts))
    own = rows.of_out(rows.own)
    yield ops.Step("sum gradients of replicated rows")
    yield ops.New("rows in order", rows.of_out(rows.total))
    yield ops.Pack(send, sent)
    yield ops.Free(("rows in order",))
    yield ops.Post(
        channel="shards",
        step=0,
        route=ops.Collective(
            "all_to_all",
            dtype=torch.uint8,
            send_counts=send_counts,
            recv_counts=recv_counts,
        ),
        send=send,
        recv=recv,
        message=received,
        nbytes=sum(send_counts) - send_counts[rows.rank],
    )
    yield ops.Wait("shards")
    if own.dtype != rows.spec.accum_dtype:
        wide = replace(own, dtype=rows.spec.accum_dtype)
        yield ops.New("wide sums", wide)
        if rows.spec.device_type == "cpu":
            # torch converts each share before it adds it; a GPU's kernel does so as it reads.
            yield ops.New("wide share", wide)
            yield ops.Free(("wide share",))
    yield ops.New("sums of own rows", own)
    yield ops.Free((send, recv, "wide sums"))
