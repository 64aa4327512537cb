"""Several sequences of unlike lengths in one cache: which rows a rank holds, and who sees them.

A cache has room for sequences of any lengths, which a tensor tells. A rank's rows of every sequence
follow from one rule: row j has position start + j // run * period + j % run. Of 10 positions, two
ranks hold

    pages of 2, round-robin        0 1 | 4 5 | 8 9      2 3 | 6 7          run 2, period 4
    layout striped(10, 2)          0 2 4 6 8            1 3 5 7 9          run 1, period 2
    layout contiguous(10, 2)       0 1 2 3 4            5 6 7 8 9          run 5, period 10

A sequence of 7 positions fills those from 0 to 6: 0 1 4 5 and 2 3 6 of the pages. A page table
tells where a sequence's rows stand in a rank's pool, whatever the rule, here for a page size of 2:

    block_table[sequence]  5 2 7    rows 0 1 are in page 5 of the pool, 2 3 in page 2, 4 5 in page 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.tiles import Tile


class Sequences(NamedTuple):
    """A rank's part of the sequences of a cache; their lengths are no part of it.

    Attributes:
        start, run, period: see above.
        rows: rows of one sequence for which the rank has room.
        page_size: rows of a page; 0 if a sequence's rows stand in one run.
        window_size: keys on either side of the diagonal, bottom-right aligned; -1 is unbounded.
    """

    start: int
    run: int
    period: int
    rows: int
    page_size: int
    window_size: tuple[int, int]

    def rows_before(self, positions: Tensor) -> Tensor:
        """Numbers of the rank's rows at positions below these."""
        past = (positions - self.start).clamp(min=0)
        return past // self.period * self.run + (past % self.period).clamp(max=self.run)

    def seen(self, lengths: Tensor, queries: int) -> Tensor:
        """(batch, queries, 2): rows [first, last) that each of a sequence's last positions sees."""
        left, right = self.window_size
        stop = lengths.long()[:, None].expand(-1, queries)
        positions = stop - queries + torch.arange(queries, device=lengths.device)
        start = torch.zeros_like(positions) if left < 0 else positions - left
        stop = stop if right < 0 else torch.minimum(stop, positions + right + 1)
        first, last = (self.rows_before(x).clamp(max=self.rows) for x in (start, stop))
        return torch.stack([first, torch.maximum(first, last)], -1)

    def pages(self, rows: int) -> int:
        """Number of pages with the first rows of a sequence."""
        return -(-rows // self.page_size)

    def gathered(self, x: Tensor, block_table: Tensor | None) -> Tensor:
        """Rows (batch, rows, heads, dim) of all sequences; no page stands for any page."""
        if block_table is None:
            return x
        return x[block_table.clamp(0, x.size(0) - 1).long()].flatten(1, 2)


def tiles_of(seen: Sequence[tuple[int, int]]) -> tuple[Tile, ...]:
    """The tiles of queries that see rows [first, last): of what all see, then of the rest."""
    first, last = max(start for start, _ in seen), min(stop for _, stop in seen)
    if first >= last:
        first = last = 0
    runs = [(0, len(seen), first, last)]
    for i, (start, stop) in enumerate(seen):
        cuts = [start, first, last, stop] if first < last else [start, stop]
        runs += [(i, i + 1, *run) for run in zip(cuts[::2], cuts[1::2], strict=True)]
    return tuple(Tile(*run) for run in runs if run[2] < run[3])
