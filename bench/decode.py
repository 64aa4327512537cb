"""`ring-attn bench decode`: time of one query against a long cache, on one device."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from ring_attn.bench import cells
from ring_attn.bench.cells import CellSetting, run_cells
from ring_attn.cli.options.bench import SDPA_BACKENDS
from ring_attn.cli.options.bench_decode import HEADS, ITERS, SEQLENS

ON_GPU = CellSetting(
    seqlens=SEQLENS,
    batches=(1, 8),
    head_dims=(128,),
    heads=HEADS,
    dtype=torch.bfloat16,
    iters=ITERS,
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


def setting_of(args: argparse.Namespace) -> CellSetting:
    """The setting from the options; --quick has the first default length and batch only."""
    defaults = (ON_GPU, ON_CPU)
    if args.quick:
        gpu, cpu = (replace(x, seqlens=x.seqlens[:1], batches=x.batches[:1]) for x in defaults)
        defaults = (gpu, cpu)
    return cells.setting_of(args, *defaults)


def run(args: argparse.Namespace) -> int:
    return run_cells(args, setting_of(args))
