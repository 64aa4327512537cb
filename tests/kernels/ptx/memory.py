"""Memory with checks of bounds, and global memory: copies of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.ptx.faults import OutOfBounds
from tests.kernels.ptx.parse import Instruction

Array = NDArray[Any]

GLOBAL_BASE = 1 << 36
# Alignment of tensors; also the gap after each tensor.
ALIGNMENT = 1 << 10


class Memory:
    """Bytes from an address on, of which some are accessible."""

    def __init__(self, name: str, base: int, num_bytes: int) -> None:
        self.name = name
        self.base = base
        self.bytes = np.zeros(-(-num_bytes // 16) * 16, np.uint8)
        self.words = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        # For each accessible byte, the end of its accessible run; 0 for other bytes.
        self.stop = np.zeros(self.bytes.size, np.int64)

    def locate(self, ins: Instruction, address: Array, size: int, lanes: Array) -> Array:
        """Offsets of `size` bytes at each address; OutOfBounds names the first bad address."""
        offset = address - self.base
        inside = (offset >= 0) & (offset < self.stop.size)
        inside &= self.stop[np.where(inside, offset, 0)] >= offset + size
        for wrong, reason in (
            (~inside, f"is outside every allocation of {self.name} memory"),
            (address % size != 0, f"is no multiple of {size}"),
        ):
            if wrong.any():
                first = int(np.argmax(wrong))
                where = f"address {int(address[first]):#x} of thread {int(lanes[first])}"
                raise OutOfBounds(ins, f"{where} {reason}")
        return offset


class GlobalMemory(Memory):
    """Copies of tensors; only their elements are accessible, not the bytes between."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._starts: dict[int, int] = {}
        self._storages: list[tuple[int, Array]] = []
        size = ALIGNMENT
        for x in tensors:
            storage = x.untyped_storage()
            if storage.data_ptr() not in self._starts:
                self._starts[storage.data_ptr()] = size
                raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self._storages.append((size, raw))
                size += -(-raw.size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        super().__init__("global", GLOBAL_BASE, size)
        there = np.zeros(self.bytes.size, np.bool_)
        for start, raw in self._storages:
            self.bytes[start : start + raw.size] = raw
        for x in tensors:
            elements = torch.arange(x.untyped_storage().nbytes() // x.element_size())
            at = elements.as_strided(x.shape, x.stride(), x.storage_offset()).reshape(-1).numpy()
            start = self._starts[x.untyped_storage().data_ptr()]
            for byte in range(x.element_size()):
                there[start + at * x.element_size() + byte] = True
        # For each piece of ALIGNMENT bytes, the number of its tensor.
        starts = [start for start, _ in self._storages]
        self.tensor_at = np.searchsorted(starts, np.arange(0, there.size, ALIGNMENT), "right")
        index = np.arange(there.size)
        ends = np.where(there, there.size, index)
        self.stop[:] = np.where(there, np.minimum.accumulate(ends[::-1])[::-1], 0)

    def address(self, x: Tensor) -> int:
        start = self._starts[x.untyped_storage().data_ptr()]
        return self.base + start + x.storage_offset() * x.element_size()

    def write_back(self) -> None:
        """Copies all bytes back to the tensors."""
        for start, raw in self._storages:
            raw[:] = self.bytes[start : start + raw.size]
