"""A peer that dies, stops, is late or has other sizes: an error in time, never a hang.

Where a process is lost, or the world's group, the test has processes of its own; else a group.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, ring_attention
from ring_attn.core.program import Channel, Hop
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks import media
from tests.distributed.pool import Ended, ended, on_ranks

pytestmark = pytest.mark.gloo

TIMEOUT = 3
OPTIONS = TransportOptions(timeout=TIMEOUT)
Group = dist.ProcessGroup | None

# A rank waits for at most one peer for all of the timeout, and for another one that does the same.
IN_TIME = 2 * TIMEOUT

MESSAGE = re.compile(
    r"ring step (?P<step>\d+): rank (?P<rank>\d+) could not "
    r"(receive from|send to|exchange with) rank (?P<peer>\d+) "
    rf"\(global rank (?P<world>\d+)\) after \d+\.\d s, timeout {TIMEOUT} s: "
)


def told(got: Ended, rank: int, in_time: float = IN_TIME) -> tuple[int, int]:
    """The peer that the error names, and its rank in the world; it comes in time and says all."""
    assert got.error is RuntimeError and got.seconds < in_time, (rank, got)
    found = MESSAGE.match(got.text)
    assert found and int(found["rank"]) == rank, (rank, got.text)
    assert "restart" in got.text, got.text
    return int(found["peer"]), int(found["world"])


def layer(rows: int = 16, group: Group = None) -> Tensor:
    """Forward and backward with this rank's shard; the gradient of the keys."""
    q, k, v = (torch.ones(1, rows, 2, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, transport=OPTIONS, group=group)
    (dk,) = torch.autograd.grad(out.sum(), k)
    return dk


# -- a rank is lost


def with_a_victim(
    victim: int, sent: signal.Signals, when: tuple[int, Channel, int]
) -> tuple[Ended, Ended, int]:
    """A good call, one in which the victim sends itself a signal, and another call.

    The third is the number of exchanges that the last one has started: messages of the call that
    failed are under way, which it would take for its own.

    Args:
        victim: the rank.
        sent: the signal.
        when: in place of which message: the number of calls of `post` on a channel at a step that
            are let through, the channel, the step.
    """
    layer()
    transport = open_p2p(dist.group.WORLD, OPTIONS)  # type: ignore[arg-type]
    if dist.get_rank() == victim:
        post, (let_through, *at) = transport.post, when
        seen = 0

        def post_or_signal(
            channel: Channel, step: int, hop: Hop, *buffers: Tensor, **after: Any
        ) -> None:
            nonlocal seen
            if [channel, step] == at:
                seen += 1
                if seen == let_through + 1:
                    os.kill(os.getpid(), sent)
            post(channel, step, hop, *buffers, **after)

        transport.post = post_or_signal  # type: ignore[method-assign]
    first, before = ended(layer), transport.stats.messages
    return first, ended(layer), transport.stats.messages - before


# When the victim goes: before anything of the forward is sent, in the middle of it, in the backward
# before a shard (the forward's is let through), and before a gradient.
MOMENTS: dict[str, tuple[int, Channel, int]] = {
    "forward, first": (0, "shards", 0),
    "forward, middle": (0, "shards", 1),
    "backward, shard": (1, "shards", 1),
    "backward, gradient": (0, "gradients", 1),
}


@pytest.mark.parametrize(
    ("world_size", "when", "sent"),
    [
        (3, "forward, first", signal.SIGKILL),
        (4, "forward, middle", signal.SIGKILL),
        (4, "backward, shard", signal.SIGKILL),
        (3, "backward, gradient", signal.SIGKILL),
        (3, "forward, first", signal.SIGSTOP),
        (4, "backward, shard", signal.SIGSTOP),
        (3, "backward, gradient", signal.SIGSTOP),
    ],
)
@pytest.mark.sweep(2)
def test_a_peer_that_is_gone(
    fresh_ranks: Callable[..., Any], world_size: int, when: str, sent: signal.Signals
) -> None:
    victim, survivors = 0, range(1, world_size)
    pool = fresh_ranks(world_size)
    pool.start(with_a_victim, victim, sent, MOMENTS[when])
    results = pool.results(lost=[victim], timeout=30)
    for rank in survivors:
        first, second, exchanges = results[rank]
        peer, same = told(first, rank)
        # The rank that would have received says whom it has missed.
        neighbours = {(rank - 1) % world_size, (rank + 1) % world_size}
        assert peer == same and peer in ({victim} if rank == 1 else neighbours), (rank, first)
        assert second.error is RuntimeError and exchanges == 0, (rank, exchanges, second)
    # The survivors come to their end by themselves.
    assert pool.close(lost=[victim]) == [-signal.SIGKILL, *(0 for _ in survivors)]


def start(transport: Transport, name: str, n: int) -> None:
    """A collective at step 7, with n bytes for each rank."""
    world_size = transport.world_size
    mine, all_of_them = (torch.zeros(size, dtype=torch.uint8) for size in (n, world_size * n))
    if name == "all_gather":
        transport.all_gather("shards", 7, mine, all_of_them)
    elif name == "reduce_scatter":
        transport.reduce_scatter("shards", 7, torch.ones(world_size * n // 4), torch.empty(n // 4))
    else:
        got, counts = all_of_them.clone(), world_size * [n]
        transport.all_to_all("shards", 7, all_of_them, counts, got, counts)
    transport.wait("shards")


def collective_with_a_victim(
    name: str, sent: signal.Signals, among: tuple[int, ...]
) -> tuple[Ended, Ended] | None:
    """A good collective among some ranks, one in which rank 0 is lost, and one after that."""
    whole = open_p2p(dist.group.WORLD, OPTIONS)  # type: ignore[arg-type]
    with whole.call("forward", Agreement({"a test": "of collectives"}), torch.device("cpu")):
        if dist.get_rank() not in among:
            return None
        run = partial(start, whole.sub(among), name, 64)
        run()
        if dist.get_rank() == 0:
            os.kill(os.getpid(), sent)
        return ended(run), ended(run)


@pytest.mark.parametrize(
    ("name", "sent", "among"),
    [
        ("all_gather", signal.SIGKILL, (0, 1, 2)),
        ("reduce_scatter", signal.SIGSTOP, (0, 1, 2)),
        ("all_to_all", signal.SIGSTOP, (0, 2)),
    ],
)
@pytest.mark.sweep(2)
def test_a_peer_that_is_gone_in_a_collective(
    fresh_ranks: Callable[..., Any], name: str, sent: signal.Signals, among: tuple[int, ...]
) -> None:
    pool = fresh_ranks(3)
    pool.start(collective_with_a_victim, name, sent, among)
    results = pool.results(lost=[0], timeout=30)
    for rank in (1, 2):
        if rank not in among:
            assert results[rank] is None
            continue
        first, second = results[rank]
        told(first, among.index(rank))
        assert "has failed before and cannot go on" in second.text and second.seconds < 0.5
    assert pool.close(lost=[0]) == [-signal.SIGKILL, 0, 0]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "T"


def test_a_late_peer_is_waited_for(fresh_ranks: Callable[..., Any]) -> None:
    pool = fresh_ranks(3)
    pool.start(with_a_victim, 0, signal.SIGSTOP, MOMENTS["forward, first"])
    pid = pool.pids[0]
    deadline = time.monotonic() + 20
    while not is_stopped(pid):
        assert time.monotonic() < deadline, "the victim has not stopped itself"
        time.sleep(0.02)
    stopped = TIMEOUT / 3
    time.sleep(stopped)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    for rank, (got, again, _) in enumerate(pool.results(timeout=30)):
        assert got.error is again.error is None, (rank, got, again)
        # Nobody has gone on without the victim's shard.
        assert got.seconds >= stopped, (rank, got)


# -- the ring is not formed


def killed_while_connecting(victim: int) -> Ended:
    """A rank that goes between the roll-call and the connections."""
    if dist.get_rank() == victim:
        connect = media.connect_gloo

        def gone(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return connect

        media.connect_gloo = gone  # type: ignore[assignment]
    return ended(layer)


def test_a_rank_that_dies_while_the_ring_is_formed(fresh_ranks: Callable[..., Any]) -> None:
    pool, victim = fresh_ranks(3), 2
    pool.start(killed_while_connecting, victim)
    for rank, got in enumerate(pool.results(lost=[victim], timeout=30)[:victim]):
        assert got.error is RuntimeError and got.seconds < IN_TIME, (rank, got)
        assert f"ranks [{victim}] did not come" in got.text, (rank, got)


@on_ranks(3)
def test_a_rank_that_comes_late_to_the_first_call() -> None:
    """It comes when the others have given up."""
    group, late = dist.new_group(), dist.get_rank() == 1
    if late:
        time.sleep(TIMEOUT + 1)
    first, second = (ended(lambda: layer(group=group)) for _ in range(2))
    assert first.error is RuntimeError and second.error is RuntimeError, (first, second)
    assert first.seconds < (1.0 if late else IN_TIME), first
    assert f"timeout {TIMEOUT} s" in first.text, first
    assert ("has given up" if late else "ranks [1] did not come") in first.text, first
    # A ring that could not be formed is not formed later.
    assert "has failed before" in second.text and second.seconds < 0.5, second


@on_ranks(3)
def test_nobody_leaves_before_all_are_connected() -> None:
    """Ranks that raise because their calls differ would close connections that are being made.

    One rank is slower than its peers to see that it is connected; rank 0's call differs.
    """
    seconds = TIMEOUT / 2
    group, rank, connect = dist.new_group(), dist.get_rank(), dist.ProcessGroupGloo

    def connect_slowly(*args: Any) -> dist.ProcessGroupGloo:
        gloo = connect(*args)
        time.sleep(seconds)
        return gloo

    with mock.patch.object(dist, "ProcessGroupGloo", connect_slowly if rank == 2 else connect):
        got = ended(lambda: layer(8 if rank == 0 else 16, group))
    assert got.error is RuntimeError and "seqlen_q: " in got.text, got
    assert seconds < got.seconds < IN_TIME, got


@on_ranks(3)
def test_a_rank_that_cannot_connect_is_not_waited_for() -> None:
    group, connect = dist.new_group(), dist.ProcessGroupGloo
    if dist.get_rank() == 1:
        connect = mock.Mock(side_effect=RuntimeError("no route to host"))
    with mock.patch.object(dist, "ProcessGroupGloo", connect):
        got = ended(lambda: layer(group=group))
    assert got.error is RuntimeError and got.seconds < TIMEOUT, got
    assert "rank 1 has given up: no route to host" in got.text, got


# -- other sizes on one rank; other calls: test_disagreement.py


@on_ranks(2)
def test_another_size_in_a_collective() -> None:
    """Rank 0 has half the bytes, in one collective after another."""
    n = 2048 if dist.get_rank() == 0 else 4096
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        transport = open_p2p(dist.new_group(), OPTIONS)
        with transport.call("forward", Agreement({"n": n}), torch.device("cpu")):
            got = ended(partial(start, transport, name, n))
        told(got, dist.get_rank())
        assert "n: 4096 and 2048" in got.text or "n: 2048 and 4096" in got.text


# -- a new group


def after_a_new_start() -> None:
    """The process group is destroyed and made again: the ring makes new groups of its own."""
    layout = SequenceLayout.zigzag(31, dist.get_world_size())
    x = torch.randn(1, 31, 2, 8, generator=torch.Generator().manual_seed(0))
    shard = layout.shard(x, dist.get_rank())
    call = partial(ring_attention, shard, shard, shard, causal=True, layout=layout)
    first = call()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="torchrun"):
        call()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world_size)
    assert torch.equal(first, call())


def test_a_new_process_group_in_the_same_processes(fresh_ranks: Callable[..., Any]) -> None:
    pool = fresh_ranks(3)
    pool.run(after_a_new_start, timeout=30)
    assert pool.close() == [0, 0, 0]
