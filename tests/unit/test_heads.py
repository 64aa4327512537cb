"""Heads shared among ranks: each head once, whole groups or a part of one, no share too large."""

from __future__ import annotations

from collections import Counter

from ring_attn.core.heads import is_replicated, share_heads

# (kv heads, q heads of each, ranks); primes, powers of 2, more ranks than heads.
CASES = [
    (nheads_kv, group, degree)
    for nheads_kv in (*range(1, 9), 12)
    for group in (1, 2, 3, 4, 5, 8)
    for degree in (*range(1, 10), 12, 16)
]


def test_every_head_once_in_order_and_no_share_too_large() -> None:
    for case in CASES:
        nheads_kv, group, degree = case
        shares = share_heads(nheads_kv * group, nheads_kv, degree)
        heads = [[*range(share.q.start, share.q.stop)] for share in shares]
        assert len(shares) == degree and sum(heads, []) == list(range(nheads_kv * group)), case
        longest, smallest = max(map(len, heads)), -(-nheads_kv * group // degree)
        divides = nheads_kv % degree == 0 or degree % nheads_kv == 0
        assert longest == smallest if divides else longest <= 2 * smallest, case
        for share, own in zip(shares, heads, strict=True):
            used = Counter(head // group for head in own)
            assert sorted(used) == [*range(share.kv.start, share.kv.stop)], case
            assert len(used) < 2 or set(used.values()) == {group}, case
        holders = Counter(kv for share in shares for kv in range(share.kv.start, share.kv.stop))
        assert is_replicated(shares, nheads_kv) == (max(holders.values()) > 1)
        assert is_replicated(shares, nheads_kv) == (degree > nheads_kv and group > 1), case
