"""The schedule: every task is done once, in the requested order, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.kernels.tasks import Schedule, block_and_head, make_schedule
from tests.bounds import whole
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    Step,
    attend,
    blocks,
    cut_keys,
    cut_rows,
    in_interpreter,
    inputs_for,
    same,
)

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")
MASK = Mask(40, 97)


@triton.jit
def log_kernel(out_ptr, num_blocks, heads_together):
    """Writes (block, head) of every task at the task's number."""
    task = tl.program_id(0)
    block, head = block_and_head(task, num_blocks, heads_together)
    tl.store(out_ptr + 2 * task, block)
    tl.store(out_ptr + 2 * task + 1, head)


@pytest.mark.parametrize("together", [1, 2, 3, 6])
def test_every_task_is_done_once_in_order(together: int) -> None:
    num_blocks, num_heads = 5, 6
    out = torch.full((num_blocks * num_heads, 2), -1, dtype=torch.int32, device=DEVICE)
    log_kernel[(num_blocks * num_heads,)](out, num_blocks, together)
    block, head = out.cpu().T
    wanted = torch.stack((head // together, block, head)).T.tolist()
    assert wanted == sorted(wanted), "group by group, in it block by block, in it head by head"
    assert len({(b, h) for _, b, h in wanted}) == num_blocks * num_heads
    assert int(block.max()) == num_blocks - 1 and int(head.max()) == num_heads - 1


def schedule(tiles: Step, num_heads: int, heads_per_kv: int, **changes: int) -> Schedule:
    config, device = replace(blocks(32, 32), **changes), torch.device(DEVICE)
    table = TritonBackend()._table(tiles, config, device)
    return make_schedule(
        table, config, device,
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


@pytest.mark.parametrize(
    ("mask", "batch", "heads"),
    [
        pytest.param(Mask(63, 63, True), 2, (4, 2), id="causal", marks=pytest.mark.slow),
        pytest.param(
            Mask(45, 70, False, (-1, -1), (0, 20, 45), (0, 5, 70)), 1, (3, 3), id="documents"
        ),
    ],
)
def test_no_schedule_changes_a_bit(mask: Mask, batch: int, heads: tuple[int, int]) -> None:
    sizes = {"batch": batch, "nheads": heads[0], "nheads_kv": heads[1], "dtype": DTYPES[0]}
    inputs, config = inputs_for(mask, **sizes), blocks(32, 32)
    alone = attend(inputs, [whole(mask)], config)
    # One head together, or two: K and V of a head (63 columns, 16 dims, float32) are 8 KB.
    for l2_bytes in (1, 17_000):
        for steps in (cut_keys(mask, 32), cut_rows(mask, 32)):
            assert same(attend(inputs, steps, replace(config, l2_bytes=l2_bytes)), alone)
