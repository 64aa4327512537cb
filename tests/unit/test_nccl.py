"""NCCL's kernels in every order: calls alone and beside others, on devices with few places.

With NCCL_LAUNCH_ORDER_IMPLICIT=1, one place is enough for every job here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest

from ring_attn.core.mask import Mask
from ring_attn.core.program import Program
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side
from ring_attn.machines.count import CONNECTION_BYTES, communicator_bytes
from ring_attn.strategies import tree_decode
from ring_attn.strategies.registry import program_of
from ring_attn.transport.options import MAX_CTAS
from tests.nccl_model import Line, Ranks, deadlock
from tests.unit.test_programs import calls_of, spec_of

Programs = tuple[Program, Program]  # forward and backward of a rank
LAYERS = 3


class Facts(NamedTuple):
    """A call, and the numbers of ranks that share a sequence."""

    strategy: Strategy
    world_sizes: Ranks = (2, 3, 4)
    layout: str = "zigzag"
    order: tuple[Side, bool] | None = None  # the side that is sent in the backward
    together: bool = False  # one communicator for shards and gradients


CALLS = {
    "ring, KV is sent": Facts(Strategy(), order=("kv", False)),
    "ring, Q is sent": Facts(Strategy(), order=("q", False)),
    "ring, same_bits": Facts(Strategy(), order=("kv", True)),
    "ring, together": Facts(Strategy(), order=("kv", False), together=True),
    "double ring": Facts(Strategy(inner_degree=2), (4,)),
    "double ring, together": Facts(Strategy(inner_degree=2), (4,), together=True),
    "all_gather": Facts(Strategy("all_gather")),
    "exchange": Facts(Strategy("exchange")),
    "q_exchange": Facts(Strategy("all_gather", exchange_q=True), layout="contiguous"),
    "q_exchange, ring": Facts(Strategy(exchange_q=True), layout="contiguous"),
    "ulysses": Facts(Strategy(ulysses_degree=2), (2,)),
    "hybrid": Facts(Strategy(ulysses_degree=2), (4,)),
    "hybrid, all_gather": Facts(Strategy("all_gather", ulysses_degree=2), (4,)),
}


# -- jobs: the launches of all hosts


def directions(name: str, world_size: int) -> list[Programs]:
    strategy, _, layout, order, together = CALLS[name]
    calls = calls_of(strategy, Mask(64, 64, causal=True), layout, world_size, None, order)
    assert calls, f"{name} takes the layout"
    calls = [replace(call, sends_together=together) for call in calls]
    return [(program_of(c, backward=False), program_of(c, backward=True)) for c in calls]


def attend(line: Line, ring: Ranks, program: Program, tp: Ranks = ()) -> None:
    """A call between two collectives of tensor parallel, which gather and scatter rows."""
    line.wait(line.collective("tp", tp))
    line.run(program, ring)
    line.wait(line.collective("tp", tp))


def train(line: Line, ring: Ranks, programs: Programs, *, tp: Ranks = (), fsdp: Ranks = ()) -> None:
    """A forward and a backward of some layers.

    Mimics FSDP2 without explicit prefetching. In the forward the host is ahead: a gathering
    waits only for the use of the gathering two layers before. In the backward the next
    gathering precedes a layer's backward, and compute waits for a scattering before the next.
    """
    forward, backward = programs
    free = before = line.now
    for _ in range(LAYERS):
        gathered = line.collective("all_gather", fsdp, free)
        free = before
        line.wait(gathered)
        before = line.now
        attend(line, ring, forward, tp)
    gathered, scattered = line.collective("all_gather", fsdp), None
    for layer in reversed(range(LAYERS)):
        line.wait(gathered)
        gathered = line.collective("all_gather", fsdp) if layer else None
        attend(line, ring, backward, tp)
        line.wait(scattered)
        scattered = line.collective("reduce_scatter", fsdp)
    line.wait(scattered)


def alone(name: str, n: int, *, fsdp: bool = False) -> list[Line]:
    """All ranks share one sequence, and parameters."""
    ring, lines = tuple(range(n)), []
    for rank, programs in enumerate(directions(name, n)):
        lines.append(Line(rank))
        train(lines[-1], ring, programs, fsdp=ring if fsdp else ())
    return lines


def with_tp(name: str, *, fsdp: bool = False) -> list[Line]:
    """4 ranks: two halves of the heads by two shards."""
    programs, lines = directions(name, 2), []
    for rank in range(4):
        ring, tp = (rank % 2, rank % 2 + 2), (rank - rank % 2, rank - rank % 2 + 1)
        lines.append(Line(rank))
        train(lines[-1], ring, programs[ring.index(rank)], tp=tp, fsdp=ring if fsdp else ())
    return lines


# 1F1B of 3 batches, as torch.distributed.pipelining batches messages: forward, backward, and
# messages to (>) and from (<) the other stage, "o" while compute goes on until the next ".".
STAGES = ("F o> F . <> B F <> B < B", "< F B <> F B <> F B >")


def with_pipeline(name: str) -> list[Line]:
    """4 ranks: two stages by two shards."""
    programs, lines = directions(name, 2), []
    for rank in range(4):
        ring, stages = (rank - rank % 2, rank - rank % 2 + 1), (rank % 2, rank % 2 + 2)
        forward, backward = programs[ring.index(rank)]
        line, at = Line(rank), stages.index(rank)
        other, sent = stages[1 - at : 2 - at], None
        for work in STAGES[at].split():
            if work in "FB":
                attend(line, ring, forward if work == "F" else backward)
            elif work == ".":
                line.wait(sent)
            else:
                sends, receives = (other if way in work else () for way in "><")
                sent = line.launch(("stages", stages), sends, receives)
                if "o" not in work:
                    line.wait(sent)
        lines.append(line)
    return lines


def decoding(n: int, *, tp: bool = False, tokens: int = 3) -> list[Line]:
    """Tree decoding of tokens on n ranks, or 2 n with `tp`."""
    call, lines = tree_decode.make_call(spec_of(), backend="reference"), []
    width = 2 if tp else 1
    for rank in range(n * width):
        ring = tuple(range(rank % width, n * width, width))
        near = tuple(range(rank - rank % width, rank - rank % width + width))
        program = tree_decode.program(call, (), (1, 1, 8), ring.index(rank), n)
        lines.append(Line(rank))
        for _ in range(tokens):
            attend(lines[-1], ring, program, near if tp else ())
    return lines


def jobs() -> Iterator[object]:
    for name, facts in CALLS.items():
        for n in facts.world_sizes:
            yield pytest.param(partial(alone, name, n), id=f"{name}, {n}")
            yield pytest.param(partial(alone, name, n, fsdp=True), id=f"{name}, {n}, FSDP2")
        if 2 in facts.world_sizes:
            yield pytest.param(partial(with_tp, name), id=f"{name}, TP")
            yield pytest.param(partial(with_tp, name, fsdp=True), id=f"{name}, TP, FSDP2")
            yield pytest.param(partial(with_pipeline, name), id=f"{name}, stages")
    for n in (2, 3, 4):
        yield pytest.param(partial(decoding, n), id=f"decoding, {n}")
    yield pytest.param(partial(decoding, 2, tp=True), id="decoding, TP")


@pytest.mark.parametrize("job", list(jobs()))
def test_one_place_is_enough_in_the_hosts_order(job: partial[list[Line]]) -> None:
    """In any order, devices with one place deadlock beside FSDP2."""
    lines = job()
    assert deadlock(lines, 1, in_order=True) is None
    assert "fsdp" not in job.keywords or deadlock(lines, 1) is not None


# Ranks from which rank 0 of 4 receives, over its communicators, in a forward and with a backward.
# NCCL gathers and sums in a ring, from one rank.
SOURCES = {
    "ring, KV is sent": (1, 2),
    "ring, together": (1, 1),
    "double ring": (2, 4),
    "double ring, together": (2, 3),
    "exchange": (3, 6),
    "all_gather": (1, 2),
    "q_exchange": (2, 3),
    "hybrid": (2, 3),
}


@pytest.mark.parametrize("name", SOURCES)
def test_memory_of_communicators(name: str) -> None:
    forward, backward = directions(name, 4)[0]
    for programs, sources in zip(([forward], [forward, backward]), SOURCES[name], strict=True):
        nbytes = communicator_bytes(programs, rank=0, world_size=4, node_size=4)
        assert nbytes == sources * MAX_CTAS * CONNECTION_BYTES


# -- planted faults


def exchanges(*orders: str) -> list[Line]:
    """Ranks that launch kernels of shared communicators, each in its own order."""
    lines = [Line(rank) for rank in range(len(orders))]
    for line, order in zip(lines, orders, strict=True):
        for name in order:
            line.collective(name, tuple(range(len(orders))))
    return lines


def test_one_place_and_two_communicators_deadlock_where_orders_differ() -> None:
    """Equal host orders deadlock unless devices keep them; opposite ones even then."""
    alike, opposite = exchanges("ab", "ab"), exchanges("ab", "ba")
    a, b = ({(name, (0, 1))} for name in "ab")
    assert deadlock(alike, 1) in ([a, b], [b, a])
    assert deadlock(alike, 1, in_order=True) is None
    assert deadlock(opposite, 1, in_order=True) == [a, b]
    assert deadlock(alike, 2) is deadlock(opposite, 2, in_order=True) is None
