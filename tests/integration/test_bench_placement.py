"""`ring-attn bench placement`: its layouts, and its report on sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ring_attn.bench.placement import (
    DISTRIBUTIONS,
    WAYS,
    Row,
    batch_of,
    ratio_table,
    ratios,
    ways_of,
)
from ring_attn.tools import cli


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_batches_are_whole_documents_and_every_way_has_them(name: str) -> None:
    lengths = batch_of(name, 4 * 8192, 20_000, seed=1)
    assert lengths == batch_of(name, 4 * 8192, 20_000, seed=1)
    assert max(lengths) <= (20_000 if name != "one" else 4 * 8192) and sum(lengths) <= 4 * 8192
    for way in ways_of(lengths, 4):
        cuts = way.cu_seqlens
        found = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
        assert sorted(found) == sorted(lengths) and way.layout.seqlen == sum(lengths)


def test_ratios_are_of_the_best_ways() -> None:
    def row(seed: int, way: str, strategy: str, ms: float | None) -> Row:
        samples = () if ms is None else (ms,)
        return Row("long", seed, "cpu", 2, 1, 1, 1, way, strategy, ms, samples, 1.0, 1.0)

    rows = [row(seed, "packed", "exchange", 2.0) for seed in (0, 1)]
    rows += [row(0, "zigzag", "ring", 3.0), row(0, "zigzag", "all_gather", None)]
    rows += [row(1, "zigzag", "ring", 5.0), row(1, "zigzag", "all_gather", 4.0)]
    packed, ring, gather = rows[0], ("zigzag", "ring"), ("zigzag", "all_gather")
    over = [(packed.way, packed.strategy)]
    assert ratios(rows, [ring], over) == [1.5, 2.5]
    assert ratios(rows, [ring, gather], over) == [1.5, 2.0]
    assert ratio_table(rows).row_count == 1


@pytest.mark.parametrize(
    "words",
    [
        "--cluster H100 --world-sizes 8 --lengths long",
        pytest.param(
            "--world-sizes 2 --lengths library", marks=[pytest.mark.slow, pytest.mark.dist]
        ),
    ],
)
def test_a_small_run(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    options: list[Any] = ["--quick", "--tokens", "2k", "--batches", "1", "--iters", "2"]
    assert cli.main(["bench", "placement", *words.split(), *options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(r["way"], r["strategy"]) for r in rows} == {(w, s) for w in WAYS for s in WAYS[w]}
    assert all(row["median_ms"] > 0 for row in rows)
    assert rows[0]["work"] <= 1.05 and "time / that of packed exchange" in capsys.readouterr().out
