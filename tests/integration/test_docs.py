"""The pages of docs/ are true: their code runs, their commands parse, their links exist."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES, Whitespace

import ring_attn
from ring_attn.cli import env
from ring_attn.cli import main as cli
from tests import pages
from tests.distributed.pool import Pools, RankError
from tests.pages import DOCS, Page
from tests.public_names import MODULES

ROOT = DOCS.parent
PAGES = {str(page.path.relative_to(DOCS)): page for page in pages.pages()}
EVERY = pytest.mark.parametrize("name", list(PAGES))
FRONT = {
    name: Page(ROOT / name, (ROOT / name).read_text("utf-8"))
    for name in ("README.md", "CONTRIBUTING.md")
}
TEXTS = PAGES | FRONT
EVERY_TEXT = pytest.mark.parametrize("name", list(TEXTS))


def with_code(ranks: int | None) -> list[Any]:
    """The pages with code for so many ranks; in one process for None."""
    found = []
    for name, page in PAGES.items():
        if page.programs and page.settings.get("ranks") == ranks:
            marks = [pytest.mark.slow] if page.settings.get("slow") else []
            found.append(pytest.param(name, marks=marks))
    return found


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pools]:
    """Processes for all pages: started anew after a page that failed."""
    pools = Pools(queued=False)
    yield pools
    pools.close()


def run_rank(page: Page, port: int) -> None:
    """Runs a page in a rank without a group, as torchrun starts it."""
    if dist.is_initialized():  # the pool's group, at the first page
        rank = str(dist.get_rank())
        dist.destroy_process_group()
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["MASTER_PORT"] = str(port)
    with redirect_stderr(io.StringIO()):
        pages.run(page, int(os.environ["RANK"]))
    assert not dist.is_initialized(), "the page ends with dist.destroy_process_group()"


def on_two_ranks(pools: Pools, page: Page) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pools(2).run(run_rank, page, store.port, timeout=1000.0)


@pytest.mark.parametrize("name", with_code(None))
def test_code_in_one_process(name: str) -> None:
    pages.run(PAGES[name])


@pytest.mark.dist
@pytest.mark.parametrize("name", with_code(2))
def test_code_on_two_ranks(two_ranks: Pools, name: str) -> None:
    on_two_ranks(two_ranks, PAGES[name])


# -- faults that the runner must find

START = """---
ranks: 2
---
```python
import torch, torch.distributed as dist, ring_attn
dist.init_process_group("gloo")
q = torch.ones(1, 8, 2, 16)
print(tuple(ring_attn.ring_attention(q, q, q).shape))
```
"""
FAULTS = {
    "wrong output": START + "```output\n(1, 16, 2, 16)\n```\n",
    "a block that raises": START
    + "```python\nring_attn.ring_attention(q, q, q, causl=True)\n```\n",
    "a change that raises": START + "```diff\n-ring_attn.check()\n+ring_attn.chek()\n```\n",
    "a group left open": START,
}


@pytest.mark.dist
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_of_a_page_is_found(two_ranks: Pools, tmp_path: Path, fault: str) -> None:
    with pytest.raises(RankError, match=r"broken\.md|destroy_process_group"):
        on_two_ranks(two_ranks, Page(tmp_path / "broken.md", FAULTS[fault]))


def run_together(text: str) -> list[str]:
    """Return the options of directives that hold the text after them: a page loses such text."""
    pattern = r"^:::+\{.*\n(?:^:[a-z-]+:.*\n)*?(^:[a-z-]+:.*\n)(?![:\n])"
    return re.findall(pattern, text, re.MULTILINE)


@EVERY
def test_options_of_directives_end_with_an_empty_line(name: str) -> None:
    assert not run_together(PAGES[name].text)


def test_an_option_that_holds_a_text_is_found() -> None:
    broken = ":::{admonition} No GPU\n:class: warning Every strategy\nis tested.\n:::\n"
    assert run_together(broken) == [":class: warning Every strategy\n"]
    assert not run_together(broken.replace(" Every", "\n\nEvery"))


# -- commands


def check_command(line: str) -> None:
    """Checks a line of shell without running it: programs, options, extras, targets and files."""
    words = shlex.split(line)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] == "export":
        words = words[1:]
        if not words:
            return
    program, rest = words[0], words[1:]
    if program == "ring-attn":
        # Longer names come first: "bench ring" before "bench".
        named = [each for each in cli.COMMANDS if rest[: len(each.words)] == each.words]
        assert named, f"{line}: no such command"
        command = named[0]
        command.parser(cli.PROG).parse_args(rest[len(command.name.split()) :])
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for named in re.findall(r"(?:ring-attn|\.)\[([a-z,]+)\]", line):
            assert {*named.split(",")} <= {*extras["optional-dependencies"]}, line
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= {*targets}, line
    else:
        assert program in ("python", "torchrun"), f"{line}: a program that no test knows"
        for word in rest:
            if word.endswith(".py") and "/" in word:
                assert (ROOT / word).exists(), line


@EVERY_TEXT
def test_random_tensors_are_seeded(name: str) -> None:
    """Whoever copies a page gets the same tensors on every rank."""
    line = TEXTS[name].unseeded_draw()
    assert line is None, f"{name}:{line} draws random numbers before torch.manual_seed"


@pytest.mark.parametrize("before, found", [("", 1), ("torch.manual_seed(0)\n", None)])
def test_a_page_without_a_seed_is_found(before: str, found: int | None) -> None:
    page = Page(DOCS / "drawn.md", f"```python\n{before}x = torch.randn(3)\n```\n")
    assert page.unseeded_draw() == found


WIDEST = 100


@EVERY_TEXT
def test_lines_of_code_fit_the_page(name: str) -> None:
    for match in pages.FENCE.finditer(TEXTS[name].text):
        if not (match["language"] or "").startswith("{"):
            wide = [line for line in match["code"].splitlines() if len(line) > WIDEST]
            assert not wide, f"{name}: {wide[0]}"


def luminance(colour: str) -> float:
    """Return the relative luminance of "rrggbb", as WCAG 2 defines it."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_code_has_contrast() -> None:
    """Every kind of token in the light style, with the colours that site.css replaces."""
    css = (DOCS / "_static/site.css").read_text("utf-8")
    replaced = {
        name: colour
        for names, colour in re.findall(r"((?:\.highlight \.\w+,?\s)+)\{ color: #(\w{6}) \}", css)
        for name in re.findall(r"\.highlight \.(\w+)", names)
    }
    style = get_style_by_name("friendly")
    for token, looks in style:
        short = STANDARD_TYPES[token]
        if looks["color"] and token is not Whitespace:
            colour = replaced.get(short, looks["color"])
            found = contrast(colour, style.background_color.removeprefix("#"))
            assert found >= 4.5, f"{token} ({short}): {found:.2f}"


