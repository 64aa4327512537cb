"""What a plan costs, exactly: pairs, bytes, messages, memory; and which side travels back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ring_attn.core.buffers import gradient_schedule, shard_schedule
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Plan, Tile, Transfer, Traveller
from ring_attn.core.spec import AttentionSpec, Packet
from ring_attn.core.values import check_number
from ring_attn.core.work import pair_work


def shard_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with so many rows of the travelling side: K and V, or Q, dO, lse and delta."""
    return spec.kv_packet(rows) if travels == "kv" else spec.q_packet(rows)


def gradient_packet(spec: AttentionSpec, travels: Traveller, rows: int) -> Packet:
    """The message with that side's gradients, in the accumulation type."""
    return spec.kv_grad_packet(rows) if travels == "kv" else spec.q_grad_packet(rows)


def bytes_sent(plan: Plan, spec: AttentionSpec, *, backward: bool, in_order: bool = False) -> int:
    """Bytes that the plan's rank sends in one call, in one direction.

    Args:
        plan: of that direction.
        spec: sizes and types of the call.
        backward: whether gradients travel too.
        in_order: whether they start at their owner: see `strategies.ring`.

    Example:
        >>> import torch
        >>> from ring_attn.core.plan import plan_ring
        >>> layout = SequenceLayout.contiguous(2048, 2)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 64, 64)
        >>> plan = plan_ring(layout, layout, Mask(2048, 2048, causal=True), rank=0)
        >>> bytes_sent(plan, spec, backward=False) == 2 * 1024 * 64 * 4 * 4
        True
    """
    return sum(bytes_by_link(plan, spec, 1, backward=backward, in_order=in_order))


class LinkBytes(NamedTuple):
    """Bytes that a rank sends within its node, and to ranks of other nodes."""

    within: int
    between: int


