"""CPU tensors treated as CUDA's: streams, events, and communicators in NCCL's place, over gloo.

Operators run at once, as ever. Work queued behind an exchange runs, in its stream's order, when
something waits for it; the host then blocks, unlike CUDA's host. So every line for devices with
streams runs without a GPU, in separate processes. A missing wait between streams is not noticed
here, but on the deferred device (`tests/deferred`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn import profiling
from ring_attn.transport import streams
from ring_attn.transport.ranks.media import Gloo

COPIES = (torch.ops.aten.copy_.default,)


class Stream:
    """A queue of work; the compute stream's is always empty, as its operators run at once."""

    def __init__(self) -> None:
        self.num_done = 0
        self.is_busy = False
        self._queue: deque[tuple[Callable[[], object], bool]] = deque()

    def give(self, work: Callable[[], object], *, blocks: bool) -> None:
        """Queues the work behind earlier work; on the compute stream runs it at once."""
        if self is _computation:
            work()
        else:
            self._queue.append((work, blocks))

    @property
    def num_given(self) -> int:
        return self.num_done + len(self._queue)

    def do(self, num: int) -> None:
        """Runs the first `num` items given, and all following items up to the next that blocks."""
        was_busy, self.is_busy = self.is_busy, True
        try:
            while self._queue and (self.num_done < num or not self._queue[0][1]):
                self._queue[0][0]()
                self._queue.popleft()
                self.num_done += 1
        finally:
            self.is_busy = was_busy

    def wait_event(self, event: Event) -> None:
        self.give(event.synchronize, blocks=True)

    def synchronize(self) -> None:
        self.do(self.num_given)


class Event:
    """A moment of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._num = stream, stream.num_given

    def query(self) -> bool:
        return self._stream.num_done >= self._num

    def synchronize(self) -> None:
        self._stream.do(self._num)


class Behind(TorchDispatchMode):
    """Queues operators behind the exchanges of a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES and not self._stream.is_busy:
            self._stream.give(partial(func, *args, **(kwargs or {})), blocks=False)
            return args[0]
        return func(*args, **(kwargs or {}))


_computation = Stream()
_current = threading.local()


def current(*_: object) -> Stream:
    stream: Stream = getattr(_current, "stream", _computation)
    return stream


@contextmanager
def use(stream: Stream) -> Iterator[None]:
    before, _current.stream = current(), stream
    try:
        with Behind(stream):
            yield
    finally:
        _current.stream = before


class Work:
    """A group of operations that has been started."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.finish: list[Callable[[], object]] = []

    def wait(self) -> bool:
        """The current stream waits."""
        current().give(self._end, blocks=True)
        return True

    def _end(self) -> None:
        for work in self.works:
            work.wait()
        for one in self.finish:
            one()


class Communicator:
    """The used part of torch's ProcessGroupNCCL; messages are matched by their order."""

    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._rank, self._size = rank, size
        self._gloo = Gloo(store, "communicator", rank, size, options._timeout.total_seconds())
        self._sent, self._received = [0] * size, [0] * size
        self._group: Work | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: gloo is connected from the start."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        with self._started() as work:
            self._send(work, tensors[0], peer)
        return work

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        with self._started() as work:
            self._receive(work, tensors[0], peer)
        return work

    def _allgather_base(self, recv: Tensor, send: Tensor) -> Work:
        return self._exchange(self._size * [send], recv.chunk(self._size))

    def alltoall_base(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]
    ) -> Work:
        return self._exchange(send.split(send_counts), recv.split(recv_counts))

    def _reduce_scatter_base(self, recv: Tensor, send: Tensor) -> Work:
        parts = torch.empty_like(send).chunk(self._size)
        work = self._exchange(send.chunk(self._size), parts)
        work.finish.append(lambda: recv.copy_(torch.stack(parts).sum(0)))
        return work

    def _start_coalescing(self) -> None:
        self._group = Work()

    def _end_coalescing(self) -> Work:
        work, self._group = self._group, None
        assert work is not None
        return work

    def abort(self) -> None:
        self._gloo.close()

    def shutdown(self) -> None:
        """Does nothing: there is nothing to release."""

    @contextmanager
    def _started(self) -> Iterator[Work]:
        """Starts an operation behind its stream's earlier work, in the open group if any."""
        stream = current()
        stream.do(stream.num_given)
        yield self._group or Work()

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        with self._started() as work:
            for peer, (send, recv) in enumerate(zip(outgoing, incoming, strict=True)):
                if peer == self._rank:
                    recv.copy_(send)
                else:
                    self._send(work, send, peer)
                    self._receive(work, recv, peer)
        return work

    def _send(self, work: Work, x: Tensor, peer: int) -> None:
        work.works.append(self._gloo.send(x, peer, self._sent[peer]))
        self._sent[peer] += 1

    def _receive(self, work: Work, x: Tensor, peer: int) -> None:
        work.works.append(self._gloo.receive(x, peer, self._received[peer]))
        self._received[peer] += 1


class Clock(profiling._HostClock):
    """The host's clock, which also tells when an exchange has ended."""

    def mark_behind(self, follow: Callable[[Any], bool]) -> Any:
        side = Stream()
        return side if follow(side) else None

    def seconds(self, start: int, end: Any) -> float:
        if isinstance(end, Stream):
            end.synchronize()
            end = self.mark()
        return super().seconds(start, end)


def install() -> None:
    """Treats CPU tensors as CUDA's, in this process from now on."""
    streams.are_used = lambda device: True
    streams.new = lambda device: Stream()
    streams.current, streams.use = current, use
    streams.record = lambda device: Event(current())
    streams.wait = lambda event: current().wait_event(event)
    streams.pinned = torch.clone
    dist.ProcessGroupNCCL = Communicator
    clock = Clock()
    profiling._clock_of = lambda device: clock
