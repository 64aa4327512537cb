"""The demo's model on (pp, dp, cp, tp) meshes: losses and gradients of one process, in float64.

Bounds come from float32: float64 rounds in the same way, 2^-29 times as much, and the optimizer
amplifies both alike. So the scaled error of float32 in one process is allowed for float64 there
and, twice, for float64 on the mesh. A mistake is millions of times larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn import Strategy
from ring_attn.testing import Verdict
from ring_attn.tools import demo
from ring_attn.tools import mesh as on_mesh
from ring_attn.tools.demo import (
    Report,
    Run,
    Twin,
    sample_batches,
    squared_errors,
    standard_library_text,
)
from ring_attn.tools.mesh import SCHEDULES, Axes, MeshTrainer, Settings
from ring_attn.tools.model import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
STEPS = 2
# Factor from float32's rounding errors to float64's; and the oracle's own relative rounding.
SCALE = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
ROUNDING = torch.finfo(torch.float64).eps / 2


USUAL: dict[str, Any] = {
    "microbatches": 1, "strategy": "ring", "layout": "zigzag", "seqlen": 33, "batch": 4,
    "dtype": torch.float64,
}  # fmt: skip


def settings_for(axes: str, *, nheads_kv: int = 2, dim: int = 32, **options: Any) -> Settings:
    model = ModelConfig(dim=dim, hidden_dim=3 * dim, num_layers=4, nheads_kv=nheads_kv)
    return Settings(axes=Axes.parse(axes), model=model, **USUAL | options)


@dataclass(frozen=True)
class Trained:
    """Losses (steps,) of training, losses and gradients of one batch before it, weights after."""

    losses: Tensor
    results: Tensor
    weights: Tensor


@lru_cache(maxsize=1)
def some_text() -> Tensor:
    """Real text, short enough to be sent to the ranks quickly."""
    return standard_library_text()[: 1 << 18].clone()


def trained(trainer: Twin | MeshTrainer, text: Tensor, steps: int = STEPS) -> Trained:
    """Trains either kind of trainer on the same batches."""
    settings = trainer.settings
    batches = sample_batches(text, settings.seqlen, settings.seed, settings.batch)
    results = trainer.results_of(next(batches))
    losses = [trainer.step(batch) for batch in islice(batches, steps)]
    weights = trainer.get_weights() if isinstance(trainer, MeshTrainer) else torch.zeros(0)
    return Trained(torch.tensor(losses, dtype=torch.float64), results, weights)


@lru_cache(maxsize=16)
def open_mesh(axes: Axes) -> DeviceMesh:
    """The mesh in a rank, cached so that each mesh makes its groups only once."""
    return axes.mesh("cpu")


def train_on_mesh(settings: Settings, text: Tensor, steps: int = STEPS) -> Trained:
    return trained(MeshTrainer(settings, open_mesh(settings.axes), CPU), text, steps)


@lru_cache(maxsize=8)
def train_alone(settings: Settings) -> Trained:
    """Trains in one process with dense attention; `settings` keep the defaults of mesh options."""
    return trained(Twin(settings, CPU), some_text())


def verdicts_of(mesh: Trained, settings: Settings) -> list[Verdict]:
    """Compares mesh and one process in float64; one process in float32 sets the bounds."""
    alone = replace(
        settings, axes=Axes(), microbatches=1, schedule="1f1b", fsdp=False, strategy="ring",
        layout="zigzag",
    )  # fmt: skip
    exact = train_alone(alone)
    plain = train_alone(replace(alone, dtype=torch.float32))
    sizes = [alone.batch * alone.seqlen, *(p.numel() for p in Twin(alone, CPU).model.parameters())]

    def judged(name: str, error: Tensor, of_float32: Tensor, floor: float) -> Verdict:
        bound = 3.0 * SCALE * float(of_float32) + floor
        return Verdict(name, float(error), bound, ok=float(error) <= bound)

    distances = [(x.losses - exact.losses[: len(x.losses)]).abs().max() for x in (mesh, plain)]
    errors = [squared_errors(x.results, exact.results, sizes).sqrt() for x in (mesh, plain)]
    return [
        judged("losses of all steps", *distances, 4.0 * ROUNDING * float(exact.losses.max())),
        judged("bytes", errors[0][0], errors[1][0], ROUNDING),
        judged("gradients", errors[0][1], errors[1][1], ROUNDING * math.sqrt(len(sizes) - 1)),
    ]


def assert_holds(results: list[Trained], settings: Settings) -> None:
    for result in results[1:]:
        assert torch.equal(result.losses, results[0].losses)
        assert torch.equal(result.weights, results[0].weights), "copies must stay the same"
    verdicts = verdicts_of(results[0], settings)
    assert all(verdict.ok for verdict in verdicts), [str(verdict) for verdict in verdicts]


# Every third case, which is not slow, has a pipeline, tensor parallelism or FSDP.
CASES = {
    "pp2-cp2-interleaved": settings_for("pp=2,cp=2", schedule="interleaved", microbatches=4),
    "pp2-cp2-1f1b": settings_for("pp=2,cp=2", microbatches=4, layout="contiguous"),
    "pp2-cp2-gpipe": settings_for("pp=2,cp=2", schedule="gpipe", microbatches=2, layout="striped"),
    "cp2-tp2-mqa": settings_for("cp=2,tp=2", nheads_kv=1, layout="contiguous"),
    "cp2-tp2-mha-ulysses": settings_for("cp=2,tp=2", nheads_kv=8, strategy="ulysses"),
    "cp4-hybrid": settings_for("cp=4", strategy=Strategy(ulysses_degree=2), seqlen=65),
    "dp2-cp2-fsdp": settings_for("dp=2,cp=2", fsdp=True, microbatches=2),
    "dp2-cp2": settings_for("dp=2,cp=2"),
    "cp2-tp2-fsdp-mqa": settings_for("cp=2,tp=2", fsdp=True, nheads_kv=1),
    "pp2-dp2-interleaved-fsdp": settings_for(
        "pp=2,dp=2", schedule="interleaved", microbatches=2, fsdp=True
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(3)
def test_mesh_trains_as_one_process_does(ranks: Any, name: str) -> None:
    assert_holds(ranks(4).run(train_on_mesh, CASES[name], some_text()), CASES[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_axes_at_once(fresh_ranks: Any) -> None:
    settings = settings_for("pp=2,dp=2,cp=2,tp=2", microbatches=2, fsdp=True)
    pool = fresh_ranks(16, group_timeout=200)
    assert_holds(pool.run(train_on_mesh, settings, some_text(), timeout=240), settings)


def order_of_work(settings: Settings, text: Tensor) -> str:
    """A rank's events: F0 is a microbatch's forward through the rank's stage 0, B0 its backward."""
    trainer = MeshTrainer(settings, open_mesh(settings.axes), CPU)
    events: list[str] = []

    def note(name: str, _module: Any, _args: Any, out: Tensor) -> None:
        events.append(f"F{name}")
        if out.requires_grad:
            out.register_hook(lambda _grad: events.append(f"B{name}"))

    for name, stage in trainer.stages.named_children():
        stage.register_forward_hook(partial(note, name))
    batches = sample_batches(text, settings.seqlen, settings.seed, settings.batch)
    trainer.step(next(batches))  # in the first step torch infers shapes
    events.clear()
    trainer.step(next(batches))
    return " ".join(events)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_ring_work_in_one_order(ranks: Any, schedule: str) -> None:
    settings = settings_for("pp=2,cp=2", schedule=schedule, microbatches=4)
    first, its_neighbour, last, neighbour_of_last = ranks(4).run(
        order_of_work, settings, some_text()
    )
    assert first == its_neighbour and last == neighbour_of_last
    if schedule == "gpipe":
        assert first == last == "F0 F0 F0 F0 B0 B0 B0 B0"
    elif schedule == "1f1b":
        # Stage i of n warms up with n - i - 1 microbatches.
        assert first == "F0 F0 B0 F0 B0 F0 B0 B0"
        assert last == "F0 B0 F0 B0 F0 B0 F0 B0"
    else:
        assert sorted(first.split()) == sorted(4 * ["F0", "B0", "F1", "B1"])
        assert first.split()[:5] == ["F0", "F0", "F1", "F1", "F0"]


def run_demo(settings: Settings, text: Tensor) -> Report | None:
    """Runs the demo in a rank; three rows of the mesh's attention do not see the first key."""
    mistaken = partial(on_mesh.ring_attention, window_size=(settings.seqlen - 5, 0))
    with (
        mock.patch.object(on_mesh, "ring_attention", mistaken),
        mock.patch.object(demo, "standard_library_text", return_value=text),
    ):
        return demo.train(Run(settings, STEPS))


def test_a_few_missing_keys_fail_the_demo(ranks: Any) -> None:
    settings = settings_for("cp=2", batch=1, dtype=torch.float32)
    wrong, none = ranks(2).run(run_demo, settings, some_text())
    assert none is None and not wrong.ok and not any(verdict.ok for verdict in wrong.verdicts)
