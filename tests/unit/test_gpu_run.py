"""The runner of `python -m dev gpu`: each planted fault costs one cell, and is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dev.gpu import device
from dev.gpu.cells import Cell, Stage
from dev.gpu.results import FILE, Results, Row, last_rows, read_rows, with_verdict
from dev.gpu.schedule import MOST_FAILED_STARTS, Run
from dev.gpu.worker import PRELOAD
from tests.gpu_cells import LIMIT, SECONDS, STAGE, planted


def run(
    folder: Path, done: frozenset[str] = frozenset(), seconds: float = SECONDS
) -> dict[str, Row]:
    """Rows of the planted cells by name."""
    results = Results(folder)
    made = Run(results, folder, seconds, {})
    made.run([planted(workers=3)], done)
    made.close()
    return {label.removeprefix(f"{STAGE}: "): row for label, row in last_rows(results.rows).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Row]:
    return run(folder)


def test_each_fault_costs_one_cell(rows: dict[str, Row]) -> None:
    states = {name: row["state"] for name, row in rows.items()}
    assert states.pop("is_wrong") == "failed"
    assert states.pop("is_refused") == "not here"
    assert states.pop("lose_context") == "poisoned"
    assert states.pop("crash") == "died"
    for name in ("hang", "hang_with_the_gil", "hang_with_a_child"):
        assert states.pop(name) == "hung"
    assert set(states.values()) == {"ok"}, states
    assert "listed" in states and len(states) == 8


def test_rows_say_why(rows: dict[str, Row]) -> None:
    assert "error / bound 31.2" in rows["is_wrong"]["error"]
    assert "illegal memory access" in rows["lose_context"]["context"]
    assert "in crash" in rows["crash"]["log"] and "-11" in rows["crash"]["error"]
    for name in ("hang", "hang_with_the_gil", "hang_with_a_child"):
        assert "gpu_cells.py" in rows[name]["stacks"] and "in hang" in rows[name]["stacks"]


def test_children_of_a_hung_cell_are_ended(rows: dict[str, Row], folder: Path) -> None:
    logs = "".join(path.read_text() for path in folder.glob("worker*.log"))
    [pid] = re.findall(r"child (\d+)", logs)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_healthy_workers_are_used_again(rows: dict[str, Row]) -> None:
    good = [row["figures"] for row in rows.values() if row["state"] == "ok"]
    pids = [figures["pid"] for figures in good if "pid" in figures]
    assert len(set(pids)) < len(pids)


def test_a_line_is_on_disk_before_each_cell(rows: dict[str, Row], folder: Path) -> None:
    """After a crash of the machine the last "begun" names the cells that ran."""
    states: dict[str, list[str]] = {}
    for row in read_rows(folder / FILE):
        states.setdefault(row["cell"], []).append(row["state"])
    del states[STAGE]
    assert all(len(seen) == 2 and seen[0] == "begun" for seen in states.values()), states


def test_a_second_run_leaves_out_verdicts(
    rows: dict[str, Row], folder: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "before.jsonl"
    lines = (folder / FILE).read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["cell"] != f"{STAGE}: is_wrong"]
    cut.write_text("\n".join(kept) + '\n{"cell": "cut o')
    again = run(tmp_path, frozenset(with_verdict(read_rows(cut))))
    assert {name: row["state"] for name, row in again.items()} == {"is_wrong": "failed"}


def test_without_time_no_cell_begins(tmp_path: Path) -> None:
    states = {row["state"] for row in run(tmp_path, seconds=0.2).values()}
    assert states == {"no time"}
    assert os.path.getsize(tmp_path / FILE) > 0


def test_workers_of_the_next_stage_start_ahead(tmp_path: Path) -> None:
    """The first cell ends when the worker of the second has begun to start."""
    waits = Cell("first", "waits", "tests.gpu_cells:wait_for_two_workers", limit=LIMIT)
    passes = Cell("second", "passes", "tests.gpu_cells:passes", limit=LIMIT)
    stages = [
        Stage("first", SECONDS, "a start ahead", (waits,)),
        Stage("second", SECONDS, "another environment", (passes,), environment={"OTHER": "1"}),
    ]
    results = Results(tmp_path)
    made = Run(results, tmp_path, SECONDS, {device.FOLDER: str(tmp_path)})
    made.run(stages)
    made.close()
    assert [row["state"] for row in last_rows(results.rows).values()] == ["ok", "ok"]


def test_workers_that_do_not_start_cost_little(tmp_path: Path) -> None:
    cells = tuple(Cell("broken", str(i), "tests.gpu_cells:passes") for i in range(5))
    stage = Stage("broken", SECONDS, "nothing", cells, environment={PRELOAD: "no_such_module"})
    results = Results(tmp_path)
    made = Run(results, tmp_path, SECONDS, {})
    made.run([stage])
    rows = list(last_rows(results.rows).values())
    assert [row["state"] for row in rows] == 5 * ["no start"]
    assert rows[0]["error"].startswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert "no other one was tried" in rows[-1]["error"]
    assert len(list(tmp_path.glob("worker*.log"))) == MOST_FAILED_STARTS
