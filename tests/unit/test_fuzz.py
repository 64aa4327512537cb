"""Random calls of `make fuzz`, and faults that they find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dev import fuzz
from dev.fuzz import KINDS
from ring_attn.backends import base, reference
from ring_attn.core import program as ops
from ring_attn.core import state
from ring_attn.core.tiles import Tile
from ring_attn.machines import run as machine
from ring_attn.sequence import halo as neighbours
from ring_attn.sequence import states


@pytest.fixture(autouse=True, scope="module")
def processes() -> Iterator[None]:
    yield
    fuzz.pools.close()
    fuzz.queued_pools.close()


@pytest.fixture
def own_processes() -> Iterator[None]:
    """Processes that have the faults of a test."""
    fuzz.pools.close()
    yield
    fuzz.pools.close()


# Calls of several processes are slow. Triton's attention is in `tests/kernels/test_options.py`; CI
# and `make fuzz` draw many more of all kinds.
SLOW_KINDS = ("processes", "queued")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in SLOW_KINDS else ())
        for kind in KINDS
        if kind != "triton"
    ],
)
def test_random_calls_are_right(kind: str) -> None:
    counts: Counter[str] = Counter()
    examples = max(1, KINDS[kind].share // (6 if kind in SLOW_KINDS else 12))
    failure = fuzz.fuzz(kind, 0, examples, counts)
    assert failure is None, failure
    assert counts[kind] >= examples / 2, counts


def wider_band(tile: Tile, device: torch.device) -> torch.Tensor:
    return base.band_mask(tile if tile.hi is None else tile._replace(hi=tile.hi + 1), device)


right_weights = state.weights_of


def no_rescale(m: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    m_new, keep, add = right_weights(m, other)
    return m_new, torch.ones_like(keep), add


def mean_over_rows(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return state.sinks_gradient(sinks, lse, delta) / max(1, lse.size(-1))


def last_gradient_alone(run: Any, op: ops.Add) -> None:
    run.blocks[op.into.name] = run.blocks.pop(op.buffer.name)


def own_gradients_alone(plan: Any, around: torch.Tensor, transport: Any) -> torch.Tensor:
    sums = around.new_zeros(plan.own + sum(plan.received), around.size(1))
    for places, rows in plan.sums:
        sums[places] += around[rows]
    neighbours.exchange_rows(sums[plan.own :], plan.received, [*map(len, plan.sent)], transport)
    return sums[: plan.own].clone()


def no_decay(decay: torch.Tensor, start: torch.Tensor, matrix: bool) -> torch.Tensor:
    return start


# The kind of calls that finds a fault, and how it is planted.
FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "band": ("attention", lambda: mock.patch.object(reference, "band_mask", wider_band)),
    "rescaling": ("attention", lambda: mock.patch.object(state, "weights_of", no_rescale)),
    "sinks": ("attention", lambda: mock.patch.object(machine, "sinks_gradient", mean_over_rows)),
    "gradients": (
        "attention",
        lambda: mock.patch.object(machine.Run, "add", last_gradient_alone),
    ),
    "decoding": ("decode", lambda: mock.patch.object(state, "weights_of", no_rescale)),
    "halo": (
        "neighbours",
        lambda: mock.patch.object(neighbours.HaloPlan, "return_gradients", own_gradients_alone),
    ),
    "states": ("recurrences", lambda: mock.patch.object(states, "applied", no_decay)),
}


def plant(name: str) -> None:
    FAULTS[name][1]().start()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("own_processes")
def test_a_planted_fault_is_found_and_repeated(name: str) -> None:
    kind = FAULTS[name][0]

    def everywhere(fn: Callable[..., Any], *args: Any) -> None:
        fn(*args)
        for world_size in range(1, 6):
            fuzz.pools(world_size).run(fn, *args)

    everywhere(plant, name)
    failure = fuzz.fuzz(kind, 0, 500, Counter())
    assert failure is not None
    assert not re.search("AttributeError|NameError|TypeError", failure), "the fault itself fails"
    command = re.search(r"--case (\S+):(\S+)'", failure)
    assert command is not None and command[1] == kind, failure
    assert fuzz.fuzz(kind, 1, 1, Counter(), command[2]) is not None
    everywhere(mock.patch.stopall)
    assert fuzz.fuzz(kind, 1, 1, Counter(), command[2]) is None
