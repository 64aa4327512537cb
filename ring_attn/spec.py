"""The sizes, types and options of a call, and the messages that travel in it: pure data.

A `Packet` lays several tensors out in one flat byte buffer, so that K and V, or the whole Q side,
are one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

# Vector loads and TMA want 16-byte aligned tensors; a message of no bytes is avoided, since
# transports differ on it.
ALIGNMENT = 16


@dataclass(frozen=True)
class Packet:
    """Tensors of given shapes and dtypes, one after another in a byte buffer.

    Attributes:
        shapes: of the views that are handed out.
        dtypes: of each.
        heads_first: (batch, rows, heads, dim) tensors lie in memory as (batch, heads, rows, dim).
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    heads_first: bool = False

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor, and the end."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = prod(shape) * dtype.itemsize
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return max(self.offsets[-1], ALIGNMENT)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors as views of a (>= nbytes,) uint8 buffer."""
        views = []
        for shape, dtype, start in zip(self.shapes, self.dtypes, self.offsets, strict=False):
            flat = buffer[start : start + prod(shape) * dtype.itemsize].view(dtype)
            if self.heads_first:
                batch, rows, heads, dim = shape
                views.append(flat.view(batch, heads, rows, dim).transpose(1, 2))
            else:
                views.append(flat.view(shape))
        return tuple(views)


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend, a message and a cost need to know of a call, apart from lengths and mask."""

    device_type: str
    dtype: torch.dtype
    batch: int
    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int

    @property
    def accum_dtype(self) -> torch.dtype:
        """Type of the state and of gradients on their way: float32, or float64 for float64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def kv_packet(self, rows: int) -> Packet:
        """K and V of a shard.

        Heads first: the copy that packs is made anyway, and torch's CPU operator runs 3 % faster
        forward and 2 % backward where the rows of a head lie together (4k x 4k, 8 heads of 64,
        float32, one thread).
        """
        return _kv_packet(self.batch, rows, self.nheads_kv, self.dims, self.dtype, True)

    def kv_grad_packet(self, rows: int) -> Packet:
        """dK and dV of a shard as they are accumulated, laid out as they are returned."""
        return _kv_packet(self.batch, rows, self.nheads_kv, self.dims, self.accum_dtype, False)

    def q_packet(self, rows: int) -> Packet:
        """The Q side of a shard in the backward: Q, dO, lse, delta."""
        return _q_packet(self.batch, rows, self.nheads, self.dims, self.dtype, self.accum_dtype)

    def q_grad_packet(self, rows: int) -> Packet:
        """dQ of a shard, as it is accumulated."""
        return _q_grad_packet(self.batch, rows, self.nheads, self.headdim, self.accum_dtype)

    @property
    def dims(self) -> tuple[int, int]:
        """headdim and headdim_v."""
        return self.headdim, self.headdim_v


@dataclass(frozen=True)
class TransportOptions:
    """How the ring's own process groups are made; equal on every rank.

    Attributes:
        timeout: seconds that a rank waits for a peer before it raises; None is the timeout of the
            group that is passed in. On NCCL it is the timeout of torch's watchdog.
        nccl_max_ctas: at most so many thread blocks (each takes an SM) for NCCL's copies, so that
            they do not starve the attention kernel; None leaves it to NCCL. Refused on other
            backends.
    """

    timeout: float | None = None
    nccl_max_ctas: int | None = None


@lru_cache(maxsize=1024)
def _kv_packet(
    batch: int, rows: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, heads_first: bool
) -> Packet:
    shapes = tuple((batch, rows, heads, dim) for dim in dims)
    return Packet(shapes, (dtype, dtype), heads_first)


@lru_cache(maxsize=1024)
def _q_packet(
    batch: int,
    rows: int,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    accum_dtype: torch.dtype,
) -> Packet:
    statistics = (batch, heads, rows)
    shapes = (*((batch, rows, heads, dim) for dim in dims), statistics, statistics)
    return Packet(shapes, (dtype, dtype, accum_dtype, accum_dtype))


@lru_cache(maxsize=1024)
def _q_grad_packet(batch: int, rows: int, heads: int, headdim: int, dtype: torch.dtype) -> Packet:
    return Packet(((batch, rows, heads, headdim),), (dtype,))
