"""Decoding against a sharded KV cache: the public function, and who takes the next token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn import check
from ring_attn.compiling import left_out_of_graphs
from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Tile
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.values import as_int, check_flag, check_type
from ring_attn.machines import run
from ring_attn.strategies.tree_decode import (
    DecodeCall,
    decode_tiles,
    gather_lengths,
    hides_nothing,
    make_call,
)
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.debug import check_agreement, debug_enabled, tell_refusal, values_of
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.group import refused

Group = dist.ProcessGroup | DeviceMesh | None


@overload
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window_size: Sequence[int] = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    group: Group = ...,
    layout: SequenceLayout | None = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
    transport: TransportOptions = ...,
) -> Tensor: ...


@overload
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window_size: Sequence[int] = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    group: Group = ...,
    layout: SequenceLayout | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
    transport: TransportOptions = ...,
) -> tuple[Tensor, Tensor]: ...


@left_out_of_graphs(
    "tree_decode sends its messages from the host, and a graph holds none: compile without "
    "fullgraph=True, which leaves it out"
)
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    transport: TransportOptions = TransportOptions(),  # noqa: B008 - frozen
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a KV cache that is split over the ranks; for inference.

    Every rank passes the same queries and its own rows of the cache, and gets the whole result,
    the same bits as every other rank. One message of a call carries all ranks' partial out and lse
    (Tree Attention, arXiv 2408.04093, in one exchange instead of three). For a prompt, or a long
    part of one, use `ring_attention` with layouts of the new tokens and of the cache with them.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the last seqlen_q tokens of the sequence, the same on
            every rank: usually 1, or the few of speculative decoding; float16, bfloat16, float32 or
            float64; any strides. The sequences of a batch have one length: there is no
            `cache_seqlens`. Where lengths differ, call it once for each sequence, `q[i : i + 1]`.
        k: (batch, rows, nheads_kv, headdim), this rank's rows of the cache, those of the queries'
            own tokens among them on the rank that holds them; it may have 0 rows.
        v: (batch, rows, nheads_kv, headdim_v).
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q`: of the newest tokens each
            sees those before it and itself.
        window_size: `(left, right)` keys seen on either side of that diagonal; -1 is unbounded.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        softcap: where it is not 0, scores are `softcap * tanh(score / softcap)`.
        sinks: (nheads,), a logit of each head that joins the denominator once; the same on every
            rank.
        group: a process group, a mesh with one axis, or None for the default group.
        layout: which positions the ranks hold, the same on every rank; see
            `SequenceLayout.appended` and `next_rank` for one that grows. None says that every rank
            holds one run, in the order of the ranks. Of how many rows is then asked in one more
            message of 16 bytes, on CUDA with a wait of the host, where the mask depends on it: with
            a window, or where several queries are causal.
        backend: as for `ring_attention`.
        return_lse: also return lse.
        transport: as for `ring_attention`.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) like q; with `return_lse` also `lse` (batch,
        nheads, seqlen_q), natural logarithm in float32 (float64 for float64), the sink in it. A
        query that sees nothing has out 0 and lse -inf (or its sink).

    Raises:
        ValueError: shapes, layout, window or sinks that do not fit, or no query.
        TypeError: a dtype or type that is not taken.
        NotImplementedError: inputs that require a gradient, which only `ring_attention` has, or
            what the named backend does not support.
        ImportError: the named backend's package is not installed.
        RuntimeError: as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> q = torch.randn(1, 1, 8, 64)  # the same on both ranks
        >>> rows = (700, 300)[rank]
        >>> k, v = torch.randn(2, 1, rows, 2, 64)
        >>> ring_attn.tree_decode(q, k, v).shape
        torch.Size([1, 1, 8, 64])
    """
    try:
        check.check_tensors(q, k, v, packed=False)
        check.check_decode(q, k, v, sinks, layout)
        process_group = check.check_group(group)
        check.check_scale(softmax_scale)
        check.check_softcap(softcap)
        check.check_sinks(sinks, q)
        window = check.check_window(window_size, causal)
        check.check_name("backend", backend)
        check_flag("return_lse", return_lse)
        check.check_transport(transport)
        check.check_group_device(process_group, q.device)
        check.check_max_ctas(transport, process_group)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        rows, rows_kv = q.size(1), k.size(1)
        if layout is not None:
            check.check_layout("k", layout, rows_kv, None, rank, world_size)
        spec = AttentionSpec.of(q, k, v, softcap, sinks)
        # Its tiles may have to wait for the lengths of the other ranks.
        call = make_call(spec, softmax_scale=softmax_scale, backend=backend)
    except BaseException as error:
        tell_refusal(error, group, transport)
        raise
    try:
        agreement = _agreement(spec, rows, causal, window, layout, call, transport)
        values = () if sinks is None else (sinks,)
        if debug_enabled():
            check_agreement(
                agreement.values | values_of(q=q, sinks=sinks), process_group, transport
            )
        ends = open_p2p(process_group, transport)
        with ends.call("decode", agreement, q.device, values=values):
            tiles = _tiles(Mask(rows, 0, causal, window), rows_kv, layout, q.device, ends)
            # Once here: no operator takes a strided last dim.
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            out, lse = run.decode(call, tiles, q, k, v, ends, sinks)
        return (out, lse) if return_lse else out
    except BaseException as error:
        refused(process_group, error)
        raise


