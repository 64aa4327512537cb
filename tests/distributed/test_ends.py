"""How a group's connections end: with the group, and at the process's exit."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_attn import SequenceLayout, ring_attention, torch_private
from ring_attn.strategies.strategy import NAMES
from ring_attn.testing.cases import strategy_of
from ring_attn.torch_private import flattened
from tests.distributed.pool import ended, on_ranks

RANKS = 4


def layer(group: dist.ProcessGroup | None, strategy: str = "ring") -> None:
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = SequenceLayout.from_name("contiguous", 13, world_size)
    x = torch.ones(1, layout.shard_len(rank), 4, 8, requires_grad=True)
    known = strategy_of(strategy, world_size)
    ring_attention(x, x, x, layout=layout, strategy=known, group=group).sum().backward()


def held() -> tuple[int, int]:
    """Numbers of this process's threads and file descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settles(most: tuple[int, int], seconds: float = 5.0) -> tuple[int, int]:
    """The numbers held, once they are at most `most` or so many seconds are over."""
    deadline = time.monotonic() + seconds
    while any(x > y for x, y in zip(held(), most, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held()


@on_ranks(RANKS, timeout=280)
def test_connections_end_with_their_group() -> None:
    """Without the collector: a cycle of references would keep threads and descriptors.

    `dev/soak.py` makes hundreds of groups.
    """
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            for strategy in NAMES:
                group = dist.new_group()
                layer(group, strategy)
                dist.destroy_process_group(group)
                del group
            if number == 0:
                first = settles((0, 0), 0.5)
        last = settles(first)
    finally:
        gc.enable()
    assert all(x <= y for x, y in zip(last, first, strict=True)), (first, last)


def exits(rank: int) -> float:
    """Seconds that the interpreter of one rank takes to exit, while the others go on."""
    layer(None)
    start = time.monotonic()
    if dist.get_rank() == rank:
        atexit._run_exitfuncs()
    return time.monotonic() - start


def test_a_rank_that_exits_waits_for_no_other(fresh_ranks: Callable[..., Any]) -> None:
    """As after an exception between calls: the end of its process tells the others."""
    seconds = fresh_ranks(2, queued=True).run(exits, 1)[1]
    assert seconds < 5.0, seconds


def test_a_group_that_sends_nothing_is_refused() -> None:
    """torch's fake process group has a store without functions."""
    x = torch.ones(1, 4, 2, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        end = ended(lambda: ring_attention(x, x, x))
    finally:
        dist.destroy_process_group()
    assert end.error is RuntimeError and "'fake'" in end.text and "gloo" in end.text, end


def test_the_worlds_device_is_kept_by_two_threads() -> None:
    """Each thread hides the world's device from torch while torch makes a group of a mesh."""
    world, mesh, started = mock.Mock(bound_device_id="cuda:0"), mock.Mock(), count()

    def flatten() -> mock.Mock:
        time.sleep(0.2 if next(started) == 0 else 0.4)  # the second thread ends later
        return mock.Mock()

    mesh._flatten = flatten
    known = mock.Mock(group=mock.Mock(WORLD=world))
    with mock.patch.object(torch_private, "dist", known):
        threads = [threading.Thread(target=flattened, args=(mesh,)) for _ in range(2)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    assert world.bound_device_id == "cuda:0"
