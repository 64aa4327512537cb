"""Plans of a job, and searches: options that fit, the longest sequence, the fewest ranks.

Language models and transformers of diffusers each have a `Planner`, which says what their jobs
have in memory and how long they take. The searches are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from math import gcd
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ring_attn.planning.choice import Choice
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.job import AnyJob
from ring_attn.planning.model.memory import Memory
from ring_attn.planning.model.step import AnyStep

# The most ranks and the longest sequence that are tried.
MAX_RANKS, MAX_SEQLEN = 4096, 1 << 31
# Strategies with the smallest buffers: of one shard, or of the rows that a window needs.
THRIFTY = ("ring", "exchange")
# Times that a length is corrected by the plan of its attention.
CORRECTIONS = 3


class SearchedJob(AnyJob, Protocol):
    """Fields that the searches read or replace."""

    # Every dataclass has this, and `dataclasses.replace` needs it. A field may have any type.
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def seqlen(self) -> int: ...
    @property
    def memory_bytes(self) -> float: ...
    @property
    def explained(self) -> Mapping[str, object]: ...


class CallsOfAttention(Protocol):
    """Calls of attention of one kind."""

    @property
    def choice(self) -> Choice: ...


JobT = TypeVar("JobT", bound=SearchedJob)
SentJobT = TypeVar("SentJobT", bound=SearchedJob, contravariant=True)


class PlannedAttention(Protocol[SentJobT]):
    """The attention of a job, as far as plans and their reports read it."""

    @property
    def layout(self) -> str: ...
    @property
    def kinds(self) -> Sequence[CallsOfAttention]: ...
    @property
    def communicator_bytes(self) -> float: ...

    def buffer_bytes(self, job: SentJobT, /) -> float: ...


AttentionT = TypeVar("AttentionT", bound=PlannedAttention[Any])  # of any kind of job
StepT = TypeVar("StepT", bound=AnyStep)


@dataclass(frozen=True)
class Plan(Generic[JobT, AttentionT, StepT]):
    """A job with its memory and time.

    Attributes:
        job: the job, with the options that were chosen.
        attention: strategy, layout, time and buffers of attention.
        memory: memory of the rank that holds most.
        step: time of a training step, or of a generation.
    """

    job: JobT
    attention: AttentionT
    memory: Memory
    step: StepT

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.memory_bytes


class Planner(ABC, Generic[JobT, AttentionT, StepT]):
    """Plans jobs of one kind, with the options that a user has fixed."""

    @abstractmethod
    def attention(self, job: JobT) -> AttentionT:
        """Return the attention of a job, which its options do not change."""

    @abstractmethod
    def memory(self, job: JobT, attention_bytes: float, communicator_bytes: float) -> Memory:
        """Return the memory of a rank."""

    @abstractmethod
    def step(self, job: JobT, attention: AttentionT) -> StepT:
        """Return the time of a step."""

    @abstractmethod
    def choices(self, job: JobT) -> list[JobT]:
        """Return the job with all possible options: fast ones first, the least memory last."""

    @abstractmethod
    def with_rows(self, job: JobT, rows: int) -> JobT:
        """Return the job with another number of the rows that ranks split."""

    @abstractmethod
    def rows_of_rank(self, job: JobT) -> int:
        """Return the rows of a rank, with which the buffers of attention grow."""

    def plan(self, job: JobT, attention: AttentionT | None = None) -> Plan[JobT, AttentionT, StepT]:
        """Return the memory and the time of a job."""
        attention = self.attention(job) if attention is None else attention
        memory = self.memory(job, attention.buffer_bytes(job), attention.communicator_bytes)
        return Plan(job, attention, memory, self.step(job, attention))

    def fastest(self, job: JobT) -> Plan[JobT, AttentionT, StepT]:
        """Return the plan of the fastest options that fit; of least memory if none do."""
        plans = self._plans(job)
        if not any(plan.fits for plan in plans):
            plans = self._plans(thrifty(job))
        fitting = [plan for plan in plans if plan.fits]
        if fitting:
            return min(fitting, key=lambda plan: plan.step.seconds)
        return min(plans, key=lambda plan: plan.memory.total)

    def _plans(self, job: JobT) -> list[Plan[JobT, AttentionT, StepT]]:
        attention = self.attention(job)
        return [self.plan(choice, attention) for choice in self.choices(job)]

    def longest(self, job: JobT) -> Plan[JobT, AttentionT, StepT] | None:
        """Return the plan of the longest sequence that fits; None if not even a short one does."""
        least = self.choices(job)[-1]
        found = [self._longest(one) for one in (least, thrifty(least))]
        plans = [plan for plan in found if plan is not None]
        return max(plans, key=lambda plan: plan.job.seqlen, default=None)

    def _longest(self, job: JobT) -> Plan[JobT, AttentionT, StepT] | None:
        """Return the plan of the longest sequence that fits by the job's strategies."""
        scale, fixed = 0.0, 0.0  # bytes of attention's buffers for each row, and of communicators
        for _ in range(CORRECTIONS):
            rows = self._most_rows(job, scale, fixed)
            if rows == 0:
                return None
            plan = self.plan(self.with_rows(job, rows))
            if plan.fits:
                return plan
            scale = plan.attention.buffer_bytes(plan.job) / self.rows_of_rank(plan.job)
            fixed = plan.attention.communicator_bytes
        return None

    def _most_rows(self, job: JobT, scale: float, fixed: float) -> int:
        """Return the most rows, in equal shards, whose memory fits for buffers of so many bytes."""
        unit = unit_of(job.degrees)

        def fits(count: int) -> bool:
            longer = self.with_rows(job, count * unit)
            buffers = scale * self.rows_of_rank(longer)
            return self.memory(longer, buffers, fixed).total <= job.memory_bytes

        return unit * last_that_holds(fits, MAX_SEQLEN // unit)

    def fewest(
        self, job: JobT, degrees: Callable[[int], Degrees]
    ) -> Plan[JobT, AttentionT, StepT] | None:
        """Return the plan of the fewest ranks on which a length fits, from the job's ranks on.

        Their number is doubled until the job fits. `degrees` returns the degrees of a number of
        ranks.
        """
        world_size = job.degrees.world_size
        while world_size <= MAX_RANKS:
            larger = replace(job, degrees=degrees(world_size))
            # Without attention's buffers, which take longest to count.
            least = self.memory(self.choices(larger)[-1], 0.0, 0.0)
            if least.total <= job.memory_bytes:
                plan = self.fastest(larger)
                if plan.fits:
                    return plan
            world_size *= 2
        return None


def thrifty(job: JobT) -> JobT:
    """Return the job with strategies that hold little memory, unless strategies were requested."""
    return replace(job, explained={"strategies": THRIFTY, **job.explained})


def unit_of(degrees: Degrees) -> int:
    """Return the number of rows of which lengths are multiples: every rank has two equal parts."""
    parts = 2 * degrees.cp * degrees.tp
    return parts * 1024 // gcd(parts, 1024)


def last_that_holds(is_right: Callable[[int], bool], most: int) -> int:
    """Return the greatest number up to `most` for which a condition holds, which holds below it."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_right(middle) else (low, middle)
    return low
