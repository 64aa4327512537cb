"""The numbers of a rank's share: the vectors of specifications A and C, and odd lengths."""

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import SequenceShare, all_reduce_bytes, transfer_seconds
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.actions import schedule_of
from ring_attn.machines.count import bytes_sent
from ring_attn.strategies.registry import make_call, program_of


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
        ((0, 0, 1000, 64, 4), "world_size must be at least 1, got 0"),
        ((0, 1, 1000, 100, 16), "hidden_size must divide by nheads, got 100 and 16"),
        ((0, 1, 1000, 100, 0), "got 100 and 0"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SequenceShare(*given)


def test_bytes_of_a_send_and_in_all() -> None:
    """Local 1024, head_dim 64, 4 kv heads, P = 2, 24 blocks, 4-byte items."""
    layout = SequenceLayout.contiguous(2048, 2)
    spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 64, 64)
    mask = Mask(2048, 2048)
    call = make_call(Strategy(), spec, (layout, layout), mask, 0, backend="aten")
    schedule = schedule_of(call, backward=False)
    send = 2 * 1024 * 64 * 4 * 4
    assert schedule.bytes_sent.tolist() == [send, send]
    assert bytes_sent(program_of(call, backward=False)) == send
    assert 24 * int(schedule.bytes_sent[0]) == 24 * send == 50331648


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


def test_the_vectors_of_tensor_parallel_models() -> None:
    assert all_reduce_bytes(1024, 1024, 1, 4) == 2 * (4 << 20)
    assert all_reduce_bytes(1024, 1024, 24, 4) == 192 << 20
    assert transfer_seconds(192 << 20, 100.0) == pytest.approx(0.016, rel=0.01)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        transfer_seconds(1, 0.0)
