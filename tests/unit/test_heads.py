"""Heads shared among ranks: each head once, equal runs, no share too large, no needless cut."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement, pairwise

import pytest

from ring_attn.core.heads import HeadShare, is_replicated, share_heads

# (kv heads, q heads of each, ranks); primes, powers of 2, more ranks than heads.
CASES = [
    (nheads_kv, group, degree)
    for nheads_kv in (*range(1, 9), 12)
    for group in (1, 2, 3, 4, 5, 8)
    for degree in (*range(1, 10), 12, 16)
]


def shares_of(nheads_kv: int, group: int, degree: int) -> tuple[HeadShare, ...]:
    return share_heads(nheads_kv * group, nheads_kv, degree)


def heads_of(share: HeadShare) -> range:
    """The q heads of a share; fails if they are not consecutive."""
    heads = [head for run in share.runs for head in range(run.q.start, run.q.stop)]
    assert heads == list(range(min(heads, default=0), max(heads, default=-1) + 1))
    return range(heads[0], heads[-1] + 1) if heads else range(0)


def test_every_head_once_in_order_and_no_share_too_large() -> None:
    for nheads_kv, group, degree in CASES:
        shares, case = shares_of(nheads_kv, group, degree), (nheads_kv, group, degree)
        heads = [head for share in shares for head in heads_of(share)]
        assert len(shares) == degree and heads == list(range(nheads_kv * group)), case
        assert [share.num for share in shares] == [len(heads_of(share)) for share in shares]
        longest = -(-nheads_kv * group // degree)
        assert max(share.num for share in shares) == longest, case
        holders = Counter(
            kv for share in shares for run in share.runs for kv in range(run.kv.start, run.kv.stop)
        )
        assert set(holders) == set(range(nheads_kv))
        assert is_replicated(shares, nheads_kv) == (max(holders.values()) > 1)
        if -(-nheads_kv // degree) * group == longest:
            # A group is not cut where shares are as equal without a cut.
            assert not is_replicated(shares, nheads_kv), case
            assert all(len(share.runs) <= 1 for share in shares)


def cost(sizes: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Computes the cost independently: extra runs, cut kv heads, squares, kv heads sent."""
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    kvs = [
        [head // group for head in range(stop - n, stop)]
        for n, stop in zip(sizes, stops, strict=True)
    ]
    runs = 0
    for kv in kvs:
        each = [kv.count(one) for one in sorted(set(kv))]
        runs += sum(a != b for a, b in pairwise(each))
    cut = sum(n > 1 for n in Counter(one for kv in kvs for one in set(kv)).values())
    return runs, cut, sum(n * n for n in sizes), sum(len(set(kv)) for kv in kvs)


def test_no_other_cuts_cost_less() -> None:
    for nheads_kv, group, degree in CASES:
        nheads = nheads_kv * group
        if nheads > 12 or degree > 5:
            continue
        longest = -(-nheads // degree)
        cheapest = min(
            cost(sizes, group)
            for cuts in combinations_with_replacement(range(nheads + 1), degree - 1)
            if max(sizes := tuple(b - a for a, b in pairwise((0, *cuts, nheads)))) <= longest
        )
        shares = shares_of(nheads_kv, group, degree)
        found = tuple(share.num for share in shares)
        assert cost(found, group) == cheapest, (nheads_kv, group, degree, found)
        assert sum(max(len(share.runs) - 1, 0) for share in shares) == cheapest[0]


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        ((3, 3, 2), [2, 1]),
        ((3, 1, 2), [2, 1]),
        ((10, 10, 4), [3, 3, 2, 2]),
        ((2, 2, 4), [1, 1, 0, 0]),
        ((6, 2, 4), [2, 1, 2, 1]),  # not 2, 2, 1, 1, which cuts across
        ((8, 2, 3), [3, 2, 3]),
        ((64, 8, 8), [8] * 8),
        ((128, 8, 32), [4] * 32),
    ],
)
def test_shares_of_some_models(heads: tuple[int, int, int], sizes: list[int]) -> None:
    assert [share.num for share in share_heads(*heads)] == sizes


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((0, 1, 1), "nheads must be at least 1, got 0"),
        ((4, 0, 1), "nheads_kv must be at least 1, got 0"),
        ((4, 4, 0), "degree must be at least 1, got 0"),
        ((4, 3, 2), "nheads must divide by nheads_kv, got 4 and 3"),
        ((2, 4, 2), "nheads must divide by nheads_kv, got 2 and 4"),
    ],
)
def test_refused(heads: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share_heads(*heads)
