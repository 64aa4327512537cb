"""Answers of `ring-attn plan --model`: a plan of a length, the longest, or the fewest ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

from ring_attn.cli.arguments import command_line, narrow, write_json
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.choice import format_bytes
from ring_attn.planning.model.degrees import Degrees
from ring_attn.planning.model.search import AttentionT, JobT, Plan, Planner, StepT, unit_of


def memory_of_rank(args: argparse.Namespace, cluster: Cluster) -> float:
    """Return the memory of a rank in bytes; infinity if it is not known.

    Raises:
        ValueError: it is not known, and a search needs it.
    """
    memory = args.memory_bytes or cluster.device.memory_bytes or float("inf")
    if memory == float("inf") and (args.fits or args.target is not None):
        raise ValueError(
            f"--memory is needed: the memory of {cluster.device.name} is not known, so everything "
            "fits"
        )
    return float(memory)


class Report(Protocol[JobT, AttentionT, StepT]):
    """The texts about plans of one kind; the modules `report` have them."""

    UNIT: str

    def text_of(self, plan: Plan[JobT, AttentionT, StepT], *, verbose: bool = False) -> str: ...

    def to_dict(self, plan: Plan[JobT, AttentionT, StepT]) -> dict[str, object]: ...

    def nothing_fits(
        self,
        plan: Plan[JobT, AttentionT, StepT],
        longest: Plan[JobT, AttentionT, StepT] | None,
        fewest: Plan[JobT, AttentionT, StepT] | None,
        other: Plan[JobT, AttentionT, StepT] | None = None,
    ) -> str: ...

    def no_ranks_fit(self, job: JobT) -> str: ...


@dataclass(frozen=True)
class Search(Generic[JobT, AttentionT, StepT]):
    """A search for a plan by the options of the command.

    Attributes:
        args: the options.
        job: the job that they describe; with --target, on the fewest ranks that they allow.
        planner: with the options of a job that are given.
        free_planner: without them.
        degrees: returns the degrees of the options on a number of ranks.
        report: the texts about plans.
        has_other_lengths: whether the job can be planned for another length.
    """

    args: argparse.Namespace
    job: JobT
    planner: Planner[JobT, AttentionT, StepT]
    free_planner: Planner[JobT, AttentionT, StepT]
    degrees: Callable[[int], Degrees]
    report: Report[JobT, AttentionT, StepT]
    has_other_lengths: bool = True

    def run(self) -> Plan[JobT, AttentionT, StepT] | None:
        """Find the plan, print it and the answer, and write --json; return the plan if it fits."""
        args = self.args
        found, answer = self._found()
        fits = found is not None and found.fits
        if not args.quiet and found is not None and fits:
            print(self.report.text_of(found, verbose=args.verbose))
            print()
        print("\n".join(narrow(line) for line in answer.splitlines()))
        plan = {} if found is None else self.report.to_dict(found)
        write_json(args.json, {"command": command_line(), **plan, "fits": fits, "answer": answer})
        return found if fits else None

    def _found(self) -> tuple[Plan[JobT, AttentionT, StepT] | None, str]:
        """Return the plan, and the answer in words."""
        if self.args.fits:
            return self._longest()
        if self.args.target is not None:
            return self._fewest()
        return self._of_length()

    def _of_length(self) -> tuple[Plan[JobT, AttentionT, StepT], str]:
        """Return the plan of a length, and in words whether it fits."""
        plan = self.planner.fastest(self.job)
        if not plan.fits:
            return plan, self._what_would_fit(plan)
        limit, total = self.job.memory_bytes, plan.memory.total
        if limit == float("inf"):
            return plan, f"a rank takes {format_bytes(round(total))}"
        text = f"fits in {100 * total / limit:.0f} % of the memory"
        if self.args.quick or not self.has_other_lengths:
            return plan, text
        longest = self.planner.longest(self.job)
        if longest is None:
            return plan, text
        return plan, f"{text}; up to {longest.job.seqlen:,} {self.report.UNIT} would"

    def _what_would_fit(self, plan: Plan[JobT, AttentionT, StepT]) -> str:
        """Return in three lines what would fit instead of a plan that does not."""
        job, report = plan.job, self.report
        if not self.has_other_lengths:
            shortfall, *_ = report.nothing_fits(plan, None, None).splitlines()
            return shortfall
        longest = self.planner.longest(job)
        if self.planner != self.free_planner:
            other = self.free_planner.fastest(job)
            if other.fits:
                return report.nothing_fits(plan, longest, None, other)
        return report.nothing_fits(plan, longest, self.planner.fewest(job, self.degrees))

    def _longest(self) -> tuple[Plan[JobT, AttentionT, StepT], str]:
        """Return the plan of the longest sequence, and its length in words."""
        job, planner = self.job, self.planner
        plan = planner.longest(job)
        if plan is None:
            least = planner.fastest(planner.with_rows(job, unit_of(job.degrees)))
            return least, self._what_would_fit(least)
        where = f"{job.degrees.world_size} x {job.cluster.device.name}"
        length = f"{plan.job.seqlen:,} {self.report.UNIT}"
        return plan, f"the longest sequence that fits on {where}: {length}"

    def _fewest(self) -> tuple[Plan[JobT, AttentionT, StepT] | None, str]:
        """Return the plan of the fewest ranks for a length, and their number in words."""
        job = self.job
        plan = self.planner.fewest(job, self.degrees)
        if plan is None:
            return None, self.report.no_ranks_fit(job)
        degrees = plan.job.degrees
        is_least = degrees.world_size == job.degrees.world_size
        why = "the degrees allow no fewer" if is_least else "half as many do not fit"
        where = f"{degrees.world_size} x {job.cluster.device.name} ({degrees})"
        return plan, f"{job.seqlen:,} {self.report.UNIT} need {where}; {why}"
