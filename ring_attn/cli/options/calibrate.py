"""Measure this machine for the simulator: attention, copies and messages, on all ranks at once.

    ring-attn calibrate --json machine.json    1, 2 and 4 ranks, one thread each
    ring-attn plan --cluster machine.json ...

All ranks work at the same time, so the figures include contention (cores, memory, the loopback).
Messages and copies go into new memory, as in a call; on a CPU its page faults may take longer than
the copy. `devices.Rate` is fitted to the times of tiles, `devices.Link` to the times of messages.
The table shows the largest errors of the fits.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common, parse_dtype, parse_size, parse_sizes
from ring_attn.core.names import DEVICES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-sizes", type=parse_sizes, help="comma-separated numbers of ranks (default: 1,2,4)")
    add("--heads", type=parse_size, default=8, help="heads of q, k and v (default: 8)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add("--dtype", type=parse_dtype, default="float32", help="of q, k and v (default: float32)")
    add("--backend", default="auto", help="as for ring_attention (default: auto)")
    add("--threads", type=parse_size, default=1, help="CPU threads of each rank (default: 1)")
    add(
        "--device",
        choices=DEVICES,
        help="where to run (default: cuda if there are enough GPUs)",
    )
    add_common(parser)
