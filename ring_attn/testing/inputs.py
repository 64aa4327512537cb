"""Random inputs of calls, and memory that starts as NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attn.core.oracle import Inputs

# Makes logits differ by hundreds: rows become one-hot, and exp(s) without its maximum overflows.
LARGE_LOGITS = 64.0


def random_qkv(
    *,
    batch: int = 1,
    seqlen_q: int = 113,
    seqlen_k: int | None = None,
    nheads: int = 4,
    nheads_kv: int | None = None,
    headdim: int = 32,
    headdim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    noncontiguous: bool = False,
    large_logits: bool = False,
) -> Inputs:
    """Normally distributed inputs; equal sizes and seed give equal values on every machine.

    Sizes left out equal their counterparts: `seqlen_k`, `nheads_kv`, `headdim_v`. The numbers are
    drawn on the CPU.

    Args:
        noncontiguous: see `strided`; no stride is a contiguous tensor's.
        large_logits: logits that differ by hundreds.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    nheads_kv = nheads if nheads_kv is None else nheads_kv
    headdim_v = headdim if headdim_v is None else headdim_v
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, dim: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(batch, rows, heads, dim, generator=generator, dtype=torch.float64)
        x = (x * scale).to(device, dtype)
        return strided(x) if noncontiguous else x

    return Inputs(
        draw(seqlen_q, nheads, headdim, LARGE_LOGITS if large_logits else 1.0),
        draw(seqlen_k, nheads_kv, headdim),
        draw(seqlen_k, nheads_kv, headdim_v),
        draw(seqlen_q, nheads, headdim_v),
    )


def strided(x: Tensor) -> Tensor:
    """Return a copy whose memory has heads before rows, and a gap after every element."""
    spread = x.new_zeros(*x.transpose(-2, -3).shape, 2)
    spread[..., 0] = x.transpose(-2, -3)
    return spread[..., 0].transpose(-2, -3)


def random_sinks(
    nheads: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """(nheads,) sinks of the size of ordinary scores; the first is so low that its weight is 0.

    All values are exact in bfloat16, so that no dtype of a call rounds them.
    """
    generator = torch.Generator().manual_seed(seed)
    sinks = 2.0 * torch.randn(nheads, generator=generator, dtype=torch.float64)
    sinks[0] = -1e4
    return sinks.to(torch.bfloat16).to(device, dtype)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Make `torch.empty` and its relatives return NaN within the block.

    So code that reads memory before writing it fails every time, not once in a while. Integers get
    bytes of 0xFF: a uint8 buffer reads as NaN in every floating-point dtype.
    """
    makers: dict[Any, tuple[str, ...]] = {
        torch: ("empty", "empty_like", "empty_strided"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }
    with ExitStack() as stack:
        for owner, names in makers.items():
            for name in names:
                poisoned = _poisoned(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(math.nan)
            if x.dtype == torch.bool:
                return x.fill_(True)
            return x.fill_(torch.iinfo(x.dtype).max if x.dtype == torch.uint8 else -1)

    return poisoned
