"""`ring-attn doctor`: check whether this machine is ready, and how to repair it."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from ring_attn.api import select_backend
from ring_attn.cli.arguments import write_json
from ring_attn.cli.env import VARIABLES, Gpu, Machine, machine
from ring_attn.cli.verify import CaseResult, run_case
from ring_attn.core.mask import Mask
from ring_attn.testing import Case
from ring_attn.testing.launch import (
    LAUNCH_ORDER,
    checked_device,
    rank_device,
    run_ranks,
    under_torchrun,
)
from ring_attn.values.outside import env_int

RANKS = 2

DOCUMENTS = Mask(
    256,
    256,
    causal=True,
    cu_seqlens_q=(0, 100, 256),
    cu_seqlens_k=(0, 100, 256),
)


class CallKind(NamedTuple):
    """A kind of calls, for which a backend is chosen."""

    words: str
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True
    same_bits: bool | None = None
    mask: Mask | None = None
    softcap: float = 0.0


CALLS = (
    CallKind("training"),
    CallKind("training, same_bits=True", same_bits=True),
    CallKind("training on packed documents", mask=DOCUMENTS),
    CallKind("training with softcap", softcap=30.0),
    CallKind("inference", backward=False),
    CallKind("inference in float16", dtype=torch.float16, backward=False),
    CallKind("training in float32", dtype=torch.float32),
    CallKind("training in float64", dtype=torch.float64),
)

# Variables of NCCL -> a value that slows or breaks a ring, and why.
HARMFUL = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine then exchange through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine then exchange over the network"),
    "NCCL_IB_DISABLE": ("1", "nodes then exchange over TCP"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host then waits for each kernel: nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "copies and kernels of all streams then run in one queue"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host then waits for each message: nothing overlaps"),
    "TORCH_NCCL_HIGH_PRIORITY": ("1", "process groups then share the 32 streams of our exchanges"),
}

# Streams that CUDA runs at a time at most, and its default. An exchange under way has two streams.
QUEUES, QUEUES_VARIABLE = 32, "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES = 8

# Channels that a group of several nodes asks of NCCL for each peer on another node. By itself NCCL
# takes 1 or 2, which copy 20 to 45 GB/s, an estimate; 32 hang in NCCL 2.28.9 (NVIDIA/nccl#1915).
NET_CHANNELS, NET_CHANNELS_VARIABLE = 4, "NCCL_NCHANNELS_PER_NET_PEER"


class OptionalPackage(NamedTuple):
    """A package without which ring_attn works, but lacks a feature."""

    feature: str
    install: str
    needs_gpu: bool = False


OPTIONAL = {
    "triton": OptionalPackage("our kernels", "pip install triton"),
    "flash_attn": OptionalPackage(
        "the backend flash_attn", "pip install 'ring-attn[flash]'", needs_gpu=True
    ),
    "transformers": OptionalPackage("models of Hugging Face", "pip install 'ring-attn[hf]'"),
    "accelerate": OptionalPackage(
        "the Trainer of Hugging Face", "pip install 'ring-attn[trainer]'"
    ),
    "matplotlib": OptionalPackage("pictures (--plot)", "pip install 'ring-attn[plot]'"),
}

# Variables that name a file -> the command that writes such a file.
FILES = {"RING_ATTN_CONFIGS": "ring-attn tune", "RING_ATTN_CLUSTER": "ring-attn calibrate"}


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what was checked.
        state: "ok", "note" (missing, or slow) or "wrong".
        text: the result.
        mend: what to do; "" if nothing is wrong.
    """

    name: str
    state: str
    text: str
    mend: str = ""


class RankFacts(TypedDict):
    """A rank, and facts that must be the same on all ranks."""

    rank: int
    host: str
    facts: dict[str, object]


