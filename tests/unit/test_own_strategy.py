"""The strategy of examples/own_strategy.py gets results, bytes, time, pictures, and is planned."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ring_attn.cli import main as cli
from ring_attn.core.mask import Mask
from ring_attn.core.masks import chunked
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.machines.check import check
from ring_attn.machines.count import peak_bytes
from ring_attn.machines.draw import draw
from ring_attn.machines.time import simulate
from ring_attn.planning.devices import builtin_cluster
from ring_attn.planning.planner import explain
from ring_attn.strategies.registry import both_programs, programs_of, register, registered
from ring_attn.testing import LAYOUTS, Case, run_all_ranks
from tests.unit.test_programs import assert_all_is_timed, calls_of, sent

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_strategy.py"
STAR = runpy.run_path(str(EXAMPLE))["STAR"]


@pytest.fixture
def star() -> Iterator[None]:
    with registered(STAR):
        yield


@pytest.mark.usefixtures("star")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("around", [1, 2])
def test_results_are_right(layout: str, around: int) -> None:
    strategy = Strategy("star", ulysses_degree=around)
    masks = ("causal", "window", "documents", "longer kv", "empty rows", "chunked")
    for turn, mask in enumerate(masks):
        dtype = ("float32", "bfloat16")[turn % 2]
        case = Case(mask, layout, strategy, "reference", dtype, seqlen=61, batch=1, sinks=turn > 2)
        assert not run_all_ranks(case, 4).failures


@pytest.mark.usefixtures("star")
@pytest.mark.parametrize("backward", [False, True])
def test_checked_counted_timed_and_drawn(backward: bool) -> None:
    for mask in (Mask(96, 96, causal=True), chunked(96, 20)):
        calls = calls_of(Strategy("star"), mask, "zigzag", 4)
        programs = programs_of(calls, backward=backward)
        assert check(programs, calls[0]) == []
        assert {one.messages for one in sent(calls, backward=backward)} == {6 if backward else 3}
        assert_all_is_timed(calls, backward=backward)
        for call in calls:
            both = both_programs(call, backward=backward)
            drawn = draw(both[-1])
            assert drawn.count("post ") == (6 if backward else 3)
            assert peak_bytes(both, call) > 0
        assert simulate(programs, calls[0], builtin_cluster("H100")).seconds > 0


@pytest.mark.usefixtures("star")
def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="'star' is registered already"):
        register(STAR)
    with pytest.raises(ValueError, match="core must be one of .*'star'"):
        Strategy("comet")
    with pytest.raises(ValueError, match="strategy must be one of .*'star'.*, got 'comet'"):
        Strategy.from_name("comet", 4)


@pytest.mark.usefixtures("star")
def test_named_planned_and_taken_by_auto() -> None:
    case = Case("causal", "zigzag", "star", "reference", "float32", seqlen=61, batch=1)
    assert not run_all_ranks(case, 3).failures
    sizes: dict[str, Any] = {"seqlen": 1 << 13, "world_size": 4, "nheads": 8, "headdim": 64}
    sizes |= {"causal": True, "layout": "zigzag", "cluster": builtin_cluster("H100")}
    every = explain(**sizes, effort="names")
    assert {"star", "hybrid"} <= {c.name for c in every.candidates if c.prediction}
    assert explain(**sizes, strategies=["star"]).best.full_name == "star"


def test_the_example_checks_itself() -> None:
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_plan_loads_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--seqlen 1k --world-size 4 --heads 4 --head-dim 16 --cluster h100 --strategy star"
    assert cli.main(["plan", *words.split()]) == cli.EXIT_USAGE
    assert cli.main(["plan", *words.split(), "--check", "--load", str(EXAMPLE)]) == 0
    printed = capsys.readouterr().out
    assert "\n*  star " in printed and printed.rstrip().endswith("4 ranks: 0 faults")
    assert "star" not in NAMES


def branches_on_names(source: str) -> list[int]:
    """Lines that compare with a strategy's name; collectives of the same name are an `op`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not ast.unparse(node.left).endswith("op"):
            constants = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            if {x for x in constants if isinstance(x, str)} & NAMES.keys():
                lines.append(node.lineno)
    return lines


def test_nothing_outside_of_strategies_branches_on_a_name() -> None:
    """But `core/strategy.py`, which gives strategies their names."""
    assert branches_on_names("if strategy.core in ('ring', 'star'):\n    pass") == [1]
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root)): lines
        for folder in ("ring_attn", "bench")
        for path in (root / folder).rglob("*.py")
        if "strategies" not in path.parts
        and path.parts[-2:] != ("core", "strategy.py")
        and (lines := branches_on_names(path.read_text()))
    }
    assert not found
