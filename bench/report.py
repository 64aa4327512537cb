"""The one report of all benchmarks: JSON on disk that grows as they measure, and tables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch
from rich import box
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ring_attn.bench.outputs import (
    Outputs,
    changes_table,
    check_same,
    compare,
    comparison_title,
    figures,
    growth_table,
    lines,
    picture,
    to_csv,
    to_page,
)
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

    def __init__(self, setting: S, outputs: Outputs | None = None) -> None:
        """
        Args:
            setting: what is measured.
            outputs: files; the JSON is written whenever the report is saved, the others when the
                run is finished.

        Raises:
            ValueError: the earlier run of `outputs` measured something else.
        """
        self.setting = setting
        self._outputs = outputs or Outputs()
        if self._outputs.earlier is not None:
            check_same(self._outputs.earlier, self.to_setting())
        self.rows: list[R] = []
        self.failures: list[str] = []
        self._start = time.monotonic()
        self._states = {"before": gpu_state()}
        write_if_interrupted(self._outputs.json, self.to_json)

    def more(self) -> dict[str, Any]:
        """The entries of the JSON that only this kind of report has."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        rows: list[Any] = self.rows
        return {
            "machine": machine(),
            "command": command_line(),
            "setting": self.to_setting(),
            "gpu_state": self._states,
            "rows": [asdict(row) for row in rows],
            "failures": self.failures,
            **self.more(),
            "seconds": self.seconds,
        }

    def to_setting(self) -> dict[str, Any]:
        """The setting, as JSON has it."""
        setting: Any = self.setting
        plain: dict[str, Any] = _plain(asdict(setting))
        return plain

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds of the budget."""
        setting: Any = self.setting
        return (math.inf if setting.budget is None else float(setting.budget)) - self.seconds

    @contextmanager
    def progress(self, total: float) -> Iterator[Callable[[str, float], None]]:
        """Shows in a terminal, unless quiet, what is measured and the time left.

        Yields:
            A function that begins a part: its name, and its share of `total`.
        """
        console = table_console()
        another = os.environ.get("RANK", "0") != "0"  # torchrun runs this in every rank
        hidden = self._outputs.quiet or another or not console.is_terminal
        columns = (TextColumn("{task.description}, time left"), TimeRemainingColumn(compact=True))
        with Progress(*columns, console=console, disable=hidden, transient=True) as shown:
            task, done = shown.add_task("begins", total=total), 0.0

            def begin(name: str, share: float) -> None:
                nonlocal done
                shown.update(task, completed=done, description=name)
                done += share

            yield begin

    def save(self, *, last: bool = False) -> None:
        """Writes the report so far: a run that is killed leaves it."""
        if last:
            self._states["after"] = gpu_state()
        if self._outputs.json:
            write_json(self._outputs.json, self.to_json())

    def finish(self, tables: Sequence[Table], last_lines: Sequence[str]) -> int:
        """Prints tables, failures and last lines, and writes what else is asked for.

        Returns:
            The exit status: 1 if something is wrong, or slower than in the earlier run.
        """
        console = table_console()
        console.print(*tables, *self._write_outputs())
        for failure in self.failures:
            console.print(failure, style="red", markup=False)
        for line in last_lines:
            console.print(line, markup=False, soft_wrap=True)  # whole, to be pasted
        return 1 if self.failures else 0

    def _write_outputs(self) -> list[Table]:
        """Tables of growth and of changes; figures that are slower now are failures."""
        now, outputs = self.to_json(), self._outputs
        title = " ".join(now["command"].split()[:3])
        found = figures(now["rows"])
        joined = lines(found)
        tables = [growth_table(joined)] if joined else []
        if outputs.earlier is not None:
            changes = compare(outputs.earlier, now)
            tables.append(changes_table(changes, comparison_title(outputs.earlier, now)))
            slower = [change for change in changes if change.verdict == "slower"]
            self.failures += [f"{c.now.label}: {c.ratio:.2f} x the time before" for c in slower]
            now["failures"] = self.failures
        if outputs.csv is not None:
            outputs.csv.write_text(to_csv(now["rows"]), encoding="utf-8")
        if outputs.plot is not None:
            picture(found, title).savefig(outputs.plot)
        if outputs.page is not None:
            outputs.page.write_text(to_page(title, now, tables), encoding="utf-8")
        return tables


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