def run(args: argparse.Namespace) -> int:
    """Check the machine and print the report; return 1 if something is wrong."""
    world_size = env_int("WORLD_SIZE", RANKS) if under_torchrun() else RANKS
    device = checked_device(None, world_size)
    here = machine()
    found = [*_machine(here, device), *_backends(device), *check_nccl(here)]
    if not args.quick:
        found += _ranks(world_size, device)
    report = {
        "command": "doctor",
        "machine": here,
        "findings": [asdict(finding) for finding in found],
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    write_json(args.json, report)
    _show(found, quiet=args.quiet)
    return 1 if any(finding.state == "wrong" for finding in found) else 0


def _ranks(world_size: int, device: str) -> Iterator[Finding]:
    """Run a ring of all ranks, and compare the ranks."""
    started = time.perf_counter()
    try:
        ranks = run_ranks(_on_rank, world_size, threads=1, device=device)
    except RuntimeError as error:
        text = f"{world_size} ranks on {device}: {str(error).strip().splitlines()[-1]}"
        yield Finding("ring", "wrong", text, "ring-attn verify --quick shows the whole error")
    else:
        _, result = ranks[0]
        yield _ring(result, world_size, device, time.perf_counter() - started)
        yield from _differences([facts for facts, _ in ranks])


def _machine(here: Machine, device: str) -> Iterator[Finding]:
    """Report versions, hardware, files of variables, and GPUs."""
    names = ("ring_attn", "python", "torch", "cuda", "rocm")
    versions = here["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in names if versions[name])
    yield Finding("versions", "ok", shown)
    yield Finding("machine", "ok", f"{here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB")
    yield from check_packages(here)
    for name, command in FILES.items():
        path = os.environ.get(name)
        if path and not os.path.isfile(path):
            mend = f"unset {name}, or {command} --json {path}"
            yield Finding(name, "wrong", f"there is no file {path}", mend)
    if not here["devices"]:
        is_built_for_gpus = versions["cuda"] or versions["rocm"]
        mend = "" if is_built_for_gpus else "for a GPU, install the torch for it: pytorch.org"
        yield Finding("GPUs", "note", "torch can use none: ranks are on the CPU", mend)
        return
    yield from check_gpus(here["devices"])
    yield from check_links(len(here["devices"]))
    if device == "cpu":
        text = f"{len(here['devices'])} GPUs: the ring below is on the CPU"
        mend = "for tests over NCCL, ring_attn.testing.share_gpu lets ranks share a GPU"
        yield Finding("ranks", "note", text, mend)


def check_packages(here: Machine) -> Iterator[Finding]:
    """Report the optional packages: the installed ones, and what is missing without the others."""
    installed = {name: here["versions"][name] for name in OPTIONAL if here["versions"][name]}
    if installed:
        shown = ", ".join(f"{name} {version}" for name, version in installed.items())
        yield Finding("optional packages", "ok", shown)
    for name, package in OPTIONAL.items():
        if name not in installed and (here["devices"] or not package.needs_gpu):
            text = f"not installed, needed for {package.feature}"
            yield Finding(name, "note", text, package.install)


def check_gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    """Report the GPUs; GPUs of the same model share a line."""
    models = [
        f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
        f"compute capability {gpu['capability']}"
        for gpu in gpus
    ]
    for model in dict.fromkeys(models):
        yield Finding("GPUs", "ok", f"{models.count(model)} x {model}")


def check_links(num_gpus: int) -> Iterator[Finding]:
    """Report whether the GPUs of this machine can read each other's memory."""
    pairs = [*permutations(range(num_gpus), 2)]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        first, second = apart[0]
        text = (
            f"{len(apart)} of {len(pairs)} pairs of GPUs cannot read each other's memory, such as "
            f"GPU {first} and GPU {second}: they exchange through the host's memory"
        )
        yield Finding("links", "note", text, "nvidia-smi topo -m shows how they are connected")
    elif pairs:
        yield Finding("links", "ok", "each GPU can read the memory of all others")


def _backends(device: str) -> Iterator[Finding]:
    """Report the backend of each kind of call; kinds with the same answer share a line."""
    answers: dict[tuple[str, str], list[str]] = {}
    for kind in CALLS:
        q = torch.empty(1, 256, 8, 128, dtype=kind.dtype, device=device)
        q.requires_grad_(kind.backward)
        choice = select_backend(
            q, q, q, same_bits=kind.same_bits, mask=kind.mask, softcap=kind.softcap
        )
        answers.setdefault((choice.name, choice.why), []).append(kind.words)
    token = torch.empty(1, 1, 8, 128, dtype=torch.bfloat16, device=device)
    choice = select_backend(token, token, token, decoding=True)
    answers.setdefault((choice.name, choice.why), []).append("decoding")
    for (name, why), calls in answers.items():
        yield Finding("backend", "ok", f"{name} for {', '.join(calls)}: {why}")


def check_nccl(here: Machine) -> Iterator[Finding]:
    """Report variables of NCCL that slow or break a ring."""
    if here["devices"] and under_torchrun() and os.environ.get(LAUNCH_ORDER) != "1":
        text = "is not 1: kernels of several communicators can wait for each other forever"
        yield Finding(LAUNCH_ORDER, "wrong", text, f"export {LAUNCH_ORDER}=1")
    several_nodes = env_int("WORLD_SIZE", 1) > env_int("LOCAL_WORLD_SIZE", 1)
    if under_torchrun() and several_nodes and NET_CHANNELS_VARIABLE not in os.environ:
        text = "is not set: NCCL takes 1 or 2 channels for each peer of a group of several nodes"
        remedy = f"export {NET_CHANNELS_VARIABLE}={NET_CHANNELS}"
        yield Finding(NET_CHANNELS_VARIABLE, "note", text, remedy)
    queues = env_int(QUEUES_VARIABLE, DEFAULT_QUEUES)
    if here["devices"] and under_torchrun() and 1 < queues < QUEUES:
        text = (
            f"lets CUDA run {queues} streams at a time; a ring has 6, a double ring 10, and FSDP "
            "some more: false waits"
        )
        yield Finding(QUEUES_VARIABLE, "note", text, f"export {QUEUES_VARIABLE}={QUEUES}")
    for name, (value, why) in HARMFUL.items():
        if os.environ.get(name) == value:
            yield Finding(name, "note", f"is {value}: {why}", f"unset {name}")


def _on_rank() -> tuple[RankFacts, CaseResult]:
    """Return facts that must be the same on all ranks, and the result of a ring of all ranks."""
    here = machine()
    facts: dict[str, object] = {
        f"version of {name}": version for name, version in here["versions"].items()
    }
    facts["GPU"] = [gpu["name"] for gpu in here["devices"]][:1]
    for name in VARIABLES:
        if name.startswith(("RING_ATTN_", "NCCL_", "TORCH_NCCL")):
            facts[name] = os.environ.get(name)
    this_rank = RankFacts(rank=dist.get_rank(), host=socket.gethostname(), facts=facts)
    dtype = "bfloat16" if rank_device().type == "cuda" else "float32"
    return this_rank, run_case(Case("causal", "zigzag", "ring", "auto", dtype, "gqa"))


def _ring(result: CaseResult, world_size: int, device: str, seconds: float) -> Finding:
    """Report the result of a ring of all ranks."""
    where = f"{world_size} ranks on {device}, {seconds:.1f} s"
    if result.status == "passed":
        largest = max(verdict.ratio for verdict in result.verdicts)
        return Finding("ring", "ok", f"{where}: largest error / bound {largest:.2f}")
    wrong = [str(verdict) for verdict in result.verdicts if not verdict.ok]
    rank, _, trace = (result.error or "").partition("Traceback")
    last_line = trace.strip().rpartition("\n")[2]
    text = rank + last_line or result.refused or "; ".join(wrong)
    mend = "ring-attn verify --quick shows the whole error"
    return Finding("ring", "wrong", f"{where}: {text}", mend)


def _differences(ranks: list[RankFacts]) -> Iterator[Finding]:
    """Report the ranks that differ from most others, with their hosts."""
    for name in ranks[0]["facts"]:
        values = [repr(each["facts"][name]) for each in ranks]
        usual = max(values, key=values.count)
        for each, value in zip(ranks, values, strict=True):
            if value != usual:
                which = f"rank {each['rank']} on {each['host']}"
                text = f"{which} has {value}, most ranks have {usual}"
                # Settings of NCCL may follow the host's network.
                state = "note" if "NCCL_" in name else "wrong"
                yield Finding(name, state, text, "use the same on all ranks")


STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def _show(found: list[Finding], *, quiet: bool) -> None:
    """Print the report; with `quiet`, only what is not ok."""
    console = Console(highlight=False)
    for finding in found:
        if quiet and finding.state == "ok":
            continue
        mend = f"\n      -> {finding.mend}" if finding.mend else ""
        state = f"{finding.state:<5}"
        rest = f" {finding.name}: {finding.text}{mend}"
        console.print(Text.assemble((state, STYLES[finding.state]), rest))
    num_wrong = sum(finding.state == "wrong" for finding in found)
    print(f"{num_wrong} wrong" if num_wrong else "ready")
