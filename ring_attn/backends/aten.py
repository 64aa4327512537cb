"""Torch's own fused attention operators that return lse: flash on CPU, flash and cuDNN on CUDA.

The masks that an operator supports decide how a tile is cut into operator calls:

    operator        supported masks                      so a tile becomes
    CPU flash       none, top-left causal, a dense mask  full and causal pieces; window edges masked
                                                         in blocks of EDGE rows
    CUDA flash      any band, as a window counted from   one call, or few where it has more rows
                    the bottom right corner              than columns
    CUDA cuDNN      none, top-left causal                full and square causal pieces; a window's
                                                         tile goes to flash

Every row of a tile attends to a key (`tiles.Tile`). So the operators' values for rows without
keys (lse 0 on CPU, +inf in flash) never occur; `-inf` comes only from the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.backends.base import (
    NO_MAX_LOGITS,
    Backend,
    BackwardInputs,
    band_mask,
    equal_headdims,
    flash_pieces,
    flash_window,
    tile_within,
)
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import MaskKind, Tile

aten = torch.ops.aten

# Bytes of scores that a thread of the CPU operator holds, at most: two blocks of 256 x 512, in the
# backward.
SCRATCH = 1 << 20

# Rows per piece of a window's tile on CPU, whose two edges are masked pieces of EDGE x EDGE.
EDGE = 256


class AtenBackend(Backend):
    """Torch's flash attention, on CPU and CUDA.

    On CPU 16-bit inputs are computed in float32: the operator's forward is no faster in bfloat16,
    and with float32 outputs the error of a ring equals the error of one pass.
    """

    name = "aten"
    # On CUDA it adds dq by atomics, except under torch.use_deterministic_algorithms.
    deterministic = False
    reads_out = True

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        if spec.device_type == "cpu":
            return _refused(spec)
        return _cuda_reason(spec, "flash")

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        if device_type != "cpu":
            yield from flash_pieces(tile)
        elif tile.kind is MaskKind.WINDOW:
            yield from _window_pieces(tile, EDGE)
        else:
            yield from _causal_pieces(tile)

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        return _compute_dtype(x)

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        cpu = q.device.type == "cpu"
        q, k, v = equal_headdims(*_computable(q), *_computable_kv(k, v), multiple=1 if cpu else 8)
        if cpu:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                *_heads_first(q, k, v), 0.0, _form(piece).is_causal,
                attn_mask=_dense_mask(piece, q), scale=scores.softmax_scale,
            )  # fmt: skip
            return out.transpose(1, 2), lse
        left, right = flash_window(piece)
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.size(1), k.size(1), 0.0, False, False,
            scale=scores.softmax_scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        q, k, v, dout, lse, _ = inputs
        assert out is not None, "these operators read out"
        cpu = q.device.type == "cpu"
        (dout, q, out), (k, v) = _computable(dout, q, out), _computable_kv(k, v)
        dout, q, k, v, out = equal_headdims(dout, q, k, v, out, multiple=1 if cpu else 8)
        if cpu:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_heads_first(dout, q, k, v, out), lse, 0.0, _form(piece).is_causal,
                attn_mask=_dense_mask(piece, q), scale=scores.softmax_scale,
            )  # fmt: skip
            return [grad.transpose(1, 2) for grad in grads]
        left, right = flash_window(piece)
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)  # read for dropout only
        gradients: tuple[Tensor, ...] = aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.size(1), k.size(1), 0.0, False,
            rng_state, rng_state, scale=scores.softmax_scale, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        return gradients

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """On CPU, copies of k and v, the inputs in float32, and the operator's scores."""
        if spec.device_type != "cpu":
            return 0
        widened = (1 + 2 * backward) * q_rows if spec.dtype in HALF_DTYPES else 0
        copies = (2 * kv_rows + widened) * max(spec.headdim, spec.headdim_v)
        return copies * spec.accum_dtype.itemsize + SCRATCH * torch.get_num_threads()


class CudnnBackend(AtenBackend):
    """Torch's cuDNN attention; tiles with a window's lower edge go to flash."""

    name = "cudnn"

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        if spec.device_type == "cuda" and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return cudnn_reason(spec)

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        """Full and square causal pieces: in a square, top-left equals bottom-right alignment."""
        for piece in flash_pieces(tile):
            if piece.kind is MaskKind.WINDOW:
                yield piece
            else:
                for part in _causal_pieces(piece):
                    yield from flash_pieces(part)  # cuts off rows that see all keys

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        if piece.kind is MaskKind.WINDOW:
            return super().forward_piece(q, k, v, piece, scores)
        q, k, v = equal_headdims(*_computable(q, k, v), multiple=8)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, piece.kind is MaskKind.CAUSAL, False,
            scale=scores.softmax_scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse.reshape(q.size(0), q.size(2), q.size(1))

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        if piece.kind is MaskKind.WINDOW:
            return super().backward_piece(inputs, out, piece, scores)
        q, k, v, dout, lse, _ = inputs
        assert out is not None, "these operators read out"
        dout, q, k, v, out = equal_headdims(*_computable(dout, q, k, v, out), multiple=8)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read for dropout only
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(dout, q, k, v, out), lse.unsqueeze(-1), seed, seed, None, None, None,
            q.size(1), k.size(1), 0.0, piece.kind is MaskKind.CAUSAL, scale=scores.softmax_scale,
        )  # fmt: skip
        return [grad.transpose(1, 2) for grad in grads]


