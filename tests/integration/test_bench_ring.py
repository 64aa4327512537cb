"""`ring-attn bench ring`: its report."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


@pytest.mark.dist
def test_every_implementation_is_measured(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(
        "bench ring --quick --seqlen 300 --heads 4 --kv-heads 2 --head-dim 16 --iters 3"
    )
    assert {"machine", "command", "rows", "setting"} <= set(report)
    rows = {(row["impl"], row["mode"]): row for row in report["rows"]}
    for key in product(("ours", "dense", "torch-template"), ("fwd", "bwd", "fwd_bwd")):
        row = rows[key]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["max_error"] > 0 and (row["wait_ms"] is None) == (row["impl"] != "ours")
    ours = rows["ours", "fwd_bwd"]
    assert ours["bytes_sent"] > rows["ours", "fwd"]["bytes_sent"] > 0
    assert rows["ours", "fwd"]["peak_bytes"] < ours["peak_bytes"]
    assert "x dense" in capsys.readouterr().out


@pytest.mark.dist
def test_what_cannot_run_is_reported(report_of: Any) -> None:
    words = "--mode fwd --heads 1 --head-dim 16 --iters 2 --layout striped --seqlen 256"
    rows = {row["impl"]: row for row in report_of(f"bench ring {words}")["rows"]}
    assert rows["ours"]["median_ms"] > 0 and rows["dense"]["median_ms"] > 0
    assert rows["torch-template"]["note"] == "cannot run: has no striped order"
