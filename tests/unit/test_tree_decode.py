"""Decoding with all ranks in this process: results, bits, messages, tiles, growing caches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ring_attn import drivers
from ring_attn.call import Call
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import pair_tiles
from ring_attn.decode import next_rank
from ring_attn.strategies.tree_decode import decode_packet, decode_tiles, make_call, program
from ring_attn.testing import (
    Inputs,
    dense_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import assert_holds as assert_within
from tests.bounds import expect, visible_pairs
from tests.drawn import layouts, reproducible

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

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


def run(
    inputs: Inputs, mask: Mask, layout: SequenceLayout, call: Call, sinks: Tensor | None = None
) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
    """Every rank's out and lse, and its numbers of sent messages and bytes."""

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor, tuple[int, int]]:
        tiles = decode_tiles(layout.segments(rank), mask)
        for tile in tiles:
            seen = visible_pairs(tile)
            assert seen.any(0).all() and seen.any(1).all()
        k, v = (layout.shard(x, rank) for x in (inputs.k, inputs.v))
        out, lse = drivers.decode(call, tiles, inputs.q, k, v, transport, sinks)
        return out, lse, (transport.stats.messages, transport.stats.bytes_sent)

    plans = pair_tiles.cache_info()
    with poisoned_empty():
        results = run_local(layout.world_size, work)
    assert pair_tiles.cache_info() == plans, "a token leaves a plan behind"
    return results


def assert_holds(
    mask: Mask,
    caches: Sequence[SequenceLayout],
    backend: str = "auto",
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    with_sinks: bool = False,
    **sizes: Any,
) -> None:
    """Checks that ranks have equal bits, within the bound, from one message each."""
    sizes = {"batch": 2, "nheads": 4, "nheads_kv": 2, "headdim": 8} | sizes
    inputs = random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **sizes)
    sinks = random_sinks(4) if with_sinks else None
    oracle, plain = expect(inputs, mask, scale, softcap=softcap, sinks=sinks)
    spec = AttentionSpec.of(*inputs[:3], softcap, sinks)
    call = make_call(spec, softmax_scale=scale, backend=backend)
    nbytes = decode_packet(spec, mask.seqlen_q).nbytes
    for layout in caches:
        results = run(inputs, mask, layout, call, sinks)
        for out, lse, sent in results:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
            assert sent == (1, (layout.world_size - 1) * nbytes)
        got = dict(zip(("out", "lse"), results[0][:2], strict=True))
        assert_within(got, oracle, plain, str(layout))


@reproducible
@given(st.sampled_from([*MASKS.values()]), st.data())
def test_holds_for_every_cache(mask: Mask, data: st.DataObject) -> None:
    """Named layouts, shards of any length, runs on any rank, and grown caches."""
    world_sizes = st.sampled_from((1, 2, 3, 4, 7, 16))
    layout = data.draw(layouts(st.just(mask.seqlen_k), world_sizes, segments=True))
    assert_holds(mask, [layout, grown(mask.seqlen_k, layout.world_size)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scores", [(0.0, False), (0.0, True), (1.5, False), (1.5, True)], ids=str)
def test_holds_for_types_scores_heads_and_strides(
    dtype: torch.dtype, scores: tuple[float, bool]
) -> None:
    for turn, name in enumerate(("one token", "window of several", "queries that see nothing")):
        layout = grown(MASKS[name].seqlen_k, 3)
        sizes = {"nheads_kv": (1, 2, 4)[turn], "headdim_v": (5, 8, 16)[turn], "scale": 0.3}
        options = {"softcap": scores[0], "with_sinks": scores[1], "noncontiguous": turn > 0}
        for backend in ("aten", "reference") if not scores[0] else ("auto",):
            assert_holds(MASKS[name], [layout], backend, dtype=dtype, **sizes, **options)


@pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning")
def test_holds_with_our_kernels() -> None:
    """In one layout a rank holds nothing; in the other, tiles have one query each."""
    caches = [SequenceLayout.boundaries([0, 61, 61, 97]), SequenceLayout.striped(97, 3)]
    mask = MASKS["window of several"]
    assert_holds(mask, caches, "triton", headdim=16, with_sinks=True)


def test_partial_results_are_not_rounded_to_the_type_of_q() -> None:
    """Eight parts, each rounded to bfloat16, would err by more than one rounding."""
    inputs = random_qkv(seqlen_q=1, seqlen_k=64, dtype=torch.bfloat16, headdim=8)
    mask = Mask(1, 64, causal=True)
    exact = dense_gradients(*inputs, mask).out
    # Half a unit in the last place, and a float32 error for near ties.
    half = torch.finfo(torch.bfloat16).eps / 2 * (1 + 1e-4)
    call = make_call(AttentionSpec.of(*inputs[:3]))
    for out, _, _ in run(inputs, mask, SequenceLayout.contiguous(64, 8), call):
        assert ((out.double() - exact).abs() <= half * exact.abs()).all()


def test_what_every_query_sees_is_one_tile() -> None:
    layout = grown(997, 3)
    assert len(layout.segments(0)) > 30
    tiles = decode_tiles(layout.segments(0), Mask(1, 997, causal=True))
    assert [(tile.q, tile.kv) for tile in tiles] == [(slice(0, 1), slice(0, layout.shard_len(0)))]


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


def test_a_program_has_the_sizes_of_the_cache_and_one_exchange() -> None:
    call = make_call(AttentionSpec("cpu", torch.float32, 2, 4, 2, 16, 8))
    made = program(call, (), (1, 2, 5), 0, 3)
    assert [made.arrays[name].shape for name in "kv"] == [(2, 5, 2, 16), (2, 5, 2, 8)]
    assert [post.step for post in made.posts()] == [0]
