"""Costs: what is predicted is what a ring then sends, and the cheaper side travels."""

from itertools import product
from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import (
    choose_traveller,
    flops,
    gradient_packet,
    memory_saving,
    shard_packet,
)
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import program_of
from ring_attn.testing import LAYOUTS, Layouts, Sent, layouts_of, masks, random_qkv, run_calls

MASKS = masks(61)
TRAVELLERS: tuple[Traveller, ...] = ("kv", "q")


def spec_of(
    dtype: torch.dtype = torch.bfloat16, nheads: int = 8, nheads_kv: int = 8, headdim: int = 64
) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, 1, nheads, nheads_kv, headdim, headdim)


def zigzag(seqlen: int, world_size: int) -> tuple[SequenceLayout, SequenceLayout]:
    layout = SequenceLayout.zigzag(seqlen, world_size)
    return layout, layout


def sent(
    rank: int, spec: AttentionSpec, layouts: Layouts, mask: Mask, gradients: Any = None,
    inner_degree: int = 1,
) -> tuple[Sent, Sent]:  # fmt: skip
    """What a rank of a ring sends, forward and backward."""
    strategy = Strategy(inner_degree=inner_degree)
    call = Call(spec, layouts, mask, rank, strategy, 0.5, "reference", gradients=gradients)
    programs = (program_of(call, backward=backward) for backward in (False, True))
    forward, backward = (Sent(bytes_sent(one), num_messages(one)) for one in programs)
    return forward, backward


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("travels", TRAVELLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        Mask(37, 37, causal=True),
        Mask(37, 37, causal=True, window_size=(5, -1)),
        Mask(37, 37, False, (-1, -1), (0, 9, 37), (0, 9, 37)),
        Mask(37, 23, causal=True),
        Mask(37, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_predicted_bytes_and_messages_are_those_sent(
    world_size: int, mask: Mask, dtype: torch.dtype, travels: Traveller, in_order: bool
) -> None:
    spec = AttentionSpec("cpu", dtype, 2, 4, 2, 8, 16)
    inputs = random_qkv(
        batch=2, seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, nheads=4, nheads_kv=2,
        headdim=8, headdim_v=16, dtype=dtype,
    )  # fmt: skip
    # Shards of every length, none at all among them.
    cuts = {37: [0, 20, 20, 30, 37], 23: [0, 4, 9, 9, 23], 0: [0] * 5}
    layouts = (
        SequenceLayout.boundaries([0] + cuts[mask.seqlen_q][5 - world_size :]),
        SequenceLayout.boundaries([0] + cuts[mask.seqlen_k][5 - world_size :]),
    )
    gradients = (travels, in_order)
    calls = [
        Call(spec, layouts, mask, r, Strategy(), 0.5, "reference", gradients=gradients)
        for r in range(world_size)
    ]
    for rank, result in enumerate(run_calls(calls, inputs, layouts)):
        assert result.sent == sent(rank, spec, layouts, mask, gradients)


def test_a_ring_of_one_sends_nothing() -> None:
    for gradients in product(TRAVELLERS, (False, True)):
        found = sent(0, spec_of(), zigzag(64, 1), Mask(64, 64, causal=True), gradients)
        assert found == (Sent(0, 0), Sent(0, 0))


def test_bytes_of_a_send_vector() -> None:
    # Specification A: local 1024, head_dim 64, 4 kv heads, P = 2, 24 blocks, 4-byte items.
    layout = SequenceLayout.contiguous(2048, 2)
    spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 1024 // 16, 1024 // 16)
    send = 2 * 1024 * 64 * 4 * 4
    assert spec.kv_packet(1024).nbytes == send
    for rank in range(2):
        assert sent(rank, spec, (layout, layout), Mask(2048, 2048))[0] == Sent(send * 1, 1)


def test_bytes_are_counted_step_by_step() -> None:
    spec, layouts = spec_of(nheads_kv=2), zigzag(96, 3)
    mask = Mask(96, 96, causal=True)
    kv, grad = 2 * 64 * 2 * 2, 2 * 64 * 2 * 4
    # Rank 1 sends its own 32 rows, then the half of rank 0's that others need; in the backward the
    # gradients of that half, and then of rank 2's rows, homewards.
    forward, backward = sent(1, spec, layouts, mask, ("kv", False))
    assert forward == Sent((32 + 16) * kv, 2)
    assert backward == Sent((32 + 16) * kv + (16 + 32) * grad, 4)
    # In order, the gradients of its own 32 rows are one message more.
    _, backward = sent(1, spec, layouts, mask, ("kv", True))
    assert backward == Sent((32 + 16) * kv + (32 + 16 + 32) * grad, 5)
    q, dq = 8 * (2 * 64 * 2 + 2 * 4), 8 * 64 * 4
    _, backward = sent(1, spec, layouts, mask, ("q", False))
    assert backward.nbytes == (32 + 16) * q + (16 + 32) * dq


def test_a_window_sends_its_halo_alone() -> None:
    layout, window = SequenceLayout.contiguous(4096, 4), 100
    spec, mask = spec_of(), Mask(4096, 4096, causal=True, window_size=(window, 0))
    for rank in range(4):
        halo = window if rank < 3 else 0  # nobody sees the last rank's keys
        assert sent(rank, spec, (layout, layout), mask)[0].nbytes == spec.kv_packet(halo).nbytes


def test_packets_are_those_of_the_travelling_side() -> None:
    spec = spec_of(nheads_kv=2)
    assert shard_packet(spec, "kv", 8) == spec.kv_packet(8)
    assert shard_packet(spec, "q", 3) == spec.q_packet(3)
    assert gradient_packet(spec, "kv", 8) == spec.kv_grad_packet(8)
    assert gradient_packet(spec, "q", 3) == spec.q_grad_packet(3)


# -- which side travels in the backward


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_traveller_with_16_bit_tensors(dtype: torch.dtype, world_size: int) -> None:
    n = 1024 * world_size
    layouts, mask = zigzag(n, world_size), Mask(n, n, causal=True)
    assert choose_traveller(spec_of(dtype, 8, 8, 128), *layouts, mask) == "q"
    assert choose_traveller(spec_of(dtype, 8, 2, 128), *layouts, mask) == "kv"
    assert choose_traveller(spec_of(dtype, 8, 1, 128), *layouts, mask) == "kv"


def test_few_queries_travel() -> None:
    layout_q, layout_kv = SequenceLayout.contiguous(64, 4), SequenceLayout.contiguous(4096, 4)
    spec = spec_of(nheads=8, nheads_kv=1)
    assert choose_traveller(spec, layout_q, layout_kv, Mask(64, 4096, causal=True)) == "q"
    assert choose_traveller(spec, layout_kv, layout_kv, Mask(4096, 4096, causal=True)) == "kv"


def test_the_gradients_count() -> None:
    # 16-bit, headdim 128, one hop: a row of KV costs 512 + 1024 bytes a head, one of Q 520 + 512.
    # Without the gradients KV would be the cheaper side here.
    layout_q, layout_kv = SequenceLayout.contiguous(200, 2), SequenceLayout.contiguous(160, 2)
    spec = spec_of(torch.bfloat16, 1, 1, 128)
    assert 100 * (520 + 512) < 80 * (512 + 1024)
    assert 100 * 520 > 80 * 512
    assert choose_traveller(spec, layout_q, layout_kv, Mask(200, 160)) == "q"


@pytest.mark.parametrize("inner_degree", [1, 2, 3])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 3)])
def test_the_side_with_fewer_bytes_travels(
    heads: tuple[int, int], kind: str, inner_degree: int
) -> None:
    spec = spec_of(torch.bfloat16, *heads, 32)
    for mask in MASKS.values():
        layouts = layouts_of(kind, mask, 6)
        q, kv = (
            sum(
                sent(rank, spec, layouts, mask, (travels, False), inner_degree)[1].nbytes
                for rank in range(6)
            )
            for travels in ("q", "kv")
        )
        assert choose_traveller(spec, *layouts, mask) == ("q" if q < kv else "kv")


