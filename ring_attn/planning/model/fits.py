"""What fits: options that fit a length, the longest sequence, the fewest ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

from ring_attn.planning.model.attention import AttentionPlan, plan_attention
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.job import LOSSES, RECOMPUTE, Job, Loss, Recompute
from ring_attn.planning.model.memory import Memory, memory_of
from ring_attn.planning.model.step import Step, step_of

# The most ranks and the longest sequence that are tried.
MAX_RANKS, MAX_SEQLEN = 4096, 1 << 31
# Strategies with the smallest buffers: of one shard, or of the rows that a window needs.
THRIFTY = ("ring", "exchange")
# Times that a length is corrected by the plan of its attention.
CORRECTIONS = 3


@dataclass(frozen=True)
class ModelPlan:
    """A job with its memory and time.

    Attributes:
        job: the job, with the options that were chosen.
        attention: strategy, layout, time and buffers of attention.
        memory: memory of the rank that holds most.
        step: time of a step.
    """

    job: Job
    attention: AttentionPlan
    memory: Memory
    step: Step

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.memory_bytes


def plan_job(job: Job, attention: AttentionPlan | None = None) -> ModelPlan:
    """Return the memory and the time of a job."""
    attention = plan_attention(job) if attention is None else attention
    memory = memory_of(job, attention.buffer_bytes(job), attention.communicator_bytes)
    return ModelPlan(job, attention, memory, step_of(job, attention))


@dataclass(frozen=True)
class Options:
    """What is recomputed, and how the loss is computed; None is the fastest that fits."""

    recompute: Recompute | None = None
    loss: Loss | None = None

    def all(self) -> list[tuple[Recompute, Loss]]:
        """Return all pairs of options: fast ones first, those with least memory last."""
        recomputes = RECOMPUTE if self.recompute is None else (self.recompute,)
        losses = LOSSES if self.loss is None else (self.loss,)
        return [(recompute, loss) for recompute in recomputes for loss in losses]

    def least(self, job: Job) -> Job:
        """Return the job with the options that need least memory."""
        recompute, loss = self.all()[-1]
        return replace(job, recompute=recompute, loss=loss)


def plan_options(job: Job, options: Options) -> ModelPlan:
    """Return the plan of the fastest options that fit; of those with least memory if none do."""
    plans = _plans(job, options)
    if not any(plan.fits for plan in plans):
        plans = _plans(thrifty(job), options)
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.step.seconds)
    return min(plans, key=lambda plan: plan.memory.total)


def _plans(job: Job, options: Options) -> list[ModelPlan]:
    attention = plan_attention(job)
    return [
        plan_job(replace(job, recompute=recompute, loss=loss), attention)
        for recompute, loss in options.all()
    ]


def thrifty(job: Job) -> Job:
    """Return the job with strategies that hold little memory, unless strategies were requested."""
    return replace(job, explained={"strategies": THRIFTY, **job.explained})


def longest(job: Job, options: Options) -> ModelPlan | None:
    """Return the plan of the longest sequence that fits; None if not even a short one does."""
    found = [_longest(options.least(one)) for one in (job, thrifty(job))]
    plans = [plan for plan in found if plan is not None]
    return max(plans, key=lambda plan: plan.job.seqlen, default=None)


def _longest(job: Job) -> ModelPlan | None:
    """Return the plan of the longest sequence that fits by the job's strategies."""
    unit = unit_of(job.degrees)
    scale, fixed = 0.0, 0.0  # bytes of attention's buffers for each row, and of its communicators
    for _ in range(CORRECTIONS):
        seqlen = _most(job, unit, scale, fixed)
        if seqlen == 0:
            return None
        plan = plan_job(with_length(job, seqlen))
        if plan.fits:
            return plan
        scale = plan.attention.buffer_bytes(plan.job) / plan.job.rows
        fixed = plan.attention.communicator_bytes
    return None


def unit_of(degrees: Degrees) -> int:
    """Return the number of rows of which lengths are multiples: every rank has two equal parts."""
    parts = 2 * degrees.cp * degrees.tp
    return parts * 1024 // gcd(parts, 1024)


def with_length(job: Job, seqlen: int) -> Job:
    """Return the job with one document of another length."""
    return replace(job, seqlen=seqlen, documents=None)


def _most(job: Job, unit: int, scale: float, fixed: float) -> int:
    """Return the longest multiple of `unit` whose memory fits, for buffers of so many bytes."""

    def fits(count: int) -> bool:
        longer = with_length(job, count * unit)
        return memory_of(longer, scale * longer.rows, fixed).total <= job.memory_bytes

    return unit * last_that_holds(fits, MAX_SEQLEN // unit)


def last_that_holds(is_right: Callable[[int], bool], most: int) -> int:
    """Return the greatest number up to `most` for which a condition holds, which holds below it."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_right(middle) else (low, middle)
    return low


def fewest(job: Job, options: Options, degrees: Callable[[int], Degrees]) -> ModelPlan | None:
    """Return the plan of the fewest ranks on which a length fits, from the job's ranks on.

    Their number is doubled until the job fits. `degrees` returns the degrees of a number of ranks.
    """
    world_size = job.degrees.world_size
    while world_size <= MAX_RANKS:
        larger = replace(job, degrees=degrees(world_size))
        # Without attention's buffers, which take longest to count.
        least = memory_of(options.least(larger), 0.0, 0.0)
        if least.total <= job.memory_bytes:
            plan = plan_options(larger, options)
            if plan.fits:
                return plan
        world_size *= 2
    return None
