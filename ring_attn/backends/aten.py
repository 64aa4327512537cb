"""torch's fused attention operators that return lse: flash on CPU, flash and cuDNN on CUDA.

The masks that an operator supports decide how a tile is cut into operator calls:

    operator        supported masks                      so a tile becomes
    CPU flash       none, top-left causal, a dense mask  full and causal pieces; window edges masked
                                                         in blocks of EDGE rows
    CUDA flash      any band, as a window counted from   one call, or few where it has more rows
                    the bottom right corner              than columns
    CUDA cuDNN      none, top-left causal                full and square causal pieces; tiles of a
                                                         window are computed by flash

Every row of a tile sees a key (`tiles.Tile`). Therefore the values of operators for rows without
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

# The most bytes of a block of scores of the CPU operator, which are 256 x 512 numbers in float32.
# A thread holds one block in the forward, and two in the backward: of scores and their gradients.
BLOCK_BYTES = 256 * 512 * 4

# Rows per piece of a tile of a window on CPU, whose two edges are masked pieces of EDGE x EDGE.
EDGE = 256


class AtenBackend(Backend):
    """torch's flash attention, on CPU and CUDA.

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
        on_cpu = q.device.type == "cpu"
        (q,) = _computable(q)
        k, v = _computable_kv(k, v)
        q, k, v = equal_headdims(q, k, v, multiple=1 if on_cpu else 8)
        if on_cpu:
            q, k, v = _heads_first(q, k, v)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q,
                k,
                v,
                dropout_p=0.0,
                is_causal=_form(piece).is_causal,
                attn_mask=_dense_mask(piece, q),
                scale=scores.softmax_scale,
            )
            return out.transpose(1, 2), lse
        left, right = flash_window(piece)
        out, lse, *_ = aten._flash_attention_forward(
            q,
            k,
            v,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.size(1),
            max_k=k.size(1),
            dropout_p=0.0,
            is_causal=False,
            return_debug_mask=False,
            scale=scores.softmax_scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        assert out is not None, "these operators read out"
        lse = inputs.lse
        on_cpu = inputs.q.device.type == "cpu"
        dout, q, out = _computable(inputs.dout, inputs.q, out)
        k, v = _computable_kv(inputs.k, inputs.v)
        dout, q, k, v, out = equal_headdims(dout, q, k, v, out, multiple=1 if on_cpu else 8)
        if on_cpu:
            dout, q, k, v, out = _heads_first(dout, q, k, v, out)
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                dropout_p=0.0,
                is_causal=_form(piece).is_causal,
                attn_mask=_dense_mask(piece, q),
                scale=scores.softmax_scale,
            )
            return [grad.transpose(1, 2) for grad in grads]
        left, right = flash_window(piece)
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)  # read only for dropout
        gradients: tuple[Tensor, ...] = aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.size(1),
            max_k=k.size(1),
            dropout_p=0.0,
            is_causal=False,
            rng_state=rng_state,
            unused=rng_state,
            scale=scores.softmax_scale,
            window_size_left=left,
            window_size_right=right,
        )
        return gradients

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Return the bytes on a CPU of copies of k and v, inputs in float32, and scores."""
        if spec.device_type != "cpu":
            return 0
        copied_rows = 2 * kv_rows
        if spec.dtype in HALF_DTYPES:
            copied_rows += 3 * q_rows if backward else q_rows  # of q, dout and out, or of q
        copies = copied_rows * max(spec.headdim, spec.headdim_v)
        blocks = (2 if backward else 1) * torch.get_num_threads()
        return copies * spec.accum_dtype.itemsize + blocks * BLOCK_BYTES


class CudnnBackend(AtenBackend):
    """torch's cuDNN attention; tiles with the lower edge of a window are computed by flash."""

    name = "cudnn"

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        if spec.device_type == "cuda" and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return cudnn_reason(spec)

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        """Yield full and square causal pieces, since both alignments of a square are the same."""
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
        q, k, v = _heads_first(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q,
            k,
            v,
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=0.0,
            is_causal=piece.kind is MaskKind.CAUSAL,
            return_debug_mask=False,
            scale=scores.softmax_scale,
        )
        return out.transpose(1, 2), lse.reshape(q.shape[:3])

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        if piece.kind is MaskKind.WINDOW:
            return super().backward_piece(inputs, out, piece, scores)
        assert out is not None, "these operators read out"
        computable = _computable(inputs.dout, inputs.q, inputs.k, inputs.v, out)
        dout, q, k, v, out = _heads_first(*equal_headdims(*computable, multiple=8))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only for dropout
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            logsumexp=inputs.lse.unsqueeze(-1),
            philox_seed=seed,
            philox_offset=seed,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.size(2),
            max_k=k.size(2),
            dropout_p=0.0,
            is_causal=piece.kind is MaskKind.CAUSAL,
            scale=scores.softmax_scale,
        )
        return [grad.transpose(1, 2) for grad in grads]


