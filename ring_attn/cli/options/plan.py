"""`ring-attn plan`: predicts how ranks would best share a call on a cluster, without running it.

    strategies    every strategy: times, bytes, exposed communication, memory
    steps         compute and transfers in each step of the best strategy
    --plot        the mask as ranks x ranks by step and kind, and a timeline

Times come from a simulation of the cluster, which is built in or was measured by
`ring-attn calibrate`. No process group and no GPU is needed.

    ring-attn plan --seqlen 1M --world-size 64 --kv-heads 8 --cluster h200
    ring-attn plan --seqlen 1M --world-size 64 --model config.json  a whole step
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_attn.cli.arguments import (
    add_common,
    add_switch,
    parse_dtype,
    parse_report,
    parse_size,
    parse_sizes,
)
from ring_attn.core.names import LAYOUTS, STRATEGIES

# Sizes without --model, of a layer as Llama 3 8B's.
HEADS, HEADDIM = 32, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=parse_size, required=True, help="global length, such as 1M")
    add("--world-size", type=parse_size, required=True, help="number of ranks")
    add("--batch", type=parse_size, default=1, help="sequences at a time (default: 1)")
    model = (
        "a config.json in Hugging Face's form, for heads, dims, layers and windows not given "
        "(default: no model)"
    )
    add("--model", type=Path, metavar="FILE", help=model)
    add("--layers", type=parse_size, metavar="N", help="layers, all alike (default: the model's)")
    hidden = "width of the model, for the memory between layers (default: the model's)"
    add("--hidden", type=parse_size, metavar="N", help=hidden)
    heads = f"default: the model's, or {HEADS}"
    add("--heads", dest="nheads", type=parse_size, metavar="N", help=heads)
    kv_heads = "default: the model's, or as many as heads"
    add("--kv-heads", dest="nheads_kv", type=parse_size, metavar="N", help=kv_heads)
    head_dim = f"default: the model's, or {HEADDIM}"
    add("--head-dim", dest="headdim", type=parse_size, metavar="N", help=head_dim)
    dim_v = "head dim of v (default: as of q and k)"
    add("--head-dim-v", dest="headdim_v", type=parse_size, metavar="N", help=dim_v)
    add(
        "--dtype",
        type=parse_dtype,
        default="bfloat16",
        help="of q, k and v (default: bfloat16)",
    )
    add_switch(parser, "--causal", "queries see no later keys")
    add(
        "--window", dest="window_size", type=parse_window, default=(-1, -1), metavar="LEFT,RIGHT",
        help="sizes such as 4k,0; -1 is open (default: --window=-1,-1)",
    )  # fmt: skip
    documents = (
        "lengths of documents, repeated until the sequence is full: 8k, or 1k,30k,500 "
        "(default: one)"
    )
    add("--documents", type=parse_sizes, metavar="LENGTHS", help=documents)
    layouts = ("auto", *LAYOUTS, "balanced")
    add("--layout", choices=layouts, default="auto", help="of all ranks (default: auto, the best)")
    names = f"consider only some of {', '.join(STRATEGIES)} (default: all)"
    add("--strategy", dest="strategies", nargs="+", metavar="NAME", help=names)
    load = (
        "a Python file whose strategies are registered first, as examples/own_strategy.py "
        "(default: no file)"
    )
    add("--load", type=Path, metavar="FILE", help=load)
    cluster = (
        "h100, h200, a100, b200, or a file of ring-attn calibrate (default: the file "
        "RING_ATTN_CLUSTER, or this machine's GPU; h100 without a GPU)"
    )
    add("--cluster", metavar="NAME|FILE", help=cluster)
    add("--node-size", type=parse_size, help="devices of a node (default: 8)")
    same_bits = "consider only strategies with the same bits at every world size"
    add_switch(parser, "--same-bits", same_bits, default=None)
    add_switch(parser, "--backward", "plan the backward too")
    exact = "simulate every rank, up to 256; else some of many equal ranks stand for all"
    add("--exact", action="store_true", help=exact)
    memory = "memory of a rank, such as 80G (default: its device's)"
    add("--memory", dest="memory_bytes", type=parse_size, metavar="BYTES", help=memory)
    check = "check the best strategy's programs of all ranks against each other, draw rank 0's"
    add("--check", action="store_true", help=check)
    add("--verbose", action="store_true", help="also list what was left out, and why")
    add(
        "--plot",
        metavar="PATH",
        type=parse_report,
        help="draw the pictures as .png or .svg (default: none)",
    )
    add_common(parser)


def parse_window(text: str) -> tuple[int, int]:
    """ "4k,0" -> (4096, 0); -1 is unbounded."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window: give LEFT,RIGHT such as 4k,0")
    sizes = [int(p) if p.strip() in ("-1", "0") else parse_size(p) for p in parts]
    return sizes[0], sizes[1]
