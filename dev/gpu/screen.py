"""The screen at the end of a run: device, verdicts, and ours beside other kernels."""

from __future__ import annotations

from dev.gpu.cells import Figures
from dev.gpu.results import BAD, Row, counts, last_rows

# Bad cells that are listed, and characters of each reason.
LISTED, REASON = 12, 90

OTHERS = ("cudnn", "torch flash", "FlashAttention 3")
MODES = {"fwd": "forward", "bwd": "backward"}


def screen(rows: list[Row]) -> str:
    """Return the lines of the screen."""
    cells = last_rows(rows)
    lines = ["", *_machine(cells), "", *_verdicts(rows, cells), "", *_speeds(cells)]
    return "\n".join(lines)


def figures_of(cells: dict[str, Row], label: str) -> Figures:
    """Return the figures of a cell; none if it has not passed."""
    row = cells.get(label, {})
    figures: Figures = row.get("figures", {}) if row.get("state") == "ok" else {}
    return figures


def _machine(cells: dict[str, Row]) -> list[str]:
    if any(row["state"] == "launched" for row in cells.values()):
        return ["no device: launches over a stub of libcuda, which computes nothing"]
    found = figures_of(cells, "environment: versions")
    if not found:
        return ["device unknown: the stage `environment` has not passed"]
    software = ", ".join(f"{name} {found.get(name)}" for name in ("python", "torch", "triton"))
    return [f"{found['card']}: {software}, NCCL {found.get('nccl')}", str(found.get("smi", ""))]


def _verdicts(rows: list[Row], cells: dict[str, Row]) -> list[str]:
    """Counts by stage, and the bad cells."""
    stages = dict.fromkeys(label.split(":")[0] for label in cells)
    states = ("ok", "launched", *BAD, "not here", "cut", "no time", "begun")
    shown = [state for state in states if counts(rows)[state]]
    lines = [f"{'':14}" + "".join(f"{state:>10}" for state in shown) + f"{'s':>8}"]
    seconds = {row["cell"]: row["s"] for row in rows if row["state"] == "stage"}
    for stage in stages:
        of_stage = [row for label, row in cells.items() if label.split(":")[0] == stage]
        found = counts(of_stage)
        figures = "".join(f"{found[state] or '':>10}" for state in shown)
        lines.append(f"{stage:14}{figures}{seconds.get(stage, ''):>8}")
    bad = [row for row in cells.values() if row["state"] in (*BAD, "begun")]
    for row in bad[:LISTED]:
        reason = " ".join(str(row.get("error", "")).split())[:REASON]
        lines.append(f"  {row['state']}: {row['cell']}: {reason}")
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED} more")
    return lines


def _speeds(cells: dict[str, Row]) -> list[str]:
    """TFLOP/s of ours at each problem; in percent of each other kernel and of the ceiling."""
    ceiling = figures_of(cells, "environment: ceilings")
    product = ceiling.get("product_TFLOPs")
    lines = []
    if product:
        copy = ceiling["copy_TBs"]
        lines.append(f"ceilings here: {product:.0f} TFLOP/s (product), {copy:.2f} TB/s (copy)")
    lines.append(
        f"{'':38}{'ours':>8}" + "".join(f"{name:>18}" for name in OTHERS) + f"{'ceiling':>9}"
    )
    for label in cells:
        stage, _, name = label.partition(": ")
        ours = figures_of(cells, label)
        if stage not in ("speed", "sizes") or ours.get("implementation") != "ours":
            continue
        problem = name.removeprefix("ours, ")
        for mode, direction in MODES.items():
            rate = ours.get(f"{mode}_TFLOPs")
            if rate is None:
                continue
            line = f"{problem + ' ' + direction:38}{rate:8.3g}"
            for other in OTHERS:
                line += (
                    f"{_beside(rate, figures_of(cells, f'{stage}: {other}, {problem}'), mode):>18}"
                )
            percent = "" if not product else f"{100 * rate / product:.0f} %"
            lines.append(line + f"{percent:>9}")
    return lines


def _beside(ours: float, other: Figures, mode: str) -> str:
    """The other's rate, and ours in percent of it."""
    rate = other.get(f"{mode}_TFLOPs")
    return "-" if not rate else f"{rate:.3g} ({100 * ours / rate:.0f} %)"
