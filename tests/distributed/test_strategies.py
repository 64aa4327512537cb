"""Every strategy between processes has the bits and messages of the same call in one process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn import Strategy
from ring_attn.core.mask import Mask
from ring_attn.testing import (
    LAYOUTS,
    Case,
    Heads,
    cases,
    run_all_ranks,
    run_rank,
)

# Numbers of ranks of each strategy.
SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("ring", "all_gather", "exchange", "q_exchange"), (3, 4, 2, 1)),
    "ulysses": (3, 4, 2),
    **dict.fromkeys(("double_ring", "hybrid", "hybrid all_gather"), (4,)),
}


def assert_as_in_one_process(ranks: Any, case: Case, world_size: int) -> None:
    got = run_all_ranks(case, world_size, ranks(world_size).run)
    # `ring_attention` makes strided shards contiguous.
    alone = run_all_ranks(replace(case, noncontiguous=False), world_size)
    assert not got.failures
    assert got.differing(alone) == [] and got.sent == alone.sent, str(case)


def run_refused(case: Case) -> None:
    with pytest.raises(NotImplementedError, match=f"for a contiguous layout, got {case.layout}"):
        run_rank(case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.sweep(5)
def test_as_in_one_process(ranks: Any, one_thread: None, name: str, layout: str) -> None:
    if name == "q_exchange" and layout in ("zigzag", "striped"):
        ranks(2).run(run_refused, Case("causal", layout, name))
        return
    every = cases(True, backends=("auto", "reference"), layouts=[layout], strategies=[name])
    # A part of the cases: tests/unit/test_strategies.py has all of them, without processes.
    for number, case in enumerate(every[LAYOUTS.index(layout) % 2 :: 2]):
        assert_as_in_one_process(ranks, case, SIZES[name][number % len(SIZES[name])])


@pytest.mark.parametrize(
    "case",
    [
        Case("documents", "zigzag", batch=1),
        Case("documents unequal", "boundaries", batch=1, noncontiguous=True),
        Case("causal", "zigzag", seqlen=257, batch=3, large_logits=True, dtype="bfloat16"),
        Case("causal", "contiguous", heads=Heads(4, 1, 7, 5), softmax_scale=0.3),
        Case("causal", "striped", backend="reference", dtype="float64", heads=Heads(6, 3, 16, 40)),
        Case("window", "zigzag", Strategy("all_gather", heads_per_chunk=2), sinks=True),
        *(
            Case(mask, layout, "ring", heads=Heads(2, nheads_kv, 16, 16))
            for mask, layout, nheads_kv in (
                ("no keys", "contiguous", 1),
                ("no queries", "zigzag", 2),
                ("three rows", "boundaries", 1),
                ("diagonal", "striped", 2),
                ("few visible", "zigzag", 1),
                ("keys unseen", "contiguous", 2),
            )
        ),
    ],
    ids=str,
)
def test_odd_calls(ranks: Any, one_thread: None, case: Case) -> None:
    assert_as_in_one_process(ranks, case, 4)


# On a machine with a GPU the interpreter must be requested.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="CPU tensors need TRITON_INTERPRET=1 on a machine with a GPU",
)
SHARED = Heads(2, 1, 20, 16)
SAME_BITS = Case(
    Mask(256, 256, True), "contiguous", "ring", "triton", "float16", Heads(2, 1, 16, 16),
    softcap=5.0, sinks=True, same_bits=True,
)  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (3, Case("causal", "zigzag", dtype="float16", heads=SHARED, softcap=2.0, sinks=True)),
        (2, Case("causal", "striped", heads=Heads(2, 2, 20, 16), noncontiguous=True)),
        (2, Case("documents", "contiguous", heads=SHARED, sinks=True)),
        (2, SAME_BITS),
        (2, replace(SAME_BITS, strategy="all_gather")),
    ],
    ids=str,
)
def test_triton(ranks: Any, one_thread: None, world_size: int, case: Case) -> None:
    case = replace(case, backend="triton", seqlen=61, batch=1)
    got = run_all_ranks(case, world_size, ranks(world_size).run)
    assert not got.failures
    if case.same_bits:
        assert got.differing(run_all_ranks(case, 1, ranks(1).run)) == []
