"""Few ranks that stand for many: so `strategy="auto"` plans thousands of ranks within a second.

A long ring looks the same at every scale. If one rank stands for m neighbours,

    its rows       are theirs, and travel over one link
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
from typing import Any, NamedTuple, cast

from ring_attn.core.layout import LAYOUTS, Layouts, SequenceLayout
from ring_attn.core.work import needed_displacements
from ring_attn.planning.bounds import call_of, core_of
from ring_attn.planning.choice import Candidate, DirectionCost, Problem
from ring_attn.strategies.registry import code_of, why_not_same_bits

# Groups of ranks in the smaller world; with a window, and its fewest steps.
FEW, FEW_OF_WINDOW, WINDOW_STEPS = 32, 16, 5


class World(NamedTuple):
    """A problem whose ranks each stand for `problem.each` ranks, and the candidate there."""

    problem: Problem
    candidate: Candidate


def worlds(problem: Problem, candidate: Candidate, *, computes: bool = False) -> tuple[World, ...]:
    """The two worlds whose times give that of the candidate; its own world if it has few ranks.

    `computes`: worlds for the time of compute alone.
    """
    strategy, mask = candidate.strategy, problem.mask
    own = (World(problem, candidate),)
    few = FEW_OF_WINDOW if mask.has_windows and strategy.inner_degree == 1 else FEW
    few = strategy.inner_degree * ceil(few / strategy.inner_degree) * strategy.ulysses_degree
    if not problem.quick or problem.world_size < 3 * few or len(mask.slices) != 1:
        return own
    made = [_world(problem, candidate, count) for count in (2 * few, few)]
    if None in made:
        return own
    more, fewer = cast(list[World], made)
    if mask.has_windows:
        # Gathered rows do not grow with the window; nor do rounds of inner rings, unless all rows
        # travel: then the time is up to 10 % short (`is_rough`).
        core = core_of(call_of(*fewer))
        gathers = code_of(core.strategy).num_steps(core) < core.world_size
        steps = len(needed_displacements(*core.layouts, mask))
        fewest = core.world_size if strategy.inner_degree > 1 else WINDOW_STEPS
        if steps < fewest or (gathers and not computes):
            return own
    # Boundaries of other shards may be aligned where the call's are not.
    in_order = {why_not_same_bits(call_of(*world)) is None for world in (*own, more, fewer)}
    return own if len(in_order) > 1 else (more, fewer)


def is_rough(problem: Problem, candidate: Candidate) -> bool:
    """Whether two worlds tell that a candidate is far from the best, and no more."""
    rough = problem.mask.has_windows and candidate.strategy.inner_degree > 1
    return rough and len(worlds(problem, candidate)) > 1


def coarser(layouts: Layouts, count: int) -> Layouts | None:
    """The layouts of the same kinds over fewer ranks, if they have a name."""
    if not {layout.kind for layout in layouts} <= set(LAYOUTS):
        return None
    q, kv = (SequenceLayout.from_name(x.kind, x.seqlen, count) for x in layouts)
    return q, kv


def _world(problem: Problem, candidate: Candidate, count: int) -> World | None:
    layouts = coarser(candidate.layouts, count)
    if layouts is None:
        return None
    each, degree = problem.world_size / count, candidate.strategy.ulysses_degree
    busiest = int(candidate.busiest // degree / each) * degree
    return World(
        replace(problem, world_size=count, each=each),
        replace(candidate, layouts=layouts, world_size=count, busiest=busiest),
    )


def whole(found: Sequence[World], values: Sequence[float]) -> float:
    """The value at 1 of one that is linear in `each`: seconds, and bytes of a rank."""
    if len(found) == 1:
        return values[0]
    (first, second), (each, more) = values, (world.problem.each for world in found)
    return max(first - (second - first) * (each - 1) / (more - each), 0.0)


def whole_count(found: Sequence[World], values: Sequence[int]) -> int:
    """The value at 1 of one that is linear in 1 / `each`: counts of messages."""
    if len(found) == 1:
        return values[0]
    first, second = values
    return second + round((first - second) * (2 * found[0].problem.each - 1))


def whole_cost(found: Sequence[World], costs: Sequence[DirectionCost]) -> DirectionCost:
    names = [f.name for f in fields(DirectionCost)]
    values: dict[str, Any] = {
        name: whole(found, [getattr(cost, name) for cost in costs]) for name in names
    }
    values["bytes_sent"] = round(values["bytes_sent"])
    values["messages"] = whole_count(found, [cost.messages for cost in costs])
    return DirectionCost(**values)
