"""Outputs of every benchmark besides its JSON: CSV, a picture, a page, a comparison.

All of them read rows as in the JSON, so that rows of an earlier run work too:

    impl  mode  seqlen    median_ms  p20_ms  p80_ms   ...
    key of the figure     the figure and its spread   not compared
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ring_attn.bench.timing import quantiles
from ring_attn.core.values import regular_file
from ring_attn.tools.arguments import add_common, new_table, parse_report, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Row = Mapping[str, Any]
Key = tuple[tuple[str, Any], ...]

# Entries of a setting that do not change the meaning of a figure.
EFFORT = {"iters", "warmup", "budget", "repeats", "samples", "baselines", "implementations"}

# Exponents of attention's time: over the length, without a sparse mask, and over the ranks.
THEORY = {"seqlen": 2.0, "world_size": -1.0}

PICTURES = (".png", ".svg")

# Characters of a line of the HTML page, enough for the columns of any benchmark.
PAGE_WIDTH = 400


@dataclass(frozen=True)
class Outputs:
    """The requested files, the report of an earlier run, and whether to print only a summary."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    page: Path | None = None
    earlier: Mapping[str, Any] | None = None
    quiet: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Outputs:
        """Reads the options, before anything is measured.

        Raises:
            ValueError: the picture has another suffix, or the earlier file is not a report.
            ImportError: a picture is requested, but matplotlib is not installed.
        """
        if args.plot is not None and args.plot.suffix not in PICTURES:
            raise ValueError(f"--plot must end in one of {list(PICTURES)}, got {str(args.plot)!r}")
        if (args.plot or args.report) is not None and find_spec("matplotlib") is None:
            raise ImportError("--plot and --report need matplotlib: pip install matplotlib")
        earlier = None if args.compare is None else read_report(args.compare)
        return cls(args.json, args.csv, args.plot, args.report, earlier, args.quiet)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every benchmark."""
    add = parser.add_argument
    add("--csv", metavar="PATH", type=parse_report, help="write the rows here")
    add("--plot", metavar="PATH", type=parse_report, help="draw the figures as .png or .svg")
    add("--report", metavar="PATH", type=parse_report, help="write one HTML page with everything")
    add(
        "--compare", metavar="OLD.json", type=Path,
        help="exit with 1 if a figure is slower than in OLD.json, beyond the spread of both",
    )  # fmt: skip
    add_common(parser)


def read_report(path: Path) -> Mapping[str, Any]:
    """The JSON of an earlier run; ValueError if the file is not one."""
    try:
        report = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--compare cannot read {path}: {error}") from error
    parts = ("setting", "machine") if isinstance(report, dict) else ()
    if not parts or not isinstance(report.get("rows"), list):
        raise ValueError(f"--compare: {path} is not the JSON of a benchmark, it has no rows")
    for name in parts:
        if not isinstance(report.get(name, {}), dict):
            raise ValueError(f"--compare: the {name} of {path} is not a benchmark's")
    try:
        figures(report["rows"])
    except (LookupError, AttributeError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"--compare: the rows of {path} are not a benchmark's: {error!r}"
        ) from None
    return report


# -- figures


class Figure(NamedTuple):
    """Milliseconds: the median of the samples, and their 20 % and 80 % quantiles."""

    key: Key
    median: float
    low: float
    high: float


def label(key: Key) -> str:
    """The values of a key as text; numbers and flags after their names."""
    words = (str(v) if isinstance(v, str) else f"{n} {v}".replace("_", " ") for n, v in key)
    return ", ".join(words)


def figures(rows: Iterable[Row]) -> list[Figure]:
    """The figures of all rows with a time."""
    with_times = []
    for row in rows:
        if row.get("median_ms") is None:
            continue
        names = list(row)
        first = next(i for i, name in enumerate(names) if name.endswith("_ms"))
        # A key is names, sizes and flags, not tables of configs or errors.
        key = tuple((n, row[n]) for n in names[:first] if isinstance(row[n], (str, int)))
        low, high = row.get("p20_ms"), row.get("p80_ms")
        if low is None or high is None:
            low, _, high = quantiles(row["samples_ms"])
        figure = Figure(key, *map(float, (row["median_ms"], low, high)))
        if not 0 < figure.low <= figure.median <= figure.high < math.inf:
            raise ValueError(f"times must be positive, finite and in order, got {figure[1:]}")
        with_times.append(figure)
    return with_times


class Line(NamedTuple):
    """Figures that differ in one size, `over`; `key` is the rest of their keys."""

    over: str
    key: Key
    points: tuple[tuple[int, Figure], ...]

    @property
    def exponent(self) -> float:
        """Slope of the least-squares fit of log time to log size."""
        xs = [math.log(size) for size, _ in self.points]
        ys = [math.log(figure.median) for _, figure in self.points]
        return statistics.linear_regression(xs, ys).slope


def lines(all_figures: Sequence[Figure]) -> list[Line]:
    """Joins figures that differ in one size only."""
    joined: dict[tuple[str, Key], dict[int, Figure]] = {}
    for figure in all_figures:
        for name, value in figure.key:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                others = tuple(entry for entry in figure.key if entry[0] != name)
                joined.setdefault((name, others), {})[value] = figure
    over_sizes = [
        Line(name, key, tuple(sorted(points.items())))
        for (name, key), points in joined.items()
        if len(points) > 1
    ]
    return sorted(over_sizes, key=lambda line: line.over)


def growth_table(all_lines: Sequence[Line]) -> Table:
    """Fitted exponents and those of the theory."""
    table = new_table(
        "growth: time ~ size ^ exponent", ("over", "of"), ("sizes", "fitted", "theory")
    )
    for line in all_lines:
        sizes = f"{line.points[0][0]} .. {line.points[-1][0]}"
        theory = show(THEORY.get(line.over), ".0f")
        table.add_row(line.over, label(line.key), sizes, f"{line.exponent:.2f}", theory)
    return table


# -- comparison


class Change(NamedTuple):
    """A figure of an earlier run and of this one."""

    earlier: Figure
    now: Figure

    @property
    def ratio(self) -> float:
        """Time now / time then."""
        return self.now.median / self.earlier.median

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" if the spreads do not overlap, else "same"."""
        if self.now.low > self.earlier.high:
            return "slower"
        return "faster" if self.now.high < self.earlier.low else "same"


