"""Any options over any shape and sharding, through the backend and a ring in this process.

Each call is forward and backward against float64; memory that is not an input starts as NaN.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.testing import Case, Heads, Layouts, run_all_ranks
from tests.kernels.calls import DEVICE, DTYPES, blocks, patched_select

# Large heads only in small blocks, which fit into a GPU.
SMALL_BLOCKS = ((32, 32), (16, 64))
BLOCKS = (*SMALL_BLOCKS, (64, 16), (64, 32), (64, 64), (128, 32))


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    seqlen_q, seqlen_k = draw(st.integers(1, 80)), draw(st.integers(0, 80))
    sides = st.sampled_from((-1, -1, 0, 1, 7, 40))
    window = (draw(sides), draw(sides))
    cu: list[tuple[int, ...] | None] = [None, None]
    if draw(st.booleans()):
        size = draw(st.integers(0, 4))
        for side, seqlen in enumerate((seqlen_q, seqlen_k)):
            cuts = draw(st.lists(st.integers(0, seqlen), min_size=size, max_size=size))
            cu[side] = (0, *sorted(cuts), seqlen)
    return Mask(seqlen_q, seqlen_k, draw(st.booleans()), window, *cu)


@st.composite
def layouts(draw: st.DrawFn, mask: Mask) -> Layouts:
    """Any two layouts with the same number of ranks."""
    world_size = draw(st.integers(1, 4))
    if draw(st.booleans()):
        q, k = (SequenceLayout.striped(n, world_size) for n in (mask.seqlen_q, mask.seqlen_k))
        return q, k
    found = []
    for seqlen in (mask.seqlen_q, mask.seqlen_k):
        size = world_size - 1
        cuts = draw(st.lists(st.integers(0, seqlen), min_size=size, max_size=size))
        uneven = SequenceLayout.boundaries([0, *sorted(cuts), seqlen])
        zigzag = SequenceLayout.zigzag(seqlen, world_size)
        found.append(draw(st.sampled_from((uneven, zigzag))))
    return found[0], found[1]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Case, int, tuple[int, int]]:
    """A call, the number of ranks, and the blocks."""
    mask = draw(masks())
    shards = draw(layouts(mask))
    batch, nheads, nheads_kv = draw(
        st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 2)))
    )
    large = draw(st.integers(0, 4)) == 0
    headdims = st.sampled_from((96, 128, 200, 256)) if large else st.integers(1, 72)
    case = Case(
        mask,
        shards,
        backend="triton",
        dtype=dtype_name(draw(st.sampled_from(DTYPES))),
        heads=Heads(nheads, nheads_kv, draw(headdims), draw(headdims)),
        batch=batch,
        softmax_scale=draw(st.sampled_from((None, 0.01, 0.5, 2.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.5, 2.0, 30.0))),
        sinks=draw(st.booleans()),
        noncontiguous=draw(st.booleans()),
        large_logits=draw(st.booleans()),
    )
    return case, shards[0].world_size, draw(st.sampled_from(SMALL_BLOCKS if large else BLOCKS))


def exercise(case: Case, world_size: int, shape: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched_select(monkeypatch, blocks(*shape))
        assert not run_all_ranks(case, world_size, device=DEVICE).failures


USUAL = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(USUAL, max_examples=16 if DEVICE == "cpu" else 3)
@given(calls())
def test_any_call(call: tuple[Case, int, tuple[int, int]]) -> None:
    exercise(*call)


@pytest.mark.slow
@settings(USUAL, max_examples=24 if DEVICE == "cpu" else 30)
@given(calls())
def test_many_calls(call: tuple[Case, int, tuple[int, int]]) -> None:
    exercise(*call)
