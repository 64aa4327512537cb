"""Runs the code of a page of docs/ as its reader would: its blocks in order, as one program.

    ---
    ranks: 2              the program runs on so many ranks, each as under torchrun
    slow: true            `make test` leaves the page out
    given: [path, data]   names that the page's text describes, made by `tests.pages_given`
    ---

A block of Python is executed; of a ```diff block, the lines after the change are. An ```output
block after a block of Python holds what that block prints on rank 0, and after a line of
`ring-attn` what the command prints; `...` stands for anything, as in doctest.

Each rank starts with other random numbers, as in a reader's processes. A page that draws the
tensors of all ranks must set a seed by itself.
"""

from __future__ import annotations

import doctest
import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from tests import pages_given

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(
    r"^(?P<ticks>```+)(?P<language>\S+)?[^\n]*\n(?P<code>.*?)^(?P=ticks)$", re.M | re.S
)
LANGUAGES = {"python", "diff", "sh", "output", "text", "bibtex"}
DRAW = re.compile(r"\btorch\.rand\w*\(|\btorch\.normal\(")
SEED = "torch.manual_seed("
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` holds the documented output that follows the block, or None."""

    language: str
    code: str
    line: int
    output: str | None


@dataclass(frozen=True)
class Page:
    """A page: its settings and blocks; `name` has no suffix."""

    path: Path
    text: str = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.with_suffix("").name

    @property
    def settings(self) -> dict[str, Any]:
        found = re.match(r"---\n(.*?)^---$", self.text, re.M | re.S)
        settings = {} if found is None else yaml.safe_load(found[1])
        unknown = settings.keys() - {"ranks", "slow", "given"}
        assert not unknown, f"{self.path}: unknown settings {unknown}"
        return settings

    @property
    def blocks(self) -> list[Block]:
        found = list(FENCE.finditer(self.text))
        blocks = []
        for match, after in zip_longest(found, found[1:]):
            language, line = match["language"], self.text.count("\n", 0, match.start()) + 1
            if language is not None and language.startswith("{"):
                continue  # a directive of the site
            assert language in LANGUAGES, f"{self.path}:{line}: no language of {LANGUAGES}"
            output = None
            if after is not None and after["language"] == "output":
                output = after["code"]
            blocks.append(Block(language, match["code"], line, output))
        return blocks

    @property
    def programs(self) -> list[Block]:
        """The blocks that are executed."""
        return [block for block in self.blocks if block.language in ("python", "diff")]

    def unseeded_draw(self) -> int | None:
        """Return the line of a block that draws random numbers before the page sets a seed."""
        for block in self.programs:
            seed, draw = block.code.find(SEED), DRAW.search(block.code)
            if draw is not None and not -1 < seed < draw.start():
                return block.line
            if seed > -1:
                return None
        return None

    def shell_lines(self) -> list[tuple[str, str | None]]:
        """The commands of the page, each with its documented output."""
        lines = []
        for block in self.blocks:
            if block.language == "sh":
                joined = block.code.replace("\\\n", " ")
                commands = [re.sub(r"\s+# .*", "", line) for line in joined.splitlines()]
                commands = [line for line in commands if line and not line.startswith("#")]
                assert block.output is None or len(commands) == 1, f"{self.path}:{block.line}"
                lines += [(command.strip(), block.output) for command in commands]
        return lines


def pages() -> list[Page]:
    """All pages but those that the build of the site writes."""
    paths = sorted(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)
    return [Page(path, path.read_text(encoding="utf-8")) for path in paths]


def after_change(diff: str) -> str:
    """The code after a change, line for line."""
    return "".join(
        "\n" if line.startswith("-") else line[1:] or "\n" for line in diff.splitlines(True)
    )


def run(page: Page, rank: int = 0) -> None:
    """Runs the page's Python blocks in one namespace.

    Raises:
        AssertionError: on rank 0, a block prints something else than its page says.
        Exception: what a block raises; its traceback names the page and the line.
    """
    torch.manual_seed(1000 + rank)
    module = ModuleType("__main__")
    names: dict[str, Any] = module.__dict__
    for name in page.settings.get("given", ()):
        names[name] = getattr(pages_given, name)()
    for block in page.programs:
        code = after_change(block.code) if block.language == "diff" else block.code
        where = "\n" * block.line  # the traceback counts the page's lines
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(where + code, str(page.path), "exec"), names)
        if rank == 0 and block.output is not None:
            check_output(page, block.line, block.output, printed.getvalue())


def check_output(page: Page, line: int, said: str, printed: str) -> None:
    right = doctest.OutputChecker().check_output(said, printed, FLAGS)
    assert right, f"{page.path}:{line} prints\n{printed}\nand its page says\n{said}"
