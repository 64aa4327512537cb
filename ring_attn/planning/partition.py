"""Splits work into contiguous parts: the smallest possible maximum, and even or cheap cuts.

Work is in exact integers; `sums[i]` is the work before the i-th possible cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import TypeAlias

import torch
from torch import Tensor

from ring_attn.values import checks as values

# `cheapest_cuts` seeks each cut within this many parts' work of its position for equal parts. With
# 5 % imbalance that excludes nothing up to 160 ranks, and keeps the search short beyond.
MAX_DRIFT = 8

# `cheapest_cuts` counts distances from equal parts in units of 1 / UNITS of a part.
UNITS = 1024


def least_maximum(sums: list[int], parts: int) -> int:
    """The smallest possible maximum when all work is split into `parts` contiguous parts."""
    total = sums[-1]
    greatest_item = max(map(sub, sums[1:], sums), default=0)
    # Filling each part until it reaches the mean exceeds the mean by less than one item.
    low = max(greatest_item, -(-total // parts))
    high = -(-total // parts) + greatest_item
    while low < high:
        middle = (low + high) // 2
        if _suffice(sums, parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _suffice(sums: list[int], parts: int, limit: int) -> bool:
    """Tells whether `parts` parts of at most `limit` each hold all work."""
    cut, end = 0, len(sums) - 1
    for _ in range(parts):
        cut = bisect_right(sums, sums[cut] + limit, cut) - 1
        if cut == end:
            return True
    return False


def even_cuts(sums: list[int], positions: list[int], parts: int, limit: int) -> list[int]:
    """`parts + 1` of the positions, as near as possible to equal parts, with no part above `limit`.

    `sums` is the work before each position. A greedy walk would instead fill the first ranks to the
    limit and leave nothing for the last ones.
    """
    earliest = _earliest_cuts(sums, parts, limit)
    chosen = [0]
    for part in range(1, parts):
        done, left = chosen[-1], parts - part + 1
        low = max(earliest[part], done)
        high = bisect_right(sums, sums[done] + limit, low) - 1
        target = sums[done] + (sums[-1] - sums[done]) // left
        cut = bisect_left(sums, target, low, high)
        if cut > low and target - sums[cut - 1] < sums[cut] - target:
            cut -= 1
        # Rows without work take memory too: share them evenly.
        first = bisect_left(sums, sums[cut], low, high)
        last = bisect_right(sums, sums[cut], low, high + 1) - 1
        middle = positions[done] + (positions[-1] - positions[done]) // left
        chosen.append(bisect_left(positions, middle, first, last))
    return [positions[cut] for cut in [*chosen, len(sums) - 1]]


def _earliest_cuts(sums: list[int], parts: int, limit: int) -> list[int]:
    """For each cut, the first index at which the parts after the cut can hold the rest."""
    cuts = [len(sums) - 1]
    for _ in range(parts):
        cuts.append(bisect_left(sums, sums[cuts[-1]] - limit, 0, cuts[-1]))
    return cuts[::-1]


# Cost, distance from equal parts, index of the last cut, the way to the cut before.
_Way: TypeAlias = "tuple[int, int, int, _Way | None]"


def cheapest_cuts(sums: list[int], costs: list[int], limit: int, feasible: list[int]) -> list[int]:
    """Indices of the cheapest cuts with no part above `limit`; ties go to the most equal parts.

    `costs` are the rows that cross each possible cut; `feasible` are the indices of any cuts that
    keep to the limit.

    Dynamic programming: the best way to put cut r at x is the best way to put cut r - 1 at some
    y <= x with the work [y, x) within the limit, plus the cost of x. The range of such y only moves
    forward with x, so a monotonic queue keeps the best way in front.
    """
    parts, total = len(feasible) - 1, sums[-1]
    mean = total / parts
    earliest, latest = _earliest_cuts(sums, parts, limit), 0
    ways: list[_Way] = [(0, 0, 0, None)]
    for part in range(1, parts + 1):
        near = bisect_left(sums, (part - MAX_DRIFT) * total // parts)
        far = bisect_right(sums, (part + MAX_DRIFT) * total // parts) - 1
        # A cut before `earliest` overfills the parts after it; after `latest`, the parts before it.
        latest = bisect_right(sums, sums[latest] + limit, latest) - 1
        low = max(earliest[part], min(near, feasible[part]))
        high = min(latest, max(far, feasible[part]))
        queue: deque[_Way] = deque()
        waiting = deque(ways)
        reached: list[_Way] = []
        for x in range(low, high + 1):
            while waiting and waiting[0][2] <= x:
                while queue and queue[-1] > waiting[0]:
                    queue.pop()
                queue.append(waiting.popleft())
            while queue and sums[x] - sums[queue[0][2]] > limit:
                queue.popleft()
            if queue:
                cost, distance = queue[0][:2]
                distance += int(abs(sums[x] - part * mean) * UNITS / mean)
                reached.append((cost + costs[x], distance, x, queue[0]))
        ways = reached
    way: _Way | None = ways[0]
    chosen: list[int] = []
    while way is not None:
        chosen.append(way[2])
        way = way[3]
    return chosen[::-1]


# -- costs as exact integers


def exact_sums(costs: Tensor) -> list[int]:
    """The exact sums before each position of (n,) costs, in some unit; n + 1 of them.

    A float is an integer over a power of two: the greatest power here makes the unit.
    """
    if not costs.is_floating_point():
        return list(accumulate(costs.tolist(), initial=0))
    ratios = [cost.as_integer_ratio() for cost in costs.tolist()]
    unit = max((below for _, below in ratios), default=1)
    return list(accumulate((above * (unit // below) for above, below in ratios), initial=0))


def as_integers(name: str, integers: Tensor | Sequence[int]) -> Tensor:
    """(n,) int64 on the host."""
    if not isinstance(integers, Tensor):
        integers = torch.tensor(values.as_ints(name, integers), dtype=torch.int64, device="cpu")
    values.check_tensor(name, integers)
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{name} must be integers, got {integers.dtype}")
    if integers.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(integers.shape)}")
    return integers.to("cpu", torch.int64)


def as_costs(name: str, cost: Tensor | Sequence[float]) -> Tensor:
    """(seqlen,) int64 or float64 on the host, finite and not negative."""
    if not isinstance(cost, Tensor):
        cost = values.as_tuple(name, cost)
        for value in cost:
            values.check_number(f"each of {name}", value)
        whole = all(isinstance(value, int) for value in cost)
        cost = torch.tensor(cost, dtype=torch.int64 if whole else torch.float64, device="cpu")
    values.check_tensor(name, cost)
    if cost.is_complex() or cost.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers, got {cost.dtype}")
    if cost.ndim != 1:
        raise ValueError(f"{name} must be 1-D, one for each token, got shape {tuple(cost.shape)}")
    cost = cost.detach().to("cpu", torch.float64 if cost.is_floating_point() else torch.int64)
    wrong = ~(cost.isfinite() & (cost >= 0))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} must be finite and not negative, got {cost[index].item()} at {index}"
        )
    return cost
