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

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends.base import (
    NO_MAX_LOGITS,
    Gradients,
    TileBackend,
    architecture,
    equal_headdims,
    flash_pieces,
    flash_window,
    out_from_delta,
)
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State
from ring_attn.core.tiles import Tile

# Major, minor, patch and beta; RELEASED sorts a release after all of its betas.
Version = tuple[int, int, int, int]
RELEASED = 1 << 30

QSide = tuple[Tensor, Tensor, Tensor, Tensor]


class FlashAttnBackend(TileBackend):
    """FlashAttention 2 from the package flash-attn.

    Attributes:
        package: name of the package in package indexes.
        install: how to install it.
        oldest: oldest supported version; earlier versions have other arguments or results.
        architectures: GPUs for which the package has kernels; empty means all.
        most_headdim: largest supported headdim.
    """

    name = "flash_attn"
    package = "flash-attn"
    install = "pip install 'ring-attn[flash]'"
    oldest: Version = (2, 8, 0, 0)
    architectures: tuple[str, ...] = ()
    most_headdim = 256

    def operators(self) -> Any:
        """The namespace of the package's operators."""
        import flash_attn.flash_attn_interface  # noqa: F401 - registers them

        return torch.ops.flash_attn

    def supports(self, spec: AttentionSpec, *, explicit: bool = False) -> str | None:
        """None for CUDA, float16 or bfloat16, headdim up to `most_headdim`, with the package."""
        installed = _installed(self.package)
        if installed is None:
            return f"the package {self.package} is not installed: {self.install}"
        if _version(installed) < self.oldest:
            *release, beta = self.oldest
            oldest = ".".join(map(str, release)) + (f"b{beta}" if 0 < beta < RELEASED else "")
            return f"{self.package} must be at least {oldest}, got {installed}"
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

    def q_side(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, out: Tensor | None
    ) -> QSide:
        """q, dout, lse and an `out` from which the operator forms delta."""
        return q, dout, lse, out_from_delta(dout, delta, dout.dtype) if out is None else out

    def forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, state: State, scores: Scores
    ) -> None:
        """Computes each piece by one call; lse +inf of rows without keys becomes -inf."""
        for piece in flash_pieces(tile):
            self._forward_piece(q, k, v, piece, state, scores)

    def _forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, state: State, scores: Scores
    ) -> None:
        headdim_v = v.size(-1)
        inputs = equal_headdims(q[:, piece.q], k[:, piece.kv], v[:, piece.kv], multiple=8)
        out, lse = self.call_forward(inputs, flash_window(piece), scores)
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        state.fold(piece.q, out[..., :headdim_v], lse)

    def backward_tile(
        self,
        side: QSide,
        k: Tensor,
        v: Tensor,
        tile: Tile,
        gradients: Gradients,
        scores: Scores,
    ) -> None:
        """Computes each piece by one deterministic call."""
        for piece in flash_pieces(tile):
            self._backward_piece(side, k, v, piece, gradients, scores)

    def _backward_piece(
        self,
        side: QSide,
        k: Tensor,
        v: Tensor,
        piece: Tile,
        gradients: Gradients,
        scores: Scores,
    ) -> None:
        q, dout, lse, out = side
        tensors = equal_headdims(
            dout[:, piece.q], q[:, piece.q], k[:, piece.kv], v[:, piece.kv], out[:, piece.q],
            multiple=8,
        )  # fmt: skip
        grads = [torch.empty_like(x) for x in tensors[1:4]]
        lse = lse[:, :, piece.q].contiguous()
        self.call_backward((*tensors, lse), grads, flash_window(piece), scores)
        sides = (piece.q, piece.kv, piece.kv)
        for total, grad, rows in zip(gradients, grads, sides, strict=True):
            total[:, rows] += grad[..., : total.size(-1)]

    def call_forward(
        self, qkv: Sequence[Tensor], window: tuple[int, int], scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a piece."""
        out, lse, *_ = self.operators()._flash_attn_forward(
            *qkv, dropout_p=0.0, causal=False, window_size_left=window[0],
            window_size_right=window[1], alibi_slopes=None, return_softmax=False, **vars(scores),
        )  # fmt: skip
        return out, lse

    def call_backward(
        self,
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        window: tuple[int, int],
        scores: Scores,
    ) -> None:
        """Writes dq, dk and dv of a piece."""
        self.operators()._flash_attn_backward(
            *inputs, *grads, dropout_p=0.0, causal=False, window_size_left=window[0],
            window_size_right=window[1], alibi_slopes=None, deterministic=True, **vars(scores),
        )  # fmt: skip

    def workspace_bytes(
        self,
        spec: AttentionSpec,
        tiles: Sequence[Tile],
        *,
        backward: bool = False,
        rebuilds_out: bool = False,
    ) -> int:
        """Bytes of the largest tile's outputs, and of a rebuilt `out`."""
        dim, most = max(spec.headdim, spec.headdim_v), 0
        for tile in tiles:
            q_rows, kv_rows = tile.rows * spec.nheads, tile.cols * spec.nheads_kv
            rows = q_rows + 2 * kv_rows if backward else q_rows
            rows += max(t.q.stop for t in tiles) * spec.nheads if rebuilds_out else 0
            most = max(most, rows * dim * spec.dtype.itemsize + q_rows * 4)
        return most * spec.batch


class FlashAttn3Backend(FlashAttnBackend):
    """FlashAttention 3 from the package flash-attn-3."""

    name = "flash_attn_3"
    package = "flash-attn-3"
    install = "build it from flash-attention's folder hopper"
    oldest = (3, 0, 0, RELEASED)
    architectures = ("sm_90",)
    most_headdim = 192  # above it the backward is not deterministic

    def operators(self) -> Any:
        """The namespace of the package's operators."""
        import flash_attn_interface  # noqa: F401 - registers them

        return torch.ops.flash_attn_3

    def call_forward(
        self, qkv: Sequence[Tensor], window: tuple[int, int], scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a piece."""
        out, lse, *_ = self.operators().fwd(
            *qkv, is_causal=False, window_size_left=window[0], window_size_right=window[1],
            num_splits=1, **vars(scores),
        )  # fmt: skip
        return out, lse

    def call_backward(
        self,
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        window: tuple[int, int],
        scores: Scores,
    ) -> None:
        """Writes dq, dk and dv of a piece."""
        self.operators().bwd(
            *inputs, *grads, is_causal=False, window_size_left=window[0],
            window_size_right=window[1], deterministic=True, **vars(scores),
        )  # fmt: skip


class FlashAttn4Backend(FlashAttnBackend):
    """FlashAttention 4 from the package flash-attn-4, which compiles its kernels when called."""

    name = "flash_attn_4"
    package = "flash-attn-4"
    install = "pip install flash-attn-4"
    oldest = (4, 0, 0, 13)
    architectures = ("sm_90", "sm_100")
    most_headdim = 128

    def operators(self) -> Any:
        """The namespace of the package's operators."""
        from flash_attn.cute import interface

        return interface

    def call_forward(
        self, qkv: Sequence[Tensor], window: tuple[int, int], scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a piece."""
        out, lse, *_ = self.operators()._flash_attn_fwd(
            *qkv, causal=False, window_size_left=_or_none(window[0]),
            window_size_right=_or_none(window[1]), return_lse=True, **vars(scores),
        )  # fmt: skip
        return out, lse

    def call_backward(
        self,
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        window: tuple[int, int],
        scores: Scores,
    ) -> None:
        """Writes dq, dk and dv of a piece."""
        (dout, q, k, v, out, lse), (dq, dk, dv) = inputs, grads
        self.operators()._flash_attn_bwd(
            q, k, v, out, dout, lse, causal=False, window_size_left=_or_none(window[0]),
            window_size_right=_or_none(window[1]), deterministic=True, dq=dq, dk=dk, dv=dv,
            **vars(scores),
        )  # fmt: skip


def _or_none(side: int) -> int | None:
    return None if side < 0 else side


def _installed(package: str) -> str | None:
    """The version of the installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _version(text: str) -> Version:
    """A version that can be compared: 3.0.0b1 < 3.0.0 == 3.0.0.post1."""
    release, _, _ = text.partition("+")
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", release)[0])]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    beta = re.search(r"(?:a|b|rc|dev)(\d+)", release)
    return major, minor, patch, int(beta[1]) if beta else RELEASED
