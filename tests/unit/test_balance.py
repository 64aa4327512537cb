"""Layouts from content: as good as the best of all partitions; refusals name the numbers."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import accumulate, combinations_with_replacement, pairwise, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ring_attn import balance
from ring_attn.core.dtypes import DTYPES
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.core.tiles import pair_tiles
from ring_attn.planning import partition
from ring_attn.planning.balance import (
    Balance,
    Size,
    balance_of,
    by_area,
    by_cost,
    by_documents,
    by_memory,
    by_separators,
    check_halo,
    crossing_rows,
    halo_rows,
    least_world_size,
    local_rows,
    visible_keys,
)
from ring_attn.testing import masks
from tests.drawn import WINDOWS, reproducible
from tests.refusals import refused

Window = tuple[int, int]
MASKS = masks(11) | {"nothing to see": Mask(7, 0), "no rows": Mask(0, 0, causal=True)}


def every_cuts(seqlen: int, world_size: int, places: list[int]) -> Iterator[list]:
    """All ways to cut a sequence at some places, empty shards included."""
    for inner in combinations_with_replacement(places, world_size - 1):
        yield [0, *inner, seqlen]


def greatest(work: list, cuts: list[int]) -> int | Fraction:
    return max(sum(work[a:b], start=type(work[0])(0) if work else 0) for a, b in pairwise(cuts))


def at_multiples(layout: SequenceLayout, align: int) -> bool:
    return all(s.start % align == 0 for r in range(layout.world_size) for s in layout.segments(r))


# -- by_area, by_cost and by_separators


@reproducible
@given(
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e30)), max_size=8),
    st.integers(1, 4),
    st.sampled_from((1, 2, 5, 100)),
    st.sets(st.integers(0, 7)),
)
@example([5e-324, 5e-324, 1e-300, 3e-310], 2, 1, {1})
@example([1e300, 1.0, 1e-300, 1e300], 3, 1, {0, 2})
@example([2.0**53, 1.0, 1.0, 2.0**53, 1.0], 2, 1, {2})  # float64 cannot hold 2^53 + 1
@example([0.0, 0.1, 0.2, 0.3, 0.0], 4, 1, set())
@example([2**62, 2**62, 2**62, 1], 2, 2, {1})
def test_no_cuts_balance_better(
    costs: list[float], world_size: int, align: int, ends: set[int]
) -> None:
    """Compares with all cuts at multiples of `align`, and with all cuts after separators."""
    seqlen, work = len(costs), [Fraction(cost) for cost in costs]
    ids = [int(position in ends) for position in range(seqlen)]
    after = [0, *(n + 1 for n, one in enumerate(ids) if one), seqlen]
    for layout, places in (
        (by_cost(costs, world_size, align=align), [*range(0, seqlen, align), seqlen]),
        (by_separators(ids, {1}, world_size, work=costs), after),
    ):
        assert (layout.seqlen, layout.world_size) == (seqlen, world_size)
        cuts = list(layout.cuts or ())
        assert set(cuts) <= set(places)
        assert greatest(work, cuts) == min(
            greatest(work, others) for others in every_cuts(seqlen, world_size, places)
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, *DTYPES])
def test_costs_of_any_dtype(dtype: torch.dtype) -> None:
    cost = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=dtype)
    cost.requires_grad_(dtype.is_floating_point)
    assert by_cost(cost, 3).cuts == (0, 4, 6, 8)
    assert balance_of(by_cost(cost, 3), cost) == Balance((9, 14, 8), (4, 2, 2))


TOKENS = [7, 0, 7, 7, 2, 7, 0, 7]
UNEVEN = [1] * 9 + [0] + [1] * 2


@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        # Without work the rows are shared; between work at both ends, the cut is in the middle.
        (lambda: by_cost([0] * 12, 4), (0, 3, 6, 9, 12)),
        (lambda: by_cost([1] + [0] * 8 + [1], 2), (0, 5, 10)),
        # A greedy walk to the limit would put 5 rows on rank 1, 1 on rank 2, and none on rank 3.
        (lambda: by_cost([10, 2, 2, 2, 2, 2, 2], 4), (0, 1, 3, 5, 7)),
        (lambda: by_separators(torch.tensor(TOKENS), [0, 2], 2), (0, 5, 8)),
        (lambda: by_separators(TOKENS, [0, 2], 2, work=Mask(8, 8, True)), (0, 5, 8)),
        (lambda: by_separators(TOKENS, (0,), 3), (0, 2, 7, 8)),
        (lambda: by_separators(UNEVEN, {0}, 2), (0, 10, 12)),
        (lambda: by_memory(1000, [0, 3 << 30, 1 << 30], 4096), (0, 0, 750, 1000)),
    ],
)
def test_cuts_by_hand(make: Callable[[], SequenceLayout], cuts: tuple[int, ...]) -> None:
    assert make().cuts == cuts


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "segments"])
def test_work_is_what_ranks_see(kind: str) -> None:
    for mask in MASKS.values():
        n = mask.seqlen_q
        third, half = n // 3, n // 2
        parts = [[Segment(half, n - half)], [], [Segment(0, third), Segment(third, half - third)]]
        layout = SequenceLayout.from_segments(parts)
        if kind != "segments":
            layout = SequenceLayout.from_name(kind, n, 3)
        work = tuple(int(mask.dense()[layout.position_ids(rank)].sum()) for rank in range(3))
        expected = Balance(work, layout.shard_lens)
        assert balance_of(layout, mask) == balance_of(layout, visible_keys(mask)) == expected
        assert by_area(mask, 3, align=2) == by_cost(mask.dense().sum(1), 3, align=2)
        assert sum(work) or expected.of_work == 1.0


# -- by_documents


def test_what_crosses_a_cut() -> None:
    for mask in MASKS.values():
        if mask.seqlen_q == mask.seqlen_k:
            dense, cuts = mask.dense(), range(mask.seqlen_q + 1)
            sides = [(dense[cut:, :cut], dense[:cut, cut:]) for cut in cuts]
            expected = [sum(int(one.any(0).sum()) for one in both) for both in sides]
            assert crossing_rows(mask).tolist() == expected


@st.composite
def packings(
    draw: st.DrawFn, max_documents: int = 6, max_len: int = 4, min_len: int = 0
) -> tuple[int, ...]:
    lens = draw(st.lists(st.integers(min_len, max_len), min_size=1, max_size=max_documents))
    return tuple(accumulate(lens, initial=0))


@settings(reproducible, max_examples=200)
@given(
    packings(),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(WINDOWS),
    st.sampled_from((1.0, 1.05, 1.3, 2.5)),
    st.sampled_from((1, 2, 3)),
)
def test_no_cuts_within_the_limit_are_cheaper(
    cu: tuple[int, ...],
    world_size: int,
    causal: bool,
    window: Window,
    max_balance: float,
    align: int,
) -> None:
    seqlen = min(cu[-1], 12)
    cu = tuple(min(end, seqlen) for end in cu)
    mask = Mask(seqlen, seqlen, causal, window, cu, cu)
    layout = by_documents(
        cu, world_size, causal=causal, window_size=window, max_balance=max_balance, align=align
    )
    assert layout.seqlen == seqlen and at_multiples(layout, align)
    work, cost = visible_keys(mask).tolist(), crossing_rows(mask).tolist()

    def price(cuts: list[int]) -> int:
        return sum(cost[cut] for cut in cuts[1:-1])

    places = [*range(0, seqlen, align), seqlen]
    everything = list(every_cuts(seqlen, world_size, places))
    best = min(greatest(work, cuts) for cuts in everything)
    limit = max(best, Fraction(max_balance) * sum(work) / world_size)
    allowed = [cuts for cuts in everything if greatest(work, cuts) <= limit]
    cheapest = min(map(price, allowed))
    chosen = list(layout.cuts or ())
    assert greatest(work, chosen) <= limit
    assert price(chosen) == cheapest
    if cheapest == 0:
        free = [cuts for cuts in allowed if all(cut in (*cu, seqlen) for cut in cuts)]
        assert not free or greatest(work, chosen) == min(greatest(work, cuts) for cuts in free)


@reproducible
@given(packings(12, 25, 1), st.integers(1, 9), st.integers(1, 8), st.sampled_from((0, 1)))
def test_long_sequences_are_searched_in_part(
    cu: tuple[int, ...], world_size: int, align: int, drift: int
) -> None:
    # Lower limits reach code for over 65536 positions and 160 ranks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "MAX_INNER_CUTS", 8)
        patch.setattr(partition, "MAX_DRIFT", drift)
        layout = by_documents(cu, world_size, causal=True, align=align)
    mask = Mask(cu[-1], cu[-1], True, (-1, -1), cu, cu)
    balanced = by_area(mask, world_size, align=align)
    assert at_multiples(layout, align)
    assert balance_of(layout, mask).of_work <= max(1.05, balance_of(balanced, mask).of_work)
    costs = crossing_rows(mask)
    assert costs[list(layout.cuts or ())].sum() <= costs[list(balanced.cuts or ())].sum()


# -- by_memory, least_world_size


@settings(reproducible, max_examples=200)
@given(st.integers(0, 60), st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 4))
def test_no_rank_holds_more_than_it_can(seqlen: int, free: list[int], bytes_per_token: int) -> None:
    capacity = [one // bytes_per_token for one in free]
    if seqlen > sum(capacity):
        with pytest.raises(ValueError, match=rf"seqlen {seqlen} at {bytes_per_token} bytes .*"):
            by_memory(seqlen, free, bytes_per_token)
        return
    layout = by_memory(seqlen, free, bytes_per_token)
    assert layout.seqlen == seqlen
    for rows, most in zip(layout.shard_lens, capacity, strict=True):
        assert rows <= most
        # Within a row of its share of the whole rows that all ranks can hold.
        assert abs(rows - seqlen * most / max(sum(capacity), 1)) < 1


@reproducible
@given(st.integers(0, 500), st.integers(0, 100), st.integers(1, 5), st.integers(1, 12))
def test_the_least_world_size(
    seqlen: int, bytes_per_rank: int, bytes_per_token: int, world_size: int
) -> None:
    def holds(ranks: int) -> bool:
        return -(-seqlen // ranks) * bytes_per_token <= bytes_per_rank

    enough = [ranks for ranks in range(1, world_size + 1) if seqlen == 0 or holds(ranks)]
    if not enough:
        with pytest.raises(ValueError, match=rf"seqlen {seqlen} .* {world_size} ranks of "):
            least_world_size(seqlen, bytes_per_rank, bytes_per_token, world_size)
        return
    size = least_world_size(seqlen, bytes_per_rank, bytes_per_token, world_size)
    assert size == Size(enough[0], -(-seqlen // enough[0]))


# -- the halo


LAYOUT = SequenceLayout.boundaries([0, 20, 45, 60, 97])
GAP = SequenceLayout.boundaries([0, 4, 8, 8, 12])


@pytest.mark.parametrize("window", [(0, 0), (7, 0), (5, 9), (14, 14), (30, 3), (-1, -1)])
@pytest.mark.parametrize("cu", [(0, 97), (0, 31, 40, 70, 97)])
def test_the_halo_is_what_travels(cu: tuple[int, ...], window: Window) -> None:
    mask = Mask(97, 97, False, window, cu, cu)
    assert LAYOUT.cuts is not None
    for rank, (first, last) in enumerate(pairwise(LAYOUT.cuts)):
        needed = {
            LAYOUT.cuts[other] + row
            for other in range(4)
            for tile in pair_tiles(LAYOUT, LAYOUT, mask, rank, other)
            for row in range(tile.kv.start, tile.kv.stop)
            if other != rank
        }
        before, after = halo_rows(LAYOUT, mask, rank)
        assert {*range(first - before, first), *range(last, last + after)} == needed


# -- local_rows


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_local_rows_are_those_positions(kind: str) -> None:
    layout = SequenceLayout.from_name(kind, 13, 3)
    for rank, start in product(range(3), range(14)):
        held = layout.position_ids(rank).tolist()
        for stop in range(start, 14):
            wanted = range(start, stop)
            if set(wanted) <= set(held):
                assert held[local_rows(layout, rank, start, stop)] == [*wanted]
            else:
                with refused(ValueError, f"{rank}|{len(set(wanted) & set(held))}"):
                    local_rows(layout, rank, start, stop)


# Rank 0 holds positions 3 to 5 before positions 0 to 2.
PARTS = SequenceLayout.from_segments([[Segment(3, 3), Segment(0, 3)], [Segment(6, 3)]])


# -- refused


X, T = Mask(4, 4), torch.ones
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: by_area(X, 0), "world_size|1|0"),
    (lambda: by_area(X, 2, align=0), "align|1|0"),
    (lambda: by_cost([1.0, -2.0], 2), "cost|-2.0 at 1"),
    (lambda: by_cost([1.0, float("nan")], 2), "cost|finite|nan at 1"),
    (lambda: balance_of(LAYOUT, [float("inf")] * 97), "work|inf at 0"),
    (lambda: by_cost(T(3, 2), 2), "cost|1-D|(3, 2)"),
    (lambda: balance_of(LAYOUT, [1, 2]), "2 positions|97"),
    (lambda: halo_rows(LAYOUT, Mask(97, 96), 0), "96 positions|97"),
    (lambda: halo_rows(LAYOUT, Mask(97, 97), 4), "rank|[0, 4)"),
    (lambda: halo_rows(SequenceLayout.zigzag(12, 2), Mask(12, 12, True), 0), "one run"),
    (lambda: halo_rows(SequenceLayout.striped(12, 2), Mask(12, 12, True), 0), "one run"),
    (
        lambda: check_halo(LAYOUT, Mask(97, 97, False, (15, 0))),
        "rank 3 needs 15 rows of rank 2|holds 15",
    ),
    (
        lambda: check_halo(LAYOUT, Mask(97, 97, False, (0, 16))),
        "rank 1 needs 16 rows of rank 2|holds 15",
    ),
    (lambda: check_halo(GAP, Mask(12, 12, True, (2, -1))), "rank 3 needs 2 rows of rank 2|holds 0"),
    (lambda: local_rows(PARTS, 0, 2, 4), "in one run"),
    (lambda: local_rows(PARTS, 0, 4, 12), "[0, 9], got [4, 12)"),
    (lambda: by_separators(T(2, 2).long(), {1}, 2), "token_ids|1-D|(2, 2)"),
    (lambda: by_separators([1], set(), 2), "separators|none"),
    (lambda: by_separators([1, 2], {1}, 2, work=Mask(3, 3)), "work|3|token_ids|2"),
    (lambda: by_documents([0, 4], 2, max_balance=0.9), "max_balance|1|0.9"),
    (lambda: by_documents([1, 4], 2), "cu_seqlens|0|1"),
    (lambda: by_documents([0, 4, 3], 2), "cu_seqlens|4 then 3"),
    (lambda: by_documents([0, 4], 2, window_size=(1, -2)), "window_size|-1|-2"),
    (lambda: crossing_rows(Mask(3, 4)), "3 queries|4 keys"),
    (lambda: by_memory(4, [], 1), "free_bytes|one rank|none"),
    (lambda: by_memory(4, [8, -1], 1), "free_bytes[1]|0|-1"),
    (lambda: by_memory(4, [8], 0), "bytes_per_token|1"),
    (lambda: by_memory(1000, [4096, 8192, 100], 16), "1000|16|16000|3|12388|774"),
    (lambda: least_world_size(-1, 1, 1, 1), "seqlen|0|-1"),
    (lambda: least_world_size(10_000, 2 << 20, 1 << 10, 4), "4|2097152|2048|8192|5"),
    (lambda: least_world_size(5, 3, 4, 2), "0 tokens each|0 in all"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused(call: Callable[[], object], words: str) -> None:
    with refused(ValueError, words):
        call()
