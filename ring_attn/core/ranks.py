"""The numbers in a program: those of one rank, or of every rank at once.

A strategy writes its program against `Ranks`. `OneRank` answers with the tiles, rows and peers of
one rank. `EveryRank` answers with tensors (world_size,) that hold the numbers of every rank, so
that a program of thousands of ranks is as short as a program of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Bytes, Message, Number, lengths
from ring_attn.core.program import Hop, Tiles
from ring_attn.core.tiles import (
    Displacement,
    Grid,
    Tile,
    Traveller,
    among_runs,
    counted_from,
    gathered_tiles,
    needed_displacements,
    needed_runs,
    pair_tiles,
    travelling_rows,
)
from ring_attn.core.turns import turns_of
from ring_attn.core.work import StepWork, needed_rows, pair_work


class Turn(NamedTuple):
    """One exchange: a rank sends rows to the rank that needs them and receives rows it needs.

    Attributes:
        hop: the two peers; a rank that takes no part has itself.
        active: (world_size,) bool ranks that take part; None from `OneRank`.
        sent: number of rows.
        received: number of rows.
        runs: the rows to send; () from `EveryRank`.
        tiles: between own and received rows; received rows count in the order of the message.
    """

    hop: Hop
    active: Tensor | None
    sent: Number
    received: Number
    runs: tuple[slice, ...]
    tiles: Tiles


class Ranks(Protocol):
    """The shards, peers and tiles of a rank, or of every rank, in one call.

    Arguments:
        grid: the ranks as inner rings.
        travels: the side whose shards travel.
        by: displacement of the holding rank from the owner of the shard.
    """

    @property
    def layouts(self) -> Layouts:
        """Layouts of the queries and of the keys."""
        ...

    @property
    def mask(self) -> Mask:
        """Mask over the whole sequence."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int | None:
        """The rank; None for every rank."""
        ...

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        """Displacements at which any rank needs a shard, in the order of the steps."""
        ...

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        """The hop that moves a shard by a displacement."""
        ...

    def partner(self) -> tuple[Hop, Tensor | None]:
        """The exchange between ranks r and P - 1 - r, and which ranks are not their own partner."""
        ...

    def rows(self, side: Traveller) -> Number:
        """Number of rows of the shard of queries or keys."""
        ...

    def partner_rows(self) -> Number:
        """Number of query rows on rank P - 1 - r."""
        ...

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice | None:
        """Rows of the visiting shard that travel; None from `EveryRank`."""
        ...

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message]
    ) -> Callable[[Displacement], Message]:
        """Function from a displacement to the message with the `moving` rows.

        `make` builds a message from its number of rows.
        """
        ...

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> Tiles:
        """Tiles between the own and the visiting shard."""
        ...

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """Exchanges that bring every rank exactly the rows that it needs, from their owners."""
        ...

    def gathered(self, gathers: Traveller, rows: int) -> Tiles:
        """Tiles with the shards of all ranks in their order, each shard in `rows` rows."""
        ...

    def over(self, layouts: Layouts) -> Ranks:
        """The same ranks with other layouts."""
        ...

    def groups(self, layouts: Layouts, degree: int) -> Ranks:
        """The groups of `degree` consecutive ranks, each group as one rank of `layouts`."""
        ...


