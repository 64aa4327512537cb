"""Options that the subcommands of `ring-attn` share: sizes such as 8k, dtypes, --json, --quiet.

Nothing here imports torch before it is called: a command's help does not wait for it.

The `parse_*` functions raise argparse.ArgumentTypeError; argparse shows its text.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from rich.table import Table

T = TypeVar("T")

# Seconds between lines that say how long a command runs.
LINE_S = 10.0

# Width of a table whose output is not a terminal, and of texts.
TABLE_WIDTH, TEXT_WIDTH = 180, 80

MAX_SIZE = 1 << 50

SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """A positive number of rows, bytes or the like: "113", "8k" (8192), "1M" (1048576)."""
    match = re.fullmatch(r"([0-9]{1,18})([kmg]?)", text.strip().lower())
    size = int(match[1]) * SUFFIXES[match[2]] if match else 0
    if not 1 <= size <= MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give a positive number such as 113, 8k (8192) or "
            f"1M (1048576), up to {format_size(MAX_SIZE)}"
        )
    return size


def shortened(text: str) -> str:
    """The text in quotes; long texts lose their middle."""
    return repr(text) if len(text) <= 60 else f"{text[:25]!r}...{text[-25:]!r}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Comma-separated sizes: "1k,8k"."""
    return tuple(parse_size(part) for part in text.split(","))


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names, each one of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name for name in text.split(",") if name))
        if not {*names} <= {*known}:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {text!r}")
        return names

    return parse


def parse_dtype(text: str) -> torch.dtype:
    """A dtype from its name in torch, or from fp16, bf16, fp32, fp64."""
    from ring_attn.core.dtypes import BY_NAME, SHORT_NAMES  # needs torch, which help does not

    name = SHORT_NAMES.get(text, text)
    if name not in BY_NAME:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a dtype: give one of {', '.join([*BY_NAME, *SHORT_NAMES])}"
        )
    return BY_NAME[name]


def narrow(paragraph: str) -> str:
    """The paragraph in lines of at most `TEXT_WIDTH`; as it is, if it is indented."""
    if paragraph.startswith(" "):
        return paragraph
    return textwrap.fill(paragraph, TEXT_WIDTH, break_on_hyphens=False, break_long_words=False)


@contextmanager
def signs_of_life(name: str) -> Iterator[None]:
    """Writes to stderr every `LINE_S` seconds how long a command runs."""
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(LINE_S):
            print(f"{name}: runs for {time.monotonic() - start:.0f} s", file=sys.stderr)

    if is_first_rank():
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table: columns of text, columns of figures."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show(value: float | None, form: str) -> str:
    """The value formatted; "" for None."""
    return "" if value is None else format(value, form)


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads as `size`: 8192 -> "8k", 113 -> "113"."""
    for suffix in ("g", "m", "k"):
        if size and size % SUFFIXES[suffix] == 0:
            return f"{size // SUFFIXES[suffix]}{suffix if suffix == 'k' else suffix.upper()}"
    return str(size)


def parse_report(text: str) -> Path:
    """A file to write, in an existing folder; checked early, before a run of minutes."""
    path = Path(text)
    if not is_first_rank():
        return path  # other ranks do not write, and may be on another machine
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that may be written")
    return path


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every subcommand has."""
    json = "write all results here (default: nowhere)"
    parser.add_argument("--json", metavar="PATH", type=parse_report, help=json)
    parser.add_argument("--quick", action="store_true", help="a smaller run that takes seconds")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def add_switch(
    parser: argparse.ArgumentParser, name: str, help: str, *, default: bool | None = True
) -> None:
    """Adds --name and --no-name; their help names the default, which only some Pythons append."""
    switch = argparse.BooleanOptionalAction
    added = parser.add_argument(name, action=switch, default=default)
    added.help = f"{help} (default: {'yes' if default else 'no'})"


def with_options(make: Callable[..., T], args: argparse.Namespace, **others: Any) -> T:
    """Calls `make` with `others`, and with the options named like its other parameters."""
    names = inspect.signature(make).parameters
    return make(**{name: x for name, x in vars(args).items() if name in names} | others)


def command_line() -> str:
    """The command as typed, without --json PATH, which does not change the measurements."""
    program, *words = sys.argv
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    path = Path(program)
    module = ("python", "-m", path.parent.name)
    return shlex.join([*(module if path.name == "__main__.py" else ("ring-attn",)), *words])


def is_first_rank() -> bool:
    """Tells whether this process writes and prints: under torchrun every rank runs the command."""
    return os.environ.get("RANK", "0") == "0"


def write_json(path: Path | None, payload: dict[str, Any]) -> None:
    """Writes a report on the first rank, unless the path is None; its folder must exist.

    Infinities and NaN become null, as JSON has neither, and dtypes texts. Each entry, and each item
    of a list, is on its own line, so that diffs show rows. The file is whole at any time, even if
    the process is killed.
    """
    if path is None or not is_first_rank():
        return
    entries = [f"  {json.dumps(name)}: {_lines(value)}" for name, value in _finite(payload).items()]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _lines(value: Any) -> str:
    dump = partial(json.dumps, allow_nan=False, default=str)
    if not isinstance(value, list) or not value:
        return dump(value)
    return "[\n" + ",\n".join(f"    {dump(x)}" for x in value) + "\n  ]"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
