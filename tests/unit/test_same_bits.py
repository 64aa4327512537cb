"""Plans show when a call keeps the bits of one process, and when gradients are continued.

tests/kernels/test_same_bits.py compares the bits.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from ring_attn import backends
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Inner
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import code_of, make_call, program_of, why_not_same_bits
from ring_attn.strategies.ring import CODE as RING
from ring_attn.testing import Layouts
from tests.kernels.calls import DEVICE
from tests.refusals import refused, says

UNIT = TritonBackend.bits_unit
N = 4 * UNIT
CAUSAL = Mask(N, N, causal=True)
# With few kv heads KV is sent anyway; with many, the Q side costs fewer bytes.
FEW_KV_HEADS = AttentionSpec(DEVICE, torch.float16, 1, 4, 1, 64, 64)
MANY_KV_HEADS = AttentionSpec(DEVICE, torch.float16, 1, 4, 4, 64, 64)


def cut(*starts: int) -> SequenceLayout:
    """Contiguous shards from given starts."""
    return SequenceLayout.boundaries([0, *starts, N])


def named(kind: str, world_size: int = 4, seqlen: int = N) -> Layouts:
    layout = SequenceLayout.from_name(kind, seqlen, world_size)
    return layout, layout


EQUAL = named("contiguous")
ENDS = (cut(UNIT, UNIT, 3 * UNIT, N),) * 2
OFF = cut(UNIT, UNIT + 22)
# Layouts, mask, backend, and the reason why the call has other bits than one process, if it has.
CALLS: dict[str, tuple[Layouts, Mask, str, str]] = {
    "causal": (EQUAL, CAUSAL, "triton", ""),
    "causal window": (EQUAL, Mask(N, N, False, (-1, 0)), "triton", ""),
    "one rank": (named("contiguous", 1, 61), Mask(61, 61, causal=True), "triton", ""),
    "cuts": ((EQUAL[0], SequenceLayout.boundaries(range(0, N + 1, UNIT))), CAUSAL, "triton", ""),
    "empty shards": (ENDS, CAUSAL, "triton", ""),
    "backend": (EQUAL, CAUSAL, "aten", "backend 'aten'"),
    "full": (EQUAL, Mask(N, N), "triton", "must be causal"),
    "left window": (EQUAL, Mask(N, N, True, (9, -1)), "triton", "without window"),
    "documents": (EQUAL, Mask(N, N, True, (-1, -1), (0, 30, N), (0, 30, N)), "triton", "documents"),
    "zigzag": (named("zigzag"), CAUSAL, "triton", "contiguous, got zigzag"),
    "boundaries": ((cut(UNIT), cut(2 * UNIT)), CAUSAL, "triton", "one layout"),
    "unit": ((OFF, OFF), CAUSAL, "triton", f"of {UNIT}; rank 2 starts at {UNIT + 22}"),
}


@pytest.mark.parametrize("name", CALLS)
def test_on_where_it_can_be_had_and_why_not(name: str) -> None:
    layouts, mask, backend, reason = CALLS[name]
    assert backends.get_backend(backend).in_order == (backend == "triton")
    make = partial(make_call, Strategy(), MANY_KV_HEADS, layouts, mask, 0, backend=backend)
    off = make(same_bits=False)
    assert why_not_same_bits(off) is not None
    if reason:
        with refused(NotImplementedError, f"same_bits=True|{reason}"):
            make(same_bits=True)
        for call in (off, make(same_bits=None)):
            assert says(str(why_not_same_bits(call)), reason)
        return
    for same_bits in (None, True):
        call = make(same_bits=same_bits)
        assert why_not_same_bits(call) is None and RING.gradients(call) == ("kv", True)
    assert layouts != EQUAL or RING.gradients(off)[0] == "q"


def test_gradients_are_added_up_where_their_order_gains_no_bits() -> None:
    call = make_call(Strategy(), FEW_KV_HEADS, named("zigzag"), CAUSAL, 0, backend="triton")
    assert RING.gradients(call) == ("kv", False) and why_not_same_bits(call) is not None


# Rows of a causal mask over 2 ranks, options, and whether one kv head of an H100's call has the
# backward of all gradients at once: from 25,216 rows of a launch on (1.5 programs of 128 rows for
# each of 132 multiprocessors), unless the bits must not depend on the number of ranks.
LONG, SHORT = 1 << 16, 1 << 14
ONE_PASS: dict[str, tuple[Strategy, str, int, bool | None, bool]] = {
    "short": (Strategy(), "contiguous", SHORT, False, False),
    "long": (Strategy(), "contiguous", LONG, False, True),
    "long, in order": (Strategy(), "contiguous", LONG, None, False),
    "zigzag sees halves of shards": (Strategy(), "zigzag", LONG, None, False),
    "longer zigzag": (Strategy(), "zigzag", 2 * LONG, None, True),
    "striped": (Strategy(), "striped", LONG, None, True),
    "gathered rows": (Strategy("all_gather"), "zigzag", LONG // 2, None, True),
    "all rows by heads": (Strategy(ulysses_degree=2), "zigzag", LONG // 2, None, True),
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_long_launches_of_one_kv_head_take_one_pass(name: str) -> None:
    strategy, layout, rows, same_bits, expected = ONE_PASS[name]
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 8, 1, 128, 128)
    call = make_call(
        Strategy(),
        spec,
        named(layout, 2, rows),
        Mask(rows, rows, causal=True),
        0,
        backend="reference",
        same_bits=False,
    )
    options = replace(call.options, same_bits=same_bits)
    for rank in (0, 1):
        call = replace(call, rank=rank, strategy=strategy, backend="triton", options=options)
        assert code_of(strategy).in_one_pass(call) is expected
        programs = [program_of(call, backward=True)]
        programs += [op.program for op in programs[0].ops if isinstance(op, Inner)]
        assert programs[-1].in_one_pass is expected


@pytest.mark.parametrize(
    "strategy", [Strategy(ulysses_degree=2), Strategy("all_gather", heads_per_chunk=2)], ids=str
)
def test_heads_that_have_another_kernel_by_themselves(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates the Gluon backward, which calls of few kv heads do not use."""
    spec = AttentionSpec("cpu", torch.float16, 1, 8, 4, 64, 64)
    call = make_call(strategy, spec, named("contiguous", 2), CAUSAL, 0, backend="triton")
    assert why_not_same_bits(call) is None
    assert (
        why_not_same_bits(replace(call, options=replace(call.options, same_bits=False))) is not None
    )
    few = lambda backend, spec, kv_rows=None: spec.nheads_kv >= 4  # noqa: E731
    monkeypatch.setattr(TritonBackend, "in_one_pass", few)
    assert "another kernel" in str(why_not_same_bits(call))
