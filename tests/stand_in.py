"""The used part of torch's classes of NCCL process groups, for what stands in NCCL's place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Parts = Sequence[tuple[Tensor, int]]  # tensors, and the members to send them to or receive from
# Begins an operation; returns what waits for its end.
Launch = Callable[[], Sequence[Callable[[], object]]]


# Seconds after which the stand-in gives up what NCCL would wait for without end.
FOREVER = 20.0


class OpenGroup(threading.local):
    """NCCL's group of this thread: what any communicator starts is launched when it closes."""

    depth = 0
    launches: tuple[Launch, ...] = ()


GROUP = OpenGroup()


def open_group() -> None:
    GROUP.depth += 1


def close_group() -> None:
    GROUP.depth -= 1
    if GROUP.depth == 0:
        launches, GROUP.launches = GROUP.launches, ()
        for end in [end for launch in launches for end in launch()]:
            end()


def options() -> SimpleNamespace:
    """The options of both classes, with torch's names."""
    return SimpleNamespace(
        _timeout=None,
        group_name="",
        global_ranks_in_group=[],
        is_high_priority_stream=False,
        config=SimpleNamespace(cga_cluster_size=None, max_ctas=None),
    )


class StandIn:
    """Hands every operation to `start`, as parts to send and to receive.

    Ends as NCCL does: an abort waits for the kernels that its communicator has launched, and a
    shutdown for the other ranks' shutdowns.
    """

    Options = staticmethod(options)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options, self.store = rank, size, options, store
        self.aborted = threading.Event()
        # Communicators whose launched kernels precede this one's, and do not end by themselves.
        self.behind: list[StandIn] = []

    def start(self, sends: Parts, receives: Parts, total: Tensor | None = None) -> Any:
        """Starts an operation; `total` becomes the sum of the received parts, if it is given."""
        raise NotImplementedError

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: there is nothing to connect to."""

    def abort(self) -> None:
        self.aborted.set()
        until = time.monotonic() + FOREVER
        for one in self.behind:
            if not one.aborted.wait(until - time.monotonic()):
                raise RuntimeError("an abort waits for kernels that do not end")

    def shutdown(self) -> None:
        until = time.monotonic() + FOREVER
        self.store.add("shutdown", 1)
        while self.store.add("shutdown", 0) < self.size:
            if time.monotonic() > until:
                raise RuntimeError("a shutdown waits for ranks that do not come")
            time.sleep(0.01)

    def _start_coalescing(self) -> None:
        open_group()

    def _end_coalescing(self) -> Any:
        close_group()

    def launch(self, launch: Launch) -> None:
        """Runs an operation, at the end of this thread's group if one is open."""
        open_group()
        GROUP.launches = (*GROUP.launches, launch)
        close_group()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.start([(tensors[0], peer)], [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self.start([], [(tensors[0], peer)])

    def _allgather_base(self, recv: Tensor, send: Tensor) -> Any:
        return self._exchange(self.size * [send], recv.chunk(self.size))

    def alltoall_base(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> Any:
        return self._exchange(send.split(send_counts), recv.split(recv_counts))

    def _reduce_scatter_base(self, recv: Tensor, send: Tensor) -> Any:
        return self._exchange(send.chunk(self.size), torch.empty_like(send).chunk(self.size), recv)

    def _exchange(
        self, sends: Sequence[Tensor], receives: Sequence[Tensor], total: Tensor | None = None
    ) -> Any:
        everyone = range(self.size)
        return self.start(
            [*zip(sends, everyone, strict=True)], [*zip(receives, everyone, strict=True)], total
        )

    @contextmanager
    def _outside_coalescing(self) -> Iterator[None]:
        """Starts what the block starts at once, although a coalescing is open."""
        depth, launches = GROUP.depth, GROUP.launches
        GROUP.depth, GROUP.launches = 0, ()
        try:
            yield
        finally:
            GROUP.depth, GROUP.launches = depth, launches


class Completed:
    """A work that waits for nothing."""

    def wait(self, *_: object) -> bool:
        return True


class SecondClass(StandIn):
    """Makes a stand-in behave as torch's second class, ProcessGroupNCCL2.

    It is connected when it is made, on a device. In a coalescing only messages wait for the end; a
    collective starts at once, and of a coalescing without messages the end waits for nothing.
    """

    def __init__(self, store: Any, rank: int, size: int, options: Any, device: torch.device):
        super().__init__(store, rank, size, options)
        super().eager_connect_single_device(device)
        self._is_coalescing = self._has_messages = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        raise AssertionError("the second class is connected when it is made")

    def _start_coalescing(self) -> None:
        if self._is_coalescing:
            raise RuntimeError("startCoalescing called while a batch is already active")
        self._is_coalescing, self._has_messages = True, False
        super()._start_coalescing()

    def _end_coalescing(self) -> Any:
        self._is_coalescing = False
        work = super()._end_coalescing()
        return work if self._has_messages else Completed()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._has_messages = True
        return super().send(tensors, peer, tag) or Completed()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._has_messages = True
        return super().recv(tensors, peer, tag) or Completed()

    def _exchange(self, *given: Any) -> Any:
        if not self._is_coalescing:
            return super()._exchange(*given)
        with self._outside_coalescing():
            return super()._exchange(*given)
