"""Heads of each rank of a group when heads are exchanged for rows: pure data.

    8 q heads, 2 kv heads, 4 ranks          12 q heads, 4 kv heads, 2 ranks (groups of 3 heads)

    q    0 1 | 2 3 | 4 5 | 6 7              q    0 1 2   3 4 5 | 6 7 8   9 10 11
    kv    0  |  0  |  1  |  1               kv     0       1   |   2       3

Heads need not divide: 3 heads over 2 ranks are 2 + 1, and with more ranks than heads the last ranks
have none. A rank has whole groups, or a part of one group: with more ranks than kv heads, a kv head
is sent to all the ranks that share its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class HeadShare:
    """Consecutive q heads, and the consecutive kv heads that they use."""

    first: int
    num: int
    first_kv: int
    num_kv: int

    @property
    def q(self) -> slice:
        return slice(self.first, self.first + self.num)

    @property
    def kv(self) -> slice:
        return slice(self.first_kv, self.first_kv + self.num_kv)


@lru_cache(maxsize=1024)
def share_heads(nheads: int, nheads_kv: int, degree: int) -> tuple[HeadShare, ...]:
    """The heads of each of `degree` ranks: every q head once, in ascending order.

    Whole groups are dealt to the ranks; with more ranks than groups, ranks are dealt to the groups,
    and the heads of a group to its ranks. So the largest share is as small as can be where one of
    `degree` and `nheads_kv` divides the other, and else may be up to twice as large.
    """
    group = nheads // nheads_kv
    if degree <= nheads_kv:
        sizes = [group * num for num in _dealt(nheads_kv, degree)]
    else:
        ranks = _dealt(min(degree, nheads), nheads_kv)
        sizes = [size for num in ranks for size in _dealt(group, num)]
    cuts = accumulate(sizes + [0] * (degree - len(sizes)), initial=0)
    return tuple(
        HeadShare(a, b - a, a // group, -(-b // group) - a // group if b > a else 0)
        for a, b in pairwise(cuts)
    )


def is_replicated(shares: tuple[HeadShare, ...], nheads_kv: int) -> bool:
    """Tells whether a kv head is on several ranks, so that its gradients must be summed."""
    return sum(share.num_kv for share in shares) > nheads_kv


def _dealt(count: int, among: int) -> list[int]:
    """Sizes of the most equal shares, the larger ones first."""
    size, larger = divmod(count, among)
    return [size + (i < larger) for i in range(among)]
