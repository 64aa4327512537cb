"""Tests of pytest as cells: each is run alone, in a worker that keeps what it has imported."""

from __future__ import annotations

import contextlib
import io
from collections import Counter

import pytest

from dev.gpu import device
from dev.gpu.cells import Figures, Launched, NotHere
from dev.gpu.device import Compilations
from dev.gpu.watch import ROOT

RANKS, MARK = "tests/distributed", "pytest.mark.nccl"
FILES = ("tests/kernels/test_gpu.py", "tests/unit/test_profiling.py")
# Seconds of a test with prepared kernels, and of one that may compile ten of them.
PREPARED_LIMIT, LIMIT = 40.0, 60.0

# Its tensors are too large for `--prepare`, so it compiles its kernels on the GPU's machine.
UNPREPARED = "test_offsets_beyond_32_bits"

# Plugins by device: a pretended H100, whose kernels fill their results with ones.
PRETEND = ("-p", "tests.kernels.fake_h100")
LAUNCH = (*PRETEND, "-p", "dev.gpu.launching")
PLUGINS = {device.CPU: PRETEND, device.COMPILER: LAUNCH, device.STUB: LAUNCH}

# Without the project's addopts, whose strictness refuses options of plugins that are missing here.
OPTIONS = ("-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider")


class Listed:
    """A plugin that notes the names of tests."""

    def __init__(self) -> None:
        self.names = list[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


class Reported:
    """A plugin that notes the outcomes of tests."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures, self.skipped = list[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # The error first: the rest of the text may be cut off.
            crash = getattr(report.longrepr, "reprcrash", None)
            text = report.longreprtext[-3000:]
            self.failures.append(f"{report.nodeid}: {getattr(crash, 'message', '')}\n{text}")
        elif report.skipped:
            self.skipped.append(str(report.longrepr))
        elif report.when == "call":
            self.passed += 1


def listed() -> Figures:
    """The tests that need a GPU; the first case of each test comes first, then the second.

    A trial has only the first cases.
    """
    plugin = Listed()
    # Tests of the second file launch no kernel of this package: only a GPU can run them.
    files = FILES if device.name() == device.CUDA else FILES[:1]
    printed = _pytest(plugin, "--collect-only", "-m", "gpu", *files)
    if not plugin.names:
        raise RuntimeError(f"no test was found: {printed}")
    names = in_turn(plugin.names)
    if device.is_trial():
        names = names[: len({test_of(name) for name in names})]
    return {"cells": [[name, "dev.gpu.tests:run", [name], limit_of(name)] for name in names]}


def limit_of(name: str) -> float:
    """Seconds of a test on this device."""
    if device.compiles():
        return device.COMPILER_LIMIT
    if device.is_trial():
        return device.PATIENCE * LIMIT
    prepared = device.name() == device.CUDA and device.is_carried()
    return PREPARED_LIMIT if prepared and UNPREPARED not in name else LIMIT


def listed_over_nccl(way: str) -> Figures:
    """The tests of ranks that share a GPU; a cell has all cases of a test, with the same ranks."""
    plugin = Listed()
    # Other files import packages that the machine may lack, and take seconds.
    files = [path for path in sorted((ROOT / RANKS).glob("test_*.py")) if MARK in path.read_text()]
    printed = _pytest(plugin, "--collect-only", "--nccl", way, *map(str, files))
    names = [*dict.fromkeys(map(test_of, plugin.names))]
    if not names:
        raise RuntimeError(f"no test was found: {printed}")
    options = ["--nccl", way]
    return {"cells": [[name, "dev.gpu.tests:run", [name, *options], LIMIT] for name in names]}


def test_of(name: str) -> str:
    """The name of a test without its case."""
    return name.split("[")[0]


def in_turn(names: list[str]) -> list[str]:
    """Order names so that no test waits for all cases of another."""
    cases: Counter[str] = Counter()
    turns = dict[str, int]()
    for name in names:
        test = test_of(name)
        turns[name] = cases[test]
        cases[test] += 1
    return sorted(names, key=lambda name: turns[name])


def run(name: str, *options: str) -> Figures:
    """Run a test, or all cases of one; raise the first failure."""
    plugin = Reported()
    with Compilations() as compilations:
        printed = _pytest(plugin, *options, name)
    if plugin.failures:
        count = f"{len(plugin.failures)} failed, {plugin.passed} passed: "
        raise AssertionError(count + plugin.failures[0])
    if not plugin.passed:
        if plugin.skipped:
            raise NotHere(plugin.skipped[0])
        raise RuntimeError(f"pytest ran no test: {printed[-2000:]}")
    figures = {"passed": plugin.passed, "skipped": len(plugin.skipped), **compilations.figures}
    if device.is_pretended():
        from dev.gpu.launching import figures_of_launches

        return Launched(figures | figures_of_launches())
    return figures


def _pytest(plugin: object, *words: str) -> str:
    """Run pytest in this process; return what it prints."""
    plugins = PLUGINS.get(device.name(), ())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        pytest.main([*OPTIONS, *plugins, *words], plugins=[plugin])
    return printed.getvalue()
