"""Masks that differ by batch entry or by head: the sequences of a batch become one sequence.

    q (batch, rows, nheads, headdim), 2 entries x 2 groups of heads
    -> (1, batch * groups * rows, nheads / groups, headdim)

            entry 0, group 0   entry 0, group 1   entry 1, group 0   entry 1, group 1
    mask    x                  .                  .                  .
            .                  x                  .                  .
            .                  .                  x                  .
            .                  .                  .                  x

The masks are the blocks on the diagonal of one mask. So one call computes all of them, and each
rank gets only the keys that its queries see.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core import masks
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.values.checks import as_tuple, check_type

# A mask for each batch entry and each group of heads.
Grid = tuple[tuple[Mask, ...], ...]


class Fold(NamedTuple):
    """How batch entries and groups of heads become one sequence.

    Attributes:
        batch: number of batch entries; 1 if the batch stays as it is.
        groups: number of groups of consecutive heads.
        mask: mask of the one sequence.
    """

    batch: int
    groups: int
    mask: Mask

    @property
    def num_sequences(self) -> int:
        return self.batch * self.groups

    def rows(self, x: Tensor) -> Tensor:
        """Return (batch, rows, heads, dim) as (1, sequences * rows, heads / groups, dim)."""
        # (batch, rows, groups, heads / groups, dim) -> (batch, groups, rows, heads / groups, dim)
        by_group = x.unflatten(2, (self.groups, -1)).transpose(1, 2)
        return by_group.flatten(0, 2).unsqueeze(0)

    def unfolded(self, out: Tensor) -> Tensor:
        """Return the rows of `rows` in their first shape."""
        rows = out.size(1) // self.num_sequences
        by_group = out.squeeze(0).unflatten(0, (self.batch, self.groups, rows))
        return by_group.transpose(1, 2).flatten(2, 3)

    def unfolded_lse(self, lse: Tensor) -> Tensor:
        """Return (1, heads / groups, sequences * rows) as (batch, heads, rows)."""
        rows = lse.size(2) // self.num_sequences
        by_group = lse.squeeze(0).unflatten(1, (self.batch, self.groups, rows))
        return by_group.permute(1, 2, 0, 3).flatten(1, 2)

    def layouts(self, layout: object, world_size: int) -> Layouts:
        """Return the layouts of the one sequence, for the layout that a user passed."""
        lengths = (self.mask.seqlen_q, self.mask.seqlen_k)
        if isinstance(layout, str):
            seqlen_q, seqlen_k = (length // self.num_sequences for length in lengths)
            layout_q = SequenceLayout.from_name(layout, seqlen_q, world_size)
            layout_k = SequenceLayout.from_name(layout, seqlen_k, world_size)
        else:
            layout_q, layout_k = checks.check_layouts(layout)
        return repeated(layout_q, self.num_sequences), repeated(layout_k, self.num_sequences)


def fold_of(q: Tensor, k: Tensor, given: object) -> Fold | Mask:
    """Return how to compute attention with a list of masks; a mask if all of them are equal.

    `q` and `k` are (batch, rows, heads, headdim). `given` is what the user passed as `mask`.

    Raises:
        ValueError: the numbers of masks do not fit the batch or the heads, or lengths differ.
        TypeError: an element is not a mask.
    """
    grid = _grid(given)
    batch, groups = q.size(0), len(grid[0])
    if len(grid) not in (1, batch):
        raise ValueError(
            f"mask must have one mask for each of the {batch} batch entries, or one for all, got "
            f"a list of {len(grid)}"
        )
    if q.size(2) % groups or k.size(2) % groups:
        raise ValueError(
            "the number of masks of a batch entry must divide the numbers of heads, so that each "
            f"mask belongs to a group of consecutive heads, got {groups} masks, {q.size(2)} heads "
            f"of q and {k.size(2)} of k"
        )
    differ_by_batch = len({*grid}) > 1
    rows = grid if differ_by_batch else grid[:1]
    if all(len({*row}) == 1 for row in rows):
        rows = tuple(row[:1] for row in rows)
    groups = len(rows[0])
    if not differ_by_batch and groups == 1:
        return rows[0][0]
    if not differ_by_batch:
        rows = rows * batch
    return Fold(batch=batch, groups=groups, mask=_joined(rows))


def _grid(given: object) -> Grid:
    """Return the masks of each batch entry, as many of each."""
    words = "a ring_attn.Mask"
    rows = []
    for element in as_tuple("mask", given):
        row = (element,) if isinstance(element, Mask) else as_tuple("each of mask", element)
        for mask in row:
            check_type("each of mask", mask, Mask, words)
        rows.append(row)
    numbers = sorted({len(row) for row in rows})
    if len(numbers) != 1 or numbers[0] == 0:
        raise ValueError(
            "mask must be a list of masks, one for each batch entry, or a list of as many masks "
            f"for each batch entry, one for each group of heads, got lists of {numbers} masks"
        )
    lengths = sorted({(mask.seqlen_q, mask.seqlen_k) for row in rows for mask in row})
    if len(lengths) > 1:
        raise ValueError(
            "all masks of a batch must have the same numbers of queries and keys, got "
            f"{lengths}: mask padding in the shorter sequences, such as by masks.documents of "
            "their lengths in the length of the batch"
        )
    return tuple(rows)


@lru_cache(maxsize=64)
def _joined(rows: Grid) -> Mask:
    """Return the mask of all sequences, one after another."""
    return masks.by_document([mask for row in rows for mask in row])


@lru_cache(maxsize=64)
def repeated(layout: SequenceLayout, number: int) -> SequenceLayout:
    """Return the layout of a number of equal sequences, one after another."""
    whole = layout
    for _ in range(number - 1):
        whole = whole.followed_by(layout)
    return whole
