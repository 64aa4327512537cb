"""The examples in docstrings print the documented output."""

import doctest
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from ring_attn.models.recurrent import SPLITS

# Examples that need two ranks; the last shows rank 1's output.
NEED_RANKS = [
    "ring_attn.api.ring_attention",
    "ring_attn.api.tree_decode",
    "ring_attn.integrations.context_parallel.context_parallel",
    "ring_attn.integrations.flash_attn.flash_attn_func",
    "ring_attn.models.sdpa.route_sdpa",
    "ring_attn.models.sdpa.sdpa_attention",
    "ring_attn.models.batch.unshard",
    "ring_attn.models.logprobs.token_logprobs",
    "ring_attn.models.pooling.pool",
    "ring_attn.sequence.halo.roll",
    "ring_attn.sequence.recurrence.causal_conv",
    "ring_attn.sequence.recurrence.linear_attention",
    "ring_attn.sequence.recurrence.recurrence",
    "ring_attn.testing.ranks.run_rank",
    "ring_attn.sequence.halo.halo",
]

# Importing this module runs the command line.
NOT_IMPORTED = {"ring_attn.__main__"}


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(ring_attn.__path__, "ring_attn."):
        if module.name not in NOT_IMPORTED:
            found = finder.find(import_module(module.name), module.name)
            yield from (test for test in found if test.examples)


FOUND = {test.name: test for test in examples()}
assert len(FOUND) - len(NEED_RANKS) >= 20, "the finder finds examples"


@pytest.mark.parametrize("name", sorted({*FOUND} - {*NEED_RANKS}))
def test_example(name: str) -> None:
    assert run(FOUND[name]) == ""


def run(example: doctest.DocTest) -> str:
    """Differences between an example's output and the documented one."""
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    report: list[str] = []
    torch.manual_seed(0)
    example.globs["torch"] = torch
    with mock.patch.dict(SPLITS):  # one example registers a function
        attempted = runner.run(example, out=report.append).attempted
    assert attempted > 0
    return "".join(report)


def run_on_ranks() -> list[str]:
    names = {"ring_attn": ring_attn, "rank": dist.get_rank()}
    names |= {"F": F, "init_device_mesh": init_device_mesh}
    found = []
    for name in NEED_RANKS:
        FOUND[name].globs.update(names)
        found.append(run(FOUND[name]))
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_examples_of_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(run_on_ranks)
    assert first[:-1] == second[:-1] == [""] * (len(NEED_RANKS) - 1) and second[-1] == ""