@lru_cache(maxsize=64)
def _agreement(
    spec: AttentionSpec,
    rows: int,
    causal: bool,
    window: tuple[int, int],
    layout: SequenceLayout | None,
    call: DecodeCall,
    transport: TransportOptions,
) -> Agreement:
    """Everything that must be equal on all ranks of a call, apart from values."""
    return Agreement(
        {
            **vars(spec),
            "seqlen_q": rows,
            "causal": causal,
            "window_size": window,
            "softmax_scale": call.softmax_scale,
            "layout": None if layout is None else str(layout),
            "backend": call.backend,
            "transport": transport,
        }
    )


def next_rank(layout: SequenceLayout, *, block: int = 256) -> int:
    """Which rank should take the next token of a cache: the one with the fewest rows, in blocks.

    The rank that has the newest tokens goes on until their run is a multiple of `block` long. So of
    ranks that were even none has more than `block` rows more than another, and n tokens are in
    n / block segments, of which a call's tiles are made. Striped caches have no runs: there the
    ranks take turns.

    Args:
        layout: of the cache so far.
        block: tokens; 1 is by turns.

    Raises:
        ValueError: a block of less than 1.
        TypeError: a layout by name, or a block that is no int.

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


def _tiles(
    mask: Mask,
    rows: int,
    layout: SequenceLayout | None,
    device: torch.device,
    transport: Transport,
) -> tuple[Tile, ...]:
    """This rank's tiles; `mask` has the queries' side only."""
    queries = mask.seqlen_q
    if layout is not None:
        whole = Mask(queries, layout.seqlen, mask.causal, mask.window_size)
        return _layout_tiles(layout, transport.rank, whole)
    if hides_nothing(mask):
        return _run_tiles(0, rows, Mask(queries, rows))
    cuts = [0, *accumulate(gather_lengths(rows, device, transport))]
    whole = Mask(queries, cuts[-1], mask.causal, mask.window_size)
    return _run_tiles(cuts[transport.rank], rows, whole)


# Every token has tiles anew, which all layers share, and with them what backends keep of them.
@lru_cache(maxsize=64)
def _layout_tiles(layout: SequenceLayout, rank: int, mask: Mask) -> tuple[Tile, ...]:
    return decode_tiles(layout.segments(rank), mask)


@lru_cache(maxsize=64)
def _run_tiles(start: int, rows: int, mask: Mask) -> tuple[Tile, ...]:
    return decode_tiles((Segment(start, rows),), mask)
