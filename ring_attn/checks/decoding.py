"""Checks of the arguments of `tree_decode` that no other call has; see `refusals`."""

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

# Larger sides of a window are unbounded: no cache is that long, and sums with positions fit int32.
WIDEST = 1 << 30


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: SequenceLayout | None
) -> None:
    """Checks for `tree_decode` that no input requires a gradient, q has a token, layout a value."""
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
        words = "a SequenceLayout, or None if every rank holds one run in the order of the ranks"
        check_type("layout of a cache", layout, SequenceLayout, words)


def check_tables(
    q: Tensor, cache_seqlens: object, block_table: Tensor | None, mask: Mask | None
) -> None:
    """Checks types, shapes and devices of the lengths of sequences and of their pages."""
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
            "mask is over a cache of one length, got cache_seqlens, too: leave out one of them; "
            "causal and window_size go with cache_seqlens"
        )


def _check_int32(name: str, x: Tensor, q: Tensor, shape: tuple[int | None, ...]) -> None:
    checks.check_plain(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}: pass {name}.int()")
    if x.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True)):
        words = "one for each sequence of q" if len(shape) == 1 else "pages of each sequence of q"
        wanted = ", ".join("pages" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must be ({wanted}), {words}, got shape {tuple(x.shape)}")
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
    """Rows that a rank has of sequences: by a layout of their room, or by pages dealt in turn."""
    page_size = 0 if block_table is None else k.size(1)
    rows = k.size(1) if block_table is None else block_table.size(1) * page_size
    if block_table is not None and 0 in k.shape:
        raise ValueError(
            "with block_table k and v are a rank's pool, (pages, page_size, nheads_kv, headdim), "
            f"of at least one page, got k {tuple(k.shape)}"
        )
    if layout is None and block_table is None and world_size > 1:
        raise ValueError(
            "cache_seqlens without block_table needs the layout of a sequence's room over "
            f"{world_size} ranks, got layout=None: pass SequenceLayout.contiguous(room, "
            f"{world_size}), .boundaries or .striped; or a block_table, whose pages are dealt in "
            "turn"
        )
    if layout is not None:
        held = layout.shard_len(rank) if layout.world_size == world_size else -1
        checks.check_layout("k", layout, held if page_size else rows, None, rank, world_size)
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
    left, right = (-1 if size >= WIDEST else size for size in window_size)
    others = rows, page_size, (left, right)
    if layout is None:
        run = page_size or max(rows, 1)
        return Sequences(rank * run, run, world_size * run, *others)
    if any(len(layout.segments(each)) > 1 for each in range(world_size)):
        raise NotImplementedError(
            "cache_seqlens needs a layout in which each rank holds one segment (contiguous, "
            f"boundaries, striped), got {layout}; or leave layout out and pass block_table, whose "
            "pages are dealt in turn"
        )
    held = layout.segments(rank)
    if not held:
        return Sequences(0, 0, 1, *others)
    if layout.stride > 1:
        return Sequences(held[0].start, 1, layout.stride, *others)
    return Sequences(held[0].start, held[0].length, layout.seqlen, *others)


def check_lengths(
    sequences: Sequences,
    lengths: Sequence[int],
    layout: SequenceLayout | None,
    block_table: Tensor | None,
    num_pages: int,
) -> None:
    """Checks the values of lengths and of the pages that they need, on the host."""
    every = torch.tensor(lengths, device="cpu")
    rows = sequences.rows_before(every).tolist()
    for i, (length, needed) in enumerate(zip(lengths, rows, strict=True)):
        room = sequences.rows if layout is None else layout.seqlen
        if length < 0 or (layout is not None and length > room) or needed > sequences.rows:
            raise ValueError(
                f"cache_seqlens must be from 0 to what the cache has room for, got {length} for "
                f"sequence {i}: this rank has room for {sequences.rows} rows of it"
                + ("" if layout is None else f", and the layout for {room} positions")
            )
        if block_table is not None:
            used = block_table[i, : sequences.pages(needed)].tolist()
            if any(not 0 <= page < num_pages for page in used):
                raise ValueError(
                    f"block_table must name pages of this rank's pool, 0 to {num_pages - 1}, for "
                    f"the {needed} rows of sequence {i} on this rank, got {used}"
                )
