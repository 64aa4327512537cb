"""The report that all benchmarks share: a JSON file that grows during the run, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from ring_attn.cli.arguments import TABLE_WIDTH, command_line, write_json
from ring_attn.cli.env import machine

S = TypeVar("S")
R = TypeVar("R")


class Report(Generic[S, R]):
    """The results of one run so far.

    Attributes:
        setting: a dataclass that describes the measurements, maybe with a `budget` in seconds.
        rows: dataclasses, one for each line of the tables.
        failures: messages about wrong results.
    """

    def __init__(self, setting: S, path: Path | None = None) -> None:
        """Begins a run; `path` is the JSON file, if there shall be one."""
        self.setting = setting
        self._path = path
        self.rows: list[R] = []
        self.failures: list[str] = []
        self._start, self._machine = time.monotonic(), machine()

    def to_json(self) -> dict[str, Any]:
        setting: Any = self.setting
        rows: list[Any] = self.rows
        return {
            "machine": self._machine,
            "command": command_line(),
            "setting": asdict(setting),
            "rows": [asdict(row) for row in rows],
            "failures": self.failures,
            "seconds": self.seconds,
        }

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds left of the budget; infinite without one."""
        setting: Any = self.setting
        return (math.inf if setting.budget is None else float(setting.budget)) - self.seconds

    def save(self) -> None:
        """Writes the report so far, which remains if the run is killed."""
        write_json(self._path, self.to_json())

    def finish(self, tables: Sequence[Table], last_lines: Sequence[str]) -> int:
        """Prints tables, failures and last lines; the exit status is 1 if a result is wrong."""
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=TABLE_WIDTH)
        console.print(*tables)
        for failure in self.failures:
            console.print(failure, style="red", markup=False)
        for line in last_lines:
            console.print(line, markup=False, soft_wrap=True)  # no line breaks, for copy and paste
        return 1 if self.failures else 0
