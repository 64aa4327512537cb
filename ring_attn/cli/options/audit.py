"""`ring-attn audit FILE:FUNCTION`: says what a training step does wrong on several ranks.

The function takes no arguments, and does what the training does for one rank: it makes a small
model from a seed, and a batch; it runs forward and backward, and sums gradients. It returns the
model, or (model, loss), or (model, loss, evaluation loss). It runs on each number of ranks, and in
one process as their twin, whose batch is all ranks' together.

    ring-attn audit train.py:step
    ring-attn audit train.py:step --world-size 2 4
    ring-attn audit train.py:step --tiny     models of transformers, 2 layers

The exit status is 1 if a result of the ranks differs from the twin's.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common, parse_size
from ring_attn.core.names import AUDITED_SIZES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("step", metavar="FILE:FUNCTION", help="the training step of a rank")
    sizes = " ".join(map(str, AUDITED_SIZES))
    add(
        "--world-size", nargs="+", type=parse_size, metavar="N",
        help=f"numbers of ranks (default: {sizes}; with --quick the first)",
    )  # fmt: skip
    add(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for a run (default: 120)"
    )
    threads = "CPU threads of each rank (default: cores / ranks)"
    add("--threads", type=parse_size, metavar="N", help=threads)
    add(
        "--tiny", action="store_true",
        help="shrink models of transformers to 2 layers, few heads and random weights",
    )  # fmt: skip
    add_common(parser)
