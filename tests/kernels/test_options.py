"""Any options over any shape and sharding, through the backend and a ring in this process.

Each call is forward and backward against float64; memory that is not an input starts as NaN.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn.core.dtypes import dtype_name
from ring_attn.testing import Case, Heads, run_all_ranks
from tests.drawn import flash_masks, layouts_for, slice_masks, table_masks
from tests.kernels.calls import DEVICE, DTYPES, blocks, patched_select

# Large heads only in small blocks, which fit into a GPU.
SMALL_BLOCKS = ((32, 32), (16, 64))
BLOCKS = (*SMALL_BLOCKS, (64, 16), (64, 32), (64, 64), (128, 32))


MASKS = flash_masks(80) | table_masks(80) | slice_masks(40)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Case, int, tuple[int, int]]:
    """A call, the number of ranks, and the blocks."""
    mask = draw(MASKS)
    shards = draw(layouts_for(mask, st.integers(1, 4)))
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


@settings(
    deadline=None,
    derandomize=True,
    max_examples=8 if DEVICE == "cpu" else 30,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(calls())
def test_any_call(call: tuple[Case, int, tuple[int, int]]) -> None:
    """`make fuzz` draws many more."""
    case, world_size, shape = call
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched_select(monkeypatch, blocks(*shape))
        assert not run_all_ranks(case, world_size, device=DEVICE).failures
