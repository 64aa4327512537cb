"""Peak memory of any call on the rank that holds most, without the tiles of thousands of steps.

`machines.count` reads every tile of a rank's program. With many ranks this module simplifies the
program: every step of a ring after the first gets the tiles of the shard with the most visible
pairs, and every message the greatest length. For equal shards the peak is exact, else a bit high.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ring_attn.call import Call
from ring_attn.core.program import Hop
from ring_attn.core.ranks import OneRank, Turn
from ring_attn.core.tiles import Displacement, Grid, Tile, Traveller, pair_tiles
from ring_attn.core.turns import turns_of
from ring_attn.core.work import needed_rows, pair_work, travelling_rows
from ring_attn.machines.count import communicator_bytes, peak_of_programs
from ring_attn.strategies.registry import code_of, programs

# A step of more tiles than MAX_TILES is taken as one tile around them; only calls of more than
# MAX_RANKS ranks or slices of the mask are simplified.
MAX_TILES, MAX_RANKS = 256, 16

_ANY_TILE = (Tile(0, 1, 0, 1),)


class Peak(NamedTuple):
    """Bytes on the rank that holds most: of a call beyond its inputs, and of NCCL for all calls."""

    call: int
    communicators: int


def peak_of(call: Call, *, backward: bool = True) -> Peak:
    directions = (False, True) if backward else (False,)
    few = call.world_size <= MAX_RANKS and len(call.mask.slices) <= MAX_RANKS
    peaks = []
    for rank in range(call.world_size) if few else code_of(call.strategy).fullest_ranks(call):
        of_rank = replace(call, rank=rank)
        ranks = (OneRank if few else _RoughRank)(call.layouts, call.mask, rank)
        both = [programs(of_rank, ranks, backward=b) for b in directions]
        on_nccl = both if call.spec.device_type == "cuda" else []
        nccl = communicator_bytes(on_nccl, rank, call.world_size)
        peaks.append(Peak(peak_of_programs(both, of_rank), nccl))
    return Peak(*map(max, zip(*peaks, strict=True)))


@dataclass(frozen=True)
class _RoughRank(OneRank):
    """A rank with all its exchanges, but in each step the tiles that take most memory."""

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice:
        return slice(0, self._longest(travels))

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> tuple[Tile, ...]:
        """Tiles with the rank's own shard, or with the other shard with most visible pairs."""
        own = by == (0, 0)
        if (travels, own) not in self._tiles:
            owner = self.rank if own else self._most_pairs(travels)
            pair = (self.rank, owner) if travels == "kv" else (owner, self.rank)
            # A step without tiles would take fewer buffers; a tile of any size takes them all.
            self._tiles[travels, own] = self._pair_tiles(pair) or (() if own else _ANY_TILE)
        return self._tiles[travels, own]

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """As many turns as there are, each with the most rows that any turn sends or receives."""
        rows = int(needed_rows(*self.layouts, self.mask, travels).max())
        tiles = self.tiles(Grid(1, self.world_size), travels, (0, 1))
        others = [
            (self.rank + 1 + turn) % self.world_size
            for turn in range(len(turns_of(*self.layouts, self.mask, travels)))
        ]
        return tuple(
            Turn(Hop(other, other), None, rows, rows, (slice(0, rows),), tiles) for other in others
        )

    @cached_property
    def _tiles(self) -> dict[tuple[Traveller, bool], tuple[Tile, ...]]:
        return {}

    def _longest(self, travels: Traveller) -> int:
        return int(travelling_rows(*self.layouts, self.mask, travels).count.max())

    def _most_pairs(self, travels: Traveller) -> int:
        work = pair_work(*self.layouts, self.mask)
        areas = (work.area[self.rank] if travels == "kv" else work.area[:, self.rank]).clone()
        areas[self.rank] = -1
        return int(areas.argmax())

    def _pair_tiles(self, pair: tuple[int, int]) -> tuple[Tile, ...]:
        """The tiles between two ranks; if they could be more than `MAX_TILES`, one around all."""
        num_tiles = len(self.mask.slices)
        for layout, rank in zip(self.layouts, pair, strict=True):
            num_tiles *= len(layout.segments(rank))
        if num_tiles <= MAX_TILES:
            return pair_tiles(*self.layouts, self.mask, *pair)
        work = pair_work(*self.layouts, self.mask)
        if not work.area[pair]:
            return ()
        q, kv = ((int(rows.start[pair]), int(rows.stop[pair])) for rows in (work.q, work.kv))
        return (Tile(*q, *kv),)
