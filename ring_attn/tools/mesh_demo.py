"""`ring-attn demo --mesh cp=2,tp=2`: trains on a (pp, dp, cp, tp) mesh, beside one process.

The product of the axes is the number of ranks; axes that are not named have size 1. How the model
is spread over them is in `ring_attn.tools.mesh`. Rank 0, after each step of the mesh, takes the
same step with the whole model and dense attention, once in the dtype of the run and once in
float64.

Two float32 runs of one model drift apart, since the optimizer feeds every rounding back. How far
rounding alone takes a run is seen on the run in one process, by its distance from float64. The
mesh's losses may be twice as far from float64 as that, and a rounding: "within rounding".

An optimizer that divides by the size of gradients hides a wrong factor in all of them. So losses
*and gradients* are judged as well, as in the demo without a mesh: at the trained weights, on more
batches, against float64. The exit status is 1 if a verdict fails, or a loss is not finite.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.arguments import dtype_name, write_if_interrupted, write_json
from ring_attn.env import machine
from ring_attn.launch import num_cores, rank_device, run_ranks, send_part
from ring_attn.profiling import trace
from ring_attn.testing import Verdict, check
from ring_attn.tools import demo
from ring_attn.tools.demo import Column, Trainer
from ring_attn.tools.mesh import Axes, MeshSettings, MeshTrainer

SEQLEN, STEPS = 256, 20
QUICK_SEQLEN, QUICK_STEPS = 64, 5


@dataclass(frozen=True)
class Row:
    """One step: mean losses in nats per byte, of the mesh and of one process."""

    step: int
    mesh_loss: float
    dense_loss: float
    exact_loss: float

    @property
    def difference(self) -> float:
        """Between the mesh and one process in the same dtype."""
        return abs(self.mesh_loss - self.dense_loss)

    @property
    def errors(self) -> tuple[float, float]:
        """Distances of both from float64."""
        return abs(self.mesh_loss - self.exact_loss), abs(self.dense_loss - self.exact_loss)


@dataclass(frozen=True)
class Report:
    """The steps, and the verdicts on them and at the trained weights."""

    rows: list[Row]
    verdicts: list[Verdict]

    @property
    def ok(self) -> bool:
        """Whether all losses are finite and all verdicts hold."""
        losses = (x for row in self.rows for x in (row.mesh_loss, row.dense_loss, row.exact_loss))
        return all(map(math.isfinite, losses)) and all(verdict.ok for verdict in self.verdicts)


COLUMNS: tuple[Column, ...] = (
    ("step", 4, lambda row: str(row.step)),
    ("mesh loss", 9, lambda row: f"{row.mesh_loss:.6f}"),
    ("one process", 11, lambda row: f"{row.dense_loss:.6f}"),
    ("difference", 10, lambda row: f"{row.difference:.1e}"),
    ("mesh - float64", 14, lambda row: f"{row.errors[0]:.1e}"),
    ("one - float64", 13, lambda row: f"{row.errors[1]:.1e}"),
)


def run(args: argparse.Namespace) -> int:
    """Trains, prints and writes what came out; called by the demo, with its options.

    Returns:
        0, or 1 where a loss is not finite or a result misses its bound.

    Raises:
        ValueError: sizes that do not fit each other, the text or this machine.
        TypeError: a dtype that is not trained in.
        NotImplementedError: `--generate`.
    """
    settings = settings_of(args)
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this on every rank
    if is_first and not settings.run.quiet:
        print(heading(settings), flush=True)
    size = settings.axes.size
    rows: list[Row] = []
    write_if_interrupted(args.json, lambda: unfinished_json(settings, rows))
    reports = run_ranks(
        train, size, settings, args.profile, device=settings.run.device, on_part=rows.append
    )
    report = reports[0]
    assert report is not None, "rank 0 has it"
    if is_first:
        print(summary(settings, report), flush=True)
    if is_first and args.json:
        write_json(args.json, to_json(settings, report))
    return 0 if report.ok else 1


def settings_of(args: argparse.Namespace) -> MeshSettings:
    """The run that the options describe; raises as `run` does."""
    axes = Axes.parse(args.mesh)
    if args.nproc not in (None, axes.size):
        raise ValueError(f"mesh {axes} has {axes.size} ranks, got --nproc {args.nproc}")
    if args.generate:
        raise NotImplementedError("--generate is for a ring alone: leave out --mesh")
    given = argparse.Namespace(**vars(args))
    given.nproc = axes.size
    given.seqlen = args.seqlen or (QUICK_SEQLEN if args.quick else SEQLEN)
    given.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    microbatches = args.microbatches or (2 * axes.pp if axes.pp > 1 else 1)
    batch = args.batch or axes.dp * microbatches
    return MeshSettings(
        replace(demo.settings_of(given), batch=batch),
        axes,
        args.schedule or "1f1b",
        microbatches,
        args.fsdp,
        args.strategy or "ring",
    )


def train(settings: MeshSettings, profile: Path | None = None) -> Report | None:
    """One rank of the mesh; the report is rank 0's, which also is the process beside it.

    Args:
        settings: the same on every rank.
        profile: folder for each rank's trace of the last batch once more, or None.
    """
    run = settings.run
    trainer = MeshTrainer(settings, settings.axes.mesh(run.device), rank_device())
    twins = Twins(settings) if dist.get_rank() == 0 else None
    text = demo.standard_library_text()
    batches = demo.sample_batches(text, run.seqlen, run.seed, run.batch)
    rows: list[Row] = []
    with demo.Display(COLUMNS, run.quiet or twins is None) as display:
        for step, batch in enumerate(islice(batches, run.steps)):
            loss = trainer.step(batch)
            if twins is not None:
                rows.append(Row(step, loss, *twins.step(batch)))
                send_part(rows[-1])
                display.show(rows[-1])
            dist.barrier()
    if profile is not None:
        with trace(profile):
            trainer.backward(batch)
    verdicts = judge(trainer, twins, islice(batches, demo.JUDGED_BATCHES))
    if twins is None:
        return None
    mesh = torch.tensor([row.mesh_loss for row in rows])
    dense = torch.tensor([row.dense_loss for row in rows])
    exact = torch.tensor([row.exact_loss for row in rows], dtype=torch.float64)
    return Report(rows, [check("losses of all steps", mesh, exact, dense), *verdicts])


class Twins:
    """The whole model in one process, in the dtype of the run and in float64."""

    def __init__(self, settings: MeshSettings) -> None:
        exact = replace(settings.run, dtype=torch.float64)
        self.pair = [Trainer(run, rank_device()) for run in (settings.run, exact)]

    def step(self, batch: dict[str, Tensor]) -> list[float]:
        """Both train; their losses. All other ranks wait, so that all cores are theirs."""
        with _all_cores():
            return [twin.step(batch) for twin in self.pair]

    def results_of(self, batch: dict[str, Tensor], weights: Tensor) -> list[Tensor]:
        """Both sets of `Trainer.results_of` at the given weights."""
        with _all_cores():
            for twin in self.pair:
                twin.set_weights(weights)
            return [twin.results_of(batch) for twin in self.pair]


def judge(
    trainer: MeshTrainer, twins: Twins | None, batches: Iterator[dict[str, Tensor]]
) -> list[Verdict]:
    """Losses and gradients at the mesh's weights against float64; every rank calls it.

    The bounds are those of the demo without a mesh. Rank 0, which has the twins, gets verdicts.
    """
    weights = trainer.get_weights()
    run = trainer.settings.run
    sizes = [run.batch * run.seqlen, *trainer.parameter_sizes]
    num_batches, squares = 0, torch.zeros(2, 2, dtype=torch.float64)
    for batch in batches:
        results = trainer.results_of(batch)
        if twins is not None:
            dense, exact = twins.results_of(batch, weights)
            pair = [demo.squared_errors(x, exact, sizes) for x in (results, dense)]
            squares += torch.stack(pair, dim=1)
        num_batches += 1
        dist.barrier()
    return [] if twins is None else demo.verdicts_of(squares, num_batches, len(sizes) - 1)


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """All cores of the machine for one rank while the others wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    yield
    torch.set_num_threads(before)


