"""Random inputs of calls, and new memory filled with NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from ring_attn.core.oracle import Inputs

# A factor with which logits differ by hundreds: probabilities become one-hot, and exp(s) overflows
# unless the maximum is subtracted.
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
    """Return normally distributed q, k, v and dout.

    The same sizes and seed give the same values on every machine, since the numbers are drawn on
    the CPU.

    Args:
        batch, seqlen_q, nheads, headdim: sizes of q, (batch, seqlen_q, nheads, headdim).
        seqlen_k: number of keys. Default: seqlen_q.
        nheads_kv: number of heads of k and v. Default: nheads.
        headdim_v: head dim of v. Default: headdim.
        dtype: the dtype to which the numbers are rounded.
        device: device of the tensors.
        seed: seed of the numbers.
        noncontiguous: whether all strides differ from those of a contiguous tensor.
        large_logits: whether logits differ by hundreds.

    Example:
        >>> random_qkv(seqlen_q=7, nheads=4, nheads_kv=2).k.shape
        torch.Size([1, 7, 2, 32])
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
        q=draw(seqlen_q, nheads, headdim, scale=LARGE_LOGITS if large_logits else 1.0),
        k=draw(seqlen_k, nheads_kv, headdim),
        v=draw(seqlen_k, nheads_kv, headdim_v),
        dout=draw(seqlen_q, nheads, headdim_v),
    )


def strided(x: Tensor) -> Tensor:
    """Return a copy whose memory has heads before rows, and a gap after every element."""
    by_heads = x.transpose(-2, -3)  # (batch, heads, rows, dim)
    with_gaps = by_heads.new_zeros(*by_heads.shape, 2)  # (batch, heads, rows, dim, 2)
    with_gaps[..., 0] = by_heads
    return with_gaps[..., 0].transpose(-2, -3)  # (batch, rows, heads, dim)


def random_sinks(
    nheads: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return (nheads,) sinks of the size of ordinary scores.

    The first sink is so low that its weight is 0. All values are exact in bfloat16, so that no
    dtype of a call rounds them.

    Example:
        >>> random_sinks(3).shape
        torch.Size([3])
    """
    generator = torch.Generator().manual_seed(seed)
    sinks = 2.0 * torch.randn(nheads, generator=generator, dtype=torch.float64)
    sinks[0] = -1e4
    return sinks.to(torch.bfloat16).to(device, dtype)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill tensors of `torch.empty` and similar functions with NaN within a context.

    So code that reads memory before writing it fails always, and not only sometimes. Integers get
    bytes of 0xFF, so that a uint8 buffer is NaN in every floating-point dtype.

    Example:
        >>> with poisoned_empty():
        ...     torch.empty(2)
        tensor([nan, nan])
    """
    makers: dict[object, tuple[str, ...]] = {
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
    def poisoned(*args: object, **kwargs: object) -> Tensor:
        x = make(*args, **kwargs)
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(math.nan)
            if x.dtype == torch.bool:
                return x.fill_(True)
            all_bits = torch.iinfo(x.dtype).max if x.dtype == torch.uint8 else -1
            return x.fill_(all_bits)

    return poisoned
