"""Strategies as values: names, degrees, and what does not go together."""

import pytest

from ring_attn.core.strategy import Strategy, family, label, resolve_strategy


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("ring", (), Strategy()),
        ("ring", (8,), Strategy()),
        ("all_gather", (), Strategy("all_gather")),
        ("ulysses", (), Strategy(ulysses_degree=8)),
        ("hybrid", (4, 2), Strategy(ulysses_degree=2)),
        ("hybrid", (2, 4), Strategy(ulysses_degree=4)),
        ("double_ring", (2, 4), Strategy(inner_degree=4)),
        ("q_exchange", (), Strategy("all_gather", exchange_q=True)),
    ],
)
def test_names(name: str, mesh: tuple[int, ...], strategy: Strategy) -> None:
    assert resolve_strategy(name, 8, mesh) == strategy
    assert resolve_strategy(strategy, 8, mesh) == strategy
    assert strategy.name == name or (name == "ulysses" and strategy.name == "hybrid")


@pytest.mark.parametrize(
    ("name", "degree", "text"),
    [
        ("ring", 2, "hybrid 2 x ring"),
        ("all_gather", 4, "hybrid 4 x all_gather"),
        ("hybrid", 8, "ulysses"),
        ("double_ring", 4, "double_ring 4"),
        ("ulysses", 8, "ulysses"),
        ("q_exchange", 1, "q_exchange + all_gather"),
    ],
)
def test_names_with_a_degree(name: str, degree: int, text: str) -> None:
    strategy = Strategy.from_name(name, 8, degree)
    assert label(strategy, 8) == text
    assert family(strategy, 8) == text.split()[0]


@pytest.mark.parametrize(("name", "degree"), [("ulysses", 4), ("q_exchange", 2)])
def test_degrees_that_a_name_cannot_have(name: str, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{name}.*got {degree}"):
        Strategy.from_name(name, 8, degree)


@pytest.mark.parametrize(
    ("strategy", "world_size", "mesh", "error", "text"),
    [
        ("rings", 8, (), ValueError, "one of .*ring.*got 'rings'"),
        (3, 8, (), TypeError, "got int"),
        ("hybrid", 8, (), ValueError, r"Strategy\(ulysses_degree=...\) that divides 8"),
        ("hybrid", 8, (8,), ValueError, "a mesh with two axes"),
        ("double_ring", 8, (), ValueError, r"Strategy\(inner_degree=...\)"),
        (Strategy(ulysses_degree=3), 8, (), ValueError, "ulysses_degree .*got 3 and 8"),
        (Strategy(inner_degree=5), 8, (), ValueError, "inner_degree .*got 5 and 8"),
        (Strategy("ring", 4, 4), 8, (), ValueError, "got 4 x 4 and 8"),
        ("ring", 8, (4, 2), ValueError, "4 x 2 ranks needs"),
        (Strategy(ulysses_degree=4), 8, (4, 2), ValueError, "4 x 2 ranks needs"),
    ],
)
def test_what_does_not_fit_the_ranks(
    strategy: object, world_size: int, mesh: tuple[int, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        resolve_strategy(strategy, world_size, mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"core": "star"}, ValueError, "core must be one of .*'star'"),
        ({"ulysses_degree": 0}, ValueError, "ulysses_degree must be at least 1, got 0"),
        ({"heads_per_chunk": 2}, NotImplementedError, "heads_per_chunk=2 .*'ring'"),
        ({"core": "all_gather", "inner_degree": 2}, NotImplementedError, "inner_degree=2"),
        ({"exchange_q": True, "ulysses_degree": 2}, NotImplementedError, "ulysses_degree=2"),
    ],
)
def test_what_does_not_go_together(
    arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Strategy(**arguments)  # type: ignore[arg-type]
