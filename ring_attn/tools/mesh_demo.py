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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.arguments import dtype_name
from ring_attn.launch import num_cores, rank_device, send_part
from ring_attn.profiling import trace
from ring_attn.testing import Verdict, check
from ring_attn.tools.mesh import Axes, MeshSettings, MeshTrainer
from ring_attn.tools.training import (
    JUDGED_BATCHES,
    Column,
    Report,
    Trainer,
    check_sizes,
    print_row,
    print_titles,
    run_and_report,
    sample_batches,
    squared_errors,
    standard_library_text,
    verdicts_of,
)
from ring_attn.tools.training import settings_of as run_settings

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
    def losses(self) -> tuple[float, float, float]:
        """Losses of the mesh, and of one process in both dtypes."""
        return self.mesh_loss, self.dense_loss, self.exact_loss

    @property
    def difference(self) -> float:
        """Between the mesh and one process in the same dtype."""
        return abs(self.mesh_loss - self.dense_loss)

    @property
    def errors(self) -> tuple[float, float]:
        """Distances of both from float64."""
        return abs(self.mesh_loss - self.exact_loss), abs(self.dense_loss - self.exact_loss)


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

    Raises:
        ValueError: sizes that do not fit each other, the text or this machine.
        TypeError: a dtype that is not trained in.
        NotImplementedError: `--generate`.
    """
    settings = settings_of(args)
    check_sizes(settings.run)
    described = asdict(settings) | {"run": settings.run.described()}
    return run_and_report(
        args, train, settings.axes.size, settings, described, heading(settings), summary,
        device=settings.run.device,
    )  # fmt: skip


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
        replace(run_settings(given), batch=batch),
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
    text = standard_library_text()
    batches = sample_batches(text, run.seqlen, run.seed, run.batch)
    rows: list[Row] = []
    shown = twins is not None and not run.quiet
    if shown:
        print_titles(COLUMNS)
    for step, batch in enumerate(islice(batches, run.steps)):
        loss = trainer.step(batch)
        if twins is not None:
            rows.append(Row(step, loss, *twins.step(batch)))
            send_part(rows[-1])
        if shown:
            print_row(COLUMNS, rows[-1])
        dist.barrier()
    if profile is not None:
        with trace(profile):
            trainer.backward(batch)
    verdicts = judge(trainer, twins, islice(batches, JUDGED_BATCHES))
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
            pair = [squared_errors(x, exact, sizes) for x in (results, dense)]
            squares += torch.stack(pair, dim=1)
        num_batches += 1
        dist.barrier()
    return [] if twins is None else verdicts_of(squares, num_batches, len(sizes) - 1)


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """All cores of the machine for one rank while the others wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    yield
    torch.set_num_threads(before)


def heading(settings: MeshSettings) -> str:
    """Describes the run that is about to begin."""
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
    return "\n".join(
        (
            report.losses_line(f" on {settings.axes}", "one process"),
            "check     against float64: " + "; ".join(map(str, report.verdicts)),
            report.last_line(),
        )
    )
