"""Runs `tree_decode`, attention to a sharded KV cache, and chooses the rank of the next token."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.attention.first_use import proven_backend
from ring_attn.backends import Purpose
from ring_attn.backends.base import cached_by_gpu
from ring_attn.call import DecodeCall, Options
from ring_attn.checks import attention as checks
from ring_attn.checks import decoding as decode_checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import Tile
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Agreement
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.identity import debug_enabled
from ring_attn.values.checks import as_int, check_type


@capture.a_call
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: SequenceLayout | None,
    mask: Mask | None,
    options: Options,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of all queries, the same on every rank."""
    # Checks the call before anything is sent.
    rank, world_size = group.rank(), group.size()
    if layout is None and world_size == 1:
        layout = SequenceLayout.contiguous(k.size(1), 1)
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks)
    if layout is not None:
        checks.check_layout("k", layout, k.size(1), None, rank, world_size)
        if mask is not None:
            checks.check_given_mask(mask, q.size(1), layout.seqlen)
    decode_call, agreement = _planned(
        spec, options, several=False, seqlen_q=q.size(1), mask=mask, layout=layout
    )
    if layout is None and (mask is not None or not _hides_nothing(options, q.size(1))):
        raise ValueError(
            "tree_decode with a window, a mask or several causal queries needs the layout of the "
            "cache, got layout=None: pass SequenceLayout.boundaries(...) of the ranks' rows, or "
            "another SequenceLayout, to every rank"
        )
    ends = open_p2p(group, options.transport)
    with ends.call("decode", agreement, q.device, sinks=sinks, queries=q):
        if layout is None:  # every query sees all rows, whatever their positions are
            tiles = _tiles(SequenceLayout.contiguous(k.size(1), 1), 0, Mask(q.size(1), k.size(1)))
        else:
            whole = mask or Mask(q.size(1), layout.seqlen, options.causal, options.window_size)
            tiles = _tiles(layout, rank, whole)
        return drivers.decode(decode_call, tiles, q, k, v, ends, sinks)


@capture.a_call
def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None,
    layout: SequenceLayout | None,
    options: Options,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """`attend` for sequences of unlike lengths, whose rows may stand in pages."""
    left, right = options.window_size
    window = left, 0 if options.causal else right
    sequences = decode_checks.check_sequences(
        k, block_table, layout, window, group.rank(), group.size()
    )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.size(0),), cache_seqlens, dtype=torch.int32, device=q.device)
    lengths = None
    if not capture.is_on() and (debug_enabled() or not streams.are_used(q.device)):
        lengths = tuple(cache_seqlens.tolist())
        decode_checks.check_lengths(sequences, lengths, layout, block_table, k.size(0))
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks)
    decode_call, agreement = _planned(
        spec,
        options,
        several=True,
        seqlen_q=q.size(1),
        page_size=sequences.page_size,
        layout=layout,
        cache_seqlens=lengths,
    )
    ends = open_p2p(group, options.transport)
    with ends.call("decode", agreement, q.device, sinks=sinks, queries=q):
        tables = cache_seqlens, *(() if block_table is None else (block_table,))
        return drivers.decode(decode_call, (), q, k, v, ends, sinks, sequences, tables)


# Cached: all layers share the values for a token, some of which are slow to hash.
@cached_by_gpu(maxsize=64)
def _planned(
    spec: AttentionSpec, options: Options, *, several: bool, **values: Hashable
) -> tuple[DecodeCall, Agreement]:
    """Return the call, and all that must be equal on all ranks except tensors' values."""
    purpose = Purpose(decoding=True, several=several)
    backend = proven_backend(spec, options.backend, purpose).name
    call = DecodeCall(options=options, spec=spec, backend=backend)
    facts = {
        **vars(spec),
        **values,
        "causal": options.causal,
        "window_size": options.window_size,
        "backend": backend,
        "softmax_scale": call.scores.softmax_scale,
        "transport": options.transport,
    }
    return call, Agreement(facts)


def next_rank(layout: SequenceLayout, *, block: int = 256) -> int:
    """The rank that should take a cache's next token: the rank with the fewest rows, by blocks.

    The rank with the newest token continues until its run is a multiple of `block` long. So ranks
    that started even differ by at most `block` rows, and n tokens take n / block segments, which
    keeps a call's tiles few. Striped caches have no runs: there the ranks take turns.

    Args:
        layout: layout of the cache so far.
        block: number of tokens in a block; 1 takes turns.

    Raises:
        ValueError: a block below 1.
        TypeError: a layout given by name, or a block that is not an int.

    Example:
        >>> cache = SequenceLayout.contiguous(6, 2)
        >>> for _ in range(4):
        ...     cache = cache.appended(next_rank(cache, block=2), 1)
        >>> cache.segments(0), cache.shard_lens
        ((Segment(start=0, length=3, stride=1), Segment(start=7, length=2, stride=1)), (5, 5))
    """
    check_type("layout", layout, SequenceLayout)
    block = as_int("block", block, least=1)
    ranks = range(layout.world_size)
    for rank in ranks if layout.stride == 1 else ():
        segments = layout.segments(rank)
        last = segments[-1] if segments else Segment(0, 0)
        if last.length % block and last.start + last.length == layout.seqlen:
            return rank
    return min(ranks, key=layout.shard_len)


def _hides_nothing(options: Options, queries: int) -> bool:
    """Tells whether every query sees the whole cache, whatever its length and layout."""
    left, right = options.window_size
    right = 0 if options.causal else right
    return left < 0 and (right < 0 or right >= queries - 1)


# Cached: every token has new tiles, which all layers share, with the backends' data for the tiles.
@lru_cache(maxsize=64)
def _tiles(layout: SequenceLayout, rank: int, mask: Mask) -> tuple[Tile, ...]:
    return decode_tiles(layout.segments(rank), mask)
