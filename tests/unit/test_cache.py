"""Sequences of unlike lengths, with all ranks in this process: rows, results, bits, garbage."""

from __future__ import annotations

import pytest
import torch

from ring_attn.checks.decoding import check_sequences
from ring_attn.core.layout import SequenceLayout
from ring_attn.testing import random_qkv, random_sinks
from tests.caches import ROOM, Cache, assert_exact, decoded

LENGTHS = (0, 1, 5, 17, 64, 97)

# World size, page size (0: no pages), layout of the room.
PLACES = {
    "pages on one rank": (1, 16, None),
    "pages dealt to two": (2, 16, None),
    "pages of 5 dealt to three": (3, 5, None),
    "a run": (1, 0, None),
    "runs": (3, 0, SequenceLayout.boundaries([0, 3, 3, ROOM])),
    "runs in pages": (2, 8, SequenceLayout.contiguous(ROOM, 2)),
    "stripes": (3, 0, SequenceLayout.striped(ROOM, 3)),
    "stripes in pages": (4, 16, SequenceLayout.striped(ROOM, 4)),
}
WINDOWS = {"causal": (-1, 0), "all": (-1, -1), "window": (20, 0), "both sides": (9, 1)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.sweep(3)
def test_against_float64(place: str, backend: str) -> None:
    """One to three queries of MHA, GQA and MQA, in all dtypes that a CPU has."""
    turn = [*PLACES].index(place)
    for i, window in enumerate(WINDOWS.values()):
        nheads_kv, queries = (4, 2, 1)[(turn + i) % 3], (1, 3, 1, 2)[i]
        dtype = (torch.float32, torch.bfloat16, torch.float64)[(turn + i) % 3]
        sizes = {"nheads": 4, "nheads_kv": nheads_kv, "headdim": 8, "headdim_v": 6, "dtype": dtype}
        whole = random_qkv(batch=len(LENGTHS), seqlen_q=queries, seqlen_k=ROOM, **sizes)
        sinks = random_sinks(4) if i % 2 else None
        cache = Cache(whole, LENGTHS, *PLACES[place], window)
        got = decoded(cache, whole.q, backend, sinks)
        assert_exact(got, whole, LENGTHS, window, sinks=sinks)


def test_what_is_no_page_stands_for_one() -> None:
    sequences = check_sequences(torch.empty(2, 4, 1, 1), torch.zeros(1, 3), None, (-1, 0), 0, 1)
    rows = sequences.gathered(torch.arange(8.0).view(2, 4, 1, 1), torch.tensor([[1, -1, 2]]))
    assert rows.shape == (1, 12, 1, 1) and rows[0, :4].flatten().tolist() == [4, 5, 6, 7]
