"""`ring-attn plan`: predicts how ranks would best share a call on a cluster."""

from __future__ import annotations

import argparse
import os
import runpy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, cycle, takewhile

import torch

from ring_attn.cli.arguments import (
    command_line,
    format_size,
    narrow,
    shortened,
    with_options,
    write_json,
)
from ring_attn.machines.check import check
from ring_attn.machines.cluster import Cluster
from ring_attn.machines.draw import draw
from ring_attn.planning.calls import call_of
from ring_attn.planning.choice import Choice
from ring_attn.planning.devices import (
    CLUSTER_VARIABLE,
    DEVICES,
    builtin_cluster,
    find_cluster,
    load_cluster,
)
from ring_attn.planning.planner import explain
from ring_attn.planning.scale import estimates_of
from ring_attn.strategies.base import StrategyCode
from ring_attn.strategies.registry import programs_of, registered
from ring_attn.testing.launch import num_threads

# At this size a table of all pairs of ranks takes 0.1 GiB; a plan holds about 25 such tables.
MAX_RANKS = 4096

# Most rows, and bytes per row: more pairs (rows x rows) or bytes would overflow 64 bits.
MAX_ROWS, MAX_ROW = 1 << 31, 1 << 26

# MAX_MEETINGS limits documents x ranks^2: every striped shard has rows of every document.
MAX_HEADS, MAX_DOCUMENTS, MAX_MEETINGS = 4096, 1 << 16, 1 << 25

# Most ranks whose programs --check checks, and most lines to print of a program or of faults.
MAX_CHECKED, MAX_LINES = 128, 60


def run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        if args.load is not None:
            if not args.load.is_file():
                raise ValueError(f"--load: there is no file {str(args.load)!r}")
            for value in runpy.run_path(str(args.load)).values():
                if isinstance(value, StrategyCode):
                    stack.enter_context(registered(value))
        return run_plan(args)


def run_plan(args: argparse.Namespace) -> int:
    check_bounds(args)
    with num_threads(1):  # on a busy machine, threads of small operators wait for one another
        choice = plan(args)
    if not args.quiet:
        text = choice.table(verbose=args.verbose).removesuffix(choice.reason)
        print(text if args.verbose else "\n".join(map(narrow, text.splitlines())))
    estimates = estimates_of(choice.problem, choice.best)
    walked = estimates.num_walked
    if estimates.is_extrapolated:
        sizes = " and ".join(map(str, estimates.world_sizes))
        print(f"times follow from {sizes} ranks, each of which stands for several")
    elif walked < args.world_size:
        print(f"times are of {walked} ranks, which stand for all {args.world_size}")
    print(narrow(choice.reason))
    ok = not args.check or checked(choice, quiet=args.quiet)
    write_json(args.json, {"command": command_line(), **choice.to_dict()})
    return 0 if ok else 1


def checked(choice: Choice, *, quiet: bool) -> bool:
    """Checks all ranks' programs of the best strategy; draws rank 0's, and prints faults."""
    problem, best = choice.problem, choice.best
    calls = [replace(call_of(problem, best), rank=rank) for rank in range(problem.world_size)]
    count, faults = 0, []
    for backward in problem.directions:
        programs = programs_of(calls, backward=backward)
        count += sum(len(program.ops) for program in programs)
        faults += check(programs, calls[0])
        if not quiet:
            print(shortened_lines(draw(programs[0]), MAX_LINES))
    for fault in faults[:MAX_LINES]:
        print(fault)
    print(f"checked {count} ops of {len(calls)} ranks: {len(faults)} faults")
    return not faults


def shortened_lines(text: str, most: int) -> str:
    """The first `most` lines of a text, and the number of further lines."""
    lines = text.splitlines()
    more = [f"... {len(lines) - most} more lines"] if len(lines) > most else []
    return "\n".join([*lines[:most], *more, ""])


def check_bounds(args: argparse.Namespace) -> None:
    """Refuses sizes whose plan would take much more than 20 s or 4 GiB."""
    documents = 0
    if args.documents is not None:
        documents = -(-args.seqlen * len(args.documents) // sum(args.documents))
    heads = args.batch * args.nheads
    if args.check and args.world_size > MAX_CHECKED:
        raise ValueError(
            f"--check takes at most {MAX_CHECKED} ranks, as it lists the tiles of every pair; got "
            f"{args.world_size}"
        )
    for option, value, most in (
        ("--world-size", args.world_size, MAX_RANKS),
        ("--seqlen", args.seqlen, MAX_ROWS),
        ("--heads", args.nheads, MAX_HEADS),
        ("--batch x heads x head dim", heads * args.headdim, MAX_ROW),
        ("--batch x heads x head dim of v", heads * (args.headdim_v or 0), MAX_ROW),
        ("documents", documents, MAX_DOCUMENTS),
    ):
        if value > most:
            raise ValueError(
                f"{option} can be {format_size(most)} at most, which takes about 20 s and 4 GiB "
                f"to plan; got {value}"
            )
    meetings = documents * args.world_size**2
    if args.layout in ("auto", "striped") and meetings > MAX_MEETINGS:
        raise ValueError(
            f"{documents} documents x {args.world_size} x {args.world_size} ranks can be "
            f"{format_size(MAX_MEETINGS)} at most with striped shards, which takes about 20 s to "
            "plan; give --layout zigzag, contiguous or balanced"
        )


def plan(args: argparse.Namespace) -> Choice:
    """The choice for the options, which are stored under the names of `explain`'s parameters.

    Unless --quick, simulates a degree of each strategy's name.
    """
    return with_options(
        explain,
        args,
        cu_seqlens=None if args.documents is None else boundaries(args.documents, args.seqlen),
        cluster=cluster_of(args.cluster, args.node_size, args.world_size),
        effort="best" if args.quick else "names",
    )


def boundaries(lengths: Sequence[int], seqlen: int) -> list[int]:
    """Boundaries of documents with repeated lengths; the last document takes the remaining room.

    Example:
        >>> boundaries((4, 1), 12)
        [0, 4, 5, 9, 10, 12]
    """
    cuts = accumulate(cycle(lengths), initial=0)
    return [*takewhile(lambda cut: cut < seqlen, cuts), seqlen]


def cluster_of(name: str | None, node_size: int | None, world_size: int) -> Cluster:
    """A built-in cluster, a file's cluster, or by default this machine's."""
    if name is None:
        known = torch.cuda.is_available() or os.environ.get(CLUSTER_VARIABLE)
        cluster = find_cluster(None, world_size) if known else builtin_cluster("H100")
    elif name.upper() in DEVICES:
        cluster = builtin_cluster(name.upper())
    elif os.path.isdir(name):
        raise ValueError(f"--cluster {name!r} is a folder: give a file of ring-attn calibrate")
    elif os.path.exists(name):
        cluster = load_cluster(name)
    else:
        known = ", ".join(DEVICES).lower()
        raise ValueError(f"--cluster must be one of {known}, or a file; got {shortened(name)}")
    if node_size is None:
        return cluster
    return replace(cluster, node_size=node_size)
