"""CPU tensors treated as CUDA's: streams, events, and communicators in NCCL's place, over gloo.

So every line for devices with streams runs without a GPU, in separate processes. Everything has
ended when it is started: an exchange, too, ends before its post returns. Work that runs too early
or too late is noticed on the deferred device (`tests/deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import profiling
from ring_attn.transport import streams
from ring_attn.transport.ranks.media import Gloo


class Moment:
    """A stream, an event or a group of operations: nothing is left to be waited for."""

    def wait(self) -> bool:
        return True

    def wait_event(self, event: Moment) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""


class Communicator:
    """The used part of torch's ProcessGroupNCCL; messages are matched by their order."""

    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._rank, self._size = rank, size
        self._gloo = Gloo(store, "communicator", rank, size, options._timeout.total_seconds())
        self._sent, self._received = [0] * size, [0] * size
        self._group: list[Callable[[], object]] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: gloo is connected from the start."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Moment:
        with self._ended() as ends:
            self._send(ends, tensors[0], peer)
        return Moment()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Moment:
        with self._ended() as ends:
            self._receive(ends, tensors[0], peer)
        return Moment()

    def _allgather_base(self, recv: Tensor, send: Tensor) -> Moment:
        return self._exchange(self._size * [send], recv.chunk(self._size))

    def alltoall_base(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> Moment:
        return self._exchange(send.split(send_counts), recv.split(recv_counts))

    def _reduce_scatter_base(self, recv: Tensor, send: Tensor) -> Moment:
        parts = torch.empty_like(send).chunk(self._size)
        total = lambda: recv.copy_(torch.stack(parts).sum(0))  # noqa: E731
        return self._exchange(send.chunk(self._size), parts, total)

    def _start_coalescing(self) -> None:
        self._group = []

    def _end_coalescing(self) -> Moment:
        ends, self._group = self._group or [], None
        for end in ends:
            end()
        return Moment()

    def abort(self) -> None:
        self._gloo.close()

    def shutdown(self) -> None:
        """Does nothing: there is nothing to release."""

    @contextmanager
    def _ended(self) -> Iterator[list[Callable[[], object]]]:
        """Ends the operations started in the block, with those of the open group if any."""
        alone = self._group is None
        if alone:
            self._start_coalescing()
        assert self._group is not None
        yield self._group
        if alone:
            self._end_coalescing()

    def _exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *more: Callable[[], object]
    ) -> Moment:
        with self._ended() as ends:
            for peer, (send, recv) in enumerate(zip(outgoing, incoming, strict=True)):
                if peer == self._rank:
                    recv.copy_(send)
                else:
                    self._send(ends, send, peer)
                    self._receive(ends, recv, peer)
            ends.extend(more)
        return Moment()

    def _send(self, ends: list[Callable[[], object]], x: Tensor, peer: int) -> None:
        ends.append(self._gloo.send(x, peer, self._sent[peer]).wait)
        self._sent[peer] += 1

    def _receive(self, ends: list[Callable[[], object]], x: Tensor, peer: int) -> None:
        ends.append(self._gloo.receive(x, peer, self._received[peer]).wait)
        self._received[peer] += 1


class Clock(profiling._HostClock):
    """The host's clock, which also tells when an exchange has ended."""

    def mark_behind(self, follow: Callable[[Any], bool]) -> Any:
        return self.mark() if follow(Moment()) else None


def install() -> None:
    """Treats CPU tensors as CUDA's, in this process from now on."""
    streams.are_used = lambda device: True
    compute = Moment()
    streams.current = lambda device: compute
    streams.new = streams.record = lambda device: Moment()
    streams.use = lambda stream: nullcontext()
    streams.wait = Moment.wait
    streams.pinned = torch.clone
    dist.ProcessGroupNCCL = Communicator
    clock = Clock()
    profiling._clock_of = lambda device: clock
