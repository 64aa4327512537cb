"""Files and variables of users that are not what they should be: refused at once, by name.

And rules that the files of this repository keep.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from ring_attn.models.checkpoint import open_checkpoint
from ring_attn.planning.devices import find_cluster, load_cluster
from ring_attn.testing import launch
from ring_attn.values.outside import env_int
from tests.clocks import asserts_upon_a_clock
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
# Asserts that depend on a clock, but not on a machine's speed, and why.
CLOCKS = {
    ("distributed/test_links.py", "test_a_late_exchange_is_named"): "a post is dated back by 47 s",
    ("distributed/test_scale.py", "test_one_rank_names_the_missing_ones_for_all"): "simulated time",
    ("distributed/test_stats.py", "adding_up"): "spans of one clock, each within another",
    ("distributed/test_stats.py", "measured_as_planned"): "counts beside the times in one object",
    ("distributed/test_stats.py", "test_decoding_is_measured"): "counts, as above",
}


def enter_checkpoint(path: Path) -> None:
    with open_checkpoint(path):
        pass


@pytest.mark.parametrize("read", [load_cluster, enter_checkpoint])
def test_pipes_are_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    """A pipe that nobody writes to would be read forever."""
    for name in ("pipe.json", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
        with refused(ValueError, name):
            read(tmp_path / name)


def test_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "abc")
    with refused(ValueError, "LOCAL_WORLD_SIZE|'abc'"):
        find_cluster("cpu", 2)
    for name in ("OMP_NUM_THREADS", "WORLD_SIZE"):
        monkeypatch.setenv(name, "-3")
        with refused(ValueError, f"{name}|'-3'"):
            env_int(name, 1)
        monkeypatch.setenv(name, "")
        assert env_int(name, 1) == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("RING_ATTN_CLUSTER", "/missing.json")
    with refused(FileNotFoundError, "RING_ATTN_CLUSTER|/missing.json"):
        find_cluster("cpu", 2)


def listening() -> str:
    port = os.environ["MASTER_PORT"]
    lines = Path("/proc/net/tcp").read_text().splitlines() + (
        Path("/proc/net/tcp6").read_text().splitlines()
    )
    local = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    return " ".join(at for at in local if int(at.split(":")[1], 16) == int(port))


def test_the_store_of_ranks_listens_on_the_loopback() -> None:
    assert launch.run_ranks(listening, nproc=1)[0].startswith("0100007F:")


def test_each_dependency_has_its_row() -> None:
    """CONTRIBUTING.md says why a package is there, and who keeps it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    needed = {re.split(r"[^\w.-]", one)[0] for one in declared} - {"ring-attn"}
    rows = (ROOT / "CONTRIBUTING.md").read_text().split("## Dependencies")[1].split("\n## ")[0]
    cells = [line.split("|")[1:4] for line in rows.splitlines() if line.startswith("| ")][1:]
    assert {name.strip() for names, _, _ in cells for name in names.split(",")} == needed
    assert all(cell.strip() for row in cells for cell in row)


def test_no_test_asserts_upon_a_clock() -> None:
    """On a busy machine it would fail: count work, order events, or simulate the time."""
    tests = ROOT / "tests"
    found = {
        (str(path.relative_to(tests)), function)
        for path in tests.rglob("*.py")
        if path != Path(__file__)
        for function, _ in asserts_upon_a_clock(path.read_text())
    }
    assert found == {*CLOCKS}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("start = time.time()\nwork()\nassert time.time() - start < 4", [3]),
        ("start = perf_counter()\ntook = perf_counter() - start\nassert 0 < took < 4", [3]),
        ("def took():\n    return time.monotonic()\n\nassert max(run(took)) < 4", [4]),
        ("while not ready():\n    assert time.monotonic() < 4", [2]),
        ("end = ended(call)\nassert end.error and end.took_s < 4", [2]),
        ("PROGRAM = 'print(time.process_time())'", [1]),
        ("start = time.monotonic()\nassert count() < 4", []),
        ("assert time.sleep(1) is None and seconds < 4", []),
    ],
)
def test_asserts_upon_a_clock_are_found(lines: str, found: list[int]) -> None:
    assert [line for _, line in asserts_upon_a_clock(lines)] == found


def test_costly_tests_exist() -> None:
    """A name in `costly.txt` whose test is gone would leave a new test of this name out."""
    for name in (ROOT / "tests" / "costly.txt").read_text().splitlines():
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name
