"""Finds the fastest configs of the kernels on one device: builds, checks and times them.

    ring-attn tune --json tune.json            on a GPU, in 10 minutes
    RING_ATTN_CONFIGS=tune.json torchrun ...   uses the file, one for all ranks
    RING_ATTN_CONFIGS=tune.json ring-attn bench kernel         compares
    ring-attn tune --device cpu                only tests the search

Searches the kinds of `kernels/configs.py`, the most valuable first, until --budget is spent: all
configs of `configs.search_space`, and on sm_90 of the forward in Gluon. The configs are

    built      by --jobs processes, which run each config once and so fill
               triton's cache; one that crashes loses only its own row
    checked    against float64 (`judge`); several runs are equal bit for bit
    timed      alternately within every repetition

A config that is wrong, or differs between two runs, is reported, never recommended. TFLOP/s count
the matrix products of a kernel: 2 forward, 4 for dk and dv, 3 for dq, 2 for decoding (one token
against all keys). The exit status is 1 if a frozen config is wrong.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import names_of, parse_size
from ring_attn.cli.options.bench import add_device_arguments

# Matrix products of a kernel, each of 2 x pairs x head_dim FLOPs.
PRODUCTS = {"fwd": 2, "dkdv": 4, "dq": 3, "decode": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = f"some of {','.join(PRODUCTS)} (default: all)"
    add("--kernels", type=names_of(PRODUCTS), default=",".join(PRODUCTS), help=names)
    rows = "rows {} mask (default: {}, on a CPU 128; --quick: a quarter)"
    add("--full-rows", type=parse_size, help=rows.format("without a", "16k"))
    add("--causal-rows", type=parse_size, help=rows.format("with a causal", "32k"))
    add(
        "--jobs",
        type=int,
        help="processes that compile; 0: this process only (default: one per core)",
    )
    add_device_arguments(parser)
