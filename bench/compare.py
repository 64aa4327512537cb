"""Comparison of a benchmark with the JSON file of an earlier run.

Rows are compared if the fields that name them are equal. A row is slower if its median is above the
earlier one by more than the threshold, and the spreads, from 20 % to 80 % of the repetitions, do
not overlap. The file is read and checked before anything is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ring_attn.bench.rows import Row, differing, key_fields, label
from ring_attn.cli.arguments import new_table
from ring_attn.values.outside import regular_file

# Entries of `machine` whose change makes a comparison doubtful.
MACHINE = ("cpu", "cores", "devices", "versions")


class Times(NamedTuple):
    """Milliseconds of a row: the median of the repetitions, and their 20 % and 80 % quantiles."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Earlier:
    """The times of an earlier run by the values of key fields, and its machine."""

    path: Path
    times: Mapping[tuple[object, ...], Times]
    machine: Mapping[str, Any]

    def of(self, row: Row) -> Times | None:
        return self.times.get(tuple(_plain(value) for _, value in row.key))

    def check_has(self, rows: Sequence[Row]) -> None:
        """Refuse a file that has none of the rows that will be measured."""
        if not any(self.of(row) for row in rows):
            raise ValueError(
                f"--compare: {self.path} has times, but of other measurements than this command's: "
                "pass the options of the earlier run, which are in its entry 'command'"
            )


def read_earlier(path: Path, bench: str, row: type[Row]) -> Earlier:
    """Read the JSON file of an earlier run of the same benchmark.

    Raises:
        ValueError: the file cannot be read, or is not a report of this benchmark.
    """
    try:
        report = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--compare: {path} cannot be read as JSON: {error}") from None
    rows = report.get("rows") if isinstance(report, dict) else None
    machine = report.get("machine", {}) if isinstance(report, dict) else None
    if not isinstance(rows, list) or not isinstance(machine, dict):
        raise ValueError(
            f"--compare: {path} is not the report of a benchmark, because it has no rows: pass a "
            "file of `ring-attn bench ... --json`"
        )
    if report.get("bench", bench) != bench:
        raise ValueError(
            f"--compare: {path} is of `ring-attn bench {report['bench']}`, not of `bench {bench}`"
        )
    names = [each.name for each in key_fields(row)]
    times = {}
    for number, entry in enumerate(rows):
        found = _times(entry, f"--compare: row {number} of {path}")
        if found is None:
            continue
        lacking = [name for name in names if name not in entry]
        if lacking:
            raise ValueError(
                f"--compare: row {number} of {path} has no {lacking[0]!r}: the file is of another "
                "version, so measure it again"
            )
        times[tuple(_plain(entry[name]) for name in names)] = found
    if not times:
        raise ValueError(f"--compare: {path} has no row with a time")
    return Earlier(path, times, machine)


def _times(entry: object, where: str) -> Times | None:
    """Return the times of a row of a report; None if it has none."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object of JSON")
    if entry.get("median_ms") is None:
        return None
    values = [entry.get(name) for name in ("median_ms", "p20_ms", "p80_ms")]
    numbers = [float(x) for x in values if isinstance(x, int | float)]
    if len(numbers) < 3 or not 0.0 < numbers[1] <= numbers[0] <= numbers[2] < math.inf:
        raise ValueError(
            f"{where} has no times: median_ms, p20_ms and p80_ms must be positive, finite and in "
            f"order, but are {values}"
        )
    return Times(*numbers)


def _plain(value: object) -> object:
    """Return a value as it is after it was written as JSON, or its text if it is no scalar."""
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


class Change(NamedTuple):
    """The times of a row, then and now."""

    row: Row
    then: Times
    now: Times

    @property
    def ratio(self) -> float:
        """The median now, divided by the median then."""
        return self.now.median / self.then.median

    def verdict(self, threshold: float) -> str:
        """Return "slower", "faster" or "same", for a threshold such as 0.1."""
        if self.ratio > 1.0 + threshold and self.now.p20 > self.then.p80:
            return "slower"
        if self.ratio < 1.0 / (1.0 + threshold) and self.now.p80 < self.then.p20:
            return "faster"
        return "same"


def changes(earlier: Earlier, rows: Sequence[Row]) -> list[Change]:
    """Return the changes of rows that both runs have, slower ones first."""
    found = []
    for row in rows:
        then = earlier.of(row)
        if then is not None and row.median_ms and row.p20_ms and row.p80_ms:
            found.append(Change(row, then, Times(row.median_ms, row.p20_ms, row.p80_ms)))
    return sorted(found, key=lambda change: -change.ratio)


def changes_table(
    found: Sequence[Change], earlier: Earlier, machine: Mapping[str, Any], threshold: float
) -> Table:
    """Return the table of changes; its title names what differs in the machine."""
    now = json.loads(json.dumps(machine, default=str))  # as in a file
    other = [name for name in MACHINE if earlier.machine.get(name) != now.get(name)]
    title = f"compared with {earlier.path}" + (f", with other {', '.join(other)}" if other else "")
    table = new_table(title, ("",), ("ms then", "ms now", "now / then", f"beyond {threshold:.0%}"))
    names = differing([change.row for change in found])
    for change in found:
        table.add_row(
            label(change.row, names),
            f"{change.then.median:.4g}",
            f"{change.now.median:.4g}",
            f"{change.ratio:.3f}",
            change.verdict(threshold),
        )
    return table
