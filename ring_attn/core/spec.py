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

from ring_attn.core.dtypes import accum_dtype

# Vector loads and TMA need 16-byte aligned tensors; a message of no bytes is avoided, since
# transports differ on it.
ALIGNMENT = 16


@dataclass(frozen=True)
class Packet:
    """Tensors of given shapes and dtypes, one after another in a byte buffer."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor, and the end."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = prod(shape) * dtype.itemsize
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return max(self.offsets[-1], ALIGNMENT)

    @cached_property
    def padded(self) -> bool:
        """Whether some of its bytes belong to no tensor."""
        used = (prod(s) * dtype.itemsize for s, dtype in zip(self.shapes, self.dtypes, strict=True))
        return sum(used) != self.nbytes

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
    """How a raw product x = q k^T becomes a score, `softmax_scale * x`, and where it is capped.

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
        """Type of the state and of gradients on their way: float32, or float64 for float64."""
        return accum_dtype(self.dtype)

    def kv_packet(self, rows: int) -> Packet:
        """K and V of so many rows."""
        return _kv_packet(self, rows, self.dtype)

    def kv_grad_packet(self, rows: int) -> Packet:
        """dK and dV of so many rows, as they are accumulated."""
        return _kv_packet(self, rows, self.accum_dtype)

    def q_packet(self, rows: int) -> Packet:
        """The Q side of so many rows in the backward: Q, dO, lse, delta."""
        return _q_packet(self, rows)

    def q_grad_packet(self, rows: int) -> Packet:
        """dQ of so many rows, as it is accumulated."""
        return _q_grad_packet(self, rows)


@lru_cache(maxsize=4096)
def _kv_packet(spec: AttentionSpec, rows: int, dtype: torch.dtype) -> Packet:
    lead = (spec.batch, rows, spec.nheads_kv)
    return Packet(((*lead, spec.headdim), (*lead, spec.headdim_v)), (dtype, dtype))


@lru_cache(maxsize=4096)
def _q_packet(spec: AttentionSpec, rows: int) -> Packet:
    lead, statistics = (spec.batch, rows, spec.nheads), (spec.batch, spec.nheads, rows)
    shapes = ((*lead, spec.headdim), (*lead, spec.headdim_v), statistics, statistics)
    return Packet(shapes, (spec.dtype, spec.dtype, spec.accum_dtype, spec.accum_dtype))


@lru_cache(maxsize=4096)
def _q_grad_packet(spec: AttentionSpec, rows: int) -> Packet:
    return Packet(((spec.batch, rows, spec.nheads, spec.headdim),), (spec.accum_dtype,))


# Thread blocks of NCCL's copies. In a model of 8 steps of 1 ms they cost 0 % of the time where a
# copy takes 0.15 ms, and 4 % where it takes 0.75 ms; NCCL's own 32 cost 6 % and 40 %.
MAX_CTAS = 8


@dataclass(frozen=True)
class TransportOptions:
    """How shards travel between the ranks; equal on every rank.

    Every message says which call it belongs to: its number, direction, and a digest of all that
    ranks must agree on, the values of sinks included.

    On gloo a message of another call is never received. Ranks that skipped a call, passed other
    arguments or run their backwards in another order all raise, mostly within a second, and are
    told which argument differs. A rank that leaves a call by an exception tells the others, and
    they raise; one that dies or stalls is an error that names step, peer and timeout; one that does
    not come to the first call is named. Afterwards the process group refuses every further call.

    On NCCL the device compares the identities, which travel as 64 bytes beside each message, and
    the host raises at the start of a later call. Before the first call of a kind all ranks connect,
    compile their kernels and wait for each other: a rank that does not come is named, and no
    exchange waits for a compiler. Afterwards no host waits: an exchange that has not ended within
    the timeout is named, with step, peer and channel, in an error of the logger "ring_attn" and on
    the other ranks; 10 s later torch's watchdog ends the process, since its device would go on with
    what has not arrived. A rank that leaves a call by an exception cuts its exchanges off: what is
    sent after that is a message of no call, and the receiver raises. That rank's own results of
    earlier calls are then only good where its device had finished them: restart from a checkpoint.
    None of this has run on a GPU.

    Attributes:
        timeout: seconds, from 0.001 to 1e9, that a rank waits for a peer before it raises, or on
            NCCL says so; None is the timeout of the group that is passed in.
        nccl_max_ctas: at most so many thread blocks (each takes an SM) for NCCL's copies, so that
            they do not starve the attention kernel; None is 8. Refused on other backends.
    """

    timeout: float | None = None
    nccl_max_ctas: int | None = None
