"""Attention on one device: the problem, our implementation, and what all implementations share.

`bench.peers` has the implementations of other packages. Grouped heads are never repeated.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.cli.masks import MaskChoice
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import pair_tiles
from ring_attn.testing import Inputs

# The most characters of a reason, which is one line of a table.
REASON_CHARS = 200

# Whether each direction of a mode is the backward.
DIRECTIONS: dict[str, tuple[bool, ...]] = {
    "fwd": (False,),
    "bwd": (True,),
    "fwd_bwd": (False, True),
}


@dataclass(frozen=True)
class Shape:
    """The sizes, mask, dtype and device of a problem."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype
    device: torch.device
    # None is `head_dim`.
    head_dim_v: int | None = None
    # None is the mask of `causal`.
    masked: MaskChoice | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            device_type=self.device.type,
            dtype=self.dtype,
            batch=self.batch,
            nheads=self.heads,
            nheads_kv=self.kv_heads,
            headdim=self.head_dim,
            headdim_v=self.dim_v,
        )

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def choice(self) -> MaskChoice:
        return self.masked or MaskChoice("causal" if self.causal else "full")

    @property
    def mask(self) -> Mask:
        return self.choice.mask(self.seqlen)

    def shortened(self, batch: int, rows: int) -> Shape:
        """Return the problem with a smaller batch and fewer rows, under a mask that looks alike."""
        rows = min(rows, self.seqlen)
        masked = self.choice.scaled(self.seqlen, rows)
        return replace(self, batch=min(batch, self.batch), seqlen=rows, masked=masked)

    def flops(self, mode: str) -> int:
        """Return the FLOPs of a mode.

        "fwd" has 4 x area x head_dim per head, "bwd" 2.5 times that, and "fwd_bwd" both.
        """
        area = self.mask.area
        return sum(flops(area, self.spec, backward=back) for back in DIRECTIONS[mode])

    def nbytes(self, mode: str) -> int:
        """Return the bytes that a mode must at least read and write.

        The forward reads q, k and v, and writes out; the backward reads these and dout, and writes
        dq, dk and dv. Each is counted once.
        """
        rows = self.batch * self.seqlen * self.dtype.itemsize
        qk, kv = rows * self.heads * self.head_dim, rows * self.kv_heads * self.head_dim
        out, v = rows * self.heads * self.dim_v, rows * self.kv_heads * self.dim_v
        return sum(
            2 * (qk + kv + v + out) if back else qk + kv + v + out for back in DIRECTIONS[mode]
        )

    def data(self) -> Inputs:
        """Draw normally distributed q, k, v and dout on the device."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int, dim: int) -> Tensor:
            shape = (self.batch, self.seqlen, heads, dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return Inputs(
            q=draw(self.heads, self.head_dim),
            k=draw(self.kv_heads, self.head_dim),
            v=draw(self.kv_heads, self.dim_v),
            dout=draw(self.heads, self.dim_v),
        )


class Implementation:
    """An implementation of attention: a forward, then its backward.

    Attributes:
        out: output of the last forward; None before the first.
        lse: natural logarithm (batch, heads, rows) float32; None if it is not returned.
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
        """Return out, and after a backward dq, dk, dv, all (batch, seqlen, heads, dim)."""
        assert self.out is not None, "call forward first"
        return [x.detach() for x in (self.out, *self.grads)]

    def release(self) -> None:
        """Free the results."""
        self.out = None
        self.lse = None
        self.grads = ()


class Differentiable(Implementation):
    """A function that returns out from q, k and v, under autograd.

    `backward`: whether the forward saves tensors for a backward.
    """

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], *, backward: bool
    ) -> None:
        *qkv, self._dout = inputs
        self._function = function
        self.leaves = [x.detach().requires_grad_(backward) for x in qkv]

    def forward(self) -> None:
        self.out = self._function(*self.leaves)

    def backward(self) -> None:
        assert self.out is not None, "call forward first"
        self.grads = torch.autograd.grad(self.out, self.leaves, self._dout)


def reason(error: Exception) -> str:
    """Return an error in one line; refusals are texts for users, and have no type before them."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, NotImplementedError | ImportError):
        return textwrap.shorten(str(error), REASON_CHARS)
    return textwrap.shorten(f"{type(error).__name__}: {error}", REASON_CHARS)


class Ours(Implementation):
    """The whole attention on one backend."""

    def __init__(self, problem: Shape, data: Inputs, backend: Backend) -> None:
        layout = SequenceLayout.contiguous(problem.seqlen, 1)
        self._tiles = pair_tiles(layout, layout, problem.mask, 0, 0)
        self.backend = backend
        self._scores = Scores(problem.head_dim**-0.5)
        self._inputs = data
        self._sums_dtype = problem.spec.accum_dtype

    def forward(self) -> None:
        q, k, v, _ = self._inputs
        state = self.backend.new_state(q, v.size(3))
        state = self.backend.forward(q, k, v, self._tiles, state, scores=self._scores, last=True)
        self.out, self.lse = self.backend.finalize(state, q.dtype)
        self.grads = ()

    def backward(self) -> None:
        self._prepare()
        dq, dk, dv = self._gradients("dq", "dk", "dv")
        factor = self.backend.gradient_factor(self._scores)
        self.grads = [x.to(self._inputs.q.dtype) for x in (dq * factor, dk * factor, dv)]

    def one(self, kernel: str) -> Callable[[], list[Tensor]]:
        """Return a call of one kernel, "fwd", "dq" or "dkdv", which returns its results."""
        if kernel == "fwd":
            return self._forward_once
        self.forward()
        self._prepare()
        if kernel == "dq":
            return partial(self._gradients, "dq")
        return partial(self._gradients, "dk", "dv")

    def _forward_once(self) -> list[Tensor]:
        self.forward()
        assert self.lse is not None, "forward sets it"
        return [*self.results(), self.lse]

    def _prepare(self) -> None:
        q, k, v, dout = self._inputs
        assert self.out is not None and self.lse is not None, "call forward first"
        lse, delta = self.backend.row_statistics(self.out, dout, self.lse)
        self._backward_inputs = BackwardInputs(q, k, v, dout, lse, delta)
        self._sums = {
            name: torch.zeros_like(x, dtype=self._sums_dtype)
            for name, x in (("dq", q), ("dk", k), ("dv", v))
        }

    def _gradients(self, *names: str) -> list[Tensor]:
        """Add gradients to the sums of these names, of dq, dk and dv; return the sums."""
        sums = {name: self._sums[name] for name in names}
        self.backend.backward(
            self._backward_inputs,
            self._tiles,
            (sums.get("dq"), sums.get("dk"), sums.get("dv")),
            scores=self._scores,
            out=self.out,
        )
        return [*sums.values()]