@dataclass(frozen=True)
class OneRank:
    """One rank: tiles are tuples, numbers are ints."""

    layouts: Layouts
    mask: Mask
    rank: int

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        needed = needed_displacements(*self.layouts, self.mask, grid.inner)
        return mirrored(needed, grid, travels)

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        return Hop(grid.moved(self.rank, by), grid.moved(self.rank, by, -1))

    def partner(self) -> tuple[Hop, Tensor | None]:
        other = self.world_size - 1 - self.rank
        return Hop(other, other), None

    def rows(self, side: Traveller) -> int:
        return self.layouts[_index(side)].shard_len(self.rank)

    def partner_rows(self) -> int:
        return self.layouts[0].shard_len(self.world_size - 1 - self.rank)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice:
        owner = grid.moved(self.rank, by, -1)
        return travelling_rows(*self.layouts, self.mask, owner, travels)

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message]
    ) -> Callable[[Displacement], Message]:
        def message(by: Displacement) -> Message:
            rows = self.moving(grid, travels, by)
            return make(rows.stop - rows.start)

        return message

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> tuple[Tile, ...]:
        """Tiles in folding order; visiting rows count from the first row that travels."""
        owner = grid.moved(self.rank, by, -1)
        pair = (self.rank, owner) if travels == "kv" else (owner, self.rank)
        tiles = pair_tiles(*self.layouts, self.mask, *pair)
        if by == (0, 0):
            return tiles
        first = self.moving(grid, travels, by).start
        return tuple(counted_from(first, tile, travels) for tile in tiles)

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        """`turns.turns_of` as seen from this rank."""

        def pair(holder: int, owner: int) -> tuple[int, int]:
            return (holder, owner) if travels == "kv" else (owner, holder)

        turns = []
        for to, full in turns_of(*self.layouts, self.mask, travels):
            hop = Hop(int(to[self.rank]), int((to == self.rank).nonzero()))
            sent: tuple[slice, ...] = ()
            received: tuple[slice, ...] = ()
            tiles: tuple[Tile, ...] = ()
            if full[self.rank]:
                there = pair(hop.send_to, self.rank)
                sent = needed_runs(*self.layouts, self.mask, there, travels)
            if full[hop.recv_from]:
                here = pair(self.rank, hop.recv_from)
                received = needed_runs(*self.layouts, self.mask, here, travels)
                tiles = pair_tiles(*self.layouts, self.mask, *here)
            counted = tuple(among_runs(received, tile, travels) for tile in tiles)
            turns.append(Turn(hop, None, _count(sent), _count(received), sent, counted))
        return tuple(turns)

    def gathered(self, gathers: Traveller, rows: int) -> tuple[Tile, ...]:
        return gathered_tiles(*self.layouts, self.mask, self.rank, rows, gathers)

    def over(self, layouts: Layouts) -> OneRank:
        return replace(self, layouts=layouts)

    def groups(self, layouts: Layouts, degree: int) -> OneRank:
        return replace(self, layouts=layouts, rank=self.rank // degree)


@dataclass(frozen=True)
class EveryRank:
    """Every rank at once: tiles are `StepWork`, numbers are int64 tensors (world_size,)."""

    layouts: Layouts
    mask: Mask

    @property
    def rank(self) -> None:
        return None

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.arange(self.world_size)

    @cached_property
    def _work(self) -> dict[tuple[Grid, Traveller], list[StepWork]]:
        return {}

    def order(self, grid: Grid, travels: Traveller) -> tuple[Displacement, ...]:
        return every_order(*self.layouts, self.mask, grid, travels)

    def hop(self, grid: Grid, by: Displacement) -> Hop:
        """The hop as tensors (world_size,); equal displacements share tensors."""
        return Hop(_moved(grid, by), _moved(grid, (-by[0], -by[1])))

    def partner(self) -> tuple[Hop, Tensor | None]:
        other = self._numbers.flip(0)
        return Hop(other, other), other != self._numbers

    def rows(self, side: Traveller) -> Tensor:
        return torch.tensor(self.layouts[_index(side)].shard_lens)

    def partner_rows(self) -> Tensor:
        return self.rows("q").flip(0)

    def moving(self, grid: Grid, travels: Traveller, by: Displacement) -> slice | None:
        """None: one slice cannot hold the rows of every rank."""
        return None

    def moving_messages(
        self, grid: Grid, travels: Traveller, make: Callable[[int], Message]
    ) -> Callable[[Displacement], Message]:
        """Function from a displacement to the lengths of the messages, indexed by holder."""
        owners = lengths(make, every_count(*self.layouts, self.mask, travels))
        sizes = owners.nbytes.view(grid.outer, grid.inner)
        if bool((sizes == sizes[0, 0]).all()):
            return lambda by: owners
        return lambda by: Bytes(sizes.roll(by, (0, 1)).flatten())

    def tiles(self, grid: Grid, travels: Traveller, by: Displacement) -> StepWork:
        # Cached here too: hashing a mask of many documents takes long.
        if (grid, travels) not in self._work:
            work = _by_displacement(*self.layouts, self.mask, grid, travels)
            self._work[grid, travels] = work
        return self._work[grid, travels][by[0] * grid.inner + by[1]]

    def turns(self, travels: Traveller) -> tuple[Turn, ...]:
        rows = needed_rows(*self.layouts, self.mask, travels)
        work, ranks, turns = pair_work(*self.layouts, self.mask), self._numbers, []
        for to, full in turns_of(*self.layouts, self.mask, travels):
            source = torch.empty_like(to).scatter_(0, to, ranks)
            comes = full[source]
            here, there = (ranks, source), (to, ranks)
            if travels == "q":
                here, there = here[::-1], there[::-1]
            tiles = StepWork(*(table[here] * comes for table in work.tables))
            sent, received = rows[there] * full, rows[here] * comes
            turns.append(Turn(Hop(to, source), to != ranks, sent, received, (), tiles))
        return tuple(turns)

    def gathered(self, gathers: Traveller, rows: int) -> StepWork:
        return every_gathered(*self.layouts, self.mask, gathers)

    def over(self, layouts: Layouts) -> EveryRank:
        return replace(self, layouts=layouts)

    def groups(self, layouts: Layouts, degree: int) -> EveryRank:
        return replace(self, layouts=layouts)


def mirrored(
    order: tuple[Displacement, ...], grid: Grid, travels: Traveller
) -> tuple[Displacement, ...]:
    """The displacements for the side that travels, from an `order` for travelling keys."""
    if travels == "kv":
        return order
    return tuple(sorted((-a % grid.outer, -b % grid.inner) for a, b in order))


def _count(runs: tuple[slice, ...]) -> int:
    return sum(run.stop - run.start for run in runs)


def _index(side: Traveller) -> int:
    return 0 if side == "q" else 1


@lru_cache(maxsize=64)
def _moved(grid: Grid, by: Displacement) -> Tensor:
    ranks = torch.arange(grid.outer * grid.inner).view(grid.outer, grid.inner)
    return ranks.roll((-by[0], -by[1]), (0, 1)).flatten()


@lru_cache(maxsize=64)
def every_order(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    grid: Grid,
    travels: Traveller,
) -> tuple[Displacement, ...]:
    """`Ranks.order` from the work of all pairs."""
    needed = pair_work(layout_q, layout_kv, mask).displacements(grid)
    return mirrored(needed, grid, travels)


@lru_cache(maxsize=64)
def every_count(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, travels: Traveller
) -> Tensor:
    """(world_size,) number of rows of each rank's shard that travel."""
    return pair_work(layout_q, layout_kv, mask).travelling(travels).count


@lru_cache(maxsize=64)
def every_gathered(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, gathers: Traveller
) -> StepWork:
    """The work of each rank with the shards of all ranks at once."""
    return pair_work(layout_q, layout_kv, mask).gathered(gathers)


@lru_cache(maxsize=2)
def _by_displacement(
    layout_q: SequenceLayout,
    layout_kv: SequenceLayout,
    mask: Mask,
    grid: Grid,
    travels: Traveller,
) -> list[StepWork]:
    return pair_work(layout_q, layout_kv, mask).by_displacement(grid, travels)
