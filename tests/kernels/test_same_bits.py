"""Which calls have the bits of one process at every world size, and which have others.

ring         causal, contiguous shards that start at multiples of a block
all_gather   such shards, any mask
ulysses      any layout and mask, no KV head on two ranks; a hybrid where its ring has them
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import make_call, why_not_same_bits
from ring_attn.testing import (
    MASKS,
    RESULTS,
    AllRanks,
    Case,
    Heads,
    Layouts,
    run_all_ranks,
)
from tests.kernels.calls import DEVICE, DTYPES, blocks, patched_select

pytestmark = pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")

# Cuts are at multiples of the longest block that any config may have.
SHARD = 128
ONE_HEAD = Heads(1, 1, 16, 16)
SHARED = Heads(2, 1, 16, 16)


@pytest.fixture(autouse=True)
def long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes blocks of 128 x 128: in the interpreter they cost little more than 64 x 64."""
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(SHARD, SHARD))


def sequence(mask: Mask, world_size: int) -> Layouts:
    """Shards that start at multiples of SHARD; the last is short if the length is no multiple."""

    def layout_of(seqlen: int) -> SequenceLayout:
        longest = -(-seqlen // (SHARD * world_size)) * SHARD
        return SequenceLayout.boundaries([min(r * longest, seqlen) for r in range(world_size + 1)])

    return layout_of(mask.seqlen_q), layout_of(mask.seqlen_k)


def causal(seqlen: int) -> Mask:
    return Mask(seqlen, seqlen, causal=True)


def run(mask: Mask, world_size: int, layout: Any = None, **options: Any) -> AllRanks:
    """Runs all ranks; a single rank with the whole sequence is a ring of one."""
    usual = {"strategy": "ring", "heads": ONE_HEAD, "same_bits": True, "batch": 1}
    case = Case(mask, layout or sequence(mask, world_size), backend="triton", **(usual | options))
    ran = run_all_ranks(case, world_size, device=DEVICE)
    assert all(bool(getattr(ran.whole, name).nan_to_num(0.0, 0.0, 0.0).any()) for name in RESULTS)
    return ran


# -- rings and gatherings

# Rows of the last shard, and other options.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "float16, softcap, sinks": (SHARD, {"dtype": "float16", "softcap": 2.0, "sinks": True}),
    "float32 gqa": (104, {"heads": SHARED}),
    "float16 gqa": (104, {"dtype": "float16", "heads": Heads(4, 2, 16, 16)}),
    "float16 sinks": (4, {"dtype": "float16", "sinks": True}),
    "float32 mqa": (1, {"heads": Heads(3, 1, 16, 16), "softcap": 0.5, "sinks": True}),
    "float32 of a head": (SHARD, {}),
}
RINGS = [
    ("float16, softcap, sinks", 2),
    ("float32 gqa", 4),
    *(
        pytest.param(name, world_size, marks=pytest.mark.slow)
        for world_size in (4, 8)
        for name in list(OPTIONS)[2:]
    ),
]


@pytest.mark.parametrize(("name", "world_size"), RINGS)
def test_causal_rings_and_gatherings(name: str, world_size: int) -> None:
    rows, options = OPTIONS[name]
    mask = causal((world_size - 1) * SHARD + rows)
    alone = run(mask, 1, **options)
    for strategy in ("ring", "all_gather"):
        got = run(mask, world_size, strategy=strategy, **options)
        assert got.differing(alone) == [], strategy
        if "sinks" in options:
            # The caller sums this gradient over the ranks.
            assert torch.allclose(got.whole.dsinks, alone.whole.dsinks)


def test_a_ring_of_uneven_shards() -> None:
    layout = SequenceLayout.boundaries([0, 128, 128, 384, 401])
    got = run(causal(401), 4, (layout, layout), heads=SHARED)
    assert got.differing(run(causal(401), 1, heads=SHARED)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)], ids=str)
