"""Streams and events of a device that queues its operators: CUDA's.

All of the package's calls use streams through this module, so that tests can replace CUDA. Every
function names its device: torch's current device may be another one than the tensors'.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor

Stream = torch.cuda.Stream
Event = torch.cuda.Event

# Nanoseconds of the host's clock; on a device with streams, an event on a stream. It is None if
# nothing is measured.
Moment = int | Event | None

Work = Callable[[], object]

# torch has so many streams a device, and gives them out in a circle.
POOL = 32

# Streams of `new` that are still held.
_held: weakref.WeakSet[Stream] = weakref.WeakSet()
_lock = threading.Lock()


def are_used(device: torch.device) -> bool:
    """Return whether the device queues operators on streams; else they run synchronously."""
    return device.type == "cuda"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU torch's current one within the block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def new(device: torch.device) -> Stream:
    """A stream on the device, which is neither current nor held by another caller of `new`.

    Exchanges that share a stream wait for each other, and ranks could wait in a circle.
    """
    with _lock:
        for _ in range(POOL):
            stream = torch.cuda.Stream(device)
            if stream not in _held and stream != current(device):
                _held.add(stream)
                return stream
    raise RuntimeError(
        f"all {POOL} streams that torch has on {device} are in use: each process group, subgroup "
        "and channel of ring_attn needs one; destroy process groups that are not used any more"
    )


def num_held() -> int:
    """The number of streams of `new` that are still held."""
    return len(_held)


def current(device: torch.device) -> Stream:
    """The stream on which the device's operators are queued now."""
    return torch.cuda.current_stream(device)


def use(stream: Stream) -> AbstractContextManager[object]:
    """Queue the block's operators on another stream; make its device torch's current one."""
    return torch.cuda.stream(stream)


def record(device: torch.device) -> Event:
    """An event after all work queued so far on the device's current stream."""
    return record_on(current(device))


def record_on(stream: Stream) -> Event:
    """An event after all work queued so far on a stream."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def moment(stream: Stream) -> Event:
    """An event on a stream that notes the time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Return seconds between two moments; on a device with streams, wait for the second."""
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) * 1e-9
    first, last = cast("tuple[torch.cuda.Event, torch.cuda.Event]", (start, end))
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds * 1e-3


def wait(event: Event, device: torch.device) -> None:
    """Make the device's current stream wait for an event."""
    event.wait(current(device))


def side_by_side(device: torch.device, side: Stream | None, first: Work, *others: Work) -> None:
    """Queue independent works side by side: the first on the current stream, others on `side`.

    Kernels of later works fill the multiprocessors that earlier works leave idle: dq runs beside
    dk and dv, whose programs are long and few. The current stream waits for all works. Without
    `side` all works run one after another on the current stream.
    """
    if side is None or not others:
        for work in (first, *others):
            work()
        return
    ready = record(device)
    first()
    with use(side):
        wait(ready, device)
        for work in others:
            work()
        done = record(device)
    wait(done, device)


def lend(x: Tensor) -> None:
    """Keep memory that another stream has allocated until the current stream has used it."""
    x.record_stream(current(x.device))


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor in pinned memory, which the device accesses without the host."""
    with torch.cuda.device(device):
        return x.pin_memory()
