"""Causal contiguous rings give the bits of one process; every ring gives its own again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Traveller
from ring_attn.strategies.ring import make_call
from ring_attn.testing import RESULTS, Expected, Inputs, random_qkv
from tests.kernels.calls import DEVICE, DTYPES, blocks, patched_select
from tests.kernels.rings import layouts_of, ring, spec_of

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")

# Cuts are at multiples of the longest block that any config may have.
SHARD = 128


def sequence(world_size: int, seqlen: int) -> tuple[SequenceLayout, SequenceLayout]:
    """Shards that start at multiples of SHARD; the last is short where seqlen is no multiple."""
    longest = -(-seqlen // (SHARD * world_size)) * SHARD
    cuts = [min(rank * longest, seqlen) for rank in range(world_size + 1)]
    layout = SequenceLayout.boundaries(cuts)
    return layout, layout


USUAL = {"dtype": torch.float32, "nheads": 1, "softcap": 0.0, "with_sinks": False}

# By name: rows of the last shard and options.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "float16, softcap, sinks": (
        SHARD, {"dtype": torch.float16, "softcap": 2.0, "with_sinks": True},
    ),
    "float32 gqa": (104, {"nheads": 2}),
}  # fmt: skip
MORE_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "float16 gqa": (104, {"dtype": torch.float16, "nheads": 4}),
    "float16 sinks": (4, {"dtype": torch.float16, "with_sinks": True}),
    "float32 mqa, softcap, sinks": (1, {"nheads": 3, "softcap": 0.5, "with_sinks": True}),
    "float32 of a head": (SHARD, {}),
}


def run(name: str, seqlen: int, world_size: int) -> Expected:
    case = USUAL | (CASES | MORE_CASES)[name][1]
    nheads = case["nheads"]
    inputs = random_qkv(
        seqlen_q=seqlen, nheads=nheads, nheads_kv=1, headdim=16, dtype=case["dtype"], device=DEVICE
    )
    sinks = torch.linspace(0.5, 2.0, nheads, device=DEVICE) if case["with_sinks"] else None
    mask = Mask(seqlen, seqlen, causal=True)
    layouts = sequence(world_size, seqlen)
    return ring(inputs, mask, layouts, softcap=case["softcap"], sinks=sinks, same_bits=True)


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a block of 128 x 128 costs little more than one of 64 x 64."""
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(128, 128))


def differing(a: Expected, b: Expected) -> list[str]:
    return [name for name in RESULTS if not torch.equal(getattr(a, name), getattr(b, name))]


# -- world sizes


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_every_world_size_has_the_bits_of_one(name: str, world_size: int) -> None:
    exercise(name, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", MORE_CASES)
def test_every_world_size_in_more_cases(name: str, world_size: int) -> None:
    exercise(name, world_size)


def exercise(name: str, world_size: int) -> None:
    seqlen = (world_size - 1) * SHARD + (CASES | MORE_CASES)[name][0]
    got, alone = (run(name, seqlen, size) for size in (world_size, 1))
    assert differing(got, alone) == []
    for result in RESULTS:
        assert bool(getattr(got, result).isfinite().all()) and bool(getattr(got, result).any())


def test_one_sequence_on_any_number_of_ranks() -> None:
    one, *others = (run("float32 of a head", 500, size) for size in (1, 2, 3, 4))
    assert [differing(other, one) for other in others] == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_blocks(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched_select(monkeypatch, blocks(*shape))
    inputs = random_qkv(seqlen_q=500, nheads=2, nheads_kv=1, headdim=16, dtype=dtype, device=DEVICE)
    mask = Mask(500, 500, causal=True)
    one, four = (ring(inputs, mask, sequence(p, 500), same_bits=True) for p in (1, 4))
    assert differing(four, one) == []


# -- that the above can fail


@pytest.fixture(scope="module")
def short() -> tuple[Inputs, Mask]:
    return random_qkv(seqlen_q=512, nheads=1, headdim=16, device=DEVICE), Mask(512, 512, True)


def test_zigzag_folds_in_another_order(short: tuple[Inputs, Mask]) -> None:
    inputs, mask = short
    one, two = (ring(inputs, mask, layouts_of("zigzag", mask, p)) for p in (1, 2))
    assert set(differing(two, one)) >= {"out", "dq", "dk", "dv"}


def test_shards_that_start_within_a_block_have_other_sums(short: tuple[Inputs, Mask]) -> None:
    inputs, mask = short
    layout = SequenceLayout.boundaries([0, 200, 512])
    one, two = (ring(inputs, mask, layouts) for layouts in (sequence(1, 512), (layout, layout)))
    assert set(differing(two, one)) >= {"out", "dq", "dk", "dv"}


def test_gradients_that_are_added_up_have_other_sums(short: tuple[Inputs, Mask]) -> None:
    inputs, mask = short
    one = ring(inputs, mask, sequence(1, 512))
    added = ring(inputs, mask, sequence(4, 512), travels="kv")
    assert differing(added, one) == ["dk", "dv"]
    assert "dq" in differing(ring(inputs, mask, sequence(4, 512), travels="q"), one)


def test_the_order_is_chosen_where_it_can_be_had(short: tuple[Inputs, Mask]) -> None:
    inputs, mask = short
    spec = spec_of(inputs)
    chosen = make_call(spec, sequence(4, 512), mask, 1, backend="triton")
    assert chosen.same_bits and chosen.travels_back == "kv"
    layouts = layouts_of("zigzag", mask, 2)
    assert not make_call(spec, layouts, mask, 1, backend="triton").same_bits
    with pytest.raises(NotImplementedError, match="layout must be contiguous"):
        make_call(spec, layouts, mask, 1, backend="triton", same_bits=True)


# -- two runs


DOCUMENTS = (0, 30, 31, 100, 193)


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("zigzag", Mask(193, 193, True)),
        ("striped", Mask(193, 193, True)),
        ("contiguous", Mask(193, 193, True, (40, -1))),
        ("zigzag", Mask(193, 193, True, (-1, -1), DOCUMENTS, DOCUMENTS)),
    ],
    ids=["zigzag", "striped", "window", "documents"],
)
def test_two_runs_are_bit_equal(kind: str, mask: Mask, travels: Traveller) -> None:
    inputs = random_qkv(seqlen_q=193, nheads=1, headdim=16, dtype=torch.float16, device=DEVICE)
    sinks = torch.tensor([0.5], device=DEVICE)
    layouts = layouts_of(kind, mask, 2)
    first, second = (
        ring(inputs, mask, layouts, sinks=sinks, softcap=2.0, travels=travels) for _ in range(2)
    )
    assert differing(first, second) == []
    assert torch.equal(first.dsinks, second.dsinks)
