"""The operators of the installed flash-attn packages: FlashAttention 2, 3 and 4; all optional.

    package        oldest    GPUs            operators
    flash-attn     2.8.0     all             _flash_attn_forward, _backward of torch.ops.flash_attn
    flash-attn-3   3.0.0     sm_90           fwd, bwd of torch.ops.flash_attn_3
    flash-attn-4   4.0.0b13  sm_90, sm_100   _flash_attn_fwd, _bwd of flash_attn.cute.interface

A tile's band becomes flash-attention's window, relative to the bottom right corner: one call for a
tile, or a few if it has more rows than columns. Backwards are deterministic: in older versions the
backwards of 3 and 4 were not, or were wrong. Arguments are passed by name. Needs CUDA and 16-bit
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

# Multiprocessors of an H100. FlashAttention 2 splits a deterministic dq until they are busy.
SMS = 132


class FlashAttnBackend(Backend):
    """FlashAttention 2 from the package flash-attn."""

    name = "flash_attn"
    reads_out = True
    package = "flash-attn"  # its name in package indexes
    install = "pip install 'ring-attn[flash]'"
    oldest = "2.8.0"  # earlier versions have other arguments or results
    architectures: tuple[str, ...] = ()  # empty means all GPUs
    most_headdim = 256
    splits_dq = True
    # The operators for forward and backward, and their arguments beside tensors, window and scores.
    names = ("_flash_attn_forward", "_flash_attn_backward")
    options: Mapping[str, Any] = {"dropout_p": 0.0, "causal": False, "alibi_slopes": None}
    forward_options: Mapping[str, Any] = {"return_softmax": False}

    def operators(self) -> Any:
        """The namespace of the package's operators."""
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
            return f"flash-attn takes float16 and bfloat16, got {spec.dtype}"
        headdim = max(spec.headdim, spec.headdim_v)
        if headdim > self.most_headdim:
            return f"{self.package} takes headdim up to {self.most_headdim}, got {headdim}"
        return NO_MAX_LOGITS if spec.max_logits else None

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        return flash_pieces(tile)

    def arguments(self, piece: Tile, scores: Scores) -> dict[str, Any]:
        """Arguments of both operators that are no tensors."""
        left, right = flash_window(piece)
        window = {"window_size_left": left, "window_size_right": right}
        return {**self.options, **window, **vars(scores)}

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Changes lse +inf of rows without keys to -inf."""
        operator = getattr(self.operators(), self.names[0])
        options = {**self.arguments(piece, scores), **self.forward_options}
        out, lse, *_ = operator(*equal_headdims(q, k, v, multiple=8), **options)
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        q, k, v, dout, lse, _ = inputs
        assert out is not None, "these operators read out"
        dout, q, k, v, out = equal_headdims(dout, q, k, v, out, multiple=8)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        options = {**self.arguments(piece, scores), "deterministic": True}
        operator = getattr(self.operators(), self.names[1])
        self.call_backward(operator, (dout, q, k, v, out, lse), grads, options)
        return grads

    def call_backward(
        self, operator: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], options: Any
    ) -> None:
        """Writes dq, dk and dv."""
        operator(*inputs, *grads, **options)

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Estimated bytes of a backward's sums in float32."""
        splits = -(-SMS // (spec.batch * spec.nheads)) if self.splits_dq else 1
        sums = splits * q_rows + (2 * kv_rows if spec.nheads > spec.nheads_kv else 0)
        return 4 * sums * max(spec.headdim, spec.headdim_v) * backward


class FlashAttn3Backend(FlashAttnBackend):
    """FlashAttention 3 from the package flash-attn-3."""

    name = "flash_attn_3"
    package = "flash-attn-3"
    install = "build it from flash-attention's folder hopper"
    oldest = "3.0.0"
    architectures = ("sm_90",)
    splits_dq = False
    most_headdim = 192  # above it the backward is not deterministic
    names = ("fwd", "bwd")
    options = {"is_causal": False}
    forward_options = {"num_splits": 1}

    def operators(self) -> Any:
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
    most_headdim = 128
    names = ("_flash_attn_fwd", "_flash_attn_bwd")
    options = {"causal": False}
    forward_options = {"return_lse": True}

    def operators(self) -> Any:
        from flash_attn.cute import interface

        return interface

    def arguments(self, piece: Tile, scores: Scores) -> dict[str, Any]:
        window = zip(("window_size_left", "window_size_right"), flash_window(piece), strict=True)
        unbounded = {name: None for name, size in window if size < 0}
        return super().arguments(piece, scores) | unbounded

    def call_backward(
        self, operator: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], options: Any
    ) -> None:
        (dout, q, k, v, out, lse), (dq, dk, dv) = inputs, grads
        operator(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, **options)
