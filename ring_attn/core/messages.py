"""Places of tensors in the bytes of a message: pure data.

    Packet     tensors one after another, each contiguous: K and V, or the whole Q side
    Records    tensors side by side, one record for each row, batch entry and head
    Parcels    messages one after another, one for each receiver or sender
    Gathered   equal messages of all ranks, in their order

A message has `nbytes`, and `views(buffer)` gives its tensors in a (>= nbytes,) uint8 buffer.
Statistics (lse, delta) are (batch, heads, rows), all other tensors (batch, rows, heads, dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

# Vector loads and TMA need tensors aligned to 16 bytes. Also the least size of a message, since
# transports differ on empty ones.
ALIGNMENT = 16


@dataclass(frozen=True)
class Packet:
    """Tensors of given shapes and dtypes, one after another in a byte buffer."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor, and the end of the last."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = prod(shape) * dtype.itemsize
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        return max(self.offsets[-1], ALIGNMENT)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors as views of a (>= nbytes,) uint8 buffer."""
        return tuple(
            buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for shape, dtype, start in zip(self.shapes, self.dtypes, self.offsets, strict=False)
        )


@dataclass(frozen=True)
class Records:
    """A message whose tensors lie side by side, one record for each row, batch entry and head.

    The messages of several ranks, received one after another, then form one tensor of all their
    rows with one stride between rows, without a copy:

        message of rank 0              message of rank 1
        row 0    row 1    row 2        row 0    row 1 ...
        [K V..]  [K V..]  [K V..]      [K V..]  [K V..]            .. to multiples of 16 bytes

    There is at least one row. `fields` are dim and dtype of each tensor; dim None is a statistic.
    """

    batch: int
    rows: int
    heads: int
    fields: tuple[tuple[int | None, torch.dtype], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field in a record, and the length of a record."""
        offsets, end = [], 0
        for dim, dtype in self.fields:
            # Kernels load statistics one by one, and rows of a head by 16 bytes.
            start = _multiple(end, dtype.itemsize if dim is None else ALIGNMENT)
            offsets.append(start)
            end = start + (dim or 1) * dtype.itemsize
        return (*offsets, _multiple(end, ALIGNMENT))

    @property
    def nbytes(self) -> int:
        return self.batch * self.rows * self.heads * self.offsets[-1]

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """(batch, n * rows, heads, dim) each, as views of the uint8 bytes of n messages."""
        records = buffer.view(-1, self.batch, self.heads, self.offsets[-1]).transpose(0, 1)
        tensors = []
        for (dim, dtype), start in zip(self.fields, self.offsets, strict=False):
            x = records[..., start : start + (dim or 1) * dtype.itemsize].view(dtype)
            tensors.append(x.squeeze(-1).transpose(1, 2) if dim is None else x)
        return tuple(tensors)


@dataclass(frozen=True)
class Parcels:
    parts: tuple[Packet, ...]

    @cached_property
    def counts(self) -> list[int]:
        """Bytes of each part."""
        return [part.nbytes for part in self.parts]

    @cached_property
    def nbytes(self) -> int:
        return sum(self.counts)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        buffers = buffer[: self.nbytes].split(self.counts)
        both = zip(self.parts, buffers, strict=True)
        return tuple(view for part, part_buffer in both for view in part.views(part_buffer))


@dataclass(frozen=True)
class Gathered:
    """The equal messages of `count` ranks, in the order of the ranks.

    Records are one tensor of all rows; a packet's tensors get a leading dim of `count`.
    """

    part: Packet | Records
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.part.nbytes

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        buffer = buffer[: self.nbytes]
        if isinstance(self.part, Records):
            return self.part.views(buffer)
        each = [self.part.views(some) for some in buffer.chunk(self.count)]
        return tuple(
            first.as_strided(
                (self.count, *first.shape),
                (self.part.nbytes // first.itemsize, *first.stride()),
                first.storage_offset(),
            )
            for first in each[0]
        )


# Tensors in a byte buffer: `views` gives them as views of a (>= nbytes,) uint8 buffer.
Message = Packet | Records | Parcels | Gathered


def room_of(*messages: Message) -> int:
    """Bytes of the longest message."""
    return max((x.nbytes for x in messages), default=0)


def packet_of(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Packet:
    return Packet(tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors))


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit
