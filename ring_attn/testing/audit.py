"""`audit`: compares a user's training step on ranks with its twin in one process."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ring_attn.core.names import AUDITED_SIZES
from ring_attn.testing.diagnosis import Diagnosis, Runs, diagnose, distance, stacked
from ring_attn.testing.launch import run_ranks
from ring_attn.testing.observe import Change, Outcome, run_step
from ring_attn.testing.rounding import rounding_bound
from ring_attn.values.checks import as_ints

# Runs of the twin with random roundings.
NUM_NOISY = 8


@dataclass(frozen=True)
class Report:
    """Diagnoses of a step by world size."""

    diagnoses: tuple[Diagnosis, ...]

    @property
    def ok(self) -> bool:
        """Tells whether each result of the ranks is the twin's within its bound."""
        return not any(x.differences for x in self.diagnoses)

    def __str__(self) -> str:
        lines = [f"audit: {'ok' if self.ok else 'FAILED'}"]
        for one in self.diagnoses:
            count = len(one.differences)
            lines.append(f"{one.world_size} ranks: {count} results differ from the twin's")
            lines += [f"  {finding.contract}: {finding.text}" for finding in one.findings]
            if one.unexplained:
                lines.append(f"  not explained: {len(one.unexplained)} results, the worst are")
                worst = sorted(one.unexplained, key=lambda key: -one.differences[key].ratio)
                lines += [f"    {one.differences[key]}" for key in worst[:4]]
        return "\n".join(lines)


def audit(
    step: Callable[[], Any] | str,
    world_size: int | Sequence[int] = AUDITED_SIZES,
    *,
    timeout: float = 120.0,
) -> Report:
    """Compare a training step on ranks with the same step in one process, and says what is wrong.

    The step runs as it is written, in processes over gloo, and in one process as its twin, whose
    batch is that of all ranks together. It makes the model (small, from a seed) and the batch, runs
    forward and backward, and sums gradients; it may clip, step an optimizer and evaluate. Compared
    are losses, gradients before they are clipped, and weights at the end. Bounds follow from runs
    of the twin whose results are rounded at random.

    Args:
        step: a function without arguments at the top level of a module, or "file.py:function". It
            returns its model, or (model, loss), or (model, loss, evaluation loss).
        world_size: numbers of ranks.
        timeout: seconds that a run of the step may take.

    Returns:
        The report: `ok`, and a diagnosis of each world size; `print` shows it.

    Raises:
        ValueError: no world sizes, no such file, or ranks exist already (torchrun).
        AttributeError: ranks cannot import the function by its name; or pickle's own error.
        RuntimeError: the step raised on a rank, whose traceback the text has, does not return a
            model, or needs more memory than there is; or two runs of the twin differ.
        TimeoutError: ranks hang.
    """
    sizes = (world_size,) if isinstance(world_size, int) else as_ints("world_size", world_size)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"world_size must be numbers of at least 2 ranks, got {world_size}")
    function = in_file(step) if isinstance(step, str) else step

    def runs(changes: Sequence[Mapping[int, Change]], num: int) -> list[list[Outcome]]:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num
        given = (run_step, num, function, changes, limit)
        start = 60.0  # seconds, of processes and their imports
        ranks = run_ranks(*given, device="cpu", timeout=timeout * len(changes) + start)
        return [list(run) for run in zip(*ranks, strict=True)]

    return judge(sizes, runs)


def judge(sizes: Sequence[int], runs: Runs) -> Report:
    """Return the report on a step that `runs` runs."""
    noises = [{0: {("noise",): i}} for i in range(NUM_NOISY)]
    twin, again, *noisy = (run[0] for run in runs([{}, {}, *noises], 1))
    right = twin.results
    ulps = {key: torch.finfo(x.dtype).eps * float(x.double().norm()) for key, x in right.items()}
    moved = {
        key: [distance(stacked(key, twin, [run]), x) for run in (again, *noisy)]
        for key, x in right.items()
    }
    if differing := [key for key, ulp in ulps.items() if moved[key][0] > ulp]:
        raise RuntimeError(
            f"two runs of the twin differ in {len(differing)} results: weights, batches or dropout "
            "are drawn without a seed, or time counts"
        )
    # A noisy run and the twin differ by one set of roundings, the ranks and the twin by two.
    bounds = {
        key: rounding_bound([math.sqrt(2) * x for x in distances[1:]], ulps[key])
        for key, distances in moved.items()
    }
    return Report(tuple(diagnose(bounds, twin, runs([{}], size)[0], runs) for size in sizes))


def in_file(step: str) -> Callable[[], Any]:
    path, _, name = step.rpartition(":")
    if not (path.endswith(".py") and name.isidentifier() and Path(path).is_file()):
        raise ValueError(f"step must be a function or 'file.py:function' of a file, got {step!r}")
    return partial(_call, Path(path).resolve(), name)


def _call(path: Path, name: str) -> Any:
    if getattr(sys.modules.get(path.stem), "__file__", None) != str(path):
        sys.path.insert(0, str(path.parent))
        sys.modules.pop(path.stem, None)  # another module of that name would hide it
    return getattr(importlib.import_module(path.stem), name)()
