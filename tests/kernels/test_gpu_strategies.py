"""Every strategy on CUDA tensors, all ranks in this process: within the bound, and bit for bit.

What travels between the ranks is copied on the device, by the local transport.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.decode import next_rank
from ring_attn.strategies.tree_decode import decode_tiles, tree_decode_forward
from ring_attn.strategies.tree_decode import make_call as make_decode
from ring_attn.testing import (
    Case,
    Heads,
    random_qkv,
    run_all_ranks,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.bounds import assert_holds, expect
from tests.kernels.calls import DEVICE

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a GPU that torch can use"),
]

WORLD_SIZE = 4
STRATEGIES = {
    "ring": Strategy(),
    "double ring": Strategy(inner_degree=2),
    "all_gather": Strategy("all_gather"),
    "ulysses": Strategy(ulysses_degree=4),
    "hybrid": Strategy(ulysses_degree=2),
    "hybrid all_gather": Strategy("all_gather", ulysses_degree=2),
    "q_exchange": Strategy("all_gather", exchange_q=True),
}
DOCUMENTS = (0, 300, 300, 1100, 1999)
MASKS = {
    "causal": Mask(1999, 1999, causal=True),
    "full": Mask(2048, 2048),
    "window": Mask(1999, 1999, causal=True, window_size=(300, -1)),
    "documents": Mask(1999, 1999, True, (-1, -1), DOCUMENTS, DOCUMENTS),
}
HEADS = Heads(8, 2, 128, 128)


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_holds_and_repeats(name: str, mask: Mask, backend: str) -> None:
    layout = "contiguous" if name == "q_exchange" else "zigzag"
    case = Case(mask, layout, STRATEGIES[name], backend, "bfloat16", HEADS, batch=1)
    got = run_all_ranks(case, WORLD_SIZE, device=DEVICE)
    assert not got.failures
    if backend == "triton":
        assert got.differing(run_all_ranks(case, WORLD_SIZE, device=DEVICE)) == []


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_bits_of_one_rank(strategy: str, world_size: int) -> None:
    # As many KV heads as ranks: Ulysses keeps the bits only where none is on two of them.
    case = Case(
        Mask(2048, 2048, causal=True), "contiguous", strategy, "triton", "bfloat16",
        Heads(8, 8, 128, 128), batch=1, same_bits=True,
    )  # fmt: skip
    alone, got = (run_all_ranks(case, ranks, device=DEVICE) for ranks in (1, world_size))
    assert got.differing(alone) == []
    assert bool(got.whole.out.any()) and bool(alone.whole.dk.any())


@pytest.mark.parametrize("seqlen_q", [1, 17, 64])
def test_decode(seqlen_q: int) -> None:
    layout = SequenceLayout.contiguous(3000, 3)
    while layout.seqlen < 3100:
        layout = layout.appended(next_rank(layout, block=64), 64)
    seqlen = layout.seqlen
    mask = Mask(seqlen_q, seqlen, causal=True)
    inputs = random_qkv(
        seqlen_q=seqlen_q, seqlen_k=seqlen, nheads=8, nheads_kv=2, headdim=128,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    q, k, v, _ = inputs
    call = make_decode(AttentionSpec.of(q, k, v), backend="triton")

    def work(rank: int, transport: LocalTransport) -> tuple[Tensor, Tensor]:
        tiles = decode_tiles(layout.segments(rank), mask)
        shards = (layout.shard(x, rank) for x in (k, v))
        return tree_decode_forward(q, *shards, tiles, call, transport)

    results = run_local(layout.world_size, work)
    assert_holds(dict(zip(("out", "lse"), results[0], strict=True)), *expect(inputs, mask))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
