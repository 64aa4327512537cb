"""A rank among all ranks of a call: its peers, rows and tiles, of which programs are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from ring_attn.core import work
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Message
from ring_attn.core.program import Hop
from ring_attn.core.tiles import (
    NO_TILES,
    Displacement,
    Grid,
    Sizes,
    StepTiles,
    Tile,
    Traveller,
    among_runs,
    counted_from,
    gathered_tiles,
    needed_runs,
    pair_tiles,
)
from ring_attn.core.turns import turns_of


class Turn(NamedTuple):
    """An exchange: the rank sends rows to the rank that needs them and receives rows it needs.

    Attributes:
        hop: the two peers; a rank that takes no part has itself.
        sent, received: numbers of rows.
        runs: the rows to send.
        tiles: between own and received rows; received rows count in the order of the message.
    """

    hop: Hop
    sent: int
    received: int
    runs: tuple[slice, ...]
    tiles: StepTiles


@dataclass(frozen=True)
class OneRank:
    """One rank, the layouts of the queries and of the keys, and the mask over the whole sequence.

    Arguments of the methods: `grid` is the ranks as inner rings, `travels` the side whose shards
    travel, `by` the displacement of the holding rank from the owner of the shard.
    """

    layouts: Layouts
    mask: Mask
    rank: int

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        """Displacements at which any rank needs a shard, in the order of the steps."""
        needed = work.needed_displacements(*self.layouts, self.mask, grid.inner)
        if travels == "kv":
            return needed
        return tuple(sorted((-a % grid.outer, -b % grid.inner) for a, b in needed))

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        """The hop that moves a shard by a displacement."""
        return Hop(grid.moved(self.rank, by), grid.moved(self.rank, by, -1))

    def rows(self, side: Traveller, rank: int | None = None) -> int:
        """Number of rows of a rank's shard of queries or keys; None is this rank."""
        return self.layouts[_index(side)].shard_len(self.rank if rank is None else rank)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice:
        """Rows of the held shard that are sent: from the first to the last that others need."""
        return self._moving(travels)[grid.moved(self.rank, by, -1)]

    def moving_messages(
        self,
        grid: Grid,
        travels: Traveller,
        make: Callable[[int], Message],
        order: Sequence[Displacement],
    ) -> list[Message]:
        """The message of each displacement, which `make` builds from a number of `moving` rows."""
        counts = [_count((self.moving(grid, travels, by),)) for by in order]
        made = {count: make(count) for count in set(counts)}
        return [made[count] for count in counts]

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> StepTiles:
        """Tiles between the own and the held shard, whose rows count from the first moving."""
        owner = grid.moved(self.rank, by, -1)
        first = None if by == (0, 0) else self._moving(travels)[owner].start
        return StepTiles(
            self._sizes(travels)[owner], partial(self._pair_tiles, travels, owner, first)
        )

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """Exchanges that bring every rank exactly the rows that it needs, from their owners."""
        turns = []
        for to, source, full in turns_of(*self.layouts, self.mask, travels):
            hop = Hop(to[self.rank], source[self.rank])
            sent: tuple[slice, ...] = ()
            received: tuple[slice, ...] = ()
            tiles = NO_TILES
            if full[self.rank]:
                there = _pair(hop.send_to, self.rank, travels)
                sent = needed_runs(*self.layouts, self.mask, there, travels)
            if full[hop.recv_from]:
                here = _pair(self.rank, hop.recv_from, travels)
                received = needed_runs(*self.layouts, self.mask, here, travels)
                sizes = self._sizes(travels)[hop.recv_from]
                tiles = StepTiles(sizes, partial(self._received_tiles, travels, here, received))
            turns.append(Turn(hop, _count(sent), _count(received), sent, tiles))
        return tuple(turns)

    def gathered(self, gathers: Traveller, rows: int) -> StepTiles:
        """Tiles with the shards of all ranks in their order, each shard in `rows` rows."""
        sums = work.totals(*self.layouts, self.mask).work[gathers]
        sizes = Sizes(*(int(of_ranks[self.rank]) for of_ranks in sums))
        listing = partial(gathered_tiles, *self.layouts, self.mask, self.rank, rows, gathers)
        return StepTiles(sizes, listing)

    # Tables of all ranks, by the travelling side; cached here, as hashing a mask takes long.

    @cached_property
    def _tables(self) -> tuple[dict[Traveller, list[slice]], dict[Traveller, list[Sizes]]]:
        return {}, {}

    def _moving(self, travels: Traveller) -> list[slice]:
        table = self._tables[0]
        if travels not in table:
            table[travels] = work.travelling_runs(*self.layouts, self.mask, travels)
        return table[travels]

    def _sizes(self, travels: Traveller) -> list[Sizes]:
        table = self._tables[1]
        if travels not in table:
            table[travels] = work.sizes_with(*self.layouts, self.mask, self.rank, travels)
        return table[travels]

    def _pair_tiles(self, travels: Traveller, owner: int, first: int | None) -> tuple[Tile, ...]:
        tiles = pair_tiles(*self.layouts, self.mask, *_pair(self.rank, owner, travels))
        return tiles if not first else tuple(counted_from(first, x, travels) for x in tiles)

    def _received_tiles(
        self, travels: Traveller, pair: tuple[int, int], runs: tuple[slice, ...]
    ) -> tuple[Tile, ...]:
        tiles = pair_tiles(*self.layouts, self.mask, *pair)
        return tuple(among_runs(runs, tile, travels) for tile in tiles)


def _pair(holder: int, owner: int, travels: Traveller) -> tuple[int, int]:
    """(rank of the queries, rank of the keys), from the holder and the owner of a shard."""
    return (holder, owner) if travels == "kv" else (owner, holder)


def _count(runs: tuple[slice, ...]) -> int:
    return sum(run.stop - run.start for run in runs)


def _index(side: Traveller) -> int:
    return 0 if side == "q" else 1
