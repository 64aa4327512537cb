"""The examples in the docstrings do what they say."""

import doctest
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

import ring_attn

# Examples that need processes: they are run, as programs, by the tests of the command line.
NEED_TORCHRUN = {
    "ring_attn.api.ring_attention",
    "ring_attn.api.tree_decode",
    "ring_attn.integrations.context_parallel.context_parallel",
    "ring_attn.integrations.flash_attn.flash_attn_func",
    "ring_attn.models.sdpa.route_sdpa",
    "ring_attn.neighbours.halo",
    "ring_attn.models.sdpa.sdpa_attention",
}

# Importing it runs the command line.
NOT_IMPORTED = {"ring_attn.__main__"}


def modules() -> list[str]:
    found = (info.name for info in pkgutil.walk_packages(ring_attn.__path__, "ring_attn."))
    return sorted(set(found) - NOT_IMPORTED)


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in modules():
        for test in finder.find(import_module(name), name):
            if test.examples:
                yield test


FOUND = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", sorted(set(FOUND) - NEED_TORCHRUN))
def test_example(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    report: list[str] = []
    torch.manual_seed(0)
    result = runner.run(FOUND[name], out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_what_is_left_out_has_an_example() -> None:
    assert set(FOUND) >= NEED_TORCHRUN, "remove it from NEED_TORCHRUN"


def test_examples_are_found() -> None:
    assert len(FOUND) - len(NEED_TORCHRUN) >= 20
