"""Heads of each rank of a group when heads are exchanged for rows: pure data.

    8 q heads, 2 kv heads, 4 ranks          12 q heads, 4 kv heads, 2 ranks (groups of 3 heads)

    q    0 1 | 2 3 | 4 5 | 6 7              q    0 1 2   3 4 5 | 6 7 8   9 10 11
    kv    0  |  0  |  1  |  1               kv     0       1   |   2       3

The ranks have as equal numbers of q heads as possible. So a rank may have parts of two groups:

    12 q heads, 2 kv heads, 3 ranks

    q    0 1 2 3 | 4 5   6 7 | 8 9 10 11
    kv      0    |  0     1  |     1

Heads need not divide: 3 heads over 2 ranks are 2 + 1, and with more ranks than heads the last ranks
have none. A rank gets the kv heads that its q heads use; a kv head may be sent to several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class HeadRun:
    """Consecutive q heads, and the consecutive kv heads that they use, with groups of one size."""

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


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank, in ascending order.

    There is one run if all kv heads have groups of one size. There are up to three if groups are
    cut, and none on a rank without heads. A kv head is in one run only.
    """

    runs: tuple[HeadRun, ...]

    @property
    def num(self) -> int:
        return sum(run.num for run in self.runs)

    @property
    def num_kv(self) -> int:
        return sum(run.num_kv for run in self.runs)


@lru_cache(maxsize=1024)
def share_heads(
    nheads: int, nheads_kv: int, degree: int, *, whole_groups: bool = False
) -> tuple[HeadShare, ...]:
    """Return the heads of each of `degree` ranks: at most `ceil(nheads / degree)` q heads a rank.

    Every q head is on one rank, and heads ascend with the ranks. Among such shares, the function
    takes the one with the fewest runs beyond one a rank, then the fewest kv heads on several ranks,
    then the most equal sizes. So the q heads of one kv head stay together wherever that makes no
    rank's share larger.

    With `whole_groups`, and no more ranks than kv heads, they always stay together, so that no
    gradient is summed over ranks; a share may then be up to twice as large as the least.
    """
    group = nheads // nheads_kv
    if whole_groups and degree <= nheads_kv:
        kv_shares = share_heads(nheads_kv, nheads_kv, degree)
        return tuple(
            HeadShare(_runs(run.first * group, (run.first + run.num) * group, group))
            for share in kv_shares
            for run in share.runs
        )
    num_with_heads = min(nheads, degree)
    cuts = _cuts(nheads, group, num_with_heads)
    shares = [HeadShare(_runs(start, stop, group)) for start, stop in pairwise(cuts)]
    without_heads = [HeadShare(())] * (degree - num_with_heads)
    return (*shares, *without_heads)


def is_replicated(shares: tuple[HeadShare, ...], nheads_kv: int) -> bool:
    """Return whether a kv head is on several ranks, so that its gradients must be summed."""
    return sum(share.num_kv for share in shares) > nheads_kv


class _Cost(NamedTuple):
    """The cost of cuts between ranks, the most important part first."""

    more_runs: int
    kv_heads_on_several_ranks: int
    sum_of_squares: int
    kv_heads_sent: int

    def plus(self, other: _Cost) -> _Cost:
        return _Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def _cuts(nheads: int, group: int, degree: int) -> tuple[int, ...]:
    """Return the first q head of every rank, and the end, at the least cost.

    This is dynamic programming from the last rank back: `best` has, for each head at which the
    remaining ranks could start, their cost and their cuts.
    """
    longest = -(-nheads // degree)
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {nheads: (_Cost(0, 0, 0, 0), (nheads,))}
    for num_ranks in range(1, degree + 1):
        rest, best = best, {}
        earliest = max(0, nheads - num_ranks * longest)
        latest = min(nheads, (degree - num_ranks) * longest)
        for start in range(earliest, latest + 1):
            # Longer shares come first, and so are taken at equal cost.
            stops = range(min(start + longest, nheads), start - 1, -1)
            candidates = [
                (_cost(start, stop, group).plus(rest[stop][0]), (start, *rest[stop][1]))
                for stop in stops
                if stop in rest
            ]
            best[start] = min(candidates, key=lambda candidate: candidate[0])
    return best[0][1]


def _cost(start: int, stop: int, group: int) -> _Cost:
    """Return the cost of a rank with the q heads [start, stop)."""
    runs = _runs(start, stop, group)
    # A kv head that is cut counts once, on the first of its ranks.
    ends_in_a_group = stop % group != 0 and start <= stop // group * group
    return _Cost(
        more_runs=max(len(runs) - 1, 0),
        kv_heads_on_several_ranks=int(ends_in_a_group),
        sum_of_squares=(stop - start) ** 2,
        kv_heads_sent=sum(run.num_kv for run in runs),
    )


def _runs(start: int, stop: int, group: int) -> tuple[HeadRun, ...]:
    """Return the q heads [start, stop) as runs; a part of a group at either end is a run apart."""
    runs: list[HeadRun] = []
    first_kv, stop_kv = start // group, -(-stop // group)
    for kv in range(first_kv, stop_kv if stop > start else first_kv):
        first, last = max(start, kv * group), min(stop, (kv + 1) * group)
        size = last - first
        if runs and runs[-1].num == runs[-1].num_kv * size:
            before = runs.pop()
            runs.append(
                HeadRun(before.first, before.num + size, before.first_kv, before.num_kv + 1)
            )
        else:
            runs.append(HeadRun(first, size, kv, 1))
    return tuple(runs)
