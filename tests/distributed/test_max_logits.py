"""The greatest score of each head: against float64, the same on all ranks, refused by name."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, Strategy, masks, ring_attention, tree_decode
from ring_attn.core.layout import LAYOUTS

SEQLEN, HEADS, HEADS_KV, HEADDIM, SCALE = 45, 6, 2, 16, 0.3
MASKS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, 0)},
    "spans": {"mask": masks.spans(SEQLEN, [(3, 9), (20, 33)])},
    "nothing": {"mask": masks.from_slices(SEQLEN, SEQLEN, [])},
}


def strategies(world_size: int) -> list[Strategy]:
    found = [Strategy(), Strategy("all_gather"), Strategy("exchange")]
    if world_size > 1:
        found.append(Strategy(ulysses_degree=world_size))
    return [*found, Strategy(ulysses_degree=2)] if world_size == 4 else found


def greatest(backend: str, dtype: torch.dtype) -> None:
    if backend == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    q = torch.randn(2, SEQLEN, HEADS, HEADDIM, dtype=dtype)
    k, v = torch.randn(2, 2, SEQLEN, HEADS_KV, HEADDIM, dtype=dtype)
    scores = SCALE * torch.einsum(
        "bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(HEADS // HEADS_KV, 2)
    )
    # Every product and every sum of a score is rounded once, and so is the factor, in base 2 twice.
    norms = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    bound = (HEADDIM + 4) * torch.finfo(torch.float32).eps * SCALE * float(norms)
    few = backend == "triton"
    for number, (strategy, (name, how), layout_name) in enumerate(
        product(strategies(world_size), MASKS.items(), LAYOUTS)
    ):
        if few and number % 11 != 3:
            continue
        softcap = 2.0 * (number % 2)
        layout = SequenceLayout.from_name(layout_name, SEQLEN, world_size)
        mask = how.get("mask") or (
            masks.window(SEQLEN, left=5, right=0) if name == "window" else masks.causal(SEQLEN)
        )
        capped = softcap * torch.tanh(scores / softcap) if softcap else scores
        wanted = capped.masked_fill(~mask.dense(), -torch.inf).amax((0, 2, 3))
        shards = [layout.shard(x, rank) for x in (q, k, v)]
        shards[0].requires_grad_()
        sinks = torch.full((HEADS,), 50.0)  # no score
        out, lse, most = ring_attention(
            *shards, **how, softmax_scale=SCALE, softcap=softcap, sinks=sinks, layout=layout,
            strategy=strategy, backend=backend, return_lse=True, return_max_logits=True,
        )  # fmt: skip
        assert out.shape == shards[0].shape and most.shape == (HEADS,)
        assert not most.requires_grad and most.dtype == lse.dtype
        seen = wanted > -torch.inf
        assert torch.equal(most > -torch.inf, seen)
        assert float((most - wanted)[seen].abs().max() if seen.any() else 0.0) <= bound
        plain = ring_attention(
            *shards, **how, softmax_scale=SCALE, softcap=softcap, sinks=sinks, layout=layout,
            strategy=strategy, backend=backend,
        )  # fmt: skip
        assert torch.equal(plain, out)
        out.sum().backward()
        everyone = [torch.empty_like(most) for _ in range(world_size)]
        dist.all_gather(everyone, most)
        assert all(torch.equal(one, most) for one in everyone)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_greatest_of_all_ranks(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(greatest, "reference", torch.float32)


def test_in_the_interpreter(ranks: Any) -> None:
    ranks(2).run(greatest, "triton", torch.float32)


def refused() -> str:
    x = torch.randn(1, 8, 2, 8)
    with pytest.raises(NotImplementedError) as caught:
        ring_attention(x, x, x, backend="aten", return_max_logits=True)
    return str(caught.value)


def test_refused_by_name(ranks: Any) -> None:
    for text in ranks(2).run(refused):
        assert "return_max_logits" in text and "reference" in text


def compiled() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(1, 8, 2, 8)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ring_attention(x, x, x, backend="reference", return_max_logits=True)

    alone = call(x)
    together = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    with pytest.raises(TypeError, match="return_max_logits"):
        tree_decode(x, x, x, return_max_logits=True)


def test_compiled(ranks: Any) -> None:
    ranks(2).run(compiled)