def cudnn_reason(spec: AttentionSpec) -> str | None:
    """Return the reason why cuDNN does not support the call on any GPU, or None."""
    reason = _cuda_reason(spec, "cuDNN")
    if reason is None and max(spec.headdim, spec.headdim_v) > 128:
        return f"cuDNN supports headdim up to 128, got {max(spec.headdim, spec.headdim_v)}"
    return reason


def _causal_pieces(tile: Tile) -> Iterator[Tile]:
    """Split a tile into FULL and top-left CAUSAL rectangles.

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
    """Split runs of `edge` rows into right edge, unmasked middle and left edge.

    If the band is narrower than the run of rows, there is no middle: the run is one masked piece.
    """
    lo, hi = tile.lo, tile.hi
    assert lo is not None, "a tile without a lower bound has no window's edge"
    for start in range(tile.q.start, tile.q.stop, edge):
        rows = slice(start, min(start + edge, tile.q.stop))
        # All rows see the keys [left, right).
        left = max(rows.stop - 1 + lo, tile.kv.start)
        right = tile.kv.stop if hi is None else min(tile.kv.stop, rows.start + hi + 1)
        if left >= right:
            yield from tile_within(tile, rows, tile.kv)
            continue
        yield from tile_within(tile, rows, slice(right, tile.kv.stop))
        yield from tile_within(tile, rows, slice(left, right))
        yield from tile_within(tile, rows, slice(tile.kv.start, left))


class Form(NamedTuple):
    """The mask of a piece as arguments of the CPU operator."""

    is_causal: bool
    needs_mask: bool  # neither full nor top-left causal


@lru_cache(maxsize=4096)
def _form(piece: Tile) -> Form:
    full_or_causal = piece.corner_band in ((None, None), (None, 0))
    return Form(piece.kind is MaskKind.CAUSAL, not full_or_causal)


def _dense_mask(piece: Tile, q: Tensor) -> Tensor | None:
    """Return the additive mask of a piece that is neither FULL nor top-left CAUSAL."""
    if not _form(piece).needs_mask:
        return None
    hidden = ~band_mask(piece, q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of an operator's inputs: float32 for 16-bit tensors on CPU."""
    return torch.float32 if x.device.type == "cpu" and x.dtype.itemsize == 2 else x.dtype


def _computable(*tensors: Tensor) -> list[Tensor]:
    """Convert tensors to the dtype of the computation, with a contiguous last dim.

    The CPU operator ignores the stride of the last dim, and would read wrong elements.
    """
    converted = (x.to(_compute_dtype(x)) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in converted]


def _computable_kv(*tensors: Tensor) -> list[Tensor]:
    """Convert k and v like `_computable`; on a CPU, copy the rows of each head together.

    This makes the CPU operator 1.3 % faster forward and 2.5 % backward, and the copy costs 0.1 %
    (2k x 2k, 8 heads of 64, float32, one thread).
    """
    if tensors[0].device.type != "cpu":
        return _computable(*tensors)
    return [_rows_together(x) for x in tensors]


def _rows_together(x: Tensor) -> Tensor:
    """Copy (batch, rows, heads, dim) so that the rows of a head are contiguous."""
    heads_first = x.transpose(1, 2)  # (batch, heads, rows, dim)
    copy = x.new_empty(heads_first.shape, dtype=_compute_dtype(x)).copy_(heads_first)
    return copy.transpose(1, 2)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return views (batch, heads, rows, dim) of (batch, rows, heads, dim)."""
    return [x.transpose(1, 2) for x in tensors]


def _cuda_reason(spec: AttentionSpec, operator: str) -> str | None:
    if spec.device_type != "cuda":
        return f"torch's {operator} attention runs on cuda, got {spec.device_type}"
    if spec.dtype not in HALF_DTYPES:
        return (
            f"torch's {operator} attention on cuda supports float16 and bfloat16, got {spec.dtype}"
        )
    if max(spec.headdim, spec.headdim_v) > 256:
        return f"headdim must be at most 256, got {max(spec.headdim, spec.headdim_v)}"
    return _refused(spec)


def _refused(spec: AttentionSpec) -> str | None:
    """Return the reason why no operator of torch supports the call, or None."""
    if spec.max_logits:
        return NO_MAX_LOGITS
    return "torch's fused attention has no softcap" if spec.softcap else None
