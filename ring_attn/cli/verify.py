"""`ring-attn verify`: compare ring attention on this machine with dense attention in float64."""

from __future__ import annotations

import argparse
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NotRequired, TypedDict

import torch.distributed as dist

from ring_attn.api import select_backend
from ring_attn.cli.arguments import progress, write_json
from ring_attn.cli.env import Machine, machine
from ring_attn.cli.options import VERIFIED_WORLD_SIZE
from ring_attn.cli.progress import leave_to_ranks, lines_of_rank
from ring_attn.core.dtypes import BY_NAME
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import resolve_strategy
from ring_attn.strategies.registry import make_call
from ring_attn.testing import (
    LAYOUTS,
    STRATEGIES,
    Case,
    RankResult,
    Verdict,
    cases,
    put_together,
    run_rank,
    usable_backends,
)
from ring_attn.testing.cases import backend_reasons, sample
from ring_attn.testing.launch import (
    check_memory,
    checked_device,
    rank_device,
    run_ranks,
    under_torchrun,
)
from ring_attn.values.checks import check_one_of
from ring_attn.values.outside import env_int

# Cases of a sample: with 120, each strategy meets every layout and mask.
SAMPLE, QUICK = 150, 40


@dataclass(frozen=True)
class CaseResult:
    """The verdicts on a case, or the reason for having none.

    `in_step` is False if ranks failed in different ways, so that no further case can run.
    """

    case: Case
    verdicts: tuple[Verdict, ...] = ()
    refused: str | None = None
    error: str | None = None
    in_step: bool = True

    @property
    def status(self) -> str:
        """ "passed", "failed" or "refused"."""
        if self.refused is not None:
            return "refused"
        is_right = self.error is None and bool(self.verdicts) and all(v.ok for v in self.verdicts)
        return "passed" if is_right else "failed"


# A rank's result of a case, the reason for refusing it (a text), or an error with its traceback.
_Attempt = RankResult | str | RuntimeError


class ResultFigures(TypedDict):
    """The error of a result, and its bound."""

    error: float
    bound: float
    ok: bool


class Sampled(TypedDict):
    """The number of cases in the whole table, and the predicted seconds to run them."""

    cases: int
    s: float


class Report(TypedDict):
    """The JSON of `--json`. `seed` and `all` are there if a sample ran.

    `refusals` has the number of cases in the table that cannot run, by the reason.
    """

    command: str
    machine: Machine
    world_size: int
    device: str
    seconds: float
    summary: dict[str, int]
    cases: list[dict[str, object]]
    refusals: NotRequired[dict[str, int]]
    seed: NotRequired[int]
    all: NotRequired[Sampled]


