"""What a plan costs, exactly: pairs, bytes, messages, memory; and which side travels back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import MaskKind, Plan, Tile, Traveller, needed_distances
from ring_attn.spec import AttentionSpec, Packet


def shard_packet(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    travels: Traveller,
    rank: int,
) -> Packet:
    """The message with the travelling side of one rank: K and V, or Q, dO, lse and delta.

    Args:
        spec: sizes and types of the call.
        layouts: of the queries and of the keys.
        travels: which side.
        rank: whose shard.
    """
    if travels == "kv":
        return spec.kv_packet(layouts[1].shard_len(rank))
    return spec.q_packet(layouts[0].shard_len(rank))


def gradient_packet(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    travels: Traveller,
    rank: int,
) -> Packet:
    """The message with that side's gradients, in the accumulation type."""
    if travels == "kv":
        return spec.kv_grad_packet(layouts[1].shard_len(rank))
    return spec.q_grad_packet(layouts[0].shard_len(rank))


def bytes_sent(
    plan: Plan,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    *,
    backward: bool,
) -> int:
    """Bytes that the plan's rank sends in one call, in one direction.

    Example:
        >>> import torch
        >>> from ring_attn.plan import plan_ring
        >>> layout = SequenceLayout.contiguous(2048, 2)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 64, 64)
        >>> plan = plan_ring(layout, layout, Mask(2048, 2048, causal=True), rank=0)
        >>> bytes_sent(plan, spec, (layout, layout), backward=False) == 2 * 1024 * 64 * 4 * 4
        True
    """
    total = 0
    for step in plan.steps:
        if step.hop is not None:
            total += shard_packet(spec, layouts, plan.travels, step.source).nbytes
        if backward and plan.home is not None:
            total += gradient_packet(spec, layouts, plan.travels, step.source).nbytes
    return total


def num_messages(plan: Plan, *, backward: bool) -> int:
    """Messages that each rank sends in one call, in one direction."""
    hops = plan.num_hops
    return 2 * hops + 1 if backward and hops else hops


def peak_bytes(
    forward: Plan,
    backward: Plan | None,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    workspace: Callable[[Sequence[Tile], bool, bool], int],
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the plan's rank.

        forward     2 shard buffers + state + workspace of a step
        backward    out, lse + delta + 2 shard buffers + 3 gradient buffers
                    + gradients that stay + workspace of a step

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
    most = max(most, acc + 4 * statistics + rounded) + _shard_buffers(forward, spec, layouts)
    if backward is None:
        return most
    sides = {
        "q": gradient_packet(spec, layouts, "q", rank).nbytes,
        "kv": gradient_packet(spec, layouts, "kv", rank).nbytes,
    }
    moving = max(
        gradient_packet(spec, layouts, backward.travels, step.source).nbytes
        for step in backward.steps
    )
    held = (
        out
        + 2 * statistics
        + _shard_buffers(backward, spec, layouts)
        + (3 if backward.home else 1) * moving
        + sides["q" if backward.travels == "kv" else "kv"]
        + max(
            workspace(step.tiles, True, backward.travels == "q" and step.index > 0)
            for step in backward.steps
        )
    )
    return max(most, held)


def _shard_buffers(
    plan: Plan, spec: AttentionSpec, layouts: tuple[SequenceLayout, SequenceLayout]
) -> int:
    if not plan.num_hops:
        return 0
    return 2 * max(
        shard_packet(spec, layouts, plan.travels, step.source).nbytes for step in plan.steps
    )


@lru_cache(maxsize=1024)
def choose_traveller(
    spec: AttentionSpec, layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask
) -> Traveller:
    """The side that costs fewer bytes in the backward, counted over all ranks; KV where equal.

    With 16-bit tensors and float32 gradients KV costs 12 bytes a row, KV head and element, the Q
    side 8 a row and head: KV travels with grouped heads, Q with few queries or one head each.
    """
    layouts = (layout_q, layout_kv)
    hops = len(needed_distances(layout_q, layout_kv, mask)) - 1
    ranks = range(layout_q.world_size)

    def total(travels: Traveller) -> int:
        shards = sum(shard_packet(spec, layouts, travels, r).nbytes for r in ranks)
        gradients = sum(gradient_packet(spec, layouts, travels, r).nbytes for r in ranks)
        return hops * shards + (hops + 1) * gradients

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
