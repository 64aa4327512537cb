"""Global and shared memory with checks of bounds; shared memory also notes its accesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.ptx.faults import NotFenced, OutOfBounds
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.races import GRANULE, Clocks, Shadow

Array = NDArray[Any]

GLOBAL_BASE = 1 << 36
# The first KiB is reserved for the system.
SHARED_BASE = 1 << 10
# Alignment of tensors and of shared memory; also the gap after each tensor.
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


class SharedMemory(Memory):
    """Shared memory of one CTA, which starts as NaN."""

    def __init__(
        self, num_bytes: int, clocks: Clocks, missing_fences: dict[Instruction, NotFenced]
    ) -> None:
        super().__init__("shared", SHARED_BASE, num_bytes)
        self.bytes[:] = 0xFF
        self.stop[:num_bytes] = num_bytes
        self.clocks = clocks
        self.shadow = Shadow(self.bytes.size, clocks, missing_fences)

    def read(
        self, ins: Instruction, offset: Array, size: int, warps: Array, *, proxy: bool = False
    ) -> None:
        """Notes reads of `size` bytes by lanes of the warps."""
        at, of = _granules(offset, size, warps)
        clock = self.clocks.seen[of, of]
        self.shadow.on_read(ins, at, of, reader=of, clock=clock, proxy=proxy)

    def written(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        at, of = _granules(offset, size, warps)
        clock = self.clocks.seen[of, of]
        self.shadow.on_write(ins, at, of, writer=of, clock=clock, proxy=False)

    def copied(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        """Notes writes by `cp.async`, in the open group of the warp."""
        at, of = _granules(offset, size, warps)
        clock = self.clocks.copy_groups[of] + 1
        writer = self.clocks.copies_of(of)
        self.shadow.on_write(ins, at, of, writer=writer, clock=clock, proxy=False)

    def multiplied(self, ins: Instruction, offset: Array, group: int) -> None:
        """Notes reads of 16 bytes by `wgmma`; all four warps must know the last writes."""
        at, _ = _granules(offset, 16, offset)
        for warp in range(4 * group, 4 * group + 4):
            warps = np.full(at.shape, warp)
            clock = self.clocks.product_groups[warps] + 1
            reader = self.clocks.num_warps + warps
            self.shadow.on_read(ins, at, warps, reader=reader, clock=clock, proxy=True)

    def landed(self, ins: Instruction, offset: Array, warp: int, mbarrier: int, phase: int) -> None:
        """Notes writes of 16 bytes by a bulk copy that `warp` has started."""
        at, _ = _granules(offset, 16, offset)
        warps = np.full(at.shape, warp)
        writer = np.full(at.shape, self.clocks.mbarriers + mbarrier)
        clock = np.full(at.shape, phase)
        self.shadow.on_write(ins, at, warps, writer=writer, clock=clock, proxy=True)


def _granules(offset: Array, size: int, owners: Array) -> tuple[Array, Array]:
    """The granules of `size` bytes at each offset, and the owner of each."""
    first = offset // GRANULE
    if size <= GRANULE:
        return first, owners
    steps = np.arange(size // GRANULE)
    return (first[:, None] + steps).ravel(), np.repeat(owners, size // GRANULE)
