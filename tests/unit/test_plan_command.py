"""`ring-attn plan`: its output and its file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ring_attn.cli import main as cli
from ring_attn.cli import plan as command
from ring_attn.cli.options import parse_window
from ring_attn.machines.check import Fault
from ring_attn.planning.choice import Choice
from ring_attn.planning.devices import builtin_cluster
from tests.integration.commands import options_of

SMALL = ["--seqlen", "4k", "--world-size", "4", "--heads", "8", "--kv-heads", "2"]
SMALL += ["--head-dim", "64", "--cluster", "h100"]


def planned(*words: str) -> Choice:
    return command.plan(options_of("plan", " ".join([*SMALL, *words])))


def test_json_has_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = [*SMALL, "--layout", "zigzag", "--strategy", "ring", "--quiet", "--json", str(path)]
    assert cli.main(["plan", *words]) == 0
    assert capsys.readouterr().out.count("\n") == 1, "the reason alone"
    found = json.loads(path.read_text())
    assert found["best"]["full_name"] == "ring" and found["world_size"] == 4
    assert [c["seconds"] for c in found["candidates"]] == [found["best"]["seconds"]]
    assert found["command"]


def test_without_a_gpu_h100_is_meant_unless_a_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RING_ATTN_CLUSTER", raising=False)
    assert command.cluster_of("h200", 4, 8).node_size == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.cluster_of(None, None, 8).device.name == "H100"
    path = tmp_path / "machine.json"
    path.write_text("{damaged")
    monkeypatch.setenv("RING_ATTN_CLUSTER", str(path))
    with pytest.raises(ValueError, match="machine.json"):
        command.cluster_of(None, None, 8)
    path.write_text(json.dumps({"cluster": asdict(builtin_cluster("B200"))}))
    assert command.cluster_of(str(path), None, 4).device.name == "B200"


def test_documents_and_windows_are_parsed() -> None:
    assert command.boundaries((4, 1), 12) == [0, 4, 5, 9, 10, 12]
    assert command.boundaries((100,), 12) == [0, 12]
    assert parse_window("4k,0") == (4096, 0)
    assert parse_window("-1,16") == (-1, 16)
    choice = planned("--documents", "1k", "--layout", "contiguous")
    assert len(choice.problem.mask.slices) == 4
    assert choice.best.prediction is not None and choice.best.prediction.total.bytes_sent == 0


def test_programs_are_checked_and_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["plan", *SMALL, "--strategy", "ring", "--layout", "zigzag", "--check"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 4, backward" in text and "4 ranks: 0 faults" in text
    fault = Fault("message", 1, None, "planted")
    monkeypatch.setattr(command, "check", lambda programs, call: [fault])
    assert cli.main([*words, "--quiet", "--json", str(tmp_path / "plan.json")]) == 1
    assert str(fault) in capsys.readouterr().out and (tmp_path / "plan.json").exists()
    assert cli.main(["plan", "--seqlen", "1M", "--world-size", "4096", "--check"]) != 0
    assert "128" in capsys.readouterr().err
