"""`audit`: compares a user's training step on ranks with its twin in one process."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ring_attn.cli.launch import run_ranks, under_torchrun
from ring_attn.core.names import AUDITED_SIZES
from ring_attn.core.values import as_ints
from ring_attn.testing.diagnosis import Diagnosis, Runs, diagnose, error_of
from ring_attn.testing.hypotheses import Finding, fed_forwards
from ring_attn.testing.observe import IGNORED, Change, Outcome, find, run_step

# Runs of the twin with random roundings, from which bounds follow. One more such run would be
# farther than all three in a quarter of cases: hence bounds are twice the farthest.
NOISY = 3

# Parts of paths of frames that say nothing about the user's step.
INNER = (
    "site-packages/torch/", "ring_attn/testing/", "ring_attn/cli/", "/multiprocessing/",
    "/threading.py",
)  # fmt: skip

# Seconds of a launch beside its runs: the start of processes and imports.
START = 60.0


@dataclass(frozen=True)
class Report:
    """Findings of `audit`.

    Attributes:
        step: the step's name.
        diagnoses: of each world size; empty if the twin alone is not deterministic.
        findings: broken contracts that concern the twin alone.
    """

    step: str
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Tells whether each result of the ranks is the twin's within its bound."""
        return not self.findings and not any(x.differences for x in self.diagnoses)

    @property
    def contracts(self) -> set[str]:
        """Short names of the broken contracts."""
        found = [*self.findings, *(y for x in self.diagnoses for y in x.findings)]
        return {finding.contract for finding in found}

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.step}: {'ok' if self.ok else 'FAILED'}", *map(_line, self.findings)]
        for one in self.diagnoses:
            lines.append(f"{one.world_size} ranks: {_summary(one)}")
            lines += map(_line, one.findings)
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
    threads: int | None = None,
    tiny: bool = False,
) -> Report:
    """Compares a training step on ranks with the same step in one process, and says what is wrong.

    The step runs as it is written, in processes over gloo, and in one process as its twin. It does
    what the training does for one rank: it makes the model (small, from a seed) and the batch, runs
    forward and backward, and sums gradients; it may clip, step an optimizer and evaluate. The batch
    of one process is that of all ranks together. Compared are the reported loss, gradients before
    they are clipped, weights at the end, and the evaluation loss.

    Bounds follow from runs of the twin whose results are rounded at random: twice the farthest, and
    a unit in the last place. They hold for any dtype.

    Args:
        step: a function without arguments at the top level of a module, or "file.py:function". It
            returns its model, or (model, loss), or (model, loss, evaluation loss), or a dict with
            the names `model`, `loss`, `eval_loss`.
        world_size: numbers of ranks.
        timeout: seconds that a run of the step may take.
        threads: CPU threads of each rank; None divides the cores among the ranks.
        tiny: make models of transformers with 2 layers, few heads and random weights, whatever the
            step asks of from_pretrained or from_config.

    Returns:
        The report: `ok`, `findings`, a diagnosis of each world size; `print` shows it.

    Raises:
        ValueError: no world sizes, a function that cannot be found by name, or a model that needs
            more memory than this machine has.
        TypeError: the step does not return a model.
        RuntimeError: the step raised on a rank, or ranks exist already (torchrun).
        TimeoutError: ranks hang; the text has where each of them waits.
    """
    sizes = (world_size,) if isinstance(world_size, int) else as_ints("world_size", world_size)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"world_size must be numbers of at least 2 ranks, got {world_size}")
    if under_torchrun():
        raise RuntimeError("audit starts its own ranks: run it by python, not by torchrun")
    name = step if isinstance(step, str) else getattr(step, "__qualname__", repr(step))
    return judge(name, sizes, _Lab(_portable(step), timeout, threads, tiny).runs)


def judge(name: str, sizes: Sequence[int], runs: Runs) -> Report:
    """The report on a step that `runs` runs."""
    changes: list[Change] = [{}, {("seed",): 1}, *({("noise",): i} for i in range(NOISY))]
    twin, again, *noisy = (run[0] for run in runs([{0: x} for x in changes], 1))
    right = twin.results
    ulps = {key: torch.finfo(x.dtype).eps * float(x.double().norm()) for key, x in right.items()}
    far = [
        {key: error_of(x, run.results.get(key)) for key, x in right.items()}
        for run in (again, *noisy)
    ]
    if differing := [key for key, ulp in ulps.items() if far[0][key] > ulp]:
        return Report(name, (), (_unsteady(twin, again, len(differing)),))
    bounds = {key: 2 * max(run[key] for run in far[1:]) + ulp for key, ulp in ulps.items()}
    diagnoses = (diagnose(bounds, twin, runs([{}], size)[0], runs) for size in sizes)
    return Report(name, tuple(diagnoses), _of_twin(twin))


