"""Streams and events of a device that queues its operators: CUDA's.

All of the package's calls use streams through this module, so that tests can replace CUDA's
streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Stream = torch.cuda.Stream
Event = torch.cuda.Event
Work = Callable[[], object]


def are_used(device: torch.device) -> bool:
    """Whether the device queues operators on streams; otherwise operators run synchronously."""
    return device.type == "cuda"


def new(device: torch.device) -> Stream:
    """A new stream on the device."""
    return torch.cuda.Stream(device)


def current(device: torch.device) -> Stream:
    """The stream on which operators are queued now."""
    return torch.cuda.current_stream(device)


def use(stream: Stream) -> AbstractContextManager[object]:
    """Queues the block's operators on another stream."""
    return torch.cuda.stream(stream)


def record(device: torch.device) -> Event:
    """An event after all work queued so far on the current stream."""
    event = torch.cuda.Event()
    event.record(current(device))
    return event


def moment(stream: Stream) -> Event:
    """An event on a stream that notes the time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def wait(event: Event) -> None:
    """Makes the current stream wait for an event."""
    event.wait()


def side_by_side(device: torch.device, first: Work, *others: Work) -> None:
    """Queues independent works side by side: the first on the current stream, others on new ones.

    Kernels of later works fill the multiprocessors that earlier works leave idle: dq runs beside
    dk and dv, whose programs are long and few. The current stream waits for all works.
    """
    ready = record(device) if others and are_used(device) else None
    first()
    for work in others:
        if ready is None:
            work()
            continue
        with use(new(device)):
            wait(ready)
            work()
            done = record(device)
        wait(done)


def lend(x: Tensor) -> None:
    """Keeps memory that another stream has allocated until the current stream has used it."""
    x.record_stream(current(x.device))


def overwrite(x: Tensor) -> None:
    """Zeroes a tensor at once, on a new stream; the host waits for that stream only."""
    stream = new(x.device)
    with use(stream):
        x.zero_()
    stream.synchronize()


def pinned(x: Tensor) -> Tensor:
    """A copy of a CPU tensor in pinned memory, which the device accesses without the host."""
    return x.pin_memory()
