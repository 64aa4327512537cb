"""Gathered shards: their tiles, and the records that carry the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Records
from ring_attn.core.tiles import MaskKind, gathered_tiles
from ring_attn.testing import LAYOUTS, layouts_of, masks
from tests.bounds import painted


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", masks(61))
def test_tiles_of_gathered_queries_hold_every_visible_pair_once(
    name: str, layout: str, world_size: int
) -> None:
    """Gathered keys are covered by test_strategies, which runs every mask."""
    mask = masks(61)[name]
    q, kv = layouts_of(layout, mask, world_size)
    rows = max(q.shard_lens) + 2
    for rank in range(world_size):
        expected = torch.zeros(world_size * rows, kv.shard_len(rank), dtype=torch.int64)
        for source in range(world_size):
            seen = mask.dense(q.position_ids(source), kv.position_ids(rank))
            expected[source * rows : source * rows + q.shard_len(source)] = seen
        tiles = gathered_tiles(q, kv, mask, rank, rows, "q")
        assert torch.equal(painted(tiles, *expected.shape), expected)


@pytest.mark.parametrize("gathers", ["kv", "q"])
def test_equal_contiguous_shards_are_one_tile(gathers: Any) -> None:
    mask = Mask(64, 64, causal=True, window_size=(20, -1))
    layout = SequenceLayout.contiguous(64, 8)
    counts = [len(gathered_tiles(layout, layout, mask, rank, 8, gathers)) for rank in range(8)]
    assert counts == [1] * 8
    whole = gathered_tiles(layout, layout, Mask(64, 64), 3, 8, gathers)
    assert [tile.kind for tile in whole] == [MaskKind.FULL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_records_of_several_messages_are_tensors_that_kernels_load(dtype: torch.dtype) -> None:
    """A view has all messages' rows; its heads begin at multiples of 16 bytes."""
    dims = (5, 8, None, 1, None, 3)
    records = Records(2, 5, 3, tuple((dim, dtype if dim else torch.float32) for dim in dims))
    views = records.views(torch.zeros(3 * records.nbytes, dtype=torch.uint8))
    for view, dim in zip(views, dims, strict=True):
        assert view.shape == ((2, 15, 3, dim) if dim else (2, 3, 15))
        aligned = (view.storage_offset(), *view.stride()[:-1])
        assert not dim or all(number * view.element_size() % 16 == 0 for number in aligned)
