"""The planner of language models: what is recomputed, and how the loss is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ring_attn.planning.model.attention import AttentionPlan, plan_attention
from ring_attn.planning.model.job import LOSSES, RECOMPUTE, Job, Loss, Recompute
from ring_attn.planning.model.memory import Memory, memory_of
from ring_attn.planning.model.search import Plan, Planner
from ring_attn.planning.model.step import Step, step_of

ModelPlan: TypeAlias = Plan[Job, AttentionPlan, Step]


@dataclass(frozen=True)
class ModelPlanner(Planner[Job, AttentionPlan, Step]):
    """Plans training jobs of language models.

    Attributes:
        recompute, loss: the options that a user has fixed; None is the fastest that fits.
    """

    recompute: Recompute | None = None
    loss: Loss | None = None

    def attention(self, job: Job) -> AttentionPlan:
        return plan_attention(job)

    def memory(self, job: Job, attention_bytes: float, communicator_bytes: float) -> Memory:
        return memory_of(job, attention_bytes, communicator_bytes)

    def step(self, job: Job, attention: AttentionPlan) -> Step:
        return step_of(job, attention)

    def choices(self, job: Job) -> list[Job]:
        recomputes = RECOMPUTE if self.recompute is None else (self.recompute,)
        losses = LOSSES if self.loss is None else (self.loss,)
        return [
            replace(job, recompute=recompute, loss=loss)
            for recompute in recomputes
            for loss in losses
        ]

    def with_rows(self, job: Job, rows: int) -> Job:
        """Return the job with one document of another length."""
        return replace(job, seqlen=rows, documents=None)

    def rows_of_rank(self, job: Job) -> int:
        return job.rows


def plan_job(job: Job) -> ModelPlan:
    """Return the memory and the time of a job."""
    return ModelPlanner().plan(job)
