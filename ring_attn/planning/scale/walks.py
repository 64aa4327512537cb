"""The ranks of a problem that a simulation walks."""

from __future__ import annotations

from dataclasses import replace

from ring_attn.call import Call
from ring_attn.machines.time import sampled_ranks
from ring_attn.planning.calls import call_of, core_of
from ring_attn.planning.choice import Candidate, Problem

# Up to MAX_WALKED ranks, and MAX_EXACT if they differ or the user asks for it, are all simulated.
# Of more, two nodes stand for all: within 0.2 % for every strategy at 32 and 64 H100.
MAX_WALKED, MAX_EXACT = 16, 256
# Ranks x steps of a window that a quick plan walks: a sample of 32 groups was 23 % too short.
MAX_QUICK = 1 << 13


def walked_calls(problem: Problem, candidate: Candidate) -> list[Call]:
    """Return the candidate's calls on the ranks that a simulation walks: all, or a sample.

    A sample stands for all ranks only among many, where all have equal shards of a mask that is
    causal or full. Where they differ, as between documents, all are walked up to MAX_EXACT; of
    more, the node of the busiest rank is walked too: without it, times of 64 ranks were up to 63 %
    too short. A quick plan walks the first member of each Ulysses group: all do the same. Where
    every rank holds all rows, none waits for another: of many, the busiest is walked.
    """
    call, count = call_of(problem, candidate), problem.world_size
    if problem.has_local_keys and count > MAX_WALKED and not problem.exact:
        return [replace(call, rank=candidate.busiest)]
    core, mask = core_of(call), problem.mask
    are_equal = (
        len(mask.slices) == 1
        and not mask.has_windows
        and core.layouts[0] == core.layouts[1]
        and candidate.is_even
    )
    step = candidate.strategy.ulysses_degree if problem.quick else 1
    if are_equal and not problem.exact:
        walks_all = count <= MAX_WALKED
    else:
        few_steps = len(mask.slices) == 1 and count // step * candidate.steps <= MAX_QUICK
        walks_all = count <= MAX_EXACT or problem.each > 1 or (problem.quick and few_steps)
    if walks_all:
        return [replace(call, rank=rank) for rank in range(0, count, step)]
    busiest = () if are_equal else (candidate.busiest,)
    ranks = sampled_ranks(count, problem.cluster.node_size, *busiest)
    return [replace(call, rank=rank) for rank in ranks]
