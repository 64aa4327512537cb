"""`make release`: tries the files of a release as a user gets them, before anybody uploads them.

    twine      checks the metadata and the description of the wheel and the sdist
    install    the wheel in a fresh environment, with torch of its own
    run        `ring-attn env` and examples/quickstart.py there, on two ranks, outside of the
               checkout, with no other program to be found: no compiler is needed

torch comes from pip's index; --torch-index https://download.pytorch.org/whl/cpu takes its CPU
build, without CUDA's libraries.
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
        bin_, pip = home / "venv/bin", (home / "venv/bin/python", "-m", "pip", "install", "-q")
        index = ("--index-url", args.torch_index) if args.torch_index else ()
        step("torch", *pip, "-c", ROOT / ".ci/constraints.txt", *index, "torch")
        step("install", *pip, "-c", ROOT / ".ci/constraints.txt", files[-1])
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
    """Runs a command and returns what it prints, which is the error if it fails."""
    start = time.monotonic()
    variables = {k: x for k, x in os.environ.items() if k != "PYTHONPATH"} if env is None else env
    done = subprocess.run(
        command, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode != 0:
        raise ValueError(f"{name} failed: {done.stdout}")
    return done.stdout
