"""`ring-attn plan`: predict how ranks would best share a call on a cluster."""

from __future__ import annotations

import argparse
import os
import runpy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle, takewhile
from pathlib import Path

import torch

from ring_attn import plots
from ring_attn.cli import plan_diffusion, plan_model
from ring_attn.cli.arguments import (
    command_line,
    format_size,
    is_first_rank,
    narrow,
    shortened,
    with_options,
    write_json,
)
from ring_attn.cli.options import HEADDIM, HEADS
from ring_attn.core.strategy import NAMES
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
from ring_attn.planning.diffusion.config import TransformerConfig, read_transformer
from ring_attn.planning.planner import explain
from ring_attn.planning.scale import MAX_EXACT, estimates_of
from ring_attn.strategies.base import StrategyCode
from ring_attn.strategies.registry import programs_of, registered
from ring_attn.testing.launch import num_threads

# At this size a table of all pairs of ranks takes 0.1 GiB; a plan holds about 25 such tables.
MAX_RANKS = 4096

# Limits of rows, and of elements per row: more pairs (rows x rows) or bytes would overflow 64 bits.
MAX_ROWS, MAX_ROW = 1 << 31, 1 << 26

# MAX_MEETINGS limits documents x ranks^2: every striped shard has rows of every document.
MAX_HEADS, MAX_DOCUMENTS, MAX_MEETINGS = 4096, 1 << 16, 1 << 25

# Limits of the ranks whose programs --check checks, and of printed lines of a program or of faults.
MAX_CHECKED, MAX_LINES = 128, 60


def run(args: argparse.Namespace) -> int:
    """Plan a call, while the strategies of --load are registered; return 1 if --check fails."""
    with ExitStack() as stack:
        if args.load is not None:
            for strategy in strategies_of_file(args.load):
                stack.enter_context(registered(strategy))
        _check_strategies(args.strategies)
        transformer = None if args.model is None else read_transformer(args.model)
        if transformer is not None:
            return run_diffusion(args, transformer)
        plan_model.check_options(args)
        return run_plan(args) if args.model is None else run_model(args)


def strategies_of_file(path: Path) -> list[StrategyCode]:
    """Run a Python file, and return the strategies among its variables.

    Raises:
        ValueError: there is no such file, it is not Python, or it has no strategy.
    """
    if not path.is_file():
        raise ValueError(f"--load: there is no file {str(path)!r}")
    try:
        compile(path.read_bytes(), str(path), "exec")  # `run_path` would show a traceback
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--load: {path} is not a file of Python: {error}") from None
    found = [x for x in runpy.run_path(str(path)).values() if isinstance(x, StrategyCode)]
    if not found:
        raise ValueError(
            f"--load: {path} has no variable that is a strategy: assign one, as "
            "examples/own_strategy.py does"
        )
    return found


def _check_strategies(names: Sequence[str] | None) -> None:
    """Refuse unknown names of --strategy, once the strategies of --load are registered."""
    for name in names or ():
        if name not in NAMES:
            raise ValueError(f"--strategy must be some of {', '.join(NAMES)}, got {name!r}")


def run_model(args: argparse.Namespace) -> int:
    """Plan a model's training step; return 1 if it does not fit."""
    check_sizes(args)
    documents = None
    if args.documents is not None:
        documents = boundaries(args.documents, args.seqlen)
    cluster = cluster_of(args.cluster, args.node_size, args.world_size or 1)
    with num_threads(1):
        return plan_model.run(args, cluster, documents)


def run_diffusion(args: argparse.Namespace, transformer: TransformerConfig) -> int:
    """Plan a transformer of diffusers; return 1 if it does not fit, or --check finds a fault."""
    plan_diffusion.check_options(args)
    check_sizes(args)
    check_simulated(args)
    documents = None if args.documents is None else partial(boundaries, args.documents)
    cluster = cluster_of(args.cluster, args.node_size, args.world_size or 1)
    with num_threads(1):
        found = plan_diffusion.run(args, transformer, cluster, documents)
        if found is None:
            return 1
        choices = [kind.choice for kind in found.attention.kinds]
        figure = plots.plan(choices[0]) if args.plot is not None and choices else None
        ok = all(checked(choice, quiet=args.quiet) for choice in choices if args.check)
    if figure is not None and is_first_rank():
        plots.save(figure, args.plot)
    return 0 if ok else 1


def run_plan(args: argparse.Namespace) -> int:
    """Plan a call and print the choice; return 1 if --check finds a fault."""
    args = with_sizes(args)
    check_bounds(args)
    with num_threads(1):  # on a busy machine, threads of small operators wait for each other
        choice = plan(args)
        figure = None if args.plot is None else plots.plan(choice)
    if not args.quiet:
        text = choice.table(verbose=args.verbose).removesuffix(choice.reason)
        lines = text.splitlines()
        print(text if args.verbose else "\n".join(narrow(line) for line in lines))
    estimates = estimates_of(choice.problem, choice.best)
    walked = estimates.num_walked
    if estimates.is_extrapolated:
        sizes = " and ".join(str(size) for size in estimates.world_sizes)
        print(f"times follow from {sizes} ranks, each of which represents several ranks")
    elif walked < args.world_size:
        print(f"times are computed for {walked} ranks, which represent all {args.world_size} ranks")
    print(narrow(choice.reason))
    ok = not args.check or checked(choice, quiet=args.quiet)
    write_json(args.json, {"command": command_line(), **choice.to_dict()})
    if figure is not None and is_first_rank():
        plots.save(figure, args.plot)
    return 0 if ok else 1


