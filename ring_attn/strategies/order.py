"""Order of summation: whether a call has the same bits at every world size, and why not.

A sum of floating-point numbers in another order may have other bits. A call has the bits of one
process if it makes every sum in the same order:

    backend        folds tiles in one order, on a grid of blocks (`bits_unit` positions)
    all_gather     keys are in the order of their positions: contiguous shards, cut at blocks
    ring           as all_gather, and shards arrive in that order: causal, one plain ring
    Ulysses        as its core, and no KV head is on several ranks
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from ring_attn.backends import get_backend
from ring_attn.call import Call
from ring_attn.core.heads import HeadShare, is_replicated, share_heads
from ring_attn.core.layout import SequenceLayout


def why_not_in_order(call: Call, of_core: Callable[[Call], str | None] | None = None) -> str | None:
    """Return None if a call makes every sum in the order of one process, else the reason why not.

    `of_core` returns the core's own reason, if there is one.
    """
    reason = why_not_by_heads(call)
    if reason is not None:
        return reason
    backend = get_backend(call.backend)
    layout_q, layout_kv = call.layouts
    if not backend.in_order:
        return f"backend {call.backend!r} does not fold in one order; triton does"
    if any(layout.kind not in ("contiguous", "boundaries") for layout in call.layouts):
        return f"the layout must be contiguous, got {layout_q} and {layout_kv}"
    if of_core is not None:
        reason = of_core(call)
        if reason is not None:
            return reason
    if call.world_size == 1:
        return None
    for layout in call.layouts:
        reason = _why_not_at_blocks(layout, backend.bits_unit)
        if reason is not None:
            return reason
    return None


def _why_not_at_blocks(layout: SequenceLayout, unit: int) -> str | None:
    """Return None if every shard of a contiguous layout starts at a multiple of `unit`."""
    starts_after_rank_0 = accumulate(layout.shard_lens)
    for rank, start in enumerate(starts_after_rank_0, 1):
        # Empty shards at the end start at the end of the sequence, and have no first position.
        if start % unit and start != layout.seqlen:
            return (
                f"shards must start at multiples of {unit}; rank {rank} starts at {start}: use "
                "SequenceLayout.boundaries"
            )
    return None


def shares_of(call: Call) -> tuple[HeadShare, ...]:
    """Return the heads of each rank of a group that exchanges heads for rows.

    With `same_bits=True` each KV head is on one rank, if there are enough KV heads, since sums over
    ranks have another order.
    """
    return share_heads(
        call.spec.nheads,
        call.spec.nheads_kv,
        call.strategy.ulysses_degree,
        whole_groups=call.options.same_bits is True,
    )


def why_not_by_heads(call: Call) -> str | None:
    """Return None if every KV head is on one rank of its group, else why sums change order."""
    nheads, nheads_kv = call.spec.nheads, call.spec.nheads_kv
    if not is_replicated(shares_of(call), nheads_kv):
        return None
    return (
        f"with {nheads} heads, {nheads_kv} kv heads and ulysses_degree "
        f"{call.strategy.ulysses_degree} a kv head is on several ranks, which sum its gradients in "
        "another order; use a degree that keeps each kv head on one rank"
    )
