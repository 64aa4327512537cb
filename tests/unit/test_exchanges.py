"""Rows that a rank has after an exchange: heads for rows, by Ulysses, and Q-exchange's tails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.strategies.q_exchange import exchanged_layout
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.strategies.ulysses import merge_groups
from ring_attn.testing import LAYOUTS, layouts_of


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_group_of_all_ranks_has_its_rows_in_order(kind: str) -> None:
    """test_strategies checks that each group has each of its rows once."""
    merged, _ = merge_groups(layouts_of(kind, Mask(61, 61), 4)[0], 4)
    assert merged.position_ids(0).tolist() == list(range(61))


def test_bytes_of_a_plain_case() -> None:
    """By hand: 4 ranks, 16 rows each, 8 heads and 4 kv heads of 32, float32 and bfloat16."""
    layout = SequenceLayout.contiguous(64, 4)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        spec = AttentionSpec("cpu", dtype, 1, 8, 4, 32, 32)
        call: Any = make_call(Strategy(ulysses_degree=4), spec, (layout, layout), Mask(64, 64), 1)
        rows = 3 * 16  # three other ranks each get a quarter of the heads
        there = rows * (2 + 1 + 1) * 32 * size
        back = rows * 2 * (32 * size + 4)
        assert bytes_sent(program_of(call, backward=False)) == there + back
        # dout there; dq, dk and dv back, rounded.
        backward = program_of(call, backward=True)
        assert bytes_sent(backward) == rows * (2 + 2 + 1 + 1) * 32 * size
        assert num_messages(backward) == 2


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seqlen", [1024, 8192, 10_007])
def test_causal_work_is_balanced(seqlen: int, world_size: int) -> None:
    mask = Mask(seqlen, seqlen, causal=True)
    given = SequenceLayout.contiguous(seqlen, world_size)

    def imbalance(layout: SequenceLayout) -> float:
        areas = layout.mask_area(mask)
        return max(areas) / (sum(areas) / world_size)

    # A shard, and so a half, may be a row longer than another's.
    row = 4 * seqlen / (sum(given.mask_area(mask)) / world_size)
    assert 1 <= imbalance(exchanged_layout(given)) <= 1 + row
    assert imbalance(given) == pytest.approx(2 - 1 / world_size, abs=row)
