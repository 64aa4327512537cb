"""Runs `ring-attn` in this process, and programs as torchrun does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ring_attn.cli.main import main
from tests.integration.commands import printed_by


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., Any]:
    """`report_of(words, status=0)` runs a command, checks its status and returns its JSON."""

    def run(words: str | list[str], status: int = 0) -> Any:
        path = tmp_path / "report.json"
        words = words.split() if isinstance(words, str) else words
        assert main([*words, "--json", str(path)]) == status
        return json.loads(path.read_text())

    return run


@pytest.fixture
def under_torchrun(fresh_ranks: Any) -> Callable[..., list[str]]:
    """`under_torchrun(n, fn, *args)` calls fn in n new processes; returns what each printed."""

    def run(world_size: int, fn: Callable[..., object], *args: Any) -> list[str]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return fresh_ranks(world_size).run(printed_by, store.port, fn, args, timeout=1000.0)

    return run
