"""Dense attention tile by tile in plain torch: the specification of every option.

It runs on any device and in any dtype up to float64, and materialises the scores of a tile. It is
for tests, and for calls that all other backends refuse. 16-bit inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ring_attn.backends.base import Backend, BackwardInputs, Tiles, band_mask
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

    def workspace_bytes(
        self, spec: AttentionSpec, tiles: Tiles, *, backward: bool = False, rebuilds: bool = False
    ) -> int:
        """Return the peak bytes of a step: results, scores, and copies that torch's einsum makes.

        Einsum copies what it cannot view as one batch of matrices: see `_Sizes`. It also copies
        dout if that is a part of the heads, as in `all_gather` in float32 with several KV heads.
        This copy is not counted: the peak of such a backward was 2.5 % higher.
        """
        peaks = [_Sizes.of(spec, tile) for tile in tiles]
        numbers = max(sizes.backward() if backward else sizes.forward() for sizes in peaks)
        return numbers * spec.accum_dtype.itemsize


@dataclass(frozen=True)
class _Sizes:
    """Numbers in the tensors of a piece, for the peak of the methods above.

    Attributes:
        scores, statistic: one number for each pair, and for each row of q.
        q, dout, k, v: the inputs; results have the same sizes.
        casts: 1 if inputs are copied to the wider dtype, else 0.
        grouped: 1 if several q heads share a kv head. Then einsum copies each operand with both.
        apart: 1 if heads and batch cannot be viewed as one dim, so that einsum copies k and v.
        placed: 1 if an operand whose rows are summed is copied, or a result is put in order.
        capped: 1 if the slope of the cap is kept.
    """

    scores: int
    statistic: int
    q: int
    dout: int
    k: int
    v: int
    casts: int
    grouped: int
    apart: int
    placed: int
    capped: int

    @classmethod
    def of(cls, spec: AttentionSpec, piece: Tile) -> _Sizes:
        q_rows = spec.batch * piece.rows * spec.nheads
        kv_rows = spec.batch * piece.cols * spec.nheads_kv
        grouped = spec.nheads > spec.nheads_kv
        several = spec.nheads_kv > 1
        return cls(
            scores=q_rows * piece.cols,
            statistic=q_rows,
            q=q_rows * spec.headdim,
            dout=q_rows * spec.headdim_v,
            k=kv_rows * spec.headdim,
            v=kv_rows * spec.headdim_v,
            casts=int(spec.dtype != spec.accum_dtype),
            grouped=int(grouped),
            apart=int(several and spec.batch > 1),
            placed=int(several and (grouped or spec.batch > 1)),
            capped=int(spec.softcap > 0),
        )

    def forward(self) -> int:
        """Return the peak of `forward_piece`: of the scores, of acc, or of its last results."""
        by_q = max(self.grouped, self.apart)
        scores = (self.casts + by_q) * self.q + (self.casts + self.apart) * self.k + self.scores
        both = 2 * self.scores + self.statistic + self.dout  # s, p, m and acc
        acc = both + (self.casts + self.apart) * self.v + self.grouped * self.scores
        results = both + self.statistic + self.grouped * self.placed * self.dout
        return max(scores, acc, results)

    def backward(self) -> int:
        """Return the peak of `backward_piece`: of s, dv, ds, dq or dk."""
        by_q = max(self.grouped, self.apart)
        held = self.casts * (self.k + self.v + self.dout)
        s = held + (self.casts + by_q) * self.q + self.apart * self.k + self.scores
        held += (2 + self.capped) * self.scores + self.v  # s, p and dv
        dv = held + self.grouped * self.scores + self.placed * self.dout
        dp = held + by_q * self.dout + self.apart * self.v + self.scores
        ds = held + 2 * self.scores
        held += self.scores + self.q  # ds and dq
        dq = held + self.grouped * self.scores + self.apart * self.k
        dk = held + self.grouped * self.scores + (self.casts + self.placed) * self.q + self.k
        return max(s, dv, dp, ds, dq, dk)


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
