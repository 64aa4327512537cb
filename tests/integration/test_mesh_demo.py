"""`ring-attn demo --mesh ...` from its options to its report."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ring_attn.testing import Verdict
from ring_attn.tools import demo, mesh_demo
from ring_attn.tools.mesh import Axes
from ring_attn.tools.training import Report

TINY = "--seqlen 33 --dim 32 --layers 2"


def parsed(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(options.split())


@pytest.mark.dist
@pytest.mark.parametrize("axes", ["cp=2", pytest.param("cp=2,tp=2", marks=pytest.mark.slow)])
def test_mesh_beside_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], axes: str
) -> None:
    path, size = tmp_path / "mesh.json", Axes.parse(axes).size
    args = parsed(
        f"{TINY} --mesh {axes} --steps 4 --batch 2 --json {path} --profile {tmp_path / 'traces'}"
    )
    assert demo.run(args) == 0
    report = json.loads(path.read_text())
    assert report["ok"] and report["settings"]["axes"]["cp"] == 2
    assert report["settings"]["run"]["nproc"] == size and report["settings"]["run"]["batch"] == 2
    assert [row["step"] for row in report["rows"]] == [0, 1, 2, 3]
    for row in report["rows"]:
        assert row["difference"] == abs(row["mesh_loss"] - row["dense_loss"])
        # The twins train from the same weights; each dtype rounds for itself.
        assert 0.0 < abs(row["dense_loss"] - row["exact_loss"]) < 1e-4
    assert report["rows"][-1]["mesh_loss"] < report["rows"][0]["mesh_loss"]
    names = ["losses of all steps", "losses", "gradients"]
    assert [check["name"] for check in report["checks"]] == names

    for rank in range(size):
        trace = json.loads((tmp_path / "traces" / f"rank{rank}_trace.json").read_text())
        ranges = {event["name"] for event in trace["traceEvents"]}
        assert {"ring_attn::forward", "ring_attn::gradient_sync"} <= ranges

    printed = capfd.readouterr().out.splitlines()
    assert printed[0].startswith(f"mesh {axes} on cpu: {size} ranks, schedule 1f1b with 1 stages")
    assert printed[1].split("  ")[:2] == ["step", "mesh loss"]
    assert len(printed) == 2 + 4 + 3 and printed[-1].endswith(": ok")


def test_report_fails_where_a_loss_is_not_finite() -> None:
    row = mesh_demo.Row(0, 5.5, 5.5, 5.5)
    verdicts = [Verdict("losses", 0.0, 1.0, ok=True)]
    assert Report([row], verdicts).ok
    assert not Report([replace(row, mesh_loss=math.nan)], verdicts).ok
    assert not Report([row], [replace(verdicts[0], ok=False)]).ok


def test_axes_in_any_order() -> None:
    assert Axes.parse("tp=2, pp=3") == Axes(pp=3, tp=2)
    assert str(Axes.parse("tp=2,cp=1,pp=3")) == "pp=3,tp=2" and Axes(2, 3, 4, 5).size == 120


def test_defaults_that_follow_from_the_mesh() -> None:
    settings = mesh_demo.settings_of(parsed("--mesh pp=2,dp=2"))
    assert (settings.microbatches, settings.run.batch, settings.run.nproc) == (4, 8, 4)
    assert (settings.run.seqlen, settings.run.steps) == (mesh_demo.SEQLEN, mesh_demo.STEPS)
    quick = mesh_demo.settings_of(parsed("--mesh cp=2 --nproc 2 --quick --steps 3"))
    assert (quick.microbatches, quick.run.batch) == (1, 1)
    assert (quick.run.seqlen, quick.run.steps) == (mesh_demo.QUICK_SEQLEN, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("--mesh cp", ValueError, "sizes of some of the axes pp, dp, cp, tp, each once"),
        ("--mesh cp=2,cp=2", ValueError, "each once, such as cp=2,tp=2, got 'cp=2,cp=2'"),
        ("--mesh ep=2", ValueError, "got 'ep=2'"),
        ("--mesh cp=0", ValueError, "got 'cp=0'"),
        ("--mesh cp=2 --nproc 3", ValueError, "mesh cp=2 has 2 ranks, got --nproc 3"),
        ("--mesh cp=2 --generate 8", NotImplementedError, "leave out --mesh"),
        ("--mesh cp=2 --schedule zb", ValueError, "schedule must be one of .*got 'zb'"),
        ("--mesh pp=8", ValueError, "layers must be at least 8, one for each stage"),
        ("--mesh pp=4 --schedule interleaved", ValueError, "layers must be at least 8"),
        ("--mesh pp=2 --microbatches 1", ValueError, "microbatches must be at least pp=2"),
        ("--mesh pp=2 --schedule interleaved --microbatches 5", ValueError, "2 \\* pp=2"),
        ("--mesh dp=2 --batch 3", ValueError, "batch must be a multiple of dp=2 times"),
        ("--mesh tp=3", ValueError, "tp must divide nheads=8"),
        ("--mesh tp=16", ValueError, "tp must divide nheads=8"),
        ("--mesh cp=2 --strategy halo", ValueError, "strategy must be one of .*got 'halo'"),
        ("--mesh cp=4 --strategy hybrid", ValueError, "needs its degree"),
        ("--mesh cp=4 --seqlen 3", ValueError, "seqlen must be at least 4"),
        ("--fsdp", ValueError, "--fsdp is for a mesh"),
        ("--schedule gpipe", ValueError, "--schedule is for a mesh"),
        ("--batch 2", ValueError, "--batch is for a mesh"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        demo.run(parsed(options))
