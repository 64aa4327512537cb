"""Heads of each rank of a group when heads are exchanged for rows: pure data.

    8 q heads, 2 kv heads, 4 ranks          12 q heads, 4 kv heads, 2 ranks (groups of 3 heads)

    q    0 1 | 2 3 | 4 5 | 6 7              q    0 1 2   3 4 5 | 6 7 8   9 10 11
    kv    0  |  0  |  1  |  1               kv     0       1   |   2       3

Heads need not divide: 3 heads over 2 ranks are 2 + 1, and with more ranks than heads some ranks
have none. A rank gets the kv heads that its q heads use; a kv head may be sent to several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True)
class HeadRun:
    """Consecutive q heads and the consecutive kv heads they use, with equal groups."""

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

    There is one run if all kv heads have equal groups of q heads, up to three if groups are cut,
    none on a rank without heads. A kv head is in one run only.
    """

    runs: tuple[HeadRun, ...]

    @property
    def num(self) -> int:
        return sum(run.num for run in self.runs)

    @property
    def num_kv(self) -> int:
        return sum(run.num_kv for run in self.runs)


@lru_cache(maxsize=1024)
def share_heads(nheads: int, nheads_kv: int, degree: int) -> tuple[HeadShare, ...]:
    """The heads of each of `degree` ranks: every q head once, at most ceil(nheads / degree) a rank.

    Among such shares, picks the fewest runs beyond one a rank, then the fewest kv heads on several
    ranks, then the most equal sizes. So the q heads of one kv head stay together where that makes
    no rank's share larger.
    """
    group = nheads // nheads_kv
    # With more ranks than heads, the last ranks have none.
    cuts = _cuts(nheads, group, min(nheads, degree)) + (nheads,) * (degree - nheads)
    return tuple(HeadShare(_runs(a, b, group)) for a, b in pairwise(cuts))


def is_replicated(shares: tuple[HeadShare, ...], nheads_kv: int) -> bool:
    """Tells whether a kv head is on several ranks, so that its gradients must be summed."""
    return sum(share.num_kv for share in shares) > nheads_kv


# Runs beyond the first, kv heads on several ranks, sum of squared shares, kv heads sent.
_Cost = tuple[int, int, int, int]


def _cuts(nheads: int, group: int, degree: int) -> tuple[int, ...]:
    """First q head of every rank, and the end: the cheapest by `_cost`, from the last rank back."""
    longest = -(-nheads // degree)
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {nheads: ((0, 0, 0, 0), (nheads,))}
    for ranks_left in range(1, degree + 1):
        rest, best = best, {}
        most_before = (degree - ranks_left) * longest
        for start in range(max(0, nheads - ranks_left * longest), min(nheads, most_before) + 1):
            # Longer shares come first, and so win at equal cost.
            best[start] = min(
                (
                    (_sum(_cost(start, stop, group), rest[stop][0]), (start, *rest[stop][1]))
                    for stop in range(min(start + longest, nheads), start - 1, -1)
                    if stop in rest
                ),
                key=lambda candidate: candidate[0],
            )
    return best[0][1]


def _cost(start: int, stop: int, group: int) -> _Cost:
    runs = _runs(start, stop, group)
    # A kv head that is cut counts once, on the first of its ranks.
    cut = stop % group != 0 and start <= stop // group * group
    return max(len(runs) - 1, 0), int(cut), (stop - start) ** 2, sum(r.num_kv for r in runs)


def _sum(a: _Cost, b: _Cost) -> _Cost:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _runs(start: int, stop: int, group: int) -> tuple[HeadRun, ...]:
    """The q heads [start, stop) as runs; a partial group at either end is a separate run."""
    runs: list[HeadRun] = []
    for kv in range(start // group, -(-stop // group) if stop > start else 0):
        first, last = max(start, kv * group), min(stop, (kv + 1) * group)
        if runs and runs[-1].num == runs[-1].num_kv * (last - first):
            run = runs.pop()
            runs.append(HeadRun(run.first, last - run.first, run.first_kv, run.num_kv + 1))
        else:
            runs.append(HeadRun(first, last - first, kv, 1))
    return tuple(runs)
