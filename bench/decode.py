"""Time of decoding on one device: one query per sequence and a long cache of keys and values.

Decoding reads the cache once and computes almost nothing, so memory bandwidth limits it. GB/s is
the bytes of K and V / time; its peak is the rate at which a copy within the device reads and
writes. All run in turn within every repetition, with a cold L2.

    parts          --backend: the keys in parallel parts, as in `tree_decode`
    whole          the same backend as a forward: a program per query head reads all keys
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN

Each result is compared with float64. The exit status is 1 if one of ours is wrong.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from ring_attn.bench import cells
from ring_attn.bench.cells import CellSetting, add_cell_arguments, run_cells
from ring_attn.bench.implementations import SDPA_BACKENDS
from ring_attn.cli.arguments import parse_sizes

ON_GPU = CellSetting(
    seqlens=(8192, 32768, 131072, 1 << 20),
    batches=(1, 8),
    head_dims=(128,),
    heads=((32, 8),),
    dtype=torch.bfloat16,
    iters=15,
    causal=(False,),
    mode="fwd",
    implementations=("parts", "whole", *SDPA_BACKENDS),
    backend="triton",
    decoding=True,
)
ON_CPU = replace(
    ON_GPU, seqlens=(300, 600), batches=(1,), head_dims=(16,), heads=((4, 2),),
    dtype=torch.float32, backend="auto",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--batch",
        dest="batches",
        type=parse_sizes,
        help="numbers of sequences (default: 1,8; on a CPU 1)",
    )
    add("--backend", help="our backend (default: triton; on a CPU auto)")
    add_cell_arguments(parser, ON_GPU)


def setting_of(args: argparse.Namespace) -> CellSetting:
    """The setting from the options; --quick has the first default length and batch only."""
    defaults = (ON_GPU, ON_CPU)
    if args.quick:
        gpu, cpu = (replace(x, seqlens=x.seqlens[:1], batches=x.batches[:1]) for x in defaults)
        defaults = (gpu, cpu)
    return cells.setting_of(args, *defaults)


def run(args: argparse.Namespace) -> int:
    return run_cells(args, setting_of(args))
