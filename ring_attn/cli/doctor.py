"""`ring-attn doctor`: whether this machine is ready, and what mends what is not."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from ring_attn import select_backend
from ring_attn.attention.first_use import proven_backend
from ring_attn.backends import Purpose
from ring_attn.cli.arguments import write_json
from ring_attn.cli.env import VARIABLES, machine
from ring_attn.cli.verify import CaseResult, run_case
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
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

# Kinds of calls: words, dtype, whether a backward follows, and options of `select_backend`.
DOCUMENTS = Mask(256, 256, True, (-1, -1), (0, 100, 256), (0, 100, 256))
CALLS: tuple[tuple[str, str, bool, dict[str, Any]], ...] = (
    ("training", "bfloat16", True, {}),
    ("training, same_bits=True", "bfloat16", True, {"same_bits": True}),
    ("training on packed documents", "bfloat16", True, {"mask": DOCUMENTS}),
    ("training with softcap", "bfloat16", True, {"softcap": 30.0}),
    ("inference", "bfloat16", False, {}),
    ("inference in float16", "float16", False, {}),
    ("training in float32", "float32", True, {}),
    ("training in float64", "float64", True, {}),
)

# Variables of NCCL -> a value that slows or breaks a ring, and why.
HARMFUL = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine then exchange through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine then exchange over the network"),
    "NCCL_IB_DISABLE": ("1", "nodes then exchange over TCP"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host then waits for each kernel: nothing overlaps"),
}

# Variables that name a file -> the command that writes one.
FILES = {"RING_ATTN_CONFIGS": "ring-attn tune", "RING_ATTN_CLUSTER": "ring-attn calibrate"}


@dataclass(frozen=True)
class Finding:
    """A line of the report: `state` is "ok", "note" (missing, or slow) or "wrong"."""

    name: str
    state: str
    text: str
    mend: str = ""  # what to do


def run(args: argparse.Namespace) -> int:
    world_size = env_int("WORLD_SIZE", RANKS) if under_torchrun() else RANKS
    device = checked_device(None, world_size)
    here = machine()
    found = [*_machine(here, device), *_backends(device), *_nccl(here)]
    if not args.quick:
        found += _ranks(world_size, device)
    write_json(args.json, {
        "command": "doctor", "machine": here, "findings": [*map(asdict, found)],
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    })  # fmt: skip
    _show(found, quiet=args.quiet)
    return int(any(finding.state == "wrong" for finding in found))


def _ranks(world_size: int, device: str) -> Iterator[Finding]:
    """A ring of all ranks, and what differs between them."""
    started = time.perf_counter()
    try:
        ranks = run_ranks(_on_rank, world_size, threads=1, device=device)
    except RuntimeError as error:
        text = f"{world_size} ranks on {device}: {str(error).strip().splitlines()[-1]}"
        yield Finding("ring", "wrong", text, "ring-attn verify --quick shows all of it")
    else:
        yield _ring(ranks[0][1], world_size, device, time.perf_counter() - started)
        yield from _differences([told for told, _ in ranks])


def _machine(here: dict[str, Any], device: str) -> Iterator[Finding]:
    names = ("ring_attn", "python", "torch", "cuda", "rocm", "triton", "flash_attn")
    versions = ", ".join(f"{n} {here['versions'][n]}" for n in names if here["versions"][n])
    yield Finding("versions", "ok", versions)
    yield Finding("machine", "ok", f"{here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB")
    for name, command in FILES.items():
        path = os.environ.get(name)
        if path and not os.path.isfile(path):
            mend = f"unset {name}, or {command} --json {path}"
            yield Finding(name, "wrong", f"there is no file {path}", mend)
    if not here["devices"]:
        built = here["versions"]["cuda"] or here["versions"]["rocm"]
        mend = "" if built else "install a torch for your GPU, if there is one: pytorch.org"
        yield Finding("GPUs", "note", "none that torch can use: ranks are on the CPU", mend)
        return
    for gpu in here["devices"]:
        yield Finding("GPU", "ok", f"{gpu['name']}, compute capability {gpu['capability']}")
    if device == "cpu":
        text = f"{len(here['devices'])} GPUs: the ring below is on the CPU"
        mend = "for tests over NCCL, ring_attn.testing.share_gpu lets ranks share a GPU"
        yield Finding("ranks", "note", text, mend)


def _backends(device: str) -> Iterator[Finding]:
    """The backend of each kind of call, those with one answer together."""
    answers: dict[tuple[str, str], list[str]] = {}
    for words, dtype, backward, options in CALLS:
        q = torch.empty(1, 256, 8, 128, dtype=getattr(torch, dtype), device=device)
        choice = select_backend(q.requires_grad_(backward), q, q, **options)
        answers.setdefault((choice.name, choice.why), []).append(words)
    spec = AttentionSpec.of(
        q := torch.empty(1, 1, 8, 128, dtype=torch.bfloat16, device=device), q, q
    )
    choice = proven_backend(spec, "auto", Purpose(decoding=True))
    answers.setdefault((choice.name, choice.why), []).append("decoding")
    for (name, why), calls in answers.items():
        yield Finding("backend", "ok", f"{name} for {', '.join(calls)}: {why}")


def _nccl(here: dict[str, Any]) -> Iterator[Finding]:
    if here["devices"] and under_torchrun() and os.environ.get(LAUNCH_ORDER) != "1":
        text = "is not 1: kernels of several communicators can wait for each other for ever"
        yield Finding(LAUNCH_ORDER, "wrong", text, f"export {LAUNCH_ORDER}=1")
    for name, (value, why) in HARMFUL.items():
        if os.environ.get(name) == value:
            yield Finding(name, "note", f"is {value}: {why}", f"unset {name}")


def _on_rank() -> tuple[dict[str, Any], CaseResult]:
    """Facts that may not differ between ranks, and the verdict about a ring of all of them."""
    here = machine()
    facts = {f"version of {name}": version for name, version in here["versions"].items()}
    facts |= {"GPU": [gpu["name"] for gpu in here["devices"]][:1]}
    ours = (name for name in VARIABLES if name.startswith(("RING_ATTN_", "NCCL_", "TORCH_NCCL")))
    facts |= {name: os.environ.get(name) for name in ours}
    told = {"rank": dist.get_rank(), "host": socket.gethostname(), "facts": facts}
    dtype = "bfloat16" if rank_device().type == "cuda" else "float32"
    return told, run_case(Case("causal", "zigzag", "ring", "auto", dtype, "gqa"))


def _ring(result: CaseResult, world_size: int, device: str, seconds: float) -> Finding:
    where = f"{world_size} ranks on {device}, {seconds:.1f} s"
    if result.status != "passed":
        wrong = [str(verdict) for verdict in result.verdicts if not verdict.ok]
        rank, _, trace = (result.error or "").partition("Traceback")
        text = rank + trace.strip().rpartition("\n")[2] or result.refused or "; ".join(wrong)
        mend = "ring-attn verify --quick shows all of it"
        return Finding("ring", "wrong", f"{where}: {text}", mend)
    most = max(verdict.ratio for verdict in result.verdicts)
    return Finding("ring", "ok", f"{where}: largest error / bound {most:.2f}")


def _differences(ranks: list[dict[str, Any]]) -> Iterator[Finding]:
    """The ranks that differ from most others, with their hosts."""
    for name in ranks[0]["facts"]:
        values = [repr(told["facts"][name]) for told in ranks]
        usual = max(values, key=values.count)
        for told, value in zip(ranks, values, strict=True):
            if value != usual:
                who = f"rank {told['rank']} on {told['host']}"
                text = f"{who} has {value}, most ranks have {usual}"
                # Settings of NCCL may follow the host's network.
                state = "note" if "NCCL_" in name else "wrong"
                yield Finding(name, state, text, "make all ranks alike")


STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def _show(found: list[Finding], *, quiet: bool) -> None:
    console = Console(highlight=False)
    for finding in found:
        if quiet and finding.state == "ok":
            continue
        mend = f"\n      -> {finding.mend}" if finding.mend else ""
        line = f"{finding.state:<5} {finding.name}: {finding.text}{mend}"
        console.print(Text.assemble((line[:5], STYLES[finding.state]), line[5:]))
    wrong = sum(finding.state == "wrong" for finding in found)
    print(f"{wrong} wrong" if wrong else "ready")
