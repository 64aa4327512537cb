"""CPU tensors treated as CUDA's: streams, events, and communicators in NCCL's place, over gloo.

So every line for devices with streams runs without a GPU, in separate processes. Everything has
ended when it is started: an exchange, too, ends before its post returns. Work that runs too early
or too late is noticed on the deferred device (`tests/deferred`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.torch_private import NCCL_CLASS
from ring_attn.transport import capture, streams
from ring_attn.transport.ranks.links import GlooLink
from ring_attn.transport.ranks.notes import Notes
from tests.stand_in import Parts, SecondClass, StandIn


class Moment:
    """A stream, an event or a group of operations: nothing is left to be waited for."""

    def wait(self, *_: object) -> bool:
        return True

    def wait_event(self, event: Moment) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""


class Communicator(StandIn):
    """Sends over gloo; messages are matched by their order."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options)
        place, seconds = (store, "communicator", rank), options._timeout.total_seconds()
        self._gloo = GlooLink(*place, tuple(range(size)), seconds, Notes(*place).failure)
        self._sent, self._received = [0] * size, [0] * size

    def start(self, sends: Parts, receives: Parts, total: Tensor | None = None) -> Moment:
        self.launch(partial(self._launched, sends, receives, total))
        return Moment()

    def _launched(
        self, sends: Parts, receives: Parts, total: Tensor | None
    ) -> list[Callable[[], object]]:
        ends = list[Callable[[], object]]()
        to_itself = [x for x, peer in sends if peer == self.rank]
        for x, peer in sends:
            if peer != self.rank:
                ends.append(self._gloo.gloo.send([x], peer, self._sent[peer]).wait)
                self._sent[peer] += 1
        for x, peer in receives:
            if peer == self.rank:
                x.copy_(to_itself.pop(0))
            else:
                ends.append(self._gloo.gloo.recv([x], peer, self._received[peer]).wait)
                self._received[peer] += 1
        if total is not None:
            # In the order of the ranks, as elsewhere: torch sums a stack of 5 in another order.
            ends.append(lambda: total.copy_(reduce(torch.add, [x for x, _ in receives])))
        return ends

    def _end_coalescing(self) -> Moment:
        super()._end_coalescing()
        return Moment()

    def abort(self) -> None:
        super().abort()
        self._gloo.close()


class SecondCommunicator(SecondClass, Communicator):
    """As torch's second class of NCCL process groups."""


def install() -> None:
    """Treats CPU tensors as CUDA's, in this process from now on."""
    streams.are_used = lambda device: True
    compute = Moment()
    capture.captures = lambda device: False
    streams.current = lambda device: compute
    streams.new = streams.record = streams.record_on = lambda place: Moment()
    streams.use = lambda stream: nullcontext()
    streams.wait = lambda event, device: None
    streams.lend = lambda x: None
    streams.pinned = lambda x, device: x.clone()
    dist.ProcessGroupNCCL = type(NCCL_CLASS, (Communicator,), {})
    streams.moment = lambda stream: time.perf_counter_ns()
