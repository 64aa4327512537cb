"""Options that the subcommands of `ring-attn` share: sizes such as 8k, dtypes, --json, --quiet.

torch is imported only within functions that need it, so that a command's help does not wait for it.

The `parse_*` functions raise argparse.ArgumentTypeError, and argparse shows its text.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import json
import math
import os
import re
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from rich.table import Table

T = TypeVar("T")

# Seconds between lines that say how long a command has been running.
LINE_S = 10.0

# Width of a table whose output is not a terminal, and of texts.
TABLE_WIDTH, TEXT_WIDTH = 180, 80

MAX_SIZE = 1 << 50

SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

SIZE = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,9})?)(?P<suffix>[kmgt]?)(i?b)?")


def parse_size(text: str) -> int:
    """Parse a positive number of rows, bytes or others.

    Suffixes are powers of 1024, and a B after them means the same: "113", "1.5k" (1536), "1M"
    (1048576), "80GB" (80 x 1024^3).
    """
    match = SIZE.fullmatch(text.strip().lower())
    size = Fraction(match["number"]) * SUFFIXES[match["suffix"]] if match else Fraction(0)
    if size.denominator != 1 or not 1 <= size <= MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a size: pass a positive whole number such as 113, "
            f"1.5k (1536), 8k (8192), 1M (1048576) or 80GB, up to {format_size(MAX_SIZE)}"
        )
    return int(size)


def count_of(noun: str, least: int = 1) -> Callable[[str], int]:
    """Return a parser of a number of things, such as ranks or threads: "4", "1k"."""

    def parse(text: str) -> int:
        try:
            count = parse_size(text)
        except argparse.ArgumentTypeError:
            count = 0
        if count < least:
            raise argparse.ArgumentTypeError(
                f"{shortened(text)} is not a number of {noun}: pass {least} or more, such as "
                f"{max(least, 2)}"
            )
        return count

    return parse


parse_ranks = count_of("ranks")


def parse_seed(text: str) -> int:
    """Parse a seed: a number from 0 to 2**63 - 1."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a seed: pass a number from 0, such as 7"
        )
    return int(text)


def parse_seconds(text: str) -> float:
    """Parse a duration in seconds, above 0: "120" or "0.5"."""
    is_number = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text.strip()) is not None
    if not is_number or not float(text):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a number of seconds: pass a number above 0, such as 120"
        )
    return float(text)


def parse_rank_counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers of ranks: "2,4,8"."""
    return tuple(dict.fromkeys(parse_ranks(part) for part in text.split(",")))


def shortened(text: str) -> str:
    """Return the text in quotes; of a long text, only the beginning and the end."""
    return repr(text) if len(text) <= 60 else f"{text[:25]!r}...{text[-25:]!r}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse comma-separated sizes: "1k,8k"."""
    return tuple(parse_size(part) for part in text.split(","))


def parse_percent(text: str) -> float:
    """Parse a percentage above 0: "10" or "2.5"."""
    value = float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text.strip()) else 0.0
    if not value:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a percentage: pass a number above 0, such as 10"
        )
    return value


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Parse query and kv heads: "32/8,16" is ((32, 8), (16, 16))."""
    pairs = []
    for part in text.split(","):
        q, slash, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv if slash else q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(
                f"{part!r}: the number of query heads must be a multiple of the kv heads"
            )
        pairs.append((heads, kv_heads))
    return tuple(pairs)


def parse_head_dims(text: str) -> tuple[tuple[int, int], ...]:
    """Parse head dims of q and k, and of v: "128,192/128" is ((128, 128), (192, 128))."""
    pairs = (part.partition("/") for part in text.split(","))
    return tuple((parse_size(qk), parse_size(v if slash else qk)) for qk, slash, v in pairs)


def names_of(
    known: Iterable[str], *, may_be_empty: bool = True
) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each of which must be in `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name for name in text.split(",") if name))
        if not {*names} <= {*known} or not (names or may_be_empty):
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(known)}, got {text!r}")
        return names

    return parse


def parse_dtype(text: str) -> torch.dtype:
    """Parse a dtype: its name in torch, or fp16, bf16, fp32, fp64."""
    from ring_attn.core.dtypes import BY_NAME, SHORT_NAMES  # needs torch

    name = SHORT_NAMES.get(text, text)
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype: pass one of {', '.join([*BY_NAME, *SHORT_NAMES])}"
        )
    return BY_NAME[name]


def narrow(paragraph: str) -> str:
    """Wrap a paragraph to lines of at most `TEXT_WIDTH`, unless it is indented."""
    if paragraph.startswith(" "):
        return paragraph
    return textwrap.fill(paragraph, TEXT_WIDTH, break_on_hyphens=False, break_long_words=False)


@dataclass
class Progress:
    """The stage of a command, and how much of it is left, for `signs_of_life`.

    Attributes:
        stage: what runs now; empty if the command does not say it.
        done, total: work done before this stage, and all work, in any unit.
        start: when the work began, in seconds of `time.monotonic`.
        by_rank: whether rank 0, which is another process, writes the lines instead.
    """

    stage: str = ""
    done: float = 0.0
    total: float = 0.0
    start: float = 0.0
    by_rank: bool = False

    def begin(self, stage: str, *, done: float, total: float) -> None:
        """Begin a stage, before which `done` of `total` is done."""
        if not self.stage or not done or done < self.done:
            self.start = time.monotonic()
        self.stage, self.done, self.total = stage, done, total

    def words(self) -> str:
        """Return the stage and the time that is left, if some work is done."""
        if not self.stage:
            return ""
        share = self.done / self.total if self.total else 0.0
        if share <= 0.0:
            return f", {self.stage}: 0 % done"
        left = (time.monotonic() - self.start) * (1.0 - share) / share
        return f", {self.stage}: {share:.0%} done, about {left:.0f} s left".replace("%", " %")


# The progress of the command that runs in this process.
progress = Progress()


@contextmanager
def signs_of_life(name: str) -> Iterator[None]:
    """Write to stderr every `LINE_S` seconds for how long a command has been running, and where."""
    ended, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(LINE_S):
            if not progress.by_rank:
                seconds = time.monotonic() - start
                print(f"{name}: running for {seconds:.0f} s{progress.words()}", file=sys.stderr)

    if is_first_rank():
        threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        vars(progress).update(vars(Progress()))


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table with columns of text (`left`) and of figures (`right`)."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show(value: float | None, form: str) -> str:
    """Format the value; return "" for None."""
    return "" if value is None else format(value, form)


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` reads as `size`: 8192 -> "8k", 113 -> "113"."""
    for suffix, shown in (("t", "T"), ("g", "G"), ("m", "M"), ("k", "k")):
        if size and size % SUFFIXES[suffix] == 0:
            return f"{size // SUFFIXES[suffix]}{shown}"
    return str(size)