def bytes_by_link(
    plan: Plan,
    spec: AttentionSpec,
    node_size: int,
    *,
    backward: bool,
    in_order: bool = False,
) -> LinkBytes:
    """What the plan's rank sends in one call and direction, by the link that it takes.

    A plain ring over N nodes has one rank in each whose every message leaves the node, P - 1 shards
    forward. A double ring with an inner ring in each node has every rank send N - 1 of them, under
    as many rounds: as much between nodes in all, over all of a node's links at a time.

    Args:
        plan: of that direction.
        spec: sizes and types of the call.
        node_size: so many consecutive ranks are a node.
        backward: whether gradients travel too.
        in_order: as for `bytes_sent`.

    Raises:
        ValueError: `node_size` below 1.

    Example:
        >>> import torch
        >>> from ring_attn.core.plan import plan_ring
        >>> layout, mask = SequenceLayout.contiguous(64, 8), Mask(64, 64)
        >>> spec = AttentionSpec("cpu", torch.bfloat16, 1, 4, 1, 16, 16)
        >>> for inner_degree in (1, 4):
        ...     plan = plan_ring(layout, layout, mask, 3, inner_degree=inner_degree)
        ...     print(bytes_by_link(plan, spec, node_size=4, backward=False))
        LinkBytes(within=0, between=3584)
        LinkBytes(within=3072, between=512)
    """
    if node_size < 1:
        raise ValueError(f"node_size must be at least 1, got {node_size}")
    total = [0, 0]
    for transfer, nbytes in _messages(plan, spec, backward, in_order):
        total[transfer.hop.send_to // node_size != plan.rank // node_size] += nbytes
    return LinkBytes(*total)


def num_messages(plan: Plan, *, backward: bool, in_order: bool = False) -> int:
    """Messages that each rank sends in one call, in one direction; arguments as `bytes_sent`."""
    gradients = plan.gradient_transfers(continued=in_order) if backward else ()
    return len(plan.shard_transfers) + len(gradients)


def _messages(
    plan: Plan, spec: AttentionSpec, backward: bool, in_order: bool
) -> Iterator[tuple[Transfer, int]]:
    """Every exchange in one direction with the bytes that the rank sends in it."""
    for transfer in plan.shard_transfers:
        rows = plan.rows_moving(transfer.sends)
        yield transfer, shard_packet(spec, plan.travels, rows).nbytes
    for transfer in plan.gradient_transfers(continued=in_order) if backward else ():
        rows = plan.rows_moving(transfer.sends)
        yield transfer, gradient_packet(spec, plan.travels, rows).nbytes


def peak_bytes(
    forward: Plan,
    backward: Plan | None,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    forward_bytes: int,
    workspace: Callable[[Sequence[Tile], bool], int],
    *,
    in_order: bool = False,
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the plan's rank.

        forward     2 shard buffers + state and workspace of a step
        backward    out, lse + delta + 2 shard buffers + own gradients
                    + 3 buffers of travelling gradients (2 if P = 2, or with in_order)
                    + workspace of a step
        at its end  out, lse + delta + own gradients, rounded one by one

    A double ring takes 3 or 4 shard buffers, and 3 or 5 of gradients: `core.buffers`. Nothing
    in it grows with the whole length or the number of steps.

    Args:
        forward: the plan of the forward.
        backward: that of the backward; None for a forward alone.
        spec: sizes and types of the call.
        layouts: of the queries and of the keys.
        forward_bytes: most that the backend takes in the forward: `Backend.forward_bytes`.
        workspace: the backend's own bytes for a step's tiles in the backward, and whether that has
            to do without `out`.
        in_order: as for `bytes_sent`.
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
    beside = _shard_buffers(backward, spec) + _gradient_buffers(backward, spec, in_order)
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
    return shard_schedule(plan).num_buffers * max(sizes)


def _gradient_buffers(plan: Plan, spec: AttentionSpec, in_order: bool) -> int:
    if not plan.num_hops:
        return 0
    sizes = (
        gradient_packet(spec, plan.travels, plan.rows_moving(s.index)).nbytes for s in plan.steps
    )
    return num_gradient_buffers(plan, in_order=in_order) * max(sizes)


def num_gradient_buffers(plan: Plan, *, in_order: bool = False) -> int:
    """Buffers of travelling gradients, on the plan's rank: see `buffers.gradient_schedule`."""
    return gradient_schedule(plan, continued=in_order).num_buffers


@lru_cache(maxsize=1024)
def choose_traveller(
    spec: AttentionSpec, layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask
) -> Traveller:
    """The side that costs fewer bytes in the backward, counted over all ranks; KV where equal.

    With 16-bit tensors and float32 gradients KV costs 12 bytes a row, KV head and element, the Q
    side 8 a row and head: KV travels with grouped heads, Q with few queries or one head each. How
    often a shard is passed on does not matter: it is the same on either side.
    """
    work = pair_work(layout_q, layout_kv, mask)

    def total(travels: Traveller) -> int:
        ranks_of = Counter(work.travelling(travels).count.tolist())
        return sum(
            ranks
            * (shard_packet(spec, travels, n).nbytes + gradient_packet(spec, travels, n).nbytes)
            for n, ranks in ranks_of.items()
        )

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


@dataclass(frozen=True)
class SequenceShare:
    """What one rank has of a sequence that is cut into equal runs, in numbers.

    Args:
        rank: whose share.
        world_size: number of ranks.
        seqlen: the full length; where it does not divide, the first ranks have one row more.
        hidden_size: of the model.
        nheads: query heads.

    Raises:
        ValueError: a rank that does not exist, or heads that do not divide the hidden size.

    Example:
        >>> share = SequenceShare(2, 4, 8192, 1024, 16)
        >>> share.start, share.end, share.headdim, share.ring_steps, share.memory_saving
        (4096, 6144, 64, 3, 0.75)
    """

    rank: int
    world_size: int
    seqlen: int
    hidden_size: int
    nheads: int

    def __post_init__(self) -> None:
        self._layout.segments(self.rank)  # raises for a rank or sizes that cannot be
        if self.nheads < 1 or self.hidden_size % self.nheads:
            raise ValueError(
                f"hidden_size must divide by nheads, got {self.hidden_size} and {self.nheads}"
            )

    @property
    def _layout(self) -> SequenceLayout:
        return SequenceLayout.contiguous(self.seqlen, self.world_size)

    @property
    def start(self) -> int:
        """Position of the first row."""
        return sum(self._layout.shard_lens[: self.rank])

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.local_len

    @property
    def local_len(self) -> int:
        """Number of rows."""
        return self._layout.shard_len(self.rank)

    @property
    def headdim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.nheads

    @property
    def ring_steps(self) -> int:
        """Exchanges of a ring in which every rank needs every shard."""
        return self.world_size - 1

    @property
    def memory_saving(self) -> float:
        """Share of the sequence's activations that the rank is spared."""
        return memory_saving(self.world_size)


def all_reduce_bytes(seqlen: int, hidden_size: int, num_blocks: int, itemsize: int) -> int:
    """Bytes of activations that a tensor-parallel model reduces in a forward, counted once.

    Two all-reduces a block, after the output and the down projection, of (seqlen, hidden_size) each
    (Megatron-LM, arXiv 1909.08053).

    Args:
        seqlen: rows of a rank, of all sequences.
        hidden_size: of the model.
        num_blocks: layers.
        itemsize: bytes of a number.

    Example:
        >>> all_reduce_bytes(1024, 1024, 24, 4) == 192 * 2**20
        True
    """
    return 2 * num_blocks * seqlen * hidden_size * itemsize


def transfer_seconds(nbytes: int, gbit_per_s: float) -> float:
    """Seconds that so many bytes take on a link of so many Gbit/s, without its latency.

    Raises:
        ValueError: a link without bandwidth.

    Example:
        >>> round(transfer_seconds(192 * 2**20, 100.0), 4)
        0.0161
    """
    check_number("gbit_per_s", gbit_per_s)
    if not gbit_per_s > 0.0:
        raise ValueError(f"gbit_per_s must be positive, got {gbit_per_s}")
    return nbytes / (gbit_per_s * 1e9 / 8.0)
