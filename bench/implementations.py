"""Attention on one device, ours and torch's.

Grouped heads are never repeated. Each implementation gets inputs in its documented layout, made
before the timing: torch (batch, heads, seqlen, dim), ours (batch, seqlen, heads, dim). torch runs
under autograd, ours as a backend is called.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import pair_tiles
from ring_attn.testing import Inputs

# Most characters of a reason, which is one line of a table.
REASON_CHARS = 160


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> AttentionSpec:
        sizes = (self.batch, self.heads, self.kv_heads, self.head_dim, self.head_dim)
        return AttentionSpec(self.device.type, self.dtype, *sizes)

    @property
    def mask(self) -> Mask:
        return Mask(self.seqlen, self.seqlen, self.causal)

    def flops(self, mode: str) -> int:
        """FLOPs of "fwd" (4 x area x head_dim per head), "bwd" (2.5 times that) or "fwd_bwd"."""
        backward = {"fwd": (False,), "bwd": (True,), "fwd_bwd": (False, True)}[mode]
        return sum(flops(self.mask.area, self.spec, backward=back) for back in backward)

    def data(self) -> Inputs:
        """Normally distributed q, k, v, dout, drawn on the device."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int) -> Tensor:
            shape = (self.batch, self.seqlen, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return Inputs(*map(draw, (self.heads, self.kv_heads, self.kv_heads, self.heads)))


class Implementation:
    """An implementation of attention: a forward, then its backward.

    Attributes:
        out: output of the last forward; None before.
        lse: natural logarithm (batch, heads, rows) float32, of implementations that return it.
        grads: gradients of q, k and v from the last backward.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    grads: Sequence[Tensor] = ()

    def forward(self) -> None:
        raise NotImplementedError

    def backward(self) -> None:
        raise NotImplementedError

    def results(self) -> list[Tensor]:
        """out, and after a backward dq, dk, dv: (batch, seqlen, heads, dim)."""
        assert self.out is not None, "forward comes first"
        return [x.detach() for x in (self.out, *self.grads)]

    def release(self) -> None:
        self.out, self.lse, self.grads = None, None, ()


class Differentiable(Implementation):
    """A function of q, k, v that returns out, under autograd.

    `backward`: whether the forward saves tensors for a backward.
    """

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backward: bool
    ) -> None:
        *qkv, self._dout = inputs
        self._function = function
        self._leaves = [x.detach().requires_grad_(backward) for x in qkv]

    def forward(self) -> None:
        self.out = self._function(*self._leaves)

    def backward(self) -> None:
        assert self.out is not None, "forward comes first"
        self.grads = torch.autograd.grad(self.out, self._leaves, self._dout)


class TorchFlash(Differentiable):
    """torch's attention by its FlashAttention, over (batch, heads, seqlen, dim)."""

    def __init__(self, problem: Shape, data: Inputs) -> None:
        heads_first = [x.transpose(1, 2).contiguous() for x in data]
        grouped = problem.heads != problem.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=grouped
                )

        super().__init__(attend, heads_first, backward=True)

    def results(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in super().results()]


def reason(error: Exception) -> str:
    """The reason of an error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return textwrap.shorten(f"{type(error).__name__}: {error}", REASON_CHARS)


class Ours(Implementation):
    """The whole attention on one backend."""

    def __init__(self, problem: Shape, data: Inputs, backend: Backend) -> None:
        layout = SequenceLayout.contiguous(problem.seqlen, 1)
        self._tiles = pair_tiles(layout, layout, problem.mask, 0, 0)
        self._backend, self._scores = backend, Scores(problem.head_dim**-0.5)
        self._inputs, self._sums_dtype = data, problem.spec.accum_dtype

    def forward(self) -> None:
        q, k, v, _ = self._inputs
        state = self._backend.new_state(q, v.size(3))
        args = (q, k, v, self._tiles, state)
        state = self._backend.forward(*args, scores=self._scores, last=True)
        self.out, self.lse = self._backend.finalize(state, q.dtype)
        self.grads = ()

    def backward(self) -> None:
        self._prepare()
        dq, dk, dv = self._gradients(0, 1, 2)
        factor, dtype = self._backend.gradient_factor(self._scores), self._inputs.q.dtype
        self.grads = [x.to(dtype) for x in (dq * factor, dk * factor, dv)]

    def one(self, kernel: str) -> Callable[[], list[Tensor]]:
        """A call of one kernel, ready to be timed, that returns the kernel's results."""
        if kernel == "fwd":
            return self._forward_once
        self.forward()
        self._prepare()
        return partial(self._gradients, *((0,) if kernel == "dq" else (1, 2)))

    def _forward_once(self) -> list[Tensor]:
        self.forward()
        assert self.lse is not None, "forward makes it"
        return [*self.results(), self.lse]

    def _prepare(self) -> None:
        *qkv, dout = self._inputs
        assert self.out is not None and self.lse is not None, "forward comes first"
        statistics = self._backend.row_statistics(self.out, dout, self.lse)
        self._backward_inputs = BackwardInputs(*self._inputs, *statistics)
        self._sums = [torch.zeros_like(x, dtype=self._sums_dtype) for x in qkv]

    def _gradients(self, *which: int) -> list[Tensor]:
        """Adds to some of the sums of dq, dk, dv."""
        dq, dk, dv = (x if index in which else None for index, x in enumerate(self._sums))
        inputs, sums = self._backward_inputs, (dq, dk, dv)
        self._backend.backward(inputs, self._tiles, sums, scores=self._scores, out=self.out)
        return [self._sums[index] for index in which]
