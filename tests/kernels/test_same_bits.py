"""Which calls have the bits of one process at every world size, and which have others.

ring         causal, contiguous shards that start at multiples of a block
all_gather   such shards, any mask
ulysses      any layout and mask, no KV head on two ranks; a hybrid where its ring has them
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import make_call, why_not_same_bits
from ring_attn.testing import MASKS, RESULTS, AllRanks, Case, Heads, Layouts, run_all_ranks
from tests.kernels.calls import DEVICE, blocks, patched_select

# Cuts are at multiples of the longest block that any config may have.
SHARD = 128
ONE_HEAD = Heads(1, 1, 16, 16)
SHARED = Heads(2, 1, 16, 16)


def sequence(mask: Mask, world_size: int) -> Layouts:
    """Shards that start at multiples of SHARD; the last is short if the length is no multiple."""

    def layout_of(seqlen: int) -> SequenceLayout:
        longest = -(-seqlen // (SHARD * world_size)) * SHARD
        return SequenceLayout.boundaries([min(r * longest, seqlen) for r in range(world_size + 1)])

    return layout_of(mask.seqlen_q), layout_of(mask.seqlen_k)


def boundaries(*cuts: int) -> Layouts:
    return (SequenceLayout.boundaries(cuts), SequenceLayout.boundaries(cuts))


def causal(seqlen: int) -> Mask:
    return Mask(seqlen, seqlen, causal=True)


def run(mask: Mask, world_size: int, layout: Any = None, **options: Any) -> AllRanks:
    """Runs all ranks; a single rank with the whole sequence is a ring of one."""
    usual = {"strategy": "ring", "heads": ONE_HEAD, "same_bits": True, "batch": 1}
    case = Case(mask, layout or sequence(mask, world_size), backend="triton", **(usual | options))
    ran = run_all_ranks(case, world_size, device=DEVICE)
    assert all(bool(getattr(ran.whole, name).nan_to_num(0.0, 0.0, 0.0).any()) for name in RESULTS)
    return ran


# Of rings and gatherings: number of ranks, rows of the last shard, and other options.
OPTIONS: list[tuple[int, int, dict[str, Any]]] = [
    (2, SHARD, {"dtype": "float16", "softcap": 2.0, "sinks": True}),
    (4, 104, {"heads": SHARED}),
    (4, 104, {"dtype": "float16", "heads": Heads(4, 2, 16, 16)}),
    (8, 4, {"dtype": "float16", "sinks": True}),
    (8, 1, {"heads": Heads(3, 1, 16, 16), "softcap": 0.5, "sinks": True}),
]
# Of Ulysses, with no multiple of a block, of the ranks, or of their chunks.
BY_HEADS = {
    "causal": causal(67),
    "window, documents": Mask(67, 67, True, (40, -1), (0, 9, 67), (0, 9, 67)),
}
MANY = {2: Heads(4, 2, 16, 16), 3: Heads(6, 6, 16, 16), 4: Heads(8, 4, 16, 16)}


def cases() -> Iterator[object]:
    """Mask, number of ranks, layouts, blocks, options."""

    def case(name: str, *values: object, quick: bool = False) -> object:
        return pytest.param(*values, id=name, marks=[] if quick else pytest.mark.slow)

    square = (SHARD, SHARD)
    for index, (world_size, rows, options) in enumerate(OPTIONS):
        mask = causal((world_size - 1) * SHARD + rows)
        for strategy in ("ring", "all_gather"):
            name, given = f"{strategy} {index}", options | {"strategy": strategy}
            yield case(name, mask, world_size, None, square, given, quick=index < 2)
    uneven = boundaries(0, 128, 128, 384, 401)
    yield case("uneven", causal(401), 4, uneven, square, {"heads": SHARED}, quick=True)
    for shape, dtype in (((64, 64), "float32"), ((32, 128), "float16"), ((128, 32), "float16")):
        yield case(
            f"blocks {shape}", causal(500), 4, None, shape, {"heads": SHARED, "dtype": dtype}
        )
    gathered = {"strategy": "all_gather"}
    for index, (name, make) in enumerate(MASKS.items()):
        shape = (square, (64, 64), (32, 128), (128, 32))[index % 4]
        quick = name in ("documents window", "longer kv")
        yield case(f"gathered {name}", make(290), 3, None, shape, gathered, quick=quick)
        if quick or name == "spans":  # queries and keys are cut apart, and shards are empty
            apart = (
                boundaries(0, 128, make(290).seqlen_q)[0],
                boundaries(0, 0, make(290).seqlen_k)[0],
            )
            full_name = f"gathered {name}, cut apart"
            yield case(full_name, make(290), 2, apart, shape, gathered, quick=quick)
    for name, world_size, layout in (
        ("causal", 2, "contiguous"),
        ("window, documents", 4, "zigzag"),
        ("causal", 3, "boundaries"),
        ("causal", 4, "striped"),
        ("window, documents", 3, "zigzag"),
    ):
        options = {"strategy": "ulysses", "heads": MANY[world_size], "sinks": True}
        quick = (world_size, layout) in ((2, "contiguous"), (4, "zigzag"))
        full_name = f"ulysses, {name}, {layout}, {world_size} ranks"
        yield case(full_name, BY_HEADS[name], world_size, layout, (64, 64), options, quick=quick)
    # Two groups of two ranks: bits depend on where a group's rows start, not where a rank's do.
    hybrid = {"strategy": Strategy(ulysses_degree=2), "heads": Heads(2, 2, 16, 16)}
    layout = boundaries(0, 50, 128, 130, 140)
    yield case("hybrid", causal(140), 4, layout, square, hybrid, quick=True)


@pytest.mark.parametrize(("mask", "world_size", "layout", "shape", "options"), list(cases()))
def test_the_bits_of_one_process(
    mask: Mask,
    world_size: int,
    layout: Any,
    shape: tuple[int, int],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        patched_select(monkeypatch, blocks(*shape))
    alone = run(mask, 1, **(options | {"strategy": "ring", "same_bits": None}))
    got = run(mask, world_size, layout, **options)
    assert got.differing(alone) == []
    if "sinks" in options:
        # The caller sums this gradient over the ranks.
        assert not got.failures


# -- that the above can fail


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "names"),
    [
        # Other orders, and other blocks.
        (2, "zigzag", {"strategy": "ring"}, {"out", "dq", "dk", "dv"}),
        (2, "zigzag", {"strategy": "all_gather"}, {"out", "dq", "dk", "dv"}),
        (2, boundaries(0, 200, 512), {"strategy": "ring"}, {"out", "dq", "dk", "dv"}),
        # Gradients that are added up. In a ring the Q side is sent if each query head has a KV
        # head, and KV if there are fewer.
        (2, None, {"strategy": "all_gather", "same_bits": False}, {"dk", "dv"}),
        (4, None, {"same_bits": False}, {"dq"}),
        (4, None, {"same_bits": False, "heads": SHARED}, {"dk", "dv"}),
    ],
)
def test_others_have_other_sums(
    world_size: int,
    layout: Any,
    options: dict[str, Any],
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched_select(monkeypatch, blocks(SHARD, SHARD))
    alone = run(causal(512), 1, heads=options.get("heads", ONE_HEAD))
    got = run(causal(512), world_size, layout, **({"same_bits": None} | options))
    assert set(got.differing(alone)) >= names


@pytest.mark.parametrize(
    ("heads", "layout", "degree", "window", "same"),
    [
        ((8, 4), "contiguous", 4, -1, True),
        ((8, 4), "zigzag", 4, 40, True),
        ((8, 2), "contiguous", 4, -1, False),
        ((8, 2), "contiguous", 2, -1, True),
        ((8, 4), "contiguous", 2, 40, False),
        ((8, 4), "zigzag", 2, -1, False),
        ((2, 2), "striped", 4, 40, True),  # two ranks have no heads
    ],
)
def test_every_rank_says_what_the_call_has(
    heads: tuple[int, int], layout: str, degree: int, window: int, same: bool
) -> None:
    spec = AttentionSpec(DEVICE, torch.float32, 1, *heads, 16, 16)
    mask = Mask(1024, 1024, True, (window, -1))
    layouts, strategy = Case(mask, layout).build_layouts(4), Strategy(ulysses_degree=degree)
    for rank in range(4):
        call = make_call(strategy, spec, layouts, mask, rank, backend="triton")
        assert (why_not_same_bits(call) is None) == same
