"""Memory of any call: its peak on the rank that holds most, and what a rank holds over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ring_attn.call import Call
from ring_attn.machines.cluster import Cluster
from ring_attn.machines.count import Moment, communicator_bytes, memory_over, peak_bytes
from ring_attn.planning.replicated import joint_programs
from ring_attn.strategies.registry import code_of
from ring_attn.transport.options import MAX_CTAS

# Of more ranks, or slices of the mask, only those ranks are counted that may hold most.
MAX_COUNTED = 16


class Peak(NamedTuple):
    """Bytes on the rank that holds most: of a call beyond its inputs, and of NCCL for all calls."""

    call: int
    communicators: int


def peak_of(
    call: Call,
    *,
    backward: bool = True,
    cluster: Cluster | None = None,
    replicated: Sequence[int] = (),
) -> Peak:
    """Return the peak of a call.

    Args:
        call: the call; with replicated rows, that of their owners.
        backward: whether a backward follows.
        cluster: the ranks; None means that all are on one node that NVLink joins.
        replicated: how many of the rows that every rank holds each rank owns.
    """
    node_size, max_ctas, over_pcie = call.world_size, MAX_CTAS, False
    if cluster is not None:
        node_size, max_ctas, over_pcie = cluster.node_size, cluster.max_ctas, cluster.over_pcie
    few = call.world_size <= MAX_COUNTED and len(call.mask.slices) <= MAX_COUNTED
    peaks = []
    for rank in range(call.world_size) if few else code_of(call.strategy).fullest_ranks(call):
        of_rank = replace(call, rank=rank)
        both = joint_programs(of_rank, replicated, backward=backward)
        on_nccl = both if call.spec.device_type == "cuda" else []
        nccl = communicator_bytes(
            on_nccl, rank, call.world_size, node_size, max_ctas, over_pcie=over_pcie
        )
        peaks.append(Peak(peak_bytes(both, of_rank), nccl))
    return Peak(*map(max, zip(*peaks, strict=True)))


def moments_of_rank(call: Call, *, backward: bool, replicated: Sequence[int] = ()) -> list[Moment]:
    """Return what the call's rank holds after each op; with `backward`, of both directions."""
    return memory_over(joint_programs(call, replicated, backward=backward), call)
