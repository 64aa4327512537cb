"""Runs `ring-attn` in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ring_attn.tools import launch
from ring_attn.tools.cli import main
from tests.distributed.pool import forked_rank, forkserver


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands fork their ranks, in a tenth of the time; unit/test_cli.py has spawned ones."""
    monkeypatch.setattr(launch, "get_context", lambda method: forkserver())
    monkeypatch.setattr(launch, "_rank_main", forked_rank)


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., Any]:
    """`report_of(words, status=0)` is the JSON of a command, which ends with that status."""

    def run(words: str, status: int = 0) -> Any:
        path = tmp_path / "report.json"
        assert main([*words.split(), "--json", str(path)]) == status
        return json.loads(path.read_text())

    return run
