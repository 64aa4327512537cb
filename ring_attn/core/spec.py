"""The sizes, types and options of a call: pure data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attn.core.dtypes import accum_dtype


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
        """Return the spec of tensors (batch, rows, heads, dim) or (rows, heads, dim)."""
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
