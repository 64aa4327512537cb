"""tree_decode and chunked prefill over gloo: growing caches, messages, refusals, generation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import (
    Segment,
    SequenceLayout,
    TransportOptions,
    masks,
    next_rank,
    ring_attention,
    tree_decode,
    unshard,
)
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.strategies.tree_decode import decode_packet
from ring_attn.testing import poisoned_empty, random_qkv, random_sinks
from ring_attn.transport.p2p import open_p2p
from tests.bounds import assert_holds, expect
from tests.cold import assert_compiles, compile_cold
from tests.distributed.pool import everyone, on_ranks
from tests.refusals import refused, says

SIZES = {"batch": 2, "nheads": 4, "nheads_kv": 2, "headdim": 16, "headdim_v": 8}
MLA = {"batch": 2, "nheads": 4, "nheads_kv": 1, "headdim": 576, "headdim_v": 512}
Results = tuple[Tensor, Tensor]


def assert_exact(got: Results, inputs: Any, mask: Mask, **scores: Any) -> None:
    assert_holds(dict(zip(("out", "lse"), got, strict=True)), *expect(inputs, mask, **scores))


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 3), (torch.float32, 1)], ids=str)
@on_ranks(3)
def test_a_growing_cache(dtype: torch.dtype, tokens: int) -> None:
    """The cache starts on the last rank; messages are as large as planned."""
    rank, layout = dist.get_rank(), SequenceLayout.boundaries([0, 0, 0, 20])
    ends = open_p2p(dist.group.WORLD, TransportOptions())
    for step in range(6):
        q, k, v, _ = inputs = random_qkv(
            seqlen_q=tokens, seqlen_k=layout.seqlen, dtype=dtype, seed=step, **SIZES
        )
        ends.stats.reset()
        with poisoned_empty():
            got = tree_decode(
                q,
                layout.shard(k, rank),
                layout.shard(v, rank),
                layout=layout,
                sinks=random_sinks(4),
                return_lse=True,
            )
        assert_exact(got, inputs, Mask(tokens, layout.seqlen, causal=True), sinks=random_sinks(4))
        assert all(all(map(torch.equal, got, others)) for others in everyone(got))
        nbytes = decode_packet(AttentionSpec.of(q, k, v), tokens).nbytes
        assert (ends.stats.messages, ends.stats.bytes_sent) == (1, 2 * nbytes)
        layout = layout.appended(next_rank(layout, block=3), tokens)


@pytest.mark.parametrize("kind", ["pages", "striped"])
@on_ranks(3)
def test_sequences_of_unlike_lengths(kind: str) -> None:
    """One message for all of them; each has the result of a call of its own."""
    rank, lengths = dist.get_rank(), torch.tensor([29, 0, 3, 16], dtype=torch.int32)
    ends = open_p2p(dist.group.WORLD, TransportOptions())
    q, *whole, _ = inputs = random_qkv(seqlen_q=2, seqlen_k=36, **SIZES | {"batch": 4})
    # Pages of 2: a rank's rows are those of a layout of segments, in the same order.
    dealt = [[Segment(2 * p, 2) for p in range(r, 18, 3)] for r in range(3)]
    pages = SequenceLayout.from_segments(dealt)
    layout = pages if kind == "pages" else SequenceLayout.striped(36, 3)
    k, v = (layout.shard(x, rank) for x in whole)
    options: dict[str, Any] = {"layout": layout}
    if kind == "pages":
        k, v = (x.reshape(24, 2, *x.shape[2:]) for x in (k, v))
        options = {"block_table": torch.arange(24, dtype=torch.int32).view(4, 6)}
    ends.stats.reset()
    out, lse = tree_decode(
        q, k, v, cache_seqlens=lengths, window_size=(11, -1), return_lse=True, **options
    )
    assert ends.stats.messages == 1
    assert all(torch.equal(out, other) for other in everyone(out))
    for i, length in enumerate(lengths.tolist()):
        one = [x[i : i + 1, : (None, length, length, None)[n]] for n, x in enumerate(inputs)]
        mask = Mask(2, length, causal=True, window_size=(11, -1))
        assert_exact((out[i : i + 1], lse[i : i + 1]), one, mask)
    again = tree_decode(q, k, v, cache_seqlens=29, window_size=(11, -1), **options)
    assert torch.equal(again[0], out[0])


@on_ranks(3)
def test_runs_of_any_length_need_no_layout_where_queries_see_all() -> None:
    rows, ends = (40, 0, 31), open_p2p(dist.group.WORLD, TransportOptions())
    for tokens, causal in ((1, True), (3, False)):
        q, k, v, _ = inputs = random_qkv(seqlen_q=tokens, seqlen_k=sum(rows), **SIZES)
        ends.stats.reset()
        shards = (x.split(rows, 1)[dist.get_rank()] for x in (k, v))
        got = tree_decode(q, *shards, causal=causal, return_lse=True)
        assert ends.stats.messages == 1
        assert_exact(got, inputs, Mask(tokens, sum(rows), causal=causal))


WITHOUT_LAYOUT: dict[str, tuple[int, dict[str, Any]]] = {
    "several tokens": (3, {}),
    "window": (1, {"window_size": (40, 0)}),
    "window of several": (3, {"window_size": (40, 1), "causal": False}),
    "mask": (2, {"mask": masks.sink_window(71, sinks=4, left=20).rows(69, 71)}),
}


@pytest.mark.parametrize("name", WITHOUT_LAYOUT)
@on_ranks(3)
def test_runs_of_any_length_need_no_layout_where_positions_are_hidden(name: str) -> None:
    """The ranks exchange their numbers of rows; results have the bits of a call with a layout."""
    rows, ends = (40, 0, 31), open_p2p(dist.group.WORLD, TransportOptions())
    tokens, options = WITHOUT_LAYOUT[name]
    q, k, v, _ = inputs = random_qkv(seqlen_q=tokens, seqlen_k=sum(rows), **SIZES)
    shards = [x.split(rows, 1)[dist.get_rank()] for x in (k, v)]
    ends.stats.reset()
    got = tree_decode(q, *shards, return_lse=True, **options)
    assert ends.stats.messages == 2  # the numbers of rows, and the partial results
    mask = options.get("mask") or Mask(tokens, sum(rows), **{"causal": True} | options)
    assert_exact(got, inputs, mask)
    layout = SequenceLayout.boundaries([0, 40, 40, 71])
    again = tree_decode(q, *shards, layout=layout, return_lse=True, **options)
    assert all(map(torch.equal, got, again))


@on_ranks(2)
def test_a_mask_that_does_not_fit_the_rows_of_all_ranks_is_refused() -> None:
    q, k, v, _ = random_qkv(seqlen_q=1, seqlen_k=5, **SIZES)
    with refused(ValueError, "mask|10"):
        tree_decode(q, k, v, mask=masks.causal(9).rows(8, 9))
    # The group stays usable.
    assert tree_decode(q, k, v).shape == (2, 1, 4, 8)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@on_ranks(3)
def test_a_prompt_in_uneven_chunks_is_the_prompt_at_once(kind: str) -> None:
    """Chunks go through `ring_attention`, each against the cache up to its end."""
    rank, cuts = dist.get_rank(), (0, 50, 61, 113)
    whole = random_qkv(seqlen_q=113, **SIZES)
    cache = SequenceLayout.from_name(kind, 0, 3)
    held = [x[:, :0] for x in (whole.k, whole.v)]
    outs, lses = [], []
    for start, stop in pairwise(cuts):
        chunk = SequenceLayout.from_name(kind, stop - start, 3)
        cache = cache.followed_by(chunk)
        q, *new = (chunk.shard(x[:, start:stop], rank) for x in whole[:3])
        held = [torch.cat(pair, 1) for pair in zip(held, new, strict=True)]
        out, lse = ring_attention(q, *held, causal=True, layout=(chunk, cache), return_lse=True)
        outs.append(unshard(out, chunk))
        lses.append(unshard(lse, chunk, dim=2))
    for x, rows in zip(held, (whole.k, whole.v), strict=True):
        assert torch.equal(unshard(x, cache), rows)
    assert_exact((torch.cat(outs, 1), torch.cat(lses, 2)), whole, Mask(113, 113, causal=True))


@on_ranks(2)
def test_ranks_with_different_queries_are_named() -> None:
    torch.manual_seed(dist.get_rank())
    q, kv = torch.randn(1, 1, 4, 32), torch.zeros(1, 5, 4, 32)
    named = "ranks disagree on the call; values of q: global rank 1 has"
    with mock.patch.dict("os.environ", RING_ATTN_DEBUG="1"), refused(ValueError, named):
        tree_decode(q, kv, kv)


@on_ranks(2)
def test_a_compiled_model_decodes_between_graphs() -> None:
    """With graph breaks at tree_decode each token has the bits of eager; fullgraph is refused."""

    def layer(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        return tree_decode(q * 2, k, v, layout=layout).relu()

    rank = dist.get_rank()
    q, *whole, _ = random_qkv(seqlen_q=1, seqlen_k=23, **SIZES)
    calls = []
    for seqlen in range(19, 23):
        cache = SequenceLayout.zigzag(seqlen, 2).appended(1, 1)
        calls.append((q, *(cache.shard(x[:, : seqlen + 1], rank) for x in whole), cache))
    assert_compiles(layer, calls, graphs=(2, 3))  # the length of the cache becomes a symbol
    with pytest.raises(RuntimeError) as error:
        compile_cold(layer, fullgraph=True)[0](*calls[0])
    assert says(str(error.value), "tree_decode|fullgraph")
