"""Dense attention tile by tile in plain torch: the specification of every option.

It runs on any device and in any dtype up to float64, and materialises the scores of a tile. It is
for tests, and for calls that all other backends refuse. 16-bit inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from ring_attn.backends.base import Backend, BackwardInputs, band_mask
from ring_attn.core.cache import Sequences
from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile


class ReferenceBackend(Backend):
    """Computes scores, mask, exponentials and sums exactly as in the equations."""

    name = "reference"

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        return None

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """Compute s = the scores of q k^T, m = max s, p = exp(s - m), l = sum p, acc = p v."""
        wide = accum_dtype(q.dtype)
        s = _masked(_scores(q, k, scores, wide), piece)
        m = s.amax(-1)  # finite, because every row of a tile sees a key
        p = (s - m.unsqueeze(-1)).exp_()
        acc = torch.einsum("bgnij,bjgd->bignd", p, v.to(wide))
        l = p.sum(-1)
        return (
            rearrange(acc, "b i g n d -> b i (g n) d"),
            rearrange(m, "b g n i -> b (g n) i"),
            rearrange(l, "b g n i -> b (g n) i"),
        )

    def decode_sequences(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        cache_seqlens: Tensor,
        block_table: Tensor | None = None,
        *,
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        """Compute all sequences at once, over all rows of the cache.

        The host reads no length. Rows after the end of a sequence may have any value, even NaN.
        """
        wide, groups = accum_dtype(q.dtype), k.size(2)
        k = sequences.gathered(k, block_table).to(wide)
        v = sequences.gathered(v, block_table).to(wide)
        seen = sequences.seen(cache_seqlens, q.size(1))  # (batch, queries, 2)
        rows = torch.arange(k.size(1), device=q.device)
        visible = (rows >= seen[..., :1]) & (rows < seen[..., 1:])  # (batch, queries, rows)
        hidden = ~visible[:, None, None]  # for all kv heads and q heads
        s = _scores(q, k, scores, wide).masked_fill_(hidden, -torch.inf)
        lse = s.logsumexp(-1, keepdim=True)
        p = (s - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        # A weight of 0 times NaN would be NaN.
        v = v.masked_fill(~visible.any(1)[:, :, None, None], 0.0)
        out = torch.einsum("bgnij,bjgd->bignd", p, v)
        return (
            rearrange(out, "b i g n d -> b i (g n) d"),
            rearrange(lse, "b g n i 1 -> b (g n) i", g=groups).contiguous(),
        )

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """Compute p = exp(s - lse), ds = p (do v^T - delta) scale, and from them the gradients.

        dv = p^T do, dq = ds k, dk = ds^T q. With softcap, ds is multiplied by the slope of the cap,
        1 - (s / softcap)^2.
        """
        dtype, groups = inputs.delta.dtype, inputs.k.size(2)
        q, k, v = inputs.q, inputs.k.to(dtype), inputs.v.to(dtype)
        lse = rearrange(inputs.lse, "b (g n) i -> b g n i 1", g=groups)
        delta = rearrange(inputs.delta, "b (g n) i -> b g n i 1", g=groups)
        dout = _grouped(inputs.dout, groups).to(dtype)
        s = _scores(q, k, scores, dtype)
        slope = 1.0 - (s / scores.softcap) ** 2 if scores.softcap else 1.0
        slope = scores.softmax_scale * slope
        p = (_masked(s, piece) - lse).exp_()
        dv = torch.einsum("bgnij,bignd->bjgd", p, dout)
        ds = p * (torch.einsum("bignd,bjgd->bgnij", dout, v) - delta) * slope
        dq = torch.einsum("bgnij,bjgd->bignd", ds, k)
        dk = torch.einsum("bgnij,bignd->bjgd", ds, _grouped(q, groups).to(dtype))
        return rearrange(dq, "b i g n d -> b i (g n) d"), dk, dv

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Return the bytes of scores that exist at the same time, and of copies of inputs."""
        # Tensors with the shape of the scores that exist at the same time.
        if backward:
            score_tensors = 5 if spec.softcap > 0 else 4
        else:
            score_tensors = 3 if spec.nheads > spec.nheads_kv else 2
        copied_rows = 0 if backward else 2 * kv_rows
        if spec.dtype != spec.accum_dtype:
            copied_rows += q_rows + 2 * kv_rows
        numbers = score_tensors * q_rows * piece.cols
        numbers += copied_rows * max(spec.headdim, spec.headdim_v)
        return numbers * spec.accum_dtype.itemsize


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Convert (batch, rows, nheads, dim) to (batch, rows, kv heads, q heads per kv head, dim)."""
    return rearrange(x, "b i (g n) d -> b i g n d", g=groups)


def _scores(q: Tensor, k: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """Return the scores before the mask, (batch, kv heads, q heads per kv head, rows, cols)."""
    s = torch.einsum("bignd,bjgd->bgnij", _grouped(q, k.size(2)).to(dtype), k.to(dtype))
    s *= scores.softmax_scale
    if scores.softcap:
        s.div_(scores.softcap).tanh_().mul_(scores.softcap)
    return s


def _masked(s: Tensor, tile: Tile) -> Tensor:
    """Set the scores outside the band of the tile to -inf, in place."""
    lo, hi = tile.corner_band
    if lo is None and hi is None:
        return s
    return s.masked_fill_(~band_mask(tile, s.device), -torch.inf)
