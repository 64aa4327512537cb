"""The schedule: which heads run together, and how many programs a persistent grid has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.kernels.tasks import Schedule, make_schedule
from tests.bounds import whole
from tests.kernels.calls import DEVICE, Step, blocks, cut_keys, in_interpreter

MASK = Mask(40, 97)


def schedule(tiles: Step, num_heads: int, heads_per_kv: int, **changes: int) -> Schedule:
    config, device = replace(blocks(32, 32), **changes), torch.device(DEVICE)
    return make_schedule(
        TritonBackend()._table(tiles, config, device), config, device,
        num_heads=num_heads, heads_per_kv=heads_per_kv, bytes_per_column=100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kilobytes", "num_heads", "heads_per_kv", "together"),
    [
        (0, 32, 4, 32),  # no grouping requested
        (1, 32, 4, 4),  # no kv head fits: one kv head, with all its query heads
        (9.7, 32, 4, 4),
        (19.4, 32, 4, 8),
        (30, 32, 4, 8),  # 3 of 8 kv heads would leave groups of 3, 3 and 2
        (39, 32, 4, 16),
        (1000, 32, 4, 32),
        (67, 7, 1, 1),
        (68, 7, 1, 7),
    ],
)
def test_a_group_is_what_fits(
    kilobytes: float, num_heads: int, heads_per_kv: int, together: int
) -> None:
    got = schedule(whole(MASK), num_heads, heads_per_kv, l2_bytes=int(kilobytes * 1000))
    assert got == (2 * num_heads, 2, num_heads, together)


@in_interpreter
def test_what_a_schedule_depends_on() -> None:
    # Only the columns of the step count: a zigzag ring sees half of each shard.
    steps = (whole(MASK), *cut_keys(MASK, 48))
    found = [schedule(tiles, 4, 1, l2_bytes=9800).heads_together for tiles in steps]
    assert found == [1, 2, 2]
    # Without columns or heads the schedule avoids a division by zero.
    assert schedule((), 4, 2, l2_bytes=1000, programs_per_sm=1) == (0, 0, 4, 4)
    assert schedule(whole(MASK), 0, 2, l2_bytes=1000).num_programs == 0
    # A persistent grid has no more programs than tasks.
    found = [schedule(whole(MASK), 4, 1, programs_per_sm=n).num_programs for n in range(4)]
    assert found == [8, 3, 6, 8]
