"""The used part of torch's ProcessGroupNCCL, for communicators that stand in NCCL's place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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


class StandIn:
    """Hands every operation to `start`, as parts to send and to receive.

    Ends as NCCL does: an abort waits for the kernels that its communicator has launched, and a
    shutdown for the other ranks' shutdowns.
    """

    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

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
        GROUP.depth += 1

    def _end_coalescing(self) -> Any:
        GROUP.depth -= 1
        if GROUP.depth == 0:
            launches, GROUP.launches = GROUP.launches, ()
            for end in [end for launch in launches for end in launch()]:
                end()

    def launch(self, launch: Launch) -> None:
        """Runs an operation, at the end of this thread's group if one is open."""
        self._start_coalescing()
        GROUP.launches = (*GROUP.launches, launch)
        self._end_coalescing()

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