def test_kv_travels_where_it_is_equal() -> None:
    # Without hops nothing is sent by either side.
    layouts = zigzag(64, 1)
    spec = spec_of(nheads=1, nheads_kv=1)
    mask = Mask(64, 64)
    for travels in TRAVELLERS:
        assert sent(0, spec, layouts, mask, (travels, False))[1].nbytes == 0
    assert choose_traveller(spec, *layouts, mask) == "kv"


def total_bytes(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    travels: Traveller,
) -> int:
    ranks = range(layouts[0].world_size)
    return sum(sent(rank, spec, layouts, mask, (travels, False))[1].nbytes for rank in ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_traveller_is_the_cheaper_side(dtype: torch.dtype) -> None:
    chosen = set()
    for (seqlen_q, seqlen_k), (nheads, nheads_kv), headdim, window in product(
        ((256, 256), (32, 256), (256, 32), (96, 160)),
        ((8, 8), (8, 4), (8, 2), (8, 1)),
        (8, 128),
        (-1, 20),
    ):
        layouts = (SequenceLayout.zigzag(seqlen_q, 4), SequenceLayout.zigzag(seqlen_k, 4))
        mask = Mask(seqlen_q, seqlen_k, True, (window, -1))
        spec = spec_of(dtype, nheads, nheads_kv, headdim)
        kv, q = (total_bytes(spec, layouts, mask, travels) for travels in TRAVELLERS)
        travels = choose_traveller(spec, *layouts, mask)
        assert travels == ("q" if q < kv else "kv"), (spec, layouts, mask)
        chosen.add(travels)
    assert chosen == {"kv", "q"}


# -- floating point operations and memory


def test_flops_of_known_sizes() -> None:
    n = 1024
    spec = AttentionSpec("cpu", torch.float32, 2, 8, 2, 64, 64)
    # The rule of flash-attention's benchmarks: 4 n^2 d h b forward, 2.5 times that backward.
    forward = 4 * n * n * 64 * 8 * 2
    assert flops(n * n, spec, backward=False) == forward
    assert flops(n * n, spec, backward=True) * 2 == forward * 5


def test_flops_count_each_headdim() -> None:
    spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 10, 3)
    # q k^T and p v; then q k^T, do v^T, ds k, ds^T q and p^T do.
    assert flops(7, spec, backward=False) == 7 * 2 * (10 + 3)
    assert flops(7, spec, backward=True) == 7 * 2 * (10 + 3 + 10 + 10 + 3)


def test_memory_saving() -> None:
    assert memory_saving(1) == 0.0
    assert memory_saving(2) == 0.5
    assert memory_saving(4) == 0.75
    assert all(0.0 < memory_saving(world_size) < 1.0 for world_size in range(2, 100))
