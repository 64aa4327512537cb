"""The operators of the installed flash-attn package (FlashAttention 2); optional.

A tile's band is flash-attention's window, counted from the bottom right corner: one call a tile, or
few where it has more rows than columns.
Only `torch.ops.flash_attn._flash_attn_forward` and `_backward`, the operators that the package
registers for torch.compile, are used, with every argument by name. Needs CUDA and 16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends.base import (
    NO_MAX_LOGITS,
    TileBackend,
    equal_headdims,
    flash_pieces,
    flash_window,
    out_from_delta,
)
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State
from ring_attn.core.tiles import Tile

# Older versions have other names and arguments.
OLDEST = (2, 8)

QSide = tuple[Tensor, Tensor, Tensor, Tensor]


class FlashAttnBackend(TileBackend):
    """FlashAttention 2 from the package flash-attn."""

    name = "flash_attn"

    def supports(self, spec: AttentionSpec, *, explicit: bool = False) -> str | None:
        """CUDA, float16 or bfloat16, one headdim up to 256, and the package installed."""
        found = _installed()
        if found is None:
            return "the package flash-attn is not installed: pip install 'ring-attn[flash]'"
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            return f"flash-attn must be at least {OLDEST[0]}.{OLDEST[1]}, got {found}"
        if spec.device_type != "cuda":
            return f"flash-attn runs on cuda, got {spec.device_type}"
        if spec.dtype not in HALF_DTYPES:
            return f"flash-attn takes float16 and bfloat16, got {spec.dtype}"
        if spec.headdim > 256 or spec.headdim_v > 256:
            return f"flash-attn takes headdim up to 256, got {max(spec.headdim, spec.headdim_v)}"
        return NO_MAX_LOGITS if spec.max_logits else None

    def q_side(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, out: Tensor | None
    ) -> QSide:
        """q, dout, lse and an `out` for the operator to form delta from."""
        return q, dout, lse, out_from_delta(dout, delta, dout.dtype) if out is None else out

    def forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, state: State, scores: Scores
    ) -> None:
        """Computes each piece by one call; the +inf of rows that see nothing becomes -inf here."""
        for piece in flash_pieces(tile):
            self._forward_piece(q, k, v, piece, state, scores)

    def _forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, state: State, scores: Scores
    ) -> None:
        headdim_v = v.size(-1)
        left, right = flash_window(piece)
        out, lse, *_ = _operators()._flash_attn_forward(
            *equal_headdims(q[:, piece.q], k[:, piece.kv], v[:, piece.kv], multiple=8),
            dropout_p=0.0,
            softmax_scale=scores.softmax_scale,
            causal=False,
            window_size_left=left,
            window_size_right=right,
            softcap=scores.softcap,
            alibi_slopes=None,
            return_softmax=False,
        )
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        state.fold(piece.q, out[..., :headdim_v], lse)

    def backward_tile(
        self,
        side: QSide,
        k: Tensor,
        v: Tensor,
        tile: Tile,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scores: Scores,
    ) -> None:
        """Computes each piece by one deterministic call."""
        for piece in flash_pieces(tile):
            self._backward_piece(side, k, v, piece, dq, dk, dv, scores)

    def _backward_piece(
        self,
        side: QSide,
        k: Tensor,
        v: Tensor,
        piece: Tile,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scores: Scores,
    ) -> None:
        q, dout, lse, out = side
        tensors = equal_headdims(
            dout[:, piece.q],
            q[:, piece.q],
            k[:, piece.kv],
            v[:, piece.kv],
            out[:, piece.q],
            multiple=8,
        )
        grads = [torch.empty_like(x) for x in tensors[1:4]]
        left, right = flash_window(piece)
        _operators()._flash_attn_backward(
            *tensors,
            lse[:, :, piece.q].contiguous(),
            *grads,
            dropout_p=0.0,
            softmax_scale=scores.softmax_scale,
            causal=False,
            window_size_left=left,
            window_size_right=right,
            softcap=scores.softcap,
            alibi_slopes=None,
            deterministic=True,
        )
        for total, grad, rows in zip(
            (dq, dk, dv), grads, (piece.q, piece.kv, piece.kv), strict=True
        ):
            total[:, rows] += grad[..., : total.size(-1)]

    def workspace_bytes(
        self,
        spec: AttentionSpec,
        tiles: Sequence[Tile],
        *,
        backward: bool = False,
        rebuilds_out: bool = False,
    ) -> int:
        """Outputs of the greatest tile, and the `out` that is rebuilt."""
        dim, most = max(spec.headdim, spec.headdim_v), 0
        for tile in tiles:
            q_rows, kv_rows = tile.rows * spec.nheads, tile.cols * spec.nheads_kv
            rows = q_rows + 2 * kv_rows if backward else q_rows
            rows += max(t.q.stop for t in tiles) * spec.nheads if rebuilds_out else 0
            most = max(most, rows * dim * spec.dtype.itemsize + q_rows * 4)
        return most * spec.batch


def _installed() -> str | None:
    """The version of the package, None without it."""
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


def _operators() -> Any:
    import flash_attn.flash_attn_interface  # noqa: F401 - registers the operators

    return torch.ops.flash_attn