def with_sizes(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of a call with the defaults of those that --model does not allow."""
    defaults = {"nheads": HEADS, "headdim": HEADDIM, "window_size": (-1, -1), "causal": True}
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**vars(args), **defaults, **given})


def checked(choice: Choice, *, quiet: bool) -> bool:
    """Check all ranks' programs of the best strategy; draw the program of rank 0, print faults."""
    problem, best = choice.problem, choice.best
    calls = [replace(call_of(problem, best), rank=rank) for rank in range(problem.world_size)]
    num_ops, faults = 0, []
    for backward in problem.directions:
        programs = programs_of(calls, backward=backward)
        num_ops += sum(len(program.ops) for program in programs)
        faults += check(programs, calls[0])
        if not quiet:
            print(shortened_lines(draw(programs[0]), MAX_LINES))
    for fault in faults[:MAX_LINES]:
        print(fault)
    print(f"checked {num_ops} ops of {len(calls)} ranks: {len(faults)} faults")
    return not faults


def shortened_lines(text: str, num: int) -> str:
    """Return the first `num` lines of a text, and the number of further lines."""
    lines = text.splitlines()
    shown = lines[:num]
    if len(lines) > num:
        shown.append(f"... {len(lines) - num} more lines")
    return "\n".join([*shown, ""])


def check_bounds(args: argparse.Namespace) -> None:
    """Refuse sizes whose plan would take much more than 20 s or 4 GiB."""
    check_sizes(args)
    check_simulated(args)
    heads = args.batch * args.nheads
    check_limits(
        {
            "--heads": (args.nheads, MAX_HEADS),
            "--batch x heads x head dim": (heads * args.headdim, MAX_ROW),
            "--batch x heads x head dim of v": (heads * (args.headdim_v or 0), MAX_ROW),
        }
    )


def check_simulated(args: argparse.Namespace) -> None:
    """Refuse --check and --plot of too many ranks."""
    if args.check and args.world_size > MAX_CHECKED:
        raise ValueError(
            f"--check works for at most {MAX_CHECKED} ranks, because it lists the tiles of every "
            f"pair of ranks, got {args.world_size}"
        )
    if args.exact and args.world_size > MAX_EXACT:
        raise ValueError(
            f"--exact works for at most {MAX_EXACT} ranks, because it simulates every rank, got "
            f"{args.world_size}"
        )
    if args.plot is not None and args.world_size > MAX_EXACT:
        raise ValueError(
            f"--plot works for at most {MAX_EXACT} ranks, because timelines of more ranks are not "
            f"simulated, got {args.world_size}"
        )


def check_sizes(args: argparse.Namespace) -> None:
    """Refuse numbers of ranks, rows and documents whose plan would take too long."""
    documents, world_size = 0, args.world_size or 1
    if args.documents is not None:
        # The lengths are repeated until the sequence is full; rounded up.
        documents = -(-args.seqlen * len(args.documents) // sum(args.documents))
    check_limits(
        {
            "--world-size": (world_size, MAX_RANKS),
            "--seqlen": (args.seqlen or 1, MAX_ROWS),
            "--target": (args.target or 1, MAX_ROWS),
            "documents": (documents, MAX_DOCUMENTS),
        }
    )
    meetings = documents * world_size**2
    if args.layout in ("auto", "striped") and meetings > MAX_MEETINGS:
        raise ValueError(
            f"documents x ranks x ranks must be at most {format_size(MAX_MEETINGS)} with striped "
            f"shards, which takes about 20 s to plan, got {documents} documents x "
            f"{world_size} x {world_size} ranks: pass --layout zigzag, contiguous or "
            "balanced"
        )


def check_limits(values: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a value above its limit."""
    for option, (value, limit) in values.items():
        if value > limit:
            raise ValueError(
                f"{option} must be at most {format_size(limit)}, which takes about 20 s and 4 GiB "
                f"to plan, got {value}"
            )


def plan(args: argparse.Namespace) -> Choice:
    """Return the choice for the options, which have the names of `explain`'s parameters.

    Unless --quick is given, one degree is simulated for each name of a strategy.
    """
    return with_options(
        explain,
        with_sizes(args),
        cu_seqlens=None if args.documents is None else boundaries(args.documents, args.seqlen),
        cluster=cluster_of(args.cluster, args.node_size, args.world_size),
        effort="best" if args.quick else "names",
    )


def boundaries(lengths: Sequence[int], seqlen: int) -> list[int]:
    """Return the boundaries of documents with repeated lengths; the last one may be shorter.

    Example:
        >>> boundaries((4, 1), 12)
        [0, 4, 5, 9, 10, 12]
    """
    cuts = accumulate(cycle(lengths), initial=0)
    return [*takewhile(lambda cut: cut < seqlen, cuts), seqlen]


def cluster_of(name: str | None, node_size: int | None, world_size: int) -> Cluster:
    """Return a built-in cluster, the cluster of a file, or by default this machine's cluster."""
    if name is None:
        is_known = torch.cuda.is_available() or os.environ.get(CLUSTER_VARIABLE)
        cluster = find_cluster(None, world_size) if is_known else builtin_cluster("H100")
    elif name.upper() in DEVICES:
        cluster = builtin_cluster(name.upper())
    elif os.path.isdir(name):
        raise ValueError(
            f"--cluster must not be a folder, got {name!r}: pass a file of ring-attn calibrate"
        )
    elif os.path.exists(name):
        cluster = load_cluster(name)
    else:
        known = ", ".join(DEVICES).lower()
        raise ValueError(f"--cluster must be one of {known}, or a file, got {shortened(name)}")
    if node_size is None:
        return cluster
    return replace(cluster, node_size=node_size)
