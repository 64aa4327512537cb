"""Peak memory of any call on the rank that holds most."""

from __future__ import annotations

from dataclasses import replace

from ring_attn.call import Call
from ring_attn.machines.count import peak_bytes
from ring_attn.strategies.registry import both_programs, code_of

# Of more ranks, or slices of the mask, only those ranks are counted that may hold most.
MAX_COUNTED = 16


def peak_of(call: Call, *, backward: bool = True) -> int:
    """Bytes of a call beyond its inputs, on the rank that holds most."""
    few = call.world_size <= MAX_COUNTED and len(call.mask.slices) <= MAX_COUNTED
    peaks = []
    for rank in range(call.world_size) if few else code_of(call.strategy).fullest_ranks(call):
        of_rank = replace(call, rank=rank)
        peaks.append(peak_bytes(both_programs(of_rank, backward=backward), of_rank))
    return max(peaks)
