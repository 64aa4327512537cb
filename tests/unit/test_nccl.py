"""NCCL's kernels in every order: places that calls need on a device, alone and beside others.

With NCCL_LAUNCH_ORDER_IMPLICIT=1, one place is enough for every job here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ring_attn.core.mask import Mask
from ring_attn.core.program import Program
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller
from ring_attn.strategies import tree_decode
from ring_attn.strategies.registry import program_of
from tests.nccl_model import Launch, Line, Moment, Ranks, others, places_needed, search
from tests.unit.test_programs import calls_of, spec_of

# Strategy, layout, and the side that travels in the backward.
CALLS: dict[str, tuple[Strategy, str, tuple[Traveller, bool] | None]] = {
    "ring, KV travels": (Strategy(), "zigzag", ("kv", False)),
    "ring, Q travels": (Strategy(), "zigzag", ("q", False)),
    "ring, same_bits": (Strategy(), "zigzag", ("kv", True)),
    "double ring": (Strategy(inner_degree=2), "zigzag", None),
    "all_gather": (Strategy("all_gather"), "zigzag", None),
    "exchange": (Strategy("exchange"), "zigzag", None),
    "q_exchange": (Strategy("all_gather", exchange_q=True), "contiguous", None),
    "q_exchange, ring": (Strategy(exchange_q=True), "contiguous", None),
    "ulysses": (Strategy(ulysses_degree=2), "zigzag", None),
    "hybrid": (Strategy(ulysses_degree=2), "zigzag", None),
    "hybrid, all_gather": (Strategy("all_gather", ulysses_degree=2), "zigzag", None),
}


# -- jobs: the launches of all hosts


def directions(name: str, world_size: int) -> list[tuple[Program, Program]]:
    """Forward and backward of every rank."""
    strategy, layout, order = CALLS[name]
    calls = calls_of(strategy, Mask(64, 64, causal=True), layout, world_size, None, order)
    assert calls, f"{name} takes the layout"
    return [(program_of(c, backward=False), program_of(c, backward=True)) for c in calls]


class Job:
    """One rank of a training or decoding job.

    Args:
        rank: the rank within the job.
        ring: the ranks that share a sequence.
        tp: the ranks that share its heads.
        fsdp: the ranks that share parameters.
    """

    def __init__(self, rank: int, ring: Ranks, *, tp: Ranks = (), fsdp: Ranks = ()) -> None:
        self.line = Line()
        self._rank, self._ring, self._tp, self._fsdp = rank, ring, tp, fsdp

    def attention(self, program: Program) -> None:
        """A call between two collectives of tensor parallel, which gather and scatter rows."""
        self._tensor_parallel()
        self.line.run(program, self._rank, self._ring)
        self._tensor_parallel()

    def _tensor_parallel(self) -> None:
        if self._tp:
            self.line.wait(self.line.collective(("tp", self._tp), others(self._tp, self._rank)))

    def train(self, forward: Program, backward: Program, layers: int) -> None:
        """A forward and a backward of some layers.

        Mimics FSDP2 without explicit prefetching. In the forward the host is ahead: a gathering
        waits only for the use of the gathering two layers before. In the backward the next
        gathering precedes a layer's backward, and compute waits for a scattering before the next.
        """
        line = self.line
        free = before = line.now
        for _ in range(layers):
            gathered = self._fully_sharded("all_gather", after=free)
            free = before
            self._wait(gathered)
            before = line.now
            self.attention(forward)
        gathered, scattered = self._fully_sharded("all_gather"), None
        for layer in reversed(range(layers)):
            self._wait(gathered)
            gathered = self._fully_sharded("all_gather") if layer else None
            self.attention(backward)
            self._wait(scattered)
            scattered = self._fully_sharded("reduce_scatter")
        self._wait(scattered)

    def _fully_sharded(self, what: str, after: Moment | None = None) -> Launch | None:
        if not self._fsdp:
            return None
        communicator = what, self._fsdp
        return self.line.collective(communicator, others(self._fsdp, self._rank), after)

    def _wait(self, kernel: Launch | None) -> None:
        if kernel is not None:
            self.line.wait(kernel)

    def pipeline(self, stages: Ranks, forward: Program, backward: Program, batches: int) -> None:
        """1F1B over the ranks of the stages, as torch.distributed.pipelining batches messages."""
        line, at = self.line, stages.index(self._rank)
        before, behind = stages[:at][-1:], stages[at + 1 :][:1]

        def message(sends: Ranks, receives: Ranks) -> Launch | None:
            if not sends and not receives:
                return None
            return line.launch(("stages", stages), sends, receives)

        warm, sent = min(batches, len(stages) - at), None
        for batch in range(warm):
            self._wait(message((), before))
            self.attention(forward)
            self._wait(sent)
            sent = message(behind, ()) if batch < warm - 1 else None
        for batch in range(warm, batches + 1):
            self._wait(message(behind, behind))
            self.attention(backward)
            if batch < batches:
                self._wait(message(before, before))
                self.attention(forward)
        sent = message(before, ())
        for _ in range(warm - 1):
            self._wait(message((), behind))
            self.attention(backward)
            self._wait(sent)
            sent = message(before, ())
        self._wait(sent)


def alone(name: str, n: int, layers: int = 3, *, fsdp: bool = False) -> list[Line]:
    """All ranks share one sequence, and parameters."""
    everyone = tuple(range(n))
    jobs = [Job(rank, everyone, fsdp=everyone if fsdp else ()) for rank in everyone]
    for job, programs in zip(jobs, directions(name, n), strict=True):
        job.train(*programs, layers)
    return [job.line for job in jobs]


def with_tp(name: str, layers: int = 3, *, fsdp: bool = False) -> list[Line]:
    """4 ranks: two halves of the heads by two shards."""
    programs, lines = directions(name, 2), []
    for rank in range(4):
        ring, tp = (rank % 2, rank % 2 + 2), (rank - rank % 2, rank - rank % 2 + 1)
        job = Job(rank, ring, tp=tp, fsdp=ring if fsdp else ())
        job.train(*programs[ring.index(rank)], layers)
        lines.append(job.line)
    return lines


def with_pipeline(name: str, batches: int = 3) -> list[Line]:
    """4 ranks: two stages by two shards."""
    programs, lines = directions(name, 2), []
    for rank in range(4):
        ring, stages = (rank - rank % 2, rank - rank % 2 + 1), (rank % 2, rank % 2 + 2)
        job = Job(rank, ring)
        job.pipeline(stages, *programs[ring.index(rank)], batches)
        lines.append(job.line)
    return lines


def decoding(n: int, *, tp: bool = False, tokens: int = 3) -> list[Line]:
    """Tree decoding of tokens on n ranks, or 2 n with `tp`."""
    call, lines = tree_decode.make_call(spec_of(), backend="reference"), []
    width = 2 if tp else 1
    for rank in range(n * width):
        ring = tuple(range(rank % width, n * width, width))
        near = tuple(range(rank - rank % width, rank - rank % width + width))
        job = Job(rank, ring, tp=near if tp else ())
        program = tree_decode.program(call, (), 1, 8, ring.index(rank), n)
        for _ in range(tokens):
            job.attention(program)
        lines.append(job.line)
    return lines


# -- facts: the fewest places with which no order of the devices deadlocks

# For 2, 3 and 4 ranks that share a sequence: alone, and beside FSDP2; 0 where the strategy does not
# take that number. For 2 x 2 ranks: with tensor parallel; with it and FSDP2; with a pipeline.
PLACES: dict[str, tuple[tuple[int, ...], ...]] = {
    "ring, KV travels": ((1, 2, 2), (2, 3, 3), (1, 2, 1)),
    "ring, Q travels": ((1, 2, 2), (2, 3, 3), (1, 2, 1)),
    "ring, same_bits": ((2, 2, 2), (3, 3, 4), (2, 3, 2)),
    "double ring": ((0, 0, 2), (0, 0, 3), ()),
    "all_gather": ((2, 2, 2), (3, 3, 4), (2, 3, 2)),
    "exchange": ((1, 2, 2), (2, 3, 0), (1, 2, 1)),  # beside FSDP2: 4, a search of a minute
    "q_exchange": ((2, 2, 2), (3, 3, 4), (2, 3, 2)),
    "q_exchange, ring": ((1, 2, 2), (2, 3, 3), (1, 2, 1)),
    "ulysses": ((1, 0, 0), (2, 0, 0), (1, 2, 1)),
    "hybrid": ((0, 0, 1), (0, 0, 3), ()),
    "hybrid, all_gather": ((0, 0, 1), (0, 0, 3), ()),
}


def check(lines: Sequence[Line], places: int) -> None:
    assert places_needed(lines) == places
    assert search(lines, 1, in_order=True).deadlock is None


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.sweep(2)
def test_places_of_a_call(name: str) -> None:
    for world_size, places in zip((2, 3, 4), PLACES[name][0], strict=True):
        if places:
            check(alone(name, world_size), places)


@pytest.mark.parametrize(
    ("name", "world_size", "places"),
    [
        # A double ring has millions of states.
        pytest.param(name, n, places, marks=[pytest.mark.slow] if name == "double ring" else [])
        for name, (_, row, _) in PLACES.items()
        for n, places in zip((2, 3, 4), row, strict=True)
        if places
    ],
)
@pytest.mark.sweep(3)
def test_places_beside_fsdp(name: str, world_size: int, places: int) -> None:
    check(alone(name, world_size, fsdp=True), places)


@pytest.mark.parametrize("name", [name for name, (_, _, row) in PLACES.items() if row])
@pytest.mark.sweep(3)
def test_places_beside_tensor_parallel_and_pipelines(name: str) -> None:
    tensor_parallel, fully_sharded, pipeline = PLACES[name][2]
    check(with_tp(name), tensor_parallel)
    check(with_tp(name, fsdp=True), fully_sharded)
    check(with_pipeline(name), pipeline)


def test_decoding_needs_one_place() -> None:
    for world_size in (2, 3, 4):
        check(decoding(world_size), 1)
    check(decoding(2, tp=True), 1)


# -- planted faults


def exchanges(*orders: str) -> list[Line]:
    """Ranks that launch kernels of shared communicators, each in its own order."""
    lines, everyone = [], tuple(range(len(orders)))
    for rank, order in enumerate(orders):
        lines.append(Line())
        for communicator in order:
            lines[-1].collective(communicator, others(everyone, rank))
    return lines


def test_one_place_and_two_communicators_deadlock_where_orders_differ() -> None:
    """Equal host orders deadlock unless devices keep them; opposite ones even then."""
    alike, opposite = exchanges("ab", "ab"), exchanges("ab", "ba")
    assert search(alike, 1).deadlock in ([{"a"}, {"b"}], [{"b"}, {"a"}])
    assert search(alike, 1, in_order=True).deadlock is None
    assert search(opposite, 1, in_order=True).deadlock == [{"a"}, {"b"}]
    assert search(alike, 2).deadlock is search(opposite, 2, in_order=True).deadlock is None


def test_all_orders_and_fewer_of_them_find_the_same() -> None:
    rng, found = random.Random(17), set()
    for _ in range(150):
        lines = [Line() for _ in range(3)]
        for _ in range(rng.randrange(2, 7)):
            members = tuple(sorted(rng.sample(range(3), rng.choice((2, 2, 3)))))
            communicator = members, rng.choice("ab")
            for rank in members:
                kernel = lines[rank].collective(communicator, others(members, rank))
                if rng.random() < 0.4:
                    lines[rank].wait(kernel)
        for places in (1, 2):
            every, reduced = (search(lines, places, reduced=r) for r in (False, True))
            assert (every.deadlock is None) == (reduced.deadlock is None)
            assert reduced.num_states <= every.num_states or every.deadlock
            found.add((places, every.deadlock is None))
    assert len(found) == 4
