"""Numbers of a call: bytes by hand, the cheaper side travels, a rank's share of the sequence."""

from itertools import product
from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import SequenceShare, choose_traveller, flops
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller
from ring_attn.machines.actions import schedule_of
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.testing import LAYOUTS, Layouts, Sent, layouts_of, masks

MASKS = masks(61)


def spec_of(
    dtype: torch.dtype = torch.bfloat16, nheads: int = 8, nheads_kv: int = 8, headdim: int = 64
) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, 1, nheads, nheads_kv, headdim, headdim)


def sent(
    spec: AttentionSpec, layouts: Layouts, mask: Mask, rank: int, gradients: Any = None,
    *, backward: bool, inner_degree: int = 1,
) -> Sent:  # fmt: skip
    """What a rank of a ring sends in one direction."""
    strategy = Strategy(inner_degree=inner_degree)
    call = Call(spec, layouts, mask, rank, strategy, 0.5, "reference", gradients=gradients)
    program = program_of(call, backward=backward)
    return Sent(bytes_sent(program), num_messages(program))


def test_bytes_are_counted_step_by_step() -> None:
    mask = Mask(96, 96, causal=True)
    args = (spec_of(nheads_kv=2), layouts_of("zigzag", mask, 3), mask, 1)
    kv, grad = 2 * 64 * 2 * 2, 2 * 64 * 2 * 4
    # Rank 1 sends its own 32 rows, then the half of rank 0's that others need; in the backward the
    # gradients of that half, and then of rank 2's rows, homewards.
    assert sent(*args, backward=False) == Sent((32 + 16) * kv, 2)
    backward = sent(*args, ("kv", False), backward=True)
    assert backward == Sent((32 + 16) * kv + (16 + 32) * grad, 4)
    # In order, the gradients of its own 32 rows are one message more.
    backward = sent(*args, ("kv", True), backward=True)
    assert backward == Sent((32 + 16) * kv + (32 + 16 + 32) * grad, 5)
    q, dq = 8 * (2 * 64 * 2 + 2 * 4), 8 * 64 * 4
    backward = sent(*args, ("q", False), backward=True)
    assert backward.nbytes == (32 + 16) * q + (16 + 32) * dq


# -- which side travels in the backward


def assert_cheaper(
    spec: AttentionSpec, layouts: Layouts, mask: Mask, inner_degree: int = 1
) -> Traveller:
    """The side that travels is that with fewer bytes in all, and KV where both have as many."""
    q, kv = (
        sum(
            sent(
                *(spec, layouts, mask, rank, (travels, False)),
                backward=True,
                inner_degree=inner_degree,
            ).nbytes
            for rank in range(layouts[0].world_size)
        )
        for travels in ("q", "kv")
    )
    travels = choose_traveller(spec, *layouts, mask)
    assert travels == ("q" if q < kv else "kv"), (spec, layouts, mask)
    return travels


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 3)])
def test_the_side_with_fewer_bytes_travels(heads: tuple[int, int], kind: str) -> None:
    for turn, mask in enumerate(MASKS.values(), LAYOUTS.index(kind)):
        spec = spec_of(torch.bfloat16, *heads, 32)
        assert_cheaper(spec, layouts_of(kind, mask, 6), mask, inner_degree=1 + turn % 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_of_any_sizes_the_cheaper_side_travels(dtype: torch.dtype) -> None:
    chosen = set()
    for (seqlen_q, seqlen_k), nheads_kv, headdim, window, world_size in product(
        ((256, 256), (32, 256), (256, 32), (96, 160), (200, 160)),
        (8, 4, 2, 1),
        (8, 128),
        (-1, 20),
        (1, 2, 4),
    ):
        mask = Mask(seqlen_q, seqlen_k, True, (window, -1))
        layouts = layouts_of("zigzag", mask, world_size)
        chosen.add(assert_cheaper(spec_of(dtype, 8, nheads_kv, headdim), layouts, mask))
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


# -- the vectors of specifications A and C


@pytest.mark.parametrize(
    ("given", "local_len", "start", "end", "saving", "steps"),
    [
        ((0, 2, 2048, 1024, 16), 1024, 0, 1024, 0.5, 1),
        ((2, 4, 8192, 1024, 16), 2048, 4096, 6144, 0.75, 3),
        ((0, 1, 100, 64, 4), 100, 0, 100, 0.0, 0),
    ],
)
def test_vectors(
    given: tuple[int, ...], local_len: int, start: int, end: int, saving: float, steps: int
) -> None:
    share = SequenceShare(*given)
    assert (share.local_len, share.start, share.end) == (local_len, start, end)
    assert (share.memory_saving, share.ring_steps) == (saving, steps)
    assert share.headdim == given[3] // given[4]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((3, 3, 1000, 64, 4), "got 3"),
        ((0, 1, 1000, 100, 16), "hidden_size must divide by nheads, got 100 and 16"),
        ((0, 1, 1000, 100, 0), "got 100 and 0"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SequenceShare(*given)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_every_rank_sees_every_chunk_once_its_own_first(world_size: int) -> None:
    """At step s a rank sends to r + 1, and then holds the chunk of r - s - 1."""
    layout = SequenceLayout.contiguous(8 * world_size, world_size)
    mask = Mask(8 * world_size, 8 * world_size)
    spec = AttentionSpec("cpu", torch.float32, 1, 4, 4, 8, 8)
    call = make_call(Strategy(), spec, (layout, layout), mask, 0, backend="aten")
    schedule = schedule_of(call, backward=False)
    held = torch.arange(world_size)
    seen = [held]
    for phase in schedule.phases:
        for post in phase.posts:
            assert post.to.tolist() == [(r + 1) % world_size for r in range(world_size)]
            held = torch.empty_like(held).scatter_(0, post.to, held)
            seen.append(held)
    for rank in range(world_size):
        order = [int(held[rank]) for held in seen]
        assert order == [(rank - step) % world_size for step in range(world_size)]
