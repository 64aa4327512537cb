"""Bytes of an exchange of heads for rows, by Ulysses; whose rows Q-exchange gives a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.planning.balance import balance_of
from ring_attn.strategies.q_exchange import exchanged_layout
from ring_attn.strategies.registry import make_call, program_of


def test_bytes_of_a_plain_case() -> None:
    """By hand: 4 ranks, 16 rows each, 8 heads and 4 kv heads of 32, float32 and bfloat16."""
    layout = SequenceLayout.contiguous(64, 4)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        spec = AttentionSpec("cpu", dtype, 1, 8, 4, 32, 32)
        call: Any = make_call(Strategy(ulysses_degree=4), spec, (layout, layout), Mask(64, 64), 1)
        rows = 3 * 16  # to each of three others a quarter of the heads
        there = rows * (2 + 1 + 1) * 32 * size
        back = rows * 2 * (32 * size + 4)
        assert bytes_sent(program_of(call, backward=False)) == there + back
        # dout there; dq, dk and dv back, rounded.
        backward = program_of(call, backward=True)
        assert bytes_sent(backward) == rows * (2 + 2 + 1 + 1) * 32 * size
        assert num_messages(backward) == 2


# -- Q-exchange


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 97])
def test_a_rank_has_its_head_and_its_partners_tail(seqlen: int, world_size: int) -> None:
    given = SequenceLayout.contiguous(seqlen, world_size)
    here = exchanged_layout(given)
    everything = []
    for rank in range(world_size):
        mine, theirs = (given.position_ids(r).tolist() for r in (rank, world_size - 1 - rank))
        expected = mine[: len(mine) - len(mine) // 2] + theirs[len(theirs) - len(theirs) // 2 :]
        assert here.position_ids(rank).tolist() == sorted(expected)
        everything += expected
    assert sorted(everything) == list(range(seqlen))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seqlen", [1024, 8192, 10_007])
def test_causal_work_is_balanced(seqlen: int, world_size: int) -> None:
    given, mask = SequenceLayout.contiguous(seqlen, world_size), Mask(seqlen, seqlen, causal=True)
    # A shard, and so a half, may be a row longer than another's.
    row = 4 * seqlen / (sum(given.mask_area(mask)) / world_size)
    assert 1 <= balance_of(exchanged_layout(given), mask).of_work <= 1 + row
    assert balance_of(given, mask).of_work == pytest.approx(2 - 1 / world_size, abs=row)
