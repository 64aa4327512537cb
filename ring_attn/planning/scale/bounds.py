"""Lower bounds of a candidate's time."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ring_attn.backends.rates import Rate
from ring_attn.call import Call
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops
from ring_attn.core.tiles import Side
from ring_attn.core.work import totals
from ring_attn.machines.cluster import compute_seconds
from ring_attn.machines.time import simulate
from ring_attn.planning.calls import rated_cluster
from ring_attn.planning.choice import Candidate, Problem
from ring_attn.planning.scale.walks import walked_calls
from ring_attn.strategies.registry import code_of, program_of


class LeastSeconds(NamedTuple):
    """Seconds of compute on the core's busiest rank, and this rank."""

    forward: float
    backward: float
    rank: int


def least_seconds(problem: Problem, candidate: Candidate, core: Call) -> LeastSeconds:
    """Return the seconds of compute of the busiest rank; no candidate is faster."""
    spec, code, layouts = problem.spec, code_of(core.strategy), core.layouts
    device = rated_cluster(problem, candidate).device
    heads = -(-spec.nheads // candidate.strategy.ulysses_degree) / spec.nheads
    at_queries = code.share_at_queries(core)

    def busiest(*, backward: bool) -> tuple[float, int]:
        rate = device.rate(backward=backward, window=problem.mask.has_windows)
        per_pair = flops(1, spec, backward=backward) * heads
        share = at_queries if backward else 1.0
        return _busiest(
            layouts,
            problem.mask,
            rate,
            per_pair,
            backward=backward,
            at_once=code.at_once,
            at_queries=share,
        )

    forward, rank = busiest(backward=False)
    backward = busiest(backward=True)[0] if problem.backward else 0.0
    return LeastSeconds(forward, backward, rank)


@lru_cache(maxsize=256)
def _busiest(
    layouts: Layouts,
    mask: Mask,
    rate: Rate,
    per_pair: float,
    *,
    backward: bool,
    at_once: bool,
    at_queries: float,
) -> tuple[float, int]:
    """Return the seconds of one direction, and the busiest rank.

    `at_once`: one launch covers all ranks' shards.
    """

    def seconds(others: Side) -> Tensor:
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


def seconds_without_late_peers(problem: Problem, candidate: Candidate, *, backward: bool) -> float:
    """Return the seconds of the busiest walked rank, whose peers are never late.

    Without the slowdown of compute by transfers, no time falls when an exchange is later.
    """
    calls = walked_calls(problem, candidate)
    call = next((call for call in calls if call.rank == candidate.busiest), calls[-1])
    cluster = replace(rated_cluster(problem, candidate), slowdown=0.0)
    return simulate([program_of(call, backward=backward)], call, cluster).seconds
