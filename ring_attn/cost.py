"""What a plan costs, exactly: pairs, bytes, messages, memory; and which side travels back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Plan, Tile, Traveller, plan_ring
from ring_attn.spec import AttentionSpec, Packet


def shard_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with so many rows of the travelling side: K and V, or Q, dO, lse and delta."""
    return spec.kv_packet(rows) if travels == "kv" else spec.q_packet(rows)


def gradient_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with that side's gradients, in the accumulation type."""
    return spec.kv_grad_packet(rows) if travels == "kv" else spec.q_grad_packet(rows)


def bytes_sent(plan: Plan, spec: AttentionSpec, *, backward: bool, same_bits: bool = False) -> int:
    """Bytes that the plan's rank sends in one call, in one direction.

    Args:
        plan: of that direction.
        spec: sizes and types of the call.
        backward: whether gradients travel too.
        same_bits: whether they start at their owner: see `strategies.ring`.

    Example:
        >>> import torch
        >>> from ring_attn.plan import plan_ring
        >>> layout = SequenceLayout.contiguous(2048, 2)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 64, 64)
        >>> plan = plan_ring(layout, layout, Mask(2048, 2048, causal=True), rank=0)
        >>> bytes_sent(plan, spec, backward=False) == 2 * 1024 * 64 * 4 * 4
        True
    """
    total = 0
    for step in plan.steps:
        rows = plan.rows_moving(step.index)
        if step.hop is not None:
            total += shard_packet(spec, plan.travels, rows).nbytes
        if backward and (step.index or (same_bits and plan.num_hops)):
            total += gradient_packet(spec, plan.travels, rows).nbytes
    return total


def num_messages(plan: Plan, *, backward: bool, same_bits: bool = False) -> int:
    """Messages that each rank sends in one call, in one direction; arguments as `bytes_sent`."""
    hops = plan.num_hops
    return hops if not backward else 2 * hops + (1 if same_bits and hops else 0)


def peak_bytes(
    forward: Plan,
    backward: Plan | None,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    forward_bytes: int,
    workspace: Callable[[Sequence[Tile], bool], int],
    *,
    same_bits: bool = False,
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the plan's rank.

        forward     2 shard buffers + state and workspace of a step
        backward    out, lse + delta + 2 shard buffers + own gradients
                    + 3 buffers of travelling gradients (2 if P = 2, or with same_bits)
                    + workspace of a step
        at its end  out, lse + delta + own gradients, rounded one by one

    Nothing in it grows with the whole length or the number of steps.

    Args:
        forward: the plan of the forward.
        backward: that of the backward; None for a forward alone.
        spec: sizes and types of the call.
        layouts: of the queries and of the keys.
        forward_bytes: most that the backend takes in the forward: `Backend.forward_bytes`.
        workspace: the backend's own bytes for a step's tiles in the backward, and whether that has
            to do without `out`.
        same_bits: as for `bytes_sent`.
    """
    rank = forward.rank
    statistics = spec.batch * layouts[0].shard_len(rank) * spec.nheads * spec.accum_dtype.itemsize
    out = (
        spec.batch * layouts[0].shard_len(rank) * spec.nheads * spec.headdim_v * spec.dtype.itemsize
    )
    most = forward_bytes + _shard_buffers(forward, spec)
    if backward is None:
        return most
    workspaces = (
        workspace(step.tiles, backward.travels == "q" and step.index > 0) for step in backward.steps
    )
    beside = _shard_buffers(backward, spec) + _gradient_buffers(backward, spec, same_bits)
    beside += max(workspaces)
    rows_kv = spec.batch * layouts[1].shard_len(rank) * spec.nheads_kv
    dq = statistics * spec.headdim
    dk, dv = (rows_kv * dim * spec.accum_dtype.itemsize for dim in (spec.headdim, spec.headdim_v))
    if spec.dtype != spec.accum_dtype:
        # dv, dk, dq in turn: each takes half of what it gives back.
        beside = max(beside, dv // 2, (dq - dk - dv) // 2)
    return max(most, out + 2 * statistics + dq + dk + dv + beside)


def _shard_buffers(plan: Plan, spec: AttentionSpec) -> int:
    if not plan.num_hops:
        return 0
    sizes = (shard_packet(spec, plan.travels, plan.rows_moving(s.index)).nbytes for s in plan.steps)
    return 2 * max(sizes)


def _gradient_buffers(plan: Plan, spec: AttentionSpec, same_bits: bool) -> int:
    if not plan.num_hops:
        return 0
    sizes = (
        gradient_packet(spec, plan.travels, plan.rows_moving(s.index)).nbytes for s in plan.steps
    )
    return num_gradient_buffers(plan, same_bits=same_bits) * max(sizes)


def num_gradient_buffers(plan: Plan, *, same_bits: bool = False) -> int:
    """One to compute into, one to receive, and from the second passing on one that is sent.

    With `same_bits` two: what is received is computed into.
    """
    if not plan.num_hops:
        return 0
    return 2 if same_bits else min(plan.num_hops + 1, 3)


@lru_cache(maxsize=1024)
def choose_traveller(
    spec: AttentionSpec, layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask
) -> Traveller:
    """The side that costs fewer bytes in the backward, counted over all ranks; KV where equal.

    With 16-bit tensors and float32 gradients KV costs 12 bytes a row, KV head and element, the Q
    side 8 a row and head: KV travels with grouped heads, Q with few queries or one head each.
    """
    ranks = range(layout_q.world_size)

    def total(travels: Traveller) -> int:
        plans = (plan_ring(layout_q, layout_kv, mask, rank, travels) for rank in ranks)
        return sum(bytes_sent(plan, spec, backward=True) for plan in plans)

    return "q" if total("q") < total("kv") else "kv"


def flops(area: int, spec: AttentionSpec, *, backward: bool) -> int:
    """Floating point operations for so many visible pairs: 2 matmuls forward, 5 in the backward.

    Args:
        area: visible pairs, `plan.area` or the sum of `layout.mask_area(mask)`.
        spec: sizes of the call.
        backward: that of the backward alone.
    """
    qk, pv = 2 * spec.headdim, 2 * spec.headdim_v
    per_pair = 3 * qk + 2 * pv if backward else qk + pv
    return area * per_pair * spec.batch * spec.nheads


def memory_saving(world_size: int) -> float:
    """Share of a sequence's activations that a rank is spared."""
    return 1.0 - 1.0 / world_size
