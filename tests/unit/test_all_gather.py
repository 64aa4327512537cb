"""Gathered shards: tiles that become one, the records they travel in, where they keep the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.backends import bits_unit
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Records
from ring_attn.core.order import why_not_in_order
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import MaskKind, gathered_tiles

# -- tiles


@pytest.mark.parametrize("gathers", ["kv", "q"])
def test_equal_contiguous_shards_are_one_tile(gathers: Any) -> None:
    mask = Mask(64, 64, causal=True, window_size=(20, -1))
    layout = SequenceLayout.contiguous(64, 8)
    counts = [len(gathered_tiles(layout, layout, mask, rank, 8, gathers)) for rank in range(8)]
    assert counts == [1] * 8
    whole = gathered_tiles(layout, layout, Mask(64, 64), 3, 8, gathers)
    assert [tile.kind for tile in whole] == [MaskKind.FULL]


# -- messages


FIELDS = {
    "kv": ((8, torch.bfloat16), (3, torch.bfloat16)),
    "q side": (
        (5, torch.float16),
        (8, torch.float16),
        (None, torch.float32),
        (None, torch.float32),
    ),
    "float64": ((3, torch.float64), (None, torch.float64)),
    "scalars": ((1, torch.float16), (1, torch.float16)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_records_are_aligned(name: str) -> None:
    """Every row of a field begins at a multiple of 16 bytes, in each of three messages."""
    records = Records(2, 5, 3, FIELDS[name])
    assert records.nbytes % 16 == 0
    views = records.views(torch.zeros(3 * records.nbytes, dtype=torch.uint8))
    for (dim, dtype), view in zip(FIELDS[name], views, strict=True):
        assert view.dtype == dtype
        assert view.shape == ((2, 3, 15) if dim is None else (2, 15, 3, dim))
        if dim not in (None, 1):
            places = (view.storage_offset(), *view.stride()[:-1])
            assert all(at * dtype.itemsize % 16 == 0 for at in places)


# -- same bits


def test_same_bits_are_for_backends_and_layouts_that_have_them() -> None:
    def reason(q: SequenceLayout, backend: str = "triton", k: SequenceLayout | None = None) -> str:
        layouts, mask = (q, k or q), Mask(q.seqlen, (k or q).seqlen)
        call = (Strategy("all_gather"), (4, 2), layouts, mask)
        return why_not_in_order(*call, backend, bits_unit(backend)) or "in order"

    assert reason(SequenceLayout.contiguous(1024, 8)) == "in order"
    assert reason(SequenceLayout.boundaries([0, 128, 128, 384, 401])) == "in order"
    assert reason(SequenceLayout.boundaries([0, 401, 401])) == "in order"
    assert "one's start at 100" in reason(SequenceLayout.boundaries([0, 100, 384]))
    assert "layout must be contiguous" in reason(SequenceLayout.zigzag(1024, 2))
    assert "does not fold in one order" in reason(SequenceLayout.contiguous(1024, 8), "aten")
    other = (SequenceLayout.contiguous(1024, 4), SequenceLayout.boundaries([0, 0, 128, 256, 999]))
    assert reason(other[0], k=other[1]) == "in order"
