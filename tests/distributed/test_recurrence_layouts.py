"""Recurrences on drawn layouts and documents: right on any, and NaN stays in its document."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn import SequenceLayout
from ring_attn.core.segments import Segment
from tests.distributed.test_recurrence import KINDS, WIDTH, by_document, inputs

MOST_RANKS = 5
# Runs of positions, each with its rank, and documents, of which some are empty.
Drawn = tuple[list[tuple[int, int]], list[int]]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Runs in any order of positions; ranks without rows; documents of any length."""
    seqlen = draw(st.integers(1, 24))
    cuts = st.lists(st.integers(0, seqlen), max_size=7).map(sorted)
    runs = [b - a for a, b in pairwise([0, *draw(cuts), seqlen]) if b > a]
    documents = [b - a for a, b in pairwise([0, *draw(cuts), seqlen])]
    owners = draw(st.lists(st.integers(0, MOST_RANKS - 1), min_size=len(runs), max_size=len(runs)))
    return list(zip(runs, owners, strict=True)), documents


@pytest.mark.slow
@pytest.mark.parametrize("world_size", range(1, MOST_RANKS + 1))
def test_on_any_layout_and_documents(ranks: Any, world_size: int) -> None:
    pool = ranks(world_size)

    @settings(
        max_examples=25, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(sorted(KINDS)), drawn(), st.integers(0, 7))
    def check(kind: str, case: Drawn, spoilt: int) -> None:
        failed = [text for text in pool.run(failure, kind, case, spoilt) if text]
        assert not failed, failed[0]

    check()


def failure(kind: str, case: Drawn, spoilt: int) -> str:
    """Names what is wrong on this rank, if anything. No rank raises, so that all can go on."""
    split, whole = KINDS[kind]
    (runs, documents), rank, world_size = case, dist.get_rank(), dist.get_world_size()
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    for stop, (length, owner) in zip(accumulate(n for n, _ in runs), runs, strict=True):
        # In front: a shard has its runs in the opposite order of positions.
        parts[owner % world_size].insert(0, Segment(stop - length, length))
    layout = SequenceLayout.from_segments(parts)
    cu_seqlens = torch.tensor([0, *accumulate(documents)])
    place = {"layout": layout, "cu_seqlens": cu_seqlens}

    x = inputs(layout.seqlen)
    if kind != "delta rule":
        x.pop("beta")
    shared = {}
    if kind == "convolution":
        shared["weight"] = torch.randn(6, 1, WIDTH, dtype=torch.float64)
    spoilt %= len(documents)
    inside = slice(*cu_seqlens[spoilt : spoilt + 2].tolist())
    first = torch.arange(layout.seqlen)
    others = (first < inside.start) | (first >= inside.stop)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    expected = by_document(lambda part: whole(part | shared), leaves, documents)
    dout = torch.randn_like(expected)
    names = ["q"] if kind == "convolution" else list(x)
    wanted = torch.autograd.grad(expected, [x[name] for name in names], dout)

    for nan in (False, True):
        own = {name: t.detach().clone() for name, t in x.items()}
        if nan:
            own["q"][:, inside] = own["v"][:, inside] = own["k"][:, inside] = torch.nan
        own = {name: layout.shard(t, rank).requires_grad_() for name, t in own.items()}
        out = split(own | shared, place)
        leaf = [own[name] for name in names]
        got = torch.autograd.grad(out, leaf, layout.shard(dout, rank))
        mine = others[layout.position_ids(rank)] if nan else slice(None)
        # Sums of at most 24 terms of about 1, in another order.
        bound = 1e3 * torch.finfo(torch.float64).eps
        results = zip(["out", *names], (out, *got), (expected, *wanted), strict=True)
        for name, a, b in results:
            right = layout.shard(b, rank)[:, mine]
            if not torch.allclose(a[:, mine], right, rtol=bound, atol=bound):
                return f"{name} of {kind} on rank {rank}, nan={nan}: {layout}, {documents}"
    return ""
