"""Base class of backends: a forward folds a step's tiles into a state, a backward adds gradients.

A backend gets the whole local tensors and all tiles of a step, which it may compute one by one or
together. It never communicates and does not know the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.cache import Sequences, tiles_of
from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State, merge_tree
from ring_attn.core.tiles import MaskKind, Tile
from ring_attn.transport import capture

P = ParamSpec("P")
T = TypeVar("T")

Tiles = Sequence[Tile]

# A state has a class of its backend, and only the methods of that backend use it.
StepState = Any


class BackwardInputs(NamedTuple):
    """Tensors that the backward of a step reads.

    q, k, v and dout may have any strides. lse and delta are results of `Backend.row_statistics`
    over all keys of the call, contiguous and in the dtype of the state.
    """

    q: Tensor  # (batch, rows, nheads, headdim)
    k: Tensor  # (batch, rows_kv, nheads_kv, headdim)
    v: Tensor  # (batch, rows_kv, nheads_kv, headdim_v)
    dout: Tensor  # (batch, rows, nheads, headdim_v)
    lse: Tensor  # (batch, nheads, rows)
    delta: Tensor  # rowsum(dO * O), (batch, nheads, rows)


# The sums dq, dk, dv to which gradients are added: contiguous, in the dtype of the state. None
# leaves a gradient out.
Gradients = tuple[Tensor, Tensor, Tensor]
SomeGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Backend:
    """Computes the steps of a call; tensors are (batch, rows, heads, dim) with any strides.

    `new_state` makes the state, each step folds its tiles into it, and `finalize` consumes it. By
    default the tiles of a step are cut into pieces, which `forward_piece` and `backward_piece`
    compute one by one, and the results are folded into a `core.state.State`. A backend that
    computes the tiles together overrides these methods.
    """

    name: str  # as in `PREFERENCE`
    # Whether each tile takes its own launches and merge.
    tile_by_tile = True
    # Whether results do not depend, bit for bit, on how the tiles are distributed over calls, if
    # the calls are in folding order, accumulate in place into one state and one set of gradients,
    # and are cut at multiples of `bits_unit` positions.
    in_order = False
    bits_unit = 1
    # Whether `decode` is a separate algorithm, for a few queries and many keys.
    decodes = False
    # Whether the kernels load and store the state, and the last one writes out and lse.
    carries_state = False
    # Whether two runs of a backward on CUDA have the same bits; on CPUs they always have.
    deterministic = True
    # Whether `backward_piece` reads `out` instead of delta.
    reads_out = False
    # Whether `row_statistics` makes a new lse, instead of returning its argument.
    converts_lse = False

    def supports(
        self, spec: AttentionSpec, *, explicit: bool = False, decoding: bool = False
    ) -> str | None:
        """Return the reason why this backend cannot run the call on this machine, or None.

        Args:
            spec: the sizes, dtypes and options of the call.
            explicit: whether the user named this backend; backends for tests refuse other calls.
            decoding: whether the call only decodes, which some backends do for larger head dims.
        """
        raise NotImplementedError

    def in_one_pass(self, spec: AttentionSpec, kv_rows: int | None = None) -> bool:
        """Return whether one pass for all gradients is faster than two, for dq and for dk, dv.

        `kv_rows` are the rows of keys of a launch; None if the answer must not depend on them.
        """
        return not self.in_order

    def new_state(self, q: Tensor, headdim_v: int, sinks: Tensor | None = None) -> StepState:
        """Return the empty state of the rows of q.

        `sinks`, (nheads,) in the dtype of the state, are added to the denominators once, at the
        end.
        """
        batch, rows, nheads, _ = q.shape
        return State((batch, rows, nheads, headdim_v), accum_dtype(q.dtype), q.device, sinks)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        state: StepState,
        *,
        scores: Scores,
        last: bool = False,
        spare_sms: int = 0,
    ) -> StepState:
        """Fold the tiles of one step into the state, in order, and return the state.

        Args:
            q: (batch, rows, nheads, headdim).
            k: (batch, rows_kv, nheads_kv, headdim).
            v: (batch, rows_kv, nheads_kv, headdim_v).
            tiles: the tiles of the step.
            state: the state, which may be changed in place.
            scores: scale and cap of the scores.
            last: whether no more tiles follow, so that the kernel may write out and lse at once.
            spare_sms: multiprocessors that a kernel which would occupy all of them until its end
                leaves free, for the copies of exchanges in flight and for kernels of others.
        """
        for piece in _pieces_of(self, tuple(tiles), q.device.type):
            self._fold_piece(q, k, v, piece, state, scores)
        return state

    def finalize(self, state: StepState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `out` in `dtype`, and `lse` (batch, nheads, rows), which includes the sinks.

        A row that sees no key has lse -inf, or its sink.
        """
        results: tuple[Tensor, Tensor] = state.finalize(dtype)
        return results

    def merge(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Merge the results of disjoint sets of keys, in the tree of `core.state.merge_tree`.

        `out` and `lse` are contiguous except in the first dim, and may be overwritten.
        """
        return merge_tree(out, lse, sinks, dtype)

    def max_logits(self, state: StepState) -> Tensor:
        """Return the greatest score of each head so far, (nheads,); -inf if no key was seen.

        Called before `finalize`, without `last`, and only on backends that support a spec with
        `max_logits`.
        """
        return greatest(state.m)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return `out` and `lse` of all queries over all tiles of a call, in the state's dtype."""
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
        """Return the result of `decode` for the last queries of sequences.

        A backend need not read the lengths of the sequences on the host. This default does, and
        computes one sequence after another.

        Args:
            q: (batch, queries, nheads, headdim).
            k: (batch, rows, nheads_kv, headdim), or the pages of a paged cache.
            v: (batch, rows, nheads_kv, headdim_v), or pages.
            sequences: the rank's part of the sequences.
            cache_seqlens: (batch,) lengths of the sequences.
            block_table: (batch, pages) page table, or None.
            scores: scale and cap of the scores.
        """
        capture.refuse(f"the host would read cache_seqlens for backend {self.name!r}")
        outs, lses = [], []
        for i, seen in enumerate(sequences.seen(cache_seqlens, q.size(1)).tolist()):
            one = slice(i, i + 1)
            own_k, own_v = k[one], v[one]
            if block_table is not None:
                rows = max(stop for _, stop in seen)
                pages = block_table[one, : sequences.pages(rows)]
                own_k, own_v = sequences.gathered(k, pages), sequences.gathered(v, pages)
            state = self.new_state(q[one], v.size(-1))
            state = self.forward(q[one], own_k, own_v, tiles_of(seen), state, scores=scores)
            out, lse = self.finalize(state, accum_dtype(q.dtype))
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def row_statistics(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return lse in the form that `backward` reads, and delta = rowsum(dO * O); once per call.

        All are (batch, nheads, rows) in the dtype of the state. The argument `lse` is a natural
        logarithm.
        """
        wide = accum_dtype(out.dtype)
        delta = (out.to(wide) * dout.to(wide)).sum(-1)  # (batch, rows, nheads)
        return lse, delta.transpose(1, 2).contiguous()

    def backward(
        self,
        inputs: BackwardInputs,
        tiles: Tiles,
        gradients: SomeGradients,
        *,
        scores: Scores,
        out: Tensor | None = None,
        in_one_pass: bool | None = None,
    ) -> None:
        """Add the gradients of the tiles, dq and dk without the factor `gradient_factor`.

        Only a backend that is `in_order` computes dq separately from dk and dv, with the same bits.

        Args:
            inputs: the tensors to read.
            tiles: the tiles of the step.
            gradients: the sums of dq, dk and dv.
            scores: scale and cap of the scores.
            out: output of the forward; None on ranks that do not own the q rows. There, an operator
                that reads `out` instead of delta gets a stand-in by `out_from_delta`.
            in_one_pass: whether the launches of the call compute all gradients at once, by the
                method of that name; None lets the heads decide.
        """
        dout = inputs.dout
        if out is None and self.reads_out:
            out = out_from_delta(dout, inputs.delta, self.compute_dtype(dout))
        for piece in _pieces_of(self, tuple(tiles), dout.device.type):
            # A backend that computes pieces is not `in_order`, and gets all three sums.
            self._add_piece(inputs, out, piece, cast(Gradients, gradients), scores)

    def gradient_factor(self, scores: Scores) -> float:
        """Return the factor by which the caller multiplies dq and dk after all steps."""
        return 1.0

    # -- for backends that compute the tiles one by one

    def workspace_bytes(
        self, spec: AttentionSpec, tiles: Tiles, *, backward: bool = False, rebuilds: bool = False
    ) -> int:
        """Return the peak bytes of a step in addition to its arguments.

        They are the results and the scratch memory of the largest piece.

        Args:
            spec: the sizes, dtypes and options of the call.
            tiles: the tiles of the step.
            backward: whether the step is of a backward.
            rebuilds: whether it is of a backward whose `out` is None, and so is rebuilt.
        """
        wide = spec.accum_dtype.itemsize
        item = wide if spec.device_type == "cpu" else spec.dtype.itemsize
        peak = 0
        for piece in _pieces_of(self, tuple(tiles), spec.device_type):
            q_rows = spec.batch * piece.rows * spec.nheads
            kv_rows = spec.batch * piece.cols * spec.nheads_kv
            result_rows = q_rows + 2 * kv_rows if backward else q_rows  # of dq, dk, dv, or of out
            results = result_rows * max(spec.headdim, spec.headdim_v) * item
            scratch = self.scratch_bytes(spec, piece, q_rows, kv_rows, backward=backward)
            peak = max(peak, results + q_rows * wide + scratch)
        if rebuilds and self.reads_out:
            rows = spec.batch * max(tile.q_end for tile in tiles) * spec.nheads
            peak += rows * spec.headdim_v * item
        return peak

    def scratch_bytes(
        self, spec: AttentionSpec, piece: Tile, q_rows: int, kv_rows: int, *, backward: bool
    ) -> int:
        """Return the bytes of the copies and sums of a piece, from the rows of all heads."""
        raise NotImplementedError

    def pieces(self, tile: Tile, device_type: str) -> Iterator[Tile]:
        """Split the tile into rectangles, each of which is computed and folded in one call."""
        yield tile

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of an `out` that is rebuilt from delta."""
        return x.dtype

    def forward_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """Return (out, lse) of a piece, or (acc, m, l).

        `out` and `acc` may have more columns than v, as padding; the other results are
        (batch, nheads, rows).
        """
        raise NotImplementedError

    def backward_piece(
        self, inputs: BackwardInputs, out: Tensor | None, piece: Tile, scores: Scores
    ) -> Sequence[Tensor]:
        """Return dq, dk and dv of a piece, which may have more columns, as padding.

        `out` is not None if `reads_out`.
        """
        raise NotImplementedError

    def _fold_piece(
        self, q: Tensor, k: Tensor, v: Tensor, piece: Tile, state: State, scores: Scores
    ) -> None:
        # A function, so that the copies of a piece are freed before the next piece is copied.
        rows = slice(piece.q_start, piece.q_end)
        cols = slice(piece.k_start, piece.k_end)
        acc, *statistics = self.forward_piece(q[:, rows], k[:, cols], v[:, cols], piece, scores)
        state.fold(rows, acc[..., : v.size(-1)], *statistics)

    def _add_piece(
        self,
        inputs: BackwardInputs,
        out: Tensor | None,
        piece: Tile,
        gradients: Gradients,
        scores: Scores,
    ) -> None:
        rows = slice(piece.q_start, piece.q_end)
        cols = slice(piece.k_start, piece.k_end)
        part = BackwardInputs(
            q=inputs.q[:, rows],
            k=inputs.k[:, cols],
            v=inputs.v[:, cols],
            dout=inputs.dout[:, rows],
            lse=inputs.lse[:, :, rows].contiguous(),
            delta=inputs.delta[:, :, rows],
        )
        out = None if out is None else out[:, rows]
        grads = self.backward_piece(part, out, piece, scores)
        for total, grad, place in zip(gradients, grads, (rows, cols, cols), strict=True):
            total[:, place] += grad[..., : total.size(-1)]


@lru_cache(maxsize=1024)
def _pieces_of(backend: Backend, tiles: tuple[Tile, ...], device_type: str) -> tuple[Tile, ...]:
    return tuple(piece for tile in tiles for piece in backend.pieces(tile, device_type))


def why_bits_differ(backend: Backend, whole: AttentionSpec, part: AttentionSpec) -> str | None:
    """Return the reason why parts of the heads have other bits than all heads at once, or None."""
    if backend.in_one_pass(whole) == backend.in_one_pass(part):
        return None
    return (
        f"{part.nheads_kv} of {whole.nheads_kv} kv heads are computed at a time, and backend "
        f"{backend.name!r} has another kernel for so few"
    )


def architecture() -> str:
    """Return the architecture of the current GPU, such as "sm_90"; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties().gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def gpu_model() -> str:
    """Return the name and size of torch's current GPU; "" without a GPU."""
    return model_of_gpu(torch.cuda.current_device()) if torch.cuda.is_available() else ""


@cache
def model_of_gpu(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"


def cached_by_gpu(
    maxsize: int,
) -> Callable[
    [Callable[Concatenate[AttentionSpec, P], T]], Callable[Concatenate[AttentionSpec, P], T]
]:
    """Cache the results of a function by its arguments and by the model of the current GPU.

    The first argument is a spec. A process may have GPUs of several models, on which different
    backends are fast, or correct. `cache_clear` of the decorated function clears the cache.
    """

    def decorate(
        function: Callable[Concatenate[AttentionSpec, P], T],
    ) -> Callable[Concatenate[AttentionSpec, P], T]:
        @lru_cache(maxsize)
        def cached(model: str, spec: AttentionSpec, *args: P.args, **options: P.kwargs) -> T:
            return function(spec, *args, **options)

        @wraps(function)
        def call(spec: AttentionSpec, *args: P.args, **options: P.kwargs) -> T:
            model = gpu_model() if spec.device_type == "cuda" else ""
            return cached(model, spec, *args, **options)  # type: ignore[arg-type] # hashable

        vars(call)["cache_clear"] = cached.cache_clear
        return call

    return decorate


NO_MAX_LOGITS = "returns lse but no maximum: return_max_logits needs triton or reference"


def greatest(m: Tensor) -> Tensor:
    """Return the maximum over batch and rows of (batch, nheads, rows); -inf without rows."""
    flat = m.transpose(0, 1).flatten(1)  # (nheads, batch * rows)
    return flat.amax(1) if flat.size(1) else flat.new_full((flat.size(0),), -torch.inf)


def out_from_delta(dout: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stand-in for `out` with the same `delta = rowsum(dout * out)`.

    In the backward, flash-attention's operators read `out` only to form delta. When the Q side is
    sent, delta is sent with it and `out` is not. The stand-in is the projection of `out` on dout,
    `dout * delta / |dout|^2`. Rows are scaled first, so that small gradients do not underflow.
    """
    wide = dout.to(delta.dtype)
    unit = wide.abs()
    largest = unit.amax(-1, keepdim=True)  # vector_norm(inf) takes 18 times as long on CPU
    torch.div(wide, largest.masked_fill(largest == 0.0, 1.0), out=unit)
    norm = torch.linalg.vector_norm(unit, 2, -1, keepdim=True).square_().mul_(largest)
    norm.masked_fill_(norm == 0.0, 1.0)
    by_row = delta.transpose(1, 2).unsqueeze(-1)  # (batch, rows, nheads, 1)
    return unit.mul_(by_row / norm).to(dtype)


def band_mask(tile: Tile, device: torch.device) -> Tensor:
    """Return (rows, cols) booleans, True within the band of the tile."""
    lo, hi = tile.corner_band
    mask = torch.ones(tile.rows, tile.cols, dtype=torch.bool, device=device)
    if hi is not None:
        mask.tril_(hi)
    if lo is not None:
        mask.triu_(lo)
    return mask


def flash_window(piece: Tile) -> tuple[int, int]:
    """Return (left, right) of the window of flash-attention that is the band; -1 is unbounded.

    Only for pieces of `flash_pieces`, because flash-attention changes large windows of other tiles.
    """
    corner = piece.cols - piece.rows  # the window is relative to the bottom right corner
    lo, hi = piece.corner_band
    left = -1 if lo is None else corner - lo
    right = -1 if hi is None else hi - corner
    return left, right


def flash_pieces(tile: Tile) -> Iterator[Tile]:
    """Split a tile into full pieces, and masked pieces that have no more rows than columns.

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
    """Yield the part of a tile within a rectangle, if it is not empty."""
    part = tile & Tile(q.start, q.stop, kv.start, kv.stop)
    if part is not None:
        yield part


def equal_headdims(*tensors: Tensor, multiple: int) -> list[Tensor]:
    """Pad all tensors with columns of zeros to one headdim, which changes no score."""
    dim = max(x.size(-1) for x in tensors)
    dim = -(-dim // multiple) * multiple
    return [F.pad(x, (0, dim - x.size(-1))) if x.size(-1) < dim else x for x in tensors]
