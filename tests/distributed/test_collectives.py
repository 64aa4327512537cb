"""The transport's collectives, and transports among some ranks: values and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions
from ring_attn.core.program import Channel, Collective, Hop
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.local import run_local
from ring_attn.transport.p2p import open_p2p
from tests.distributed.pool import Pools


def payload(rank: int, n: int) -> Tensor:
    """(n,) bytes that tell ranks and places apart."""
    return ((torch.arange(n) * 7 + 31 * rank + 1) % 251).to(torch.uint8)


def assert_sent(transport: Transport, bytes_sent: int) -> None:
    assert transport.stats.bytes_sent == bytes_sent
    assert transport.stats.messages == 1 or transport.world_size == 1
    transport.stats.reset()


def post(
    transport: Transport, channel: Channel, step: int, route: Collective, send: Tensor, recv: Tensor
) -> None:
    transport.post(channel, step, route, send.view(torch.uint8), recv.view(torch.uint8))


def gather(transport: Transport, n: int) -> None:
    rank, world_size = transport.rank, transport.world_size
    got = transport.gather(payload(rank, n))
    assert torch.equal(got, torch.stack([payload(r, n) for r in range(world_size)]))
    assert_sent(transport, (world_size - 1) * n)


def scatter(transport: Transport, n: int, dtype: torch.dtype) -> None:
    rank, world_size = transport.rank, transport.world_size
    parts = [[torch.arange(n, dtype=dtype) * 10**r + p for p in range(world_size)]
             for r in range(world_size)]  # fmt: skip
    got = torch.empty(n, dtype=dtype)
    post(
        transport, "gradients", 0, Collective("reduce_scatter", dtype), torch.cat(parts[rank]), got
    )
    transport.wait("gradients")
    assert torch.equal(got, torch.stack([parts[r][rank] for r in range(world_size)]).sum(0))
    assert_sent(transport, (world_size - 1) * n * dtype.itemsize)


def count(sender: int, receiver: int) -> int:
    """Bytes of a message of the uneven exchange; some are empty, some shorter than a mark."""
    return (0, 5, 16, 48, 1000)[(2 * sender + receiver) % 5]


def exchange(transport: Transport) -> None:
    rank, world_size = transport.rank, transport.world_size
    ranks = range(world_size)
    send_counts = tuple(count(rank, r) for r in ranks)
    recv_counts = tuple(count(r, rank) for r in ranks)
    send = torch.cat([payload(10 * rank + r, send_counts[r]) for r in ranks])
    got = torch.empty(sum(recv_counts), dtype=torch.uint8)
    post(
        transport,
        "shards",
        0,
        Collective("all_to_all", torch.uint8, send_counts, recv_counts),
        send,
        got,
    )
    transport.wait("shards")
    expected = [payload(10 * r + rank, recv_counts[r]) for r in ranks]
    assert torch.equal(got, torch.cat(expected))
    assert_sent(transport, sum(send_counts) - send_counts[rank])


def all_of_them(transport: Transport) -> None:
    transport.stats.reset()
    for n in (1, 15, 16, 1000):
        gather(transport, n)
    for dtype in (torch.float32, torch.float64):
        scatter(transport, 37, dtype)
    exchange(transport)


def two_at_a_time(transport: Transport) -> None:
    """A gathering and a reduction are under way together, over and over in the same buffers."""
    rank, world_size = transport.rank, transport.world_size
    got, total = torch.empty(world_size * 64, dtype=torch.uint8), torch.empty(8)
    for step in range(5):
        send, grads = payload(rank + step, 64), torch.full((world_size * 8,), float(step + rank))
        post(transport, "shards", step, Collective("all_gather"), send, got)
        post(transport, "gradients", step, Collective("reduce_scatter", total.dtype), grads, total)
        transport.wait("gradients")
        transport.wait("shards")
        assert torch.equal(got, torch.cat([payload(r + step, 64) for r in range(world_size)]))
        assert torch.equal(total, torch.full((8,), float(sum(step + r for r in range(world_size)))))


def among_some(transport: Transport) -> None:
    """Pairs and single ranks have collectives of their own, counted with the rest."""
    rank, world_size = transport.rank, transport.world_size
    assert transport.sub(tuple(range(world_size))).world_size == world_size
    last = world_size - 1
    if rank in (0, last):
        pair = transport.sub((0, last))
        assert pair is transport.sub((0, last))
        assert (pair.rank, pair.world_size) == (0 if rank == 0 else 1, 2)
        all_of_them(pair)
        assert pair.stats is transport.stats
        mine, got = payload(pair.rank, 32), torch.empty(32, dtype=torch.uint8)
        pair.post("outer", 0, Hop(1 - pair.rank, 1 - pair.rank), mine, got)
        pair.wait("outer")
        assert torch.equal(got, payload(1 - pair.rank, 32))
    all_of_them(transport.sub((rank,)))


def check_all(transport: Any) -> None:
    all_of_them(transport)
    two_at_a_time(transport)
    among_some(transport)


def between_processes() -> None:
    transport = open_p2p(dist.group.WORLD, TransportOptions())  # type: ignore[arg-type]
    with transport.call("test", Agreement({}), torch.device("cpu")):
        check_all(transport)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.queued
def test_between_processes(ranks: Pools, world_size: int) -> None:
    ranks(world_size).run(between_processes)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_in_one_process(world_size: int) -> None:
    run_local(world_size, lambda rank, transport: check_all(transport))
