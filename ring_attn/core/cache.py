"""Sequences of different lengths in one cache: the rows that each rank holds, and who sees them.

Also `next_rank`, the rank of the next token in the cache of one sequence.

A cache has room for sequences of any lengths, which are in a tensor. The positions of a rank's rows
follow one rule in every sequence: row j has position start + j // run * period + j % run. Of 10
positions, two ranks hold

    pages of 2, round-robin        0 1 | 4 5 | 8 9      2 3 | 6 7          run 2, period 4
    layout striped(10, 2)          0 2 4 6 8            1 3 5 7 9          run 1, period 2
    layout contiguous(10, 2)       0 1 2 3 4            5 6 7 8 9          run 5, period 10

A sequence of 7 positions fills those from 0 to 6: 0 1 4 5 and 2 3 6 of the pages. With any rule, a
page table locates a sequence's rows in the pool of a rank. For a page size of 2:

    block_table[sequence]  5 2 7    rows 0 1 are in page 5 of the pool, 2 3 in page 2, 4 5 in page 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.core.tiles import Tile
from ring_attn.values.checks import as_int, check_type


class Sequences(NamedTuple):
    """A rank's part of the sequences of a cache, without their lengths.

    Attributes:
        start, run, period: see above.
        rows: rows of one sequence for which the rank has room.
        page_size: rows of a page; 0 if the rows of a sequence are contiguous.
        window_size: keys on either side of the diagonal, bottom-right aligned; -1 is unbounded.
    """

    start: int
    run: int
    period: int
    rows: int
    page_size: int
    window_size: tuple[int, int]

    def rows_before(self, positions: Tensor) -> Tensor:
        """Return how many of the rank's rows have positions below each of `positions`."""
        past = (positions - self.start).clamp(min=0)
        return past // self.period * self.run + (past % self.period).clamp(max=self.run)

    def seen(self, lengths: Tensor, queries: int) -> Tensor:
        """Return the rows [first, last) that each of a sequence's last positions sees.

        Args:
            lengths: (batch,) lengths of the sequences.
            queries: number of queries, which are the last positions of each sequence.

        Returns:
            (batch, queries, 2) int64.
        """
        left, right = self.window_size
        stop = lengths.long()[:, None].expand(-1, queries)
        positions = stop - queries + torch.arange(queries, device=lengths.device)
        start = torch.zeros_like(positions) if left < 0 else positions - left
        stop = stop if right < 0 else torch.minimum(stop, positions + right + 1)
        first, last = (self.rows_before(x).clamp(max=self.rows) for x in (start, stop))
        return torch.stack([first, torch.maximum(first, last)], -1)

    def pages(self, rows: int) -> int:
        """Return the number of pages with the first rows of a sequence."""
        return -(-rows // self.page_size)

    def gathered(self, x: Tensor, block_table: Tensor | None) -> Tensor:
        """Return the rows of all sequences, (batch, rows, heads, dim).

        An invalid entry of the page table is replaced by an existing page, whose rows are masked.
        """
        if block_table is None:
            return x
        pages = block_table.clamp(0, x.size(0) - 1).long()
        return x[pages].flatten(1, 2)  # (batch, pages, page_size, ...) -> (batch, rows, ...)


def tiles_of(seen: Sequence[tuple[int, int]]) -> tuple[Tile, ...]:
    """Return the tiles of queries that each see a run of rows.

    The first tile holds the rows that all queries see; the others hold the rest of each query.

    Args:
        seen: (first, last) of each query, in order.
    """
    first = max(start for start, _ in seen)
    last = min(stop for _, stop in seen)
    if first >= last:
        first = last = 0
    runs = [(0, len(seen), first, last)]
    for i, (start, stop) in enumerate(seen):
        rest = [(start, first), (last, stop)] if first < last else [(start, stop)]
        runs += [(i, i + 1, k_start, k_end) for k_start, k_end in rest]
    return tuple(
        Tile(q_start=q_start, q_end=q_end, k_start=k_start, k_end=k_end)
        for q_start, q_end, k_start, k_end in runs
        if k_start < k_end
    )


def next_rank(layout: SequenceLayout, *, block: int = 256) -> int:
    """Return the rank that should store the next token of a cache.

    This is the rank with the fewest rows, but the rank with the newest token continues until its
    run has a multiple of `block` tokens. So ranks that started with equally many rows differ by at
    most `block` rows, and n tokens take n / block segments, which keeps the number of tiles small.
    Striped caches have no runs, so their ranks take turns.

    Args:
        layout: layout of the cache before the token is added.
        block: number of tokens in a block; with 1, the ranks take turns.

    Raises:
        ValueError: a block below 1.
        TypeError: a layout given by name, or a block that is not an int.

    Example:
        >>> cache = SequenceLayout.contiguous(6, 2)
        >>> for _ in range(4):
        ...     cache = cache.appended(next_rank(cache, block=2), 1)
        >>> cache.segments(0), cache.shard_lens
        ((Segment(start=0, length=3, stride=1), Segment(start=7, length=2, stride=1)), (5, 5))
    """
    check_type("layout", layout, SequenceLayout)
    block = as_int("block", block, least=1)
    ranks = range(layout.world_size)
    if layout.stride == 1:
        for rank in ranks:
            segments = layout.segments(rank)
            last = segments[-1] if segments else Segment(0, 0)
            has_newest_token = last.start + last.length == layout.seqlen
            if has_newest_token and last.length % block:
                return rank
    return min(ranks, key=layout.shard_len)
