"""A forward of a model with a KV cache that is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout


@dataclass(frozen=True)
class CacheStep:
    """A forward: the rows that each rank computes, and the rows that it then holds.

    Without a cache both are the same.

    Attributes:
        cache: layout of all rows with the new ones.
        chunk: layout of the new rows; None if every rank computes all of them.
        keep: number of last rows whose logits are requested; 0 is all.
    """

    cache: SequenceLayout
    chunk: SequenceLayout | None
    keep: int = 0

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        assert self.chunk is not None, "queries that are not split have no layout"
        return self.chunk, self.cache

    def num_new(self, rows: int) -> int:
        return rows if self.chunk is None else self.chunk.seqlen

    def position_ids(self, rank: int, rows: int) -> Tensor:
        """Return the global positions of the `rows` rows that a rank computes."""
        past = self.cache.seqlen - self.num_new(rows)
        of_rank = torch.arange(rows) if self.chunk is None else self.chunk.position_ids(rank)
        return past + of_rank
