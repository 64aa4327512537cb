"""Tests what the devices of all ranks do after an error at any operator of one rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn.transport.p2p import check_calls
from ring_attn.transport.ranks.group import rank_group
from tests.deferred.device import PlantedError, Recorder
from tests.deferred.program import Program, Run, Schedule, Step, at_random, in_host_order
from tests.deferred.ranks import Layers, record_rank
from tests.deferred.test_calls import case_of

RANKS, FAILING = 3, 1
Results = list[dict[str, torch.Tensor]]
INSIDE = {"run_attention", "run_attention_backward"}


def checked(layers: Layers, rank: int, recorder: Recorder, *, check: bool = True) -> None:
    """Runs a rank's layers and a check; adds whether its device met messages of another call."""
    layers(rank, recorder)
    world = dist.group.WORLD
    assert world is not None
    shared = rank_group(world)
    if check:
        with mock.patch.object(shared, "settle"):  # where the host waits for the device
            check_calls(world)
    calls = shared.calls.headers.calls
    recorder.result("differs", torch.stack([call.result for call in calls]))


class Failing:
    def __init__(self, layers: Callable[[int, Recorder], None]) -> None:
        self.layers = layers
        self.inside = False

    def __call__(self, rank: int, recorder: Recorder) -> None:
        try:
            self.layers(rank, recorder)
        except PlantedError as error:
            frames = traceback.extract_tb(error.__traceback__)
            self.inside = any(frame.name in INSIDE for frame in frames)
        if self.inside:
            recorder.results.clear()
            with pytest.raises(RuntimeError, match="failed before"):
                self.layers(rank, recorder)


def compared(results: Results, right: Results) -> tuple[set[int], set[int]]:
    """Ranks with wrong results, and ranks that never pass their check."""
    wrong = {
        rank
        for rank, some in enumerate(results)
        if not all(x.equal(right[rank][name]) for name, x in some.items() if name != "differs")
    }
    reported = {
        r for r, some in enumerate(results) if "differs" not in some or some["differs"].any()
    }
    return wrong, reported


def sweep(strategy: str, every: int, orders: int) -> int:
    """Plants an error at every `every`-th operator; returns how many were inside calls."""
    layers = partial(checked, Layers(case_of(strategy, "causal"), RANKS))
    ranks = [record_rank(rank, RANKS, layers) for rank in range(RANKS)]
    right, tried = Program(ranks).run(in_host_order), 0
    for number in range(1, ranks[FAILING].num_ops + 1, every):
        failing = Failing(layers)
        ranks[FAILING] = record_rank(FAILING, RANKS, failing, number)
        if not failing.inside:
            continue
        tried += 1
        program = Program(ranks)
        assert program.races() == [], number
        for seed in range(orders):
            wrong, reported = compared(program.run(at_random(seed)), right)
            assert wrong <= reported, (number, seed, wrong, reported)
    return tried


def cut_off(program: Program, channel: str, seed: int) -> Schedule:
    """An order that aborts `channel` after its last send, if possible before its last receive."""
    base = at_random(seed)
    last = [x for x in program.parts if x.aborted and channel in x.communicator][-1]

    def choose(run: Run, ready: list[Step]) -> Step:
        aborts = [x for x in ready if x.kind == "abort"]
        others = [x for x in ready if x.kind != "abort"]
        here = [x for x in aborts if channel in x.node.communicator]
        if here and run.is_sent(last):
            return here[0]
        if not others:
            return aborts[0]
        slow = [x for x in others if x.kind != "write" or x.node is not last]
        return base(run, slow or others)

    return choose


@pytest.mark.parametrize("check", [True, False])
def test_channels_are_aborted_one_after_the_other(check: bool) -> None:
    """If a rank fails at the end of its backward, ranks with wrong gradients pass no check."""
    layers = partial(checked, Layers(case_of("ring", "causal"), RANKS), check=check)
    ranks = [record_rank(rank, RANKS, layers) for rank in range(RANKS)]
    right, wrong, tried = Program(ranks).run(in_host_order), set[int](), 0
    for last in reversed(range(1, ranks[FAILING].num_ops)):
        failing = Failing(layers)
        ranks[FAILING] = record_rank(FAILING, RANKS, failing, last)
        if failing.inside:
            program, tried = Program(ranks), tried + 1
            wrong, reported = compared(program.run(cut_off(program, "shards", 0)), right)
        if wrong or tried == 10:
            break
    assert wrong, "no order has wrong gradients"
    assert (wrong <= reported) == check, (wrong, reported)


def test_an_error_leaves_no_wrong_result() -> None:
    """Nothing races with freed memory; ranks have right results, or pass no check."""
    assert sweep("ring", every=31, orders=2) > 5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "exchange"])
def test_an_error_at_any_operator(strategy: str) -> None:
    assert sweep(strategy, every=17, orders=2) > 5
