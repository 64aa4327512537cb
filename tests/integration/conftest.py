"""Runs `ring-attn` in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ring_attn.tools.cli import main


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., Any]:
    """`report_of(words, status=0)` runs a command, checks its status and returns its JSON."""

    def run(words: str | list[str], status: int = 0) -> Any:
        path = tmp_path / "report.json"
        words = words.split() if isinstance(words, str) else words
        assert main([*words, "--json", str(path)]) == status
        return json.loads(path.read_text())

    return run
