"""Times every fixed strategy over many shapes, and compares auto's choice with the best of them.

All strategies of a shape alternate within every repetition, so that drift of the machine affects
all alike. A time is the slowest rank's for forward and backward; medians are over the repetitions.
Auto chooses one of the strategies, from a calibration of this machine only. Of the shapes "long
tail", one batch of documents in three layouts, the times tell what `ring_attn.pack` gains:

    packed         documents whole on one rank if they fit
    zigzag         chunks r and 2P-1-r of the packed sequence, wherever documents begin
    per document   chunks r and 2P-1-r of every document

    ring-attn calibrate --json machine.json
    ring-attn bench strategies --cluster machine.json --json strategies.json
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import parse_input, parse_size, parse_sizes
from ring_attn.cli.options.bench import add_outputs

# A shape is repeated for SECONDS, from ITERS to MAX_ITERS times: short calls vary most.
ITERS, MAX_ITERS, SECONDS = 7, 35, 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--world-sizes",
        type=parse_sizes,
        default=(2, 4),
        help="numbers of ranks (default: 2,4)",
    )
    add(
        "--shapes",
        help="comma-separated words; only shapes with one of them in their names (default: all)",
    )
    iters = f"repetitions (default: for {SECONDS:g} s, {ITERS} to {MAX_ITERS})"
    add("--iters", type=parse_size, help=iters)
    cluster = "a file of ring-attn calibrate (default: calibrates first)"
    add("--cluster", metavar="FILE", type=parse_input, help=cluster)
    add_outputs(parser)
