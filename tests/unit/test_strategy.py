"""Strategies as values: names, degrees, and invalid combinations."""

from collections.abc import Callable
from typing import Any

import pytest

from ring_attn.core.strategy import Strategy, family, label, resolve_strategy


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("ring", (), Strategy()),
        ("ulysses", (), Strategy(ulysses_degree=8)),
        ("hybrid", (4, 2), Strategy(ulysses_degree=2)),
        ("double_ring", (2, 4), Strategy(inner_degree=4)),
        ("q_exchange", (), Strategy("all_gather", exchange_q=True)),
    ],
)
def test_names(name: str, mesh: tuple[int, ...], strategy: Strategy) -> None:
    assert resolve_strategy(name, 8, mesh) == strategy
    assert resolve_strategy(strategy, 8, mesh) == strategy
    assert strategy.name == name or (name == "ulysses" and strategy.name == "hybrid")


def test_names_with_a_degree() -> None:
    for name, degree, text in (
        ("ring", 2, "hybrid 2 x ring"),
        ("hybrid", 8, "ulysses"),
        ("double_ring", 4, "double_ring 4"),
        ("q_exchange", 1, "q_exchange + all_gather"),
    ):
        strategy = Strategy.from_name(name, 8, degree)
        assert label(strategy, 8) == text
        assert family(strategy, 8) == text.split()[0]


@pytest.mark.parametrize(
    ("make", "arguments", "error", "text"),
    [
        (Strategy.from_name, ("ulysses", 8, 4), ValueError, "ulysses.*got 4"),
        # -- strategies that do not fit the ranks
        (resolve_strategy, ("rings", 8), ValueError, "one of .*ring.*got 'rings'"),
        (resolve_strategy, (3, 8), TypeError, "got int"),
        (resolve_strategy, ("hybrid", 8), ValueError, r"\(ulysses_degree=...\) that divides 8"),
        (resolve_strategy, ("hybrid", 8, (8,)), ValueError, "a mesh with two axes"),
        (resolve_strategy, ("double_ring", 8), ValueError, r"Strategy\(inner_degree=...\)"),
        (resolve_strategy, (Strategy(ulysses_degree=3), 8), ValueError, "ulysses_degree .*3 and 8"),
        (resolve_strategy, (Strategy(inner_degree=5), 8), ValueError, "inner_degree .*5 and 8"),
        (resolve_strategy, (Strategy("ring", 4, 4), 8), ValueError, "got 4 x 4 and 8"),
        (resolve_strategy, ("ring", 8, (4, 2)), ValueError, "4 x 2 ranks needs"),
        (
            resolve_strategy,
            (Strategy(ulysses_degree=4), 8, (4, 2)),
            ValueError,
            "4 x 2 ranks needs",
        ),
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
