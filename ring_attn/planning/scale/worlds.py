"""Few ranks that stand for many: `strategy="auto"` plans thousands of ranks within a second.

A long ring looks the same at every scale. If one rank stands for m neighbours,

    its rows       are theirs, and are sent over one link
    its device     has m times the FLOP/s; all costs by step and by row are m-fold
    its step       takes as long as m steps
    its node       has as many ranks as before

What happens once, such as the last step's gradients, takes m times too long. So the time is linear
in m, and two worlds, of FEW groups of ranks and of twice as many, give the time for m = 1: within
0.7 % of a simulation of all ranks (bench/results/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import ceil
from typing import NamedTuple

from ring_attn.core.layout import with_world_size
from ring_attn.core.work import needed_displacements
from ring_attn.planning.calls import call_of, core_of
from ring_attn.planning.choice import Candidate, DirectionCost, Problem
from ring_attn.strategies.registry import code_of, why_not_same_bits

# Groups of ranks in the smaller world; with a window, and its fewest steps.
FEW, FEW_OF_WINDOW, WINDOW_STEPS = 32, 16, 5


class World(NamedTuple):
    """A problem whose ranks each stand for `problem.each` ranks, and the candidate there."""

    problem: Problem
    candidate: Candidate


def worlds_of(
    problem: Problem, candidate: Candidate, *, of_compute: bool = False
) -> tuple[World, ...]:
    """Return the two worlds whose times give the candidate's time, the larger one first.

    Return only the candidate's own world if it has few ranks, or if its time is not linear in the
    ranks that one stands for. `of_compute`: only the time of compute is asked for.
    """
    strategy, mask = candidate.strategy, problem.mask
    own = World(problem, candidate)
    few = FEW
    if mask.has_windows and strategy.inner_degree == 1:
        few = _few_of_window(problem, candidate)
    few = strategy.inner_degree * ceil(few / strategy.inner_degree) * strategy.ulysses_degree
    if not problem.quick or problem.world_size < 3 * few or len(mask.slices) != 1:
        return (own,)
    larger = _smaller_world(problem, candidate, 2 * few)
    smaller = _smaller_world(problem, candidate, few)
    if larger is None or smaller is None:
        return (own,)
    if mask.has_windows:
        # Gathered rows do not grow with the window; nor do rounds of inner rings, unless all rows
        # travel: then the time is up to 10 % short (`Estimates.is_rough`).
        core = core_of(call_of(*smaller))
        gathers = code_of(core.strategy).num_steps(core) < core.world_size
        steps = len(needed_displacements(*core.layouts, mask))
        fewest = core.world_size if strategy.inner_degree > 1 else WINDOW_STEPS
        if steps < fewest or (gathers and not of_compute):
            return (own,)
    # Boundaries of other shards may be aligned where the call's are not.
    has_same_bits = {why_not_same_bits(call_of(*world)) is None for world in (own, larger, smaller)}
    return (own,) if len(has_same_bits) > 1 else (larger, smaller)


def _few_of_window(problem: Problem, candidate: Candidate) -> int:
    """Return the number of groups in the smaller world of a mask with a window.

    A ring makes as many hops as a window has shards, rounded up, each with a whole shard. So the
    rows that are sent in excess of the window depend on how shards divide it: 4.3 shards take 5
    hops, the same window of 32 smaller shards 32. Return the number, from FEW_OF_WINDOW on, of
    which this excess is nearest to the call's in both worlds. (If the excess is ignored, a ring
    that waits for bytes is predicted up to 3 % too short.)
    """
    first_keys = [s.lo for s in problem.mask.slices if s.lo is not None]
    has_equal_hops = candidate.layouts[1].kind == "contiguous" and first_keys
    if not has_equal_hops:
        return FEW_OF_WINDOW
    window = -min(first_keys) / problem.mask.seqlen_k

    def excess(num_groups: int) -> float:
        shards = window * num_groups
        return (ceil(shards) - shards) / num_groups

    of_call = excess(problem.world_size // candidate.strategy.ulysses_degree)

    def difference(few: int) -> float:
        return abs(excess(few) - of_call) + abs(excess(2 * few) - of_call)

    return min(range(FEW_OF_WINDOW, 2 * FEW_OF_WINDOW), key=difference)


def _smaller_world(problem: Problem, candidate: Candidate, count: int) -> World | None:
    """Return the problem over `count` ranks; None if its layouts have no name."""
    layouts = with_world_size(candidate.layouts, count)
    if layouts is None:
        return None
    each, degree = problem.world_size / count, candidate.strategy.ulysses_degree
    busiest = int(candidate.busiest // degree / each) * degree
    return World(
        problem=replace(problem, world_size=count, each=each),
        candidate=replace(candidate, layouts=layouts, world_size=count, busiest=busiest),
    )


def whole(worlds: Sequence[World], values: Sequence[float]) -> float:
    """Return the value at `each` = 1 of a linear one: seconds, and bytes of a rank."""
    if len(worlds) == 1:
        return values[0]
    (first, second), (each, more) = values, (world.problem.each for world in worlds)
    return max(first - (second - first) * (each - 1) / (more - each), 0.0)


def whole_count(worlds: Sequence[World], values: Sequence[int]) -> int:
    """Return the value at `each` = 1 of one that is linear in 1 / `each`: counts of messages."""
    if len(worlds) == 1:
        return values[0]
    first, second = values
    return second + round((first - second) * (2 * worlds[0].problem.each - 1))


def whole_cost(worlds: Sequence[World], costs: Sequence[DirectionCost]) -> DirectionCost:
    """Return the costs at `each` = 1 from those of one or two worlds."""
    names = [field.name for field in fields(DirectionCost)]
    values = {name: whole(worlds, [getattr(cost, name) for cost in costs]) for name in names}
    bytes_sent = round(values.pop("bytes_sent"))
    del values["messages"]
    messages = whole_count(worlds, [cost.messages for cost in costs])
    return DirectionCost(bytes_sent=bytes_sent, messages=messages, **values)
