"""`make release`: test the files of a release as a user gets them, before they are uploaded.

    twine      checks the metadata and the description of the wheel and the sdist
    install    installs the wheel in a fresh environment, with its own torch
    run        runs `ring-attn env` and examples/quickstart.py there, on two ranks, outside the
               checkout, with no other program in PATH: no compiler is needed

By default torch is from pip's index. --torch-index https://download.pytorch.org/whl/cpu selects the
CPU build, without the libraries of CUDA.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Warnings that a user would see in the first minute.
TROUBLE = ("Warning", "Traceback")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the files")
    parser.add_argument("--torch-index", metavar="URL", help="index for torch (default: pip's)")


def run(args: argparse.Namespace) -> int:
    files = sorted(args.dist.glob("ring_attn-*"))
    kinds = sorted(file.suffix for file in files)
    if kinds != [".gz", ".whl"]:
        raise ValueError(f"{args.dist} must hold one wheel and one sdist, got {files}: make wheel")
    step("twine", sys.executable, "-m", "twine", "check", "--strict", *files)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        bin_ = home / "venv/bin"
        install = (
            bin_ / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            ROOT / ".ci/constraints.txt",
        )
        index = ("--index-url", args.torch_index) if args.torch_index else ()
        step("torch", *install, *index, "torch")
        step("install", *install, files[-1])
        step("dependencies", bin_ / "python", "-m", "pip", "check")
        shutil.copy(ROOT / "examples/quickstart.py", home)
        alone = {"PATH": str(bin_), "HOME": folder, "OMP_NUM_THREADS": "1"}
        step("ring-attn env", bin_ / "ring-attn", "env", cwd=home, env=alone)
        printed = step("quickstart", bin_ / "python", "quickstart.py", cwd=home, env=alone)
    lines = [line for line in printed.splitlines() if any(word in line for word in TROUBLE)]
    if lines:
        raise ValueError(f"the quickstart warns: {lines}")
    print(printed)
    return 0


def step(
    name: str, *command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> str:
    """Run a command and return its output, which is the text of the error if it fails."""
    start = time.monotonic()
    if env is None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode != 0:
        raise ValueError(f"{name} failed: {done.stdout}")
    return done.stdout
