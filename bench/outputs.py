"""Outputs of every benchmark besides its JSON: a picture, and a comparison with an earlier run.

Both read rows as in the JSON, so that rows of an earlier run work too:

    impl  mode  seqlen    median_ms  p20_ms  p80_ms   ...
    key of the figure     the figure and its spread   not compared
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from ring_attn.bench.timing import quantiles
from ring_attn.cli.arguments import new_table
from ring_attn.core.values import regular_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

Row = Mapping[str, Any]
RowKey = tuple[tuple[str, Any], ...]

# Entries of a setting that do not change the meaning of a figure.
EFFORT = {"iters", "warmup", "budget", "repeats", "samples", "baselines", "implementations"}

PICTURES = (".png", ".svg")


@dataclass(frozen=True)
class Outputs:
    json: Path | None = None
    plot: Path | None = None
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
        if args.plot is not None and find_spec("matplotlib") is None:
            raise ImportError("--plot needs matplotlib: pip install 'ring-attn[bench]'")
        earlier = None if args.compare is None else read_report(args.compare)
        return cls(args.json, args.plot, earlier, args.quiet)


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

    key: RowKey
    median: float
    low: float
    high: float


def label(key: RowKey) -> str:
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


# -- comparison


class Change(NamedTuple):
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


def picture(all_figures: Sequence[Figure], title: str) -> Picture:
    """Draws a bar for each figure; whiskers are the spread."""
    from matplotlib.figure import Figure as Picture

    drawn = Picture(figsize=(9, 1.2 + 0.32 * len(all_figures)), layout="constrained")
    axes = drawn.subplots()
    names, medians = [label(f.key) for f in all_figures], [f.median for f in all_figures]
    spread = [[f.median - f.low for f in all_figures], [f.high - f.median for f in all_figures]]
    axes.barh(names, medians, xerr=spread, color="#4878a8", capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    return drawn
