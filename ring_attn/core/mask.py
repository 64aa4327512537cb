"""Which queries see which keys: causality, window, documents, lengths as one predicate.

    document d  = queries [q_start, q_end) and keys [k_start, k_end) that belong together
    diagonal(d) = k_end - q_end                    (bottom-right aligned, as flash-attention)
    query i sees key j  iff  both are in the same document d  and
                             -left <= j - (i + diagonal(d)) <= right

`causal` is `right = 0`; a side of -1 is unbounded. Without `cu_seqlens` there is one document, the
whole sequence. Rows behind the last document are padding: they see nothing and nothing sees them.
So a query always sees one run of keys, and its length is all that the cost of a mask depends on.

    seqlen_q = 2, seqlen_k = 5, causal        window_size = (1, 0), 4 x 4

        k 0 1 2 3 4                               k 0 1 2 3
      q 0 x x x x .                             q 0 x . . .
      q 1 x x x x x                             q 1 x x . .
                                                q 2 . x x .
                                                q 3 . . x x
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """Global positions of one document: queries `[q_start, q_end)`, keys `[k_start, k_end)`."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int

    @property
    def diagonal(self) -> int:
        """`j - i` of the last key against the last query: 0 where both sides have the same rows."""
        return self.k_end - self.q_end


@dataclass(frozen=True)
class Mask:
    """The mask of a whole sequence, as a value: hashable, so that plans are cached by it.

    Args:
        seqlen_q: global number of queries.
        seqlen_k: global number of keys.
        causal: a query sees nothing after its own (bottom-right aligned) position.
        window_size: `(left, right)` keys on either side of the diagonal; -1 is unbounded.
        cu_seqlens_q: document boundaries of the queries, from 0 to `seqlen_q` or to where padding
            begins; None is one document.
        cu_seqlens_k: the same for the keys, of as many documents.

    Example:
        >>> Mask(4, 4, causal=True, window_size=(1, -1)).dense().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None

    @property
    def left(self) -> int | None:
        """Keys visible before the diagonal; None is unbounded."""
        return None if self.window_size[0] < 0 else self.window_size[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the diagonal; None is unbounded, 0 is causal."""
        right = None if self.window_size[1] < 0 else self.window_size[1]
        return 0 if self.causal else right

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """The documents in order; the whole sequence is one where no `cu_seqlens` is given.

        Padding is two more: one of queries without keys, one of keys without queries.
        """
        cu_q = self.cu_seqlens_q or (0, self.seqlen_q)
        cu_k = self.cu_seqlens_k or (0, self.seqlen_k)
        if len(cu_q) != len(cu_k):
            raise ValueError(
                f"queries and keys must have as many documents, got {len(cu_q) - 1} and "
                f"{len(cu_k) - 1}"
            )
        if (cu_q[-1], cu_k[-1]) != (self.seqlen_q, self.seqlen_k):
            cu_q += (self.seqlen_q, self.seqlen_q)
            cu_k += (cu_k[-1], self.seqlen_k)
        return tuple(
            Document(cu_q[d], cu_q[d + 1], cu_k[d], cu_k[d + 1]) for d in range(len(cu_q) - 1)
        )

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.seqlen_q,
                self.seqlen_k,
                self.causal,
                self.window_size,
                self.cu_seqlens_q,
                self.cu_seqlens_k,
            )
        )

    def __hash__(self) -> int:
        # Thousands of document boundaries are hashed once, not at every look-up of a plan.
        return self._hash

    def documents_overlapping(self, start: int, stop: int) -> Iterator[Document]:
        """The documents that have a query in `[start, stop)`, in order."""
        for doc in self.documents[bisect_right(self._q_ends, start) :]:
            if doc.q_start >= stop:
                return
            if doc.q_start < doc.q_end and doc.k_start < doc.k_end:
                yield doc

    @cached_property
    def _q_ends(self) -> tuple[int, ...]:
        return tuple(doc.q_end for doc in self.documents)

    def visible_runs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """First and last-plus-one key that each query sees.

        Args:
            positions: (n,) int64 global query positions.

        Returns:
            `(start, stop)`, (n,) int64 each; `start == stop` where a query sees nothing.
        """
        cu_q = torch.tensor([0, *self._q_ends], dtype=torch.int64)
        docs = torch.tensor([[d.k_start, d.k_end, d.diagonal] for d in self.documents])
        index = torch.searchsorted(cu_q, positions, right=True) - 1
        k_start, k_end, diagonal = docs[index].unbind(1)
        start, stop = k_start, k_end
        if self.left is not None:
            start = torch.maximum(start, positions + diagonal - self.left)
        if self.right is not None:
            stop = torch.minimum(stop, positions + diagonal + self.right + 1)
        return start, torch.maximum(start, stop)

    def dense(self, q_positions: Tensor | None = None, k_positions: Tensor | None = None) -> Tensor:
        """The mask as (n_q, n_k) booleans, True where visible: the specification of the rest.

        Args:
            q_positions: (n_q,) global positions; all queries by default.
            k_positions: (n_k,) global positions; all keys by default.
        """
        if q_positions is None:
            q_positions = torch.arange(self.seqlen_q)
        if k_positions is None:
            k_positions = torch.arange(self.seqlen_k)
        start, stop = self.visible_runs(q_positions)
        return (k_positions >= start[:, None]) & (k_positions < stop[:, None])
