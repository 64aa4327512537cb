"""`ring-attn bench strategies`: its measurements and report, on sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ring_attn.bench.strategies import SHAPES, Row, chosen_shapes, explained, judged, verdict_table
from ring_attn.core.strategy import Strategy
from ring_attn.planning.devices import cpu_cluster, to_json
from ring_attn.tools import cli


def test_the_shapes_are_of_every_kind() -> None:
    assert len(SHAPES) >= 20 and len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert any(shape.kv_heads == shape.heads for shape in SHAPES)
    assert any(1 < shape.kv_heads < shape.heads for shape in SHAPES)
    assert any(shape.kv_heads == 1 for shape in SHAPES)
    assert any(shape.window != (-1, -1) for shape in SHAPES)
    assert any(shape.documents for shape in SHAPES) and any(not shape.causal for shape in SHAPES)
    assert min(shape.seqlen for shape in SHAPES) <= 512 <= 4096 <= max(s.seqlen for s in SHAPES)
    for shape in SHAPES:
        assert not shape.documents or sum(shape.documents) == shape.seqlen


def test_shapes_by_name() -> None:
    assert {shape.name for shape in chosen_shapes("mqa", quick=False)} == {
        shape.name for shape in SHAPES if "mqa" in shape.name
    }
    short = chosen_shapes("documents mixed", quick=True)[0]
    assert short.seqlen == sum(short.documents) < 600
    with pytest.raises(ValueError, match="the names are mha 512"):
        chosen_shapes("spiral", quick=False)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_shape_has_its_strategies(world_size: int) -> None:
    for shape in chosen_shapes(None, quick=True)[:: 4 // world_size]:
        choice = explained(shape, world_size, cpu_cluster(world_size))
        usable = [c.strategy for c in choice.candidates if not c.refused]
        wanted = {Strategy(), Strategy("all_gather"), Strategy(ulysses_degree=world_size)}
        assert set(usable) >= wanted
        assert all(c.prediction is not None for c in choice.candidates if not c.refused)


def test_auto_is_judged_against_the_best() -> None:
    def row(shape: str, strategy: str, ms: float, auto: bool = False) -> Row:
        return Row(shape, 2, strategy, ms, ms, (ms,), auto)

    rows = [row("a", "ring", 2.0), row("a", "ulysses", 3.0, True), row("b", "ring", 1.0, True)]
    verdicts = judged(rows)
    assert [(v.auto, v.best, v.ratio) for v in verdicts] == [
        ("ulysses", "ring", 1.5), ("ring", "ring", 1.0),
    ]  # fmt: skip
    assert verdict_table(verdicts, rows).row_count == 2


@pytest.mark.slow
@pytest.mark.dist
def test_a_small_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, out = tmp_path / "machine.json", tmp_path / "sweep.json"
    machine.write_text(json.dumps({"clusters": {"2": to_json(cpu_cluster(2))}}))
    words = ["--quick", "--world-sizes", "2", "--shapes", "gqa 6/2,documents mixed", "--iters", "2"]
    words += ["--cluster", str(machine), "--json", str(out)]
    assert cli.main(["bench", "strategies", *words]) == 0
    assert "auto is within 10% of the best fixed strategy in" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [v["shape"] for v in found["verdicts"]] == ["gqa 6/2 2k", "documents mixed 4k"]
    for verdict in found["verdicts"]:
        rows = [row for row in found["rows"] if row["shape"] == verdict["shape"]]
        assert {"ring", "all_gather", "ulysses"} <= {row["strategy"] for row in rows}
        assert verdict["best_ms"] == min(row["median_ms"] for row in rows)
        assert sum(row["is_auto"] for row in rows) == 1 and verdict["ratio"] >= 1.0
        assert all(len(row["samples_ms"]) == 2 and min(row["samples_ms"]) > 0 for row in rows)
