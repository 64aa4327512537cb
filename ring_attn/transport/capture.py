"""Calls that a CUDA graph captures, to be replayed without the host.

A replay launches the kernels and NCCL's exchanges of the captured call again, on the same memory.
What the host does is done once, at the capture: it may neither wait nor read results, and all that
it makes for later calls must be there before, from an equal call that is not captured. Within a
capture

    events      belong to the graph: none from before is waited for, none is queried
    buffers     are of the graph's own memory; tables from before are kept for good
    messages    carry one header at all replays; nobody watches them, neither this package nor torch
    figures     are not taken: `collect` and profilers' ranges are of calls that are not captured

NCCL and torch ask of the user what nothing here can check: `torch.cuda.graph`, which waits for the
device first; the same captures on all ranks, and the same replays; and all of them in one order
from one thread, as CUDA can deadlock where threads launch graphs of several communicators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ring_attn.transport import streams

P = ParamSpec("P")
T = TypeVar("T")


class _Call(threading.local):
    is_captured = False


_call = _Call()


def captures(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the current stream of the device."""
    if not streams.are_used(device):
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def a_call(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function on the GPU of its first tensor, and note whether a graph captures it.

    So code that knows no tensor, such as the choice of a backend, asks the right GPU.
    """

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        given = (x.device for x in (*args, *keywords.values()) if isinstance(x, Tensor))
        device = next(given, torch.device("cpu"))
        with streams.on(device):
            before, _call.is_captured = _call.is_captured, captures(device)
            try:
                return function(*args, **keywords)
            finally:
                _call.is_captured = before

    return call


def is_on() -> bool:
    """Return whether the call under way in this thread is captured."""
    return _call.is_captured


def refuse(why: str) -> None:
    """Refuse a captured call that needs the host."""
    if is_on():
        raise NotImplementedError(f"this call cannot be captured in a CUDA graph: {why}")
