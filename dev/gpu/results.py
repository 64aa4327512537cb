"""The rows of a run: a line of JSON before and after each cell, on disk before anything goes on.

States of a cell:

    begun      it was running when the run ended: what hung the machine, if no other row follows
    ok         passed
    launched   only with `--device stub`: all launches were accepted, and no numbers were compared
    failed     raised, a wrong result too
    poisoned   raised, and CUDA's context was dead afterwards
    hung       had no verdict within its limit, and was killed
    died       its process crashed
    not here   this machine cannot run it; the error says why
    cut        was running when the time of its stage or of the run ended
    no time    was not begun
    no start   its worker did not start

A stage has a row of its own when it ends, with the state "stage".
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from dev.gpu.cells import Figures

FILE = "results.jsonl"
# Logs of the workers, and reports that cells have written.
FILES = "files.tar.gz"

Row = Figures

# Name of the cell that lists the others of its stage.
LISTING = "(list of cells)"

# States of cells that a later run leaves out: all others are run again. A launch that was accepted
# without a GPU says nothing about results.
VERDICTS = ("ok", "failed", "poisoned", "hung", "died", "not here")
BAD = ("failed", "poisoned", "hung", "died", "no start")

# Characters of an error in a line of progress.
SHOWN = 120


class Results:
    """Rows of this run, appended to a file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._path = folder / FILE
        self._lock = threading.Lock()

    def add(self, **row: Any) -> None:
        with self._lock:
            self.rows.append(row)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if row["state"] not in ("begun", "no time"):
                error = " ".join(str(row.get("error", "")).split())[:SHOWN]
                print(f"{row['at']:6.1f} s  {row['state']:8} {row['cell']}  {error}", flush=True)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of an earlier run; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def with_verdict(rows: list[Row]) -> set[str]:
    """Return the labels of the cells that have a verdict."""
    return {row["cell"] for row in rows if row["state"] in VERDICTS}


def last_rows(rows: list[Row]) -> dict[str, Row]:
    """Return the last row of each cell: "begun" only if nothing followed.

    A list of cells that was made is left out: it has tested nothing.
    """
    last = {row["cell"]: row for row in rows if row["state"] != "stage"}
    return {
        label: row
        for label, row in last.items()
        if row["state"] != "ok" or not label.endswith(LISTING)
    }


def counts(rows: list[Row]) -> Counter[str]:
    """Count the cells by state."""
    return Counter(row["state"] for row in last_rows(rows).values())