def run_case(case: Case) -> CaseResult:
    """Run a case on all ranks of the default group; return the same result on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = _attempt(case)
    if rank == 0:
        # `gather_object` replaces every element.
        attempts = [attempt] * world_size
        dist.gather_object(attempt, attempts)
        shared = [_judge(case, attempts)]
    else:
        dist.gather_object(attempt)
        shared = [CaseResult(case)]  # replaced by rank 0's
    dist.broadcast_object_list(shared)
    return shared[0]


def run_cases(wanted: Sequence[Case]) -> list[CaseResult]:
    """Run one case after another on all ranks; stop once the ranks are out of step."""
    results: list[CaseResult] = []
    with lines_of_rank("ring-attn verify"):
        for number, case in enumerate(wanted):
            stage = f"case {number + 1} of {len(wanted)}, {case.strategy}"
            progress.begin(stage, done=number, total=len(wanted))
            results.append(run_case(case))
            if not results[-1].in_step:
                break
    reason = "not run: the ranks were out of step after the case before"
    not_run = wanted[len(results) :]
    return results + [CaseResult(case, error=reason) for case in not_run]


def run(args: argparse.Namespace) -> int:
    """Run the cases and show the results; return 1 if a case failed or none passed."""
    world_size = args.world_size
    if world_size is None:
        world_size = env_int("WORLD_SIZE", VERIFIED_WORLD_SIZE)
    device = checked_device(args.device, world_size)
    for name in args.backend or ():
        check_one_of("--backend", name, [*backend_reasons()])
    backends = args.backend or usable_backends(device)
    if args.all and (args.quick or args.seed is not None):
        raise ValueError("--all runs every case: leave out --quick and --seed")
    seed = args.seed
    if seed is None:
        # All ranks of torchrun must run the same cases.
        seed = 0 if under_torchrun() else random.randrange(1 << 16)
    progress.begin("choosing the cases", done=0, total=1)
    every = cases(
        backends=backends,
        layouts=args.layout or LAYOUTS,
        strategies=STRATEGIES if "all" in args.strategy else args.strategy,
    )
    if not under_torchrun():
        check_memory(world_size)
    every, refusals = without_refused(every, world_size, device)
    size = QUICK if args.quick else SAMPLE
    wanted = every if args.all else sample(every, size, seed)
    one_of_reason = [of_reason[0] for of_reason in refusals.values()]
    # All ranks must refuse a case; a few are enough to show it. If none can run, all reasons show.
    wanted += one_of_reason[: len(wanted) // 20] if wanted else one_of_reason
    started = time.perf_counter()
    leave_to_ranks()
    results = run_ranks(run_cases, world_size, wanted, threads=args.threads, device=device)[0]
    report = _report(results, world_size, device, time.perf_counter() - started)
    report["refusals"] = {reason: len(of_reason) for reason, of_reason in refusals.items()}
    if not args.all:
        seconds = report["seconds"] * len(every) / len(wanted)
        report["seed"] = seed
        report["all"] = {"cases": len(every), "s": seconds}
    write_json(args.json, report)
    _show(results, report, quiet=args.quiet)
    if not args.quiet:
        for reason, count in report["refusals"].items():
            print(f"left out: {_counted(count)} of the table: {reason}")
    if not args.backend and not args.quiet:
        _show_untried(backends)
    return 1 if report["summary"]["failed"] or not report["summary"]["passed"] else 0


def without_refused(
    every: Sequence[Case], world_size: int, device: str
) -> tuple[list[Case], dict[str, list[Case]]]:
    """Return the cases that this number of ranks can run, and the others by the reason."""
    accepted: list[Case] = []
    refused: dict[str, list[Case]] = {}
    for case in every:
        reason = _why_refused(case, world_size, device)
        if reason is None:
            accepted.append(case)
        else:
            refused.setdefault(_general(reason), []).append(case)
    return accepted, refused


def _why_refused(case: Case, world_size: int, device: str) -> str | None:
    """Return why the strategy or the backend cannot run a case; None if both can."""
    heads, sinks = case.build_heads(), bool(case.sinks)
    batch = case.batch or (1 if case.packed else 2)
    try:
        strategy = case.build_strategy(world_size)
        # "auto" chooses among strategies that can run; then only the backend may refuse the case.
        strategy = "all_gather" if strategy == "auto" else strategy
        make_call(
            resolve_strategy(strategy, world_size),
            AttentionSpec(device, BY_NAME[case.dtype], batch, *heads, case.softcap, sinks),
            case.build_layouts(world_size),
            case.build_mask(),
            rank=0,
            backend=case.backend,
            same_bits=case.same_bits,
        )
    except (NotImplementedError, ImportError) as error:
        return str(error)
    return None


def _counted(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _general(reason: str) -> str:
    """Return the reason of a refusal without the values, which differ from case to case."""
    return re.sub(r", got [^;]*;", ";", reason)


def _attempt(case: Case) -> _Attempt:
    """Run a case on this rank; return its result, the reason for a refusal, or the error."""
    device = rank_device()
    q, k, v, _ = case.build_inputs(device)
    sinks = case.build_sinks(device)
    try:
        # This checks the whole tensors, so that the answer is the same on every rank.
        select_backend(q, k, v, backend=case.backend, softcap=case.softcap, sinks=sinks)
        return run_rank(case, device)
    except (NotImplementedError, ImportError) as error:
        return str(error)
    except Exception:
        return RuntimeError(traceback.format_exc())


def _judge(case: Case, attempts: Sequence[_Attempt]) -> CaseResult:
    """Return the verdicts on a case, from the attempts of all ranks."""
    errors = [(rank, str(x)) for rank, x in enumerate(attempts) if isinstance(x, RuntimeError)]
    if errors:
        rank, text = errors[0]
        return CaseResult(case, error=f"rank {rank}: {text}", in_step=len(errors) == len(attempts))
    results = [x for x in attempts if isinstance(x, RankResult)]
    if not results:
        return CaseResult(case, refused=str(attempts[0]))
    if len(results) < len(attempts):
        refused = [x if isinstance(x, str) else None for x in attempts]
        return CaseResult(case, error=f"only some ranks refused: {refused}", in_step=False)
    try:
        return CaseResult(case, put_together(case, results).verdicts)
    except (TypeError, ValueError) as error:
        return CaseResult(case, error=str(error))


def _show(results: Sequence[CaseResult], report: Report, *, quiet: bool) -> None:
    """Print a line for each strategy, unless `quiet`, then failed cases and the summary."""
    if not quiet:
        for line in _lines(results):
            print(line)
    for result in results:
        wrong = [str(verdict) for verdict in result.verdicts if not verdict.ok]
        if result.status == "failed":
            print(f"\nFAILED {result.case}\n{result.error or '; '.join(wrong)}")
    print(_summary(results, report))


def _show_untried(backends: Sequence[str]) -> None:
    """Print why the other backends cannot run."""
    for name, reasons in backend_reasons().items():
        if name not in backends:
            first_reason = next(reason for reason in reasons.values() if reason)
            print(f"not tried: {name}: {first_reason}")


def _lines(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield a line for each strategy, and for each reason of refusals."""
    for strategy in dict.fromkeys(result.case.strategy for result in results):
        of_strategy = [result for result in results if result.case.strategy == strategy]
        counts = Counter(result.status for result in of_strategy)
        shown = ", ".join(f"{count} {status}" for status, count in counts.items())
        ratios = [verdict.ratio for result in of_strategy for verdict in result.verdicts]
        largest = f": error / bound at most {max(ratios):.2f}" if ratios else ""
        yield f"{strategy}: {shown}{largest}"
    refused: dict[str, list[Case]] = {}
    for result in results:
        if result.refused is not None:
            refused.setdefault(_general(result.refused), []).append(result.case)
    for reason, found in refused.items():
        names = ", ".join(sorted({f"{case.strategy} {case.backend}" for case in found}))
        yield f"refused: {_counted(len(found))} of {names}: {reason}"


def _summary(results: Sequence[CaseResult], report: Report) -> str:
    """Return the counts of cases, the sample, and the largest error."""
    counts = ", ".join(f"{count} {status}" for status, count in report["summary"].items())
    text = (
        f"{counts}: world size {report['world_size']} on {report['device']}, "
        f"{report['seconds']:.1f} s"
    )
    if "seed" in report:
        minutes = report["all"]["s"] / 60
        text += f"; a sample with --seed {report['seed']}; "
        text += f"--all has {report['all']['cases']} cases, about {minutes:.0f} min"
    judged = [(result.case, verdict) for result in results for verdict in result.verdicts]
    if not judged:
        return text
    case, worst = max(judged, key=lambda entry: entry[1].ratio)
    return f"{text}\nlargest error / bound: {worst.ratio:.2f} ({worst.name} of {case})"


def _report(results: Sequence[CaseResult], world_size: int, device: str, seconds: float) -> Report:
    """Return the report for JSON."""
    counts = Counter(result.status for result in results)
    return {
        "command": "verify",
        "machine": machine(),
        "world_size": world_size,
        "device": device,
        "seconds": seconds,
        "summary": {status: counts[status] for status in ("passed", "failed", "refused")},
        "cases": [_case_report(result) for result in results],
    }


def _case_report(result: CaseResult) -> dict[str, object]:
    """Return the part of the report for one case."""
    figures: dict[str, ResultFigures] = {
        verdict.name: {"error": verdict.error, "bound": verdict.bound, "ok": verdict.ok}
        for verdict in result.verdicts
    }
    return {
        **asdict(result.case),
        "status": result.status,
        "reason": result.refused or result.error,
        "results": figures,
    }
