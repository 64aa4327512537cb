"""`ring-attn demo` from its options to its report, on ranks that it starts."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from ring_attn.testing import Verdict
from ring_attn.tools import demo
from ring_attn.tools.demo import (
    Report,
    Row,
    Run,
    standard_library_files,
)
from ring_attn.tools.generate import Comparison, compare
from ring_attn.tools.mesh import Axes
from tests.integration.commands import options_of
from tests.refusals import refused

TINY = "--seqlen 33 --dim 32 --layers 2"
ROW = Row(0, 5.5, 5.5, 1.0, 1.0)


def run_of(options: str) -> Run:
    return demo.run_of(options_of(demo, options))[1]


@pytest.mark.dist
def test_ring_trains_and_generates_as_one_process_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.json"
    words = f"--steps 3 --nproc 2 --seqlen 65 --generate 32 --json {path}"
    args = options_of(demo, f"{TINY} {words}")
    assert demo.run(args) == 0
    report = json.loads(path.read_text())
    assert report["ok"] and report["machine"]["versions"]["torch"]
    assert report["settings"]["axes"]["cp"] == report["settings"]["nproc"] == 2
    assert [row["step"] for row in report["rows"]] == [0, 1, 2]
    assert [check["name"] for check in report["checks"]] == ["losses", "gradients"]
    for side in ("mesh", "dense"):
        first, *_, last = report["rows"]
        assert last[f"{side}_loss"] < first[f"{side}_loss"] and first[f"{side}_tokens_per_s"] > 0
    differences = [abs(row["mesh_loss"] - row["dense_loss"]) for row in report["rows"]]
    assert report["greatest_difference"] == max(differences) < 1e-3

    generation = report["generation"]
    assert generation["equal"] and generation["first_difference"] is None
    assert generation["greatest_difference"] < generation["smallest_margin"]
    # 33 bytes of prompt; the last of 32 new tokens is not fed back.
    assert sum(generation["rows"]) == 33 + 31 and min(generation["rows"]) > 0

    printed = capsys.readouterr().out
    assert "mesh cp=2, 2 ranks on cpu" in printed and repr(generation["text"]) in printed
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_mesh_on_the_command_line() -> None:
    assert (
        demo.run(options_of(demo, f"{TINY} --mesh cp=2,tp=2 --fsdp --steps 2 --batch 2 --quiet"))
        == 0
    )


@pytest.mark.dist
@pytest.mark.slow
def test_whole_files_on_three_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{TINY.replace('33', '700')} --packed --nproc 3 --steps 2 --strategy exchange"
    assert demo.run(options_of(demo, words)) == 0
    assert "whole files packed" in capsys.readouterr().out


def test_documents_are_whole_files() -> None:
    files, seen = set(standard_library_files()), []
    for batch in islice(demo.document_batches(3000, seed=0), 20):
        lengths = batch["cu_seqlens"].diff().tolist()
        assert sum(lengths) == batch["input_ids"].numel() <= 3000
        seen += [bytes(x.tolist()) for x in batch["labels"][0].split(lengths)]
    assert files.issuperset(seen) and len(set(map(len, seen))) > 10


def test_the_report_fails_by_generation_verdict_or_loss() -> None:
    prompt, rows = torch.tensor([[42] * 50]), (3, 4)
    sharded, whole = torch.eye(256)[[65, 90, 91]], torch.eye(256)[[65, 66, 67]]
    same = compare(prompt, whole, whole, rows)
    assert same == Comparison(40 * "*", "ABC", True, None, 0.0, 1.0, rows)
    wrong = compare(prompt, sharded, whole, rows)
    assert wrong == Comparison(40 * "*", "AZ[", False, 1, 1.0, 1.0, rows)
    assert not compare(prompt, whole * math.nan, whole, rows).equal
    assert Report([ROW], [], same).ok and not Report([ROW], [], wrong).ok
    verdict = Verdict("losses", 0.0, 1.0, ok=True)
    assert Report([ROW], [verdict]).ok and not Report([ROW], [replace(verdict, ok=False)]).ok
    assert not Report([replace(ROW, mesh_loss=math.nan)], [verdict]).ok


def test_defaults_follow_from_the_mesh() -> None:
    what = run_of("--mesh pp=2,dp=2")
    assert (what.training.microbatches, what.training.batch) == (4, 8)
    assert (what.training.seqlen, what.steps) == (demo.SEQLEN, demo.STEPS)
    quick = run_of("--mesh cp=2 --nproc 2 --quick --steps 3")
    assert (quick.training.microbatches, quick.training.batch) == (1, 1)
    assert (quick.training.seqlen, quick.steps) == (demo.QUICK_SEQLEN, 3)
    assert run_of("--nproc 3").training == run_of("--mesh cp=3").training
    assert str(Axes.parse("tp=2, cp=1,pp=3")) == "pp=3,tp=2" and Axes(2, 3, 4, 5).size == 120


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("--seqlen 1", "seqlen 2"),
        ("--seqlen 3 --nproc 4", "seqlen 4"),
        ("--dim 12", "nheads=8 dim=12"),
        ("--seqlen 64 --generate 64", "generate 64"),
        ("--seqlen 2 --packed", "file 2"),
        *((f"--mesh {axes}", f"once '{axes}'") for axes in ("cp", "cp=2,cp=2", "ep=2", "cp=0")),
        ("--mesh cp=2 --nproc 3", "cp=2 3"),
        ("--mesh cp=2 --schedule zb", "interleaved 'zb'"),
        ("--mesh pp=8", "8 layers=4"),
        ("--mesh pp=4 --schedule interleaved", "8 layers=4"),
        ("--mesh dp=2 --batch 3", "batch=3 dp=2"),
        ("--mesh tp=3", "nheads=8 tp=3"),
        ("--mesh tp=16", "nheads=8 tp=16"),
        ("--strategy halo", "strategy 'halo'"),
        ("--mesh cp=4 --strategy hybrid", "hybrid degree"),
    ],
)
def test_options_that_cannot_be_are_refused(options: str, facts: str) -> None:
    with refused(ValueError, facts.replace(" ", "|")):
        demo.run(options_of(demo, options))


def test_what_is_not_built_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="float16"):
        demo.run(options_of(demo, "--dtype float16"))
    with pytest.raises(NotImplementedError, match="cp=2,tp=2"):
        demo.run(options_of(demo, "--mesh cp=2,tp=2 --generate 8"))
    with pytest.raises(NotImplementedError, match="--fsdp True, --layout striped, --mesh dp=2"):
        demo.run(options_of(demo, "--mesh dp=2 --packed --layout striped --fsdp"))