def cudnn_reason(spec: AttentionSpec) -> str | None:
    """The reason why cuDNN does not support the call on any GPU, or None."""
    reason = _cuda_reason(spec, "cuDNN")
    if reason is None and max(spec.headdim, spec.headdim_v) > 128:
        return f"cuDNN takes headdim up to 128, got {max(spec.headdim, spec.headdim_v)}"
    return reason


def _causal_pieces(tile: Tile) -> Iterator[Tile]:
    """Splits a tile into top-left CAUSAL and FULL rectangles, in this order.

    hi = 2:   k 0 1 2 3 4         # # \\ . .
                                  # # # \\ .       every row sees the columns before hi
                                  # # # # \\
    """
    hi = tile.corner_band[1]
    if hi is None or hi == 0:
        yield tile
        return
    split = tile.kv.start + hi
    yield from tile_within(tile, tile.q, slice(split, tile.kv.stop))
    yield from tile_within(tile, tile.q, slice(tile.kv.start, split))


def _window_pieces(tile: Tile, edge: int) -> Iterator[Tile]:
    """Splits runs of `edge` rows into right edge, unmasked middle and left edge.

    If the band is narrower than the run of rows, there is no middle: the run is one masked piece.
    """
    lo, hi = tile.lo, tile.hi
    assert lo is not None, "a tile without a lower bound has no window's edge"
    for start in range(tile.q.start, tile.q.stop, edge):
        rows = slice(start, min(start + edge, tile.q.stop))
        left, right = rows.stop - 1 + lo, tile.kv.stop
        if hi is not None:
            right = min(right, rows.start + hi + 1)
        left = max(left, tile.kv.start)
        if left >= right:
            yield from tile_within(tile, rows, tile.kv)
            continue
        yield from tile_within(tile, rows, slice(right, tile.kv.stop))
        yield from tile_within(tile, rows, slice(left, right))
        yield from tile_within(tile, rows, slice(tile.kv.start, left))


class Form(NamedTuple):
    is_causal: bool
    needs_mask: bool  # neither full nor top-left causal


@lru_cache(maxsize=4096)
def _form(piece: Tile) -> Form:
    full_or_causal = piece.corner_band in ((None, None), (None, 0))
    return Form(piece.kind is MaskKind.CAUSAL, not full_or_causal)


def _dense_mask(piece: Tile, q: Tensor) -> Tensor | None:
    """The additive mask of a piece that is neither FULL nor top-left CAUSAL."""
    if not _form(piece).needs_mask:
        return None
    hidden = ~band_mask(piece, q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of an operator's inputs: float32 for 16-bit tensors on CPU."""
    return torch.float32 if x.device.type == "cpu" and x.dtype.itemsize == 2 else x.dtype


def _computable(*tensors: Tensor) -> list[Tensor]:
    """Converts tensors to the dtype of the computation, with a contiguous last dim.

    The CPU operator ignores the stride of the last dim, and would read wrong elements.
    """
    widened = (x.to(_compute_dtype(x)) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in widened]


def _computable_kv(*tensors: Tensor) -> list[Tensor]:
    """Converts as `_computable`; on CPU copies the rows of each head next to each other.

    This makes the CPU operator 1.3 % faster forward and 2.5 % backward, and the copy costs 0.1 %
    (2k x 2k, 8 heads of 64, float32, one thread).
    """
    if tensors[0].device.type != "cpu":
        return _computable(*tensors)
    return [
        x.new_empty(x.transpose(1, 2).shape, dtype=_compute_dtype(x))
        .copy_(x.transpose(1, 2))
        .transpose(1, 2)
        for x in tensors
    ]


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _cuda_reason(spec: AttentionSpec, operator: str) -> str | None:
    if spec.device_type != "cuda":
        return f"torch's {operator} attention runs on cuda, got {spec.device_type}"
    if spec.dtype not in HALF_DTYPES:
        return f"torch's {operator} attention on cuda takes float16 and bfloat16, got {spec.dtype}"
    if max(spec.headdim, spec.headdim_v) > 256:
        return f"headdim must be at most 256, got {max(spec.headdim, spec.headdim_v)}"
    return _refused(spec)


def _refused(spec: AttentionSpec) -> str | None:
    """The reason why no operator of torch supports the call, or None."""
    if spec.max_logits:
        return NO_MAX_LOGITS
    return "torch's fused attention has no softcap" if spec.softcap else None
