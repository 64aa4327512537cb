"""The planner of diffusion transformers: what is recomputed in training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ring_attn.planning.diffusion.attention import BlockAttentionPlan, plan_attention
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.memory import memory_of
from ring_attn.planning.diffusion.step import DiffusionStep, step_of
from ring_attn.planning.model.job import RECOMPUTE, Recompute
from ring_attn.planning.model.memory import Memory
from ring_attn.planning.model.search import Plan, Planner

DiffusionPlan: TypeAlias = Plan[DiffusionJob, BlockAttentionPlan, DiffusionStep]


@dataclass(frozen=True)
class DiffusionPlanner(Planner[DiffusionJob, BlockAttentionPlan, DiffusionStep]):
    """Plans the training or the inference of diffusion transformers.

    Attributes:
        recompute: the recomputation that a user has fixed; None is the fastest that fits.
    """

    recompute: Recompute | None = None

    def attention(self, job: DiffusionJob) -> BlockAttentionPlan:
        return plan_attention(job)

    def memory(
        self, job: DiffusionJob, attention_bytes: float, communicator_bytes: float
    ) -> Memory:
        return memory_of(job, attention_bytes, communicator_bytes)

    def step(self, job: DiffusionJob, attention: BlockAttentionPlan) -> DiffusionStep:
        return step_of(job, attention)

    def choices(self, job: DiffusionJob) -> list[DiffusionJob]:
        if not job.is_training:
            return [replace(job, recompute="none")]
        recomputes = RECOMPUTE if self.recompute is None else (self.recompute,)
        return [replace(job, recompute=recompute) for recompute in recomputes]

    def with_rows(self, job: DiffusionJob, rows: int) -> DiffusionJob:
        """Return the job with another number of rows of the video."""
        return replace(job, seqlen=job.text + rows)

    def rows_of_rank(self, job: DiffusionJob) -> int:
        return job.own_video


def plan_job(job: DiffusionJob) -> DiffusionPlan:
    """Return the memory and the time of a job."""
    return DiffusionPlanner().plan(job)
