"""Settings of the site, and what is made while it is built: pictures, and the commands' help."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["COLUMNS"] = "80"  # the width of the commands' help

import pictures  # noqa: E402

from ring_attn import __version__  # noqa: E402
from ring_attn.cli.arguments import narrow  # noqa: E402
from ring_attn.cli.main import COMMANDS, PROG, main  # noqa: E402

project = "ring_attn"
version = release = __version__
copyright = "the ring_attn authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ring_attn {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# The dark style of code needs no script: browsers ask for it.
pygments_style = "friendly"

default_role = "code"
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
nitpicky = True
# Names of other packages, of which the site has no index: it is built without a network.
nitpick_ignore_regex = [("py:.*", r"(torch|transformers|collections|dataclasses|abc)\b.*")]
# Types of our own that no page documents.
nitpick_ignore_regex += [("py:class", r"ring_attn\.(call|core\.mask)\.\w+")]

# A mistake for each command, whose error is shown below its help.
WRONG = {
    "doctor": "--json nowhere/report.json",
    "env": "--json nowhere/report.json",
    "verify": "--backend magic",
    "audit": "nothing.py:step",
    "plan": "--seqlen 1M --world-size 8 --cluster nothing",
    "bench ring": "--world-size 2 --peer magic",
    "bench kernel": "--heads 8/3",
    "bench decode": "--mla --heads 8",
    "bench comm": "--world-size 1",
    "bench": "--seqlen 8k",
    "calibrate": "--device tpu",
    "tune": "--device tpu",
}


def write_commands(path: Path) -> None:
    """A page with the help of every command."""
    parts = ["# Commands and their options", "`ring-attn COMMAND --help` prints the same."]
    for command in COMMANDS:
        text = command.parser(PROG).format_help().rstrip()
        parts.append(f"## ring-attn {command.name}\n\n````text\n{text}\n````")
        words = [*command.name.split(), *WRONG[command.name].split()]
        with redirect_stderr(io.StringIO()) as told:
            try:
                status: object = main(words)
            except SystemExit as ended:
                status = ended.code
        line = f"$ ring-attn {' '.join(words)}\n{narrow(told.getvalue())}"
        parts.append(f"A mistake, and the exit status is {status}:\n\n````text\n{line}\n````")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def make_generated(_app: Any) -> None:
    folder = HERE / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_commands(folder / "commands.md")
    pictures.write_all(folder / "pictures")


SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Example)\b.*:")
FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}


def as_rst(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Rewrites a docstring: its sections as fields, other indented parts (drawings) as they are."""
    found: list[str] = []
    section, literal = None, False
    for line in lines:
        text = line.strip()
        if text and not line[0].isspace():
            literal, start = False, SECTION.fullmatch(line)
            section = start[1] if start else None
            opening = {"Returns": ["", ":returns:"], "Example": ["", "Example:", ""]}
            found += opening.get(section, [""]) if section else [line]
        elif section in FIELDS and line.startswith("    ") and not line[4:5].isspace() and text:
            names, _, rest = text.partition(":")
            names = names.replace("*", r"\*")
            found += [f":{FIELDS[section]} {name}:" for name in names.split(", ")]
            found.append(f"    {rest.strip()}")
        elif section == "Example" or section in FIELDS:
            found.append(line[4:])
        elif section is None and text and not literal and found and not found[-1].strip():
            literal = True
            found += ["::", "", line]
        else:
            found.append(line)
    lines[:] = [*found, ""]


def setup(app: Any) -> None:
    app.connect("builder-inited", make_generated)
    app.connect("autodoc-process-docstring", as_rst)
