"""All-gather over contiguous shards gives the bits of one process, for every mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.strategies.all_gather import make_call
from ring_attn.testing import RESULTS, Expected, Inputs, random_qkv
from tests.kernels.calls import DEVICE, blocks, patched_select
from tests.kernels.rings import ring, spec_of
from tests.strategies import run_calls

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")

# Cuts are at multiples of the longest block that any config may have.
SHARD = 128

Layouts = tuple[SequenceLayout, SequenceLayout]


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a block of 128 x 128 costs little more than one of 64 x 64."""
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(128, 128))


def layouts_of(mask: Mask, world_size: int) -> Layouts:
    """Shards that start at multiples of SHARD; the last is short where the length is none."""

    def layout_of(seqlen: int) -> SequenceLayout:
        longest = -(-seqlen // (SHARD * world_size)) * SHARD
        return SequenceLayout.boundaries([min(r * longest, seqlen) for r in range(world_size + 1)])

    return layout_of(mask.seqlen_q), layout_of(mask.seqlen_k)


def inputs_of(mask: Mask, **sizes: Any) -> Inputs:
    usual = {"nheads": 1, "nheads_kv": 1, "headdim": 16, "device": DEVICE}
    return random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **(usual | sizes))


def gathered(
    inputs: Inputs, mask: Mask, layouts: Layouts, *, softcap: float = 0.0, with_sinks: bool = False
) -> Expected:
    """All ranks' results; `same_bits` where it can be had."""
    nheads = inputs.q.size(2)
    sinks = torch.linspace(0.5, 2.0, nheads, device=DEVICE) if with_sinks else None
    spec = spec_of(inputs, softcap, sinks)
    return run_calls(
        lambda rank: make_call(spec, layouts, mask, rank, backend="triton"), inputs, layouts, sinks
    )


def differing(a: Expected, b: Expected) -> list[str]:
    for result in RESULTS:
        assert bool(getattr(a, result).nan_to_num(0.0, 0.0, 0.0).any())
    return [name for name in RESULTS if not torch.equal(getattr(a, name), getattr(b, name))]


# -- causal


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_world_size_has_the_bits_of_one(world_size: int) -> None:
    seqlen = (world_size - 1) * SHARD + 104
    mask = Mask(seqlen, seqlen, causal=True)
    inputs = inputs_of(mask)
    one = ring(inputs, mask, layouts_of(mask, 1), same_bits=True)
    assert differing(gathered(inputs, mask, layouts_of(mask, world_size)), one) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(3, torch.float32), (8, torch.float16)])
def test_heads_softcap_and_sinks(world_size: int, dtype: torch.dtype) -> None:
    mask = Mask(500, 500, causal=True)
    inputs = inputs_of(mask, nheads=4, nheads_kv=2, dtype=dtype)
    one, many = (
        gathered(inputs, mask, layouts_of(mask, p), softcap=2.0, with_sinks=True)
        for p in (1, world_size)
    )
    assert differing(many, one) == []
    assert torch.allclose(many.dsinks, one.dsinks)  # summed over the ranks, by the caller


# -- other masks

DOCUMENTS = (0, 60, 61, 130, 290)

MASKS = {
    "documents": Mask(290, 290, True, (-1, -1), DOCUMENTS, DOCUMENTS),
    "causal window, longer kv": Mask(203, 290, True, (140, -1)),
}
MORE_MASKS = {
    "full": Mask(290, 290),
    "window": Mask(290, 290, window_size=(140, 33)),
    "rows that see nothing": Mask(290, 177, causal=True),
    "documents of other lengths": Mask(290, 271, False, (99, -1), DOCUMENTS, (0, 60, 60, 201, 271)),
}


def exercise(mask: Mask) -> None:
    inputs = inputs_of(mask)
    one = gathered(inputs, mask, layouts_of(mask, 1))
    assert differing(gathered(inputs, mask, layouts_of(mask, 3)), one) == []
    # Queries and keys may be cut apart, and shards be empty.
    q, k = mask.seqlen_q, mask.seqlen_k
    apart = (SequenceLayout.boundaries([0, 128, q]), SequenceLayout.boundaries([0, 0, k]))
    assert differing(gathered(inputs, mask, apart), one) == []


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    exercise(MASKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_MASKS)
def test_more_masks(name: str) -> None:
    exercise(MORE_MASKS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("documents", (64, 64)),
        ("documents", (32, 128)),
        ("causal window, longer kv", (128, 32)),
    ],
)
def test_any_blocks(name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    patched_select(monkeypatch, blocks(*shape))
    exercise(MASKS[name])


# -- that the above can fail


def test_shards_that_start_within_a_block_have_other_sums() -> None:
    mask = Mask(256, 256, causal=True)
    layout, inputs = SequenceLayout.boundaries([0, 100, 256]), inputs_of(mask)
    call = make_call(spec_of(inputs), (layout, layout), mask, 0, backend="triton")
    assert not call.same_bits
    one = gathered(inputs, mask, layouts_of(mask, 1))
    forced = replace(call, same_bits=True)
    got = run_calls(lambda rank: replace(forced, rank=rank), inputs, (layout, layout))
    assert set(differing(got, one)) >= {"out", "dq", "dk", "dv"}


def test_gradients_that_are_reduced_have_other_sums() -> None:
    mask = Mask(512, 512, causal=True)
    layouts, inputs = layouts_of(mask, 2), inputs_of(mask)
    one = gathered(inputs, mask, layouts_of(mask, 1))
    call = make_call(spec_of(inputs), layouts, mask, 0, backend="triton", same_bits=False)
    got = run_calls(lambda rank: replace(call, rank=rank), inputs, layouts)
    assert differing(got, one) == ["dk", "dv"]


@pytest.mark.slow
def test_zigzag_folds_in_another_order() -> None:
    mask = Mask(512, 512, causal=True)
    layout, inputs = SequenceLayout.zigzag(512, 2), inputs_of(mask)
    one = gathered(inputs, mask, layouts_of(mask, 1))
    got = gathered(inputs, mask, (layout, layout))
    assert set(differing(got, one)) >= {"out", "dq", "dk", "dv"}
