"""Choose the strategy and layout of a call: simulate all candidates that may win.

    layouts x strategies x degrees      candidates, in a fixed order
      -> refused                        with the reason: heads, layout, memory, same_bits
      -> bounded                        by the compute of the busiest rank, then by the time of this
                                        rank among peers for which it never waits, first forward
      -> simulated                      unless the bound is longer than the best so far: forward and
                                        backward on the cluster, `machines.time`
      -> the best                       the first in order within 2.5 % of the fastest

The result depends on the arguments alone. Calls choose through `ring_attn.planning.agreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Literal, get_args

import torch
from torch import Tensor

from ring_attn.backends import Purpose, backend_elsewhere, choose_backend, get_backend
from ring_attn.checks import attention as checks
from ring_attn.core.copies import local_mask
from ring_attn.core.dtypes import DTYPES
from ring_attn.core.host import on_host, without_garbage_collection
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import NAMES, Strategy, resolve_strategy
from ring_attn.core.tiles import check_fit
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.calls import call_of
from ring_attn.planning.candidates import candidates_of, layouts_of, strategies_of
from ring_attn.planning.choice import (
    TIE,
    Candidate,
    Choice,
    Prediction,
    Problem,
    describe,
    format_bytes,
    format_seconds,
)
from ring_attn.planning.devices import DEVICES, builtin_cluster, find_cluster, with_backend
from ring_attn.planning.replicated import replicated_costs
from ring_attn.planning.scale import MAX_EXACT, estimates_of
from ring_attn.strategies.registry import code_of, why_not_same_bits
from ring_attn.values import checks as values

# Candidates to simulate: as few as the choice needs; these and one of each name of
# `strategy.NAMES`, the one with the lowest bound; or all.
Effort = Literal["best", "names", "all"]

# Most ranks x steps to simulate for one choice: two rings of 4096 ranks. Further candidates are
# listed as not simulated.
MAX_RANK_STEPS = 1 << 25

# Of more ranks, few stand for many in every plan (`planning.scale`), not in quick ones alone.
MANY = 1024

# Peaks of a quick plan above this share of the memory are counted on the call's own ranks.
NEARLY = 0.9

# -- the public function


@on_host()
def explain(
    *,
    seqlen: int,
    world_size: int,
    nheads: int,
    headdim: int,
    nheads_kv: int | None = None,
    headdim_v: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seqlen_k: int | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    layout: str | SequenceLayout | JointLayout | Layouts = "auto",
    strategies: Sequence[str | Strategy] | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
    backward: bool = True,
    cluster: Cluster | str | None = None,
    device_type: str | None = None,
    memory_bytes: float | None = None,
    effort: Effort = "names",
    exact: bool = False,
    recurrent: int = 0,
    replicated: int = 0,
) -> Choice:
    """Return the best strategy for a call, the reason, and the costs of all others.

    Nothing is communicated.

    Every strategy with every degree is bounded by the compute of its busiest rank, and simulated
    (`machines.time`) unless the bound rules it out. `strategy="auto"` chooses in the same way, for
    the layout of the call.

    Args:
        seqlen: global length of the queries.
        world_size: number of ranks.
        nheads: number of q heads.
        headdim: size of a head of q and k.
        nheads_kv: number of kv heads; None is `nheads`.
        headdim_v: size of a head of v; None is `headdim`.
        batch: number of sequences.
        dtype: dtype of q, k and v.
        seqlen_k: global length of the keys; None is `seqlen`.
        causal, window_size, softcap: as for `ring_attention`.
        cu_seqlens, cu_seqlens_k: as for `ring_attention`; sequences of ints are accepted too.
        layout: "auto" tries "contiguous", "zigzag", "striped" and boundaries that balance the work;
            one of these names; or a `SequenceLayout`, or a pair for queries and keys; or a
            `JointLayout` for both.
        strategies: names or values to choose among; None is all.
        backend: "auto", or a name.
        same_bits: as for `ring_attention`: True refuses strategies without it.
        backward: whether to include the backward.
        cluster: description of the ranks, or the name of a built-in device, such as "h100"; None
            reads the file RING_ATTN_CLUSTER, written by
            `ring-attn calibrate`, or takes the built-in one for this machine's device.
        device_type: "cuda" or "cpu"; None is the cluster's.
        memory_bytes: memory of a rank for its inputs and the call; None is the device's memory.
        effort: "best" simulates as few as the choice needs, as `strategy="auto"` does, with few
            ranks for hundreds; "names" also one of each name, for the table, and "all" all.
        exact: whether to simulate every rank, up to 256; else some of many equal ranks stand for
            all.
        recurrent: bytes of a sequence's decay and state in a recurrent layer of the model, whose
            traffic the table shows too.
        replicated: number of positions that every rank holds, such as text; they are the first of
            `seqlen`. Layouts of the result are those of their owners (`JointLayout.owners`). The
            table shows the time of their exchange in a line of its own, and peaks include its
            memory. If every rank holds all rows, no key is sent, whatever the strategy is: the plan
            has a ring without hops, over each rank's queries and its own copy of the keys.

    Returns:
        A choice with `strategy` and `layout` to call with, `reason`, and `candidates` with seconds
        and bytes. `str(choice)` is a table, `choice.to_dict()` is for JSON.

    Raises:
        ValueError: sizes, mask or names do not fit, no candidate can run, or there is no
            description of this device.
        TypeError: arguments have other types.
        OSError: the file RING_ATTN_CLUSTER cannot be read.

    Example:
        >>> from ring_attn.planning.devices import builtin_cluster
        >>> choice = explain(
        ...     seqlen=1 << 20, world_size=8, nheads=32, nheads_kv=8, headdim=128, causal=True,
        ...     cluster=builtin_cluster("H100"),
        ... )
        >>> choice.best.name in ("ring", "all_gather", "ulysses", "hybrid")
        True
    """
    # Longer than a screen: it names each option where it is declared, checked and handed on.
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    nheads_kv = nheads if nheads_kv is None else nheads_kv
    headdim_v = headdim if headdim_v is None else headdim_v
    counts = {
        "seqlen": seqlen,
        "world_size": world_size,
        "batch": batch,
        "nheads": nheads,
        "nheads_kv": nheads_kv,
        "headdim": headdim,
        "headdim_v": headdim_v,
        "seqlen_k": seqlen_k,
    }
    for name, value in counts.items():
        values.check_int(name, value, least=1)
    if nheads % nheads_kv:
        raise ValueError(f"nheads must be a multiple of nheads_kv, got {nheads} and {nheads_kv}")
    values.check_one_of("effort", effort, get_args(Effort))
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
    checks.check_name("backend", backend)
    values.check_flag("backward", backward)
    values.check_flag("exact", exact)
    values.check_int("recurrent", recurrent, least=0)
    joint = _joint_layout(replicated, layout, seqlen, seqlen_k, world_size)
    if isinstance(layout, JointLayout):
        layout = layout.owners
    if device_type is not None:
        values.check_one_of("device_type", device_type, ("cpu", "cuda"))
    if memory_bytes is not None:
        values.check_number("memory_bytes", memory_bytes)
        if not memory_bytes > 0:
            raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    checks.check_softcap(softcap)
    checks.check_same_bits(same_bits)
    window = checks.check_window(window_size, causal)
    cu_q = checks.check_cu_seqlens("cu_seqlens", _tensor("cu_seqlens", cu_seqlens))
    cu_k = checks.check_cu_seqlens("cu_seqlens_k", _tensor("cu_seqlens_k", cu_seqlens_k))
    checks.check_documents(cu_q, cu_k)
    mask = Mask(seqlen, seqlen_k, causal, window, cu_q, cu_q if cu_k is None else cu_k)
    if joint is not None and joint.is_replicated:
        mask = local_mask(joint.owners, seqlen, mask)
    cluster = _cluster_of(cluster, device_type, world_size)
    if device_type is None:
        device_type = "cuda" if cluster.device.memory_bytes else "cpu"
    spec = AttentionSpec(
        device_type=device_type,
        dtype=dtype,
        batch=batch,
        nheads=nheads,
        nheads_kv=nheads_kv,
        headdim=headdim,
        headdim_v=headdim_v,
        softcap=softcap,
    )
    purpose = Purpose.of(mask, backward=backward, same_bits=same_bits)
    backend = _backend_for(spec, backend, purpose, cluster.device.architecture)
    problem = Problem(
        spec=spec,
        mask=mask,
        world_size=world_size,
        cluster=with_backend(cluster, backend, spec),
        backend=backend,
        same_bits=same_bits,
        backward=backward,
        memory_bytes=memory_of(cluster) if memory_bytes is None else float(memory_bytes),
        exact=exact,
        recurrent=recurrent,
        documents=tuple(sorted({0, seqlen, *(cu_q or ())})),
        replicated=() if joint is None else tuple(map(joint.num_owned, range(world_size))),
    )
    choice = choose(problem, layouts_of(problem, layout), strategies, effort=effort)
    return replace(choice, replicated=replicated_costs(problem, choice.best))


def _cluster_of(cluster: Cluster | str | None, device_type: str | None, world_size: int) -> Cluster:
    """Return a user's cluster, the built-in cluster of a device, or this machine's cluster."""
    if cluster is None:
        return find_cluster(device_type, world_size)
    if isinstance(cluster, str):
        values.check_one_of("cluster", cluster.upper(), [*DEVICES])
        return builtin_cluster(cluster.upper())
    values.check_type("cluster", cluster, Cluster, "a Cluster or the name of a device")
    return cluster


@without_garbage_collection()
@on_host()
def choose(
    problem: Problem,
    layouts: Mapping[str, Layouts],
    strategies: Sequence[str | Strategy] | None = None,
    *,
    effort: Effort = "best",
    peaks: bool = True,
) -> Choice:
    """Return the best of all candidates, which depends only on the arguments.

    Without `peaks`, memory is only counted where a rank's is limited: that takes most of the time.

    Raises:
        ValueError: a name is unknown, or no candidate can run (with all reasons).
    """
    few_stand_for_many = effort == "best" or problem.world_size > MANY
    problem = replace(problem, quick=few_stand_for_many and not problem.exact)
    requested = strategies_of(problem, strategies)
    every = candidates_of(problem, layouts, requested, are_requested=strategies is not None)
    candidates = _simulated(problem, [_bounded(problem, c) for c in every], effort)
    if peaks and problem.memory_bytes == float("inf"):
        candidates = [_with_memory(problem, c) if c.prediction else c for c in candidates]
    usable = [c for c in candidates if c.prediction is not None]
    if not usable:
        reasons = sorted({f"{c.full_name} ({c.layout_name}): {c.reason}" for c in candidates})
        raise ValueError(
            f"no strategy can run {describe(problem)}: "
            + "; ".join(reasons or ["none was requested"])
        )
    tied = (1.0 + TIE) * min(c.seconds for c in usable)

    def key(c: Candidate) -> tuple[float, float]:
        if c.prediction is None:
            return (2.0 + c.refused, c.at_least)
        return (0.0, 0.0) if c.seconds <= tied else (1.0, c.seconds)

    candidates.sort(key=key)
    return Choice(problem, candidates[0], tuple(candidates))


# -- refusals, bounds and memory


def _bounded(problem: Problem, candidate: Candidate) -> Candidate:
    """Add same_bits, order, direction and lower bound to a candidate, or refuse it."""
    strategy, code = candidate.strategy, code_of(candidate.strategy)
    try:
        resolve_strategy(strategy, problem.world_size)
        check_fit(*candidate.layouts, problem.mask)
        call = call_of(problem, candidate)
        code.check(call)
        why_not = why_not_same_bits(call)
        if problem.same_bits and why_not is not None:
            raise NotImplementedError(f"same_bits=True is not possible here: {why_not}")
        candidate = replace(candidate, kv_rows=code.decisive_rows(call))
        bounds = estimates_of(problem, candidate, of_compute=True).bounds()
        core = bounds.core
        core_code = code_of(core.strategy)
        plan = core_code.gradients(core)
        return replace(
            candidate,
            same_bits=why_not is None,
            sent_side=plan.sent_side if core.world_size > 1 else None,
            sends_together=core_code.sends_together(core),
            steps=core_code.num_steps(core),
            bounds=(bounds.forward, bounds.backward),
            busiest=bounds.busiest * strategy.ulysses_degree,
        )
    except (ValueError, NotImplementedError) as error:
        return replace(candidate, reason=str(error), refused=True)


def _with_memory(problem: Problem, candidate: Candidate) -> Candidate:
    """Add the peak memory; refuse the candidate if a rank has less."""
    inputs = _input_bytes(problem, candidate.layouts)
    estimates = estimates_of(problem, candidate)
    peak = estimates.peak()
    if estimates.is_extrapolated and sum(peak) + inputs > NEARLY * problem.memory_bytes:
        peak = estimates.own_peak()
    candidate = replace(candidate, peak_bytes=peak.call, communicator_bytes=peak.communicators)
    if sum(peak) + inputs <= problem.memory_bytes:
        return candidate
    nccl = f" and {format_bytes(peak.communicators)} of NCCL's" if peak.communicators else ""
    reason = (
        f"needs {format_bytes(peak.call)} besides {format_bytes(inputs)} of inputs{nccl}, a rank "
        f"has {format_bytes(int(problem.memory_bytes))}"
    )
    return replace(candidate, reason=reason, refused=True)


def _input_bytes(problem: Problem, layouts: Layouts) -> int:
    """Return the bytes of q, k and v, and of dout with a backward, on the rank with most rows."""
    spec = problem.spec
    dim_q = spec.headdim + (spec.headdim_v if problem.backward else 0)
    dim_kv = spec.headdim + spec.headdim_v
    owned = problem.replicated or (0,) * problem.world_size
    elements = []
    for own, rows, rows_kv in zip(owned, *(x.shard_lens for x in layouts), strict=True):
        of_others = sum(owned) - own
        rows += of_others
        rows_kv += 0 if problem.has_local_keys else of_others
        elements.append(rows * spec.nheads * dim_q + rows_kv * spec.nheads_kv * dim_kv)
    return max(elements) * spec.batch * spec.dtype.itemsize


# -- simulation


def _simulated(problem: Problem, bounded: list[Candidate], effort: Effort) -> list[Candidate]:
    """Add predictions to candidates that may win: the lowest bound is next."""
    candidates = dict(enumerate(bounded))
    waiting = [i for i, c in candidates.items() if not c.refused]

    def at_least(index: int) -> float:
        return candidates[index].at_least

    if problem.world_size > MAX_EXACT and any(candidates[i].is_even for i in waiting):
        for i in [i for i in waiting if not candidates[i].is_even]:
            reason = f"not simulated: beyond {MAX_EXACT} ranks only equal shards are"
            candidates[i] = replace(candidates[i], reason=reason)
            waiting.remove(i)

    # Candidates that are simulated whatever their bounds are.
    forced = set(waiting) if effort == "all" else set[int]()
    if effort == "names":
        for name in NAMES:
            of_name = [i for i in waiting if candidates[i].name == name]
            tied = (1.0 + TIE) * min(map(at_least, of_name), default=0.0)
            forced.update([i for i in of_name if at_least(i) <= tied][:1])
    best, left = float("inf"), MAX_RANK_STEPS
    # A rank that is walked by itself raises the bound of a candidate before all are.
    queue = [(at_least(i), i, i in forced) for i in waiting]
    heapify(queue)
    while queue:
        bound, index, is_last = heappop(queue)
        candidate, limit = candidates[index], (1.0 + TIE) * best
        rank_steps = candidate.steps * problem.world_size
        if bound >= limit and index not in forced:
            reason = f"takes at least {format_seconds(bound)}"
            candidate = replace(candidate, reason=reason, ruled_out=True)
        elif not is_last:
            candidate = _refined(problem, candidate, limit)
            if not candidate.refused:
                heappush(queue, (candidate.at_least, index, True))
        elif rank_steps > left:
            reason = f"not simulated: its {candidate.steps} steps are beyond what one choice takes"
            candidate = replace(candidate, reason=reason)
        else:
            left -= rank_steps
            found = _predicted(problem, candidate)
            if found.seconds < best and estimates_of(problem, candidate).is_rough:
                found = _predicted(replace(problem, quick=False), candidate)
            candidate, best = found, min(best, found.seconds)
        candidates[index] = candidate
    return list(candidates.values())


def _refined(problem: Problem, candidate: Candidate, limit: float) -> Candidate:
    """Raise the lower bounds to the times of one walked rank whose peers are never late.

    The backward keeps its bound if the two reach the limit without it.
    """
    estimates, bounds = estimates_of(problem, candidate), list(candidate.bounds)
    for backward in problem.directions:
        if sum(bounds) >= limit:
            break
        try:
            seconds = estimates.seconds_without_late_peers(backward=backward)
        except NotImplementedError as error:
            return replace(candidate, reason=str(error), refused=True)
        bounds[backward] = max(bounds[backward], seconds)
    return replace(candidate, bounds=(bounds[0], bounds[1]))


def _predicted(problem: Problem, candidate: Candidate) -> Candidate:
    """Add peak memory and prediction; refuse for lack of memory or of a program."""
    if problem.memory_bytes < float("inf"):
        candidate = _with_memory(problem, candidate)
    if candidate.refused:
        return candidate
    estimates = estimates_of(problem, candidate)
    try:
        forward = estimates.cost(backward=False)
        backward = estimates.cost(backward=True) if problem.backward else None
    except NotImplementedError as error:
        return replace(candidate, reason=str(error), refused=True)
    return replace(candidate, prediction=Prediction(forward, backward))


# -- defaults


def _joint_layout(
    replicated: int,
    layout: str | SequenceLayout | JointLayout | Layouts,
    seqlen: int,
    seqlen_k: int,
    world_size: int,
) -> JointLayout | None:
    """Return a layout with the replicated rows; None if no two ranks hold the same rows."""
    values.check_int("replicated", replicated, least=0)
    if replicated and not isinstance(layout, str):
        raise ValueError(
            f"replicated={replicated} needs the name of a layout, got {layout}: pass a JointLayout "
            "alone, or a name"
        )
    if replicated and (replicated > seqlen or seqlen_k != seqlen):
        raise ValueError(
            f"replicated={replicated} rows must be the first of seqlen={seqlen} queries and as "
            f"many keys, got seqlen_k={seqlen_k}"
        )
    if isinstance(layout, JointLayout):
        joint = layout
    else:
        rest = SequenceLayout.contiguous(seqlen - replicated, world_size)
        joint = JointLayout([replicated, rest])
    # A layout for other sizes is refused later, with those of its owners.
    fits = (joint.seqlen, joint.seqlen, joint.world_size) == (seqlen, seqlen_k, world_size)
    return joint if fits and joint.has_copies else None


def _backend_for(spec: AttentionSpec, backend: str, purpose: Purpose, there: str) -> str:
    """Return the name of the backend.

    For GPUs that this machine lacks, "auto" is the backend that it would choose there.
    """
    if spec.device_type == "cuda" and not torch.cuda.is_available():
        if backend != "auto":
            return get_backend(backend).name
        return backend_elsewhere(spec, purpose, there)
    return choose_backend(spec, backend, purpose).name


def memory_of(cluster: Cluster) -> float:
    """Return the bytes that a rank has; infinite if the device's memory is unknown."""
    return cluster.device.memory_bytes or float("inf")


def _tensor(name: str, numbers: Tensor | Sequence[int] | None) -> Tensor | None:
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    return torch.tensor(values.as_ints(name, numbers))
