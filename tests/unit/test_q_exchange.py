"""Q-exchange: values over both cores, balance, and what is sent and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import gathered_tiles
from ring_attn.profiling import peak_bytes
from ring_attn.spec import AttentionSpec
from ring_attn.strategies import all_gather, q_exchange, ring
from ring_attn.strategies.base import Call
from ring_attn.strategies.q_exchange import (
    QExchangeCall,
    exchanged_layout,
    predicted_peak_bytes,
)
from ring_attn.testing import random_qkv
from ring_attn.transport.base import TransportStats
from ring_attn.transport.local import LocalTransport, run_local
from tests.strategies import MASKS, Layouts, assert_holds, config, layouts_of, spec_of

CAUSAL = MASKS["causal"]
CORES: dict[str, Callable[..., Call]] = {
    "all_gather": all_gather.make_call,
    "ring": ring.make_call,
}


def maker(mask: Mask, core: str = "all_gather", **options: Any) -> Callable[..., QExchangeCall]:
    def make_core(spec: AttentionSpec, layouts: Layouts, rank: int) -> Call:
        return CORES[core](spec, layouts, mask, rank, **options)

    return lambda spec, layouts, rank: q_exchange.make_call(spec, layouts, rank, make_core)


# -- values


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "boundaries"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, layout: str, world_size: int) -> None:
    mask = MASKS[name]
    assert_holds(maker(mask), mask, layouts_of(layout, mask, world_size), config())


@pytest.mark.parametrize("layout", ["contiguous", "boundaries"])
@pytest.mark.parametrize("name", ["causal", "longer kv", "documents", "fewer rows than ranks"])
def test_a_ring_between_the_exchanges(name: str, layout: str) -> None:
    mask = MASKS[name]
    assert_holds(maker(mask, "ring"), mask, layouts_of(layout, mask, 3), config())


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    "sizes",
    [
        config(nheads=3, nheads_kv=1, headdim_v=3),
        config(dtype=torch.float64, batch=2),
        config(dtype=torch.bfloat16, nheads_kv=4),
        config(dtype=torch.float16, headdim=5, headdim_v=8),
    ],
    ids=["mqa, headdim_v", "float64 of a batch", "bfloat16 mha", "float16"],
)
def test_sizes(sizes: Any, core: str) -> None:
    assert_holds(maker(CAUSAL, core), CAUSAL, layouts_of("contiguous", CAUSAL, 3), sizes)


@pytest.mark.parametrize("core", CORES)
def test_softcap_and_sinks(core: str) -> None:
    mask, sizes = MASKS["documents"], config()
    layouts = layouts_of("contiguous", mask, 4)
    assert_holds(maker(mask, core), mask, layouts, sizes, softcap=2.0, with_sinks=True)


@pytest.mark.parametrize("heads_per_chunk", [1, 2, 3])
def test_chunks_of_the_core(heads_per_chunk: int) -> None:
    make = maker(CAUSAL, heads_per_chunk=heads_per_chunk)
    assert_holds(make, CAUSAL, layouts_of("contiguous", CAUSAL, 4), config(nheads_kv=4))


# -- the exchanged layout


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 97])
def test_a_rank_has_its_head_and_its_partners_tail(seqlen: int, world_size: int) -> None:
    given = SequenceLayout.contiguous(seqlen, world_size)
    here = exchanged_layout(given)
    everything = []
    for rank in range(world_size):
        mine, theirs = (given.position_ids(r).tolist() for r in (rank, world_size - 1 - rank))
        expected = mine[: len(mine) - len(mine) // 2] + theirs[len(theirs) - len(theirs) // 2 :]
        assert here.position_ids(rank).tolist() == sorted(expected)
        everything += expected
    assert sorted(everything) == list(range(seqlen))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seqlen", [1024, 8192, 10_007])
def test_causal_work_is_balanced(seqlen: int, world_size: int) -> None:
    mask = Mask(seqlen, seqlen, causal=True)
    given = SequenceLayout.contiguous(seqlen, world_size)

    def imbalance(layout: SequenceLayout) -> float:
        areas = layout.mask_area(mask)
        planned = [
            sum(t.area for t in gathered_tiles(layout, given, mask, r, max(given.shard_lens)))
            for r in range(world_size)
        ]
        assert planned == list(areas)
        return max(areas) / (sum(areas) / world_size)

    # A shard, and so a half, may be a row longer than another's.
    row = 4 * seqlen / (sum(given.mask_area(mask)) / world_size)
    assert 1 <= imbalance(exchanged_layout(given)) <= 1 + row
    assert imbalance(given) == pytest.approx(2 - 1 / world_size, abs=row)


@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_other_layouts_are_refused(kind: str) -> None:
    layouts = layouts_of(kind, CAUSAL, 4)
    spec = AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8)
    with pytest.raises(NotImplementedError, match=rf"for a contiguous layout, got {kind}\("):
        maker(CAUSAL)(spec, layouts, 0)


def test_what_the_core_refuses_is_refused() -> None:
    layouts = layouts_of("contiguous", CAUSAL, 4)
    spec = AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8)
    with pytest.raises(NotImplementedError, match="same_bits=True cannot be had"):
        maker(CAUSAL, same_bits=True)(spec, layouts, 0)
    striped = SequenceLayout.striped(61, 4)
    with pytest.raises(NotImplementedError, match="both be striped or neither"):
        maker(CAUSAL)(spec, (layouts[0], striped), 0)


def test_the_call_says_what_its_core_is() -> None:
    spec = AttentionSpec("cpu", torch.float32, 1, 4, 2, 8, 8)
    layouts = layouts_of("contiguous", CAUSAL, 4)
    call = maker(CAUSAL, softmax_scale=0.3, backend="reference")(spec, layouts, 1)
    assert (call.softmax_scale, call.backend, call.same_bits) == (0.3, "reference", False)
    assert isinstance(call.inner, all_gather.AllGatherCall)
    assert call.inner.layouts == (exchanged_layout(layouts[0]), layouts[1])


# -- what is sent and saved


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "boundaries"])
def test_bytes_and_messages_are_those_of_the_plan(layout: str, world_size: int) -> None:
    mask = MASKS["documents of other lengths"]
    inputs = random_qkv(
        seqlen_q=61, seqlen_k=50, batch=2, nheads=4, nheads_kv=2, headdim=6, headdim_v=3,
        dtype=torch.bfloat16,
    )  # fmt: skip
    layouts = layouts_of(layout, mask, world_size)
    layout_q, layout_kv = layouts

    def work(rank: int, transport: LocalTransport) -> None:
        call = maker(mask)(spec_of(inputs), layouts, rank)
        q, dout = (layout_q.shard(x, rank) for x in (inputs.q, inputs.dout))
        k, v = (layout_kv.shard(x, rank) for x in (inputs.k, inputs.v))
        out, lse, saved = call.forward(q, k, v, transport, None)
        # The backward finds there what the forward has exchanged; q itself need not be kept.
        assert len(saved) == 5 and (saved[0] is q) == (call.partner == rank)
        rows = exchanged_layout(layout_q).shard_len(rank)
        assert [x.size(1) for x in saved[:4]] == [rows, k.size(1), v.size(1), rows]
        assert saved[4].size(2) == rows
        for backward in (False, True):
            if backward:
                transport.stats.reset()
                call.backward(saved, dout, transport, None)
            sent = q_exchange.bytes_sent(call, backward=backward)
            sent += all_gather.bytes_sent(call.inner, backward=backward)
            assert transport.stats.bytes_sent == sent
            count = q_exchange.num_messages(call)
            assert count == (0 if rank == world_size - 1 - rank else 2)
            count += all_gather.num_messages(call.inner, backward=backward)
            assert transport.stats.messages == count

    run_local(world_size, work)


# -- memory

ROWS, SHARE = 1024, 0.05


class Echo:
    """Stands for the other rank: what it sends are zeros."""

    world_size = 4

    def __init__(self) -> None:
        self.stats = TransportStats()

    def post(self, channel: str, step: int, hop: object, send: object, recv: Tensor) -> None:
        recv.zero_()

    def all_gather(self, channel: str, step: int, send: object, recv: Tensor) -> None:
        recv.zero_()

    def reduce_scatter(self, channel: str, step: int, send: object, recv: Tensor) -> None:
        recv.zero_()

    def wait(self, channel: str) -> None:
        pass


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nheads_kv", [4, 1])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("core", CORES)
def test_a_call_holds_what_is_predicted(
    core: str, rank: int, nheads_kv: int, dtype: torch.dtype, backward: bool
) -> None:
    mask, layout = Mask(4 * ROWS, 4 * ROWS, causal=True), SequenceLayout.contiguous(4 * ROWS, 4)
    spec = AttentionSpec("cpu", dtype, 1, 4, nheads_kv, 64, 64)
    call = maker(mask, core, backend="aten")(spec, (layout, layout), rank)
    q, k, v, dout = (
        torch.randn(1, ROWS, heads, 64).to(dtype) for heads in (4, nheads_kv, nheads_kv, 4)
    )
    transport: Any = Echo()
    transport.rank = rank

    def run() -> object:
        result = call.forward(q, k, v, transport, None)
        return result, call.backward(result.saved, dout, transport, None) if backward else None

    of_core: Any = {"ring": ring, "all_gather": all_gather}[core].predicted_peak_bytes
    predicted = predicted_peak_bytes(call, of_core, backward=backward)
    assert abs(peak_bytes(run) - predicted) <= SHARE * predicted
