"""`ring-attn verify`: compares ring attention on this machine with dense attention in float64.

A case is one call: strategy, backend, layout, mask, dtype, heads, length, softcap and sinks. Each
rank computes its shard; rank 0 checks out, lse and every gradient against the bound of
`ring_attn.testing`, which follows from plain PyTorch's error in the same dtype. The figures are
error / bound: above 1 a case fails. All buffers start as NaN.

    ring-attn verify                          a sample of the table, in a minute
    ring-attn verify --all --world-size 3 --strategy ring hybrid
    torchrun --nproc-per-node 4 -m ring_attn verify

A sample has every strategy with every layout, mask, backend and dtype; `--seed` draws another one.
The exit status is 1 if a case failed or none passed. Cases that a backend refuses are listed with
the reason; they neither fail nor pass.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common, parse_size
from ring_attn.core.names import DEVICES, TESTED_LAYOUTS, TESTED_STRATEGIES

DEFAULT_WORLD_SIZE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--world-size", type=parse_size, metavar="N",
        help=f"ranks to start (default: {DEFAULT_WORLD_SIZE}, or as many as torchrun started)",
    )  # fmt: skip
    add(
        "--strategy", nargs="+", metavar="NAME", choices=(*TESTED_STRATEGIES, "all"),
        default=["all"], help=f"some of {', '.join(TESTED_STRATEGIES)} (default: all)",
    )  # fmt: skip
    add("--backend", nargs="+", metavar="NAME", help="some by name (default: all that can run)")
    layouts = f"some of {', '.join(TESTED_LAYOUTS)} (default: all)"
    add("--layout", nargs="+", choices=TESTED_LAYOUTS, metavar="NAME", help=layouts)
    add(
        "--all",
        action="store_true",
        help="every case of the table; a sample says how long they take",
    )
    add("--seed", type=int, metavar="N", help="of the sample (default: drawn, and printed)")
    add("--device", choices=DEVICES, help="default: cuda if every rank can have a GPU")
    add(
        "--threads",
        type=parse_size,
        metavar="N",
        help="CPU threads of each rank (default: cores / ranks)",
    )
    add_common(parser)
