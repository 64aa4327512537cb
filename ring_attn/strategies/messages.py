"""What the strategies share: buffers and messages on the way in, gradients on the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_attn.core.spec import ALIGNMENT, Packet


def new_buffers(packets: Iterable[Packet], count: int, device: torch.device) -> list[Tensor]:
    """So many uint8 buffers, each as long as the longest of the messages."""
    size = max(packet.nbytes for packet in packets)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]


class Message:
    """The bytes of a buffer that a packet takes, and the tensors in them.

    Whoever needs them often keeps it: slicing and viewing take more of the host's time than a copy.
    """

    def __init__(self, packet: Packet, buffer: Tensor) -> None:
        self.packet = packet
        self.bytes = buffer[: packet.nbytes]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The packet's, as views."""
        return self.packet.views(self.bytes)

    @cached_property
    def numbers(self) -> Tensor:
        """All that it holds as one flat tensor, of its first tensor's type."""
        return self.bytes.view(self.packet.dtypes[0])

    def pack(self, tensors: Sequence[Tensor], rows: slice) -> None:
        """Copies some rows of the tensors into it, of dim 1 of 4-D ones and dim 2 of statistics."""
        for view, x in zip(self.tensors, tensors, strict=True):
            view.copy_(x[:, rows] if x.ndim == 4 else x[:, :, rows])


def zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros of that shape, for gradients to be added to."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def rounded_gradient(grad: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """`factor * grad` in that type, rounded once; `grad` is used up."""
    if factor == 1.0:
        return grad.to(dtype)
    if grad.dtype == dtype:
        return grad.mul_(factor)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(nheads,) -sum exp(sink - lse) delta over the rows: a sink takes weight and has no value."""
    # Rows that see nothing beside a sink of -inf: their delta is 0, and must not meet a NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_()
    return weight.mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


@dataclass(frozen=True)
class Records:
    """A message whose tensors lie side by side, one record for each row, batch entry and head.

    So messages that are received one after another are one tensor of all their rows, with one
    stride between rows, and nothing has to be copied together:

        message of rank 0              message of rank 1
        row 0    row 1    row 2        row 0    row 1 ...
        [K V..]  [K V..]  [K V..]      [K V..]  [K V..]            .. to multiples of 16 bytes

    Attributes:
        batch: entries of dim 0.
        rows: of the message, at least 1.
        heads: entries of dim 2.
        fields: dim and dtype of each tensor, (batch, rows, heads, dim).
    """

    batch: int
    rows: int
    heads: int
    fields: tuple[tuple[int, torch.dtype], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field in a record, and the length of a record."""
        offsets, end = [], 0
        for dim, dtype in self.fields:
            # Statistics are read one by one, rows of a head in loads of 16 bytes.
            start = _multiple(end, dtype.itemsize if dim == 1 else ALIGNMENT)
            offsets.append(start)
            end = start + dim * dtype.itemsize
        return (*offsets, _multiple(end, ALIGNMENT))

    @property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return self.batch * self.rows * self.heads * self.offsets[-1]

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """(batch, n * rows, heads, dim) each, as views of the uint8 bytes of n messages."""
        records = buffer.view(-1, self.batch, self.heads, self.offsets[-1]).transpose(0, 1)
        return tuple(
            records[..., start : start + dim * dtype.itemsize].view(dtype)
            for (dim, dtype), start in zip(self.fields, self.offsets, strict=False)
        )

    def pack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies tensors of at most `rows` rows into a message; the rows that are left are 0."""
        for view, x in zip(self.views(buffer), tensors, strict=True):
            view[:, : x.size(1)] = x
            view[:, x.size(1) :] = 0


def _multiple(size: int, unit: int) -> int:
    """The least multiple of `unit` that is no less."""
    return -(-size // unit) * unit
