"""Calls in which every rank attends to its own copy of all keys: their layouts and their mask."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.tiles import check_fit, pair_tiles


def local_layouts(layout_q: SequenceLayout, seqlen_k: int) -> Layouts:
    """Return the layouts of queries in the order of the ranks, and of each rank's copy of the keys.

        keys of rank 0   keys of rank 1
    q0  x x x            . . .
    q1  . . .            x x x
    """
    world_size = layout_q.world_size
    first_rows = [0, *accumulate(layout_q.shard_lens)]
    copies = SequenceLayout.contiguous(world_size * seqlen_k, world_size)
    return SequenceLayout.boundaries(first_rows), copies


@lru_cache(maxsize=256)
def local_mask(layout_q: SequenceLayout, seqlen_k: int, mask: Mask) -> Mask:
    """Return the mask between the layouts of `local_layouts`: no rank sees the others' copies."""
    world_size = layout_q.world_size
    one_copy = SequenceLayout.contiguous(seqlen_k, world_size=1)
    # Only masks that depend on the distance of positions need equal strides.
    if mask.has_upper_bounds or mask.has_windows:
        check_fit(layout_q, SequenceLayout.contiguous(seqlen_k, world_size), mask)
    first_rows = [0, *accumulate(layout_q.shard_lens)]
    slices = []
    for rank in range(world_size):
        for tile in pair_tiles(layout_q, one_copy, mask, rank, 0):
            slices.append(Slice(*tile.moved(q=first_rows[rank], k=rank * seqlen_k)))
    return Mask.of_disjoint(
        layout_q.seqlen, world_size * seqlen_k, slices, f"{mask.words}, keys on every rank"
    )
