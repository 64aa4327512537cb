"""Mask: every derived form of it against the predicate of the design, pair by pair."""

from itertools import product
from typing import Any

import pytest
import torch

from ring_attn.core.mask import Document, Mask

WINDOWS = [(-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2), (9, 9), (0, 3), (3, 0)]

# Document boundaries of 7 queries and of keys: alike, unlike, with empty documents on either side.
DOCUMENTS = [
    ((0, 7), (0, 7)),
    ((0, 3, 7), (0, 3, 7)),
    ((0, 0, 3, 3, 7, 7), (0, 0, 3, 3, 7, 7)),
    ((0, 3, 7), (0, 5, 6)),
    ((0, 3, 7), (0, 0, 6)),
    ((0, 3, 3, 7), (0, 2, 5, 9)),
    ((0, 0, 7, 7), (0, 4, 4, 8)),
    ((0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 3, 3, 4, 6, 9, 9)),
]


def sees(mask: Mask, i: int, j: int) -> bool:
    """The design's predicate, document by document, in positions that count from its start."""
    cu_q = mask.cu_seqlens_q or (0, mask.seqlen_q)
    cu_k = mask.cu_seqlens_k or (0, mask.seqlen_k)
    for d in range(len(cu_q) - 1):
        if not (cu_q[d] <= i < cu_q[d + 1] and cu_k[d] <= j < cu_k[d + 1]):
            continue
        len_q, len_k = cu_q[d + 1] - cu_q[d], cu_k[d + 1] - cu_k[d]
        offset = (j - cu_k[d]) - (i - cu_q[d] + len_k - len_q)
        left, right = mask.window_size
        return (
            (not mask.causal or offset <= 0)
            and (left == -1 or -left <= offset)
            and (right == -1 or offset <= right)
        )
    return False


def brute_force(mask: Mask) -> list[list[bool]]:
    return [[sees(mask, i, j) for j in range(mask.seqlen_k)] for i in range(mask.seqlen_q)]


OF_DOCUMENTS = [
    Mask(cu_q[-1], cu_k[-1], causal, window, cu_q, cu_k)
    for (cu_q, cu_k), causal, window in product(DOCUMENTS, (False, True), WINDOWS)
]
# Rows behind the last document, of queries, of keys, of both; and nothing else.
OF_DOCUMENTS += [
    Mask(seqlen_q, seqlen_k, causal, (2, -1), cu_q, cu_k)
    for seqlen_q, seqlen_k, cu_q, cu_k in (
        (9, 5, (0, 3, 7), (0, 2, 5)), (7, 8, (0, 3, 7), (0, 2, 5)),
        (8, 8, (0, 3, 7), (0, 3, 7)), (4, 4, (0, 0), (0, 0)),
    )
    for causal in (False, True)
]  # fmt: skip
EVERY = OF_DOCUMENTS + [
    Mask(seqlen_q, seqlen_k, causal, window)
    for seqlen_q, seqlen_k, causal, window in product(range(7), range(7), (False, True), WINDOWS)
]


def test_dense_and_visible_runs_are_the_predicate() -> None:
    for mask in EVERY:
        expected, dense = brute_force(mask), mask.dense()
        assert dense.dtype == torch.bool and dense.shape == (mask.seqlen_q, mask.seqlen_k)
        assert dense.tolist() == expected, mask
        start, stop = mask.visible_runs(torch.arange(mask.seqlen_q))
        assert start.dtype == stop.dtype == torch.int64
        assert start.shape == stop.shape == (mask.seqlen_q,) and bool((start <= stop).all()), mask
        for first, last, row in zip(start.tolist(), stop.tolist(), expected, strict=True):
            assert [j for j, seen in enumerate(row) if seen] == list(range(first, last)), mask


def test_dense_of_chosen_positions() -> None:
    for mask in OF_DOCUMENTS:
        dense = mask.dense()
        rows = torch.arange(mask.seqlen_q).flip(0)
        cols = torch.arange(mask.seqlen_k)[1::2]
        assert torch.equal(mask.dense(rows, cols), dense[rows][:, cols]), mask
        assert torch.equal(mask.dense(rows), dense[rows]), mask
        assert torch.equal(mask.dense(k_positions=cols), dense[:, cols]), mask


def test_sides_are_none_where_unbounded() -> None:
    assert (Mask(4, 4).left, Mask(4, 4).right) == (None, None)
    assert (Mask(4, 4, window_size=(3, 2)).left, Mask(4, 4, window_size=(3, 2)).right) == (3, 2)
    assert Mask(4, 4, True, (3, -1)).right == 0


@pytest.mark.parametrize("cu", DOCUMENTS, ids=str)
def test_documents_overlapping(cu: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    cu_q, cu_k = cu
    mask = Mask(cu_q[-1], cu_k[-1], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for start, stop in product(range(8), range(8)):
        if start >= stop:
            continue
        expected = [
            doc
            for doc in mask.documents
            if doc.k_start < doc.k_end
            and set(range(doc.q_start, doc.q_end)) & set(range(start, stop))
        ]
        assert list(mask.documents_overlapping(start, stop)) == expected, (start, stop)


def test_documents_tile_the_sequences() -> None:
    for mask in OF_DOCUMENTS:
        docs = mask.documents
        assert [doc.q_start for doc in docs[1:]] == [doc.q_end for doc in docs[:-1]]
        assert [doc.k_start for doc in docs[1:]] == [doc.k_end for doc in docs[:-1]]
        assert (docs[0].q_start, docs[-1].q_end) == (0, mask.seqlen_q)
        assert (docs[0].k_start, docs[-1].k_end) == (0, mask.seqlen_k)
    assert Mask(3, 8).documents == (Document(0, 3, 0, 8),)
    assert Mask(3, 8).documents[0].diagonal == 5


def test_equal_masks_are_one_key() -> None:
    fields: dict[str, Any] = {
        "seqlen_q": 2000, "seqlen_k": 2000, "causal": True, "window_size": (5, -1),
        "cu_seqlens_q": tuple(range(0, 2001, 2)), "cu_seqlens_k": tuple(range(0, 2001, 2)),
    }  # fmt: skip
    assert len({Mask(**fields), Mask(**fields)}) == 1
    changes = {"seqlen_q": 2001, "causal": False, "window_size": (6, -1)}
    changes |= {"cu_seqlens_q": (0, 2000), "cu_seqlens_k": None}
    different = [Mask(**{**fields, name: value}) for name, value in changes.items()]
    assert len({Mask(**fields), *different}) == len({*map(hash, different)}) + 1 == 6


def test_both_sides_have_as_many_documents() -> None:
    with pytest.raises(ValueError, match="as many documents, got 2 and 1"):
        _ = Mask(4, 4, cu_seqlens_q=(0, 1, 4)).documents
