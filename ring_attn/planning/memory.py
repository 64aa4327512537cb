"""Peak memory of any call on the rank with most rows, without listing the steps of thousands.

`predicted_peak_bytes` of the strategies reads every tile of a rank's plan. Here two steps stand
for all of a ring: the rank's own shard, and that with which it has most pairs; messages are as
long as the longest of any rank. So it is exact where shards are equal, else a little above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ring_attn.backends import get_backend
from ring_attn.core.heads import is_replicated, share_heads
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Band, Plan, Tile, Traveller, pair_tiles, ring_grid
from ring_attn.core.sizes import peak_bytes
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.work import pair_work
from ring_attn.planning.schedule import plan_outline
from ring_attn.strategies import all_gather, q_exchange, ulysses
from ring_attn.strategies.all_gather import AllGatherCall
from ring_attn.strategies.base import Call
from ring_attn.strategies.q_exchange import QExchangeCall
from ring_attn.strategies.ring import RingCall
from ring_attn.strategies.ulysses import UlyssesCall

Layouts = tuple[SequenceLayout, SequenceLayout]

# More pieces than these of a step are not listed.
MOST_TILES = 256


def peak_of(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    *,
    backend: str,
    in_order: bool = False,
    travels: Traveller = "kv",
    backward: bool = True,
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the rank with most rows.

    Args:
        strategy: its degrees divide the ranks.
        spec: sizes and types of the whole call.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        backend: by name.
        in_order: as for `schedule_of`.
        travels: what goes round in the backward of a ring.
        backward: of forward and backward, else of the forward alone.

    Example:
        >>> import torch
        >>> layout = SequenceLayout.contiguous(1 << 16, 4)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 8, 2, 64, 64)
        >>> ring, gathered = (
        ...     peak_of(strategy, spec, (layout, layout), Mask(1 << 16, 1 << 16), backend="aten")
        ...     for strategy in (Strategy(), Strategy("all_gather", heads_per_chunk=2))
        ... )
        >>> ring < gathered
        True
    """
    calls = (
        _call(strategy, spec, layouts, mask, rank, backend, in_order, travels)
        for rank in _fullest_ranks(strategy, spec, layouts)
    )
    return max(_peak(call, backward=backward) for call in calls)


def _fullest_ranks(strategy: Strategy, spec: AttentionSpec, layouts: Layouts) -> set[int]:
    """Of the ranks with most rows the first and the last; in their groups that with most heads."""
    dims = spec.headdim + spec.headdim_v
    rows = [
        (q * spec.nheads + kv * spec.nheads_kv) * dims
        for q, kv in zip(*(layout.shard_lens for layout in layouts), strict=True)
    ]
    last = len(rows) - 1 - rows[::-1].index(max(rows))
    fullest, degree = {rows.index(max(rows)), last}, strategy.ulysses_degree
    if degree == 1:
        return fullest
    heads = [share.num for share in share_heads(spec.nheads, spec.nheads_kv, degree)]
    return {rank - rank % degree + heads.index(max(heads)) for rank in fullest}


def _call(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    rank: int,
    backend: str,
    in_order: bool,
    travels: Traveller,
) -> Call:
    """The call as plain data, with the choices that it is told."""
    if strategy.exchange_q:
        exchanged = (q_exchange.exchanged_layout(layouts[0]), layouts[1])
        core = replace(strategy, exchange_q=False)
        inner = _call(core, spec, exchanged, mask, rank, backend, in_order, travels)
        return QExchangeCall(spec, layouts, rank, inner)
    degree = strategy.ulysses_degree
    if degree > 1:
        core = replace(strategy, ulysses_degree=1)
        shares = share_heads(spec.nheads, spec.nheads_kv, degree)
        merged = tuple(ulysses.merge_groups(layout, degree)[0] for layout in layouts)
        cores = tuple(
            _call(
                core,
                replace(spec, nheads=run.num, nheads_kv=run.num_kv),
                (merged[0], merged[1]),
                mask,
                rank // degree,
                backend,
                in_order,
                travels,
            )
            for run in shares[rank % degree].runs
        )
        kept = in_order and not is_replicated(shares, spec.nheads_kv)
        return UlyssesCall(spec, layouts, rank, degree, cores, 1.0, backend, kept)
    if strategy.core == "all_gather":
        chunk = strategy.heads_per_chunk or 1
        return AllGatherCall(spec, layouts, mask, rank, 1.0, backend, chunk, in_order)
    inner_degree = strategy.inner_degree
    return RingCall(spec, layouts, mask, rank, 1.0, backend, travels, in_order, inner_degree)


