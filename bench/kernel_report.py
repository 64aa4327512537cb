"""Tables and plots of `ring-attn bench kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ring_attn.arguments import format_size
from ring_attn.bench.implementations import Problem

# How the note of a cell that was left out begins.
NOT_MEASURED = "not measured"

MODES = ("fwd", "bwd", "fwd_bwd")


@dataclass(frozen=True)
class Row:
    """One implementation on one cell in one mode; None where there is no time.

    Attributes:
        peak_share: tflops over the peak rate, 0 to 1.
        host_ms: median of the host's time to enqueue forward (and backward).
        max_ratio: greatest error / bound of its results; above 1 is wrong.
        note: why there is no time, or what is wrong.
    """

    impl: str
    mode: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    peak_share: float | None = None
    host_ms: float | None = None
    max_ratio: float | None = None
    note: str = ""

    @property
    def table(self) -> tuple[int, int, int, bool]:
        """What the rows of one table share."""
        return self.heads, self.kv_heads, self.head_dim, self.causal


def title(what: Row | Problem) -> str:
    """Of a table or a cell."""
    heads = f"{what.heads}/{what.kv_heads} heads of {what.head_dim}"
    mask = "causal" if what.causal else "full"
    if isinstance(what, Row):
        return f"{heads}, {mask}"
    return f"{heads}, {mask}, {what.batch} x {format_size(what.seqlen)}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each number of heads, head dim and mask: a line for a length and implementation."""
    found: list[Table] = []
    for key in dict.fromkeys(row.table for row in rows):
        mine = [row for row in rows if row.table == key]
        modes = [mode for mode in MODES if any(row.mode == mode and row.samples for row in mine)]
        table = _table(f"{title(mine[0])}: ms (p20-p80), TFLOP/s (share of peak)")
        for name in ("batch x n", ""):
            table.add_column(name, no_wrap=True)
        for mode in modes:
            table.add_column(mode, justify="right", no_wrap=True)
            table.add_column("TFLOP/s", justify="right", no_wrap=True)
        table.add_column("error/bound", justify="right")
        for cell in dict.fromkeys((row.seqlen, row.batch, row.impl) for row in mine):
            by_mode = {row.mode: row for row in mine if (row.seqlen, row.batch, row.impl) == cell}
            seqlen, batch, impl = cell
            first = next(iter(by_mode.values()))
            figures = [text for mode in modes for text in _figures(by_mode.get(mode))]
            if modes and not first.samples:
                figures[0] = first.note.partition(":")[0]
            table.add_row(
                f"{batch} x {format_size(seqlen)}", impl, *figures, show(first.max_ratio, ".2f")
            )
        found.append(table)
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Why cells have no times, or what is wrong in them: a line for each reason."""
    cells: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.note and not row.note.startswith(NOT_MEASURED):
            where = f"{title(row)}, {row.batch} x {format_size(row.seqlen)}"
            cells.setdefault((row.impl, row.note), {})[where] = None
    return [f"{impl}: {note} ({'; '.join(where)})" for (impl, note), where in cells.items()]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _figures(row: Row | None) -> list[str]:
    if row is None or row.median_ms is None:
        return ["", ""]
    share = "" if row.peak_share is None else f" ({row.peak_share:.0%})"
    ms, p20, p80 = (_ms(x) for x in (row.median_ms, row.p20_ms, row.p80_ms))
    return [f"{ms} ({p20}-{p80})", f"{show(row.tflops, '.3g')}{share}"]


def _ms(x: float | None) -> str:
    """To a microsecond, or to four digits."""
    return show(x, ".3f" if x is None or x < 10.0 else ".2f" if x < 100.0 else ".1f")


def plot(rows: Sequence[Row], path: Path) -> None:
    """TFLOP/s over length: a line for each implementation, a panel for each table and mode."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.tflops is not None and row.mode != "fwd_bwd"]
    across = list(dict.fromkeys((row.table, row.mode) for row in timed))
    columns = min(4, max(1, len(across)))
    lines = -(-max(1, len(across)) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * lines), layout="constrained")
    panels: Any = figure.subplots(lines, columns, squeeze=False)
    for panel in panels.flat[len(across) :]:
        panel.set_axis_off()
    names = list(dict.fromkeys(row.impl for row in timed))
    for panel, (key, mode) in zip(panels.flat, across, strict=False):
        mine = [row for row in timed if (row.table, row.mode) == (key, mode)]
        for index, name in enumerate(names):
            points = [(row.seqlen, row.tflops) for row in mine if row.impl == name]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", color=f"C{index}", label=name)
        lens = sorted({row.seqlen for row in mine})
        panel.set_xscale("log", base=2)
        panel.set_xticks(lens, [format_size(n) for n in lens])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_title(f"{title(mine[0])}: {mode}", fontsize=10)
        panel.set_ylabel("TFLOP/s")
        panel.grid(alpha=0.3)
    if across:
        panels.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def show(value: float | None, form: str) -> str:
    """Formatted; nothing where there is no value."""
    return "" if value is None else format(value, form)
