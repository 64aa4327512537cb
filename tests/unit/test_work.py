"""Work of all pairs of ranks, and turns of an exchange, against the dense mask."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.core import work as module
from ring_attn.core.layout import LAYOUTS, Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.masks import documents
from ring_attn.core.ranks import OneRank
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.turns import turns_of
from ring_attn.core.work import PairWork, needed_displacements, needed_rows, pair_work
from ring_attn.machines.count import bytes_sent, peak_bytes
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.testing import Layouts, layouts_of, masks


def random_layout(rng: random.Random, seqlen: int, ranks: int, strided: bool) -> SequenceLayout:
    """Picks a named layout, or deals shuffled runs of one stride to the ranks."""
    if rng.random() < 0.5:
        names = [name for name in LAYOUTS if (name == "striped") == strided]
        return SequenceLayout.from_name(rng.choice(names), seqlen, ranks)
    stride = ranks if strided else 1
    block = stride * rng.randint(1, 20)
    runs = [
        Segment(start, len(range(start, min(first + block, seqlen), stride)), stride)
        for first in range(0, seqlen, block)
        for start in range(first, min(first + stride, seqlen))
    ]
    rng.shuffle(runs)
    return SequenceLayout.from_segments([runs[rank::ranks] for rank in range(ranks)])


def run_of(seen: Tensor) -> tuple[int, int]:
    """The shortest run of rows with all True ones; (0, 0) if none is True."""
    rows = seen.nonzero().flatten().tolist()
    return (rows[0], rows[-1] + 1) if rows else (0, 0)


def assert_as_dense(work: PairWork, layouts: Layouts, mask: Mask) -> None:
    for pair in product(range(layouts[0].world_size), repeat=2):
        positions = [x.position_ids(rank) for x, rank in zip(layouts, pair, strict=True)]
        visible, where = mask.dense(*positions), (layouts, mask, pair)
        assert int(work.area[pair]) == int(visible.sum()), where
        assert int(work.area[pair]) > 0 or int(work.edge[pair]) == 0, where
        for rows, dim in ((work.q, 1), (work.kv, 0)):
            run = int(rows.start[pair]), int(rows.stop[pair])
            assert run == run_of(visible.any(dim)), where


@pytest.mark.parametrize("chunk", [1 << 16, 7])
@pytest.mark.parametrize("strided", [False, True])
def test_random_layouts_and_masks(
    monkeypatch: pytest.MonkeyPatch, strided: bool, chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    rng = random.Random(f"{strided} {chunk}")
    compared = 0
    while compared < 60:
        ranks, mask = rng.randint(1, 6), rng.choice([*masks(rng.randint(1, 60)).values()])
        q, kv = (random_layout(rng, n, ranks, strided) for n in (mask.seqlen_q, mask.seqlen_k))
        if q.stride == kv.stride:
            work = pair_work.__wrapped__(q, kv, mask)
            assert_as_dense(work, (q, kv), mask)
            compared += 1


def test_edges() -> None:
    layout = SequenceLayout.contiguous(10, 2)
    work = pair_work(layout, layout, Mask(10, 10, causal=True))
    assert work.area.tolist() == [[15, 0], [25, 15]] and work.edge.tolist() == [[4, 0], [0, 4]]


def test_many_ranks_or_documents_take_no_time() -> None:
    size, parts = 8192, [[] for _ in range(64)]
    for start in range(0, 200 * size, size):
        for rank, part in enumerate(parts):
            for one in SequenceLayout.zigzag(size, 64).segments(rank):
                part.append(Segment(start + one.start, one.length))
    for layout, mask in (
        (SequenceLayout.zigzag(1 << 18, 1024), Mask(1 << 18, 1 << 18, causal=True)),
        (SequenceLayout.from_segments(parts), documents(range(0, 201 * size, size), causal=True)),
    ):
        start = time.thread_time()
        work = pair_work(layout, layout, mask)
        assert time.thread_time() - start < 4
        assert int(work.area.sum()) == mask.area


# -- turns of an exchange: each pair that needs rows has one; exactly the needed rows travel


SPEC = AttentionSpec("cpu", torch.float32, 1, 1, 1, 16, 16)
LENGTHS = (40, 3, 90, 11, 64, 64, 7, 33, 128, 5, 21, 46)


def placed(world_size: int) -> tuple[Mask, SequenceLayout]:
    """Puts the halves of each document on distant ranks, among pieces of other documents."""
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    start = 0
    for number, length in enumerate(LENGTHS):
        half = length // 2
        for piece, (first, rows) in enumerate(((start, half), (start + half, length - half))):
            rank = (5 * number + (3 + number) * piece) % world_size
            parts[rank].append(Segment(first, rows))
        start += length
    return documents([0, *accumulate(LENGTHS)], causal=True), SequenceLayout.from_segments(parts)


def sides(world_size: int) -> Iterator[tuple[Mask, Layouts]]:
    """Every mask with every layout."""
    mask, layout = placed(world_size)
    yield mask, (layout, layout)
    for mask, one in product(masks(61).values(), (*LAYOUTS, "boundaries")):
        yield mask, layouts_of(one, mask, world_size)


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rows_are_those_that_see(world_size: int, travels: Any) -> None:
    """Compares numbers of rows, and the rows sent from rank to rank, with the dense mask."""
    for mask, layouts in sides(world_size):
        rows = needed_rows(*layouts, mask, travels)
        sent: dict[tuple[int, int], list[int]] = {}
        for rank in range(world_size):
            held = torch.arange(layouts[travels == "kv"].shard_len(rank))
            for turn in OneRank(layouts, mask, rank).turns(travels):
                if turn.sent:
                    assert (rank, turn.hop.send_to) not in sent, "one turn for each pair"
                    found = [i for run in turn.runs for i in held[run].tolist()]
                    sent[rank, turn.hop.send_to] = found
        for a, b in product(range(world_size), repeat=2):
            seen = mask.dense(layouts[0].position_ids(a), layouts[1].position_ids(b))
            some = seen.any(0 if travels == "kv" else 1).nonzero().flatten().tolist()
            assert int(rows[a, b]) == len(some)
            if a != b:
                assert sent.get((b, a) if travels == "kv" else (a, b), []) == some


def test_few_turns() -> None:
    """All pairs need a turn per distance; few pairs need about a turn per partner of a rank."""
    layout = SequenceLayout.zigzag(64, 16)
    assert len(turns_of(layout, layout, Mask(64, 64), "kv")) == 15
    mask, layout = placed(12)
    rows = needed_rows(layout, layout, mask, "kv").clone().fill_diagonal_(0)
    partners = max(int((rows > 0).sum(dim).max()) for dim in (0, 1))
    distances = len(needed_displacements(layout, layout, mask)) - 1
    assert partners <= len(turns_of(layout, layout, mask, "kv")) <= partners + 1 < distances


def test_an_exchange_holds_and_sends_no_more_than_is_needed() -> None:
    """Peaks do not grow with the ranks; a document's first half goes to its second half."""
    peaks = set()
    for world_size in (6, 12, 24):
        layout = SequenceLayout.contiguous(64 * world_size, world_size)
        args = (SPEC, (layout, layout), Mask(layout.seqlen, layout.seqlen), 1)
        call = make_call(Strategy("exchange"), *args, backend="reference")
        peaks.add(peak_bytes(call, backward=True))
    assert len(peaks) == 1
    mask, layout = placed(8)
    nbytes = 0
    for rank in range(8):
        call = make_call(Strategy("exchange"), SPEC, (layout, layout), mask, rank, backend="aten")
        nbytes += bytes_sent(program_of(call, backward=False))
    apart = [length // 2 for n, length in enumerate(LENGTHS) if (3 + n) % 8]
    padding = nbytes - sum(apart) * 2 * 16 * 4  # V begins at a multiple of 128 bytes
    assert 0 <= padding < 128 * len(apart)
