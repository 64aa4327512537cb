"""The table of figures that a GPU must measure is that of the code, and recording fills it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dev.gpu import estimates, plan, record
from dev.gpu.cells import Stage
from dev.gpu.command import chosen
from dev.gpu.fits import fitted_rate
from dev.gpu.results import last_rows
from ring_attn.backends import measured, rates
from ring_attn.bench.implementations import Shape

ROOT = Path(__file__).parents[2]

# Files of the package that speak of estimates without a figure of their own: they repeat, explain
# or sum those of other files.
EXPLAIN = {
    "api.py",
    "backends/__init__.py",
    "backends/flash_attn.py",
    "backends/measured.py",
    "cli/doctor.py",
    "cli/plan.py",
    "machines/cluster.py",
    "planning/choice.py",
    "core/runs.py",
    "strategies/ring.py",
    "torch_private.py",
    "transport/nccl_channels.py",
}

# Figures that a GPU or a network can settle, and words that say where a figure comes from. Times of
# the host are known without a GPU.
FIGURE = re.compile(
    r"\d (?:GB/s|TB/s|TFLOP/s|us|ms)\b|\d % (?:faster|slower|less time|more time)|gain \d+ %"
)
ORIGIN = re.compile(
    r"\b(?:estimate[sd]?|assume[sd]?|predict\w*|simulat\w+|model|by the rates|measured?|published"
    r"|datasheets?|bench\w*|host|CPU|processor)\b",
    re.IGNORECASE,
)
# A page of measured figures only, which tests/integration/test_readme.py compares with their rows.
MEASURED_PAGES = {"docs/figures.md"}


# Between paragraphs, also of comments; and before the headings of a page.
PARAGRAPHS, SECTIONS = r"\n\s*(?:#\s*)?\n", r"\n(?=#+ )"
# Notes of experiments, whose sections say once where all their figures come from.
NOTES = "bench/results/NOTES.md"


def figures_without_origin(text: str, between: str = PARAGRAPHS) -> list[str]:
    """Return figures of speed in parts of a text that do not say whether they are estimates."""
    written = re.sub(r'"[\d.]+ \w+"', "", text)  # texts of a format, not figures
    found = [(FIGURE.search(one), ORIGIN.search(one)) for one in re.split(between, written)]
    return [figure.group() for figure, origin in found if figure and not origin]


def stages() -> dict[str, Stage]:
    return {stage.name: stage for stage in plan.stages("cuda")}


def test_the_table_is_that_of_the_code() -> None:
    """`python -m dev.gpu.estimates` writes it anew."""
    assert estimates.TABLE.read_text() == estimates.table()


def test_keys_are_unique_and_files_exist() -> None:
    every = estimates.estimates()
    assert len({one.key for one in every}) == len(every)
    assert all((ROOT / one.file).exists() for one in every)


def test_each_stage_of_the_table_exists() -> None:
    for one in estimates.estimates():
        if one.stage in estimates.NO_STAGE or "ring-attn" in one.stage:
            continue
        named = re.findall(r"`(\w+)`", one.stage)
        assert named and set(named) <= stages().keys(), one


def test_each_file_that_estimates_has_a_row() -> None:
    """A word in a new file asks for a row, or for a place among those that only explain."""
    files = {one.file.removeprefix("ring_attn/") for one in estimates.estimates()} | EXPLAIN
    for path in (ROOT / "ring_attn").rglob("*.py"):
        name = str(path.relative_to(ROOT / "ring_attn"))
        # Lower bounds and simulations are the planner's estimates, which no GPU measures.
        if name.startswith("planning/") and name != "planning/devices.py":
            continue
        if re.search(r"\b([Ee]stimate[sd]?|[Aa]ssumed)\b", path.read_text()):
            assert name in files, name


def test_each_figure_of_speed_says_where_it_comes_from() -> None:
    """Nothing was timed on a GPU: an estimate has the word in its paragraph."""
    pages = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", NOTES)
    paths = [ROOT / name for name in pages]
    for folder in ("ring_attn", "kernels", "bench", "examples", "dev"):
        paths += (ROOT / folder).rglob("*.py")
    paths += (ROOT / "docs").glob("*.md")
    found = {}
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name in MEASURED_PAGES:
            continue
        between = SECTIONS if name == NOTES else PARAGRAPHS
        if figures := figures_without_origin(path.read_text(), between):
            found[name] = figures
    assert not found, f"say whether these are estimates or measured: {found}"


@pytest.mark.parametrize(
    "text",
    ["A channel moves 22 GB/s.", "x\n\n# It takes 8 us.\n\n# An estimate.", "1.5 % slower"],
)
def test_a_figure_without_its_word_is_found(text: str) -> None:
    assert figures_without_origin(text)
    assert not figures_without_origin(f"{text} This is an estimate.".replace("\n\n", "\n"))


def test_a_section_says_the_origin_once() -> None:
    paragraphs = "# One\n\nPredictions.\n\nIt takes 8 us."
    assert not figures_without_origin(paragraphs, SECTIONS)
    assert figures_without_origin(f"{paragraphs}\n\n# Two\n\nIt takes 9 us.", SECTIONS) == ["9 us"]


def test_a_new_estimate_of_a_rate_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    some = rates.RATES["sm_90"]["triton"]
    monkeypatch.setitem(rates.RATES["sm_90"], "new", some._replace(source="estimate: none"))
    assert estimates.TABLE.read_text() != estimates.table()


def test_the_status_follows_from_what_was_measured() -> None:
    """README.md and docs/figures.md speak of GPUs as the tables do."""
    timed = bool(measured.MEASURED) or bool(estimates.measured())
    sentences = {
        "README.md": "Nobody has timed them",
        "docs/figures.md": "Nothing was measured on a GPU yet",
    }
    for name, sentence in sentences.items():
        words = " ".join((ROOT / name).read_text().split())
        assert (sentence in words) != timed, f"{name}: {sentence!r}, measured: {timed}"


# -- recording

FORWARD, BACKWARD = rates.Rate(600e12, 5e-6, 100.0, 200.0), rates.Rate(450e12, 5e-6, 300.0, 100.0)


def row(cell: str, **figures: Any) -> dict[str, Any]:
    return {"cell": cell, "state": "ok", "at": 1.0, "s": 1.0, "figures": figures}


def rows_of_speeds() -> list[dict[str, Any]]:
    """Rows in which ours has the rates above."""
    from ring_attn.core.tiles import Tile
    from ring_attn.machines.cluster import compute_seconds

    made = []
    for rows, mask in [(n, mask) for n in (4096, 16384, 65536) for mask in ("causal", "full")]:
        tile = Tile(0, rows, 0, rows, None, 0 if mask == "causal" else None)
        shape = Shape(1, rows, 32, 8, 128, mask == "causal", None, None)  # type: ignore[arg-type]
        times = {}
        for mode, rate, products in (("fwd", FORWARD, 2), ("bwd", BACKWARD, 5)):
            per_pair = products * 2 * 128 * shape.heads
            seconds = compute_seconds(rate, tile.area, rows, tile.edge, per_pair)
            times[f"{mode}_ms"] = [1e3 * seconds] * 3
        sizes = {"rows": rows, "dim": 128, "heads": [32, 8], "mask": mask}
        made.append(
            row(
                f"speed: ours, {rows} rows, 128 dims, {mask}",
                implementation="ours",
                **sizes,
                **times,
            )
        )
    return made


def test_rates_are_fitted_to_speeds() -> None:
    cells = last_rows(rows_of_speeds())
    for direction, rate in (("forward", FORWARD), ("backward", BACKWARD)):
        got = fitted_rate(cells, "ours", direction)
        assert got is not None and got.flops == pytest.approx(rate.flops, rel=1e-3)
        assert got.launch == pytest.approx(rate.launch, rel=1e-2)
    assert fitted_rate(dict([*cells.items()][:3]), "ours", "forward") is None


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that recording writes."""
    for module, name in ((estimates, "TABLE"), (estimates, "MEASURED"), (record, "RATES")):
        path = tmp_path / getattr(module, name).name
        path.write_text(getattr(module, name).read_text())
        monkeypatch.setattr(module, name, path)
    for name in ("TABLE", "MEASURED"):
        monkeypatch.setattr(record, name, getattr(estimates, name))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(estimates, "RESULTS", tmp_path)
    return tmp_path


