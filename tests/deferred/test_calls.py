"""Calls of all strategies on the deferred device: no races, and the same bits in every order."""

from __future__ import annotations

import pytest
import torch

from ring_attn.testing import RESULTS, STRATEGIES, Case, run_all_ranks
from tests.deferred.calls import Layers
from tests.deferred.program import at_random, in_host_order, same

SEQLEN = 29
HOW = {name: ("zigzag" if name != "q_exchange" else "contiguous") for name in STRATEGIES}


def case_of(strategy: str, mask: str, **options: object) -> Case:
    case = Case(mask, HOW[strategy], strategy, "reference", "float32", "gqa", SEQLEN)
    return case.__replace__(**options) if options else case


def check(layers: Layers, orders: int = 2) -> None:
    """Holds all orders against each other, and against ranks that do everything at once."""
    program = layers.record()
    assert program.races() == []
    assert program.stuck() == [] and not program.unmatched
    results = program.run(in_host_order)
    assert all(same(results, program.run(at_random(seed))) for seed in range(orders))
    if layers.layers == 1:
        plain = run_all_ranks(layers.case, layers.world_size).whole
        whole = layers.whole(results)
        assert all(torch.equal(getattr(whole, x), getattr(plain, x)) for x in RESULTS)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
@pytest.mark.parametrize("mask", ["causal", "documents window"])
def test_every_strategy(strategy: str, mask: str) -> None:
    check(Layers(case_of(strategy, mask), 4))
