"""What a plan costs, exactly: pairs, bytes, messages, memory; and which side travels back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import MaskKind, Plan, Tile, Traveller, plan_ring
from ring_attn.spec import AttentionSpec, Packet


def shard_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with so many rows of the travelling side: K and V, or Q, dO, lse and delta."""
    return spec.kv_packet(rows) if travels == "kv" else spec.q_packet(rows)


def gradient_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with that side's gradients, in the accumulation type."""
    return spec.kv_grad_packet(rows) if travels == "kv" else spec.q_grad_packet(rows)


def bytes_sent(plan: Plan, spec: AttentionSpec, *, backward: bool) -> int:
    """Bytes that the plan's rank sends in one call, in one direction.

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
        if backward and step.index:
            total += gradient_packet(spec, plan.travels, rows).nbytes
    return total


def num_messages(plan: Plan, *, backward: bool) -> int:
    """Messages that each rank sends in one call, in one direction."""
    return (2 if backward else 1) * plan.num_hops


def peak_bytes(
    forward: Plan,
    backward: Plan | None,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    workspace: Callable[[Sequence[Tile], bool, bool], int],
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the plan's rank.

        forward     2 shard buffers + state + workspace of a step
        backward    out, lse + delta + 2 shard buffers + own gradients
                    + 3 buffers of travelling gradients (2 if P = 2) + workspace of a step

    Nothing in it grows with the whole length or the number of steps.

    Args:
        forward: the plan of the forward.
        backward: that of the backward; None for a forward alone.
        spec: sizes and types of the call.
        layouts: of the queries and of the keys.
        workspace: the backend's own bytes for a step's tiles, whether it is the backward, and
            whether that has to do without `out`.
    """
    rank = forward.rank
    statistics = spec.batch * layouts[0].shard_len(rank) * spec.nheads * spec.accum_dtype.itemsize
    out = (
        spec.batch * layouts[0].shard_len(rank) * spec.nheads * spec.headdim_v * spec.dtype.itemsize
    )
    acc = statistics * spec.headdim_v
    most = 0
    for step in forward.steps:
        # The state takes over the first tile's output where it has all rows; every later merge has
        # four more statistics than the state's own two.
        first = (
            step.index == 0 and len(step.tiles) == 1 and step.tiles[0].kind is not MaskKind.WINDOW
        )
        state = statistics if first else acc + 6 * statistics
        most = max(most, state + workspace(step.tiles, False, False))
    rounded = out if spec.dtype != spec.accum_dtype else 0
    most = max(most, acc + 4 * statistics + rounded) + _shard_buffers(forward, spec)
    if backward is None:
        return most
    own = (
        spec.q_grad_packet(layouts[0].shard_len(rank)).nbytes
        + spec.kv_grad_packet(layouts[1].shard_len(rank)).nbytes
    )
    workspaces = (
        workspace(step.tiles, True, backward.travels == "q" and step.index > 0)
        for step in backward.steps
    )
    held = out + 2 * statistics + own + max(workspaces)
    held += _shard_buffers(backward, spec) + _gradient_buffers(backward, spec)
    return max(most, held)


def _shard_buffers(plan: Plan, spec: AttentionSpec) -> int:
    if not plan.num_hops:
        return 0
    sizes = (shard_packet(spec, plan.travels, plan.rows_moving(s.index)).nbytes for s in plan.steps)
    return 2 * max(sizes)


def _gradient_buffers(plan: Plan, spec: AttentionSpec) -> int:
    if not plan.num_hops:
        return 0
    sizes = (
        gradient_packet(spec, plan.travels, plan.rows_moving(s.index)).nbytes for s in plan.steps
    )
    return num_gradient_buffers(plan) * max(sizes)


def num_gradient_buffers(plan: Plan) -> int:
    """One to compute into, one to receive, and from the second passing on one that is sent."""
    return min(plan.num_hops + 1, 3) if plan.num_hops else 0


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
