"""`ring-attn doctor`: ready here; a failed ring, odd ranks and bad settings are named."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ring_attn.cli import doctor
from ring_attn.cli.main import main

Report = Callable[..., Any]


def findings(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["name"]: (one["state"], one["text"]) for one in report["findings"]}


@pytest.mark.dist
def test_a_machine_that_is_ready(report_of: Report, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ, NCCL_P2P_DISABLE="1"):
        report = report_of("doctor")
    found = findings(report)
    assert found["ring"][0] == "ok" and "2 ranks on cpu" in found["ring"][1]
    assert found["versions"][0] == "ok" and torch.__version__ in found["versions"][1]
    assert found["NCCL_P2P_DISABLE"][0] == "note"
    assert capsys.readouterr().out.endswith("ready\n")
    backends = [one["text"] for one in report["findings"] if one["name"] == "backend"]
    assert sum("decoding" in text for text in backends) == 1
    assert "ring" not in findings(report_of("doctor --quick"))


@pytest.mark.dist
def test_a_ring_that_fails_is_wrong(
    report_of: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second rank does not find the function that the first one runs.
    monkeypatch.setattr(doctor, "run_ranks", mock.Mock(side_effect=RuntimeError("lost\nby itself")))
    state, text = findings(report_of("doctor --quiet", status=1))["ring"]
    assert state == "wrong" and "by itself" in text
    said = capsys.readouterr().out
    assert "1 wrong" in said and "versions" not in said


def test_a_file_that_is_missing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RING_ATTN_CONFIGS", "nowhere.json")
    assert main(["doctor", "--quick"]) == 1
    assert "-> unset RING_ATTN_CONFIGS, or ring-attn tune --json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("world_size", "local", "value", "expected"),
    [(16, 8, None, True), (16, 8, "4", False), (8, 8, None, False)],
)
def test_channels_between_nodes_are_recommended(
    world_size: int,
    local: int,
    value: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.delenv(doctor.NET_CHANNELS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(doctor.NET_CHANNELS_VARIABLE, value)
    here: Any = {"devices": []}
    found = [one for one in doctor._nccl(here) if one.name == doctor.NET_CHANNELS_VARIABLE]
    assert bool(found) == expected
    assert all(one.state == "note" and one.mend.endswith("=4") for one in found)


@pytest.mark.parametrize("name", doctor.HARMFUL)
def test_harmful_variables_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, why = doctor.HARMFUL[name]
    monkeypatch.setenv(name, value)
    here: Any = {"devices": []}
    assert [(one.state, why in one.text) for one in doctor._nccl(here)] == [("note", True)]


def doctor_on_an_odd_rank() -> None:
    if os.environ["RANK"] == "1":
        os.environ["RING_ATTN_CONFIGS"] = "other.json"
        os.environ["RING_ATTN_DEBUG"] = "1"  # its calls are compared first, the others' are not
    assert main(["doctor"]) == 1


@pytest.mark.dist
def test_the_rank_that_differs_is_named(under_torchrun: Callable[..., list[str]]) -> None:
    first, *others = under_torchrun(3, doctor_on_an_odd_rank)
    assert "RING_ATTN_CONFIGS: rank 1 on " in first and "other.json" in first
    assert "RING_ATTN_DEBUG: rank 1 on " in first and "wrong ring: 3 ranks" in first
    assert "Traceback" not in first and not any(others)
