"""Time of our attention kernels on one device, compared with torch's and flash-attn's.

All implementations run in turn within every repetition, so that clock drift affects all alike; each
is checked against float64 before the timing. As in FlashAttention's papers, the batch is --tokens
(16k) / length, at least 1. Times are the device's, between events, with a cold L2 and the host
ahead; medians, p20 and p80 are over the repetitions. Unless --mode fwd, a forward saves tensors for
its backward. FLOPs are 4 x visible pairs x head_dim per head forward, 2.5 times that backward.

    ours           triton (on a CPU auto) as the whole attention: deterministic, a ring of one rank
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN
    flash-attn     flash_attn, where installed (flash-attn-3, flash-attn-4: interface, cute)

The exit status is 1 if a result of ours is wrong or a call of ours failed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from ring_attn.bench import cells
from ring_attn.bench.cells import MODES, CellSetting, add_cell_arguments, run_cells
from ring_attn.bench.implementations import IMPLEMENTATIONS
from ring_attn.cli.arguments import names_of, parse_size

FULL = CellSetting(
    seqlens=tuple(1024 << n for n in range(8)),
    head_dims=(128, 64, 256),
    heads=((32, 8), (64, 8)),
    dtype=torch.bfloat16,
    tokens=16384,
    iters=15,
    backend="triton",
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=(128,), heads=((32, 8),), iters=5)
ON_CPU = CellSetting((256, 512), (64,), ((4, 2),), torch.float32, tokens=512, iters=3)
QUICK_ON_CPU = replace(ON_CPU, seqlens=(256,), iters=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    both = argparse.BooleanOptionalAction
    add("--causal", dest="one_mask", action=both, help="only one of them; default: both")
    add("--tokens", type=parse_size, help="tokens of a batch of shorter sequences (default: 16k)")
    mode = "forward alone, or backward too (default: fwd_bwd)"
    add("--mode", choices=tuple(MODES), default="fwd_bwd", help=mode)
    names = f"comma-separated, some of {', '.join(IMPLEMENTATIONS)} (default: all)"
    add("--implementations", type=names_of(IMPLEMENTATIONS, least=1), help=names)
    add_cell_arguments(parser, FULL)


def setting_of(args: argparse.Namespace) -> CellSetting:
    """The setting from the options; defaults depend on --quick and the device."""
    gpu, cpu = (QUICK, QUICK_ON_CPU) if args.quick else (FULL, ON_CPU)
    setting = cells.setting_of(args, gpu, cpu)
    return setting if args.one_mask is None else replace(setting, causal=(args.one_mask,))


def run(args: argparse.Namespace) -> int:
    """Measures, saves the JSON after each cell, prints the tables; 1 if one of ours failed."""
    return run_cells(args, setting_of(args))
