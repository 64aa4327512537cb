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
from ring_attn.core.heads import HeadShare, is_replicated, share_heads


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


def shares_of(call: Call) -> tuple[HeadShare, ...]:
    """Return the heads of each rank of a group that exchanges heads for rows.

    With `same_bits=True` each KV head is on one rank, if there are enough, since sums over ranks
    have another order.
    """
    return share_heads(
        call.spec.nheads,
        call.spec.nheads_kv,
        call.strategy.ulysses_degree,
        whole_groups=call.options.same_bits is True,
    )


def why_not_by_heads(call: Call) -> str | None:
    """None if every KV head is on one rank of its group, else the reason why sums reorder."""
    nheads, nheads_kv = call.spec.nheads, call.spec.nheads_kv
    if not is_replicated(shares_of(call), nheads_kv):
        return None
    return (
        f"with {nheads} heads, {nheads_kv} kv heads and ulysses_degree "
        f"{call.strategy.ulysses_degree} a kv head is on several ranks, which sum its gradients in "
        "another order; take a degree that keeps each kv head on one rank"
    )
