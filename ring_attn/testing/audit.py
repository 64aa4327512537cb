"""`audit`: compares a user's training step on ranks with its twin in one process."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ring_attn.cli.launch import run_ranks, under_torchrun
from ring_attn.core.names import AUDITED_SIZES
from ring_attn.core.values import as_ints
from ring_attn.testing.diagnosis import Diagnosis, Finding, Runs, diagnose, distance, stacked
from ring_attn.testing.observe import IGNORED, Change, Outcome, run_step

# Runs of the twin with random roundings, from which bounds follow. One more such run would be
# farther than all three in a quarter of cases: hence bounds are twice the farthest.
NOISY = 3

# Seconds of a launch beside its runs: the start of processes and imports.
START = 60.0


@dataclass(frozen=True)
class Report:
    """Diagnoses by world size, none if the twin is not deterministic; findings about the twin."""

    step: str
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Tells whether each result of the ranks is the twin's within its bound."""
        return not self.findings and not any(x.differences for x in self.diagnoses)

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.step}: {'ok' if self.ok else 'FAILED'}", *map(str, self.findings)]
        for one in self.diagnoses:
            count = f"{len(one.differences)} results differ from the twin's"
            within = "all results are the twin's within their bounds"
            lines.append(f"{one.world_size} ranks: {count if one.differences else within}")
            lines += map(str, one.findings)
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
    tiny: bool = False,
) -> Report:
    """Compares a training step on ranks with the same step in one process, and says what is wrong.

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
        tiny: make models of transformers with 2 layers, few heads and random weights, whatever the
            step asks of from_pretrained or from_config.

    Returns:
        The report: `ok`, `findings`, a diagnosis of each world size; `print` shows it.

    Raises:
        ValueError: no world sizes, or a function that cannot be found by name.
        RuntimeError: the step raised on a rank, whose traceback the text has, does not return a
            model, or needs more memory than is free; or ranks exist already (torchrun).
        TimeoutError: ranks hang; they wrote their stacks to stderr.
    """
    sizes = (world_size,) if isinstance(world_size, int) else as_ints("world_size", world_size)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"world_size must be numbers of at least 2 ranks, got {world_size}")
    if under_torchrun():
        raise RuntimeError("audit starts its own ranks: run it by python, not by torchrun")
    name = step if isinstance(step, str) else getattr(step, "__qualname__", repr(step))
    function = in_file(step) if isinstance(step, str) else step
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"step must be a function at the top level of a module, as ranks import it: {error}"
        ) from None
    return judge(name, sizes, partial(_run, function, timeout, tiny))


def judge(name: str, sizes: Sequence[int], runs: Runs) -> Report:
    """The report on a step that `runs` runs."""
    noises = [{0: {("noise",): i}} for i in range(NOISY)]
    twin, again, *noisy = (run[0] for run in runs([{}, {}, *noises], 1))
    right = twin.results
    ulps = {key: torch.finfo(x.dtype).eps * float(x.double().norm()) for key, x in right.items()}
    far = {key: distance(stacked(key, twin, [again]), x) for key, x in right.items()}
    if differing := [key for key, ulp in ulps.items() if far[key] > ulp]:
        text = f"two runs of the twin differ in {len(differing)} results: weights, batches or "
        text += "dropout are drawn without a seed (seed in the step, set dropout's p to 0), or "
        text += "something depends on time or order"
        return Report(name, (), (Finding("determinism", text, "the twin ran twice"),))
    bounds = {
        key: 2 * distance(stacked(key, twin, noisy), x) + ulps[key] for key, x in right.items()
    }
    diagnoses = (diagnose(bounds, twin, runs([{}], size)[0], runs) for size in sizes)
    return Report(name, tuple(diagnoses), _of_twin(twin))


def in_file(step: str) -> Callable[[], Any]:
    """The function of "file.py:function"."""
    path, _, name = step.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"step must be a function or 'file.py:function', got {step!r}")
    if not Path(path).is_file():
        raise ValueError(f"step {step!r}: there is no file {path}")
    return partial(_call, Path(path).resolve(), name)


def _call(path: Path, name: str) -> Any:
    sys.path.insert(0, str(path.parent))
    return getattr(importlib.import_module(path.stem), name)()


def _run(
    step: Callable[[], Any], timeout: float, tiny: bool,
    changes: Sequence[Mapping[int, Change]], world_size: int,
) -> list[list[Outcome]]:  # fmt: skip
    """Outcomes by run and rank, in processes."""
    seconds = timeout * len(changes)
    (free,) = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    limit = int(free) * 1024 // world_size
    ranks = run_ranks(
        run_step, world_size, step, changes, seconds, limit, tiny,
        device="cpu", timeout=seconds + START,
    )  # fmt: skip
    return [list(run) for run in zip(*ranks, strict=True)]


def _of_twin(twin: Outcome) -> tuple[Finding, ...]:
    """Says whether all labels of one process are its tokens, rather than the next ones."""
    others = [0, 0]  # labels that are not the row's token, and not the next
    for _, forward, tokens in twin.fed():
        if forward.training and (labels := forward.values("targets")) is not None:
            for shift in (0, 1):
                other = (labels != IGNORED) & (labels != tokens.roll(-shift, 1))
                others[shift] += int(other.sum())
    if others[0] or not others[1]:
        return ()
    text = (
        "the labels are the tokens themselves: the model, its loss or shard_batch must shift them"
    )
    return (Finding("labels", text, "all targets of the twin are compared with its tokens"),)
