"""Growth of attention's time with the length and the number of ranks, compared with the theory.

Measures every length on every number of ranks like `ring-attn bench ring`, and fits exponents to
the medians. In theory dense attention takes time ~ seqlen^2, and ranks that share it evenly take
~ ranks^-1, if each has its own core or GPU.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from itertools import product

from ring_attn.bench import ring
from ring_attn.bench.outputs import Outputs
from ring_attn.bench.report import Report, new_table, show
from ring_attn.bench.ring_implementations import Setting
from ring_attn.tools.arguments import parse_sizes
from ring_attn.tools.launch import run_ranks

SEQLENS, QUICK_SEQLENS = (1024, 2048, 4096, 8192), (256, 512)
WORLD_SIZES = (1, 2)
QUICK_ITERS = 3


@dataclass(frozen=True)
class Row:
    """Times of an implementation at a length on some ranks."""

    impl: str
    mode: str
    world_size: int
    seqlen: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    max_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Sweep:
    """Lengths, numbers of ranks, and the setting that all measurements share."""

    seqlens: tuple[int, ...]
    world_sizes: tuple[int, ...]
    each: Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlens", type=parse_sizes, help="1k,2k,4k,8k; quick 256,512")
    parser.add_argument("--world-sizes", type=parse_sizes, default=WORLD_SIZES, help="1,2")
    ring.add_arguments(parser, swept=True)


def run(args: argparse.Namespace) -> int:
    """Measures, prints times and exponents; 1 if a result is wrong.

    Raises:
        ValueError: the process runs under torchrun.
    """
    if "RANK" in os.environ:
        raise ValueError(
            "bench growth starts several numbers of ranks in turn, and torchrun has started "
            f"{os.environ.get('WORLD_SIZE')}: run it without torchrun, or `bench ring` with it"
        )
    seqlens = args.seqlens or (QUICK_SEQLENS if args.quick else SEQLENS)
    args.seqlen, args.world_size = seqlens[0], args.world_sizes[0]
    args.iters = args.iters or (QUICK_ITERS if args.quick else None)
    setting = ring.setting_of(args)
    sweep = Sweep(tuple(sorted(seqlens)), tuple(sorted(args.world_sizes)), setting)
    bench = Report[Sweep, Row](sweep, Outputs.of(args))
    measure(bench, device=args.device)
    bench.save(last=True)
    table = new_table("times", ("impl", "mode"), ("ranks", "seqlen", "ms", "p20 .. p80"), "")
    for row in bench.rows:
        spread = f"{show(row.p20_ms, '.2f')} .. {show(row.p80_ms, '.2f')}"
        table.add_row(
            row.impl, row.mode, str(row.world_size), str(row.seqlen), show(row.median_ms, ".2f"),
            "" if row.median_ms is None else spread, row.note,
        )  # fmt: skip
    return bench.finish([] if args.quiet else [table], [])


def measure(bench: Report[Sweep, Row], *, device: str | None) -> None:
    """Adds the rows of every length on every number of ranks, short ones first."""
    sweep = bench.setting
    total = sum(n * n for n in sweep.seqlens) * len(sweep.world_sizes)
    with bench.progress(total) as begin:
        for seqlen, world_size in product(sweep.seqlens, sweep.world_sizes):
            setting = replace(sweep.each, seqlen=seqlen, world_size=world_size)
            begin(f"{seqlen} rows on {world_size} ranks", seqlen * seqlen)
            of_ranks = run_ranks(
                ring.measure, world_size, setting, threads=setting.threads, device=device
            )
            rows, failures = of_ranks[0]
            bench.rows += [
                Row(
                    row.impl, row.mode, world_size, seqlen, row.median_ms, row.p20_ms, row.p80_ms,
                    row.max_error, row.note,
                )
                for row in rows
                if row.mode != "step_overhead"
            ]  # fmt: skip
            bench.failures += [f"{seqlen} rows on {world_size} ranks: {why}" for why in failures]
            bench.save()
