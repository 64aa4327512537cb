"""The operators of the flash-attn packages, FlashAttention 2, 3 and 4, which are optional.

    package        oldest    GPUs            operators
    flash-attn     2.8.0     all             _flash_attn_forward, _backward of torch.ops.flash_attn
    flash-attn-3   3.0.0     sm_90           fwd, bwd of torch.ops.flash_attn_3
    flash-attn-4   4.0.0b13  sm_90, sm_100   _flash_attn_fwd, _bwd of flash_attn.cute.interface

The band of a tile becomes the window of flash-attention, relative to the bottom right corner: one
call for a tile, or a few calls if it has more rows than columns. Backwards are deterministic; in
older versions the backwards of 3 and 4 were not, or were wrong. Arguments are passed by name. The
operators need CUDA and 16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ring_attn.backends.base import (
    NO_MAX_LOGITS,
    Backend,
    BackwardInputs,
    architecture,
    equal_headdims,
    flash_pieces,
    flash_window,
)
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.version import installed_version

# Number of multiprocessors of an H100. FlashAttention 2 splits a deterministic dq until all are
# busy.
SMS = 132

# Arguments of an operator that are not tensors.
Options = Mapping[str, float | bool | int | None]


# A module, or a namespace of torch.ops, of one of the packages, which have no types.
Operators: TypeAlias = Any


class _Saved(NamedTuple):
    """Inputs of a backward, in the order of the operators of FlashAttention 2 and 3."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


class FlashAttnBackend(Backend):
    """FlashAttention 2 from the package flash-attn."""

    name = "flash_attn"
    reads_out = True
    package = "flash-attn"  # the name in package indexes
    install = "pip install 'ring-attn[flash]'"
    oldest = "2.8.0"  # earlier versions have other arguments or results
    architectures: tuple[str, ...] = ()  # empty means all GPUs
    max_headdim = 256
    splits_dq = True
    # The operators for forward and backward, and their arguments other than tensors, window and
    # scores.
    names = ("_flash_attn_forward", "_flash_attn_backward")
    options: Options = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}
    forward_options: Options = {"return_softmax": False}

    def operators(self) -> Operators:
        """Return the namespace of the package's operators."""
        import flash_attn.flash_attn_interface  # noqa: F401 - registers them

        return torch.ops.flash_attn

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        installed = installed_version(self.package)
        if installed is None:
            return f"the package {self.package} is not installed: {self.install}"
        if TorchVersion(installed) < self.oldest:
            return f"{self.package} must be at least {self.oldest}, got {installed}"
        if spec.device_type != "cuda":
            return f"flash-attn runs on cuda, got {spec.device_type}"
        if self.architectures and architecture() not in self.architectures:
            one_of = " or ".join(self.architectures)
            return f"{self.package} runs on {one_of}, got {architecture() or 'no GPU'}"
        if spec.dtype not in HALF_DTYPES:
            return f"flash-attn supports float16 and bfloat16, got {spec.dtype}"
        headdim = max(spec.headdim, spec.headdim_v)
        if headdim > self.max_headdim:
            return f"{self.package} supports headdim up to {self.max_headdim}, got {headdim}"
        return NO_MAX_LOGITS if spec.max_logits else None

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        return flash_pieces(tile)

    def arguments(self, piece: Tile, scores: Scores) -> Options:
        """Return the arguments of both operators that are not tensors."""
        left, right = flash_window(piece)
        return {
            **self.options,
            "window_size_left": left,
            "window_size_right": right,
            "softmax_scale": scores.softmax_scale,
            "softcap": scores.softcap,
        }

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        forward, _ = self.names
        operator = getattr(self.operators(), forward)
        q, k, v = equal_headdims(q, k, v, multiple=8)
        out, lse, *_ = operator(q, k, v, **self.arguments(piece, scores), **self.forward_options)
        # Rows without keys have lse +inf.
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        assert out is not None, "these operators read out"
        dout, q, k, v, out = equal_headdims(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, multiple=8
        )
        grads = _Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        options = {**self.arguments(piece, scores), "deterministic": True}
        _, backward = self.names
        operator = getattr(self.operators(), backward)
        self.call_backward(operator, _Saved(dout, q, k, v, out, inputs.lse), grads, options)
        return grads

    def call_backward(
        self,
        operator: Callable[..., object],
        saved: _Saved,
        grads: _Gradients,
        options: Options,
    ) -> None:
        """Call the operator, which writes dq, dk and dv into `grads`."""
        operator(*saved, *grads, **options)

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Return an estimate of the bytes of a backward's sums in float32."""
        if not backward:
            return 0
        splits = -(-SMS // (spec.batch * spec.nheads)) if self.splits_dq else 1
        summed_rows = splits * q_rows
        if spec.nheads > spec.nheads_kv:
            summed_rows += 2 * kv_rows
        return 4 * summed_rows * max(spec.headdim, spec.headdim_v)


class FlashAttn3Backend(FlashAttnBackend):
    """FlashAttention 3 from the package flash-attn-3."""

    name = "flash_attn_3"
    package = "flash-attn-3"
    install = "build it from flash-attention's folder hopper"
    oldest = "3.0.0"
    architectures = ("sm_90",)
    splits_dq = False
    max_headdim = 192  # with larger head dims the backward is not deterministic
    names = ("fwd", "bwd")
    options = {"is_causal": False}
    forward_options = {"num_splits": 1}

    def operators(self) -> Operators:
        import flash_attn_interface  # noqa: F401 - registers them

        return torch.ops.flash_attn_3


class FlashAttn4Backend(FlashAttnBackend):
    """FlashAttention 4 from the package flash-attn-4, which compiles its kernels when called."""

    name = "flash_attn_4"
    package = "flash-attn-4"
    install = "pip install flash-attn-4"
    oldest = "4.0.0b13"
    architectures = ("sm_90", "sm_100")
    splits_dq = False
    max_headdim = 128
    names = ("_flash_attn_fwd", "_flash_attn_bwd")
    options = {"causal": False}
    forward_options = {"return_lse": True}

    def operators(self) -> Operators:
        from flash_attn.cute import interface

        return interface

    def arguments(self, piece: Tile, scores: Scores) -> Options:
        """Return the arguments, in which None means an unbounded side of the window."""
        left, right = flash_window(piece)
        return {
            **super().arguments(piece, scores),
            "window_size_left": None if left < 0 else left,
            "window_size_right": None if right < 0 else right,
        }

    def call_backward(
        self,
        operator: Callable[..., object],
        saved: _Saved,
        grads: _Gradients,
        options: Options,
    ) -> None:
        dout, q, k, v, out, lse = saved
        operator(q, k, v, out, dout, lse, dq=grads.dq, dk=grads.dk, dv=grads.dv, **options)
