"""The sizes, types and options of a call, and the messages that travel in it: pure data.

A `Packet` lays several tensors out in one flat byte buffer, so that K and V, or the whole Q side,
are one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ring_attn.core.dtypes import accum_dtype

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
        typed = {dtype: buffer[: self.nbytes].view(dtype) for dtype in set(self.dtypes)}
        return tuple(
            typed[dtype].as_strided(
                shape, strides, typed[dtype].storage_offset() + start // dtype.itemsize
            )
            for shape, strides, dtype, start in zip(
                self.shapes, self._strides, self.dtypes, self.offsets, strict=False
            )
        )

    @cached_property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))) for shape in self.shapes
        )


@dataclass(frozen=True)
class Scores:
    """Scale and cap of scores: a raw product x = q k^T becomes `softmax_scale * x`.

    With softcap > 0 the score is `softcap * tanh(softmax_scale * x / softcap)`.
    """

    softmax_scale: float
    softcap: float = 0.0


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes, types and options of a call, apart from lengths and mask."""

    device_type: str
    dtype: torch.dtype
    batch: int
    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int
    softcap: float = 0.0
    sinks: bool = False
    max_logits: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        max_logits: bool = False,
    ) -> AttentionSpec:
        """The spec of a call with tensors (batch, rows, heads, dim) or (rows, heads, dim)."""
        return cls(
            device_type=q.device.type,
            dtype=q.dtype,
            batch=q.size(0) if q.ndim == 4 else 1,
            nheads=q.size(-2),
            nheads_kv=k.size(-2),
            headdim=q.size(-1),
            headdim_v=v.size(-1),
            softcap=softcap,
            sinks=sinks is not None,
            max_logits=max_logits,
        )

    @property
    def accum_dtype(self) -> torch.dtype:
        return accum_dtype(self.dtype)


# Default number of thread blocks for NCCL's copies. In a model of 8 steps of 1 ms, 8 blocks cost
# 0 % of the time if a copy takes 0.15 ms, and 4 % if it takes 0.75 ms; NCCL's default of 32 costs
# 6 % and 40 %.
MAX_CTAS = 8


@dataclass(frozen=True)
class TransportOptions:
    """Options of the transport, and what happens on errors; equal on every rank.

    Every message identifies its call: by number, direction, and a digest of everything on which
    ranks must agree, including the values of sinks.

    On gloo no rank accepts a message of another call. Ranks that skipped a call, passed other
    arguments or run their backwards in another order all raise, mostly within a second, with the
    argument that differs. A rank that leaves a call by an exception notifies the others, which
    raise. If a rank dies or stalls, the error names step, peer and timeout; if a rank misses the
    first call, the error names the rank. Afterwards the process group refuses every further call.

    On NCCL the identity travels as 64 bytes beside each message. The device compares it, and the
    host raises at the start of a later call. Before the first call of a kind all ranks connect,
    compile their kernels and wait for each other: an error names a missing rank, and no exchange
    waits for a compiler. Afterwards no host waits. If an exchange exceeds the timeout, the logger
    "ring_attn" gets an error with step, peer and channel, here and on the other ranks. 10 s later
    torch's watchdog ends the process, since its device would continue with missing data. A
    rank that leaves a call by an exception aborts its exchanges: its later messages belong to no
    call, and the receiver raises. That rank's results of earlier calls are valid only if its device
    had finished them: restart from a checkpoint. None of this has run on a GPU.

    Attributes:
        timeout: seconds, from 0.001 to 1e9, that a rank waits for a peer before it raises, or on
            NCCL logs the error; None is the timeout of the process group.
        nccl_max_ctas: most thread blocks (each takes an SM) for NCCL's copies, so that they do not
            starve the attention kernel; None is 8. Refused on other backends.
    """

    timeout: float | None = None
    nccl_max_ctas: int | None = None
