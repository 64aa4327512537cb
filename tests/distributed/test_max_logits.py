"""The greatest score of each head: against float64, the same on all ranks, refused by name."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, Strategy, ring_attention
from ring_attn.core.layout import LAYOUTS
from tests.cold import assert_compiles
from tests.distributed.pool import everyone, on_ranks
from tests.masks import REDUCED
from tests.refusals import refused

SEQLEN, HEADDIM, SCALE = 45, 16, 0.3


def strategies(world_size: int) -> list[Strategy]:
    found = [Strategy(), Strategy("all_gather"), Strategy("exchange")]
    if world_size > 1:
        found.append(Strategy(ulysses_degree=world_size))
    return [*found, Strategy(ulysses_degree=2)] if world_size == 4 else found


def greatest(backend: str, heads: int, heads_kv: int) -> None:
    """Checks each strategy with each mask; the layouts take turns.

    In the interpreter: one strategy for each mask, forward only.
    """
    rank, world_size, whole = dist.get_rank(), dist.get_world_size(), backend == "reference"
    torch.manual_seed(3)
    q = torch.randn(2, SEQLEN, heads, HEADDIM)
    k, v = torch.randn(2, 2, SEQLEN, heads_kv, HEADDIM)
    scores = SCALE * torch.einsum(
        "bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(heads // heads_kv, 2)
    )
    # Each product and sum of a score is rounded once, the factor once, or twice in base 2.
    norms = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    bound = (HEADDIM + 4) * torch.finfo(torch.float32).eps * SCALE * float(norms)
    sinks = torch.full((heads,), 50.0)  # sinks are not scores
    for (s, strategy), (m, mask) in product(
        enumerate(strategies(world_size)), enumerate(REDUCED.values())
    ):
        if not (whole or s == m):
            continue
        layout = SequenceLayout.from_name(LAYOUTS[(s + m) % len(LAYOUTS)], SEQLEN, world_size)
        softcap = 2.0 * ((s + m // 2) % 2)
        capped = softcap * torch.tanh(scores / softcap) if softcap else scores
        wanted = capped.masked_fill(~mask.dense(), -torch.inf).amax((0, 2, 3))
        shards = [layout.shard(x, rank) for x in (q, k, v)]
        shards[0].requires_grad_()
        attend = partial(
            ring_attention,
            *shards,
            mask=mask,
            softmax_scale=SCALE,
            softcap=softcap,
            sinks=sinks,
            layout=layout,
            strategy=strategy,
            backend=backend,
        )
        out, lse, most = attend(return_lse=True, return_max_logits=True)
        assert out.shape == shards[0].shape and most.shape == (heads,)
        assert not most.requires_grad and most.dtype == lse.dtype
        seen = wanted > -torch.inf
        assert torch.equal(most > -torch.inf, seen)
        assert float((most - wanted)[seen].abs().max() if seen.any() else 0.0) <= bound
        assert torch.equal(attend(), out)
        assert all(torch.equal(one, most) for one in everyone(most))
        if whole:
            out.sum().backward()


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.queued
@pytest.mark.sweep(2)
def test_greatest_of_all_ranks(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(greatest, "reference", 6, 2)


@pytest.mark.slow
@pytest.mark.gloo
def test_in_the_interpreter(ranks: Any) -> None:
    ranks(2).run(greatest, "triton", 2, 1)


@on_ranks(2)
def test_compiled_and_refused_by_name() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(1, 8, 2, 8)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ring_attention(x, x, x, backend="reference", return_max_logits=True)

    assert_compiles(call, [[x]], "aot_eager", fullgraph=True)
    with refused(NotImplementedError, "return_max_logits|reference"):
        ring_attention(x, x, x, backend="aten", return_max_logits=True)
