"""Costs of rows that every rank holds: gather their outputs, and sum shares of their gradients.

The programs have the exchanges that `attention.joint` makes around a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ring_attn.core import program as ops
from ring_attn.core.messages import Gathered, Packet, Parcels, packet_of
from ring_attn.core.program import Buffer, Op, Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.time import simulate
from ring_attn.planning.calls import call_of
from ring_attn.planning.choice import Candidate, DirectionCost, Problem


def replicated_costs(problem: Problem, candidate: Candidate) -> tuple[DirectionCost, ...]:
    """Return the costs of each direction of a plan; none if no rows are replicated."""
    if not sum(problem.replicated):
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
    steps = _sum_shares(counts, spec, rank) if backward else _gather(counts, spec)
    return Program(
        world_size=len(counts), rank=rank, backward=backward, ops=tuple(steps), arrays={}
    )


def _gather(counts: Sequence[int], spec: AttentionSpec) -> Iterator[Op]:
    """Gather the owned rows of out, padded to the most that a rank owns."""
    world_size = len(counts)
    message = _rows_of_out(max(counts), spec)
    send = Buffer("replicated rows", message.nbytes)
    recv = Buffer("gathered rows", world_size * message.nbytes)
    yield ops.Step("gather replicated rows")
    yield ops.Pack(send, message)
    yield ops.Post(
        channel="shards",
        step=0,
        route=ops.Collective("all_gather"),
        send=send,
        recv=recv,
        message=Gathered(message, world_size),
        nbytes=message.nbytes * (world_size - 1),
    )
    yield ops.Wait("shards")
    yield ops.Free((send, recv))


def _sum_shares(counts: Sequence[int], spec: AttentionSpec, rank: int) -> Iterator[Op]:
    """Send each owner this rank's shares of the gradient of out."""
    sent = Parcels(tuple(_rows_of_out(count, spec) for count in counts))
    received = Parcels(tuple(_rows_of_out(counts[rank], spec) for _ in counts))
    send = Buffer("shares", sent.nbytes)
    recv = Buffer("shares of own rows", received.nbytes)
    yield ops.Step("sum gradients of replicated rows")
    yield ops.Pack(send, sent)
    yield ops.Post(
        channel="shards",
        step=0,
        route=ops.Collective(
            "all_to_all",
            dtype=torch.uint8,
            send_counts=tuple(sent.counts),
            recv_counts=tuple(received.counts),
        ),
        send=send,
        recv=recv,
        message=received,
        nbytes=sent.nbytes - sent.counts[rank],
    )
    yield ops.Wait("shards")
    yield ops.Free((send, recv))


def _rows_of_out(rows: int, spec: AttentionSpec) -> Packet:
    """Return the message with some rows of out, or of its gradient."""
    return packet_of([((spec.batch, rows, spec.nheads, spec.headdim_v), spec.dtype)])
