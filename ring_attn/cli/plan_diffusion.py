"""`ring-attn plan --model` of a config of diffusers: memory and time, training or inference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from math import lcm

import torch

from ring_attn.cli.arguments import command_line, narrow, write_json
from ring_attn.cli.plan_model import OF_CALL, check_given, refuse_both
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.choice import format_bytes
from ring_attn.planning.diffusion import report
from ring_attn.planning.diffusion.config import TransformerConfig
from ring_attn.planning.diffusion.fits import (
    DiffusionPlan,
    fewest,
    longest,
    plan_options,
    with_video,
)
from ring_attn.planning.diffusion.job import DiffusionJob, sized
from ring_attn.planning.model.degrees import Degrees, degrees_of
from ring_attn.planning.model.fits import unit_of

# Options that a transformer of diffusers does not have, and why.
WITHOUT = {
    "tp": "its blocks are not split: pass --cp and --fsdp",
    "pp": "its blocks are not split into stages: pass --cp and --fsdp",
    "ep": "it has no experts: pass --cp and --fsdp",
    "loss": "it has no logits",
}
OF_TRAINING = ("recompute", "optimizer", "microbatches")


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together with a config of diffusers.

    Raises:
        ValueError: an option is missing, or would be ignored.
    """
    for name, option in OF_CALL.items():
        if name != "window_size" and getattr(args, name) is not None:
            raise ValueError(f"{option} is not used with --model, whose config gives it")
    if args.causal:
        raise ValueError(
            "--causal is not used with a config of diffusers, whose rows see all rows: plan a "
            "causal mask with --heads and --head-dim instead of --model"
        )
    for name, why in WITHOUT.items():
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is not used with a config of diffusers: {why}")
    if not is_training(args):
        for name in OF_TRAINING:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is of training, and --steps or --no-backward is not")
    _check_lengths(args)


def _check_lengths(args: argparse.Namespace) -> None:
    """Refuse lengths and numbers of ranks that are missing, or that the command finds."""
    if args.fits and args.target is not None:
        raise ValueError("pass --fits or --target, not both")
    finds = "--fits" if args.fits else "--target"
    if args.fits or args.target is not None:
        refuse_both(args, finds, "seqlen", "finds or gives the length")
        refuse_both(args, finds, "documents", "plans one document")
        for option, is_given in (("--check", args.check), ("--plot", args.plot is not None)):
            if is_given:
                raise ValueError(f"{option} is not used with {finds}: pass --seqlen")
    if args.target is not None:
        refuse_both(args, finds, "world_size", "finds the number of ranks")
    elif args.fits:
        check_given(args, ["world_size"])
    else:
        check_given(args, ["seqlen", "world_size"])
    length = args.seqlen or args.target
    if length is not None and args.replicated >= length:
        raise ValueError(
            f"--replicated must be less than the {length} rows of a sample, which are text and "
            f"video, got {args.replicated}"
        )


def is_training(args: argparse.Namespace) -> bool:
    """Return whether the options ask for training; --steps and --no-backward are of inference."""
    return args.steps is None and args.backward is not False


def run(
    args: argparse.Namespace,
    config: TransformerConfig,
    cluster: Cluster,
    documents: Callable[[int], list[int]] | None,
) -> DiffusionPlan | None:
    """Plan a transformer of diffusers, and print the plan; return it if it fits.

    `documents` returns the boundaries of the documents of a length; None is one document.
    """
    job = job_of(args, config, cluster, documents)
    degrees = partial(_degrees, args)
    found: DiffusionPlan | None
    if args.fits:
        found, text = _longest(job, args, degrees)
    elif args.target is not None:
        found, text = _fewest(job, args, degrees)
    else:
        found, text = _of_length(job, args, degrees)
    fits = found is not None and found.fits
    if not args.quiet and found is not None and fits:
        print(report.text_of(found, verbose=args.verbose))
        print()
    print("\n".join(narrow(line) for line in text.splitlines()))
    plan = {} if found is None else report.to_dict(found)
    write_json(args.json, {"command": command_line(), **plan, "fits": fits, "answer": text})
    return found if fits else None


