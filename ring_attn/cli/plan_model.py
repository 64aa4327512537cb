"""`ring-attn plan --model`: the memory and the time of a model's training step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from math import lcm

import torch

from ring_attn.cli.arguments import command_line, narrow, write_json
from ring_attn.cli.options import MODEL_OPTIONS
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.choice import format_bytes
from ring_attn.planning.model import report
from ring_attn.planning.model.config import read_model
from ring_attn.planning.model.degrees import Degrees, check_degrees, degrees_of
from ring_attn.planning.model.fits import (
    ModelPlan,
    Options,
    fewest,
    longest,
    plan_options,
    unit_of,
    with_length,
)
from ring_attn.planning.model.job import Job, sized

# Options of one call of attention, which the model gives: attribute -> option.
OF_CALL = {
    "nheads": "--heads",
    "nheads_kv": "--kv-heads",
    "headdim": "--head-dim",
    "headdim_v": "--head-dim-v",
    "window_size": "--window",
}


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, with a model and without one.

    Raises:
        ValueError: an option is missing, or would be ignored.
    """
    if args.model is None:
        _check_without_model(args)
        return
    _refuse_options_of_a_call(args)
    if args.steps is not None:
        raise ValueError("--steps is of transformers of diffusers, and --model is not one")
    if args.fits and args.target is not None:
        raise ValueError("pass --fits or --target, not both")
    if args.quick and (args.fits or args.target is not None):
        raise ValueError("--quick is not used with --fits and --target, which need the search")
    if args.fits:
        refuse_both(args, "--fits", "seqlen", "finds the length")
        refuse_both(args, "--fits", "documents", "plans one document")
        check_given(args, ["world_size"])
    elif args.target is not None:
        refuse_both(args, "--target", "world_size", "finds the number of ranks")
        refuse_both(args, "--target", "seqlen", "gives the length")
        refuse_both(args, "--target", "documents", "plans one document")
    else:
        check_given(args, ["seqlen", "world_size"])


def _refuse_options_of_a_call(args: argparse.Namespace) -> None:
    """Refuse options that describe one call of attention."""
    for name, option in OF_CALL.items():
        if getattr(args, name) is not None:
            raise ValueError(f"{option} is not used with --model, whose config gives it")
    for option, is_given in (
        ("--no-causal", args.causal is False),
        ("--no-backward", args.backward is False),
        ("--check", args.check),
        ("--replicated", args.replicated > 0),
        ("--plot", args.plot is not None),
    ):
        if is_given:
            raise ValueError(f"{option} is not used with --model; it is for one call of attention")


def _check_without_model(args: argparse.Namespace) -> None:
    for name in MODEL_OPTIONS:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} needs --model")
    check_given(args, ["seqlen", "world_size"], can_be_found=False)


def refuse_both(args: argparse.Namespace, option: str, name: str, why: str) -> None:
    """Refuse an option next to another one, which finds or gives the same."""
    if getattr(args, name) is not None:
        raise ValueError(f"--{name.replace('_', '-')} is not used with {option}, which {why}")


def check_given(args: argparse.Namespace, names: list[str], *, can_be_found: bool = True) -> None:
    """Refuse a command without one of these options."""
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is None]
    if missing:
        raise ValueError(
            f"needs {' and '.join(missing)}"
            + ("; --fits finds the length, --target the number of ranks" if can_be_found else "")
        )


def run(args: argparse.Namespace, cluster: Cluster, documents: list[int] | None) -> int:
    """Plan a model; return 1 if it does not fit."""
    job, options = job_of(args, cluster, documents), Options(args.recompute, args.loss)
    degrees = partial(_degrees, args)
    found: ModelPlan | None
    if args.fits:
        found, text = _longest(job, options, degrees)
    elif args.target is not None:
        found, text = _fewest(job, options, degrees)
    else:
        found, text = _of_length(job, options, degrees, quick=args.quick)
    if not args.quiet and found is not None and found.fits:
        print(report.text_of(found, verbose=args.verbose))
        print()
    print("\n".join(narrow(line) for line in text.splitlines()))
    fits = found is not None and found.fits
    plan = {} if found is None else report.to_dict(found)
    write_json(args.json, {"command": command_line(), **plan, "fits": fits, "answer": text})
    return 0 if fits else 1


