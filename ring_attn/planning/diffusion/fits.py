"""Recomputation that makes a length fit, the longest sequence, and the fewest ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ring_attn.planning.diffusion.attention import BlockAttentionPlan, plan_attention
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.memory import memory_of
from ring_attn.planning.diffusion.step import DiffusionStep, step_of
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.fits import (
    CORRECTIONS,
    MAX_RANKS,
    MAX_SEQLEN,
    THRIFTY,
    last_that_holds,
    unit_of,
)
from ring_attn.planning.model.job import RECOMPUTE, Recompute
from ring_attn.planning.model.memory import Memory


@dataclass(frozen=True)
class DiffusionPlan:
    """A job with its memory and time.

    Attributes:
        job: the job, with the recomputation that was chosen.
        attention: strategy, layout, time and buffers of attention.
        memory: memory of a rank.
        step: time of a training step, or of a generation.
    """

    job: DiffusionJob
    attention: BlockAttentionPlan
    memory: Memory
    step: DiffusionStep

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.memory_bytes


def plan_job(job: DiffusionJob, attention: BlockAttentionPlan | None = None) -> DiffusionPlan:
    """Return the memory and the time of a job."""
    attention = plan_attention(job) if attention is None else attention
    memory = memory_of(job, attention.buffer_bytes(job), attention.communicator_bytes)
    return DiffusionPlan(job, attention, memory, step_of(job, attention))


def _choices(job: DiffusionJob, recompute: Recompute | None) -> list[Recompute]:
    """Return what may be recomputed: the fastest first, that with least memory last."""
    if not job.is_training:
        return ["none"]
    return list(RECOMPUTE) if recompute is None else [recompute]


def plan_options(job: DiffusionJob, recompute: Recompute | None = None) -> DiffusionPlan:
    """Return the plan of the fastest recomputation that fits; of the least memory if none does."""
    plans = _plans(job, recompute)
    if not any(plan.fits for plan in plans):
        plans = _plans(thrifty(job), recompute)
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.step.seconds)
    return min(plans, key=lambda plan: plan.memory.total)


def _plans(job: DiffusionJob, recompute: Recompute | None) -> list[DiffusionPlan]:
    attention = plan_attention(job)
    return [
        plan_job(replace(job, recompute=choice), attention) for choice in _choices(job, recompute)
    ]


def thrifty(job: DiffusionJob) -> DiffusionJob:
    """Return the job with strategies that hold little memory, unless strategies were requested."""
    return replace(job, explained={"strategies": THRIFTY, **job.explained})


def longest(job: DiffusionJob, recompute: Recompute | None = None) -> DiffusionPlan | None:
    """Return the plan of the longest sequence that fits; None if not even a short one does."""
    least = replace(job, recompute=_choices(job, recompute)[-1])
    found = [_longest(one) for one in (least, thrifty(least))]
    plans = [plan for plan in found if plan is not None]
    return max(plans, key=lambda plan: plan.job.seqlen, default=None)


def _longest(job: DiffusionJob) -> DiffusionPlan | None:
    """Return the plan of the longest sequence that fits by the job's strategies."""
    scale, fixed = 0.0, 0.0  # bytes of attention's buffers for each row, and of its communicators
    for _ in range(CORRECTIONS):
        video = _most_video(job, scale, fixed)
        if video == 0:
            return None
        plan = plan_job(with_video(job, video))
        if plan.fits:
            return plan
        scale = plan.attention.buffer_bytes(plan.job) / plan.job.own_video
        fixed = plan.attention.communicator_bytes
    return None


def with_video(job: DiffusionJob, video: int) -> DiffusionJob:
    """Return the job with another number of rows of the video."""
    return replace(job, seqlen=job.text + video)


def _most_video(job: DiffusionJob, scale: float, fixed: float) -> int:
    """Return the most rows of video that fit, for buffers of so many bytes, in equal shards."""
    unit = unit_of(job.degrees)

    def fits(count: int) -> bool:
        longer = with_video(job, count * unit)
        return memory_of(longer, scale * longer.own_video, fixed).total <= job.memory_bytes

    return unit * last_that_holds(fits, MAX_SEQLEN // unit)


def fewest(
    job: DiffusionJob,
    degrees: Callable[[int], Degrees],
    recompute: Recompute | None = None,
) -> DiffusionPlan | None:
    """Return the plan of the fewest ranks on which a length fits, from the job's ranks on.

    Their number is doubled until the job fits. `degrees` returns the degrees of a number of ranks.
    """
    world_size = job.degrees.world_size
    while world_size <= MAX_RANKS:
        larger = replace(job, degrees=degrees(world_size))
        # Without attention's buffers, which take longest to count.
        least = replace(larger, recompute=_choices(job, recompute)[-1])
        if memory_of(least, 0.0, 0.0).total <= job.memory_bytes:
            plan = plan_options(larger, recompute)
            if plan.fits:
                return plan
        world_size *= 2
    return None
