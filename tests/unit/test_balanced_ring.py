"""The ring over layouts from content, forward and backward, against dense attention in float64."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from ring_attn.balance import by_area, by_cost, by_documents, by_memory, by_separators
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Traveller
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.ring import RingCall, why_not_same_bits
from tests.strategies import Layouts, assert_holds, config

SEQLEN = 113
PACKING = (0, 40, 41, 41, 63, 97, SEQLEN)
CAUSAL = Mask(SEQLEN, SEQLEN, causal=True)
WINDOW = Mask(SEQLEN, SEQLEN, causal=True, window_size=(9, -1))
PACKED = Mask(SEQLEN, SEQLEN, True, (-1, -1), PACKING, PACKING)
TOKENS = [(7 * n * n + 3 * n) % 11 for n in range(SEQLEN)]
COSTS = torch.tensor([1.0 + (n % 13) ** 2 for n in range(SEQLEN)])

CASES: dict[str, tuple[Mask, Callable[[int], SequenceLayout]]] = {
    "area": (CAUSAL, lambda ranks: by_area(CAUSAL, ranks)),
    "area, aligned": (CAUSAL, lambda ranks: by_area(CAUSAL, ranks, align=16)),
    "area of a window": (WINDOW, lambda ranks: by_area(WINDOW, ranks)),
    "documents": (PACKED, lambda ranks: by_documents(PACKING, ranks, causal=True)),
    "documents, ends only": (
        PACKED,
        lambda ranks: by_documents(PACKING, ranks, causal=True, max_balance=4.0),
    ),
    "separators": (CAUSAL, lambda ranks: by_separators(TOKENS, {0, 4}, ranks, work=CAUSAL)),
    "cost": (PACKED, lambda ranks: by_cost(COSTS, ranks)),
    # The last rank has no memory, and so no rows.
    "memory": (CAUSAL, lambda ranks: by_memory(SEQLEN, [400, 200, 300, 0][-ranks:], 2, align=8)),
    "no two rows on a rank": (Mask(2, 2, True), lambda ranks: by_area(Mask(2, 2, True), ranks)),
}


def ring_of(mask: Mask, backend: str, travels: Traveller) -> Callable[..., RingCall]:
    def make(spec: AttentionSpec, layouts: Layouts, rank: int) -> RingCall:
        scale = spec.headdim**-0.5
        return RingCall(spec, layouts, mask, rank, scale, backend, travels)

    return make


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_ring_runs_uneven_shards(name: str, world_size: int, backend: str) -> None:
    mask, layout_of = CASES[name]
    layout = layout_of(world_size)
    assert layout.world_size == world_size
    for travels in ("kv", "q"):
        assert_holds(ring_of(mask, backend, travels), mask, (layout, layout), config())


@pytest.mark.parametrize("sizes", [config(dtype=torch.bfloat16), config(nheads_kv=1)], ids=str)
def test_other_dtypes_and_heads(sizes: tuple) -> None:
    for name, travels in product(("documents", "separators"), ("kv", "q")):
        mask, layout_of = CASES[name]
        layouts = (layout_of(3),) * 2
        assert_holds(ring_of(mask, "aten", travels), mask, layouts, sizes, with_sinks=True)


def test_queries_and_keys_are_cut_each_their_own_way() -> None:
    mask = Mask(37, 113, causal=True)
    layouts = (by_area(mask, 3), by_memory(113, [5000, 1000, 3000], 7))
    for travels in ("kv", "q"):
        assert_holds(ring_of(mask, "aten", travels), mask, layouts, config())


def test_packed_documents_cut_at_their_ends_send_nothing() -> None:
    layout = by_documents(PACKING, 3, causal=True, max_balance=4.0)
    assert layout.cuts is not None and set(layout.cuts) <= set(PACKING)
    _, layout_of = CASES["documents"]
    assert not set(layout_of(3).cuts or ()) <= set(PACKING)
    for rank in range(3):
        call = RingCall(
            AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8),
            (layout, layout),
            PACKED,
            rank,
            1.0,
            "aten",
            "kv",
        )
        assert call.plan(backward=False).num_hops == 0


def test_aligned_boundaries_keep_the_same_bits() -> None:
    pytest.importorskip("triton")
    mask = Mask(1000, 1000, causal=True)
    aligned, free = by_area(mask, 3, align=128), by_area(mask, 3)
    assert why_not_same_bits((aligned, aligned), mask, "triton") is None
    assert "multiple of 128" in str(why_not_same_bits((free, free), mask, "triton"))
