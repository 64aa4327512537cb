"""The report of a benchmark: a JSON file that grows during the run, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ring_attn import plots
from ring_attn.cli.arguments import TABLE_WIDTH, command_line, is_first_rank, write_json
from ring_attn.cli.env import machine
from ring_attn.plots.benches import measured

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# No table is wider, in characters.
MAX_WIDTH = 1000

S = TypeVar("S", bound="DataclassInstance")
R = TypeVar("R", bound="DataclassInstance")


class Report(Generic[S, R]):
    """The results of one run so far.

    Attributes:
        setting: a dataclass that describes the measurements.
        rows: dataclasses, one for each line of the tables.
        failures: messages about wrong results.
        machine: the versions and the hardware.
    """

    def __init__(
        self, setting: S, path: Path | None = None, *, budget: float | None = None
    ) -> None:
        """Begin a run.

        Args:
            setting: the description of the measurements.
            path: the JSON file; None writes none.
            budget: seconds that the run may take; None is no limit.
        """
        self.setting = setting
        self._path = path
        self.rows: list[R] = []
        self.failures: list[str] = []
        self._budget = budget
        self._start = time.monotonic()
        self.machine = machine()

    def to_json(self) -> dict[str, object]:
        return {
            "machine": self.machine,
            "command": command_line(),
            "setting": asdict(self.setting),
            "rows": [asdict(row) for row in self.rows],
            "failures": self.failures,
            "seconds": self.seconds,
        }

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return the seconds left of the budget, which are infinite without a budget."""
        budget = math.inf if self._budget is None else self._budget
        return budget - self.seconds

    def save(self) -> None:
        """Write the report so far, so that it remains if the run is killed."""
        write_json(self._path, self.to_json())

    def draw(self, path: Path | None) -> None:
        """Write a picture of the rows that have times, unless the path is None."""
        if path is None or not is_first_rank():
            return
        report = self.to_json()
        if measured(report):
            plots.save(plots.bench(report), path)
        else:
            print(f"{path}: no picture, since nothing was measured")

    def finish(self, tables: Sequence[Table], last_lines: Sequence[str]) -> int:
        """Print tables, failures and last lines; return the exit status, 1 if a result is wrong."""
        console = console_for(tables)
        for table in tables:
            print_table(console, table)
        for failure in self.failures:
            console.print(failure, style="red", markup=False)
        for line in last_lines:
            console.print(line, markup=False, soft_wrap=True)  # no line breaks, for copy and paste
        return 1 if self.failures else 0


def print_table(console: Console, table: Table) -> None:
    """Print a table below its title, which would otherwise be wrapped to the width of the table.

    A table of nothing is left out.
    """
    if not table.rows:
        return
    title, table.title = table.title, None
    console.print(title, style="italic", markup=False)
    console.print(table)
    table.title = title


def console_for(tables: Sequence[Table]) -> Console:
    """Return a console that is as wide as the tables, so that no figure is cut off.

    A terminal that is narrower breaks the lines.
    """
    console = Console(highlight=False)
    wide = Console(highlight=False, width=MAX_WIDTH)
    widths = [Measurement.get(wide, wide.options, table).maximum for table in tables]
    least = console.width if console.is_terminal else TABLE_WIDTH
    return Console(highlight=False, width=max([least, *widths]))
