"""The backend protocol: folds the tiles of one step into the running state, and back.

A backend is given the whole local tensors and the tiles of a step; it may take the tiles one by one
(`TileBackend`) or all at once. It never communicates and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State, merge_tree
from ring_attn.core.tiles import MaskKind, Tile, make_tile


class BackwardInputs(NamedTuple):
    """Tensors that the backward of a step reads.

    Attributes:
        q: (batch, rows, nheads, headdim), of any strides; likewise k, v and dout.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        dout: (batch, rows, nheads, headdim_v).
        lse: (batch, nheads, rows) contiguous, in the type of the state, over all keys of the call,
            as the backend's `row_statistics` returns it.
        delta: likewise; rowsum(dO * O).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


# dq, dk, dv in the type of the state, contiguous, which are added to; and some of them.
Gradients = tuple[Tensor, Tensor, Tensor]
SomeGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Backend(Protocol):
    """Computes a call's steps; tensors are (batch, rows, heads, dim) with any strides.

    The state is the backend's own: it is made by `new_state`, handed from step to step and used up
    by `finalize`. `in_order` says that it is an `InOrderBackend`, `carries_state` that its kernels
    load and store the state, the first of a call making it and the last writing out and lse, and
    `deterministic` that two runs of a backward on CUDA have the same bits, as on CPUs all have.
    `converts_lse` says that `row_statistics` makes a new lse, and does not return the one it takes.
    """

    name: str
    in_order: bool
    carries_state: bool
    deterministic: bool
    converts_lse: bool

    def supports(self, spec: AttentionSpec, *, explicit: bool = False) -> str | None:
        """None where this backend can run the call here, else the reason why not.

        `explicit` says that the user asked for this backend by name: a backend for testing takes no
        other calls.
        """
        ...

    def new_state(self, q: Tensor, headdim_v: int, sinks: Tensor | None = None) -> Any:
        """The empty state of q's rows.

        `sinks` (nheads,), in the type of the state, join the denominators once, at the end.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        state: Any,
        *,
        scores: Scores,
        last: bool = False,
    ) -> Any:
        """Folds the tiles of one step into the state, in their order.

        `last` says that no more tiles follow, so that out and lse may be written right away.
        """
        ...

    def finalize(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`out` in dtype and `lse` (batch, nheads, rows) with the sinks in it.

        A row that saw nothing has lse -inf, or its sink.
        """
        ...

    def merge(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Results of disjoint sets of keys, merged in the tree of `core.state.merge_tree`.

        `out` and `lse` may be used up; they are contiguous but for the first dim.
        """
        ...

    def max_logits(self, state: Any) -> Tensor:
        """(nheads,) greatest score of the state, before `finalize`; -inf where nothing is seen.

        Only of a backend that supports a spec with `max_logits`; `last` has not been said then.
        """
        ...

    def row_statistics(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """lse as `backward` reads it, and delta = rowsum(dO * O), once a call.

        Both are (batch, nheads, rows) in the type of the state, as is the `lse` that is given, a
        natural logarithm.
        """
        ...

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Sequence[Tile],
        gradients: Gradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
    ) -> None:
        """Adds the tiles' gradients.

        dq and dk lack the factor of `gradient_factor`. `out` is given where the q rows are on the
        rank that owns them. Elsewhere an operator that needs `out` rather than delta rebuilds one
        with `out_from_delta`.
        """
        ...

    def gradient_factor(self, scores: Scores) -> float:
        """The factor by which the caller multiplies dq and dk once, after all steps."""
        ...

    def forward_bytes(
        self, spec: AttentionSpec, rows: int, steps: Sequence[Sequence[Tile]], *, last: bool = True
    ) -> int:
        """Most bytes that state, results and workspace take at a time, for so many q rows.

        Without `last` more steps follow.
        """
        ...

    def merge_bytes(self, spec: AttentionSpec, rows: int, num_sets: int) -> int:
        """Most bytes that results and workspace of `merge` take at a time, for so many queries."""
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


class InOrderBackend(Backend, Protocol):
    """A backend that gives the same bits however the tiles are spread over calls.

    That holds while calls come in folding order, accumulate into the same state and gradients in
    place, and are cut at multiples of `bits_unit` positions.
    """

    bits_unit: int

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Sequence[Tile],
        gradients: SomeGradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
    ) -> None:
        """Adds the gradients to dq, or to dk and dv, or to all at once with the same bits."""
        ...


def folds_in_order(backend: Backend) -> TypeGuard[InOrderBackend]:
    """Whether the backend is an `InOrderBackend`."""
    return backend.in_order


def in_one_pass(backend: Backend, spec: AttentionSpec) -> bool:
    """Whether all gradients at once take less time than dq and then dk and dv.

    By default that is so where a backend makes them only at once.
    """
    found = getattr(backend, "in_one_pass", None)
    return not folds_in_order(backend) if found is None else bool(found(spec))


def why_not_alike(backend: Backend, whole: AttentionSpec, part: AttentionSpec) -> str | None:
    """Why a part of the heads has other bits than the same heads among all; None where not."""
    if in_one_pass(backend, whole) == in_one_pass(backend, part):
        return None
    return (
        f"of {whole.nheads_kv} kv heads {part.nheads_kv} are computed at a time, and for so few "
        f"backend {backend.name!r} has another kernel"
    )


def architecture() -> str:
    """The current GPU's, as compilers call it; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties().gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


class DecodingBackend(Backend, Protocol):
    """A backend that computes a few queries against many keys in another way."""

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """`out` in the type of the state and `lse` of all queries over all tiles of a call."""
        ...

    def decode_bytes(self, spec: AttentionSpec, rows: int, tiles: Sequence[Tile]) -> int:
        """Most bytes that results and workspace of `decode` take at a time."""
        ...


def decodes(backend: Backend) -> TypeGuard[DecodingBackend]:
    """Whether the backend is a `DecodingBackend`."""
    return hasattr(backend, "decode")


class TileBackend:
    """A backend that takes the tiles one by one; it states `forward_tile` and `backward_tile`."""

    name: str
    in_order = False
    carries_state = False
    deterministic = True
    converts_lse = False

    def new_state(self, q: Tensor, headdim_v: int, sinks: Tensor | None = None) -> State:
        """The empty state of q's rows."""
        batch, rows, nheads, _ = q.shape
        return State((batch, rows, nheads, headdim_v), accum_dtype(q.dtype), q.device, sinks)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        state: State,
        *,
        scores: Scores,
        last: bool = False,
    ) -> State:
        """Folds the tiles of one step into the state, in their order."""
        for tile in tiles:
            self.forward_tile(q, k, v, tile, state, scores)
        return state

    def finalize(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`out` in dtype and `lse` (batch, nheads, rows)."""
        return state.finalize(dtype)

    def merge(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """`merge_tree`."""
        return merge_tree(out, lse, sinks, dtype)

    def max_logits(self, state: State) -> Tensor:
        """(nheads,) greatest maximum of any row."""
        return greatest(state.m)

    def row_statistics(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """lse as it is, and delta = rowsum(dO * O)."""
        wide = accum_dtype(out.dtype)
        return lse, (out.to(wide) * dout.to(wide)).sum(-1).transpose(1, 2).contiguous()

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Sequence[Tile],
        gradients: Gradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
    ) -> None:
        """Adds the tiles' gradients."""
        q, k, v, dout, lse, delta = inputs
        side = self.q_side(q, dout, lse, delta, out)
        for tile in tiles:
            self.backward_tile(side, k, v, tile, gradients, scores)

    def gradient_factor(self, scores: Scores) -> float:
        """1: the gradients of every tile have been scaled."""
        return 1.0

    def forward_bytes(
        self, spec: AttentionSpec, rows: int, steps: Sequence[Sequence[Tile]], *, last: bool = True
    ) -> int:
        """Most bytes that `State`, its merges and a tile's results take at a time."""
        statistics = spec.batch * rows * spec.nheads * spec.accum_dtype.itemsize
        acc = statistics * spec.headdim_v
        most, first = 0, True
        for tiles in steps:
            for part in self.folded(spec, tiles):
                # The state takes over the first part's output where it has all rows; every later
                # merge has four more statistics than the state's own two.
                state = statistics if first and part.rows == rows else acc + 6 * statistics
                most = max(most, state + self.workspace_bytes(spec, [part]))
                first = False
        rounded = acc // 2 if spec.dtype != spec.accum_dtype else 0
        return max(most, acc + 4 * statistics + rounded)

    def merge_bytes(self, spec: AttentionSpec, rows: int, num_sets: int) -> int:
        """Most bytes that `merge_tree` takes at a time: in its first level, or at its root."""
        statistics = spec.batch * rows * spec.nheads * spec.accum_dtype.itemsize
        acc = statistics * spec.headdim_v
        # Messages of all ranks are no one tensor of batch entries.
        copied = num_sets * (acc + statistics) if min(spec.batch, num_sets) > 1 else 0
        rounded = acc // 2 if spec.dtype != spec.accum_dtype else 0
        root = acc + max(rounded + 3 * statistics, (6 if spec.sinks else 4) * statistics)
        level = num_sets // 2 * 4 * statistics
        return copied + num_sets * statistics + max(level, root)

    def folded(self, spec: AttentionSpec, tiles: Sequence[Tile]) -> Iterator[Tile]:
        """The tiles, or parts of them, that are folded into the state one at a time."""
        yield from tiles

    def workspace_bytes(
        self,
        spec: AttentionSpec,
        tiles: Sequence[Tile],
        *,
        backward: bool = False,
        rebuilds_out: bool = False,
    ) -> int:
        """Most bytes that one step takes beside the arguments."""
        raise NotImplementedError

    def q_side(
        self, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, dout, lse, delta as every tile's backward reads them, made once a step."""
        return q, dout, lse, delta

    def forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, state: State, scores: Scores
    ) -> None:
        """Folds one tile."""
        raise NotImplementedError

    def backward_tile(
        self,
        side: tuple[Tensor, Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        tile: Tile,
        gradients: Gradients,
        scores: Scores,
    ) -> None:
        """Adds one tile's gradients."""
        raise NotImplementedError


NO_MAX_LOGITS = "gives lse and no maximum: return_max_logits is for triton and reference"


def greatest(m: Tensor) -> Tensor:
    """(batch, nheads, rows) -> (nheads,), -inf of no rows."""
    flat = m.transpose(0, 1).flatten(1)
    return flat.amax(1) if flat.size(1) else flat.new_full((flat.size(0),), -torch.inf)


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
    """(rows, cols) booleans, True within the tile's band."""
    lo, hi = tile.corner_band
    mask = torch.ones(tile.rows, tile.cols, dtype=torch.bool, device=device)
    if hi is not None:
        mask.tril_(hi)
    if lo is not None:
        mask.triu_(lo)
    return mask


def flash_window(piece: Tile) -> tuple[int, int]:
    """The band as flash-attention's window, counted from the bottom right corner; -1 is unbounded.

    Only for pieces of `flash_pieces`: flash-attention changes large windows of other tiles.
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
