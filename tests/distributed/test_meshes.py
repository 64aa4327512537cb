"""The demo's model on (pp, dp, cp, tp) meshes: the losses and gradients of one process."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from ring_attn import Strategy
from ring_attn.tools import demo
from ring_attn.tools import mesh as on_mesh
from ring_attn.tools.demo import Report, Run, standard_library_text
from ring_attn.tools.mesh import Axes, Settings
from ring_attn.tools.model import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

USUAL: dict[str, Any] = {
    "microbatches": 1, "strategy": "ring", "layout": "zigzag", "seqlen": 33, "batch": 4,
}  # fmt: skip


def settings_for(axes: str, *, nheads_kv: int = 2, **options: Any) -> Settings:
    model = ModelConfig(dim=32, hidden_dim=96, num_layers=4, nheads_kv=nheads_kv)
    return Settings(axes=Axes.parse(axes), model=model, **USUAL | options)


@lru_cache(maxsize=1)
def some_text() -> Tensor:
    """Real text, short enough to be sent to the ranks quickly."""
    return standard_library_text()[: 1 << 18].clone()


def run_demo(settings: Settings, text: Tensor, **mistakes: Any) -> Report | None:
    """Trains in a rank, whose attention gets more options; rank 0 also trains in one process."""
    mistaken = partial(on_mesh.ring_attention, **mistakes)
    with (
        mock.patch.object(on_mesh, "ring_attention", mistaken),
        mock.patch.object(demo, "standard_library_text", return_value=text),
    ):
        return demo.train(Run(settings, 3))


def assert_holds(reports: list[Report | None]) -> None:
    report, *others = reports
    assert report is not None and others == [None] * len(others)
    assert report.ok, [str(verdict) for verdict in report.verdicts]
    # Every update is that of one process: another update would change the next loss.
    first, *_, last = report.rows
    assert all(x.difference < 1e-3 * abs(first.dense_loss - last.dense_loss) for x in report.rows)


# Every third case, which is not slow, has a pipeline, tensor parallelism or FSDP.
CASES = {
    "pp2-cp2-interleaved": settings_for("pp=2,cp=2", schedule="interleaved", microbatches=4),
    "pp2-cp2-1f1b": settings_for("pp=2,cp=2", microbatches=4, layout="contiguous"),
    "pp2-cp2-gpipe": settings_for("pp=2,cp=2", schedule="gpipe", microbatches=2, layout="striped"),
    "cp2-tp2-mqa": settings_for("cp=2,tp=2", nheads_kv=1, layout="contiguous"),
    "cp2-tp2-mha-ulysses": settings_for("cp=2,tp=2", nheads_kv=8, strategy="ulysses"),
    "cp4-hybrid": settings_for("cp=4", strategy=Strategy(ulysses_degree=2), seqlen=65),
    "dp2-cp2-fsdp": settings_for("dp=2,cp=2", fsdp=True, microbatches=2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(3)
def test_mesh_trains_as_one_process_does(ranks: Any, name: str) -> None:
    assert_holds(ranks(4).run(run_demo, CASES[name], some_text()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_axes_at_once(fresh_ranks: Any) -> None:
    settings = settings_for("pp=2,dp=2,cp=2,tp=2", microbatches=2, fsdp=True)
    pool = fresh_ranks(16, group_timeout=200)
    assert_holds(pool.run(run_demo, settings, some_text(), timeout=240))


def three_rows_without_the_first_key(settings: Settings, text: Tensor) -> Report | None:
    return run_demo(settings, text, window_size=(settings.seqlen - 5, 0))


@pytest.mark.gloo
def test_a_few_missing_keys_fail_the_demo(ranks: Any) -> None:
    settings = settings_for("cp=2", batch=1)
    wrong, none = ranks(2).run(three_rows_without_the_first_key, settings, some_text())
    assert none is None and not wrong.ok and not any(verdict.ok for verdict in wrong.verdicts)
