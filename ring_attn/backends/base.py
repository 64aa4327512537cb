"""The backend: a forward folds a step's tiles into a state, a backward adds gradients.

A backend gets the whole local tensors and all tiles of a step; it may compute the tiles one by one
or together. It never communicates and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.cache import Sequences, tiles_of
from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State, merge_tree
from ring_attn.core.tiles import MaskKind, Tile
from ring_attn.transport import capture

Function = TypeVar("Function", bound=Callable[..., Any])

Tiles = Sequence[Tile]


class BackwardInputs(NamedTuple):
    """Tensors that the backward of a step reads; q, k, v and dout may have any strides.

    lse and delta, in the state's dtype and contiguous, are those of `Backend.row_statistics`, over
    all keys of the call.
    """

    q: Tensor  # (batch, rows, nheads, headdim)
    k: Tensor  # (batch, rows_kv, nheads_kv, headdim)
    v: Tensor  # (batch, rows_kv, nheads_kv, headdim_v)
    dout: Tensor  # (batch, rows, nheads, headdim_v)
    lse: Tensor  # (batch, nheads, rows)
    delta: Tensor  # rowsum(dO * O), likewise


# dq, dk, dv to add to: contiguous, in the state's dtype. None leaves a gradient out.
Gradients = tuple[Tensor, Tensor, Tensor]
SomeGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Backend:
    """Computes a call's steps; tensors are (batch, rows, heads, dim) with any strides.

    A state passes from step to step: `new_state` makes it, and `finalize` consumes it. By default
    the tiles of a step are cut into pieces that are computed one by one, in `forward_piece` and
    `backward_piece`, and folded into a `core.state.State`. A backend that computes the tiles
    together replaces all methods.
    """

    name: str  # as in `PREFERENCE`
    # Each tile takes launches and a merge of its own.
    tile_by_tile = True
    # Results have the same bits however the tiles are spread over calls, if the calls come in
    # folding order, accumulate in place into one state and one set of gradients, and are cut at
    # multiples of `bits_unit` positions.
    in_order = False
    bits_unit = 1
    # `decode` is another algorithm, for a few queries against many keys.
    decodes = False
    # The kernels load and store the state; the last one writes out and lse.
    carries_state = False
    # Two runs of a backward on CUDA have the same bits; on CPUs they always do.
    deterministic = True
    # `backward_piece` reads `out` instead of delta.
    reads_out = False
    # `row_statistics` makes a new lse, and does not return its argument.
    converts_lse = False

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        """None if this backend can run the call on this machine, else the reason why not.

        `explicit`: the user asked for this backend by name; test-only backends refuse other calls.
        `decoding`: the call only decodes, which some backends do for greater head dims.
        """
        raise NotImplementedError

    def in_one_pass(self, spec: AttentionSpec) -> bool:
        """Tells whether one pass for all gradients is faster than two, for dq and for dk and dv."""
        return not self.in_order

    def new_state(self, q: Tensor, headdim_v: int, sinks: Tensor | None = None) -> Any:
        """The empty state of q's rows.

        `sinks`, (nheads,) in the state's dtype, are added to the denominators once, at the end.
        """
        batch, rows, nheads, _ = q.shape
        return State((batch, rows, nheads, headdim_v), accum_dtype(q.dtype), q.device, sinks)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        state: Any,
        *,
        scores: Scores,
        last: bool = False,
        beside_copies: bool = False,
    ) -> Any:
        """Folds the tiles of one step into the state, in their order.

        `last`: no more tiles follow, so the kernel may write out and lse at once. `beside_copies`:
        exchanges are in flight, for whose copies a kernel that stays on all multiprocessors leaves
        some of them.
        """
        for piece in _pieces_of(self, tuple(tiles), q.device.type):
            self._fold_piece(q, k, v, piece, state, scores)
        return state

    def finalize(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`out` in dtype, and `lse` (batch, nheads, rows), which includes the sinks.

        A row that attends to no key has lse -inf, or its sink.
        """
        results: tuple[Tensor, Tensor] = state.finalize(dtype)
        return results

    def merge(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Merges results of disjoint sets of keys, in the tree of `core.state.merge_tree`.

        May overwrite `out` and `lse`, which are contiguous except in the first dim.
        """
        return merge_tree(out, lse, sinks, dtype)

    def max_logits(self, state: Any) -> Tensor:
        """(nheads,) greatest score so far, read before `finalize`; -inf if no key was seen.

        Called only on backends that support a spec with `max_logits`, and only without `last`.
        """
        return greatest(state.m)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse`, in the state's dtype, of all queries over all tiles of a call."""
        raise NotImplementedError

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
        """`decode` for the last queries of sequences, whose lengths the host need not know.

        By default the host reads them, and computes one sequence after the other.
        """
        capture.refuse(f"the host would read cache_seqlens for backend {self.name!r}")
        parts = []
        for i, seen in enumerate(sequences.seen(cache_seqlens, q.size(1)).tolist()):
            one, rows = slice(i, i + 1), max(stop for _, stop in seen)
            pages = None if block_table is None else block_table[one, : sequences.pages(rows)]
            own_k, own_v = (
                x[one] if pages is None else sequences.gathered(x, pages) for x in (k, v)
            )
            state = self.new_state(q[one], v.size(-1))
            state = self.forward(q[one], own_k, own_v, tiles_of(seen), state, scores=scores)
            parts.append(self.finalize(state, accum_dtype(q.dtype)))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def row_statistics(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """lse in the form that `backward` reads, and delta = rowsum(dO * O); once per call.

        All are (batch, nheads, rows) in the state's dtype. The argument `lse` is a natural
        logarithm.
        """
        wide = accum_dtype(out.dtype)
        return lse, (out.to(wide) * dout.to(wide)).sum(-1).transpose(1, 2).contiguous()

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Tiles,
        gradients: SomeGradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
    ) -> None:
        """Adds the tiles' gradients, dq and dk without the factor of `gradient_factor`.

        Only a backend that is `in_order` takes dq alone, or dk and dv alone, with the same bits.
        `out` is None on ranks that do not own the q rows: there an operator that needs `out`
        instead of delta builds one by `out_from_delta`.
        """
        dout = inputs.dout
        if out is None and self.reads_out:
            out = out_from_delta(dout, inputs.delta, self.compute_dtype(dout))
        for piece in _pieces_of(self, tuple(tiles), dout.device.type):
            self._add_piece(inputs, out, piece, cast(Gradients, gradients), scores)

    def gradient_factor(self, scores: Scores) -> float:
        """The factor by which the caller multiplies dq and dk, once after all steps."""
        return 1.0

    # -- for backends that compute the tiles one by one

    def workspace_bytes(
        self, spec: AttentionSpec, tiles: Tiles, *, backward: bool = False, rebuilds: bool = False
    ) -> int:
        """Peak bytes of a step beside its arguments: the largest piece's results and scratch.

        `rebuilds`: a backward whose `out` is None, and so is rebuilt.
        """
        wide, item, most = spec.accum_dtype.itemsize, spec.dtype.itemsize, 0
        item = wide if spec.device_type == "cpu" else item
        for piece in _pieces_of(self, tuple(tiles), spec.device_type):
            q_rows = spec.batch * piece.rows * spec.nheads
            kv_rows = spec.batch * piece.cols * spec.nheads_kv
            results = (q_rows + 2 * kv_rows * backward) * max(spec.headdim, spec.headdim_v) * item
            scratch = self.scratch_bytes(spec, piece, q_rows, kv_rows, backward=backward)
            most = max(most, results + q_rows * wide + scratch)
        if rebuilds and self.reads_out:
            rows = spec.batch * max(tile.q_end for tile in tiles) * spec.nheads
            most += rows * spec.headdim_v * item
        return most

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Bytes of a piece's copies and sums, for so many rows of all heads."""
        raise NotImplementedError

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        """Splits the tile into rectangles that are computed, and folded, in one call each."""
        yield tile

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of an `out` that is rebuilt from delta."""
        return x.dtype

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """`out` of a piece, perhaps with more dims, and lse (batch, nheads, rows); or acc, m, l."""
        raise NotImplementedError

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """dq, dk, dv of a piece, perhaps with more dims; `out` is not None if `reads_out`."""
        raise NotImplementedError

    def _fold_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, state: State, scores: Scores
    ) -> None:
        # A function, which frees a piece's copies before the next piece is copied.
        rows, cols = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
        parts = q[:, rows], k[:, cols], v[:, cols]
        out, *statistics = self.forward_piece(*parts, piece, scores)
        state.fold(rows, out[..., : v.size(-1)], *statistics)

    def _add_piece(
        self,
        inputs: BackwardInputs,
        out: Tensor | None,
        piece: Tile,
        gradients: Gradients,
        scores: Scores,
    ) -> None:
        q, k, v, dout, lse, delta = inputs
        rows, cols = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
        lse, delta = lse[:, :, rows].contiguous(), delta[:, :, rows]
        part = BackwardInputs(q[:, rows], k[:, cols], v[:, cols], dout[:, rows], lse, delta)
        grads = self.backward_piece(part, None if out is None else out[:, rows], piece, scores)
        for total, grad, place in zip(gradients, grads, (rows, cols, cols), strict=True):
            total[:, place] += grad[..., : total.size(-1)]


@lru_cache(maxsize=1024)
def _pieces_of(backend: Backend, tiles: tuple[Tile, ...], device_type: str) -> tuple[Tile, ...]:
    return tuple(piece for tile in tiles for piece in backend.pieces(tile, device_type))


def why_not_alike(backend: Backend, whole: AttentionSpec, part: AttentionSpec) -> str | None:
    """The reason why parts of the heads have other bits than all together, or None."""
    if backend.in_one_pass(whole) == backend.in_one_pass(part):
        return None
    return (
        f"{part.nheads_kv} of {whole.nheads_kv} kv heads are computed at a time, and backend "
        f"{backend.name!r} has another kernel for so few"
    )


def architecture() -> str:
    """The current GPU's architecture, such as "sm_90"; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties().gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def gpu_model() -> str:
    """The model of torch's current GPU, by name and size; "" without a GPU."""
    return _model(torch.cuda.current_device()) if torch.cuda.is_available() else ""


@cache
def _model(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"


def cached_by_gpu(maxsize: int) -> Callable[[Function], Function]:
    """Caches results by arguments, the first a spec, and by the model of the current GPU.

    A process may have GPUs of several models, on which other backends are fast, or right.
    """

    def decorate(function: Function) -> Function:
        cached = lru_cache(maxsize)(lambda model, *args, **options: function(*args, **options))

        @wraps(function)
        def call(spec: AttentionSpec, *args: Any, **options: Any) -> Any:
            model = gpu_model() if spec.device_type == "cuda" else ""
            return cached(model, spec, *args, **options)

        vars(call)["cache_clear"] = cached.cache_clear
        return cast(Function, call)

    return decorate


NO_MAX_LOGITS = "returns lse but no maximum: return_max_logits needs triton or reference"


def greatest(m: Tensor) -> Tensor:
    """Maximum over batch and rows: (batch, nheads, rows) -> (nheads,); -inf without rows."""
    flat = m.transpose(0, 1).flatten(1)
    return flat.amax(1) if flat.size(1) else flat.new_full((flat.size(0),), -torch.inf)


def out_from_delta(dout: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """A stand-in for `out` with the same `delta = rowsum(dout * out)`.

    In the backward, flash-attention's operators read `out` only to form delta. When the Q side
    travels, delta travels with it and `out` does not. The stand-in is the projection of `out` on
    dout, `dout * delta / |dout|^2`. Rows are scaled first, lest small gradients underflow.
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
    """The band as flash-attention's window, relative to the bottom right corner; -1 is unbounded.

    Only for pieces of `flash_pieces`: flash-attention changes large windows on other tiles.
    """
    corner = piece.cols - piece.rows
    lo, hi = piece.corner_band
    return (-1 if lo is None else corner - lo, -1 if hi is None else hi - corner)


def flash_pieces(tile: Tile) -> Iterator[Tile]:
    """Splits a tile into masked pieces with at most as many rows as columns, and full pieces.

    FlashAttention 2 treats a window side of at least seqlen_k as unbounded, and an unbounded side
    next to a bounded one as seqlen_k, both from the bottom right corner. With more rows than
    columns this could drop a bound that masks keys, or mask keys where no bound is.
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
    """The part of a tile within a rectangle, if it is not empty."""
    part = tile & Tile(q.start, q.stop, kv.start, kv.stop)
    if part is not None:
        yield part


def equal_headdims(*tensors: Tensor, multiple: int) -> list[Tensor]:
    """Pads all tensors with zero columns to one headdim; scores and other columns do not change."""
    dim = max(x.size(-1) for x in tensors)
    dim = -(-dim // multiple) * multiple
    return [F.pad(x, (0, dim - x.size(-1))) if x.size(-1) < dim else x for x in tensors]
