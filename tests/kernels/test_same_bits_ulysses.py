"""Ulysses gives the bits of one process for any layout and mask; a hybrid where its ring does."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.spec import AttentionSpec
from ring_attn.strategies import ring, ulysses
from ring_attn.strategies.base import Call
from ring_attn.strategies.ulysses import UlyssesCall
from ring_attn.testing import RESULTS, Expected, random_qkv
from tests.kernels.calls import DEVICE, blocks, patched_select
from tests.strategies import Layouts, config, layouts_of, run_calls, sinks_of, spec_of

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")

# No multiple of a block, of the ranks, or of their chunks.
SEQLEN = 67
DOCUMENTS = (0, 9, SEQLEN)

MASKS = {
    "causal": Mask(SEQLEN, SEQLEN, causal=True),
    "window, documents": Mask(SEQLEN, SEQLEN, True, (40, -1), DOCUMENTS, DOCUMENTS),
}
HEADS = config(nheads=8, nheads_kv=4, headdim=16, device=DEVICE)


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a block of 128 x 128 costs little more than one of 64 x 64."""
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(64, 64))


def call_of(
    spec: AttentionSpec,
    layouts: Layouts,
    rank: int,
    *,
    mask: Mask,
    degree: int,
    same_bits: bool | None = True,
) -> UlyssesCall:
    def make_core(spec: AttentionSpec, layouts: Layouts, rank: int) -> Call:
        return ring.make_call(spec, layouts, mask, rank, backend="triton", same_bits=same_bits)

    return ulysses.make_call(spec, layouts, rank, degree, make_core, same_bits=same_bits)


def run(
    mask: Mask,
    layouts: Layouts,
    degree: int,
    sizes: tuple[tuple[str, Any], ...] = HEADS,
    same_bits: bool | None = True,
) -> Expected:
    inputs = random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **dict(sizes))
    sinks = sinks_of(inputs).to(DEVICE)
    spec = spec_of(inputs, with_sinks=True)
    make = partial(call_of, spec, layouts, mask=mask, degree=degree, same_bits=same_bits)
    return run_calls(make, inputs, layouts, sinks)


@cache
def alone(mask: Mask, sizes: tuple[tuple[str, Any], ...] = HEADS) -> Expected:
    """One rank, the whole sequence, all heads: a ring of one."""
    return run(mask, layouts_of("contiguous", mask, 1), 1, sizes)


def differing(a: Expected, b: Expected) -> list[str]:
    return [name for name in RESULTS if not torch.equal(getattr(a, name), getattr(b, name))]


@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, "contiguous"), (4, "contiguous"), (4, "zigzag")]
)
@pytest.mark.parametrize("name", MASKS)
def test_every_world_size_has_the_bits_of_one(name: str, kind: str, world_size: int) -> None:
    mask = MASKS[name]
    got = run(mask, layouts_of(kind, mask, world_size), world_size)
    assert differing(got, alone(mask)) == []
    for result in RESULTS:
        assert bool(getattr(got, result).isfinite().all()) and bool(getattr(got, result).any())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["zigzag", "striped", "boundaries"])
@pytest.mark.parametrize("name", MASKS)
def test_every_world_size_in_more_layouts(name: str, kind: str, world_size: int) -> None:
    mask = MASKS[name]
    sizes = config(nheads=8, nheads_kv=8, headdim=16, dtype=torch.float16, device=DEVICE)
    got = run(mask, layouts_of(kind, mask, world_size), world_size, sizes)
    assert differing(got, alone(mask, sizes)) == []


def test_a_hybrid_has_them_where_its_ring_has() -> None:
    """Two groups of two ranks; what matters is where a group's rows start, not a rank's."""
    mask = Mask(140, 140, causal=True)
    layout = SequenceLayout.boundaries([0, 50, 128, 130, 140])
    sizes = config(nheads=2, nheads_kv=2, headdim=16, device=DEVICE)
    got = run(mask, (layout, layout), 2, sizes)
    assert differing(got, alone(mask, sizes)) == []


# -- that the above can fail


def test_a_kv_head_on_two_ranks_has_other_gradients() -> None:
    mask, sizes = MASKS["causal"], config(nheads=4, nheads_kv=1, headdim=16, device=DEVICE)
    layouts = layouts_of("contiguous", mask, 2)
    got = run(mask, layouts, 2, sizes, same_bits=None)
    assert differing(got, alone(mask, sizes)) == ["dk", "dv"]
    with pytest.raises(NotImplementedError, match="4 heads, 1 kv heads and ulysses_degree 2"):
        run(mask, layouts, 2, sizes)


def test_the_call_says_what_it_has() -> None:
    def says(sizes: dict[str, int], kind: str, degree: int, mask: Mask) -> bool:
        spec = AttentionSpec(DEVICE, torch.float32, 1, headdim=16, headdim_v=16, **sizes)
        layouts = layouts_of(kind, mask, 4)
        answers = {
            call_of(spec, layouts, r, mask=mask, degree=degree, same_bits=None).same_bits
            for r in range(4)
        }
        assert len(answers) == 1, "the same on every rank"
        return answers.pop()

    causal, window = Mask(1024, 1024, True), Mask(1024, 1024, True, (40, -1))
    plain, shared = {"nheads": 8, "nheads_kv": 4}, {"nheads": 8, "nheads_kv": 2}
    assert says(plain, "contiguous", 4, causal) and says(plain, "zigzag", 4, window)
    assert not says(shared, "contiguous", 4, causal) and says(shared, "contiguous", 2, causal)
    assert not says(plain, "contiguous", 2, window) and not says(plain, "zigzag", 2, causal)
    # Two ranks without heads know it too.
    assert says({"nheads": 2, "nheads_kv": 2}, "striped", 4, window)
