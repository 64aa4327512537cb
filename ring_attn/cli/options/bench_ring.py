"""Time, waits, bytes and memory of a ring, compared with dense attention and torch's own ring.

All implementations alternate within every repetition, so that drift of the machine affects all
alike. A time is the slowest rank's; medians, p20 and p80 are over the repetitions. `wait_ms` is the
host's time in waits for transfers, `peak_bytes` the most bytes that a call holds beyond its inputs,
`max_error` the greatest difference of out, dq, dk, dv from attention in float64.

    ours             ring_attn.ring_attention on the ranks
    dense            torch's, in one process with all the ranks' threads
    torch-template   torch's private ring and its backward on the same ranks

Several lengths or numbers of ranks (--seqlen 1k,2k,4k --world-size 1,2) are measured one after
another.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import (
    add_common,
    add_switch,
    names_of,
    parse_dtype,
    parse_size,
    parse_sizes,
)
from ring_attn.cli.options.bench import MODES
from ring_attn.core.names import DEVICES, LAYOUTS

SEQLEN, ITERS = 8192, 9
BASELINES = ("dense", "torch-template")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-size", type=parse_sizes, default=(2,), help="numbers of ranks (default: 2)")
    add("--seqlen", type=parse_sizes, help=f"whole lengths (default: {SEQLEN})")
    add("--heads", type=parse_size, default=8, help="heads of q (default: 8)")
    add("--kv-heads", type=parse_size, help="heads of k and v (default: as many as --heads)")
    add("--head-dim", type=parse_size, default=64, help="head dim of q, k and v (default: 64)")
    add("--dtype", type=parse_dtype, default="float32", help="default: float32")
    add_switch(parser, "--causal", "queries see no later keys")
    add("--layout", choices=LAYOUTS, default="zigzag", help="how rows are split (default: zigzag)")
    mode = "forward alone, or backward too (default: fwd_bwd)"
    add("--mode", choices=MODES, default="fwd_bwd", help=mode)
    add("--threads", type=parse_size, default=1, help="CPU threads of each rank (default: 1)")
    add("--device", choices=DEVICES, help="default: cuda if every rank can have a GPU")
    add("--iters", type=parse_size, help=f"timed repetitions (default: {ITERS})")
    names = f"comma-separated, some of {', '.join(BASELINES)} (default: all); empty for none"
    add("--baseline", type=names_of(BASELINES), default=",".join(BASELINES), help=names)
    add_common(parser)
