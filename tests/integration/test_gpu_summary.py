"""`make gpu`: its tests' budget, and the screen that its three files become."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ring_attn.bench import summary
from ring_attn.cli.main import main
from tests.integration.test_bench_kernel import RUN as BENCH
from tests.integration.test_tune import TINY as TUNE

ROOT = Path(__file__).parents[2]
ONLY = ("--implementations", "ours,torch-flash,cudnn")

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


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three files, made by pytest and by the two commands."""
    folder = tmp_path_factory.mktemp("gpu-results")
    tests = folder / "test_here.py"
    tests.write_text(TESTS)
    words = ["-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(folder), "--budget", "0.5"]
    command = [sys.executable, "-m", "pytest", *words, "--junitxml", str(folder / "tests.xml")]
    ended = subprocess.run([*command, str(tests)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert main([*BENCH.split(), *ONLY, "--json", str(folder / "kernel.json")]) == 0
    tune = f"tune {TUNE} --kernels dq --budget 0.1 --quiet --json {folder}/tune.json"
    assert main(tune.split()) == 0
    return folder


def changed(folder: Path, name: str, **entries: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_the_screen(folder: Path) -> None:
    lines, well = summary.screen(folder)
    text = "\n".join(lines)
    print(text)
    assert not well and len(lines) < 30 and max(map(len, lines[2:])) <= summary.WIDTH
    assert "torch 2." in lines[1] and "triton" in lines[1]
    # Cases in turn: the first of each test had run when the budget was spent.
    assert "tests: 1 passed, 1 failed, 0 skipped, 4 beyond the budget" in text
    assert "FAILED test_wrong[0]: AssertionError: it is wrong" in text
    report = json.loads((folder / "kernel.json").read_text())
    rate = next(row["rate"] for row in report["rows"] if row["impl"] == "ours")
    cells = [line for line in lines if line.startswith("4/2 x 16 causal 2 x 64")]
    assert [line.split()[7] for line in cells] == ["fwd", "bwd"]
    assert cells[0].split()[8] == f"{rate:.3g}"
    assert "cudnn: " in text


@pytest.mark.parametrize("name", ["tests.xml", "kernel.json", "tune.json"])
def test_a_step_that_did_not_end_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    for path in folder.glob("*.[xj]*"):
        (tmp_path / path.name).write_text(path.read_text() if path.name != name else "{")
    lines, well = summary.screen(tmp_path)
    assert not well and any(line.startswith(f"FAILED {name}") for line in lines)


def test_a_wrong_kernel_is_a_failure(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.[xj]*"):
        (tmp_path / path.name).write_text(path.read_text())
    junit = '<testsuite time="1"><testcase name="right"/></testsuite>'
    (tmp_path / "tests.xml").write_text(junit)
    assert summary.screen(tmp_path)[1]
    changed(tmp_path, "kernel.json", failures=["ours is wrong"])
    lines, well = summary.screen(tmp_path)
    assert not well and "FAILED bench kernel: ours is wrong" in lines
