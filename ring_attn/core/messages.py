"""Messages, which place tensors in a byte buffer: pure data.

    Packet     tensors one after another, each contiguous: K and V, or the whole Q side
    Records    tensors side by side, one record for each row, batch entry and head
    Parcels    messages one after another, one for each receiver or sender
    Gathered   messages of equal size of all ranks, in the order of the ranks

A message has `nbytes`, and `views(buffer)` returns its tensors as views of a uint8 buffer with at
least that many bytes.
Statistics (lse, delta) are (batch, heads, rows), all other tensors (batch, rows, heads, dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

# Vector loads and TMA need tensors aligned to 16 bytes. This is also the smallest size of a
# message, because transports treat empty messages differently.
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
            offsets.append(offsets[-1] + _multiple(prod(shape) * dtype.itemsize, ALIGNMENT))
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        return max(self.offsets[-1], ALIGNMENT)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as views of a (>= nbytes,) uint8 buffer."""
        tensors = []
        for shape, dtype, start in zip(self.shapes, self.dtypes, self.offsets, strict=False):
            size = prod(shape) * dtype.itemsize
            tensors.append(buffer[start : start + size].view(dtype).view(shape))
        return tuple(tensors)


@dataclass(frozen=True)
class Records:
    """A message whose tensors lie side by side, one record for each row, batch entry and head.

    The messages of several ranks, received one after another, then form one tensor of all their
    rows with one stride between rows, without a copy:

        message of rank 0              message of rank 1
        row 0    row 1    row 2        row 0    row 1 ...
        [K V..]  [K V..]  [K V..]      [K V..]  [K V..]            .. to multiples of 16 bytes

    There is at least one row.

    Attributes:
        batch, rows, heads: sizes that all tensors have.
        fields: (dim, dtype) of each tensor; the dim of a statistic is None.
    """

    batch: int
    rows: int
    heads: int
    fields: tuple[tuple[int | None, torch.dtype], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field in a record, and the length of a record."""
        offsets = []
        end = 0
        for dim, dtype in self.fields:
            # Kernels load statistics one by one, and the row of a head in units of 16 bytes.
            start = _multiple(end, dtype.itemsize if dim is None else ALIGNMENT)
            offsets.append(start)
            end = start + (dim or 1) * dtype.itemsize
        return (*offsets, _multiple(end, ALIGNMENT))

    @property
    def nbytes(self) -> int:
        return self.batch * self.rows * self.heads * self.offsets[-1]

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as views of the uint8 bytes of n messages.

        They are (batch, n * rows, heads, dim); statistics are (batch, heads, n * rows).
        """
        records = buffer.view(-1, self.batch, self.heads, self.offsets[-1])  # rows first
        records = records.transpose(0, 1)  # (batch, n * rows, heads, bytes of a record)
        tensors = []
        for (dim, dtype), start in zip(self.fields, self.offsets, strict=False):
            x = records[..., start : start + (dim or 1) * dtype.itemsize].view(dtype)
            if dim is None:
                x = x.squeeze(-1).transpose(1, 2)  # -> (batch, heads, n * rows)
            tensors.append(x)
        return tuple(tensors)


@dataclass(frozen=True)
class Parcels:
    """Packets one after another, one for each receiver or sender."""

    parts: tuple[Packet, ...]

    @cached_property
    def counts(self) -> list[int]:
        """Bytes of each part."""
        return [part.nbytes for part in self.parts]

    @cached_property
    def nbytes(self) -> int:
        return sum(self.counts)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of all parts, in order, as views of the buffer."""
        tensors: list[Tensor] = []
        part_buffers = buffer[: self.nbytes].split(self.counts)
        for part, part_buffer in zip(self.parts, part_buffers, strict=True):
            tensors += part.views(part_buffer)
        return tuple(tensors)


@dataclass(frozen=True)
class Gathered:
    """The messages of `count` ranks, which have equal sizes, in the order of the ranks.

    Records form one tensor of all rows; the tensors of packets get a leading dim of `count`.
    """

    part: Packet | Records
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.part.nbytes

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of all ranks as views of the buffer."""
        buffer = buffer[: self.nbytes]
        if isinstance(self.part, Records):
            return self.part.views(buffer)
        of_first_rank = self.part.views(buffer[: self.part.nbytes])
        return tuple(
            first.as_strided(
                (self.count, *first.shape),
                (self.part.nbytes // first.itemsize, *first.stride()),
                first.storage_offset(),
            )
            for first in of_first_rank
        )


Message = Packet | Records | Parcels | Gathered


def largest_nbytes(*messages: Message) -> int:
    """Return the size of the longest message in bytes."""
    return max((x.nbytes for x in messages), default=0)


def packet_of(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Packet:
    """Return the packet of tensors that are given as (shape, dtype)."""
    return Packet(tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors))


def _multiple(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