def job_of(args: argparse.Namespace, cluster: Cluster, documents: list[int] | None) -> Job:
    """Return the job of the options, on the smallest number of ranks for --target."""
    # First, since a model takes seconds to read.
    degrees = _degrees(args, args.world_size or _fewest_ranks(args))
    model = sized(read_model(args.model), args.dtype)
    check_degrees(degrees, model.architecture)
    memory = args.memory_bytes or cluster.device.memory_bytes or float("inf")
    if memory == float("inf") and (args.fits or args.target is not None):
        raise ValueError(
            f"--memory is needed: the memory of {cluster.device.name} is not known, so everything "
            "fits"
        )
    strategies = {} if args.strategies is None else {"strategies": args.strategies}
    return Job(
        model=model,
        seqlen=args.seqlen or args.target or 1,
        degrees=degrees,
        cluster=cluster,
        memory_bytes=float(memory),
        batch=args.batch,
        microbatches=args.microbatches or degrees.pp,
        optimizer=args.optimizer or "adamw",
        dtype=args.dtype,
        weight_dtype=args.weights or torch.float32,
        documents=None if documents is None else tuple(documents),
        layout=args.layout,
        explained={"same_bits": args.same_bits, "exact": args.exact, **strategies},
    )


def _fewest_ranks(args: argparse.Namespace) -> int:
    """Return the least number of ranks that the degrees allow."""
    rest = lcm(args.cp or 1, args.ep or 1, args.fsdp or 1)
    return (args.tp or 1) * (args.pp or 1) * rest


def _degrees(args: argparse.Namespace, world_size: int) -> Degrees:
    """Return the degrees of the options on a number of ranks."""
    return degrees_of(
        world_size,
        cp=args.cp,
        tp=args.tp or 1,
        pp=args.pp or 1,
        ep=args.ep or 1,
        fsdp=args.fsdp,
    )


def _of_length(
    job: Job, options: Options, degrees: Callable[[int], Degrees], *, quick: bool
) -> tuple[ModelPlan, str]:
    """Return the plan of a length, and in words whether it fits."""
    plan = plan_options(job, options)
    if not plan.fits:
        return plan, _nothing_fits(plan, options, degrees)
    if job.memory_bytes == float("inf"):
        return plan, f"a rank takes {format_bytes(round(plan.memory.total))}"
    text = f"fits in {100 * plan.memory.total / job.memory_bytes:.0f} % of the memory"
    most = None if quick else longest(job, options)
    return plan, text if most is None else f"{text}; up to {most.job.seqlen:,} tokens would"


def _nothing_fits(plan: ModelPlan, options: Options, degrees: Callable[[int], Degrees]) -> str:
    """Return in three lines what would fit."""
    job = plan.job
    if options != Options():
        other = plan_options(job, Options())
        if other.fits:
            return report.nothing_fits(plan, longest(job, options), None, other)
    return report.nothing_fits(plan, longest(job, options), fewest(job, options, degrees))


def _longest(
    job: Job, options: Options, degrees: Callable[[int], Degrees]
) -> tuple[ModelPlan, str]:
    """Return the plan of the longest sequence, and its length in words."""
    plan = longest(job, options)
    if plan is None:
        least = plan_options(with_length(job, unit_of(job.degrees)), options)
        return least, _nothing_fits(least, options, degrees)
    where = f"{job.degrees.world_size} x {job.cluster.device.name}"
    return plan, f"the longest sequence that fits on {where}: {plan.job.seqlen:,} tokens"


def _fewest(
    job: Job, options: Options, degrees: Callable[[int], Degrees]
) -> tuple[ModelPlan | None, str]:
    """Return the plan of the fewest ranks for a length, and their number in words."""
    plan = fewest(job, options, degrees)
    if plan is None:
        return None, report.no_ranks_fit(job)
    degrees_found = plan.job.degrees
    is_least = degrees_found.world_size == job.degrees.world_size
    why = "the degrees allow no fewer" if is_least else "half as many do not fit"
    return plan, (
        f"{job.seqlen:,} tokens need {degrees_found.world_size} x {job.cluster.device.name} "
        f"({degrees_found}); {why}"
    )
