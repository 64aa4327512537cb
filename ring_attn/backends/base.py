"""The backend protocol: folds the tiles of one step into the running state, and back.

A backend is given the whole local tensors and the tiles of a step; it may take the tiles one by one
(`TileBackend`) or all at once. It never communicates and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.plan import MaskKind, Tile, make_tile
from ring_attn.spec import AttentionSpec
from ring_attn.state import State


class Backend(Protocol):
    """What the strategies need; tensors are (batch, rows, heads, dim) with any strides."""

    name: str

    def supports(self, spec: AttentionSpec) -> str | None:
        """None where this backend can run the call here, else the reason why not."""
        ...

    def new_state(self, q: Tensor, headdim_v: int) -> State:
        """The empty state of q's rows."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        state: State,
        *,
        softmax_scale: float,
    ) -> State:
        """Folds the tiles of one step into the state, in their order."""
        ...

    def finalize(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`out` in dtype and `lse` (batch, nheads, rows); -inf where a row saw nothing."""
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Sequence[Tile],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        softmax_scale: float,
        out: Tensor | None = None,
    ) -> None:
        """Adds the tiles' gradients to dq, dk, dv (float32), with the global lse and delta.

        `out` is given where the q rows are at home. An operator that wants it rather than delta
        and is not given it rebuilds what it needs with `out_from_delta`.
        """
        ...

    def workspace_bytes(
        self,
        spec: AttentionSpec,
        tiles: Sequence[Tile],
        *,
        backward: bool = False,
        rebuilds_out: bool = False,
    ) -> int:
        """Most bytes that this backend allocates at a time beside the arguments, for one step.

        `rebuilds_out` is a backward that is not given `out`.
        """
        ...


class TileBackend:
    """A backend that takes the tiles one by one; it states `forward_tile` and `backward_tile`."""

    name: str

    def new_state(self, q: Tensor, headdim_v: int) -> State:
        """The empty state of q's rows."""
        batch, rows, nheads, _ = q.shape
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return State((batch, rows, nheads, headdim_v), dtype, q.device)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        state: State,
        *,
        softmax_scale: float,
    ) -> State:
        """Folds the tiles of one step into the state, in their order."""
        for tile in tiles:
            self.forward_tile(q, k, v, tile, state, softmax_scale)
        return state

    def finalize(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`out` in dtype and `lse` (batch, nheads, rows)."""
        return state.finalize(dtype)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Sequence[Tile],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        softmax_scale: float,
        out: Tensor | None = None,
    ) -> None:
        """Adds the tiles' gradients to dq, dk, dv."""
        side = self.q_side(q, dout, lse, delta, out)
        for tile in tiles:
            self.backward_tile(side, k, v, tile, dq, dk, dv, softmax_scale)

    def q_side(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What every tile's backward reads of the q side, made once a step: q, dout, lse, delta."""
        return q, dout, lse, delta

    def forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, state: State, softmax_scale: float
    ) -> None:
        """Folds one tile."""
        raise NotImplementedError

    def backward_tile(
        self,
        side: tuple[Tensor, Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        tile: Tile,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
    ) -> None:
        """Adds one tile's gradients."""
        raise NotImplementedError


def out_from_delta(dout: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """A stand-in for `out` that has the same `delta = rowsum(dout * out)`.

    Operators of flash-attention take `out` in the backward only to form delta. Where the Q side
    travels, delta does and `out` does not; its projection on dout is all that is left of it:
    `dout * delta / |dout|^2`. Rows are scaled first, so that small gradients do not underflow.

    Args:
        dout: (batch, rows, nheads, headdim_v).
        delta: (batch, nheads, rows) float32.
        dtype: of the result.

    Returns:
        As dout in shape.
    """
    wide = dout.to(delta.dtype)
    unit = wide.abs()
    largest = unit.amax(-1, keepdim=True)  # vector_norm(inf) takes 18 times as long on CPU
    torch.div(wide, largest.masked_fill(largest == 0.0, 1.0), out=unit)
    norm = torch.linalg.vector_norm(unit, 2, -1, keepdim=True).square_().mul_(largest)
    norm.masked_fill_(norm == 0.0, 1.0)
    return unit.mul_(delta.transpose(1, 2).unsqueeze(-1) / norm).to(dtype)


def band_mask(tile: Tile, device: torch.device) -> Tensor:
    """(rows, cols) booleans, True where the tile's band is."""
    lo, hi = tile.corner_band
    mask = torch.ones(tile.rows, tile.cols, dtype=torch.bool, device=device)
    if hi is not None:
        mask.tril_(hi)
    if lo is not None:
        mask.triu_(lo)
    return mask


def flash_window(piece: Tile) -> tuple[int, int]:
    """The band as flash-attention's window, counted from the bottom right corner; -1 is unbounded.

    For the pieces of `flash_pieces`, which the package's rules for large windows do not touch.
    """
    corner = piece.cols - piece.rows
    lo, hi = piece.corner_band
    return (-1 if lo is None else corner - lo, -1 if hi is None else hi - corner)


def flash_pieces(tile: Tile) -> Iterator[Tile]:
    """The tile as masked pieces with no more rows than columns, and full ones of any shape.

    FlashAttention 2 takes a side of at least seqlen_k as unbounded, and an unbounded side next to a
    bounded one as seqlen_k, both counted from the bottom right corner: with more rows than columns
    a bound that cuts something could be dropped, or one that cuts nothing could cut.
    """
    if tile.kind is MaskKind.FULL or tile.rows <= tile.cols:
        yield tile
    elif tile.kind is MaskKind.CAUSAL:
        corner = tile.q.start + tile.cols
        yield from tile_within(tile, slice(tile.q.start, corner), tile.kv)
        yield from tile_within(tile, slice(corner, tile.q.stop), tile.kv)
    else:
        for start in range(tile.q.start, tile.q.stop, tile.cols):
            rows = slice(start, min(start + tile.cols, tile.q.stop))
            for piece in tile_within(tile, rows, tile.kv):
                yield from flash_pieces(piece)


def tile_within(tile: Tile, q: slice, kv: slice) -> Iterator[Tile]:
    """The part of the tile in a rectangle, if there is any."""
    part = make_tile(q, kv, *tile.band)
    if part is not None:
        yield part


def equal_headdims(*tensors: Tensor, multiple: int) -> list[Tensor]:
    """Zero columns up to one common headdim: they change neither scores nor the columns kept."""
    dim = max(x.size(-1) for x in tensors)
    dim = -(-dim // multiple) * multiple
    return [F.pad(x, (0, dim - x.size(-1))) if x.size(-1) < dim else x for x in tensors]
