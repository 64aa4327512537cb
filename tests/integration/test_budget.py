"""`pytest --budget`, of `make gpu`: cases in turn, and none that begins too late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
import time
import pytest

@pytest.mark.parametrize("case", range(3))
def test_wrong(case):
    assert case, "it is wrong"

@pytest.mark.parametrize("case", range(3))
def test_long(case):
    time.sleep(1.0)
"""


def test_the_first_case_of_each_test_runs_first(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(TESTS)
    words = ["-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *words, "--budget", "0.5", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 failed, 1 passed, 4 skipped" in ended.stdout, ended.stdout + ended.stderr
