"""Masks: every form of one has the same pairs; drawings in docstrings; masks as keys.

test_mask_constructors.py compares masks with their definitions.
"""

from __future__ import annotations

import inspect
import re
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ring_attn import Mask, masks
from ring_attn.testing import masks as table
from tests.counts import counted
from tests.drawn import masks as any_masks
from tests.drawn import pairs_of, reproducible


@settings(reproducible, max_examples=300)
@given(any_masks())
def test_every_form_of_a_mask_has_its_pairs(mask: Mask) -> None:
    shape = mask.seqlen_q, mask.seqlen_k
    dense = mask.dense()
    assert torch.equal(pairs_of(mask.slices, *shape), dense)
    assert torch.equal(mask.transposed.dense(), dense.t())
    assert mask.area == int(dense.sum())
    assert Mask.from_tensor(mask.tensor) == mask
    start, stop = mask.visible_runs(torch.arange(mask.seqlen_q))
    assert start.dtype == stop.dtype == torch.int64 and bool((start <= stop).all())
    assert start.shape == stop.shape == (len(mask.layers), mask.seqlen_q)
    for one in mask.slices:
        pairs = pairs_of([one], *shape)[one.q_start : one.q_end, one.k_start : one.k_end]
        assert bool(pairs.any(0).all()) and bool(pairs.any(1).all()), "rows without a pair"
    assert sorted(one for layer in mask.layers for one in layer) == sorted(mask.slices)
    for layer in mask.layers:
        assert all(a.q_end <= b.q_start for a, b in pairwise(layer))


def test_both_masks_hold() -> None:
    for one, another in product(table(9).values(), repeat=2):
        if (one.seqlen_q, one.seqlen_k) != (another.seqlen_q, another.seqlen_k):
            with pytest.raises(ValueError, match="same lengths"):
                _ = one & another
            continue
        assert torch.equal((one & another).dense(), one.dense() & another.dense())


# -- the constructors


def drawing(function: Any) -> list[list[bool]]:
    """The drawing in a docstring."""
    rows = re.findall(r"^ +((?:[x.] )+[x.])(?:   .*)?$", inspect.getdoc(function) or "", re.M)
    return [[cell == "x" for cell in row.split()] for row in rows]


DRAWN = {
    masks.causal: masks.causal(4),
    masks.window: masks.window(4, 1),
    masks.documents: masks.documents([0, 2, 5]),
    masks.chunked: masks.chunked(5, 2),
    masks.prefix: masks.prefix([2], [0, 4]),
    masks.spans: masks.spans(5, [(1, 3)]),
    masks.shared_prefix: masks.shared_prefix(2, [2, 2]),
    masks.sink_window: masks.sink_window(6, 2, 1),
    masks.blocks: masks.blocks(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool(), 2),
    masks.by_document: masks.by_document([masks.causal(2), masks.causal(2)]),
}


@pytest.mark.parametrize("function", DRAWN, ids=lambda function: function.__name__)
def test_docstrings_draw_what_is_made(function: Any) -> None:
    assert DRAWN[function].dense().tolist() == drawing(function)


def test_a_dense_mask_becomes_few_slices() -> None:
    for one in table(29).values():
        found = masks.from_dense(one.dense())
        assert torch.equal(found.dense(), one.dense())
        assert len(found.slices) <= 3 * len(one.slices), one
        assert Mask.of(found.seqlen_q, found.seqlen_k, found.slices) == found


def test_slices_that_share_a_pair_are_refused_by_name() -> None:
    first, second = (0, 4, 0, 4, None, 0), (2, 6, 1, 3)
    with pytest.raises(ValueError, match=r"q 0:4, k 0:4.* and .*q 2:6, k 1:3.* query 2 with key 1"):
        masks.from_slices(6, 6, [first, second])
    # Slices that overlap as rectangles but share no pair.
    apart = masks.from_slices(6, 6, [(0, 6, 0, 6, None, -2), (0, 6, 0, 6, 0, 1), (0, 6, 0, 6, 3)])
    assert len(apart.slices) == 3 and apart.area == 10 + 11 + 6


# -- values


def test_equal_masks_are_one_key() -> None:
    cuts = tuple(range(0, 2001, 2))
    fields: dict[str, Any] = {
        "seqlen_q": 2000,
        "seqlen_k": 2000,
        "causal": True,
        "window_size": (5, -1),
        "cu_seqlens_q": cuts,
        "cu_seqlens_k": cuts,
    }
    # A window wider than the documents hides nothing; both spellings of causal are equal.
    same = [Mask(**fields), Mask(**fields | {"window_size": (6, -1)}), masks.chunked(2000, 2)]
    assert len({*same}) == 1 and len({*map(hash, same)}) == 1
    assert (
        Mask(9, 9, True)
        == Mask(9, 9, window_size=(-1, 0))
        == masks.from_slices(9, 9, [(0, 9, 0, 9, None, 0)])
    )
    mask = Mask(9, 9, True, (2, -1), (0, 3, 7), (0, 3, 7))
    assert mask.words == "causal, window 2,-1, 2 documents, 2 rows of padding"
    different = [Mask(**fields | {"causal": False}), Mask(2000, 2000), Mask(2000, 2001)]
    assert len({same[0], *different}) == 4


def test_ten_thousand_slices_take_few_calls() -> None:
    """As many calls as slices, not as pairs of slices."""
    mask, calls = counted(compared_with_its_tensor)
    assert len(mask.slices) > 10_000
    assert calls < 600 * len(mask.slices)


def compared_with_its_tensor() -> Mask:
    seen = torch.rand(360, 360, generator=torch.Generator().manual_seed(0)) < 0.1
    mask = masks.blocks(seen, 128)
    assert Mask.of(mask.seqlen_q, mask.seqlen_k, mask.slices) == mask
    assert Mask.from_tensor(mask.tensor) == mask
    assert mask.area == int(seen.sum()) * 128 * 128
    return mask
