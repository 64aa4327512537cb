"""The numbers in a program: those of one rank, or of every rank at once.

A strategy writes its program against `Ranks`. `OneRank` answers with the tiles, rows and peers of
one rank. `EveryRank` answers with tensors (world_size,) that hold the numbers of every rank, so
that a program of thousands of ranks is as short as a program of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.core import work
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Bytes, Message, Number, message_of
from ring_attn.core.program import Hop, Tiles
from ring_attn.core.tiles import (
    Displacement,
    Grid,
    Tile,
    Traveller,
    among_runs,
    counted_from,
    gathered_tiles,
    needed_runs,
    pair_tiles,
)
from ring_attn.core.turns import turns_of
from ring_attn.core.work import StepWork

Displacements = Sequence[Displacement]


class Turn(NamedTuple):
    """One exchange: a rank sends rows to the rank that needs them and receives rows it needs.

    Attributes:
        hop: the two peers; a rank that takes no part has itself.
        active: (world_size,) bool ranks that take part; None from `OneRank`.
        sent, received: numbers of rows.
        runs: the rows to send; () from `EveryRank`.
        tiles: between own and received rows; received rows count in the order of the message.
    """

    hop: Hop
    active: Tensor | None
    sent: Number
    received: Number
    runs: tuple[slice, ...]
    tiles: Tiles


@dataclass(frozen=True)
class _Ranks:
    """Layouts of the queries and of the keys, and the mask over the whole sequence.

    Arguments of the methods: `grid` is the ranks as inner rings, `travels` the side whose shards
    travel, `by` the displacement of the holding rank from the owner of the shard.
    """

    layouts: Layouts
    mask: Mask

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        """Displacements at which any rank needs a shard, in the order of the steps."""
        needed = work.needed_displacements(*self.layouts, self.mask, grid.inner)
        if travels == "kv":
            return needed
        return tuple(sorted((-a % grid.outer, -b % grid.inner) for a, b in needed))


@dataclass(frozen=True)
class OneRank(_Ranks):
    """One rank: tiles are tuples, numbers are ints."""

    rank: int

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        """The hop that moves a shard by a displacement."""
        return Hop(grid.moved(self.rank, by), grid.moved(self.rank, by, -1))

    def partner(self) -> tuple[Hop, Tensor | None]:
        """The exchange between ranks r and P - 1 - r, and which ranks are not their own partner."""
        other = self.world_size - 1 - self.rank
        return Hop(other, other), None

    def rows(self, side: Traveller) -> int:
        """Number of rows of the shard of queries or keys."""
        return self.layouts[_index(side)].shard_len(self.rank)

    def partner_rows(self) -> int:
        """Number of query rows on rank P - 1 - r."""
        return self.layouts[0].shard_len(self.world_size - 1 - self.rank)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice:
        """Rows of the visiting shard that travel."""
        owner = grid.moved(self.rank, by, -1)
        rows = work.travelling_rows(*self.layouts, self.mask, travels)
        return slice(int(rows.start[owner]), int(rows.stop[owner]))

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message], order: Displacements
    ) -> list[Message]:
        """The message of each displacement, which `make` builds from a number of `moving` rows."""
        moving = (self.moving(grid, travels, by) for by in order)
        return [make(rows.stop - rows.start) for rows in moving]

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> tuple[Tile, ...]:
        """Tiles between the own and the visiting shard, whose rows count from the first moving."""
        owner = grid.moved(self.rank, by, -1)
        tiles = pair_tiles(*self.layouts, self.mask, *_pair(self.rank, owner, travels))
        if by == (0, 0):
            return tiles
        first = self.moving(grid, travels, by).start
        return tuple(counted_from(first, tile, travels) for tile in tiles)

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """Exchanges that bring every rank exactly the rows that it needs, from their owners."""
        turns = []
        for to, full in turns_of(*self.layouts, self.mask, travels):
            hop = Hop(int(to[self.rank]), int((to == self.rank).nonzero()))
            sent: tuple[slice, ...] = ()
            received: tuple[slice, ...] = ()
            tiles: tuple[Tile, ...] = ()
            if full[self.rank]:
                there = _pair(hop.send_to, self.rank, travels)
                sent = needed_runs(*self.layouts, self.mask, there, travels)
            if full[hop.recv_from]:
                here = _pair(self.rank, hop.recv_from, travels)
                received = needed_runs(*self.layouts, self.mask, here, travels)
                tiles = pair_tiles(*self.layouts, self.mask, *here)
            counted = tuple(among_runs(received, tile, travels) for tile in tiles)
            turns.append(Turn(hop, None, _count(sent), _count(received), sent, counted))
        return tuple(turns)

    def gathered(self, gathers: Traveller, rows: int) -> tuple[Tile, ...]:
        """Tiles with the shards of all ranks in their order, each shard in `rows` rows."""
        return gathered_tiles(*self.layouts, self.mask, self.rank, rows, gathers)

    def over(self, layouts: Layouts, degree: int = 1) -> OneRank:
        """The groups of `degree` consecutive ranks, each group as one rank of `layouts`."""
        return replace(self, layouts=layouts, rank=self.rank // degree)


@dataclass(frozen=True)
class EveryRank(_Ranks):
    """Every rank at once: tiles are `StepWork`, numbers are int64 tensors (world_size,)."""

    @property
    def rank(self) -> None:
        return None

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.arange(self.world_size)

    @cached_property
    def _work(self) -> dict[tuple[Grid, Traveller], list[StepWork]]:
        return {}

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        return Hop(_moved(grid, by), _moved(grid, (-by[0], -by[1])))

    def partner(self) -> tuple[Hop, Tensor | None]:
        other = self._numbers.flip(0)
        return Hop(other, other), other != self._numbers

    def rows(self, side: Traveller) -> Tensor:
        return torch.tensor(self.layouts[_index(side)].shard_lens)

    def partner_rows(self) -> Tensor:
        return self.rows("q").flip(0)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> None:
        """None: one slice cannot hold the rows of every rank."""

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message], order: Displacements
    ) -> list[Message]:
        owners = message_of(make, work.travelling_rows(*self.layouts, self.mask, travels).count)
        assert isinstance(owners, Bytes)
        sizes = owners.nbytes.view(grid.outer, grid.inner)
        if bool((sizes == sizes[0, 0]).all()):
            return [owners] * len(order)
        return [Bytes(sizes.roll(by, (0, 1)).flatten()) for by in order]

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> StepWork:
        # Cached here too: hashing a mask of many documents takes long.
        if (grid, travels) not in self._work:
            steps = work.work_by_displacement(*self.layouts, self.mask, grid, travels)
            self._work[grid, travels] = steps
        return self._work[grid, travels][by[0] * grid.inner + by[1]]

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        rows = work.needed_rows(*self.layouts, self.mask, travels)
        pairs, ranks, turns = work.pair_work(*self.layouts, self.mask), self._numbers, []
        for to, full in turns_of(*self.layouts, self.mask, travels):
            source = torch.empty_like(to).scatter_(0, to, ranks)
            comes = full[source]
            here, there = _pair(ranks, source, travels), _pair(to, ranks, travels)
            tiles = StepWork(*(table * comes for table in vars(pairs.at(here)).values()))
            sent, received = rows[there].long() * full, rows[here].long() * comes
            turns.append(Turn(Hop(to, source), to != ranks, sent, received, (), tiles))
        return tuple(turns)

    def gathered(self, gathers: Traveller, rows: int) -> StepWork:
        return work.gathered_work(*self.layouts, self.mask, gathers)

    def over(self, layouts: Layouts, degree: int = 1) -> EveryRank:
        return replace(self, layouts=layouts)


Ranks = OneRank | EveryRank


def _pair(holder: Any, owner: Any, travels: Traveller) -> tuple[Any, Any]:
    """(rank of the queries, rank of the keys), from the holder and the owner of a shard."""
    return (holder, owner) if travels == "kv" else (owner, holder)


def _count(runs: tuple[slice, ...]) -> int:
    return sum(run.stop - run.start for run in runs)


def _index(side: Traveller) -> int:
    return 0 if side == "q" else 1


# Cached, so that equal displacements share tensors.
@lru_cache(maxsize=64)
def _moved(grid: Grid, by: Displacement) -> Tensor:
    ranks = torch.arange(grid.outer * grid.inner).view(grid.outer, grid.inner)
    return ranks.roll((-by[0], -by[1]), (0, 1)).flatten()
