"""Versions, hardware, and the backends that can run, for `ring-attn env` and for every report."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from ring_attn.cli.arguments import write_json
from ring_attn.testing.cases import backend_reasons
from ring_attn.testing.launch import num_cores
from ring_attn.version import __version__, installed_version

# Versions are read from metadata, because an import of triton or flash-attn may fail or take
# seconds.
PACKAGES = (
    "numpy",
    "triton",
    "flash-attn",
    "einops",
    "rich",
    "transformers",
    "accelerate",
    "matplotlib",
)

VARIABLES = (
    "RING_ATTN_CLUSTER",
    "RING_ATTN_CONFIGS",
    "RING_ATTN_DEBUG",
    "RING_ATTN_FIRST_USE",
    "RING_ATTN_STATS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "NCCL_DEBUG",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)


class Gpu(TypedDict):
    """A GPU that torch can use."""

    name: str
    memory_bytes: int
    multiprocessors: int
    capability: str


class Machine(TypedDict):
    """Versions and hardware, ready for JSON."""

    versions: dict[str, str | None]
    os: str
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    devices: list[Gpu]
    distributed: list[str]


def machine() -> Machine:
    """Return the versions and the hardware of this machine."""
    return {
        "versions": _versions(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": _gpus(),
        "distributed": _distributed_backends(),
    }


def run(args: argparse.Namespace) -> int:
    """Print the report; with --quiet, only the versions."""
    here = machine()
    report = {
        "machine": here,
        "backends": backend_reasons(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }
    write_json(args.json, {"command": "env", **report})
    if args.quiet:
        installed = {name: version for name, version in here["versions"].items() if version}
        print(" ".join(f"{name}={version}" for name, version in installed.items()))
    else:
        print(json.dumps(report, indent=2))
    return 0


def _versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for packages that are not installed."""
    versions: dict[str, str | None] = {
        "ring_attn": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }
    return versions | {name.replace("-", "_"): installed_version(name) for name in PACKAGES}


def _cpu_model() -> str:
    """Return the name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[Gpu]:
    """Return the GPUs that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    all_properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [
        {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
        for properties in all_properties
    ]


def _distributed_backends() -> list[str]:
    """Return the backends of torch.distributed that this torch has."""
    names = ("gloo", "nccl", "mpi")
    return [name for name in names if getattr(dist, f"is_{name}_available")()]
