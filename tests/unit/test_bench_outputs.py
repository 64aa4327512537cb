"""What all benchmarks share: masks by name, rows, tables, CSV, comparisons, lines of progress."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from ring_attn.bench import comm, kernel
from ring_attn.bench.benchmark import Outputs
from ring_attn.bench.compare import changes, changes_table, read_earlier
from ring_attn.bench.report import print_table
from ring_attn.bench.rows import notes, table
from ring_attn.cli import arguments
from ring_attn.cli.main import main
from ring_attn.cli.masks import MaskChoice, parse_mask, parse_masks
from ring_attn.core import masks
from tests.integration.commands import options_of
from tests.refusals import refused


def row(op: str = "hop", nbytes: int = 1024, *ms: float, **changes: Any) -> comm.CommRow:
    made = comm.CommRow(impl="gloo", mode=op, nbytes=nbytes, world_size=2)
    return replace(made.timed(ms) if ms else made, **changes)


# -- masks by name


def test_masks_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("3, 2\n1k")
    names = f"causal,full,window:2,chunked:4,prefix:3,docs:{file}"
    by_name = {str(each): each.mask(10) for each in parse_masks(names)}
    expected = {
        "causal": masks.causal(10),
        "full": masks.window(10, -1, -1),
        "window:2": masks.window(10, 2),
        "chunked:4": masks.chunked(10, 4),
        "prefix:3": masks.prefix([3], [0, 10]),
        f"docs:{file}": masks.documents([0, 3, 5, 10], causal=True),
    }
    assert {name: mask.slices for name, mask in by_name.items()} == {
        name: mask.slices for name, mask in expected.items()
    }


def test_documents_are_repeated_until_the_sequence_is_full(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text('[3, "2"]')
    assert parse_mask(f"docs:{file}").cuts(12) == (0, 3, 5, 8, 10, 12)


def test_a_mask_for_fewer_rows_looks_alike() -> None:
    assert MaskChoice("window", size=4096).scaled(16384, 1024).size == 256
    assert MaskChoice("docs", lengths=(8192, 3)).scaled(16384, 1024).lengths == (512, 1)
    assert MaskChoice("window", size=16).scaled(512, 1024).size == 16
    assert MaskChoice("causal").scaled(16384, 1024) == MaskChoice("causal")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read|No such file"),
        ("", "has 0 lengths"),
        ("3 x", "'x' is not a size"),
        ("3 0", "'0' is not a size"),
        ("[3, null]", "'None' is not a size"),
        ("[3, ", "is not a list of JSON"),
        ("\xff", "'\xff' is not a size"),
    ],
)
def test_files_of_documents_that_are_none(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "lengths"
    if content is not None:
        file.write_text(content)
    with refused(argparse.ArgumentTypeError, f"docs:|{said}"):
        parse_mask(f"docs:{file}")
    with refused(argparse.ArgumentTypeError, "docs:|regular file"):
        parse_mask(f"docs:{tmp_path}")


# -- rows


def text_of(*tables: Any) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for each in tables:
        print_table(console, each)
    return console.export_text()


def test_a_table_has_what_differs_and_a_title_what_does_not() -> None:
    rows = [row("hop", 1024, 1.0, gbps=2.0), row("hop", 4096, 3.0, gbps=1.5), row("all_gather")]
    lines = [line.split() for line in text_of(table(rows, "messages")).splitlines() if line.strip()]
    title, names, _, first, second = lines  # the title is not broken, though it is wider
    assert title == ["messages:", "mode", "hop,", "ranks", "2"]
    assert names == ["bytes", "ms", "GB/s"]
    assert (first, second) == (["gloo", "1k", "1", "2"], ["gloo", "4k", "3", "1.5"])
    assert text_of(table([row("hop")], "messages")) == ""  # nothing was measured


def test_a_note_is_one_line_for_all_its_rows() -> None:
    rows = [row("hop", n).without_time("cannot run:\nno memory") for n in (1024, 4096, 8192)]
    assert notes([*rows, row("hop", 64, 1.0)]) == ["gloo: cannot run: no memory (bytes 1k; 2 more)"]
    (long,) = notes([row("hop").without_time("x" * 1000)])
    assert len(long) < 300 and long.endswith("...")


def test_csv_has_the_rows_of_the_json(tmp_path: Path) -> None:
    outputs = Outputs(json=tmp_path / "a.json", csv=tmp_path / "a.csv")
    bench = comm.CommBench(comm.setting_of(options_of("bench comm", "--op hop")), outputs)
    bench.rows = [row("hop", 1024, 1.0, 2.0), row("hop", 4096).without_time("cut, off")]
    bench.save()
    report = json.loads((tmp_path / "a.json").read_text())
    with (tmp_path / "a.csv").open() as file:
        found = list(csv.DictReader(file))
    assert report["bench"] == "comm" and len(found) == 2
    for ours, theirs in zip(report["rows"], found, strict=True):
        assert theirs == {n: "" if x is None else str(x) for n, x in ours.items()}


# -- comparison


def write(path: Path, rows: Any, **changes: Any) -> Path:
    if isinstance(rows, list):
        rows = [asdict(each) if isinstance(each, comm.CommRow) else each for each in rows]
    path.write_text(json.dumps({"bench": "comm", "machine": {}, "rows": rows, **changes}))
    return path


def test_rows_are_compared_by_their_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "old.json", [row("hop", 1024, 1.0, 1.1, 1.2), row("hop", 64, 1.0)])
    earlier = read_earlier(file, "comm", comm.CommRow)
    now = [row("hop", 1024, 1.4, 1.5, 1.6), row("all_gather", 1024, 1.0), row("hop", 64)]
    (change,) = changes(earlier, now)
    assert change.ratio == pytest.approx(1.5 / 1.1)
    assert [change.verdict(x) for x in (0.1, 0.5)] == ["slower", "same"]
    (faster,) = changes(earlier, [row("hop", 1024, 0.5)])
    assert faster.verdict(0.1) == "faster"
    (noisy,) = changes(earlier, [row("hop", 1024, 1.0, 1.0, 1.6, 1.8, 1.8)])
    assert noisy.ratio > 1.4 and noisy.verdict(0.1) == "same"  # the spreads overlap


def test_a_slower_row_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "old.json", [row("hop", 1024, 1.0)])
    for ms, threshold, status in ((1.05, "10", 0), (1.05, "2", 1), (1.5, "10", 1), (0.5, "10", 0)):
        words = f"--op hop --size 1k --compare {file} --threshold {threshold}"
        args = options_of("bench comm", words)
        bench = comm.CommBench(comm.setting_of(args), Outputs.of(args, "comm", comm.CommRow))
        bench.rows = [row("hop", 1024, ms)]
        assert bench.conclude() == status
        said = capsys.readouterr().out
        assert ("1 of 1 rows are slower by more than" in said) == bool(status)
        assert "compared with" in said and "with other cpu" in said


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([], {}, "has no row with a time"),
        ([row()], {}, "has no row with a time"),
        ([[1]], {}, "row 0 of|not an object"),
        ([{"median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "impl": "a"}], {}, "has no 'mode'"),
        ([row("hop", 1, 1.0, median_ms=-1.0)], {}, "row 0|positive, finite and in order"),
        ([row("hop", 1, 1.0, median_ms="1")], {}, "row 0|positive, finite and in order"),
        ([row("hop", 1, 1.0, p80_ms=float("inf"))], {}, "row 0|positive, finite and in order"),
        ([row("hop", 1, 1.0, p20_ms=2.0)], {}, "row 0|positive, finite and in order"),
        (3, {}, "is not the report of a benchmark"),
        ([row("hop", 1, 1.0)], {"machine": 3}, "is not the report of a benchmark"),
        ([row("hop", 1, 1.0)], {"bench": "ring"}, "is of `ring-attn bench ring`"),
    ],
)
def test_a_damaged_report_is_refused(
    tmp_path: Path, rows: Any, changes: dict[str, Any], said: str
) -> None:
    file = write(tmp_path / "old.json", rows, **changes)
    with refused(ValueError, f"--compare|old.json|{said}"):
        read_earlier(file, "comm", comm.CommRow)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    for content in ("", "[", "[1]", "NaN", "[" * 100_000):
        file.write_text(content)
        with refused(ValueError, "--compare|old.json"):
            read_earlier(file, "comm", comm.CommRow)


def test_a_run_without_a_row_of_the_earlier_one_is_refused_before_it(tmp_path: Path) -> None:
    earlier = write(tmp_path / "old.json", [row("hop", 1024, 1.0)])
    words = f"--op hop --size 2k --compare {earlier}"
    args = options_of("bench comm", words)
    bench = comm.CommBench(comm.setting_of(args), Outputs.of(args, "comm", comm.CommRow))
    with refused(ValueError, "--compare|of other measurements|'command'"):
        bench.run()
    files = ["--json", str(tmp_path / "new.json"), "--csv", str(tmp_path / "new.csv")]
    assert main(["bench", "comm", *words.split(), *files]) == 2
    assert [*tmp_path.iterdir()] == [earlier]


def test_no_damage_of_a_report_is_an_error_of_another_kind(tmp_path: Path) -> None:
    file = write(tmp_path / "old.json", [row("hop", 1024, 1.0), row("hop", 64)])
    text, random, refusals = file.read_text(), Random(0), 0
    report = json.loads(text)
    for _ in range(300):
        damaged = deepcopy(report)
        place: Any = damaged
        while isinstance(place, dict | list) and place:
            name = random.choice([*(place if isinstance(place, dict) else range(len(place)))])
            if random.random() < 0.4 or not isinstance(place[name], dict | list):
                place[name] = random.choice([None, [], {}, "x", -1, 1e999, True, [[1]], {"a": 1}])
                break
            place = place[name]
        file.write_text(json.dumps(damaged))
        try:
            earlier = read_earlier(file, "comm", comm.CommRow)
        except ValueError as error:
            assert str(error).startswith("--compare: ")
            refusals += 1
        else:
            changes_table(changes(earlier, [row("hop", 1024, 1.0)]), earlier, {}, 0.1)
    assert refusals > 100


# -- progress


def test_progress_says_the_stage_and_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(arguments.time, "monotonic", lambda: now[0])
    progress = arguments.Progress()
    assert progress.words() == ""
    progress.begin("choosing the cells", done=0, total=1)
    now[0] += 50.0  # is not counted as time of the cells
    progress.begin("cell 1 of 4", done=0, total=10)
    assert progress.words() == ", cell 1 of 4: 0 % done"
    now[0] += 30.0
    progress.begin("cell 2 of 4", done=2.5, total=10)
    assert progress.words() == ", cell 2 of 4: 25 % done, about 90 s left"


def test_lines_of_progress_name_the_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "LINE_S", 0.01)
    seen = ""
    with arguments.signs_of_life("ring-attn x"):
        arguments.progress.begin("case 2 of 3", done=1, total=3)
        while "case" not in seen:
            seen += capsys.readouterr().err
    assert re.search(r"ring-attn x: running for 0 s, case 2 of 3: 33 % done, about 0 s left", seen)
    assert arguments.progress == arguments.Progress()


def test_sizes_of_v_and_bytes_of_a_problem() -> None:
    words = "--device cpu --seqlen 64 --batch 2 --head-dim 32/16 --heads 4/2 --mask causal"
    (problem,) = kernel.setting_of(options_of("bench kernel", words)).problems()
    # q 4 x 32, k 2 x 32, v 2 x 16, out 4 x 16, of 2 x 64 rows in float32.
    nbytes = 2 * 64 * 4 * (4 * 32 + 2 * 32 + 2 * 16 + 4 * 16)
    for mode, times in (("fwd", 1), ("bwd", 2), ("fwd_bwd", 3)):
        assert problem.nbytes(mode) == times * nbytes
    assert problem.flops("fwd") == 2 * (64 * 65 // 2) * 4 * 2 * (32 + 16)
