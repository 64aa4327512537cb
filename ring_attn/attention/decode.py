"""Calls of `tree_decode`, attention to a sharded KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from itertools import accumulate

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
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import Tile
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.identity import debug_enabled


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
    """Return `out` and `lse` of all queries, the same on every rank."""
    rank, world_size = group.rank(), group.size()
    seqlen_q, rows = q.size(1), k.size(1)
    # The call is checked before any communication.
    if layout is None and world_size == 1:
        layout = SequenceLayout.contiguous(rows, 1)
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks)
    if layout is not None:
        checks.check_layout("k", layout, rows, None, rank, world_size)
        if mask is not None:
            checks.check_given_mask(mask, seqlen_q, layout.seqlen)
    decode_call, agreement = planned_call(
        spec, options, several=False, seqlen_q=seqlen_q, mask=mask, layout=layout
    )
    transport = open_p2p(group, options.transport)
    if layout is None and (mask is not None or not _hides_nothing(options, seqlen_q)):
        # The mask depends on the positions of this rank's rows.
        capture.refuse(
            "without a layout the host would wait for the numbers of rows of all ranks: pass the "
            "layout of the cache"
        )
        layout = _runs_of_ranks(rows, agreement, transport, q)
        if mask is not None:
            checks.check_given_mask(mask, seqlen_q, layout.seqlen)
    with transport.call("decode", agreement, q.device, sinks=sinks, queries=q):
        if layout is None:  # every query sees all rows, so their positions do not matter
            own_rows = SequenceLayout.contiguous(rows, 1)
            tiles = _tiles(own_rows, 0, Mask(seqlen_q, rows))
        else:
            whole_mask = mask or Mask(
                seqlen_q, layout.seqlen, causal=options.causal, window_size=options.window_size
            )
            tiles = _tiles(layout, rank, whole_mask)
        return drivers.decode(decode_call, tiles, q, k, v, transport, sinks)


def _runs_of_ranks(
    rows: int, agreement: Agreement, transport: Transport, queries: Tensor
) -> SequenceLayout:
    """Return the layout in which each rank has one run of rows, in the order of the ranks.

    The ranks exchange their numbers of rows, for which the host waits.
    """
    device = queries.device
    own = torch.tensor([rows], dtype=torch.int64, device=device)
    with transport.call(
        "exchange numbers of rows of tree_decode", agreement, device, queries=queries
    ):
        rows_of_ranks = transport.gather(own).flatten().tolist()
    return SequenceLayout.boundaries([*accumulate(rows_of_ranks, initial=0)])


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
    """Return `out` and `lse` for sequences of different lengths, whose rows may be in pages."""
    window = _window(options)
    sequences = decode_checks.check_sequences(
        k, block_table, layout, window, group.rank(), group.size()
    )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.size(0),), cache_seqlens, dtype=torch.int32, device=q.device)
    lengths = None
    can_read_lengths = not capture.is_on()
    reads_without_waiting = not streams.are_used(q.device)
    if can_read_lengths and (debug_enabled() or reads_without_waiting):
        lengths = tuple(cache_seqlens.tolist())
        decode_checks.check_lengths(sequences, lengths, layout, block_table, k.size(0))
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks)
    decode_call, agreement = planned_call(
        spec,
        options,
        several=True,
        seqlen_q=q.size(1),
        page_size=sequences.page_size,
        layout=layout,
        cache_seqlens=lengths,
    )
    transport = open_p2p(group, options.transport)
    with transport.call("decode", agreement, q.device, sinks=sinks, queries=q):
        tables = (cache_seqlens,) if block_table is None else (cache_seqlens, block_table)
        return drivers.decode(
            decode_call, (), q, k, v, transport, sinks, sequences=sequences, tables=tables
        )


# Cached: all layers use the same values for a token, and some of them are slow to hash.
@cached_by_gpu(maxsize=64)
def planned_call(
    spec: AttentionSpec, options: Options, *, several: bool, **values: Hashable
) -> tuple[DecodeCall, Agreement]:
    """Return the call, and its facts that must be equal on all ranks.

    `values` are facts that are neither options nor in the spec.
    """
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


def _window(options: Options) -> tuple[int, int]:
    """Return the keys that are seen before and after the diagonal; -1 is unbounded."""
    left, right = options.window_size
    return left, 0 if options.causal else right


def _hides_nothing(options: Options, num_queries: int) -> bool:
    """Return whether every query sees the whole cache, for all its lengths and layouts."""
    left, right = _window(options)
    return left < 0 and (right < 0 or right >= num_queries - 1)


# Cached: every token has new tiles, and all layers share them and the backends' data for them.
@lru_cache(maxsize=64)
def _tiles(layout: SequenceLayout, rank: int, mask: Mask) -> tuple[Tile, ...]:
    return decode_tiles(layout.segments(rank), mask)
