"""Runs `python -m dev gpu`: stages, preparation or recording."""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dev.gpu import device, plan
from dev.gpu.cells import Stage
from dev.gpu.options import CARRY
from dev.gpu.results import BAD, FILE, FILES, Results, counts, read_rows, with_verdict
from dev.gpu.schedule import Run
from dev.gpu.screen import screen


def run(args: argparse.Namespace) -> int:
    if args.record:
        from dev.gpu.record import record

        return record(args.record)
    if args.prepare:
        from dev.gpu.carry import prepare

        kernels = chosen(plan.stages(device.COMPILER), args.stages, args.only)
        return prepare(args.carry or CARRY, kernels, args.seconds, args.python)
    stages = chosen(plan.stages(args.device), args.stages, args.only)
    if args.list:
        print(*lines_of(stages), sep="\n")
        return 0
    return run_stages(args)


def run_stages(args: argparse.Namespace) -> int:
    """Run the stages and print the screen; 1 if a cell is bad."""
    from dev.gpu.carry import unpacked

    before = [] if args.before is None else read_rows(args.before)
    out = args.out.resolve()
    results = Results(out)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        files.mkdir()
        environment = device.environment(args.device) | {device.FOLDER: str(files)}
        # A trial on the CPU uses no kernel of a GPU; a carried folder is checked all the same.
        carry = args.carry or CARRY
        carried = unpacked(carry, Path(folder), args.device, needed=args.carry is not None)
        stages = chosen(plan.stages(args.device, device.CARRIED in carried), args.stages, args.only)
        made = Run(results, files, args.seconds, environment | carried)
        try:
            made.run(stages, with_verdict(before), lambda: pack(files, out / FILES))
        except KeyboardInterrupt:
            print("interrupted: what has run is in", out / FILE, file=sys.stderr)
        finally:
            made.close()
            pack(files, out / FILES)
    print(screen([*before, *results.rows]))
    return int(any(counts(results.rows)[state] for state in BAD))


def pack(folder: Path, target: Path) -> None:
    """Pack what workers have written: of a lent machine, only a few files come back."""
    temporary = target.with_name(f"{target.name}.part")
    with tarfile.open(temporary, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    temporary.replace(target)


def chosen(stages: Sequence[Stage], names: str | None, only: str | None) -> list[Stage]:
    """Return the stages of these names, in the plan's order, with cells that have a word.

    Raises:
        ValueError: no stage has a name.
    """
    known = [stage.name for stage in stages]
    wanted = known if names is None else names.split(",")
    wrong = [name for name in wanted if name not in known]
    if wrong:
        raise ValueError(f"--stages {names}: no stage {', '.join(wrong)}; use {', '.join(known)}")
    return [stage.having(only) for stage in stages if stage.name in wanted]


def lines_of(stages: Sequence[Stage]) -> list[str]:
    lines = []
    for stage in stages:
        lines.append(
            f"{stage.name}: {stage.seconds:g} s, {stage.workers} at a time: {stage.proves}"
        )
        lines += [f"    {cell.name}" for cell in stage.cells]
        lines += [f"    and those of {stage.lists}"] if stage.lists else []
    return lines
