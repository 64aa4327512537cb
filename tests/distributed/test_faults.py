"""An interrupt in the middle of a call: an error on every rank then and later, never a result.

Interrupts any function of the package, on every choice of ranks; all ranks catch the error and call
again.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions, ring_attention, tree_decode
from ring_attn.core.strategy import NAMES
from ring_attn.testing.cases import strategy_of
from tests.distributed.pool import calls_within, ended, everyone, on_ranks

pytestmark = pytest.mark.gloo

WORLD_SIZE = 4
ROWS = 5
TIMEOUT = 10.0

CASES = [*NAMES, "decode"]
# Made here, because an interrupt within our constructors is not within a call.
STRATEGIES = {name: strategy_of(name, WORLD_SIZE) for name in NAMES}


def run(case: str, group: dist.ProcessGroup) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, ROWS, 4, 8, generator=generator).requires_grad_() for _ in "qkv")
    options: dict[str, Any] = {"group": group, "transport": TransportOptions(timeout=TIMEOUT)}
    if case == "decode":
        return [tree_decode(torch.ones(1, 1, 4, 8), k.detach(), v.detach(), **options)]
    out = ring_attention(q, k, v, causal=True, strategy=STRATEGIES[case], **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def interrupt() -> None:
    raise KeyboardInterrupt


CHOICES = [odd for n in (1, 2, 3) for odd in combinations(range(WORLD_SIZE), n)]


@pytest.mark.parametrize(
    ("case", "trials"),
    [
        *((case, 3) for case in (*CASES[::2], "decode")),
        *(pytest.param(case, 14, marks=pytest.mark.slow) for case in CASES),
    ],
)
@on_ranks(WORLD_SIZE, timeout=280)
def test_an_interrupt_anywhere_on_any_ranks(case: str, trials: int) -> None:
    """Each trial has its own group; a rank with fewer calls is interrupted at its last call."""
    first_group = dist.new_group()
    expected = run(case, first_group)
    with calls_within() as counted:
        run(case, first_group)
    dist.destroy_process_group(first_group)
    most = max(everyone(len(counted)))
    for trial in range(trials):
        at = most * (2 * trial + 1) // (2 * trials)
        # 14 choices in steps of 5: neighbouring calls have other ranks, and other numbers of them.
        odd = CHOICES[5 * (trial + CASES.index(case)) % len(CHOICES)]
        group, got = dist.new_group(), list[Tensor]()
        run(case, group)  # connected
        with calls_within(min(at, len(counted) - 9) if dist.get_rank() in odd else None, interrupt):
            first = ended(lambda group=group, got=got: got.extend(run(case, group)))
        second = ended(lambda group=group: run(case, group))
        where = (case, at, odd, first, second)
        if dist.get_rank() in odd:
            # Another rank's interrupt may have come before this rank's own.
            assert first.error in (KeyboardInterrupt, RuntimeError), where
        else:
            # A call that was complete on this rank before the interrupt has right results.
            is_right = len(got) == len(expected) and all(map(torch.equal, got, expected))
            assert first.error is RuntimeError or is_right, where
        assert second.error is RuntimeError, where
        assert first.seconds < TIMEOUT and second.seconds < TIMEOUT, where
        dist.destroy_process_group(group)
