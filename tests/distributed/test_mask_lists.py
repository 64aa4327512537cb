"""Masks that differ by batch entry and group of heads, against each entry and group by itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn import Mask, SequenceLayout, masks, ring_attention, tree_decode, unshard
from ring_attn.testing import (
    Expected,
    Inputs,
    dense_gradients,
    plain_gradients,
    random_qkv,
    random_sinks,
)
from tests.bounds import assert_holds
from tests.distributed.pool import on_ranks
from tests.refusals import refused

pytestmark = pytest.mark.gloo

SEQLEN = 37
CAUSAL, WINDOW = masks.causal(SEQLEN), masks.window(SEQLEN, 5)
# A sequence of 20 tokens and 17 rows of padding.
PADDED = Mask(SEQLEN, SEQLEN, cu_seqlens_q=(0, 20), cu_seqlens_k=(0, 20))
CHUNKS = masks.chunked(SEQLEN, 9)

LISTS: dict[str, Any] = {
    "by batch": [CAUSAL, CHUNKS],
    "by head": [[CAUSAL, WINDOW]],
    "by both": [[CAUSAL, WINDOW], [CHUNKS, PADDED]],
    "equal": [CHUNKS, CHUNKS],
}


def masks_of(given: Any, batch: int) -> list[list[Mask]]:
    """The mask of each of two groups of heads, for each batch entry."""
    rows = [row if isinstance(row, list) else [row, row] for row in given]
    return rows * (batch // len(rows))


@pytest.mark.parametrize(
    ("name", "layout", "strategy"),
    [
        ("by batch", "zigzag", "ring"),
        ("by head", "contiguous", "all_gather"),
        ("by both", "striped", "exchange"),
        ("equal", "zigzag", "ring"),
    ],
)
@on_ranks(3)
def test_results_are_those_of_each_entry_and_group(name: str, layout: str, strategy: str) -> None:
    """The rows of three ranks differ in number; one row is a tile of its own in striped layouts."""
    given, rank = LISTS[name], dist.get_rank()
    by_value = SequenceLayout.from_name(layout, SEQLEN, 3)
    whole = random_qkv(batch=2, seqlen_q=SEQLEN, nheads=8, nheads_kv=4, headdim=16)
    q, k, v, dout = (by_value.shard(x, rank) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(
        *leaves, mask=given, layout=by_value, strategy=strategy, return_lse=True
    )
    gradients = torch.autograd.grad(out, leaves, dout)
    out_, dq, dk, dv = (unshard(x.detach(), by_value) for x in (out, *gradients))
    lse = unshard(lse, by_value, dim=2)
    for entry, group in product(range(2), range(2)):

        def part(x: torch.Tensor, dim: int, entry: int = entry, group: int = group) -> torch.Tensor:
            """The heads of a group, for one batch entry."""
            return x[entry : entry + 1].chunk(2, dim)[group]

        inputs = Inputs(*(part(x, 2) for x in whole))
        mask = masks_of(given, 2)[entry][group]
        got = Expected(
            part(out_, 2), part(lse, 1), *(part(gradient, 2) for gradient in (dq, dk, dv))
        )
        where = (name, entry, group)
        assert_holds(got, dense_gradients(*inputs, mask), plain_gradients(*inputs, mask), where)


@on_ranks(2)
def test_sinks_greatest_scores_and_named_layouts_with_a_mask_of_each_entry() -> None:
    layout, rank = SequenceLayout.zigzag(36, 2), dist.get_rank()
    whole = random_qkv(batch=2, seqlen_q=36, nheads=4, headdim=16)
    sinks = random_sinks(4)
    q, k, v, _ = (layout.shard(x, rank) for x in whole)
    both = [masks.causal(36), masks.window(36, 3)]
    out, lse, logits = ring_attention(
        q,
        k,
        v,
        mask=both,
        layout="zigzag",
        sinks=sinks,
        return_lse=True,
        return_max_logits=True,
        backend="reference",
    )
    each = [
        ring_attention(
            q[i : i + 1],
            k[i : i + 1],
            v[i : i + 1],
            mask=mask,
            layout=layout,
            sinks=sinks,
            return_lse=True,
            return_max_logits=True,
            backend="reference",
        )
        for i, mask in enumerate(both)
    ]
    assert torch.equal(out, torch.cat([one[0] for one in each]))
    assert torch.equal(lse, torch.cat([one[1] for one in each]))
    assert torch.equal(logits, torch.stack([one[2] for one in each]).amax(0))


@on_ranks(2)
def test_a_rank_without_rows() -> None:
    layout = SequenceLayout.contiguous(1, 2)
    rows = layout.shard(torch.ones(2, 1, 2, 8), dist.get_rank())
    hidden = Mask(1, 1, cu_seqlens_q=(0, 0), cu_seqlens_k=(0, 0))
    out, lse = ring_attention(
        rows, rows, rows, mask=[masks.causal(1), hidden], layout=layout, return_lse=True
    )
    assert torch.equal(unshard(out, layout)[:, 0, 0, 0], torch.tensor([1.0, 0.0]))
    assert unshard(lse, layout, dim=2).isinf().flatten(1).all(1).tolist() == [False, True]


@on_ranks(2)
def test_lists_that_do_not_fit_are_refused() -> None:
    layout, rank = SequenceLayout.contiguous(SEQLEN, 2), dist.get_rank()
    q, k, v, _ = (
        layout.shard(x, rank) for x in random_qkv(batch=2, seqlen_q=SEQLEN, nheads_kv=2, headdim=8)
    )

    def call(mask: Any, **options: Any) -> None:
        ring_attention(q, k, v, mask=mask, group=group, **{"layout": layout} | options)

    group = dist.new_group()
    short = masks.causal(SEQLEN - 1)
    with refused(ValueError, "each of the 2 batch entries|list of 3"):
        call([CAUSAL] * 3)
    with refused(ValueError, "divide the numbers of heads|4 masks|2 of k"):
        call([[CAUSAL, WINDOW, CAUSAL, CHUNKS]])
    with refused(ValueError, "as many masks for each batch entry|[1, 2]"):
        call([[CAUSAL, WINDOW], [CAUSAL]])
    with refused(ValueError, "same numbers of queries and keys|(36, 36)"):
        call([CAUSAL, short])
    with refused(TypeError, "each of mask must be a ring_attn.Mask|Tensor"):
        call([CAUSAL, [torch.ones(2)]])
    with refused(ValueError, "mask replaces causal"):
        call([CAUSAL, WINDOW], causal=True)
    words = "sinks is not supported together with masks that differ by head"
    with refused(NotImplementedError, words):
        call([[CAUSAL, WINDOW]], sinks=torch.zeros(4))
    with refused(ValueError, "must have 17 rows|masks of the whole sequence"):
        call([masks.causal(34), masks.window(34, 2)], layout="contiguous")
    with refused(TypeError, "mask"):
        tree_decode(q[:1, :1], k[:1], v[:1], mask=[CAUSAL], layout=layout, group=group)


@on_ranks(2)
def test_ranks_with_other_masks_of_an_entry_raise() -> None:
    layout, rank = SequenceLayout.contiguous(SEQLEN, 2), dist.get_rank()
    rows = layout.shard(torch.ones(2, SEQLEN, 2, 8), rank)
    other = [CAUSAL, WINDOW if rank else CHUNKS]
    with pytest.raises(RuntimeError, match="mask"):
        ring_attention(rows, rows, rows, mask=other, layout=layout, group=dist.new_group())
