"""Check the arguments that only `tree_decode` has; see `checks.attention` for the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.cache import Sequences
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.values.checks import as_int, check_type

# Sides of a window from this size on count as unbounded: no cache is that long, and the sum of a
# smaller side and a position fits int32.
WIDEST = 1 << 30


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: SequenceLayout | None
) -> None:
    """Check that no input requires a gradient, q has a token, and the layout has the right type."""
    if torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
            if isinstance(x, Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"tree_decode is for inference and has no backward, but {name} requires a "
                    "gradient: call it under torch.no_grad(), or train with ring_attention"
                )
    if q.size(1) == 0:
        raise ValueError(f"q must have at least one token, got shape {tuple(q.shape)}")
    if layout is not None:
        words = "a SequenceLayout, or None if each rank has one run, in the order of the ranks"
        check_type("layout of a cache", layout, SequenceLayout, words)


def check_tables(
    q: Tensor, cache_seqlens: object, block_table: Tensor | None, mask: Mask | None
) -> None:
    """Check types, shapes and devices of the sequences' lengths and of the table of pages."""
    if cache_seqlens is None:
        raise ValueError(
            f"block_table needs cache_seqlens, the lengths of the {q.size(0)} sequences, got None"
        )
    if isinstance(cache_seqlens, Tensor):
        _check_int32("cache_seqlens", cache_seqlens, q, (q.size(0),))
    elif as_int("cache_seqlens", cache_seqlens, least=0) > WIDEST:
        raise ValueError(f"cache_seqlens must be at most 2**30, got {cache_seqlens}")
    if block_table is not None:
        check_type("block_table", block_table, Tensor, "an int32 tensor or None")
        _check_int32("block_table", block_table, q, (q.size(0), None))
    if mask is not None:
        raise ValueError(
            "mask needs a cache of one length, but got cache_seqlens as well: leave out one of "
            "them; causal and window_size work with cache_seqlens"
        )


def _check_int32(name: str, x: Tensor, q: Tensor, shape: tuple[int | None, ...]) -> None:
    """Check a tensor of numbers for the sequences of q; None in `shape` allows any size."""
    checks.check_plain(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}: pass {name}.int()")
    has_shape = x.ndim == len(shape) and all(
        wanted is None or wanted == got for wanted, got in zip(shape, x.shape, strict=True)
    )
    if not has_shape:
        words = "one for each sequence of q" if len(shape) == 1 else "pages of each sequence of q"
        wanted_shape = ", ".join("pages" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be ({wanted_shape}), {words}, got shape {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_sequences(
    k: Tensor,
    block_table: Tensor | None,
    layout: SequenceLayout | None,
    window_size: tuple[int, int],
    rank: int,
    world_size: int,
) -> Sequences:
    """Return which rows of the sequences this rank has.

    A layout divides the capacity of a sequence over the ranks. Without one, the pages of
    `block_table` go to the ranks in turn.
    """
    page_size = 0 if block_table is None else k.size(1)
    rows = k.size(1) if block_table is None else block_table.size(1) * page_size
    if block_table is not None and 0 in k.shape:
        raise ValueError(
            "with block_table, k and v must be a rank's pool, (pages, page_size, nheads_kv, "
            f"headdim), with at least one page, got k {tuple(k.shape)}"
        )
    if layout is None and block_table is None and world_size > 1:
        raise ValueError(
            "cache_seqlens without block_table needs a layout of the capacity of a sequence over "
            f"{world_size} ranks, got layout=None: pass SequenceLayout.contiguous(capacity, "
            f"{world_size}), .boundaries or .striped; or a block_table, whose pages go to the "
            "ranks in turn"
        )
    if layout is not None:
        # The rows of pages are limited by the table, not by the layout.
        has_any_rows = page_size > 0 and layout.world_size == world_size
        checks.check_layout(
            "k",
            layout,
            rows=layout.shard_len(rank) if has_any_rows else rows,
            total=None,
            rank=rank,
            world_size=world_size,
        )
    return _sequences(layout, rows, page_size, window_size, rank, world_size)


# Cached: backends keep launches by the identity of the value.
@lru_cache(maxsize=1024)
def _sequences(
    layout: SequenceLayout | None,
    rows: int,
    page_size: int,
    window_size: tuple[int, int],
    rank: int,
    world_size: int,
) -> Sequences:
    """Return which rows of the sequences this rank has; see `check_sequences`."""
    left, right = (-1 if size >= WIDEST else size for size in window_size)
    if layout is None:
        run = page_size or max(rows, 1)
        first, stride = rank * run, world_size * run
    else:
        if any(len(layout.segments(each)) > 1 for each in range(world_size)):
            raise NotImplementedError(
                "cache_seqlens needs a layout in which each rank has one segment (contiguous, "
                f"boundaries, striped), got {layout}; or leave layout out and pass block_table, "
                "whose pages go to the ranks in turn"
            )
        segments = layout.segments(rank)
        if not segments:
            first, run, stride = 0, 0, 1
        elif layout.stride > 1:
            first, run, stride = segments[0].start, 1, layout.stride
        else:
            first, run, stride = segments[0].start, segments[0].length, layout.seqlen
    return Sequences(first, run, stride, rows, page_size, (left, right))


def check_lengths(
    sequences: Sequences,
    lengths: Sequence[int],
    layout: SequenceLayout | None,
    block_table: Tensor | None,
    num_pages: int,
) -> None:
    """Check the values of lengths, and of the pages that they need; all are on the CPU."""
    rows_needed = sequences.rows_before(torch.tensor(lengths, device="cpu")).tolist()
    for i, (length, needed) in enumerate(zip(lengths, rows_needed, strict=True)):
        exceeds_layout = layout is not None and length > layout.seqlen
        if length < 0 or exceeds_layout or needed > sequences.rows:
            of_layout = "" if layout is None else f", and the layout has {layout.seqlen} positions"
            raise ValueError(
                f"cache_seqlens must be from 0 to the capacity of the cache, got {length} for "
                f"sequence {i}: this rank can hold {sequences.rows} rows of it{of_layout}"
            )
        if block_table is not None:
            used = block_table[i, : sequences.pages(needed)].tolist()
            if any(not 0 <= page < num_pages for page in used):
                raise ValueError(
                    f"block_table must name pages of this rank's pool, 0 to {num_pages - 1}, for "
                    f"the {needed} rows of sequence {i} on this rank, got {used}"
                )
