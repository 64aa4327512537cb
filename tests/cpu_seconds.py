"""CPU time of each test, with that of all processes that it starts: `-p tests.cpu_seconds`.

    make test-all ARGS="-p tests.cpu_seconds"

prints the costliest tests at the end. Wall time cannot tell them: tests run side by side, and many
wait. Those that took more than a second are named in `tests/costly.txt`, unless nothing else in
`make test` shows what they show.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 60
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_seconds"

# Test -> its CPU seconds.
SPENT = pytest.StashKey[dict[str, float]]()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, also those that have ended."""
    parent: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # What follows the name of the program, which may contain spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(folder.name)
        parent[pid] = int(fields[1])
        # Its own time in user and system mode, and that of its children that have ended.
        ticks[pid] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    children = ours
    while children:
        children = {pid for pid, above in parent.items() if above in children}
        ours |= children
    return sum(ticks.get(pid, 0) for pid in ours) / TICKS_PER_SECOND


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = cpu_seconds()
    result = yield
    item.config.stash.setdefault(SPENT, {})[item.nodeid] = cpu_seconds() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the times of a worker of pytest-xdist to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[PROPERTY] = session.config.stash.get(SPENT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    spent = getattr(node, "workeroutput", {}).get(PROPERTY, {})
    node.config.stash.setdefault(SPENT, {}).update(spent)  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    spent = config.stash.get(SPENT, {})
    terminalreporter.section(f"CPU seconds: {sum(spent.values()):.1f} in {len(spent)} tests")
    for name in sorted(spent, key=spent.__getitem__, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{spent[name]:7.2f}  {name}")
