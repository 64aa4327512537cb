"""Files that every benchmark writes beside its JSON, and comparison with an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ring_attn.bench.outputs import (
    check_same,
    compare,
    comparison_title,
    figures,
    label,
)
from ring_attn.cli.main import main

DECODE = "bench decode --device cpu --quick --seqlen 64 --iters 3"


def row(impl: str, seqlen: int, median: float | None, spread: float = 0.05) -> dict[str, Any]:
    low, high = (None, None) if median is None else (median * (1 - spread), median * (1 + spread))
    times = {"median_ms": median, "p20_ms": low, "p80_ms": high}
    return {"impl": impl, "seqlen": seqlen, "causal": True, **times, "note": "<b>"}


def report(*rows: dict[str, Any], **setting: Any) -> dict[str, Any]:
    return {"command": "ring-attn bench x", "machine": {"cores": 2}, "setting": setting,
            "rows": list(rows), "failures": []}  # fmt: skip


def test_figures_have_their_key_and_spread() -> None:
    (found,) = figures([row("a", 8, 2.0), row("b", 8, None)])
    assert found.key == (("impl", "a"), ("seqlen", 8), ("causal", True))
    assert (found.median, label(found.key)) == (2.0, "a, seqlen 8, causal True")
    config = {"kind": "fwd", "config": {"BLOCK_M": 64}, "max_ratio": 0.5, **row("a", 8, 2.0)}
    assert dict(figures([config])[0].key) == {"kind": "fwd", **dict(found.key)}
    (sampled,) = figures([{"shape": "s", "median_ms": 3.0, "samples_ms": [1.0, 3.0, 9.0]}])
    assert sampled.low < sampled.median < sampled.high


@pytest.mark.parametrize(
    ("now", "verdict"), [(2.0, "same"), (2.09, "same"), (2.5, "slower"), (1.5, "faster")]
)
def test_a_change_counts_beyond_the_spread(now: float, verdict: str) -> None:
    (change,) = compare(report(row("a", 8, 2.0)), report(row("a", 8, now), row("b", 8, 1.0)))
    assert change.verdict == verdict and change.ratio == now / 2.0


def test_other_settings_are_not_compared() -> None:
    check_same(report(seqlen=8, iters=3, gone=1), {"seqlen": 8, "iters": 9, "new": (1, 2)})
    check_same(report(sizes={"iters": 3, "seqlens": [1]}), {"sizes": {"iters": 9, "seqlens": (1,)}})
    for then, now in (({"seqlen": 8}, {"seqlen": 16}), ({"sizes": {"n": 1}}, {"sizes": {"n": 2}})):
        with pytest.raises(ValueError, match=f"{next(iter(then))}: .* then, .* now"):
            check_same(report(**then), now)
    with pytest.raises(ValueError, match="no figure of this one"):
        compare(report(row("a", 8, 2.0)), report(row("a", 16, 2.0)))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"rows": 1}', "\x00", '{"rows": [1]}', '{"rows": [{"median_ms": 1.0}]}']
)
def test_what_is_no_report_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(content)
    assert main([*DECODE.split(), "--compare", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_comparison_names_what_differs_in_the_machine() -> None:
    old, now = report(row("a", 8, 2.0)), report(row("a", 8, 3.0))
    assert comparison_title(old, now) == "against the earlier run"
    old["machine"] = {"cores": 3}
    assert comparison_title(old, now).endswith("with other cores")


def test_a_benchmark_writes_its_files_and_fails_where_it_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / f"x.{name}" for name in ("json", "svg")}
    assert main(f"{DECODE} --json {paths['json']} --plot {paths['svg']}".split()) == 0
    measured = json.loads(paths["json"].read_text())
    svg = paths["svg"].read_text()
    assert "<svg" in svg and "seqlen 64" in svg
    for factor, status in ((1e3, 0), (1e-6, 1)):  # a thousand times as long, then a thousandth
        for one in measured["rows"]:
            one.update({n: one[n] * factor for n in ("median_ms", "p20_ms", "p80_ms") if one[n]})
        paths["json"].write_text(json.dumps(measured))
        assert main([*DECODE.split(), "--compare", str(paths["json"])]) == status
    assert "x the time before" in capsys.readouterr().out
