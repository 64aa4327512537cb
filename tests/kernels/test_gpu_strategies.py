"""Every strategy on CUDA tensors, all ranks in this process: within the bound, and bit for bit.

What travels between the ranks is copied on the device, by the local transport.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ring_attn.decode import next_rank
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.base import Call
from ring_attn.strategies.core import make_call
from ring_attn.strategies.tree_decode import decode_tiles, tree_decode_forward
from ring_attn.strategies.tree_decode import make_call as make_decode
from ring_attn.strategy import Strategy
from ring_attn.testing import (
    RESULTS,
    Expected,
    check,
    check_all,
    dense_gradients,
    plain_gradients,
    random_qkv,
)
from ring_attn.transport.local import LocalTransport, run_local
from tests.kernels.calls import DEVICE
from tests.strategies import Layouts, case, config, layouts_of, run_calls, spec_of

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
SIZES = config(nheads=8, nheads_kv=2, headdim=128, dtype=torch.bfloat16, device=DEVICE)


def call_of(
    strategy: Strategy, mask: Mask, backend: str, spec: AttentionSpec, layouts: Layouts, rank: int
) -> Call:
    return make_call(strategy, spec, layouts, mask, rank, backend=backend)


def run(strategy: Strategy, mask: Mask, layouts: Layouts, backend: str = "triton") -> Expected:
    inputs, _, _ = case(mask, SIZES)
    make = partial(call_of, strategy, mask, backend, spec_of(inputs), layouts)
    return run_calls(make, inputs, layouts)


@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_holds_and_repeats(name: str, mask: Mask, backend: str) -> None:
    layouts = layouts_of("contiguous" if name == "q_exchange" else "zigzag", mask, WORLD_SIZE)
    got = run(STRATEGIES[name], mask, layouts, backend)
    verdicts = check_all(got, *case(mask, SIZES)[1:])
    assert all(verdict.ok for verdict in verdicts), [str(verdict) for verdict in verdicts]
    if backend == "triton":
        again = run(STRATEGIES[name], mask, layouts)
        assert all(torch.equal(getattr(got, each), getattr(again, each)) for each in RESULTS)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_bits_of_one_rank(strategy: str, world_size: int) -> None:
    mask = Mask(2048, 2048, causal=True)
    degree = world_size if strategy == "ulysses" else 1
    core = "all_gather" if strategy == "all_gather" else "ring"
    # As many KV heads as ranks: Ulysses keeps the bits only where none is on two of them.
    sizes = config(nheads=8, nheads_kv=8, headdim=128, dtype=torch.bfloat16, device=DEVICE)
    inputs, _, _ = case(mask, sizes)
    results = []
    for ranks, chosen in ((1, Strategy()), (world_size, Strategy(core, ulysses_degree=degree))):
        layouts = layouts_of("contiguous", mask, ranks)
        make = partial(call_of, chosen, mask, "triton", spec_of(inputs), layouts)
        assert make(0).same_bits
        results.append(run_calls(make, inputs, layouts))
    alone, got = results
    assert [name for name in RESULTS if not torch.equal(*(getattr(x, name) for x in results))] == []
    assert bool(got.out.any()) and bool(alone.dk.any())


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

    oracle, plain = dense_gradients(*inputs, mask), plain_gradients(*inputs, mask)
    results = run_local(layout.world_size, work)
    for name, got in zip(("out", "lse"), results[0], strict=True):
        three = (getattr(oracle, name), getattr(plain, name), oracle.terms[name])
        verdict = check(name, got, *three)
        assert verdict.ok, str(verdict)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
