"""Decoding with all ranks in this process: results, bits, messages, tiles, growing caches."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.core.cache import next_rank
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import pair_tiles
from ring_attn.strategies.tree_decode import decode_tiles, make_call
from ring_attn.testing import dense_gradients, random_qkv
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import visible_pairs
from tests.drawn import layouts, reproducible

MASKS = {
    "one token": Mask(1, 97, causal=True),
    "three tokens": Mask(3, 97, causal=True),
    "64 tokens": Mask(64, 113, causal=True),
    "not causal": Mask(3, 97),
    "window": Mask(1, 97, causal=True, window_size=(20, -1)),
    "window of several": Mask(3, 97, causal=True, window_size=(40, 0)),
    "window on both sides": Mask(5, 97, window_size=(40, 1)),
    "queries that see nothing": Mask(7, 4, causal=True),
    "a window, and queries that see nothing": Mask(7, 4, causal=True, window_size=(2, 0)),
    "no keys": Mask(2, 0, causal=True),
}


def grown(seqlen: int, world_size: int) -> SequenceLayout:
    """A cache of which two thirds were appended token by token, to ranks in turn."""
    layout = SequenceLayout.contiguous(seqlen // 3, world_size)
    for position in range(seqlen // 3, seqlen):
        layout = layout.appended(position // 5 * 7 % world_size, 1)
    return layout


@reproducible
@given(st.sampled_from([*MASKS.values()]), st.data())
def test_every_row_of_a_tile_is_seen_and_no_plan_is_left(mask: Mask, data: st.DataObject) -> None:
    """Named layouts, shards of any length, runs on any rank, and grown caches."""
    world_sizes, plans = st.sampled_from((1, 2, 3, 4, 7, 16)), pair_tiles.cache_info()
    layout = data.draw(layouts(st.just(mask.seqlen_k), world_sizes, segments=True))
    for cache, rank in product((layout, grown(mask.seqlen_k, 3)), range(layout.world_size)):
        for tile in decode_tiles(cache.segments(rank % cache.world_size), mask):
            seen = visible_pairs(tile)
            assert seen.any(0).all() and seen.any(1).all()
    assert pair_tiles.cache_info() == plans


def test_partial_results_are_not_rounded_to_the_type_of_q() -> None:
    """Eight parts, each rounded to bfloat16, would err by more than one rounding."""
    inputs = random_qkv(seqlen_q=1, seqlen_k=64, dtype=torch.bfloat16, headdim=8)
    mask = Mask(1, 64, causal=True)
    exact = dense_gradients(*inputs, mask).out
    # Half a unit in the last place, and a float32 error for near ties.
    half = torch.finfo(torch.bfloat16).eps / 2 * (1 + 1e-4)
    call, layout = make_call(AttentionSpec.of(*inputs[:3])), SequenceLayout.contiguous(64, 8)

    def work(rank: int, transport: LocalTransport) -> Tensor:
        tiles = decode_tiles(layout.segments(rank), mask)
        k, v = (layout.shard(x, rank) for x in inputs[1:3])
        return drivers.decode(call, tiles, inputs.q, k, v, transport, None)[0]

    for out in run_local(8, work):
        assert ((out.double() - exact).abs() <= half * exact.abs()).all()


@reproducible
@given(layouts(segments=True), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5))))
def test_appended_positions_stand_behind_a_ranks_rows(
    layout: SequenceLayout, steps: list[tuple[int, int]]
) -> None:
    ranks = range(layout.world_size)
    held = [layout.position_ids(rank).tolist() for rank in ranks]
    for rank, count in ((number % len(ranks), count) for number, count in steps):
        held[rank] += range(layout.seqlen, layout.seqlen + count)
        layout = layout.appended(rank, count)
        assert [layout.position_ids(r).tolist() for r in ranks] == held
        again = SequenceLayout.from_segments([layout.segments(r) for r in ranks])
        assert not count or (layout == again and hash(layout) == hash(again))


@pytest.mark.parametrize("seqlen", [0, 1, 7, 12])
def test_a_chunk_follows_a_cache(seqlen: int) -> None:
    for first, second in product(LAYOUTS, LAYOUTS):
        cache = SequenceLayout.from_name(first, seqlen, 3)
        chunk = SequenceLayout.from_name(second, 11, 3)
        if seqlen > 3 and (first == "striped") != (second == "striped"):
            with pytest.raises(ValueError, match="one stride, got \\[1, 3\\]"):
                cache.followed_by(chunk)
            continue
        whole = cache.followed_by(chunk)
        for rank in range(3):
            positions = [*cache.position_ids(rank), *(seqlen + chunk.position_ids(rank))]
            assert whole.position_ids(rank).tolist() == positions


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_next_rank_keeps_the_cache_even_in_blocks(block: int, world_size: int) -> None:
    layout = SequenceLayout.contiguous(0, world_size)
    for _ in range(300):
        layout = layout.appended(next_rank(layout, block=block), 1)
        assert max(layout.shard_lens) - min(layout.shard_lens) <= block
    segments = [s for rank in range(world_size) for s in layout.segments(rank)]
    assert len(segments) <= -(-300 // block)
    assert all(s.length % block == 0 for s in segments if s.start + s.length < 300)
