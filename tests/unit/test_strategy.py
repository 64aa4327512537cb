"""Strategies as values: names, degrees, and invalid combinations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import NAMES, Strategy, resolve_strategy
from ring_attn.strategies.ring import double_rings


@pytest.mark.parametrize(
    ("name", "degree", "strategy", "text"),
    [
        ("ring", None, Strategy(), "ring"),
        ("ring", 2, Strategy(ulysses_degree=2), "hybrid 2 x ring"),
        ("ulysses", None, Strategy(ulysses_degree=8), "ulysses"),
        ("hybrid", 8, Strategy(ulysses_degree=8), "ulysses"),
        ("hybrid", 2, Strategy(ulysses_degree=2), "hybrid 2 x ring"),
        ("double_ring", 4, Strategy(inner_degree=4), "double_ring 4"),
        ("q_exchange", 1, Strategy("all_gather", exchange_q=True), "q_exchange + all_gather"),
    ],
)
def test_names(name: str, degree: int | None, strategy: Strategy, text: str) -> None:
    assert Strategy.from_name(name, 8, degree) == strategy
    assert (strategy.full_name(8), strategy.name_on(8)) == (text, text.split()[0])
    mesh = (8 // degree, degree) if degree and NAMES[name].needed else ()
    assert resolve_strategy(strategy, 8, mesh) == strategy
    if mesh or degree is None:
        assert resolve_strategy(name, 8, mesh) == strategy


@pytest.mark.parametrize(
    ("make", "arguments", "error", "text"),
    [  # test_bad_input.py has more
        (Strategy.from_name, ("ulysses", 8, 4), ValueError, "ulysses.*got 4"),
        # -- strategies that do not fit the ranks
        (resolve_strategy, ("hybrid", 8, (8,)), ValueError, "a mesh with two axes"),
        (resolve_strategy, ("double_ring", 8), ValueError, r"Strategy\(inner_degree=...\)"),
        (
            resolve_strategy,
            (Strategy(ulysses_degree=3), 8),
            ValueError,
            "must divide .*3 x 1 and 8",
        ),
        (resolve_strategy, (Strategy("ring", 4, 4), 8), ValueError, "got 4 x 4 and 8"),
        (resolve_strategy, ("ring", 8, (4, 2)), ValueError, "4 x 2 ranks needs"),
        (resolve_strategy, (Strategy("ring", 4), 8, (4, 2)), ValueError, "4 x 2 ranks needs"),
        # -- invalid options: core, ulysses_degree, inner_degree, exchange_q
        (Strategy, ("star",), ValueError, "core must be one of .*'star'"),
        (Strategy, ("ring", 1, 1, False, 2), NotImplementedError, "heads_per_chunk=2 .*'ring'"),
        (Strategy, ("all_gather", 1, 2), NotImplementedError, "inner_degree=2"),
        (Strategy, ("ring", 2, 1, True), NotImplementedError, "ulysses_degree=2"),
    ],
)
def test_what_cannot_be_is_refused(
    make: Callable[..., object], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(*arguments)


def test_inner_rings_that_are_tried() -> None:
    spec = AttentionSpec("cpu", torch.float32, 1, 4, 4, 16, 16)
    for node_size, degrees in ((4, [2, 4]), (8, [2]), (16, [2]), (3, [2])):
        found = [strategy.inner_degree for strategy in double_rings(spec, 8, node_size)]
        assert found == degrees, node_size
