"""`ring-attn bench recurrence`, on sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ring_attn.bench.recurrence import KINDS, LAYOUTS, MODES
from ring_attn.cli.main import main


@pytest.mark.slow
def test_every_kind_has_its_ratio(tmp_path: Path) -> None:
    path = tmp_path / "recurrence.json"
    assert main(["bench", "recurrence", "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    cases = {(row["kind"], row["layout"], row["mode"], row["impl"]) for row in rows}
    assert len(rows) == len(cases) == 2 * len(KINDS) * len(LAYOUTS) * len(MODES)
    assert all(row["ratio"] == 1 for row in rows if row["impl"] == "alone")
