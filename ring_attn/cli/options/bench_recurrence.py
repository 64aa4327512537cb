"""Time of recurrent layers on split rows, against the layer's own time at as many rows.

Each rank times the layer's own function (`alone`: its rows as a whole sequence) and the split one
in turn, in one run; a time is the slowest rank's. The functions are transformers' torch code.

    ring-attn bench recurrence --seqlen 8k --world-size 2 --json recurrence.json
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common, format_size, parse_size

SEQLEN, ITERS = 8192, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=parse_size, help=f"global length (default: {format_size(SEQLEN)})")
    add("--world-size", type=parse_size, default=2, help="number of ranks (default: 2)")
    add("--iters", type=parse_size, help=f"repetitions (default: {ITERS})")
    add_common(parser)
