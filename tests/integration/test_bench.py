"""`ring-attn bench ring`: the report is complete, and its results are checked."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ring_attn.bench import ring, ring_implementations
from ring_attn.bench.ring_implementations import RingAttentionPytorch
from ring_attn.tools.cli import main
from tests.integration.commands import options_of

FIELDS = {
    "impl", "mode", "median_ms", "p20_ms", "p80_ms", "wait_ms", "bytes_sent", "peak_bytes",
    "max_error", "planned_bytes",
}  # fmt: skip


@pytest.mark.dist
def test_bench_ring(report_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(
        "bench ring --quick --seqlen 300 --heads 4 --kv-heads 2 --head-dim 16 --iters 3"
    )
    assert {"machine", "command", "rows", "setting"} <= set(report)
    rows = {(row["impl"], row["mode"]): row for row in report["rows"]}
    for impl in ("ours", "dense", "torch-template"):
        for mode in ("fwd", "bwd", "fwd_bwd"):
            row = rows[impl, mode]
            assert set(row) >= FIELDS
            assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
            assert row["max_error"] > 0
    ours = rows["ours", "fwd_bwd"]
    assert ours["bytes_sent"] == ours["planned_bytes"] > 0
    assert rows["ours", "fwd"]["peak_bytes"] < ours["peak_bytes"]
    assert rows["ours", "step_overhead"]["median_ms"] > 0
    assert "x dense" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_a_baseline_that_cannot_run_says_why(report_of: Any) -> None:
    words = "bench ring --quick --layout striped --heads 1 --head-dim 16 --mode fwd --quiet"
    rows = report_of(words)["rows"]
    (refused,) = (row for row in rows if row["impl"] == "torch-template")
    assert refused["median_ms"] is None
    assert refused["note"] == "cannot run: has no striped order"


def test_a_peer_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(words: str) -> str | None:
        setting = ring.setting_of(options_of(ring, words))
        return RingAttentionPytorch.reason_against(setting)

    monkeypatch.setattr(ring_implementations, "find_spec", lambda name: None)
    assert "pip install" in str(reason("--quick"))
    monkeypatch.setattr(ring_implementations, "find_spec", lambda name: name)
    assert reason("--quick") is None
    assert "divides" in str(reason("--seqlen 1023"))
    assert "kv head" in str(reason("--heads 4 --kv-heads 2"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ring --baseline sparse", "--baseline must be of"),
        ("placement --lengths short", "library, long tail, long, one, got 'short'"),
        ("kernel --device cpu --implementations sparse", "--implementations"),
        ("kernel --device cpu --implementations ,", "--implementations"),
        ("kernel --device cpu --heads 8/3", "8/3"),
        ("kernel --device cpu --json /nowhere/x.json", "/nowhere"),
    ],
)
def test_bad_options_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", *words.split()])
    except SystemExit as exit:  # raised by argparse
        status = int(exit.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_quick_is_smaller_unless_sizes_are_given() -> None:
    def setting(words: str) -> ring.Setting:
        return ring.setting_of(options_of(ring, words))

    quick, given = setting("--quick"), setting("--quick --seqlen 2k --iters 5")
    assert (quick.seqlen, quick.iters) == ring.QUICK
    assert (given.seqlen, given.iters) == (2048, 5)


@pytest.mark.slow
@pytest.mark.dist
def test_growth_over_length_and_ranks(report_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--quick --mode fwd --heads 1 --head-dim 16 --iters 2 --baseline dense"
    report = report_of(f"bench growth {words}")
    measured = [(r["impl"], r["world_size"], r["seqlen"]) for r in report["rows"]]
    assert sorted(measured) == sorted(product(("ours", "dense"), (1, 2), (256, 512)))
    assert all(r["median_ms"] > 0 and r["max_error"] is not None for r in report["rows"])
    shown = capsys.readouterr().out
    assert "seqlen" in shown and "world_size" in shown and "theory" in shown


def test_growth_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "growth", "--quick"]) == 2
    assert "torchrun" in capsys.readouterr().err
