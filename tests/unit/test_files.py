"""Files and variables of users that are not what they should be: refused at once, by name."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from ring_attn.cli import launch
from ring_attn.core.values import env_int
from ring_attn.models.checkpoint import open_checkpoint
from ring_attn.planning.devices import find_cluster, load_cluster
from tests.refusals import refused


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
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    needed = {re.split(r"[^\w.-]", one)[0] for one in asked} - {"ring-attn"}
    rows = (root / "CONTRIBUTING.md").read_text().split("## Dependencies")[1].split("\n## ")[0]
    cells = [line.split("|")[1:4] for line in rows.splitlines() if line.startswith("| ")][1:]
    assert {name.strip() for names, _, _ in cells for name in names.split(",")} == needed
    assert all(cell.strip() for row in cells for cell in row)
