"""A peer that dies, stops, is late or interrupted: an error, never a hang or a result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ring_attn import Strategy, TransportOptions, ring_attention
from ring_attn.transport.ranks.failure import FailureReport
from ring_attn.transport.ranks.notes import Notes
from tests.distributed.pool import FAR, Ended, calls_within, ended, everyone, on_ranks, roomy
from tests.refusals import refused, says

pytestmark = pytest.mark.gloo

Group = dist.ProcessGroup | None


def layer(
    rows: int = 16,
    group: Group = None,
    strategy: str | Strategy = "ring",
    timeout: float = FAR,
    softcap: float = 0.0,
) -> Tensor:
    x = torch.ones(1, rows, 2, 8, requires_grad=True)
    transport = TransportOptions(timeout=timeout)
    out = ring_attention(
        x, x, x, transport=transport, group=group, strategy=strategy, softcap=softcap
    )
    return torch.autograd.grad(out.sum(), x)[0]


def with_a_victim(
    victim: int, sent: signal.Signals, of: str, timeout: float
) -> tuple[Ended, Ended]:
    """A call in which the victim signals itself at the first function named `of`, and another."""
    strike, call = partial(os.kill, os.getpid(), sent), partial(layer, timeout=roomy(timeout))
    with calls_within(0 if dist.get_rank() == victim else None, strike, of):
        first = ended(call)
    return first, ended(call)


def test_a_late_peer_is_waited_for(fresh_ranks: Callable[..., Any]) -> None:
    pool = fresh_ranks(3)
    pool.start(with_a_victim, 0, signal.SIGSTOP, "start_batch", FAR)
    pid = pool.pids[0]
    while ") T " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.02)
    time.sleep(1.0)
    assert pool.answered == [], "a rank has gone on without the victim's shard"
    os.kill(pid, signal.SIGCONT)
    for rank, (got, again) in enumerate(pool.results()):
        assert got.error is again.error is None, (rank, got, again)


def test_a_rank_that_dies_while_the_ring_is_formed(fresh_ranks: Callable[..., Any]) -> None:
    pool, victim = fresh_ranks(3), 2
    pool.start(with_a_victim, victim, signal.SIGKILL, "connect_gloo", 3.0)
    for rank, (got, *_) in enumerate(pool.results(lost=[victim])[:victim]):
        assert got.error is RuntimeError, (rank, got)
        assert f"ranks [{victim}] did not arrive" in got.text, (rank, got)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("ring_attn.transport.ranks.links.connect_gloo", "no more sockets"),
        ("torch.distributed.ProcessGroupGloo", "rank 1 has given up: no more sockets"),
    ],
    ids=["leaves its call", "cannot connect"],
)
@on_ranks(3)
def test_a_rank_that_fails_while_the_ring_is_formed(name: str, reported: str) -> None:
    """The others, which have met it and wait for its connections, get the error."""
    group, error = dist.new_group(), RuntimeError("no more sockets")
    fails = dist.get_rank() == 1
    with mock.patch(name, side_effect=error) if fails else nullcontext():
        end = ended(lambda: layer(group=group))
    assert end.error is RuntimeError, end
    assert reported in end.text, end


@on_ranks(3)
def test_a_rank_that_comes_late_to_the_first_call() -> None:
    timeout = roomy(2.0)
    group, late = dist.new_group(), dist.get_rank() == 1
    store = distributed_c10d._get_default_store()
    call = partial(layer, group=group, timeout=timeout)
    if late:
        while store.add(f"{group.group_name} gave up", 0) < 2:
            time.sleep(0.02)
    first = ended(call)
    store.add(f"{group.group_name} gave up", 1)
    # A ring that could not be formed is not formed later, nor waited for.
    second = ended(partial(layer, group=group))
    assert first.error is RuntimeError and second.error is RuntimeError, (first, second)
    assert f"timeout {timeout:g} s" in first.text, first
    assert ("has given up" if late else "ranks [1] did not arrive within") in first.text, first
    assert "has failed before" in second.text, second


@pytest.mark.parametrize("repeats", [True, False])
@on_ranks(4)
def test_ranks_that_come_after_a_refusal_has_ended_the_calls_of_others(repeats: bool) -> None:
    """They name it soon if the rank that refused repeats it, else after their own timeouts.

    The lead, rank 0, has left by then, and the refusing rank has failed in its next call.
    """
    timeout = FAR if repeats else roomy(1.0)
    group, rank = dist.new_group(), dist.get_rank()
    store = distributed_c10d._get_default_store()
    left = f"{group.group_name} left"
    if rank == 3:
        with nullcontext() if repeats else mock.patch.object(FailureReport, "repeat_refusal"):
            with refused(ValueError, "softcap"):
                layer(group=group, softcap=-1.0)
            got = ended(partial(layer, group=group))
            store.add(left, 1)
            everyone(None)
    else:
        # Rank 2 comes after rank 1, in whose name the meeting has an answer unless rank 3 repeats.
        while store.add(left, 0) < (0, 2, 3)[rank]:
            time.sleep(0.02)
        got = ended(partial(layer, group=group, timeout=FAR if rank == 0 else timeout))
        store.add(left, 1)
        everyone(None)
    assert got.error is RuntimeError, got
    assert says(got.text, "rank 3 refused the call: ValueError: softcap"), got


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
        alone = ended(lambda: layer(group=groups[1], timeout=1.0))
        assert "global rank 3 could not form the ring of global ranks [1, 3]" in alone.text, alone
        assert "global ranks [1] did not arrive" in alone.text, alone
    dist.barrier()


@on_ranks(3)
def test_nobody_leaves_before_all_are_connected() -> None:
    """A rank that raised early would close connections that its peers are still making.

    Rank 2 connects later than its peers; rank 0's call differs.
    """
    group, rank, connect = dist.new_group(), dist.get_rank(), dist.ProcessGroupGloo
    store = distributed_c10d._get_default_store()
    left = f"{group.group_name} left"

    def connect_slowly(*args: Any) -> dist.ProcessGroupGloo:
        gloo = connect(*args)
        time.sleep(1.0)
        store.add(left, 100)
        return gloo

    with mock.patch.object(dist, "ProcessGroupGloo", connect_slowly if rank == 2 else connect):
        got = ended(lambda: layer(16, group, "all_gather" if rank == 0 else "ring"))
    assert store.add(left, 1) > 100, "a rank has left before rank 2 was connected"
    assert got.error is RuntimeError and "strategy: " in got.text, got


@pytest.mark.parametrize(
    ("waits", "held_up"),
    [
        ({1: 2, 2: 3, 3: None}, [1, 2, 3]),
        ({1: 2, 2: 3}, [1, 2, 3]),  # 3 has written nothing
        ({1: 2, 2: 3, 3: 2}, [1, 2, 3, 2]),  # 3 stopped after it had waited
        ({1: 0}, [1, 0]),
    ],
)
def test_who_holds_up_a_peer(waits: dict[int, int | None], held_up: list[int]) -> None:
    store = dist.HashStore()
    for rank, waits_for in waits.items():
        Notes(store, "here", rank).write_calls([], waits_for)
    assert Notes(store, "here", 0).waits(1) == held_up


def test_the_first_rank_to_fail_is_the_one_that_is_reported() -> None:
    notes = [Notes(dist.HashStore(), "here", 0)]
    notes.append(Notes(notes[0].store, "here", 1))
    assert [one.write_failure(f"error {i}") for i, one in enumerate(notes)] == [True, False]
    assert notes[0].failure() is None and "error 0" in str(notes[1].failure())
