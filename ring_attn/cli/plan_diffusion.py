"""`ring-attn plan --model` of a config of diffusers: memory and time, training or inference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from math import lcm

import torch

from ring_attn.cli.plan_model import check_given, refuse_both, refuse_sizes
from ring_attn.cli.plan_search import Search, memory_of_rank
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.diffusion import report
from ring_attn.planning.diffusion.config import TransformerConfig
from ring_attn.planning.diffusion.fits import DiffusionPlan, DiffusionPlanner
from ring_attn.planning.diffusion.job import DiffusionJob, sized
from ring_attn.planning.model.degrees import Degrees, degrees_of

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
    refuse_sizes(args, allowed=frozenset({"window_size"}))
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
    search = Search(
        args,
        job=job_of(args, config, cluster, documents),
        planner=DiffusionPlanner(args.recompute),
        free_planner=DiffusionPlanner(),
        degrees=partial(_degrees, args),
        report=report,
        has_other_lengths=args.documents is None,
    )
    return search.run()


def job_of(
    args: argparse.Namespace,
    config: TransformerConfig,
    cluster: Cluster,
    documents: Callable[[int], list[int]] | None,
) -> DiffusionJob:
    """Return the job of the options, on the smallest number of ranks for --target."""
    training = is_training(args)
    memory = memory_of_rank(args, cluster)
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
        memory_bytes=memory,
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