def heading(settings: MeshSettings) -> str:
    """What is about to run."""
    run = settings.run
    spread = "sharded over dp and cp" if settings.fsdp else "replicated over dp and cp"
    return (
        f"mesh {settings.axes} on {run.device}: {settings.axes.size} ranks, schedule "
        f"{settings.schedule} with {settings.num_stages} stages and {settings.microbatches} "
        f"microbatches, parameters {spread}; batches of {run.batch} sequences of {run.seqlen} "
        f"bytes in {dtype_name(run.dtype)}, {run.layout} {settings.strategy}"
    )


def summary(settings: MeshSettings, report: Report) -> str:
    """The result in a few lines."""
    first, last = report.rows[0], report.rows[-1]
    greatest = max(report.rows, key=lambda row: row.difference)
    return "\n".join(
        (
            f"loss      {first.mesh_loss:.4f} -> {last.mesh_loss:.4f} nats per byte in "
            f"{len(report.rows)} steps on {settings.axes} (one process {first.dense_loss:.4f} -> "
            f"{last.dense_loss:.4f})",
            "check     against float64: " + "; ".join(map(str, report.verdicts)),
            f"greatest loss difference {greatest.difference:.2e} (step {greatest.step}): "
            f"{'ok' if report.ok else 'FAILED'}",
        )
    )


def unfinished_json(settings: MeshSettings, rows: Sequence[Row]) -> dict[str, Any]:
    """The part of the report that there is before the training has ended."""
    options = asdict(settings)
    options["run"].pop("quiet")
    options["run"]["dtype"] = dtype_name(settings.run.dtype)
    return {
        "command": "demo",
        "machine": machine(),
        "settings": options,
        "rows": [asdict(row) | {"difference": row.difference} for row in rows],
    }


def to_json(settings: MeshSettings, report: Report) -> dict[str, Any]:
    """The report as it is written."""
    return {
        **unfinished_json(settings, report.rows),
        "checks": [asdict(verdict) for verdict in report.verdicts],
        "ok": report.ok,
    }
