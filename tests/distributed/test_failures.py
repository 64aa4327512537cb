"""A peer that dies, stops, is late or interrupted: an error in time, never a hang or result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, Strategy, TransportOptions, ring_attention, tree_decode
from ring_attn.strategies.strategy import NAMES
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks import media
from tests.distributed.pool import Ended, calls_within, ended, everyone, on_ranks

pytestmark = pytest.mark.gloo

TIMEOUT = 3
OPTIONS = TransportOptions(timeout=TIMEOUT)
Group = dist.ProcessGroup | None

# A rank waits at most one timeout for a peer, which itself may wait one timeout for another peer.
IN_TIME = 2 * TIMEOUT

MESSAGE = re.compile(
    r"ring step (?P<step>\d+): global rank (?P<rank>\d+) could not "
    r"(receive from|send to|exchange with) global rank (?P<peer>\d+) "
    rf"after \d+\.\d s, timeout {TIMEOUT} s: "
)


def layer(rows: int = 16, group: Group = None, strategy: str | Strategy = "ring") -> Tensor:
    x = torch.ones(1, rows, 2, 8, requires_grad=True)
    out = ring_attention(x, x, x, transport=OPTIONS, group=group, strategy=strategy)
    return torch.autograd.grad(out.sum(), x)[0]


def with_a_victim(
    strategy: str | Strategy, victim: int, sent: signal.Signals, at: int, of: str = "_start"
) -> tuple[Ended, Ended, int]:
    """A call in which the victim signals itself before exchange `at`, and another call.

    The third result counts exchanges of the last call, which would mistake messages of the failed
    call, still under way, for its own. Before both the ranks connect, if they are to.
    """
    call = partial(layer, strategy=strategy)
    if of == "_start":
        call()
    strike = partial(os.kill, os.getpid(), sent)
    with calls_within(at if dist.get_rank() == victim else None, strike, of):
        first = ended(call)
    stats = open_p2p(dist.group.WORLD, OPTIONS).stats  # type: ignore[arg-type]
    before = stats.messages
    return first, ended(call), stats.messages - before


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("world_size", "strategy", "at", "sent"),
    [
        (3, "ring", 0, STOP),
        (4, "ring", 1, KILL),  # in the middle of the forward
        (4, "ring", 4, KILL),  # in the backward, before a shard
        (3, "ring", 4, KILL),  # and before a gradient
        (3, "all_gather", 4, STOP),  # a reduce_scatter
        (3, "ulysses", 3, STOP),
        (4, Strategy(ulysses_degree=2), 0, STOP),  # between two of the ranks
    ],
    ids=str,
)
@pytest.mark.sweep(3)
def test_a_peer_that_is_gone(
    fresh_ranks: Callable[..., Any],
    world_size: int,
    strategy: str | Strategy,
    at: int,
    sent: signal.Signals,
) -> None:
    victim, survivors = 0, range(1, world_size)
    pool = fresh_ranks(world_size)
    pool.start(with_a_victim, strategy, victim, sent, at)
    results = pool.results(lost=[victim], timeout=30)
    for rank in survivors:
        first, second, exchanges = results[rank]
        assert first.error is RuntimeError and first.seconds < IN_TIME, (rank, first)
        found = MESSAGE.match(first.text)
        assert found and "restart" in first.text, (rank, first)
        # Global ranks, also where a strategy numbers ranks among two; all name the lost one.
        assert int(found["rank"]) == rank, (rank, first)
        assert f"global rank {victim} " in first.text, (rank, first)
        if strategy == "ring":
            # The rank that waited to receive names the missing peer.
            near = {victim} if rank == 1 else {rank - 1, (rank + 1) % world_size}
            assert int(found["peer"]) in near, (rank, first)
        assert "has failed before and cannot go on" in second.text and second.seconds < 0.5
        assert second.error is RuntimeError and exchanges == 0, (rank, exchanges, second)
    # The survivors end by themselves.
    assert pool.close(lost=[victim]) == [-signal.SIGKILL, *(0 for _ in survivors)]


def test_a_late_peer_is_waited_for(fresh_ranks: Callable[..., Any]) -> None:
    pool = fresh_ranks(3)
    pool.start(with_a_victim, "ring", 0, STOP, 0)
    pid = pool.pids[0]
    deadline = time.monotonic() + 20
    while ") T " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the victim has not stopped itself"
        time.sleep(0.02)
    stopped = TIMEOUT / 3
    time.sleep(stopped)
    os.kill(pid, signal.SIGCONT)
    for rank, (got, again, _) in enumerate(pool.results(timeout=30)):
        assert got.error is again.error is None, (rank, got, again)
        # Nobody has gone on without the victim's shard.
        assert got.seconds >= stopped, (rank, got)


def test_a_rank_that_dies_while_the_ring_is_formed(fresh_ranks: Callable[..., Any]) -> None:
    pool, victim = fresh_ranks(3), 2
    pool.start(with_a_victim, "ring", victim, KILL, 0, "connect_gloo")
    for rank, (got, *_) in enumerate(pool.results(lost=[victim], timeout=30)[:victim]):
        assert got.error is RuntimeError and got.seconds < IN_TIME, (rank, got)
        assert f"ranks [{victim}] did not come" in got.text, (rank, got)


@on_ranks(3)
def test_a_rank_that_leaves_its_call_while_the_ring_is_formed() -> None:
    """The others, which have met it and wait for its connections, are told."""
    group, error = dist.new_group(), RuntimeError("no more sockets")
    leaves = dist.get_rank() == 1
    with mock.patch.object(media, "connect_gloo", side_effect=error) if leaves else nullcontext():
        end = ended(lambda: layer(group=group))
    assert end.error is RuntimeError and end.seconds < TIMEOUT / 2, end
    assert "no more sockets" in end.text, end


@on_ranks(3)
def test_a_rank_that_comes_late_to_the_first_call() -> None:
    group, late = dist.new_group(), dist.get_rank() == 1
    if late:
        time.sleep(TIMEOUT + 1)
    first, second = (ended(lambda: layer(group=group)) for _ in range(2))
    assert first.error is RuntimeError and second.error is RuntimeError, (first, second)
    assert first.seconds < IN_TIME, first
    assert f"timeout {TIMEOUT} s" in first.text, first
    assert ("has given up" if late else "ranks [1] did not come") in first.text, first
    # A ring that could not be formed is not formed later.
    assert "has failed before" in second.text and second.seconds < 0.5, second


@on_ranks(4)
def test_errors_name_global_ranks() -> None:
    """In a group of ranks 1 and 3: ranks that differ, refuse or do not come."""
    rank = dist.get_rank()
    groups = [dist.new_group([1, 3]) for _ in range(2)]
    if rank in (1, 3):
        differ = ended(lambda: layer(16, groups[0], "ring" if rank == 1 else "all_gather"))
        assert "global rank 1" in differ.text and "global rank 3" in differ.text, differ
        assert "rank 0" not in differ.text, differ
    if rank == 3:
        alone = ended(lambda: layer(group=groups[1]))
        assert "global rank 3 could not form the ring of global ranks [1, 3]" in alone.text, alone
        assert "global ranks [1] did not come" in alone.text, alone
    dist.barrier()


@on_ranks(3)
def test_nobody_leaves_before_all_are_connected() -> None:
    """A rank that raised early would close connections that its peers are still making.

    Rank 2 connects later than its peers; rank 0's call differs.
    """
    seconds = TIMEOUT / 2
    group, rank, connect = dist.new_group(), dist.get_rank(), dist.ProcessGroupGloo

    def connect_slowly(*args: Any) -> dist.ProcessGroupGloo:
        gloo = connect(*args)
        time.sleep(seconds)
        return gloo

    with mock.patch.object(dist, "ProcessGroupGloo", connect_slowly if rank == 2 else connect):
        got = ended(lambda: layer(16, group, "all_gather" if rank == 0 else "ring"))
    assert got.error is RuntimeError and "strategy: " in got.text, got
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


def after_a_new_start() -> None:
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


# -- an interrupt in the middle of a call: an error on every rank then and later, never a result

RANKS, LONG = 4, 10.0

CASES = [*NAMES, "decode"]
# Made here, because an interrupt within our constructors is not within a call.
STRATEGIES = {name: strategy_of(name, RANKS) for name in NAMES}


def run(case: str, group: dist.ProcessGroup) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 5, 4, 8, generator=generator).requires_grad_() for _ in "qkv")
    options: dict[str, Any] = {"group": group, "transport": TransportOptions(timeout=LONG)}
    if case == "decode":
        return [tree_decode(torch.ones(1, 1, 4, 8), k.detach(), v.detach(), **options)]
    out = ring_attention(q, k, v, causal=True, strategy=STRATEGIES[case], **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def interrupt() -> None:
    raise KeyboardInterrupt


CHOICES = [odd for n in (1, 2, 3) for odd in combinations(range(RANKS), n)]


@pytest.mark.parametrize(
    ("case", "trials"),
    [
        *((case, 3) for case in (*CASES[::2], "decode")),
        *(pytest.param(case, 14, marks=pytest.mark.slow) for case in CASES),
    ],
)
@on_ranks(RANKS, timeout=280)
def test_an_interrupt_anywhere_on_any_ranks(case: str, trials: int) -> None:
    """Each trial has its own group; a rank with fewer calls is interrupted at its last call."""
    first_group = dist.new_group()
    expected = run(case, first_group)
    with calls_within() as counted:
        run(case, first_group)
    dist.destroy_process_group(first_group)
    most = max(everyone(len(counted)))
    for trial in range(trials):
        at = most * (2 * trial + 1) // (2 * trials)
        # 14 choices in steps of 5: neighbouring calls have other ranks, and other numbers of them.
        odd = CHOICES[5 * (trial + CASES.index(case)) % len(CHOICES)]
        group, got = dist.new_group(), list[Tensor]()
        run(case, group)  # connected
        with calls_within(min(at, len(counted) - 9) if dist.get_rank() in odd else None, interrupt):
            first = ended(lambda group=group, got=got: got.extend(run(case, group)))
        second = ended(lambda group=group: run(case, group))
        where = (case, at, odd, first, second)
        if dist.get_rank() in odd:
            # Another rank's interrupt may have come before this rank's own.
            assert first.error in (KeyboardInterrupt, RuntimeError), where
        else:
            # A call that was complete on this rank before the interrupt has right results.
            is_right = len(got) == len(expected) and all(map(torch.equal, got, expected))
            assert first.error is RuntimeError or is_right, where
        assert second.error is RuntimeError, where
        assert first.seconds < LONG and second.seconds < LONG, where
        dist.destroy_process_group(group)