def check_same(earlier: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    """Refuses an earlier run with another setting."""
    then = _without_effort(earlier.get("setting", {}))
    now = _without_effort(json.loads(json.dumps(setting)))  # lists for tuples, as in a file
    differ = [name for name in then if name in now and then[name] != now[name]]
    if differ:
        changes = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in differ)
        raise ValueError(f"--compare: the earlier run had another setting: {changes}")


def _without_effort(setting: Any) -> Any:
    if not isinstance(setting, dict):
        return setting
    return {name: _without_effort(x) for name, x in setting.items() if name not in EFFORT}


def compare(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Pairs of figures that both runs have; ValueError if there are none."""
    before = {figure.key: figure for figure in figures(earlier["rows"])}
    changes = [Change(before[f.key], f) for f in figures(now["rows"]) if f.key in before]
    if not changes:
        raise ValueError("--compare: the earlier run has no figure of this one")
    return changes


def comparison_title(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A title with the entries of the machine that differ from the earlier run."""
    machines = [json.loads(json.dumps(report.get("machine", {}))) for report in (earlier, now)]
    names = ("cpu", "cores", "devices", "versions")
    other = [name for name in names if machines[0].get(name) != machines[1].get(name)]
    return "against the earlier run" + (f", with other {', '.join(other)}" if other else "")


def changes_table(changes: Sequence[Change], title: str) -> Table:
    """The changes, slower ones first."""
    table = new_table(title, ("figure",), ("then", "now", "now / then", ""))
    for change in sorted(changes, key=lambda change: -change.ratio):
        times = (f"{figure.median:.3g} ms" for figure in change)
        table.add_row(label(change.now.key), *times, f"{change.ratio:.3f}", change.verdict)
    return table


# -- files


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, with lists as JSON."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {
            n: json.dumps(x) if isinstance(x, (list, tuple, dict)) else x for n, x in row.items()
        }
        writer.writerow(plain)
    return text.getvalue()


def picture(all_figures: Sequence[Figure], title: str) -> Picture:
    """Draws lines over a size if several were measured, else bars; whiskers are the spread."""
    from matplotlib.figure import Figure as Picture

    joined = lines(all_figures)
    if joined:
        drawn = Picture(figsize=(9, 6), layout="constrained")
        axes = drawn.subplots()
        most = Counter(line.over for line in joined for _ in line.points)
        over = max(most, key=lambda name: most[name])
        ticks: set[int] = set()
        for line in (line for line in joined if line.over == over):
            sizes, points = zip(*line.points, strict=True)
            name = f"{label(line.key)}: ^{line.exponent:.2f}"
            medians = [figure.median for figure in points]
            axes.errorbar(sizes, medians, yerr=_spread(points), marker="o", capsize=3, label=name)
            ticks.update(sizes)
        axes.set(xscale="log", yscale="log", xlabel=over.replace("_", " "), ylabel="ms")
        axes.set_xticks(sorted(ticks), list(map(str, sorted(ticks))))
        axes.minorticks_off()
        axes.legend(fontsize="small")
    else:
        drawn = Picture(figsize=(9, 1.2 + 0.32 * len(all_figures)), layout="constrained")
        axes = drawn.subplots()
        names, medians = [label(f.key) for f in all_figures], [f.median for f in all_figures]
        axes.barh(names, medians, xerr=_spread(all_figures), color="#4878a8", capsize=3)
        axes.invert_yaxis()
        axes.set(xlabel="ms")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    return drawn


def _spread(points: Sequence[Figure]) -> list[list[float]]:
    """Lengths of the whiskers below and above the medians."""
    return [[f.median - f.low for f in points], [f.high - f.median for f in points]]


def to_page(title: str, report: Mapping[str, Any], tables: Sequence[Table] = ()) -> str:
    """Makes one self-contained HTML page: picture, tables, rows, machine, raw JSON."""
    rows, all_figures = report["rows"], figures(report["rows"])
    names = list(dict.fromkeys(name for row in rows for name in row if "samples" not in name))
    of_rows, of_machine = new_table("rows", names, ()), new_table("machine", ("", ""), ())
    for row in rows:
        of_rows.add_row(*(escape(_cell(row.get(name))) for name in names))
    for name, value in report.get("machine", {}).items():
        of_machine.add_row(name, escape(_cell(value)))
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH)
    for text in (title, report.get("command", ""), *(report.get("failures") or ())):
        console.print(text, markup=False, highlight=False)
    console.print(*tables, of_rows, of_machine, highlight=False)
    before, body, after = console.export_html(inline_styles=True).partition("<body>")
    if all_figures:
        drawn = io.StringIO()
        picture(all_figures, "").savefig(drawn, format="svg")
        svg = drawn.getvalue()
        body += svg[svg.index("<svg") :]
    raw = html.escape(json.dumps(report, indent=1, default=str))
    details = f"<details><summary>Raw JSON</summary><pre>{raw}</pre></details>"
    return before + body + after.replace("</body>", f"{details}</body>")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)
