"""The one report of all benchmarks: JSON on disk that grows as they measure, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich import box
from rich.table import Table

from ring_attn.bench.timing import gpu_state
from ring_attn.core.dtypes import dtype_name
from ring_attn.tools.arguments import (
    command_line,
    table_console,
    write_if_interrupted,
    write_json,
)
from ring_attn.tools.env import machine

S = TypeVar("S")
R = TypeVar("R")


class Report(Generic[S, R]):
    """The findings of one run so far.

    Attributes:
        setting: what is measured, a dataclass with a `budget` in seconds or None.
        rows: dataclasses, one for each line of the tables.
        failures: what is wrong, in words.
    """

    def __init__(self, setting: S, path: Path | None = None) -> None:
        """
        Args:
            setting: what is measured.
            path: where the JSON goes, whenever the report is saved.
        """
        self.setting = setting
        self.rows: list[R] = []
        self.failures: list[str] = []
        self._path, self._start = path, time.monotonic()
        self._states = {"before": gpu_state()}
        write_if_interrupted(path, self.to_json)

    def more(self) -> dict[str, Any]:
        """The entries of the JSON that only this kind of report has."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        setting: Any = self.setting
        rows: list[Any] = self.rows
        return {
            "machine": machine(),
            "command": command_line(),
            "setting": _plain(asdict(setting)),
            "gpu_state": self._states,
            "rows": [asdict(row) for row in rows],
            "failures": self.failures,
            **self.more(),
            "seconds": self.seconds,
        }

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds of the budget."""
        setting: Any = self.setting
        return (math.inf if setting.budget is None else float(setting.budget)) - self.seconds

    def save(self, *, last: bool = False) -> None:
        """Writes the report so far: a run that is killed leaves it."""
        if last:
            self._states["after"] = gpu_state()
        if self._path:
            write_json(self._path, self.to_json())

    def finish(self, tables: Sequence[Table], lines: Sequence[str]) -> int:
        """Prints tables, failures and last lines; the exit status, 1 if something is wrong."""
        console = table_console()
        console.print(*tables)
        for failure in self.failures:
            console.print(failure, style="red", markup=False)
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)  # whole, to be pasted
        return 1 if self.failures else 0


def new_table(
    title: str, left: Sequence[str], right: Sequence[str], note: str | None = None
) -> Table:
    """An empty table: columns of text, columns of figures, and a last one whose text may wrap."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    if note is not None:
        table.add_column(note)
    return table


def show(value: float | None, form: str) -> str:
    """The value formatted; nothing where there is no value."""
    return "" if value is None else format(value, form)


def _plain(value: Any) -> Any:
    """dtypes and devices by their names, within dictionaries too."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value.type if isinstance(value, torch.device) else value
