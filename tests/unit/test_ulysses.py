"""Heads for rows: the rows of a group, and bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.strategies.ulysses import merge_groups
from ring_attn.testing import LAYOUTS, layouts_of


@pytest.mark.parametrize("seqlen", [0, 1, 3, 7, 61, 97])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("world_size", "degree"), [(1, 1), (3, 3), (4, 4), (4, 2), (6, 2), (6, 3)])
def test_rows_of_a_group(world_size: int, degree: int, kind: str, seqlen: int) -> None:
    """A row has the position in its group's shard that it has at home, and each is there once."""
    layout = layouts_of(kind, Mask(seqlen, seqlen), world_size)[0]
    merged, placed = merge_groups(layout, degree)
    assert merged.world_size == world_size // degree
    for group in range(merged.world_size):
        positions = merged.position_ids(group)
        found = torch.full_like(positions, -1)
        for member in range(degree):
            own = layout.position_ids(group * degree + member)
            for rows, group_rows in placed[group][member]:
                found[group_rows] = own[rows]
        assert torch.equal(found, positions)
    if degree == world_size:
        assert positions.tolist() == list(range(seqlen)), "in order, striped ones too"


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
