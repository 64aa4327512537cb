"""Profiles of kernels by Nsight Compute, and the configs that `ring-attn tune` finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from dev.gpu.device import FOLDER

# The message of ncu where a user, or a virtual machine, may not read counters.
NO_COUNTERS = "ERR_NVGPUCTRPERM"

SECTIONS = (
    "SpeedOfLight",
    "WarpStateStats",
    "SchedulerStats",
    "MemoryWorkloadAnalysis",
    "SourceCounters",
)


def profile(kernel: str, direction: str) -> Figures:
    """Profile one launch of a kernel at the sizes of the speeds; the report is a file."""
    device.need_cuda("Nsight Compute")
    if shutil.which("ncu") is None:
        raise NotHere("ncu is not installed")
    report = folder() / f"ncu_{kernel}.txt"
    sections = [word for name in SECTIONS for word in ("--section", name)]
    program = [sys.executable, "-m", "dev.gpu.profiles", direction]
    options = ["--clock-control", "none", "-c", "1", "-k", f"regex:{kernel}"]
    try:
        printed = _run("ncu", *options, *sections, *program)
    except RuntimeError as error:
        if NO_COUNTERS in str(error):
            raise NotHere(f"ncu may not read the counters of this GPU: {error}") from None
        raise
    report.write_text(printed)
    if kernel not in printed:
        raise RuntimeError(f"ncu saw no launch of {kernel}: {printed[-1500:]}")
    return {"report": report.name}


def one_call(direction: str) -> None:
    """A call of the kernels at the sizes of the speeds; ncu runs this in a process of its own."""
    from dev.gpu.speed import make, problem_of

    problem = problem_of(16384, 32, 8, 128, "causal")
    attention = make("ours", problem, problem.data())
    attention.forward()
    if direction == "backward":
        attention.backward()


def tune(seconds: float) -> Figures:
    """Find the fastest configs; the file of RING_ATTN_CONFIGS is one of the run."""
    found = folder() / "tune.json"
    options = ["--budget", str(seconds), "--json", str(found)]
    if device.is_trial():
        options += ["--device", "cpu", "--quick"]
    printed = _run(sys.executable, "-m", "ring_attn", "tune", *options)
    return {"file": found.name, "printed": printed[-2000:]}


def folder() -> Path:
    return Path(os.environ.get(FOLDER, "."))


def _run(*command: str) -> str:
    """Run a program in the worker's process group; return what it prints, or raise with it."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    one_call(sys.argv[1])
