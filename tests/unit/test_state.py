"""The running state: gaps between parts, and sinks far off.

test_backends.py and test_strategies.py check that merging in any order gives one softmax.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ring_attn.core.state import State

BATCH, ROWS, HEADS, KEYS, DIM = 2, 5, 3, 24, 8
ALL = slice(0, ROWS)

Part = tuple[Tensor, Tensor, Tensor]


def new_state(sinks: Tensor | None = None) -> State:
    return State((BATCH, ROWS, HEADS, DIM), torch.float32, "cpu", sinks)


def scores_and_values() -> tuple[Tensor, Tensor]:
    """s (batch, heads, rows, keys) and v (batch, keys, heads, dim)."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(BATCH, HEADS, ROWS, KEYS, generator=generator)
    return s, torch.randn(BATCH, KEYS, HEADS, DIM, generator=generator)


def partial(s: Tensor, v: Tensor) -> Part:
    """Computes (acc, m, l) of some keys, as a backend does."""
    m = s.amax(-1)
    p = (s - m.unsqueeze(-1)).exp()
    return torch.einsum("bhij,bjhd->bihd", p, v), m, p.sum(-1)


def chunks(s: Tensor, v: Tensor, *sizes: int) -> list[Part]:
    pairs = zip(s.split(list(sizes), -1), v.split(list(sizes), 1), strict=True)
    return [partial(part_s, part_v) for part_s, part_v in pairs]


def folded(parts: Sequence[Sequence[Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    state = new_state(sinks)
    for part in parts:
        state.fold(ALL, *(x.clone() for x in part))
    return state.finalize(torch.float32)


@pytest.mark.parametrize("gap", [1e3, 1e4, 3e38])
@pytest.mark.parametrize("larger_first", [False, True])
def test_a_gap_leaves_the_larger_side_alone(gap: float, larger_first: bool) -> None:
    s, v = scores_and_values()
    small, large = chunks(s, v, 12, 12)
    for shift in (gap, -gap):
        # One side is the whole gap above the other, or the whole gap below.
        parts = [small, (large[0], large[1] + shift, large[2])]
        winner = parts[1] if shift > 0 else parts[0]
        got = folded(parts[::-1] if larger_first else parts)
        alone = folded([winner])
        assert all(map(torch.equal, got, alone))


@pytest.mark.parametrize("gap", [1e3, 1e4, 1e30])
def test_a_sink_far_off_takes_all_or_nothing(gap: float) -> None:
    s, v = scores_and_values()
    sinks = torch.tensor([gap, -gap, 0.0])
    got, alone = (folded(chunks(s, v, 24), sinks=given) for given in (sinks, None))
    assert bool((got[0][:, :, 0] == 0.0).all()) and bool((got[1][:, 0] == gap).all())
    assert torch.equal(got[0][:, :, 1], alone[0][:, :, 1])
    assert torch.equal(got[1][:, 1], alone[1][:, 1])
    assert bool(got[0].isfinite().all()) and bool(got[1].isfinite().all())
