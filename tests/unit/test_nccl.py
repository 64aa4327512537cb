"""NCCL's kernels in every order: places that calls need on a device, alone and beside others.

With NCCL_LAUNCH_ORDER_IMPLICIT=1, one place is enough for every job here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from ring_attn.core.mask import Mask
from ring_attn.core.program import Program
from ring_attn.core.tiles import Traveller
from ring_attn.strategies import tree_decode
from ring_attn.strategies.registry import program_of
from ring_attn.strategies.strategy import Strategy
from tests.nccl_model import Line, Ranks, deadlock, places_needed
from tests.unit.test_programs import calls_of, spec_of

Programs = tuple[Program, Program]  # forward and backward of a rank
LAYERS = 3


class Facts(NamedTuple):
    """A call, and the fewest places with which no order of the devices deadlocks.

    For 2, 3 and 4 ranks that share a sequence; 0 where the strategy does not take that number.
    """

    strategy: Strategy
    alone: Ranks
    beside_fsdp: Ranks
    layout: str = "zigzag"
    order: tuple[Traveller, bool] | None = None  # the side that travels in the backward


CALLS = {
    "ring, KV travels": Facts(Strategy(), (1, 2, 2), (2, 3, 3), order=("kv", False)),
    "ring, Q travels": Facts(Strategy(), (1, 2, 2), (2, 3, 3), order=("q", False)),
    "ring, same_bits": Facts(Strategy(), (2, 2, 2), (3, 3, 4), order=("kv", True)),
    "double ring": Facts(Strategy(inner_degree=2), (0, 0, 2), (0, 0, 3)),
    "all_gather": Facts(Strategy("all_gather"), (2, 2, 2), (3, 3, 4)),
    # Beside FSDP2 4 ranks need 4 places, which takes a search of a minute.
    "exchange": Facts(Strategy("exchange"), (1, 2, 2), (2, 3, 0)),
    "q_exchange": Facts(
        Strategy("all_gather", exchange_q=True), (2, 2, 2), (3, 3, 4), "contiguous"
    ),
    "q_exchange, ring": Facts(Strategy(exchange_q=True), (1, 2, 2), (2, 3, 3), "contiguous"),
    "ulysses": Facts(Strategy(ulysses_degree=2), (1, 0, 0), (2, 0, 0)),
    "hybrid": Facts(Strategy(ulysses_degree=2), (0, 0, 1), (0, 0, 3)),
    "hybrid, all_gather": Facts(Strategy("all_gather", ulysses_degree=2), (0, 0, 1), (0, 0, 3)),
}


# -- jobs: the launches of all hosts


def directions(name: str, world_size: int) -> list[Programs]:
    strategy, _, _, layout, order = CALLS[name]
    calls = calls_of(strategy, Mask(64, 64, causal=True), layout, world_size, None, order)
    assert calls, f"{name} takes the layout"
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
    """Jobs, and the fewest places with which no order deadlocks.

    Compute waits for the kernels of tensor parallelism and pipelines: beside them a ring of two
    needs what it needs alone.
    """
    for name, facts in CALLS.items():
        for n, places, beside in zip((2, 3, 4), facts.alone, facts.beside_fsdp, strict=True):
            # A double ring has millions of states.
            marks = [pytest.mark.slow] if name == "double ring" else []
            if places:
                yield pytest.param(partial(alone, name, n), places, id=f"{name}, {n}")
            if beside:
                job = partial(alone, name, n, fsdp=True)
                yield pytest.param(job, beside, id=f"{name}, {n}, FSDP2", marks=marks)
        if facts.alone[0]:
            both = partial(with_tp, name, fsdp=True)
            yield pytest.param(partial(with_tp, name), facts.alone[0], id=f"{name}, TP")
            yield pytest.param(both, facts.beside_fsdp[0], id=f"{name}, TP, FSDP2")
            yield pytest.param(partial(with_pipeline, name), facts.alone[0], id=f"{name}, stages")
    for n in (2, 3, 4):
        yield pytest.param(partial(decoding, n), 1, id=f"decoding, {n}")
    yield pytest.param(partial(decoding, 2, tp=True), 1, id="decoding, TP")


@pytest.mark.parametrize(("job", "places"), list(jobs()))
@pytest.mark.sweep(3)
def test_places(job: Callable[[], list[Line]], places: int) -> None:
    lines = job()
    assert places_needed(lines) == places
    assert deadlock(lines, 1, in_order=True) is None


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
