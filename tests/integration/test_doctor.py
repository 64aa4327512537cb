"""`ring-attn doctor`: ready here; a failed ring, odd ranks and bad settings are named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import metadata
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


VERSIONS = {"triton": "3.7.1", "flash_attn": None, "transformers": None, "accelerate": "1.12.0"}


def test_missing_packages_are_named_with_what_they_are_for() -> None:
    here: Any = {"versions": {**dict.fromkeys(doctor.OPTIONAL), **VERSIONS}, "devices": []}
    installed, *missing = doctor.check_packages(here)
    assert (installed.state, installed.text) == ("ok", "triton 3.7.1, accelerate 1.12.0")
    # flash-attn has no use without a GPU.
    assert {one.name: (one.state, one.mend) for one in missing} == {
        "transformers": ("note", "pip install 'ring-attn[hf]'"),
        "matplotlib": ("note", "pip install 'ring-attn[plot]'"),
    }
    here["devices"] = [{}]
    assert "flash_attn" in [one.name for one in doctor.check_packages(here)]


def test_commands_of_missing_packages_name_our_extras() -> None:
    extras = metadata("ring-attn").get_all("Provides-Extra") or []
    for package in doctor.OPTIONAL.values():
        extra = re.search(r"ring-attn\[(\w+)\]", package.install)
        assert extra is None or extra[1] in extras


@pytest.mark.parametrize(
    ("apart", "state", "text"),
    [
        ([], "ok", "all others"),
        ([(0, 2), (2, 0)], "note", "2 of 6 pairs .* such as GPU 0 and GPU 2"),
    ],
)
def test_gpus_that_cannot_read_each_others_memory_are_named(
    apart: list[tuple[int, int]], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def can_access(*pair: int) -> bool:
        return pair not in apart

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    (found,) = doctor.check_links(3)
    assert found.state == state and re.search(text, found.text)
    assert not [*doctor.check_links(1)], "one GPU has no links"


def test_gpus_of_one_model_share_a_line() -> None:
    h100: Any = {"name": "H100", "memory_bytes": 80 << 30, "capability": "9.0"}
    a100: Any = {"name": "A100", "memory_bytes": 40 << 30, "capability": "8.0"}
    assert [one.text for one in doctor.check_gpus([h100, h100, a100])] == [
        "2 x H100, 80 GiB, compute capability 9.0",
        "1 x A100, 40 GiB, compute capability 8.0",
    ]


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
    found = [one for one in doctor.check_nccl(here) if one.name == doctor.NET_CHANNELS_VARIABLE]
    assert bool(found) == expected
    assert all(one.state == "note" and one.mend.endswith("=4") for one in found)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), ("8", True), ("16", True), ("32", False), ("1", False)]
)
def test_streams_that_wait_for_others_are_named(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(doctor.QUEUES_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(doctor.QUEUES_VARIABLE, value)
    here: Any = {"devices": [{"name": "H100"}]}
    found = [one for one in doctor.check_nccl(here) if one.mend.endswith("=32")]
    assert bool(found) == expected


@pytest.mark.parametrize("name", doctor.HARMFUL)
def test_harmful_variables_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, why = doctor.HARMFUL[name]
    monkeypatch.setenv(name, value)
    here: Any = {"devices": []}
    assert [(one.state, why in one.text) for one in doctor.check_nccl(here)] == [("note", True)]


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
