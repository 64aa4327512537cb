"""Tensors of a device that are made once and used on any of its streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ring_attn.transport import capture, streams

T = TypeVar("T")

# Tensors that graphs read. No event marks the end of a graph, so they are kept for good.
_read_by_graphs: set[Tensor] = set()


class Cached(Generic[T]):
    """A value that other streams use once the stream that made it has finished it."""

    def __init__(self, value: T, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Take a value whose work is queued on the current stream, and the value's tensors."""
        self.value, self._tensors, self._device = value, tuple(tensors), device
        self._queued = streams.are_used(device)
        if self._queued:
            self._made = streams.record(device)
            self._ready = {streams.current(device)}

    def get(self) -> T:
        """The value, for work on the current stream.

        A graph cannot wait for work before its capture; torch waits for that when capture begins.
        """
        if capture.is_on():
            _read_by_graphs.update(self._tensors)
            return self.value
        if self._queued and (stream := streams.current(self._device)) not in self._ready:
            streams.wait(self._made, self._device)
            for x in self._tensors:
                streams.lend(x)
            self._ready.add(stream)
        return self.value