@dataclass(frozen=True)
class _Lab:
    """Runs a step in processes."""

    step: bytes | str
    timeout: float
    threads: int | None
    tiny: bool

    def runs(self, changes: Sequence[Mapping[int, Change]], world_size: int) -> list[list[Outcome]]:
        """Outcomes by run and rank."""
        seconds = self.timeout * len(changes)
        free = re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        limit = int(free[0]) * 1024 // world_size
        with tempfile.TemporaryDirectory() as folder:
            try:
                ranks = run_ranks(
                    run_step, world_size, self.step, changes, seconds, folder, limit, self.tiny,
                    threads=self.threads, device="cpu", timeout=seconds + START,
                )  # fmt: skip
            except (RuntimeError, TimeoutError) as error:
                if stacks := _stacks(folder):
                    raise TimeoutError(
                        f"the step on {world_size} ranks takes more than {seconds:g} s: {stacks}"
                    ) from None
                if "can't allocate memory" in str(error):
                    raise ValueError(
                        f"{world_size} processes need more than the {limit / 2**30:.3g} GiB of "
                        "memory that are free for each: give the step a smaller model or batch"
                    ) from error
                raise
        return [list(run) for run in zip(*ranks, strict=True)]


def _portable(step: Callable[[], Any] | str) -> bytes | str:
    """The step as text or bytes, which ranks load after their hooks are set."""
    if isinstance(step, str):
        find(step)
        return step
    if not callable(step):
        raise TypeError(f"step must be a function or 'file.py:function', got {type(step).__name__}")
    try:
        return pickle.dumps(step)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"step must be a function at the top level of a module, as ranks import it: {error}"
        ) from None


def _unsteady(twin: Outcome, again: Outcome, count: int) -> Finding:
    starts = [name for name, x in twin.start.items() if not x.equal(again.start[name])]
    fed = [*zip(fed_forwards(twin), fed_forwards(again), strict=False)]
    if starts:
        why = f"weights are drawn without a seed ({starts[0]}): seed before making the model"
    elif any(not a.equal(b) for (*_, a), (*_, b) in fed):
        why = "batches are drawn without a seed: seed what draws them"
    else:
        why = "something is drawn at random, as dropout is (set its p to 0 for the audit), or "
        why += "depends on time or order"
    return Finding(
        "determinism",
        f"two runs of the twin differ in {count} results: {why}",
        "the twin ran twice, with other states of the random generators",
    )


def _of_twin(twin: Outcome) -> tuple[Finding, ...]:
    """Says whether all labels of one process are the tokens themselves, or the next but one."""
    fits = [True, True, True]
    for _, forward, tokens in fed_forwards(twin):
        labels = forward.values("targets")
        for shift in range(3):
            moved = F.pad(tokens[:, shift:], (0, shift), value=IGNORED)
            real = labels != IGNORED
            fits[shift] &= labels is not None and labels[real].equal(moved[real])
    if fits[1] or not any(fits):
        return ()
    how = "are shifted twice: they are the next tokens but one"
    how = "are not shifted: they are the tokens themselves" if fits[0] else how
    text = f"the labels {how}; the model, its loss or shard_batch has to shift them, one of these"
    return (Finding("labels", text, "all targets of the twin are compared with its tokens"),)


def _stacks(folder: str) -> str:
    """The place of each rank when its time was over, innermost first; empty if none was late."""
    late = []
    for path in sorted(Path(folder).iterdir()):
        if lines := [line.strip() for line in path.read_text().splitlines() if 'File "' in line]:
            users = [line for line in lines if not any(part in line for part in INNER)]
            late.append(f"rank {path.name} in {'; '.join(users[:4]) or 'no code of yours'}")
    return "; ".join(late)


def _line(finding: Finding) -> str:
    return f"  {finding.contract}: {finding.text} [tested: {finding.tested}]"


def _summary(one: Diagnosis) -> str:
    words = [key if "loss" in key else key.split()[0] for key in one.differences]
    kinds = [f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in Counter(words).items()]
    if not kinds:
        return "all results are the twin's within their bounds"
    return f"{', '.join(kinds)} differ from the twin's"
