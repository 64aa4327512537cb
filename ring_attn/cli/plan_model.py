"""`ring-attn plan --model`: the memory and the time of a model's training step."""

from __future__ import annotations

import argparse
from functools import partial
from math import lcm

import torch

from ring_attn.cli.options import MODEL_OPTIONS
from ring_attn.cli.plan_search import Search, memory_of_rank
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.model import report
from ring_attn.planning.model.config import read_model
from ring_attn.planning.model.degrees import Degrees, check_degrees, degrees_of
from ring_attn.planning.model.fits import ModelPlanner
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
    refuse_sizes(args)
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


def refuse_sizes(args: argparse.Namespace, allowed: frozenset[str] = frozenset()) -> None:
    """Refuse options of one call of attention, which the config of a model gives."""
    for name, option in OF_CALL.items():
        if name not in allowed and getattr(args, name) is not None:
            raise ValueError(f"{option} is not used with --model, whose config gives it")


def _refuse_options_of_a_call(args: argparse.Namespace) -> None:
    """Refuse options that are for one call of attention."""
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
    search = Search(
        args,
        job=job_of(args, cluster, documents),
        planner=ModelPlanner(args.recompute, args.loss),
        free_planner=ModelPlanner(),
        degrees=partial(_degrees, args),
        report=report,
    )
    return 0 if search.run() is not None else 1


def job_of(args: argparse.Namespace, cluster: Cluster, documents: list[int] | None) -> Job:
    """Return the job of the options, on the smallest number of ranks for --target."""
    # First, since a model takes seconds to read.
    degrees = _degrees(args, args.world_size or _fewest_ranks(args))
    model = sized(read_model(args.model), args.dtype)
    check_degrees(degrees, model.architecture)
    memory = memory_of_rank(args, cluster)
    strategies = {} if args.strategies is None else {"strategies": args.strategies}
    return Job(
        model=model,
        seqlen=args.seqlen or args.target or 1,
        degrees=degrees,
        cluster=cluster,
        memory_bytes=memory,
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