def test_recording_fills_the_tables(files: Path) -> None:
    run = files / "results.jsonl"
    rows = [
        row("environment: versions", card="NVIDIA H100", architecture="sm_90"),
        row("costs: host", launch_us=17.0, copy_us=5.0, post_us=40.0, wait_us=2.0),
        row("multi: 2 ranks: channels", ranks=[{"channels": 8}, {"channels": 8}]),
        *rows_of_speeds(),
    ]
    run.write_text("".join(json.dumps(one) + "\n" for one in rows))
    for _ in range(2):  # what was assumed is kept
        assert record.record([run]) == 0
    lines = {line.split(" | ")[0][2:]: line for line in (files / "GPU.md").read_text().splitlines()}
    assert "| 25 | " in lines["host time of a launch: us"]
    assert "| 17 | NVIDIA H100, 2" in lines["host time of a launch: us"]
    forward = lines["H100 or H200, triton, forward: TFLOP/s"]
    assert "| 598 | " in forward and "| 600 | NVIDIA H100" in forward
    assert lines["host time of a copy: us"].count("NVIDIA H100") == 1
    scope: dict[str, Any] = {}
    exec((files / "measured.py").read_text(), scope)
    found, backward, source = scope["MEASURED"]["sm_90", "triton"]
    assert found[0] == pytest.approx(600e12, rel=1e-3) and source.startswith(
        "measured: NVIDIA H100"
    )
    assert rates.Rates(rates.Rate(*found), rates.Rate(*backward), source)
    assert (files / "gpu_nvidia_h100_").parent == files and list(
        files.glob("gpu_nvidia_h100_*.jsonl")
    )


def test_a_trial_is_not_recorded(files: Path) -> None:
    run = files / "results.jsonl"
    run.write_text(json.dumps(row("environment: versions", card="a trial on a CPU")) + "\n")
    with pytest.raises(ValueError, match="no GPU is named"):
        record.record([run])


# -- the plan


def test_the_plan_is_one_of_unique_cells_whose_functions_exist() -> None:
    for name in ("cuda", "cpu"):
        labels = [cell.label for stage in plan.stages(name) for cell in stage.cells]
        assert len(set(labels)) == len(labels)
        for stage in plan.stages(name):
            for cell in stage.cells:
                module, _, function = cell.target.partition(":")
                path = ROOT / (module.replace(".", "/") + ".py")
                assert f"\ndef {function}(" in path.read_text(), cell


def test_stages_are_chosen_by_name() -> None:
    some = chosen(plan.stages("cuda"), "speed,contact", "gluon")
    assert [stage.name for stage in some] == ["contact", "speed"]
    assert all("gluon" in cell.name for cell in some[0].cells) and not some[1].cells
    with pytest.raises(ValueError, match="no stage sped; use environment"):
        chosen(plan.stages("cuda"), "sped", None)