@pytest.mark.parametrize("dtype", [str(dtype).removeprefix("torch.") for dtype in DTYPES])
def test_any_blocks(dtype: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    patched_select(monkeypatch, blocks(*shape))
    one, four = (run(causal(500), p, heads=SHARED, dtype=dtype) for p in (1, 4))
    assert four.differing(one) == []


# -- gatherings under other masks

QUICK = {("documents window", (SHARD, SHARD)), ("longer kv", (SHARD, SHARD))}
GATHERINGS = [
    *((name, (SHARD, SHARD)) for name in MASKS),
    *(("documents", (64, 64)), ("documents", (32, 128)), ("longer kv", (128, 32))),
]


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*x, marks=[] if x in QUICK else pytest.mark.slow) for x in GATHERINGS],
    ids=str,
)
def test_gatherings_of_any_mask(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched_select(monkeypatch, blocks(*shape))
    mask = MASKS[name](290)
    one, three = (run(mask, p, strategy="all_gather") for p in (1, 3))
    assert three.differing(one) == []
    # Queries and keys may be cut apart, and shards be empty.
    q, k = mask.seqlen_q, mask.seqlen_k
    apart = (SequenceLayout.boundaries([0, 128, q]), SequenceLayout.boundaries([0, 0, k]))
    assert run(mask, 2, apart, strategy="all_gather").differing(one) == []


# -- ulysses: no multiple of a block, of the ranks, or of their chunks

BY_HEADS = {
    "causal": causal(67),
    "window, documents": Mask(67, 67, True, (40, -1), (0, 9, 67), (0, 9, 67)),
}
# By number of ranks.
MANY = {2: Heads(4, 2, 16, 16), 3: Heads(6, 6, 16, 16), 4: Heads(8, 4, 16, 16)}


ULYSSES = {
    ("causal", 2, "contiguous"): [],
    ("causal", 3, "boundaries"): pytest.mark.slow,
    ("causal", 4, "striped"): pytest.mark.slow,
    ("window, documents", 2, "striped"): pytest.mark.slow,
    ("window, documents", 3, "zigzag"): pytest.mark.slow,
    ("window, documents", 4, "zigzag"): [],
    ("window, documents", 4, "boundaries"): pytest.mark.slow,
}


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [pytest.param(*case, marks=marks) for case, marks in ULYSSES.items()],
)
def test_ulysses(name: str, world_size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(64, 64))
    heads = MANY[world_size]
    alone = run(BY_HEADS[name], 1, heads=heads, sinks=True, same_bits=None)
    got = run(BY_HEADS[name], world_size, layout, strategy="ulysses", heads=heads, sinks=True)
    assert got.differing(alone) == []


def test_a_hybrid_has_them_where_its_ring_has() -> None:
    """Two groups of two ranks: bits depend on where a group's rows start, not where a rank's do."""
    layout = SequenceLayout.boundaries([0, 50, 128, 130, 140])
    heads = Heads(2, 2, 16, 16)
    got = run(causal(140), 4, (layout, layout), strategy=Strategy(ulysses_degree=2), heads=heads)
    assert got.differing(run(causal(140), 1, heads=heads)) == []


# -- that the above can fail


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("layout", ["zigzag", SequenceLayout.boundaries([0, 200, 512])], ids=str)
def test_other_orders_and_blocks_have_other_sums(strategy: str, layout: Any) -> None:
    layouts = layout if isinstance(layout, str) else (layout, layout)
    got = run(causal(512), 2, layouts, strategy=strategy, same_bits=None)
    assert set(got.differing(run(causal(512), 1))) >= {"out", "dq", "dk", "dv"}


def test_gradients_that_are_added_up_have_other_sums() -> None:
    alone = run(causal(512), 1)
    assert run(causal(512), 2, strategy="all_gather", same_bits=False).differing(alone) == [
        "dk", "dv",
    ]  # fmt: skip
    # In a ring the Q side travels if each query head has a KV head, and KV if there are fewer.
    assert "dq" in run(causal(512), 4, same_bits=False).differing(alone)
    few = (run(causal(512), p, heads=SHARED, same_bits=False) for p in (4, 1))
    assert next(few).differing(next(few)) == ["dk", "dv"]


def test_the_call_says_what_it_has() -> None:
    def says(heads: tuple[int, int], layout: str, degree: int, mask: Mask) -> bool:
        spec = AttentionSpec(DEVICE, torch.float32, 1, *heads, 16, 16)
        layouts = Case(mask, layout).build_layouts(4)
        strategy = Strategy(ulysses_degree=degree)
        answers = {
            why_not_same_bits(make_call(strategy, spec, layouts, mask, rank, backend="triton"))
            is None
            for rank in range(4)
        }
        assert len(answers) == 1, "the same on every rank"
        return answers.pop()

    window = Mask(1024, 1024, True, (40, -1))
    assert says((8, 4), "contiguous", 4, causal(1024)) and says((8, 4), "zigzag", 4, window)
    assert not says((8, 2), "contiguous", 4, causal(1024))
    assert says((8, 2), "contiguous", 2, causal(1024))
    assert not says((8, 4), "contiguous", 2, window)
    assert not says((8, 4), "zigzag", 2, causal(1024))
    # The two ranks without heads give the same answer.
    assert says((2, 2), "striped", 4, window)
    assert says((8, 4), "contiguous", 1, causal(512)) and not says((8, 4), "zigzag", 1, causal(512))


# -- two runs


@pytest.mark.parametrize(
    ("mask", "layout", "heads"),
    [
        ("documents", "zigzag", SHARED),  # KV travels
        ("causal", "striped", ONE_HEAD),  # Q travels
        ("window causal", "contiguous", SHARED),
    ],
)
def test_two_runs_are_bit_equal(mask: str, layout: str, heads: Heads) -> None:
    options = {"seqlen": 61, "batch": 1, "softcap": 2.0, "sinks": True}
    case = Case(mask, layout, "ring", "triton", "float16", heads, **options)
    first, second = (run_all_ranks(case, 2, device=DEVICE) for _ in range(2))
    assert not first.failures
    assert first.differing(second) == []
    assert torch.equal(first.whole.dsinks, second.whole.dsinks)
