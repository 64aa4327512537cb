"""Streams and events of a device that queues its operators: CUDA's.

Everything of a call that streams put in order asks here, so that tests can put other streams in the
place of CUDA's.
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
    """Whether the device queues operators on streams; else they have run when they return."""
    return device.type == "cuda"


def new(device: torch.device) -> Stream:
    """A stream of its own."""
    return torch.cuda.Stream(device)


def current(device: torch.device) -> Stream:
    """The stream that operators are queued on now."""
    return torch.cuda.current_stream(device)


def use(stream: Stream) -> AbstractContextManager[object]:
    """Queues the operators within on another stream."""
    return torch.cuda.stream(stream)


def record(device: torch.device) -> Event:
    """The moment when the current stream has done what it has been given so far."""
    event = torch.cuda.Event()
    event.record(current(device))
    return event


def wait(event: Event) -> None:
    """Makes the current stream wait for a moment."""
    event.wait()


def side_by_side(device: torch.device, first: Work, *others: Work) -> None:
    """Queues works that do not depend on each other, the first on the current stream.

    Each other has a stream of its own, where its kernels take the places that those before leave,
    as dq beside dk and dv, whose programs are long and few. The current stream waits for all.
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


def overwrite(x: Tensor) -> None:
    """Zeroes a tensor at once, whatever else the device does; the host waits for that alone."""
    stream = new(x.device)
    with use(stream):
        x.zero_()
    stream.synchronize()


def pinned(x: Tensor) -> Tensor:
    """A copy of a CPU tensor in memory that the device copies from and to without the host."""
    return x.pin_memory()
