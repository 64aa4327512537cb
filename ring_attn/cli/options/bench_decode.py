"""Time of decoding on one device: one query per sequence and a long cache of keys and values.

Decoding reads the cache once and computes almost nothing, so memory bandwidth limits it. GB/s is
the bytes of K and V / time; its peak is the rate at which a copy within the device reads and
writes. All alternate within every repetition, with a cold L2.

    parts          --backend: the keys in parallel parts, as in `tree_decode`
    whole          the same backend as a forward: a program per query head reads all keys
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN

Each result is compared with float64. The exit status is 1 if one of ours is wrong.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import parse_sizes
from ring_attn.cli.options.bench import add_cell_arguments

# On a GPU.
SEQLENS, HEADS, ITERS = (8192, 32768, 131072, 1 << 20), ((32, 8),), 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--batch",
        dest="batches",
        type=parse_sizes,
        help="numbers of sequences (default: 1,8; on a CPU 1)",
    )
    add("--backend", help="our backend (default: triton; on a CPU auto)")
    add_cell_arguments(parser, SEQLENS, HEADS, ITERS)
