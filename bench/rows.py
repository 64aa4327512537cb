"""Rows of benchmarks: each field says whether it names a measurement or is a figure of it.

From the fields follow the table on the screen, the columns of JSON and CSV, the rows of an earlier
run that are compared, and the lines of a picture.

    impl  mode  seqlen ..     median_ms  tflops ..     note
    fields by `key`           fields by `figure`       why there is no time, or a wrong result
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

from rich.table import Table

from ring_attn.bench.timing import quantiles
from ring_attn.cli.arguments import format_size, new_table, show

# The most characters of a reason, which is one line below a table.
NOTE_CHARS = 240


class Column(NamedTuple):
    """How a field is shown.

    Attributes:
        title: the head of the column.
        text: returns the text of a value.
        is_key: whether the field names the measurement.
        hidden: whether the field is only in files.
    """

    title: str
    text: Callable[[Any], str]
    is_key: bool
    hidden: bool = False


def key(title: str, text: Callable[[Any], str] = str, *, default: Any = ...) -> Any:
    """Return a field that names a measurement. `Any`, as of `dataclasses.field`."""
    metadata = {"column": Column(title, text, is_key=True)}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def figure(title: str, form: str, *, scale: float = 1.0, hidden: bool = False) -> Any:
    """Return a field of a figure, None by default, which is shown as `scale` times its value."""

    def text(value: float | None) -> str:
        return show(None if value is None else scale * value, form)

    column = Column(title, text, is_key=False, hidden=hidden)
    return field(default=None, metadata={"column": column})


def word(title: str) -> Any:
    """Return a field of a text beside the figures, None by default."""
    column = Column(title, lambda value: value or "", is_key=False)
    return field(default=None, metadata={"column": column})


def length(value: int) -> str:
    """Return a size as `parse_size` reads it."""
    return format_size(value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement of an implementation in a mode; figures are None where there are none.

    Attributes:
        impl: the implementation.
        mode: "fwd", "bwd" or "fwd_bwd", or the name of an operation.
        median_ms, p20_ms, p80_ms: milliseconds over the repetitions.
        samples: number of repetitions.
        note: the reason why there is no time, or a wrong result.
    """

    impl: str = key("")
    mode: str = key("mode")
    median_ms: float | None = figure("ms", ".4g")
    p20_ms: float | None = figure("p20", ".4g", hidden=True)
    p80_ms: float | None = figure("p80", ".4g", hidden=True)
    samples: int = 0
    note: str = ""

    def timed(self, samples: Sequence[float]) -> Self:
        """Return the row with times, from samples in milliseconds."""
        p20, median, p80 = quantiles(samples)
        return replace(self, median_ms=median, p20_ms=p20, p80_ms=p80, samples=len(samples))

    def without_time(self, why: str) -> Self:
        """Return the row with the reason why it has no time."""
        why = " ".join(why.split())
        if len(why) > NOTE_CHARS:
            why = f"{why[: NOTE_CHARS - 3]}..."
        return replace(self, note=why)

    @property
    def key(self) -> tuple[tuple[str, object], ...]:
        """The names and values of the fields that name the measurement."""
        return tuple((each.name, getattr(self, each.name)) for each in key_fields(type(self)))


def columns(row: type[Row]) -> dict[str, Column]:
    """Return the columns of a class of rows by the names of their fields."""
    return {each.name: each.metadata["column"] for each in fields(row) if each.metadata}


def key_fields(row: type[Row]) -> list[Field[Any]]:
    """Return the fields that name a measurement."""
    return [each for each in fields(row) if each.metadata and each.metadata["column"].is_key]


def differing(rows: Iterable[Row]) -> list[str]:
    """Return the names of key fields that have several values; always the implementation's."""
    rows = list(rows)
    names = [each.name for each in key_fields(type(rows[0]))] if rows else []
    return [n for n in names if n == "impl" or len({getattr(row, n) for row in rows}) > 1]


def shared(rows: Sequence[Row]) -> str:
    """Return the fields that all rows have in common, as a title: "seqlen 8k, causal"."""
    if not rows:
        return ""
    varying = differing(rows)
    words = []
    for name, column in columns(type(rows[0])).items():
        if column.is_key and name not in varying:
            text = column.text(getattr(rows[0], name))
            words.append(f"{column.title} {text}" if column.title else text)
    return ", ".join(words)


def table(rows: Sequence[Row], title: str, only: Sequence[str] | None = None) -> Table:
    """Return the table of the rows that have a time: fields that differ, and all figures.

    `only` are the names of the figures to show; None means all.
    """
    timed = [row for row in rows if row.median_ms is not None]
    varying = differing(timed)
    shown = columns(type(rows[0])) if rows else {}
    left = [name for name, column in shown.items() if column.is_key and name in varying]
    right = [
        name
        for name, column in shown.items()
        if not column.is_key
        and not column.hidden
        and (only is None or name in only)
        and any(getattr(row, name) is not None for row in timed)
    ]
    made = new_table(
        f"{title}: {shared(timed)}",
        [shown[name].title for name in left],
        [shown[name].title for name in right],
    )
    for row in timed:
        made.add_row(*(shown[name].text(getattr(row, name)) for name in (*left, *right)))
    return made


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each note, with the number of the rows that it concerns."""
    where: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.note:
            where.setdefault((row.impl, row.note), []).append(row)
    varying = [name for name in differing(rows) if name not in ("impl", "mode")]
    lines = []
    for (impl, note), concerned in where.items():
        cells = dict.fromkeys(_place(row, varying) for row in concerned)
        first = next(iter(cells))
        more = f"; {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"{impl}: {note}" + (f" ({first}{more})" if first else ""))
    return lines


def label(row: Row, names: Sequence[str]) -> str:
    """Return the values of some key fields of a row: "ours, fwd, length 8k"."""
    shown = columns(type(row))
    words = []
    for name in names:
        value = getattr(row, name)
        text = shown[name].text(value)
        words.append(f"{shown[name].title} {text}" if isinstance(value, int) else text)
    return ", ".join(words)


def _place(row: Row, names: Sequence[str]) -> str:
    shown = columns(type(row))
    return ", ".join(f"{shown[n].title} {shown[n].text(getattr(row, n))}" for n in names)
