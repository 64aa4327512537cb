"""Simulated ranks of one group, each a thread, which ask one real store.

One thread runs at a time, and time is simulated: a busy machine changes nothing.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ring_attn.transport.ranks import failure, group, rendezvous, store

REQUESTS = ("add", "append", "check", "compare_set", "get", "multi_get", "set", "wait")


class CountingStore:
    """A rank's view of a store: counts requests, one for each key; knows the longest key."""

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
    """How a rank's first call ended, after how long, and what it asked of the store."""

    rank: int
    why: str
    took_s: float  # of simulated time
    requests: int
    longest: int


@dataclass(eq=False)
class Place:
    """A rank's process group, to which its `RankGroup` keeps a weak reference."""

    rank: int
    ranks: tuple[int, ...]
    store: CountingStore


class Clock:
    """Time that passes only while all threads sleep: then it jumps to the first that wakes."""

    def __init__(self) -> None:
        self._now = 0.0
        self._asleep: list[tuple[float, int, threading.Event]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        woken = self.alarm(self._now + seconds)
        self.next()
        woken.wait()

    def alarm(self, when: float) -> threading.Event:
        """An event that is set when this time has come."""
        woken = threading.Event()
        heapq.heappush(self._asleep, (when, next(self._order), woken))
        return woken

    def next(self) -> None:
        """Lets the thread run that wakes first."""
        if self._asleep:
            self._now, _, woken = heapq.heappop(self._asleep)
            woken.set()


class AtOnce:
    """A thread's stand-in, which runs in the thread that starts it."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target


def simulate(
    world_size: int, seconds: float, comes_at: Callable[[int], float], missing: Collection[int] = ()
) -> list[Formed]:
    """How the first call ends on all ranks that are not missing; each comes at its time."""
    store_of_all = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clock, ended = Clock(), list[Formed]()

    def form(rank: int, woken: threading.Event) -> None:
        woken.wait()
        store, why, start = CountingStore(store_of_all), "", clock.monotonic()
        place: Any = Place(rank, tuple(range(world_size)), store)
        try:
            group.RankGroup(place).link(torch.device("cpu"), seconds)
        except RuntimeError as error:
            why = str(error)
        finally:
            took_s = clock.monotonic() - start
            clock.next()
        ended.append(Formed(rank, why, took_s, store.requests, store.longest))

    places = SimpleNamespace(
        get_rank=lambda group: group.rank, get_process_group_ranks=lambda group: group.ranks
    )
    here = [rank for rank in range(world_size) if rank not in missing]
    threads = [
        threading.Thread(target=form, args=(rank, clock.alarm(comes_at(rank))), daemon=True)
        for rank in here
    ]
    with (
        mock.patch.object(group, "dist", places),
        mock.patch.object(group, "group_store", lambda group: group.store),
        mock.patch.object(group, "group_timeout", lambda group: seconds),
        mock.patch.object(group.watch, "add"),
        mock.patch.object(failure, "time", clock),
        mock.patch.object(rendezvous, "time", clock),
        # These would be other threads of the rank's process.
        mock.patch.object(rendezvous, "bounded", lambda work, seconds: work()),
        mock.patch.object(store, "bounded", lambda work, seconds: work()),
        mock.patch.object(rendezvous, "threading", SimpleNamespace(Thread=AtOnce)),
        mock.patch.object(dist, "ProcessGroupGloo", lambda *given: None),
    ):
        for thread in threads:
            thread.start()
        clock.next()
        for thread in threads:
            thread.join()
    assert len(ended) == len(here), "a thread of a rank has died"
    return ended
