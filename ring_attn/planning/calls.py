"""The call of a candidate, and the cluster that runs it."""

from __future__ import annotations

from ring_attn.call import Call, Options
from ring_attn.machines.cluster import Cluster, merged
from ring_attn.planning.choice import Candidate, Problem
from ring_attn.planning.devices import with_backend
from ring_attn.strategies.registry import code_of


def call_of(problem: Problem, candidate: Candidate) -> Call:
    """Return the candidate's call on rank 0."""
    options = Options(
        softcap=problem.spec.softcap,
        differentiated=True,
        strategy=candidate.strategy,
        backend=problem.backend,
        same_bits=problem.same_bits,
    )
    return Call(
        options=options,
        spec=problem.spec,
        backend=problem.backend,
        layouts=candidate.layouts,
        mask=problem.mask,
        rank=0,
        strategy=candidate.strategy,
        # Few ranks that stand for many would choose otherwise.
        sends_together=candidate.sends_together,
    )


def core_of(call: Call) -> Call:
    """Return the call without exchanges around its core, on the rank with most heads."""
    return code_of(call.strategy).core(call)


def rated_cluster(problem: Problem, candidate: Candidate) -> Cluster:
    """Return the cluster with the rates for one launch.

    Launches with few kv heads and rows take other kernels.
    """
    core = core_of(call_of(problem, candidate))
    spec = code_of(core.strategy).launch_spec(core)
    cluster = with_backend(problem.cluster, problem.backend, spec, candidate.kv_rows)
    return cluster if problem.each == 1 else merged(cluster, problem.each)
