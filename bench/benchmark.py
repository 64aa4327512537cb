"""Run a benchmark: progress, files, the table, the picture and the comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ring_attn.bench.compare import Earlier, changes, changes_table, read_earlier
from ring_attn.bench.report import Report
from ring_attn.bench.rows import Row, notes, table
from ring_attn.cli.arguments import is_first_rank, progress, write_csv

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")
R = TypeVar("R", bound=Row)

# A row is slower if its median is longer by more than this share.
THRESHOLD = 0.1


@dataclass(frozen=True)
class Outputs:
    """The files of a benchmark, and the earlier run with which it is compared."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    earlier: Earlier | None = None
    threshold: float = THRESHOLD
    quiet: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace, bench: str, row: type[Row]) -> Outputs:
        """Read the options, and the earlier run, before anything is measured.

        Raises:
            ValueError: the earlier run cannot be read, or there is a threshold without one.
        """
        if args.threshold is not None and args.compare is None:
            raise ValueError("--threshold needs --compare OLD.json, with which to compare")
        earlier = None
        if args.compare is not None and is_first_rank():  # other nodes may not have the file
            earlier = read_earlier(args.compare, bench, row)
        return cls(
            json=args.json,
            csv=args.csv,
            plot=args.plot,
            earlier=earlier,
            threshold=THRESHOLD if args.threshold is None else args.threshold / 100.0,
            quiet=args.quiet,
        )


class Benchmark(Report[S, R]):
    """The rows of a benchmark so far.

    Attributes:
        name: the second word of the command.
        remarks: further lines below the tables.
    """

    name: str
    title: str

    def __init__(self, setting: S, outputs: Outputs | None = None, *, budget: float | None = None):
        outputs = outputs or Outputs()
        super().__init__(setting, outputs.json, budget=budget)
        self.outputs = outputs
        self.remarks: list[str] = []

    def to_json(self) -> dict[str, object]:
        return {"bench": self.name, **super().to_json(), "remarks": self.remarks}

    def save(self) -> None:
        super().save()
        write_csv(self.outputs.csv, [asdict(row) for row in self.rows])

    def begin(self, stage: str, *, done: float, total: float) -> None:
        """Name the stage that begins, for the lines of progress."""
        progress.begin(stage, done=done, total=total)

    def check_comparable(self, rows: Sequence[Row]) -> None:
        """Refuse a comparison with a run that has none of the rows to measure."""
        if self.outputs.earlier is not None:
            self.outputs.earlier.check_has(rows)

    def conclude(self) -> int:
        """Print tables and notes, and draw; return 1 if a result is wrong or a row is slower."""
        self.save()
        tables = [] if self.outputs.quiet else [table(self.rows, self.title)]
        lines = [*notes(self.rows), *self.remarks]
        if self.outputs.earlier is not None:
            earlier, threshold = self.outputs.earlier, self.outputs.threshold
            found = changes(earlier, self.rows)
            tables.append(changes_table(found, earlier, self.machine, threshold))
            slower = [change for change in found if change.verdict(threshold) == "slower"]
            if not found:
                self.failures.append(f"no row could be compared with {earlier.path}")
            if slower:
                self.failures.append(
                    f"{len(slower)} of {len(found)} rows are slower by more than {threshold:.0%}"
                )
        failures = "1 failure" if len(self.failures) == 1 else f"{len(self.failures)} failures"
        lines.append(f"{self.seconds:.0f} s, {failures}")
        status = self.finish(tables, lines)
        self.draw(self.outputs.plot)
        return status
