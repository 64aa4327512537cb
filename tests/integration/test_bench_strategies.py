"""`ring-attn bench strategies`: its measurements and report, on sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ring_attn.bench.strategies import SHAPES, StrategyRow, chosen_shapes, explained, judged
from ring_attn.cli.main import main
from ring_attn.planning.devices import cpu_cluster, to_json
from ring_attn.strategies.strategy import Strategy


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_shape_has_its_strategies(world_size: int) -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    for shape in chosen_shapes(None, quick=True)[:: 4 // world_size]:
        choice = explained(shape, world_size, cpu_cluster(world_size))
        usable = [c.strategy for c in choice.candidates if not c.refused]
        wanted = {Strategy(), Strategy("all_gather"), Strategy(ulysses_degree=world_size)}
        assert set(usable) >= wanted
        assert all(c.prediction is not None for c in choice.candidates if not c.refused)


def test_every_layout_of_a_batch_has_all_its_documents() -> None:
    shapes = chosen_shapes("long tail", quick=False)
    assert len(shapes) == 3
    for shape in shapes:
        layout, cuts = shape.placed(3)
        assert cuts is not None and layout.seqlen == shape.seqlen == sum(shape.documents)
        lengths = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        assert sorted(lengths) == sorted(shape.documents)


def test_auto_is_judged_against_the_best() -> None:
    def row(shape: str, strategy: str, ms: float, auto: bool = False) -> StrategyRow:
        return StrategyRow(shape, 2, strategy, ms, ms, (ms,), auto)

    rows = [row("a", "ring", 2.0), row("a", "ulysses", 3.0, True), row("b", "ring", 1.0, True)]
    assert [(v.auto, v.best, v.ratio) for v in judged(rows)] == [
        ("ulysses", "ring", 1.5), ("ring", "ring", 1.0),
    ]  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"clusters": {"2": to_json(cpu_cluster(2))}}))
    return str(path)


@pytest.mark.slow
@pytest.mark.dist
def test_a_small_sweep(report_of: Any, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["gqa 6/2 2k", "documents mixed 4k", "long tail packed", "long tail per document"]
    words = ["bench", "strategies", "--quick", "--world-sizes", "2", "--iters", "2"]
    found = report_of([*words, "--cluster", machine, "--shapes", ",".join(shapes)])
    assert "auto is within 10% of the best fixed strategy in" in capsys.readouterr().out
    assert {v["shape"] for v in found["verdicts"]} == set(shapes)
    for verdict in found["verdicts"]:
        rows = [row for row in found["rows"] if row["shape"] == verdict["shape"]]
        assert {"ring", "all_gather", "ulysses"} <= {row["strategy"] for row in rows}
        assert verdict["best_ms"] == min(row["median_ms"] for row in rows)
        assert sum(row["is_auto"] for row in rows) == 1 and verdict["ratio"] >= 1.0
        assert all(len(row["samples_ms"]) == 2 and min(row["samples_ms"]) > 0 for row in rows)


@pytest.mark.dist
def test_under_torchrun_the_first_rank_prints(machine: str, under_torchrun: Any) -> None:
    words = ["bench", "strategies", "--quick", "--world-sizes", "2", "--iters", "1", "--quiet"]
    first, second = under_torchrun(2, main, [*words, "--shapes", "mha 512", "--cluster", machine])
    assert first.count("auto is within") == 1 and not second
