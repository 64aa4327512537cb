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


def q_heads(share: HeadShare) -> list[int]:
    return [head for run in share.runs for head in range(run.q.start, run.q.stop)]


@pytest.mark.parametrize("whole_groups", [False, True])
def test_every_head_once_in_order_and_no_share_too_large(whole_groups: bool) -> None:
    for case in CASES:
        nheads_kv, group, degree = case
        nheads = nheads_kv * group
        shares = share_heads(nheads, nheads_kv, degree, whole_groups=whole_groups)
        heads = [q_heads(share) for share in shares]
        assert len(shares) == degree and sum(heads, []) == list(range(nheads)), case
        assert [share.num for share in shares] == [*map(len, heads)]

        longest = max(share.num for share in shares)
        least = -(-nheads // degree)
        keeps_groups = whole_groups and degree <= nheads_kv
        assert longest == (-(-nheads_kv // degree) * group if keeps_groups else least), case

        for share in shares:
            for run in share.runs:
                used = Counter(head // group for head in range(run.q.start, run.q.stop))
                assert sorted(used) == [*range(run.kv.start, run.kv.stop)], case
                assert len(set(used.values())) == 1, case
        holders = Counter(
            kv for share in shares for run in share.runs for kv in range(run.kv.start, run.kv.stop)
        )
        assert set(holders) == set(range(nheads_kv))
        assert is_replicated(shares, nheads_kv) == (max(holders.values()) > 1)
        if keeps_groups or -(-nheads_kv // degree) * group == least:
            # A group is not cut where shares are as equal without a cut.
            assert not is_replicated(shares, nheads_kv), case
            assert all(len(share.runs) <= 1 for share in shares)


def test_few_kv_heads_on_three_ranks() -> None:
    assert [share.num for share in share_heads(12, 2, 3)] == [4, 4, 4]
    assert [share.num_kv for share in share_heads(12, 2, 3)] == [1, 2, 1]


def cost(sizes: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Compute the cost independently: extra runs, cut kv heads, squares, kv heads sent."""
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
        shares = share_heads(nheads, nheads_kv, degree)
        found = tuple(share.num for share in shares)
        assert cost(found, group) == cheapest, (nheads_kv, group, degree, found)
        assert sum(max(len(share.runs) - 1, 0) for share in shares) == cheapest[0]
