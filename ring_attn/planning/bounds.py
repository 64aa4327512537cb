"""Calls of a candidate on the ranks that are walked, and lower bounds of the candidate's time."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ring_attn.backends.rates import Rate
from ring_attn.call import Call
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops
from ring_attn.core.tiles import Traveller
from ring_attn.core.work import totals
from ring_attn.machines.cluster import Cluster, compute_seconds, merged
from ring_attn.machines.time import sampled_ranks, simulate
from ring_attn.planning.choice import Candidate, Problem
from ring_attn.planning.devices import with_backend
from ring_attn.strategies.registry import code_of, program_of

# Up to MAX_WALKED ranks, and MAX_EXACT if they differ or the user asks for it, are all simulated.
# Of more, two nodes stand for all: within 0.2 % for every strategy at 32 and 64 H100.
MAX_WALKED, MAX_EXACT = 16, 256
# Ranks x steps of a window that a quick plan walks: a sample of 32 groups was 23 % too short.
MAX_QUICK = 1 << 13


def call_of(problem: Problem, candidate: Candidate) -> Call:
    """The candidate's call on rank 0."""
    scale = problem.spec.headdim**-0.5
    return Call(
        problem.spec, candidate.layouts, problem.mask, 0, candidate.strategy, scale,
        problem.backend, problem.same_bits,
    )  # fmt: skip


def rated_cluster(problem: Problem, candidate: Candidate) -> Cluster:
    """The cluster with the rates for the heads of one launch: few kv heads take other kernels."""
    core = core_of(call_of(problem, candidate))
    spec = code_of(core.strategy).launch_spec(core)
    cluster = with_backend(problem.cluster, problem.backend, spec)
    return cluster if problem.each == 1 else merged(cluster, problem.each)


def core_of(call: Call) -> Call:
    """The call without exchanges around its core, on the rank with most heads."""
    return code_of(call.strategy).core(call)


def walked_calls(problem: Problem, candidate: Candidate) -> list[Call]:
    """The candidate's calls on the ranks that a simulation walks: all, or those that stand for all.

    Ranks stand for others only among many, where all have equal shards of a mask that is causal or
    full. Where they differ, as between documents, all are walked up to MAX_EXACT; of more, the node
    of the busiest rank is walked too: without it, times of 64 ranks were up to 63 % too short.
    A quick plan walks the first member of each Ulysses group: all do the same.
    """
    call, count = call_of(problem, candidate), problem.world_size
    core, mask = core_of(call), problem.mask
    alike = len(mask.slices) == 1 and not mask.has_windows and core.layouts[0] == core.layouts[1]
    alike = alike and is_even(candidate)
    step = candidate.strategy.ulysses_degree if problem.quick else 1
    if alike and not problem.exact:
        walks_all = count <= MAX_WALKED
    else:
        few_steps = len(mask.slices) == 1 and count // step * candidate.steps <= MAX_QUICK
        walks_all = count <= MAX_EXACT or problem.each > 1 or (problem.quick and few_steps)
    if walks_all:
        return [replace(call, rank=rank) for rank in range(0, count, step)]
    busiest = () if alike else (candidate.busiest,)
    ranks = sampled_ranks(count, problem.cluster.node_size, *busiest)
    return [replace(call, rank=rank) for rank in ranks]


def is_even(candidate: Candidate) -> bool:
    """Tells whether all ranks hold equal shards, but for 1 %."""
    return all(max(x.shard_lens) <= 1.01 * min(x.shard_lens) for x in candidate.layouts)


def least_seconds(
    problem: Problem, candidate: Candidate, core: Call
) -> tuple[tuple[float, float], int]:
    """Seconds of compute forward and backward on the core's busiest rank; and this rank."""
    spec, code, layouts = problem.spec, code_of(core.strategy), core.layouts
    device = rated_cluster(problem, candidate).device
    heads = -(-spec.nheads // candidate.strategy.ulysses_degree) / spec.nheads
    at_queries = code.share_at_queries(core)

    def busiest(backward: bool) -> tuple[float, int]:
        rate = device.rate(backward=backward, window=problem.mask.has_windows)
        per_pair = flops(1, spec, backward=backward) * heads
        share = at_queries if backward else 1.0
        return _busiest(layouts, problem.mask, rate, per_pair, backward, code.at_once, share)

    seconds, rank = busiest(False)
    return (seconds, busiest(True)[0] if problem.backward else 0.0), rank


@lru_cache(maxsize=256)
def _busiest(
    layouts: Layouts,
    mask: Mask,
    rate: Rate,
    per_pair: float,
    backward: bool,
    at_once: bool,
    at_queries: float,
) -> tuple[float, int]:
    """Seconds of one direction, and the rank; `at_once`: one launch covers all ranks' shards."""

    def seconds(others: Traveller) -> Tensor:
        all_pairs = totals(*layouts, mask)
        area, edge, rows, cols = (table.double() for table in all_pairs.work[others])
        touched = (rows + cols) / 2 if backward else rows
        one_launch = compute_seconds(rate, area, touched, edge, per_pair)
        if at_once:
            return one_launch
        return one_launch + rate.launch * (all_pairs.num_seen[others] - 1).clamp(min=0)

    each = seconds("kv")
    if at_queries != 1.0:
        each = at_queries * each + (1 - at_queries) * seconds("q")
    return float(each.max()), int(each.argmax())


def alone(problem: Problem, candidate: Candidate, *, backward: bool) -> float:
    """Seconds of the busiest walked rank, whose peers are never late.

    Without the slowdown of compute by transfers, no time falls when an exchange is later.
    """
    calls = walked_calls(problem, candidate)
    call = next((call for call in calls if call.rank == candidate.busiest), calls[-1])
    cluster = replace(rated_cluster(problem, candidate), slowdown=0.0)
    return simulate([program_of(call, backward=backward)], call, cluster).seconds
