"""Cells and stages of the plan, as plain values: no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

# The results of a cell, and values of JSON: each has its own type.
Figures: TypeAlias = dict[str, Any]


class NotHere(Exception):
    """The cell cannot run on this machine; the text says why."""


class Launched(Figures):
    """Figures of a cell whose launches were accepted, while nothing was computed or compared."""


@dataclass(frozen=True)
class Cell:
    """A call of a function in a worker, with a verdict of its own.

    Attributes:
        stage: name of its stage.
        name: unique within the stage.
        target: "module:function", which returns figures (a dict, or None), or raises.
        arguments: of the function, as JSON has them.
        limit: seconds after which the cell counts as hung.
    """

    stage: str
    name: str
    target: str
    arguments: tuple[Any, ...] = ()
    limit: float = 30.0

    @property
    def label(self) -> str:
        """Name of the cell among those of all stages."""
        return f"{self.stage}: {self.name}"


@dataclass(frozen=True)
class Stage:
    """Cells that run after those of earlier stages.

    Attributes:
        name: as in `--stages`.
        seconds: its part of the time on the device.
        proves: what is known afterwards, in a few words.
        cells: known cells.
        lists: "module:function", which returns further cells in a worker: (name, target, arguments,
            limit) each.
        lists_with: arguments of that function.
        workers: number of processes that take cells side by side.
        environment: variables of its workers, beside those of the run; "$NAME" stands for one of
            those, and for nothing if there is none.
        only: listed cells need this word in their names.
        alone: it measures times of the host, so the next stage's workers do not start meanwhile.
    """

    name: str
    seconds: float
    proves: str
    cells: tuple[Cell, ...] = ()
    lists: str = ""
    lists_with: tuple[Any, ...] = ()
    workers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    alone: bool = False

    def having(self, word: str | None) -> Stage:
        """Return the stage with those of its cells whose names have the word."""
        if word is None:
            return self
        cells = tuple(cell for cell in self.cells if word in cell.name)
        return replace(self, cells=cells, only=word)
