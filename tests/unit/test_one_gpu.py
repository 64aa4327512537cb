"""Ranks that share one GPU: their environment, what is refused, and the flag of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dev.gpu import plan
from ring_attn.testing import share_gpu
from ring_attn.testing.launch import checked_device
from ring_attn.testing.one_gpu import WAYS, Way
from tests import conftest
from tests.distributed import pool
from tests.refusals import refused

ROOT = Path(__file__).parents[2]

VARIABLES = (
    "NCCL_HOSTID",
    "NCCL_NET",
    "NCCL_SOCKET_IFNAME",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rank 3 of 4 under torchrun, on a machine with one GPU and NCCL 2.28.9."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    machine = SimpleNamespace(gpu=True, nccl=(2, 28, 9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: machine.nccl)
    yield machine
    # What `share_gpu` has set is not left to other tests; monkeypatch restores what was there.
    for name in VARIABLES:
        os.environ.pop(name, None)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_a_launcher_get_one_gpu(way: Way, rank: SimpleNamespace) -> None:
    with refused(ValueError, "need as many GPUs"):
        checked_device("cuda", 4)
    rank.nccl = (2, 30, 7)
    assert share_gpu(way) == torch.device("cuda", 0)
    assert checked_device("cuda", 4) == "cuda"
    assert os.environ["LOCAL_RANK"] == "0" and os.environ["RANK"] == "3"
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    # Each way has its own variable: with both, NCCL would take the path between nodes.
    assert ("NCCL_HOSTID" in os.environ) == (way == "hostid")
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in os.environ) == (way == "multi")


def test_each_rank_is_a_host_and_the_users_network_is_kept(
    rank: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    hosts = set()
    for number in range(4):
        monkeypatch.setenv("RANK", str(number))
        share_gpu()
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 4
    assert (os.environ["NCCL_NET"], os.environ["NCCL_SOCKET_IFNAME"]) == ("Socket", "eth1")


def test_what_cannot_share_a_gpu_is_refused(
    rank: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(ValueError, "way must be one of|'mps'"):
        share_gpu("mps")  # type: ignore[arg-type]
    with refused(RuntimeError, "needs NCCL 2.30|NCCL 2.28.9 is loaded|LD_PRELOAD|'hostid'"):
        share_gpu("multi")
    rank.gpu = False
    with refused(RuntimeError, "torch finds none"):
        share_gpu()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with refused(RuntimeError, "before init_process_group"):
        share_gpu()
    monkeypatch.delenv("RANK")
    with refused(RuntimeError, "torchrun"):
        share_gpu()
    assert not any(name in os.environ for name in VARIABLES)


@pytest.mark.parametrize(
    ("way", "reported"),
    [("hostid", "--nccl hostid: .* torch finds none"), ("multi", "--nccl multi: .*finds none")],
)
def test_the_flag_without_a_gpu_is_refused_in_one_line(way: str, reported: str) -> None:
    config = SimpleNamespace(getoption=lambda name: way)
    with pytest.raises(pytest.UsageError, match=reported) as caught:
        conftest.pytest_configure(config)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1


def item(*marks: pytest.MarkDecorator) -> SimpleNamespace:
    found = {mark.name: mark.mark for mark in marks}
    return SimpleNamespace(get_closest_marker=found.get)


@pytest.mark.parametrize(
    ("marks", "without", "with_flag"),
    [
        ([], True, False),
        ([pytest.mark.gloo], True, False),
        ([pytest.mark.nccl], True, True),
        ([pytest.mark.nccl(only=True)], False, True),
    ],
)
def test_the_flag_chooses_the_tests(
    marks: list[pytest.MarkDecorator], without: bool, with_flag: bool
) -> None:
    test = item(*marks)
    assert conftest.runs_here(test, None) == without  # type: ignore[arg-type]
    assert conftest.runs_here(test, "hostid") == with_flag  # type: ignore[arg-type]


# Prints whether a fork could not use CUDA, and whether torch's compiler was imported, which asks
# for a GPU. In a torch without CUDA only the second can be True.
FORK = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
compiler = "torch._inductor.compile_fx" in sys.modules
if os.fork() == 0:
    print(torch.cuda._is_in_bad_fork(), compiler, flush=True)
    os._exit(0)
os.wait()
"""


def printed_by_a_fork(modules: list[str]) -> str:
    command = [sys.executable, "-c", FORK, *modules]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_ranks_are_forked_from_processes_that_have_not_asked_for_a_gpu() -> None:
    """Those of the tests over NCCL, and those of the stages of `python -m dev gpu`."""
    modules = [*pool.PRELOAD_CUDA, *plan.RANKS.split()]
    assert printed_by_a_fork(modules) == "False False\n"
    assert "True" in printed_by_a_fork(pool.PRELOAD)