def job_of(
    args: argparse.Namespace,
    config: TransformerConfig,
    cluster: Cluster,
    documents: Callable[[int], list[int]] | None,
) -> DiffusionJob:
    """Return the job of the options, on the smallest number of ranks for --target."""
    training = is_training(args)
    memory = args.memory_bytes or cluster.device.memory_bytes or float("inf")
    if memory == float("inf") and (args.fits or args.target is not None):
        raise ValueError(
            f"--memory is needed: the memory of {cluster.device.name} is not known, so everything "
            "fits"
        )
    degrees = _degrees(args, args.world_size or lcm(args.cp or 1, args.fsdp or 1))
    seqlen = args.seqlen or args.target or args.replicated + 1
    # Without a window every row sees all rows, so that all layouts have the same work.
    has_window = args.window_size not in (None, (-1, -1))
    layout = "contiguous" if args.layout == "auto" and not has_window else args.layout
    return DiffusionJob(
        model=sized(config, args.dtype, training=training),
        seqlen=seqlen,
        text=args.replicated,
        degrees=degrees,
        cluster=cluster,
        memory_bytes=float(memory),
        batch=args.batch,
        microbatches=args.microbatches or 1,
        steps=None if training else args.steps or 1,
        optimizer=args.optimizer or "adamw",
        dtype=args.dtype,
        weight_dtype=args.weights or (torch.float32 if training else args.dtype),
        layout=layout,
        explained=_explained(args, config, documents),
    )


def _explained(
    args: argparse.Namespace,
    config: TransformerConfig,
    documents: Callable[[int], list[int]] | None,
) -> Mapping[str, object]:
    """Return the further options of `explain`."""
    given: dict[str, object] = {"same_bits": args.same_bits, "exact": args.exact}
    if args.strategies is not None:
        given["strategies"] = args.strategies
    if args.window_size is not None:
        given["window_size"] = args.window_size
    if args.plot is not None:
        given["effort"] = "names"  # the picture has one strategy of each name
    if documents is not None:
        if args.replicated and not config.has_joint_text:
            raise ValueError(
                f"--documents is not used with --replicated and {config.class_name}, whose "
                "attention over the video does not have the text"
            )
        given["cu_seqlens"] = documents(args.seqlen)
    return given


def _degrees(args: argparse.Namespace, world_size: int) -> Degrees:
    """Return the degrees of the options; in inference every rank has all weights by default."""
    fsdp = args.fsdp if is_training(args) else args.fsdp or 1
    return degrees_of(world_size, cp=args.cp, fsdp=fsdp)


def _of_length(
    job: DiffusionJob, args: argparse.Namespace, degrees: Callable[[int], Degrees]
) -> tuple[DiffusionPlan, str]:
    """Return the plan of a length, and in words whether it fits."""
    plan = plan_options(job, args.recompute)
    if not plan.fits:
        return plan, _nothing_fits(plan, args, degrees)
    if job.memory_bytes == float("inf"):
        return plan, f"a rank takes {format_bytes(round(plan.memory.total))}"
    text = f"fits in {100 * plan.memory.total / job.memory_bytes:.0f} % of the memory"
    is_of_one_length = "cu_seqlens" in job.explained
    most = None if args.quick or is_of_one_length else longest(job, args.recompute)
    return plan, text if most is None else f"{text}; up to {most.job.seqlen:,} rows would"


def _nothing_fits(
    plan: DiffusionPlan, args: argparse.Namespace, degrees: Callable[[int], Degrees]
) -> str:
    """Return in three lines what would fit."""
    job = plan.job
    if args.documents is not None:
        return report.nothing_fits(plan, None, None).splitlines()[0]
    if args.recompute is not None:
        other = plan_options(job)
        if other.fits:
            return report.nothing_fits(plan, longest(job, args.recompute), None, other)
    least = fewest(job, degrees, args.recompute)
    return report.nothing_fits(plan, longest(job, args.recompute), least)


def _longest(
    job: DiffusionJob, args: argparse.Namespace, degrees: Callable[[int], Degrees]
) -> tuple[DiffusionPlan, str]:
    """Return the plan of the longest sequence, and its length in words."""
    plan = longest(job, args.recompute)
    if plan is None:
        least = plan_options(with_video(job, unit_of(job.degrees)), args.recompute)
        return least, _nothing_fits(least, args, degrees)
    where = f"{job.degrees.world_size} x {job.cluster.device.name}"
    return plan, f"the longest sequence that fits on {where}: {plan.job.seqlen:,} rows"


def _fewest(
    job: DiffusionJob, args: argparse.Namespace, degrees: Callable[[int], Degrees]
) -> tuple[DiffusionPlan | None, str]:
    """Return the plan of the fewest ranks for a length, and their number in words."""
    plan = fewest(job, degrees, args.recompute)
    if plan is None:
        return None, report.no_ranks_fit(job)
    found = plan.job.degrees
    is_least = found.world_size == job.degrees.world_size
    why = "the degrees allow no fewer" if is_least else "half as many do not fit"
    return plan, (
        f"{job.seqlen:,} rows need {found.world_size} x {job.cluster.device.name} ({found}); {why}"
    )
