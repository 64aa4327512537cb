"""Any options over any shape and sharding, through the backend and a ring in this process.

Each call is forward and backward against float64; memory that is not an input starts as NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.testing import Layouts, random_qkv, random_sinks
from tests.bounds import assert_holds, expect
from tests.kernels.calls import DEVICE, DTYPES, blocks, patched_select, ring

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
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """The mask, options of `random_qkv`, of the scores and of the ring, and the blocks."""
    mask = draw(masks())
    batch, nheads, nheads_kv = draw(
        st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 2)))
    )
    large = draw(st.integers(0, 4)) == 0
    headdims = st.sampled_from((96, 128, 200, 256)) if large else st.integers(1, 72)
    return {
        "mask": mask,
        "sizes": {
            "batch": batch,
            "nheads": nheads,
            "nheads_kv": nheads_kv,
            "headdim": draw(headdims),
            "headdim_v": draw(headdims),
            "dtype": draw(st.sampled_from(DTYPES)),
            "large_logits": draw(st.booleans()),
        },
        "sinks": random_sinks(nheads, device=DEVICE) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from((None, 0.01, 0.5, 2.0))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 0.5, 2.0, 30.0))),
        "blocks": draw(st.sampled_from(SMALL_BLOCKS if large else BLOCKS)),
        "layouts": draw(layouts(mask)),
        # None: `make_call` chooses the side, and gradients are continued in place.
        "travels": draw(st.sampled_from(("kv", "q", None))),
        "strided": draw(st.booleans()),
    }


def exercise(call: dict[str, Any]) -> None:
    mask = call["mask"]
    inputs = random_qkv(
        seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, device=DEVICE, **call["sizes"]
    )
    scores = {name: call[name] for name in ("scale", "softcap", "sinks")}
    how = {name: call[name] for name in ("travels", "strided")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched_select(monkeypatch, blocks(*call["blocks"]))
        got = ring(inputs, mask, call["layouts"], **how, **scores)
    assert_holds(got, *expect(inputs, mask, **scores))


USUAL = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(USUAL, max_examples=16 if DEVICE == "cpu" else 3)
@given(calls())
def test_any_call(call: dict[str, Any]) -> None:
    exercise(call)


@pytest.mark.slow
@settings(USUAL, max_examples=24 if DEVICE == "cpu" else 30)
@given(calls())
def test_many_calls(call: dict[str, Any]) -> None:
    exercise(call)
