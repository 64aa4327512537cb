"""The options of `python -m dev gpu`, without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from dev.gpu.device import CPU, CUDA, STUB

SECONDS = 540.0
CARRY = Path(".carry")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Run the stages on this machine's GPU, so that a short time there is not lost.

        python -m dev gpu --prepare                 before, without a GPU: writes .carry/
        python -m dev gpu --seconds 220 --out first
        python -m dev gpu --seconds 215 --out second --before first/results.jsonl
        python -m dev gpu --record first/results.jsonl second/results.jsonl

    A stage has cells. Each is run by a worker process that is watched from outside: a hang, a
    crash or an illegal access costs one cell. A line of OUT/results.jsonl is on disk before and
    after each cell. A second run with --before leaves out cells that have a verdict.
    CONTRIBUTING.md, "When a GPU is there", says what to look at first. The exit status is 1 if a
    cell failed.

    --device stub needs a C compiler and no GPU: Triton's driver and launcher run over a stub of
    libcuda, which checks launches and tensor maps by CUDA's rules. Repeats of launches are compared
    with new launches, and arguments with the signatures of torch. Nothing is computed, so no
    numbers are compared: a cell ends as "launched", never as "ok". With a carried folder, a kernel
    that is missing there fails its cell.

    --prepare compiles what the stages launch for sm_90 and packs it, with libraries to compare
    with. Use the GPU machine's version of triton, and name its Python; run it with that Python to
    pack Triton's launchers, too. It goes on where an earlier one ended. --stages and --only choose
    what is compiled.
    """
    add = parser.add_argument
    seconds = f"of the whole run (default: {SECONDS:g})"
    add("--seconds", type=float, default=SECONDS, metavar="N", help=seconds)
    folder = Path("gpu-results")
    add("--out", type=Path, default=folder, metavar="DIR", help=f"results (default: {folder})")
    add("--stages", metavar="A,B", help="only these (default: all)")
    add("--only", metavar="WORD", help="only cells whose name has the word")
    add("--before", type=Path, metavar="FILE", help="results.jsonl of an earlier run, to go on")
    device = (
        f"{CPU} is a trial with Triton's interpreter, gloo and small sizes; {STUB} is a trial of "
        f"what is launched, see above (default: {CUDA})"
    )
    add("--device", choices=(CUDA, CPU, STUB), default=CUDA, help=device)
    carry = f"default: {CARRY}, if it is there; a named one must be there, and for this triton"
    add("--carry", type=Path, metavar="DIR", help=carry)
    add("--prepare", action="store_true", help="make the carried folder, without a GPU")
    add("--python", default="3.12", metavar="X.Y", help="with --prepare: of that machine (3.12)")
    add("--list", action="store_true", help="print the stages and their cells")
    words = "write measured figures of these results.jsonl into the tables"
    add("--record", type=Path, nargs="+", metavar="FILE", help=words)
    parser.set_defaults(quiet=True)  # the run prints a line for each cell
