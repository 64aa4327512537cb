"""Order of summation: when a call has the same bits at every world size, and why not otherwise.

A sum of floating-point numbers in another order may have other bits. A call has the bits of one
process if it makes every sum in the same order:

    backend        folds tiles in one order, on a grid of blocks (`bits_unit` positions)
    all_gather     keys are in the order of their positions: contiguous shards, cut at blocks
    ring           the same, and shards arrive in that order: causal, one plain ring
    Ulysses        the conditions of its core, and no KV head on several ranks
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from ring_attn.backends import get_backend
from ring_attn.call import Call
from ring_attn.core.heads import is_replicated, share_heads


def why_not_in_order(call: Call, of_core: Callable[[Call], str | None] | None = None) -> str | None:
    """None if a core makes every sum in the order of one process, else the reason why not.

    `of_core` has the core's own reasons.
    """
    reason = why_not_by_heads(call)
    if reason is not None:
        return reason
    backend, layouts = get_backend(call.backend), call.layouts
    if not backend.in_order:
        return f"backend {call.backend!r} does not fold in one order; triton does"
    if any(layout.kind not in ("contiguous", "boundaries") for layout in layouts):
        return f"the layout must be contiguous, got {layouts[0]} and {layouts[1]}"
    if of_core is not None and (reason := of_core(call)) is not None:
        return reason
    if call.world_size == 1:
        return None
    for layout in layouts:
        # The first positions of the shards after rank 0's; empty shards at the end have none.
        for rank, start in enumerate(accumulate(layout.shard_lens), 1):
            if start % backend.bits_unit and start != layout.seqlen:
                return (
                    f"shards must start at multiples of {backend.bits_unit}; rank {rank} starts at "
                    f"{start}: use SequenceLayout.boundaries"
                )
    return None


def why_not_by_heads(call: Call) -> str | None:
    """None if every KV head is on one rank of its group, else the reason why sums reorder."""
    heads = call.spec.nheads, call.spec.nheads_kv
    ulysses_degree = call.strategy.ulysses_degree
    if not is_replicated(share_heads(*heads, ulysses_degree), heads[1]):
        return None
    return (
        f"with {heads[0]} heads, {heads[1]} kv heads and ulysses_degree {ulysses_degree} a kv head "
        "is on several ranks, which sum its gradients in another order; take a degree that keeps "
        "each kv head on one rank"
    )