def _peak(call: Call, *, backward: bool) -> int:
    match call:
        case RingCall():
            return _ring_peak(call, backward=backward)
        case AllGatherCall():
            return all_gather.predicted_peak_bytes(call, backward=backward)
        case UlyssesCall():
            return ulysses.predicted_peak_bytes(call, _peak, backward=backward)
        case QExchangeCall():
            return q_exchange.predicted_peak_bytes(call, _peak, backward=backward)
    raise NotImplementedError(f"the memory of {type(call).__name__} is not known")


def _ring_peak(call: RingCall, *, backward: bool) -> int:
    """`strategies.ring.predicted_peak_bytes` with two steps' tiles in the place of all."""
    backend = get_backend(call.backend)

    def workspace(tiles: Sequence[Tile], rebuilds_out: bool) -> int:
        return backend.workspace_bytes(call.spec, tiles, backward=True, rebuilds_out=rebuilds_out)

    forward = _sketch(call.layouts, call.mask, call.rank, "kv", call.inner_degree)
    rows = call.layouts[0].shard_len(call.rank)
    return peak_bytes(
        forward,
        _sketch(call.layouts, call.mask, call.rank, call.travels_back, call.inner_degree)
        if backward
        else None,
        call.spec,
        call.layouts,
        backend.forward_bytes(call.spec, rows, [step.tiles for step in forward.steps]),
        workspace,
        in_order=call.in_order,
    )


@lru_cache(maxsize=256)
def _sketch(layouts: Layouts, mask: Mask, rank: int, travels: Traveller, inner_degree: int) -> Plan:
    """A plan with all exchanges, and of the tiles those that take most."""
    work, grid = pair_work(*layouts, mask), ring_grid(layouts[0].world_size, inner_degree)
    order = work.displacements(grid)
    if travels == "q":
        order = tuple(sorted((-a % grid.outer, -b % grid.inner) for a, b in order))
    plan = plan_outline(grid, order, travels)
    longest = slice(0, int(work.travelling(travels).count.max()))
    steps = [replace(step, rows=longest) for step in plan.steps]
    areas = (work.area[rank] if travels == "kv" else work.area[:, rank]).clone()
    areas[rank] = -1
    for index, other in enumerate([rank, int(areas.argmax())][: len(steps)]):
        tiles = _tiles(layouts, mask, (rank, other) if travels == "kv" else (other, rank))
        # A step without tiles takes fewer buffers; one of no size has the same.
        steps[index] = replace(steps[index], tiles=tiles or steps[index].tiles)
    return Plan(rank, plan.world_size, travels, longest, tuple(steps), plan.home)


def _tiles(layouts: Layouts, mask: Mask, pair: tuple[int, int]) -> tuple[Tile, ...]:
    """The tiles between two ranks; where they would be many, one around all of them."""
    num_tiles = len(mask.documents)
    for layout, rank in zip(layouts, pair, strict=True):
        num_tiles *= len(layout.segments(rank))
    if num_tiles <= MOST_TILES:
        return pair_tiles(*layouts, mask, *pair)
    work = pair_work(*layouts, mask)
    if not work.area[pair]:
        return ()
    q, kv = (slice(int(rows.start[pair]), int(rows.stop[pair])) for rows in (work.q, work.kv))
    return (Tile(q, kv, Band(None, None)),)
