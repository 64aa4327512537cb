"""The work of all pairs of ranks against the dense mask: random layouts, masks and documents."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attn.core import work as module
from ring_attn.core.layout import LAYOUTS, Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import ring_grid
from ring_attn.core.work import PairWork, pair_work
from ring_attn.testing import masks

# Most rows of a sequence: few, since every pair of ranks is compared with its part of the mask.
MOST_ROWS = 60


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


def assert_as_dense(work: PairWork, layouts: tuple[SequenceLayout, ...], mask: Mask) -> None:
    world_size = layouts[0].world_size
    for pair in product(range(world_size), repeat=2):
        positions = [x.position_ids(rank) for x, rank in zip(layouts, pair, strict=True)]
        visible, where = mask.dense(*positions), (layouts, mask, pair)
        assert int(work.area[pair]) == int(visible.sum()), where
        assert int(work.area[pair]) > 0 or int(work.edge[pair]) == 0, where
        for rows, dim in ((work.q, 1), (work.kv, 0)):
            run = int(rows.start[pair]), int(rows.stop[pair])
            assert run == run_of(visible.any(dim)), where


# Small sizes use dense tables only if LONG is small, and several chunks only if chunks are small.
@pytest.mark.parametrize(("long", "chunk"), [(1, 1 << 16), (2, 7), (99, 7)])
@pytest.mark.parametrize("strided", [False, True])
def test_random_layouts_and_masks(
    monkeypatch: pytest.MonkeyPatch, strided: bool, long: int, chunk: int
) -> None:
    monkeypatch.setattr(module, "LONG", long)
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "MOST_EMPTY", 1 << 30)
    rng = random.Random(f"{strided} {long} {chunk}")
    compared = 0
    while compared < 60:
        ranks, mask = rng.randint(1, 6), rng.choice([*masks(rng.randint(1, MOST_ROWS)).values()])
        layouts = tuple(
            random_layout(rng, n, ranks, strided) for n in (mask.seqlen_q, mask.seqlen_k)
        )
        if layouts[0].stride == layouts[1].stride:
            assert_as_dense(pair_work.__wrapped__(*layouts, mask), layouts, mask)
            compared += 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_tables_of_many_ranks_are_those_of_single_pairs(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also compares edges, which no dense mask shows; a large LONG computes each pair alone."""
    layout = SequenceLayout.from_name(name, 1000, 150)
    masks = [Mask(1000, 1000, causal) for causal in (False, True)]
    masks += [Mask(1000, 1000, True, (700, 0)), Mask(1000, 1000, False, (20, 300))]
    filled = [pair_work.__wrapped__(layout, layout, mask) for mask in masks]
    monkeypatch.setattr(module, "LONG", 10_000)
    monkeypatch.setattr(module, "_add_interleaved", module._add_runs)
    for mask, work in zip(masks, filled, strict=True):
        alone = pair_work.__wrapped__(layout, layout, mask)
        tables = [
            (work.area, alone.area), (work.edge, alone.edge),
            (work.q.start, alone.q.start), (work.q.stop, alone.q.stop),
            (work.kv.start, alone.kv.start), (work.kv.stop, alone.kv.stop),
        ]  # fmt: skip
        assert all(torch.equal(*pair) for pair in tables), mask


def test_edges() -> None:
    layout = SequenceLayout.contiguous(10, 2)
    work = pair_work(layout, layout, Mask(10, 10, causal=True))
    assert work.area.tolist() == [[15, 0], [25, 15]] and work.edge.tolist() == [[4, 0], [0, 4]]
    # With a window narrower than the stride, other ranks' keys are unseen and have no edges.
    striped = SequenceLayout.striped(12, 3)
    work = pair_work(striped, striped, Mask(12, 12, window_size=(0, 0)))
    assert work.area.tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    assert (work.edge > 0).tolist() == (work.area > 0).tolist()


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_by_displacement(degree: int) -> None:
    """Compares `by_displacement` with entries of the tables."""
    layout = SequenceLayout.zigzag(53, 6)
    work, grid = pair_work(layout, layout, Mask(53, 53, True, (17, 0))), ring_grid(6, degree)
    for travels, table in (("kv", work.area), ("q", work.area.t())):
        steps = work.by_displacement(grid, travels)  # type: ignore[arg-type]
        for index, rank in product(range(6), repeat=2):
            source = grid.moved(rank, divmod(index, grid.inner), -1)
            assert int(steps[index].area[rank]) == int(table[rank, source])


def test_a_thousand_ranks_take_no_time() -> None:
    """Measures this thread's CPU time, without other work."""
    layout, mask = SequenceLayout.zigzag(1 << 18, 1024), Mask(1 << 18, 1 << 18, causal=True)
    start = time.thread_time()
    work = pair_work(layout, layout, mask)
    assert time.thread_time() - start < 2
    assert int(work.area.sum()) == sum(layout.mask_area(mask))


def test_many_documents_that_are_all_cut_take_no_time() -> None:
    """Dense tables would take ten times as long."""
    size, parts = 8192, [[] for _ in range(64)]
    for start in range(0, 200 * size, size):
        for rank, part in enumerate(parts):
            for one in SequenceLayout.zigzag(size, 64).segments(rank):
                part.append(Segment(start + one.start, one.length))
    layout, cuts = SequenceLayout.from_segments(parts), tuple(range(0, 201 * size, size))
    mask = Mask(200 * size, 200 * size, True, (-1, -1), cuts, cuts)
    start = time.thread_time()
    assert int(pair_work(layout, layout, mask).area.sum()) == 200 * size * (size + 1) // 2
    assert time.thread_time() - start < 4.0
