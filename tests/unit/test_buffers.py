"""The buffers of messages: kept from call to call on CPU, as large as the largest call needs."""

from __future__ import annotations

import torch

from ring_attn.transport.base import Buffers

CPU = torch.device("cpu")


def test_buffers_are_kept() -> None:
    buffers = Buffers()
    first = buffers.take("shards", 2, 64, CPU)
    assert [x.numel() for x in first] == [64, 64]
    assert first[0].data_ptr() != first[1].data_ptr()
    again = buffers.take("shards", 2, 48, CPU)
    assert [x.numel() for x in again] == [48, 48]
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]


def test_channels_do_not_share() -> None:
    buffers = Buffers()
    (shard,) = buffers.take("shards", 1, 64, CPU)
    (gradient,) = buffers.take("gradients", 1, 64, CPU)
    assert shard.data_ptr() != gradient.data_ptr()


def test_a_larger_call_gets_larger_buffers_and_more_of_them() -> None:
    buffers = Buffers()
    buffers.take("gradients", 2, 64, CPU)
    assert [x.numel() for x in buffers.take("gradients", 3, 128, CPU)] == [128, 128, 128]
    pointers = {x.data_ptr() for x in buffers.take("gradients", 3, 16, CPU)}
    assert len(pointers) == 3
    assert buffers.take("gradients", 0, 16, CPU) == []


def test_release_gives_the_memory_back() -> None:
    buffers = Buffers()
    kept = buffers.take("shards", 1, 64, CPU)[0]
    buffers.release()
    fresh = buffers.take("shards", 1, 64, CPU)[0]
    assert fresh.data_ptr() != kept.data_ptr()
