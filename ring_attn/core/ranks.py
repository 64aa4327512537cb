"""One rank among all ranks of a call: its peers, rows and tiles, from which programs are made."""

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
    Side,
    Sizes,
    StepTiles,
    Tile,
    among_runs,
    counted_from,
    gathered_tiles,
    needed_runs,
    pair_tiles,
)
from ring_attn.core.turns import turns_of


class RowExchange(NamedTuple):
    """An exchange: the rank sends rows to the rank that needs them and receives rows it needs.

    Attributes:
        hop: the two peers; a rank without a partner has itself.
        sent, received: numbers of rows.
        runs: the rows to send.
        tiles: between own and received rows, which are numbered in the order of the message.
    """

    hop: Hop
    sent: int
    received: int
    runs: tuple[slice, ...]
    tiles: StepTiles


@dataclass(frozen=True)
class OneRank:
    """One rank, the layouts of the queries and of the keys, and the mask over the whole sequence.

    Arguments of the methods: `grid` is the ranks as inner rings, `sent_side` the side whose shards
    are sent, and `by` the displacement from the owner of a shard to the rank that holds it.
    """

    layouts: Layouts
    mask: Mask
    rank: int

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    def order(self, grid: Grid, sent_side: Side) -> tuple[Displacement, ...]:
        """Return the displacements at which some rank needs a shard, in the order of the steps."""
        needed = work.needed_displacements(*self.layouts, self.mask, grid.inner)
        if sent_side == "kv":
            return needed
        return tuple(sorted((-a % grid.outer, -b % grid.inner) for a, b in needed))

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        """Return the hop that moves a shard by a displacement."""
        return Hop(grid.moved(self.rank, by), grid.moved(self.rank, by, -1))

    def rows(self, side: Side, rank: int | None = None) -> int:
        """Return the number of rows of a rank's shard of queries or keys; None means this rank."""
        return self.layouts[_index(side)].shard_len(self.rank if rank is None else rank)

    def moving(self, grid: Grid, sent_side: Side, by: Displacement) -> slice:
        """Return the rows of the held shard that are sent: from the first to the last needed."""
        return self._moving(sent_side)[grid.moved(self.rank, by, -1)]

    def moving_messages(
        self,
        grid: Grid,
        sent_side: Side,
        make: Callable[[int], Message],
        order: Sequence[Displacement],
    ) -> list[Message]:
        """Return the message of each displacement; `make` makes it from the number of rows."""
        runs = [self.moving(grid, sent_side, by) for by in order]
        counts = [run.stop - run.start for run in runs]
        made = {count: make(count) for count in set(counts)}
        return [made[count] for count in counts]

    def tiles(self, grid: Grid, sent_side: Side, by: Displacement) -> StepTiles:
        """Return the tiles between the own and the held shard.

        Rows of the held shard are numbered from the first row that is sent.
        """
        owner = grid.moved(self.rank, by, -1)
        first = None if by == (0, 0) else self._moving(sent_side)[owner].start
        return StepTiles(
            self._sizes(sent_side)[owner], partial(self._pair_tiles, sent_side, owner, first)
        )

    def row_exchanges(self, sent_side: Side) -> tuple[RowExchange, ...]:
        """Return the exchanges by which each rank gets exactly the rows it needs."""
        exchanges = []
        for to, source, full in turns_of(*self.layouts, self.mask, sent_side):
            hop = Hop(to[self.rank], source[self.rank])
            sent: tuple[slice, ...] = ()
            received: tuple[slice, ...] = ()
            tiles = NO_TILES
            if full[self.rank]:
                their_pair = _pair(holder=hop.send_to, owner=self.rank, sent_side=sent_side)
                sent = needed_runs(*self.layouts, self.mask, their_pair, sent_side)
            if full[hop.recv_from]:
                own_pair = _pair(holder=self.rank, owner=hop.recv_from, sent_side=sent_side)
                received = needed_runs(*self.layouts, self.mask, own_pair, sent_side)
                sizes = self._sizes(sent_side)[hop.recv_from]
                listing = partial(self._received_tiles, sent_side, own_pair, received)
                tiles = StepTiles(sizes, listing)
            exchanges.append(
                RowExchange(hop, _count(sent), _count(received), runs=sent, tiles=tiles)
            )
        return tuple(exchanges)

    def gathered(self, gathers: Side, rows: int) -> StepTiles:
        """Return the tiles with the shards of all ranks in order, each shard in `rows` rows."""
        sums = work.totals(*self.layouts, self.mask).work[gathers]
        sizes = Sizes(*(int(of_ranks[self.rank]) for of_ranks in sums))
        listing = partial(gathered_tiles, *self.layouts, self.mask, self.rank, rows, gathers)
        return StepTiles(sizes, listing)

    # Tables of all ranks, by the side that is sent. They are cached in this object, because a cache
    # by layouts and mask would hash the mask at every look-up.

    @cached_property
    def _moving_runs(self) -> dict[Side, list[slice]]:
        return {}

    @cached_property
    def _sizes_by_owner(self) -> dict[Side, list[Sizes]]:
        return {}

    def _moving(self, sent_side: Side) -> list[slice]:
        table = self._moving_runs
        if sent_side not in table:
            table[sent_side] = work.sent_runs(*self.layouts, self.mask, sent_side)
        return table[sent_side]

    def _sizes(self, sent_side: Side) -> list[Sizes]:
        table = self._sizes_by_owner
        if sent_side not in table:
            table[sent_side] = work.sizes_with(*self.layouts, self.mask, self.rank, sent_side)
        return table[sent_side]

    def _pair_tiles(self, sent_side: Side, owner: int, first: int | None) -> tuple[Tile, ...]:
        q_rank, kv_rank = _pair(holder=self.rank, owner=owner, sent_side=sent_side)
        tiles = pair_tiles(*self.layouts, self.mask, q_rank, kv_rank)
        if not first:
            return tiles
        return tuple(counted_from(first, tile, sent_side) for tile in tiles)

    def _received_tiles(
        self, sent_side: Side, pair: tuple[int, int], runs: tuple[slice, ...]
    ) -> tuple[Tile, ...]:
        q_rank, kv_rank = pair
        tiles = pair_tiles(*self.layouts, self.mask, q_rank, kv_rank)
        return tuple(among_runs(runs, tile, sent_side) for tile in tiles)


def _pair(holder: int, owner: int, sent_side: Side) -> tuple[int, int]:
    """Return (rank of the queries, rank of the keys) for the holder and the owner of a shard."""
    return (holder, owner) if sent_side == "kv" else (owner, holder)


def _count(runs: tuple[slice, ...]) -> int:
    return sum(run.stop - run.start for run in runs)


def _index(side: Side) -> int:
    return 0 if side == "q" else 1
