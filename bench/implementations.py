"""Attention on one device by several packages: ours, torch's, flash-attn's.

Grouped heads are never repeated. Each implementation gets inputs in its documented layout, made
before the timing: torch (batch, heads, seqlen, dim), ours and flash-attn (batch, seqlen, heads,
dim). Peers run under autograd, ours by the driver's two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn import drivers
from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.cli.options import FLASH_PACKAGES, SDPA_BACKENDS
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import pair_tiles
from ring_attn.kernels.configs import Config
from ring_attn.machines.rehearse import Silent
from ring_attn.strategies.registry import make_call
from ring_attn.strategies.strategy import Strategy
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
    queries: int | None = None  # the last ones of the sequence; None is all

    @property
    def rows(self) -> int:
        return self.seqlen if self.queries is None else self.queries

    @property
    def spec(self) -> AttentionSpec:
        sizes = (self.batch, self.heads, self.kv_heads, self.head_dim, self.head_dim)
        return AttentionSpec(self.device.type, self.dtype, *sizes)

    @property
    def mask(self) -> Mask:
        return Mask(self.rows, self.seqlen, self.causal)

    def flops(self, mode: str) -> int:
        """FLOPs of "fwd" (4 x area x head_dim per head), "bwd" (2.5 times that) or "fwd_bwd"."""
        backward = {"fwd": (False,), "bwd": (True,), "fwd_bwd": (False, True)}[mode]
        return sum(flops(self.mask.area, self.spec, backward=back) for back in backward)

    def data(self) -> Inputs:
        """Normally distributed q, k, v, dout, drawn on the device."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(rows: int, heads: int) -> Tensor:
            shape = (self.batch, rows, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        q, kv = (self.rows, self.heads), (self.seqlen, self.kv_heads)
        return Inputs(draw(*q), draw(*kv), draw(*kv), draw(*q))


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


class OurKernels(Implementation):
    """The ring's driver on one rank: one backend computes the whole attention."""

    def __init__(self, problem: Shape, data: Inputs, backend: str) -> None:
        one = SequenceLayout.contiguous
        layouts = one(problem.rows, 1), one(problem.seqlen, 1)
        self._call = make_call(Strategy(), problem.spec, layouts, problem.mask, 0, backend=backend)
        self._inputs = data
        # A ring of one rank sends nothing.
        self._alone = Silent((0,), 0)
        self._saved: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        q, k, v, _ = self._inputs
        self.out, self.lse, self._saved, _ = drivers.forward(self._call, q, k, v, self._alone)
        self.grads = ()

    def backward(self) -> None:
        *self.grads, _ = drivers.backward(self._call, self._saved, self._inputs.dout, self._alone)


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


class HeadsFirst(Differentiable):
    """A function over (batch, heads, seqlen, dim)."""

    def results(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in super().results()]


def make(
    name: str, problem: Shape, data: Inputs, *, backend: str, backward: bool
) -> Implementation:
    """Builds one of IMPLEMENTATIONS on a problem's data; errors of the package pass."""
    if name == "ours":
        return OurKernels(problem, data, backend)
    if name in FLASH_PACKAGES:
        function = _flash(FLASH_PACKAGES[name], problem.causal)
        return Differentiable(function, data, backward=backward)
    function = _sdpa(SDPA_BACKENDS[name], problem)
    heads_first = [x.transpose(1, 2).contiguous() for x in data]
    return HeadsFirst(function, heads_first, backward=backward)


def _sdpa(backend: str, problem: Shape) -> Callable[..., Tensor]:
    """torch's attention with one backend, over (batch, heads, rows, dim)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen, grouped = getattr(SDPBackend, backend), problem.heads != problem.kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )

    return run


def _flash(package: str, causal: bool) -> Callable[..., Tensor]:
    function = import_module(package).flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some return lse too
        return out

    return run


def reason(error: Exception, warned: Sequence[str] = ()) -> str:
    """The reason of an error in one line; torch says it in warnings, `warned`, before the error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "; ".join([" ".join(w.split("(Triggered")[0].split()) for w in warned] + [text])
    text = f"{type(error).__name__}: {text}"
    return text if len(text) <= REASON_CHARS else f"{text[: REASON_CHARS - 3]}..."


class Kernels(Implementation):
    """The whole attention on the Triton backend, with chosen configs."""

    def __init__(self, problem: Shape, data: Inputs, chosen: Mapping[str, Config]) -> None:
        """`chosen`, by kind, replace the frozen configs."""
        layouts = [SequenceLayout.contiguous(n, 1) for n in (problem.rows, problem.seqlen)]
        self._tiles = pair_tiles(*layouts, problem.mask, 0, 0)
        self._decodes = problem.queries is not None
        self._backend, self._scores = TritonBackend(chosen), Scores(problem.head_dim**-0.5)
        self._inputs = data

    def forward(self) -> None:
        q, k, v, _ = self._inputs
        if self._decodes:
            out, self.lse = self._backend.decode(q, k, v, self._tiles, scores=self._scores)
            self.out = out.to(q.dtype)
            return
        state = self._backend.new_state(q, v.size(3))
        args = (q, k, v, self._tiles, state)
        state = self._backend.forward(*args, scores=self._scores, last=True)
        self.out, self.lse = self._backend.finalize(state, q.dtype)
        self.grads = ()

    def backward(self) -> None:
        self._prepare()
        (dq,), (dk, dv) = self._gradients(0), self._gradients(1, 2)
        factor, dtype = self._backend.gradient_factor(self._scores), self._inputs.q.dtype
        self.grads = [x.to(dtype) for x in (dq * factor, dk * factor, dv)]

    def one(self, kernel: str) -> Callable[[], list[Tensor]]:
        """A call of one kernel, ready to be timed, that returns the kernel's results."""
        if kernel in ("fwd", "decode"):
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
        self._sums = [torch.zeros_like(x, dtype=torch.float32) for x in qkv]

    def _gradients(self, *which: int) -> list[Tensor]:
        """Adds to some of the sums of dq, dk, dv."""
        dq, dk, dv = (x if index in which else None for index, x in enumerate(self._sums))
        inputs, sums = self._backward_inputs, (dq, dk, dv)
        self._backend.backward(inputs, self._tiles, sums, scores=self._scores)
        return [self._sums[index] for index in which]
