"""torch.cuda of a rank whose tensors are not on torch's current device: the part that is used.

As in torch, a device has `POOL` streams, which `torch.cuda.Stream` gives out in turn, and an event
or a wait without a stream takes the current stream of the current device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from tests.deferred.device import Node, Recorder

# The device that CPU tensors stand for, and torch's current device at first.
HOME, OTHER = 1, 0
POOL = 32


class HostSyncError(AssertionError):
    """The host would wait for the device."""


class CaptureError(AssertionError):
    """CUDA would refuse the operation while a graph is captured, or the captured graph."""


class Capture:
    """The queues whose work a graph takes, and what was queued on them before."""

    def __init__(self, first: int) -> None:
        """Takes the number of nodes recorded before."""
        self.first = first
        self.before: dict[Queue, tuple[Node, ...]] = {}

    def join(self, queue: Queue) -> None:
        if queue not in self.before:
            self.before[queue], queue.tail = queue.tail, ()


class Queue:
    """What a stream is on its device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.tail: tuple[Node, ...] = ()


class Stream:
    """A handle of a queue; several handles may have one queue."""

    def __init__(self, cuda: Cuda, queue: Queue) -> None:
        self._cuda, self.queue = cuda, queue
        self.stream_id = id(queue)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue)

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class Event:
    def __init__(self, cuda: Cuda, *, enable_timing: bool = False) -> None:
        self._cuda, self.enable_timing = cuda, enable_timing
        self.after: tuple[Node, ...] = ()
        self.capture: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        queue = (stream or self._cuda.current_stream()).queue
        self.after, self.capture = queue.tail, self._cuda.capture_of(queue)

    def wait(self, stream: Stream | None = None) -> None:
        queue, capture = (stream or self._cuda.current_stream()).queue, self._cuda.capture
        if self.capture is not None and self.capture is capture:
            capture.join(queue)
        elif self.capture is not None or self._cuda.capture_of(queue) is not None:
            raise CaptureError("a graph and work outside of it wait for each other")
        queue.tail = (*queue.tail, *(node for node in self.after if node not in queue.tail))

    def query(self) -> bool:
        if self.capture is not None or self._cuda.capture is not None:
            raise CaptureError("an event is queried")
        return False  # the host never knows how far the device has got

    def synchronize(self) -> None:
        raise HostSyncError("an event is waited for by the host")


class Cuda:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.current = recorder, OTHER
        self.captured: int | None = None  # a device whose current stream a graph captures
        self.capture: Capture | None = None
        self._pools = {device: [Queue(device) for _ in range(POOL)] for device in (HOME, OTHER)}
        self._taken = dict.fromkeys(self._pools, 0)
        self._streams = {device: Stream(self, Queue(device)) for device in self._pools}

    def patched(self) -> mock._patch[Any]:
        """Puts these functions in the place of torch.cuda's."""
        return mock.patch.multiple(
            torch.cuda,
            Stream=self.new_stream,
            Event=partial(Event, self),
            current_stream=self.current_stream,
            stream=self.stream,
            device=self.device,
            current_device=lambda: self.current,
            is_current_stream_capturing=self.is_capturing,
        )

    @property
    def home(self) -> Queue:
        """Where operators on the rank's tensors are queued now, whichever device is current."""
        return self._streams[HOME].queue

    def is_capturing(self) -> bool:
        here = self._streams[self.current].queue
        return self.current == self.captured or self.capture_of(here) is not None

    def capture_of(self, queue: Queue) -> Capture | None:
        taken = self.capture is not None and queue in self.capture.before
        return self.capture if taken else None

    def _index(self, device: torch.device | int | None) -> int:
        if device is None or isinstance(device, int):
            return self.current if device is None else device
        return HOME if device.type == "cpu" else device.index

    def new_stream(self, device: torch.device | None = None) -> Stream:
        index = self._index(device)
        self._taken[index] += 1
        return Stream(self, self._pools[index][self._taken[index] % POOL])

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._streams[self._index(device)]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        index = stream.queue.device
        device, before = self.current, self._streams[index]
        self.current, self._streams[index] = index, stream
        try:
            yield
        finally:
            self.current, self._streams[index] = device, before

    @contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(setattr, self, "current", self.current)
            self.current = self._index(device)
            yield
