"""`pack`: bounds of the placement against the dense mask, and uses of its layouts."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ring_attn import explain, pack, shard_batch
from ring_attn.core.mask import Mask
from ring_attn.planning.balance import balance_of
from ring_attn.planning.devices import builtin_cluster
from ring_attn.planning.placement import Packing
from tests.counts import counted

MIXED = (70, 5, 0, 33, 5, 9, 12, 1, 20, 6)


def mask_of(packing: Packing, causal: bool = True, window: tuple[int, int] = (-1, -1)) -> Mask:
    n, cuts = packing.layout.seqlen, packing.cu_seqlens
    return Mask(n, n, causal, window, cuts, cuts)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([(-1, -1), (7, -1), (0, 0), (3, 5)]),
    st.sampled_from([1, 4]),
    st.one_of(st.none(), st.integers(0, 9)),
)
@example([1], 5, True, (-1, -1), 1, None)
@example([0, 0, 3], 4, True, (-1, -1), 4, 0)
def test_figures_are_those_of_the_dense_mask(
    lengths: list[int],
    world_size: int,
    causal: bool,
    window: tuple[int, int],
    align: int,
    spare: int | None,
) -> None:
    """Cuts within a document are at multiples of `align`, and no rank has more than `max_rows`."""
    even_rows = -(-sum(lengths) // world_size)
    # Blocks do not fill ranks to the last row, so they need more room.
    max_rows = None if spare is None else 2 * (even_rows + align * (1 + spare))
    packing = pack(
        lengths, world_size, causal=causal, window_size=window, align=align, max_rows=max_rows
    )
    assert sorted(packing.order) == list(range(len(lengths)))
    cuts = packing.cu_seqlens
    assert [b - a for a, b in pairwise(cuts)] == [lengths[i] for i in packing.order]
    mask = mask_of(packing, causal, window)
    assert packing.balance == balance_of(packing.layout, mask)
    assert max_rows is None or max(packing.balance.rows) <= max_rows
    for rank in range(world_size):
        for segment in packing.layout.segments(rank):
            for cut in (segment.start, segment.start + segment.length):
                start_of_document = max(boundary for boundary in cuts if boundary <= cut)
                assert cut in cuts or (cut - start_of_document) % align == 0


def test_a_document_is_cut_if_a_rank_cannot_hold_it() -> None:
    """`max_balance` bounds the pairs of a rank, and `max_rows` its rows."""
    assert pack([10], 2, max_balance=2.0).num_cut == 0
    packing = pack([10], 2, max_balance=2.0, max_rows=6)
    assert packing.num_cut == 1 and max(packing.balance.rows) <= 6


def lognormal(n: int, seed: int, mean: float = 7.0, sigma: float = 1.5) -> list[int]:
    draw = random.Random(seed)
    return [int(draw.lognormvariate(mean, sigma)) for _ in range(n)]


LENGTHS = {
    "few": [5000, 30_000, 4000],
    "equal": [1024] * 500,
    "empty": [0] * 50 + [20_000] * 3,
    "giant": [1_000_000] + [317] * 3000,
    "mixed": [131_072] * 3 + [4096] * 50 + [300] * 500,
    "long tail": lognormal(2000, seed=1),
    "short batch": lognormal(40, seed=2, mean=9.0),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_size": (1000, 0)}], ids=str)
@pytest.mark.sweep(2)
def test_work_and_rows_are_even(
    lengths: list[int], world_size: int, options: dict[str, Any]
) -> None:
    packing = pack(lengths, world_size, **options)
    assert packing.balance.of_work <= 1.05 and packing.balance.of_rows <= 1.051
    assert packing == pack(torch.tensor(lengths), world_size, **options)


# Wrong types are tested in test_wrong_values.
@pytest.mark.parametrize(
    ("text", "lengths", "options"),
    [
        ("at least one document", [], {}),
        (r"each of lengths .* -1", [3, -1], {}),
        ("max_balance .* 0.5", [10], {"max_balance": 0.5}),
        ("align .* 0", [10], {"align": 0}),
        (
            "max_rows is 4, so 2 ranks hold 8 of 10 rows: allow 5 rows, or use 3 ranks",
            [10],
            {"max_rows": 4},
        ),
        ("max_rows is 8, .* align=16 .* 9 rows", [9, 7], {"max_rows": 8, "align": 16}),
    ],
)
def test_what_cannot_be_is_refused(text: str, lengths: list[int], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        pack(lengths, **{"world_size": 2} | options)


def test_batches_are_cut_by_it() -> None:
    packing = pack(MIXED, 3)
    documents = [torch.arange(n) + 100 * i for i, n in enumerate(MIXED)]
    ids = torch.cat([documents[i] for i in packing.order])[None]
    rows = {}
    for rank in range(3):
        batch = {"input_ids": ids, "labels": ids}
        part = shard_batch(batch, packing.layout, rank, cu_seqlens=packing.cu_seqlens)
        for token, label, at in zip(*(x[0].tolist() for x in part.values()), strict=True):
            rows[token] = (label, at)
    assert rows == {
        100 * i + at: (100 * i + at + 1 if at + 1 < n else -100, at)
        for i, n in enumerate(MIXED)
        for at in range(n)
    }


def test_ten_thousand_documents_are_placed_and_planned_after_little_work() -> None:
    fits = pack([1024] * 512, 64)
    assert fits.num_cut == 0, "documents that fit stay whole"
    documents = lognormal(10_000, seed=0)
    packing, calls = counted(partial(pack, documents, 64))
    assert calls < 50 * len(documents)
    assert packing.balance.of_work <= 1.05
    planned = partial(
        explain,
        seqlen=packing.layout.seqlen,
        world_size=64,
        nheads=32,
        nheads_kv=8,
        headdim=128,
        causal=True,
        cu_seqlens=packing.cu_seqlens,
        layout=packing.layout,
        cluster=builtin_cluster("H100"),
        strategies=["ring", "all_gather"],
    )
    choice, calls = counted(planned)
    assert calls < 3e6  # 0.9 million were counted
    assert choice.layout == packing.layout and choice.best.seconds > 0


def test_too_many_ranks_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="at most 16,384, got 100,000"):
        pack([3, 4], 100_000)
