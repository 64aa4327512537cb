"""`python -m tests.recurrence_times`, on sizes that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recurrence_times import KINDS, LAYOUTS, MODES


@pytest.mark.slow
def test_every_kind_has_its_ratio(tmp_path: Path) -> None:
    path = tmp_path / "recurrence.json"
    command = [sys.executable, "-m", "tests.recurrence_times", str(path), "512", "1"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=1000)
    rows = json.loads(path.read_text())["rows"]
    cases = {(row["kind"], row["layout"], row["mode"]) for row in rows}
    assert len(rows) == len(cases) == len(KINDS) * len(LAYOUTS) * len(MODES)
    assert all(row["ratio"] == row["ms"]["split"][0] / row["ms"]["alone"][0] for row in rows)
