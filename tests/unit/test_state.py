"""The running state: gaps between parts, and sinks far off.

test_backends.py and test_strategies.py check that merging in any order gives one softmax.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ring_attn.core.state import State

BATCH, ROWS, HEADS, DIM = 2, 5, 3, 8
Part = tuple[Tensor, Tensor, Tensor]


def part(seed: int) -> Part:
    """Returns (acc, m, l) of some keys."""
    generator = torch.Generator().manual_seed(seed)
    acc = torch.randn(BATCH, ROWS, HEADS, DIM, generator=generator)
    m = torch.randn(BATCH, HEADS, ROWS, generator=generator)
    return acc, m, 1 + torch.rand(BATCH, HEADS, ROWS, generator=generator)


def folded(parts: Sequence[Part], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    state = State((BATCH, ROWS, HEADS, DIM), torch.float32, "cpu", sinks)
    for one in parts:
        state.fold(slice(0, ROWS), *(x.clone() for x in one))
    return state.finalize(torch.float32)


@pytest.mark.parametrize("gap", [1e3, 1e4, 3e38])
@pytest.mark.parametrize("order", [1, -1])
def test_a_gap_leaves_the_larger_side_alone(gap: float, order: int) -> None:
    usual, (acc, m, l) = part(0), part(1)
    for shifted, winner in (((acc, m + gap, l), 1), ((acc, m - gap, l), 0)):
        parts = [usual, shifted]
        assert all(map(torch.equal, folded(parts[::order]), folded([parts[winner]])))


@pytest.mark.parametrize("gap", [1e3, 1e4, 1e30])
def test_a_sink_far_off_takes_all_or_nothing(gap: float) -> None:
    out, lse = folded([part(0)], sinks=torch.tensor([gap, -gap, 0.0]))
    alone_out, alone_lse = folded([part(0)])
    assert bool((out[:, :, 0] == 0.0).all()) and bool((lse[:, 0] == gap).all())
    assert torch.equal(out[:, :, 1], alone_out[:, :, 1])
    assert torch.equal(lse[:, 1], alone_lse[:, 1])
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
