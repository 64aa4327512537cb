"""Simulated ranks of one group, each a thread with a connection of its own to one real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ring_attn.transport.ranks import formation, group
from tests.distributed.pool import forkserver

PROCESSES = 4
# So many threads of a process run at a time; the others sleep.
RUNNING = 4
REQUESTS = ("add", "append", "check", "compare_set", "get", "multi_get", "set", "wait")


class CountingStore:
    """A connection to a store that counts requests, one for each key, and knows the longest key."""

    def __init__(self, store: dist.Store) -> None:
        self.requests = self.longest = 0
        for name in REQUESTS:
            setattr(self, name, self._counting(getattr(store, name)))

    def _counting(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def counted(key: str | list[str], *given: Any) -> Any:
            keys = [key] if isinstance(key, str) else key
            self.requests += len(keys)
            self.longest = max(self.longest, *map(len, keys))
            return request(key, *given)

        return counted


@dataclass(frozen=True)
class Formed:
    """How a rank's first call ended, what it asked of the store, and how long it took."""

    rank: int
    why: str
    requests: int
    longest: int
    seconds: float


_start: Any = None


def _take(start: Any) -> None:
    global _start
    _start = start


class Turns:
    """Lets few threads run at a time."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(RUNNING)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._turns:
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._turns.release()
        try:
            yield
        finally:
            self._turns.acquire()

    def sleep(self, seconds: float) -> None:
        with self.waiting():
            time.sleep(seconds)


def form_all(ranks: Sequence[int], world_size: int, port: int, seconds: float) -> list[Formed]:
    """How the first call ends on some ranks, which begin it together with all processes' ranks."""
    threading.stack_size(1 << 18)
    members, ready = tuple(range(world_size)), threading.Barrier(len(ranks), _start.wait)
    turns = Turns()

    def form(rank: int) -> Formed:
        with turns.running():
            client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            store, why = CountingStore(client), ""
            place: Any = SimpleNamespace(rank=rank, ranks=members, store=store)
            shared = group.RankGroup(place)
            with turns.waiting():
                ready.wait()
            began = time.monotonic()
            try:
                shared.medium(torch.device("cpu"), seconds)
            except RuntimeError as error:
                why = str(error)
            took = time.monotonic() - began
            return Formed(rank, why, store.requests, store.longest, took)

    places = SimpleNamespace(
        get_rank=lambda group: group.rank, get_process_group_ranks=lambda group: group.ranks
    )
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=turns.sleep)
    with (
        mock.patch.object(group, "dist", places),
        mock.patch.object(group, "group_store", lambda group: group.store),
        mock.patch.object(group, "group_timeout", lambda group: seconds),
        mock.patch.object(group.watch, "add"),
        mock.patch.object(group, "time", clock),
        mock.patch.object(formation, "time", clock),
        # These would be other threads of the rank's process.
        mock.patch.object(formation, "bounded", lambda work, seconds: work()),
        mock.patch.object(group, "bounded", lambda work, seconds: work()),
        mock.patch.object(dist, "ProcessGroupGloo", lambda *given: None),
        ThreadPoolExecutor(len(ranks)) as threads,
    ):
        return list(threads.map(form, ranks))


def simulate(world_size: int, seconds: float, missing: Collection[int] = ()) -> list[Formed]:
    """How the first call ends on all ranks that are not missing."""
    context = forkserver()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = [rank for rank in range(world_size) if rank not in missing]
    parts = [part for i in range(PROCESSES) if (part := here[i::PROCESSES])]
    start = context.Barrier(len(parts))
    with ProcessPoolExecutor(len(parts), context, _take, (start,)) as processes:
        run = partial(form_all, world_size=world_size, port=store.port, seconds=seconds)
        return [one for some in processes.map(run, parts) for one in some]