def parse_report(text: str) -> Path:
    """Return the path of a file to write; check early that this is possible.

    A run may take minutes before it writes the file.
    """
    path = Path(text)
    if not is_first_rank():
        return path  # other ranks do not write, and may be on another machine
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a file that may be written: pass a file in an existing folder"
        )
    return path


def parse_picture(text: str) -> Path:
    """Parse a picture to write, as `parse_report`; it must be a kind of file that can be drawn."""
    from ring_attn.values.outside import picture_path

    try:
        return parse_report(str(picture_path(text)))
    except (ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_plot(parser: argparse.ArgumentParser, shown: str) -> None:
    """Add the option of subcommands that draw a picture of what they print."""
    parser.add_argument(
        "--plot",
        metavar="PATH",
        type=parse_picture,
        help=f"draw {shown} in this file, .svg or .png (default: no file); needs matplotlib",
    )


def add_common(parser: argparse.ArgumentParser, *, quick: bool = True) -> None:
    """Add the options that every subcommand has; `quick` if it has a smaller run."""
    parser.add_argument(
        "--json",
        metavar="PATH",
        type=parse_report,
        help="write all results to this file (default: no file)",
    )
    if quick:
        help = "a smaller run that takes seconds"
        parser.add_argument("--quick", action="store_true", help=help)
    parser.add_argument("--quiet", action="store_true", help="print only the summary")


def add_switch(
    parser: argparse.ArgumentParser, name: str, help: str, *, default: bool | None = True
) -> None:
    """Add --name and --no-name, with the default in their help, which not all Pythons append."""
    switch = argparse.BooleanOptionalAction
    added = parser.add_argument(name, action=switch, default=default)
    added.help = f"{help} (default: {'yes' if default else 'no'})"


def with_options(make: Callable[..., T], args: argparse.Namespace, **others: object) -> T:
    """Call `make` with `others`, and with the options that have the names of its parameters."""
    parameters = inspect.signature(make).parameters
    options = {name: value for name, value in vars(args).items() if name in parameters}
    return make(**options | others)


def command_line() -> str:
    """Return the command as typed, without the files to write, which change no measurements."""
    program, *words = sys.argv
    for option in ("--json", "--csv", "--plot", "--compare", "--threshold"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    path = Path(program)
    if path.name == "__main__.py":
        return shlex.join(["python", "-m", path.parent.name, *words])
    return shlex.join(["ring-attn", *words])


def is_first_rank() -> bool:
    """Return whether this process writes and prints: under torchrun every rank runs the command."""
    return os.environ.get("RANK", "0") == "0"


def write_json(path: Path | None, payload: Mapping[str, object]) -> None:
    """Write a report on the first rank, unless the path is None; its folder must exist.

    Infinities and NaN become null, because JSON has neither, and dtypes become text. Each entry,
    and each item of a list, is on its own line, so that diffs show rows.
    """
    entries = [
        f"  {json.dumps(str(name))}: {_lines(_finite(value))}" for name, value in payload.items()
    ]
    write_text(path, "{\n" + ",\n".join(entries) + "\n}\n")


def write_csv(path: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with the same names as CSV on the first rank, unless the path is None.

    The first line has the names. None is an empty cell.
    """
    if not rows:
        return
    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def write_text(path: Path | None, text: str) -> None:
    """Write a file on the first rank, unless the path is None.

    The file is complete at any time, even if the process is killed.
    """
    if path is None or not is_first_rank():
        return
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _lines(value: object) -> str:
    """Return a value as JSON, with each item of a list on its own line."""
    dump = partial(json.dumps, allow_nan=False, default=str)
    if not isinstance(value, list) or not value:
        return dump(value)
    return "[\n" + ",\n".join(f"    {dump(x)}" for x in value) + "\n  ]"


def _finite(value: object) -> object:
    """Return the value with None for infinities and NaN, and with texts as keys."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
