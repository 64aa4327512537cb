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
def test_records_of_several_messages_are_one_tensor(name: str) -> None:
    records = Records(2, 5, 3, FIELDS[name])
    assert records.nbytes % 16 == 0
    lens = (5, 3, 0)
    shards = [[torch.randn(2, n, 3, dim or 1).to(t) for dim, t in FIELDS[name]] for n in lens]
    buffer = torch.full((3 * records.nbytes,), 0xFF, dtype=torch.uint8)
    for message, tensors in zip(buffer.chunk(3), shards, strict=True):
        message.zero_()
        for view, x in zip(records.views(message), tensors, strict=True):
            view = view if view.ndim == 4 else view.transpose(1, 2).unsqueeze(-1)
            view[:, : x.size(1)] = x
    for field, view in enumerate(records.views(buffer)):
        if FIELDS[name][field][0] is None:
            assert view.shape == (2, 3, 15)
            view = view.transpose(1, 2).unsqueeze(-1)
        assert view.shape == (2, 15, 3, FIELDS[name][field][0] or 1)
        for source, rows in enumerate(lens):
            mine = view[:, 5 * source : 5 * source + 5]
            assert torch.equal(mine[:, :rows], shards[source][field])
            assert not mine[:, rows:].any()
        wide = view.size(-1) > 1
        assert not wide or view.storage_offset() * view.element_size() % 16 == 0
        assert not wide or all(s * view.element_size() % 16 == 0 for s in view.stride()[:-1])


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
