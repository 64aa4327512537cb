"""Peak memory of any call on the rank with most rows, without the tiles of thousands of steps.

`machines.count` reads every tile of a rank's program. With more than a few ranks every step of a
ring but the first has the tiles with the shard with which there are most pairs, and messages are as
long as the longest of any rank. So it is exact where shards are equal, else a little above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ring_attn.core.heads import share_heads
from ring_attn.core.messages import Message
from ring_attn.core.program import Hop
from ring_attn.core.ranks import OneRank, Turn, every_count, every_order
from ring_attn.core.tiles import Band, Displacement, Grid, Tile, Traveller, pair_tiles
from ring_attn.core.turns import turns_of
from ring_attn.core.work import needed_rows, pair_work
from ring_attn.machines.count import peak_of_programs
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import programs

# More pieces than these of a step are not listed, and all tiles are where ranks and documents are
# no more than these.
MOST_TILES, MOST_RANKS = 256, 16

_ANY_TILE = (Tile(slice(0, 1), slice(0, 1), Band(None, None)),)


def peak_of(call: Call, *, backward: bool = True) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on the rank with most rows.

    Args:
        call: of any rank.
        backward: of forward and backward, else of the forward alone.

    Example:
        >>> import torch
        >>> from ring_attn.core.layout import SequenceLayout
        >>> from ring_attn.core.mask import Mask
        >>> from ring_attn.core.spec import AttentionSpec
        >>> from ring_attn.core.strategy import Strategy
        >>> from ring_attn.strategies.registry import make_call
        >>> layout = SequenceLayout.contiguous(1 << 16, 4)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 8, 2, 64, 64)
        >>> both = Strategy(), Strategy("all_gather", heads_per_chunk=2)
        >>> mask = Mask(1 << 16, 1 << 16)
        >>> ring, gathered = (
        ...     peak_of(make_call(one, spec, (layout, layout), mask, 0, backend="aten"))
        ...     for one in both
        ... )
        >>> ring < gathered
        True
    """
    directions = (False, True) if backward else (False,)
    found = []
    for rank in _fullest_ranks(call):
        one = replace(call, rank=rank)
        few = call.world_size <= MOST_RANKS and len(call.mask.slices) <= MOST_RANKS
        ranks = (OneRank if few else _RoughRank)(call.layouts, call.mask, rank)
        found.append(peak_of_programs([programs(one, ranks, backward=b) for b in directions], one))
    return max(found)


def _fullest_ranks(call: Call) -> set[int]:
    """First and last rank with most rows; in their groups the member with most heads."""
    spec, degree = call.spec, call.strategy.ulysses_degree
    dims = spec.headdim + spec.headdim_v
    rows = [
        (q * spec.nheads + kv * spec.nheads_kv) * dims
        for q, kv in zip(*(layout.shard_lens for layout in call.layouts), strict=True)
    ]
    last = len(rows) - 1 - rows[::-1].index(max(rows))
    fullest = {rows.index(max(rows)), last}
    if degree == 1:
        return fullest
    heads = [share.num for share in share_heads(spec.nheads, spec.nheads_kv, degree)]
    return {rank - rank % degree + heads.index(max(heads)) for rank in fullest}


@dataclass(frozen=True)
class _RoughRank(OneRank):
    """A rank with all exchanges, and of the tiles those that take most memory."""

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        """From the work of all pairs."""
        return every_order(*self.layouts, self.mask, grid, travels)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice:
        """Rows of the longest message."""
        return slice(0, self._longest(travels))

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message]
    ) -> Callable[[Displacement], Message]:
        """Always the longest message of any rank."""
        longest = make(self._longest(travels))
        return lambda by: longest

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> tuple[Tile, ...]:
        """Tiles with the own shard; then those with the shard that has most visible pairs."""
        own = by == (0, 0)
        if (travels, own) not in self._tiles:
            owner = self.rank if own else self._most_pairs(travels)
            pair = (self.rank, owner) if travels == "kv" else (owner, self.rank)
            # A step without tiles takes fewer buffers; one of no size has the same.
            self._tiles[travels, own] = self._pair_tiles(pair) or (() if own else _ANY_TILE)
        return self._tiles[travels, own]

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """Turns with the most rows of any, which this rank sends and receives."""
        rows = int(needed_rows(*self.layouts, self.mask, travels).clone().fill_diagonal_(0).max())
        tiles = self.tiles(Grid(1, self.world_size), travels, (0, 1))
        other = (self.rank + 1) % self.world_size
        one = Turn(Hop(other, other), None, rows, rows, (slice(0, rows),), tiles)
        return (one,) * len(turns_of(*self.layouts, self.mask, travels))

    @cached_property
    def _tiles(self) -> dict[tuple[Traveller, bool], tuple[Tile, ...]]:
        return {}

    def _longest(self, travels: Traveller) -> int:
        return int(every_count(*self.layouts, self.mask, travels).max())

    def _most_pairs(self, travels: Traveller) -> int:
        work = pair_work(*self.layouts, self.mask)
        areas = (work.area[self.rank] if travels == "kv" else work.area[:, self.rank]).clone()
        areas[self.rank] = -1
        return int(areas.argmax())

    def _pair_tiles(self, pair: tuple[int, int]) -> tuple[Tile, ...]:
        """The tiles between two ranks; where they would be many, one around all of them."""
        num_tiles = len(self.mask.slices)
        for layout, rank in zip(self.layouts, pair, strict=True):
            num_tiles *= len(layout.segments(rank))
        if num_tiles <= MOST_TILES:
            return pair_tiles(*self.layouts, self.mask, *pair)
        work = pair_work(*self.layouts, self.mask)
        if not work.area[pair]:
            return ()
        q, kv = (slice(int(rows.start[pair]), int(rows.stop[pair])) for rows in (work.q, work.kv))
        return (Tile(q, kv, Band(None, None)),)
