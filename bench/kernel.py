"""`ring-attn bench kernel`: time of our attention kernels on one device, beside other packages'."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from ring_attn.bench import cells
from ring_attn.bench.cells import CellSetting, run_cells
from ring_attn.cli.options.bench_kernel import HEADS, ITERS, SEQLENS

FULL = CellSetting(
    seqlens=SEQLENS,
    head_dims=(128, 64, 256),
    heads=HEADS,
    dtype=torch.bfloat16,
    tokens=16384,
    iters=ITERS,
    backend="triton",
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=(128,), heads=((32, 8),), iters=5)
ON_CPU = CellSetting((256, 512), (64,), ((4, 2),), torch.float32, tokens=512, iters=3)
QUICK_ON_CPU = replace(ON_CPU, seqlens=(256,), iters=2)


def setting_of(args: argparse.Namespace) -> CellSetting:
    """The setting from the options; defaults depend on --quick and the device."""
    gpu, cpu = (QUICK, QUICK_ON_CPU) if args.quick else (FULL, ON_CPU)
    setting = cells.setting_of(args, gpu, cpu)
    return setting if args.one_mask is None else replace(setting, causal=(args.one_mask,))


def run(args: argparse.Namespace) -> int:
    """Measures, saves the JSON after each cell, prints the tables; 1 if one of ours failed."""
    return run_cells(args, setting_of(args))