@EVERY_TEXT
def test_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line, output in TEXTS[name].shell_lines():
        check_command(line)
        if output is not None:
            assert line.startswith("ring-attn "), f"{line}: only ring-attn is run"
            with redirect_stdout(io.StringIO()) as printed:
                assert cli.main(shlex.split(line)[1:]) in (0, 1, 2)
            text = printed.getvalue() + capsys.readouterr().err
            pages.check_output(TEXTS[name], 0, output, text)


@pytest.mark.parametrize(
    "line",
    [
        "ring-attn plan --seqlen 4k --world 3 --bogus",
        "ring-attn demo",
        "pip install 'ring-attn[x]'",
        "make tests",
        "python examples/none.py",
        "curl x",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check_command(line)


# -- names and links


@EVERY_TEXT
def test_links(name: str) -> None:
    """Links within the site are checked by its build, too; of others only the form."""
    text = TEXTS[name].text
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in target:
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#?=&~-]*)?", target), target
        elif not target.startswith("#"):
            path = target.partition("#")[0]
            generated = path.removeprefix("../").startswith("generated/")
            assert generated or (TEXTS[name].path.parent / path).exists(), target


@EVERY_TEXT
def test_paths(name: str) -> None:
    """Files that the text names, from the root of the repository."""
    folders = "ring_attn|bench|examples|tests|kernels|docs"
    for path in re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]*\w)", TEXTS[name].text):
        assert (ROOT / path).exists(), path


CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def changelog_options(text: str, *, removed: bool) -> list[tuple[str, str]]:
    """Return a command ("" if none is named) and an option for each option of some sections."""
    unreleased = text.partition("## Unreleased")[2].partition("\n## ")[0]
    found = []
    for section in unreleased.split("\n### ")[1:]:
        if section.startswith("Removed") != removed:
            continue
        for entry in section.split("\n- ")[1:]:
            spans = re.findall(r"`([^`]+)`", entry)
            command = spans[0].removeprefix("ring-attn ") if spans else ""
            # Elsewhere in an entry of removed options is what replaces them.
            options = [span for span in spans if re.fullmatch(r"--[\w-]+", span) or not removed]
            words = [word for option in options for word in re.findall(r"--[a-z][\w-]*", option)]
            found += [(command, word) for word in words]
    return found


def test_options_of_the_changelog_exist() -> None:
    """Options that it lists as added or changed exist; options under "Removed" do not."""
    options = {
        command.name: {word for x in command.parser("")._actions for word in x.option_strings}
        for command in cli.COMMANDS
    }
    tools = "".join(path.read_text("utf-8") for path in (ROOT / "dev").rglob("*.py"))
    tools += (ROOT / "tests/conftest.py").read_text("utf-8")
    known = {*re.findall(r"\"(--[\w-]+)\"", tools)}.union(*options.values())
    known.add("--max-restarts")  # of torchrun
    named = changelog_options(CHANGELOG, removed=False)
    missing = {word for _, word in named} - known
    assert len(named) > 20 and not missing, missing
    for command, word in changelog_options(CHANGELOG, removed=True):
        own = [name for name in options if f"{name} ".startswith(f"{command} ")]
        assert own or command == "demo", command
        assert not any(word in options[name] for name in own), (command, word)


def test_an_option_that_the_changelog_takes_back_is_found() -> None:
    text = CHANGELOG.replace("### Removed\n", "### Removed\n\n- `ring-attn tune`: `--budget`.\n")
    assert ("tune", "--budget") in changelog_options(text, removed=True)


EACH = """
import os, sys
import ring_attn
for names in sys.argv[1:]:  # of one module, in a process that has imported nothing more
    if (child := os.fork()) == 0:
        eval(names)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, names
"""


@pytest.mark.slow
def test_names_exist_after_import_alone() -> None:
    """Those that the text names; blocks of the site import by themselves."""
    text = "".join(pages.FENCE.sub("", page.text) for page in PAGES.values())
    text += "".join(page.text for page in FRONT.values())
    names = {*re.findall(r"ring_attn(?:\.[A-Za-z_]\w*)+", text)} - {"ring_attn.attention.default"}
    modules = groupby(sorted(names), lambda name: name.split(".")[:3])
    subprocess.run([sys.executable, "-c", EACH, *(",".join(x) for _, x in modules)], check=True)


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.text for name, page in PAGES.items() if name.startswith("reference/"))
    listed = {name.removeprefix("ring_attn.") for name in re.findall(r":: (\S+)", text)}
    unlisted = {*ring_attn.__all__} - listed - {"integrations", "masks"}  # with their own modules
    assert not unlisted
    for module in MODULES[1:]:
        short = module.replace("planning.", "").replace("models.tensor", "tensor")
        assert short.removeprefix("ring_attn.") in listed, module


def test_variables_are_documented() -> None:
    text = PAGES["environment.md"].text
    for variable in env.VARIABLES:
        assert f"`{variable}" in text or not variable.startswith("RING_ATTN"), variable
