"""Time of our attention kernels on one device, compared with torch's and flash-attn's.

All implementations run in turn within every repetition, so that clock drift affects all alike; each
is checked against float64 before the timing. As in FlashAttention's papers, the batch is --tokens
(16k) / length, at least 1. Times are the device's, between events, with a cold L2 and the host
ahead; medians, p20 and p80 are over the repetitions. Unless --mode fwd, a forward saves tensors for
its backward. FLOPs are 4 x visible pairs x head_dim per head forward, 2.5 times that backward.

    ours           triton (on a CPU auto) as the whole attention: deterministic, a ring of one rank
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN
    flex           compiled flex_attention, with its own tiles
    flash-attn     flash_attn, where installed (flash-attn-3, flash-attn-4: interface, cute)

The exit status is 1 if a result of ours is wrong or a call of ours failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from rich.table import Table

from ring_attn.bench.cells import Cells, parse_device, parse_heads, table_of, title
from ring_attn.bench.implementations import IMPLEMENTATIONS, Problem
from ring_attn.bench.outputs import Outputs, add_outputs
from ring_attn.bench.timing import Sample, peak_tflops, quantiles
from ring_attn.tools.arguments import (
    format_size,
    names_of,
    new_table,
    parse_dtype,
    parse_size,
    parse_sizes,
    show,
)
from ring_attn.tools.launch import DEVICES

# The modes of the rows for each --mode, and the stages of a call in each mode.
MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}
STAGES = {"fwd": slice(0, 1), "bwd": slice(1, 2), "fwd_bwd": slice(0, 2)}


@dataclass(frozen=True)
class Setting:
    """The cells of a run, and the options of their measurement."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    tokens: int
    iters: int
    causal: tuple[bool, ...] = (True, False)
    mode: str = "fwd_bwd"
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    device: torch.device = torch.device("cpu")
    budget: float | None = None

    def problems(self) -> Iterator[Problem]:
        """Every cell; cells of one table are consecutive."""
        for (heads, kv_heads), head_dim, causal, seqlen in product(
            self.heads, self.head_dims, self.causal, self.seqlens
        ):
            shape = max(1, self.tokens // seqlen), seqlen, heads, kv_heads, head_dim
            yield Problem(*shape, causal, self.dtype, self.device)


FULL = Setting(
    seqlens=tuple(1024 << n for n in range(8)),
    head_dims=(128, 64, 256),
    heads=((32, 8), (64, 8)),
    dtype=torch.bfloat16,
    tokens=16384,
    iters=15,
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=(128,), heads=((32, 8),), iters=5)
ON_CPU = Setting((256, 512), (64,), ((4, 2),), torch.float32, 512, 3)
QUICK_ON_CPU = replace(ON_CPU, seqlens=(256,), iters=2)


@dataclass(frozen=True)
class Row:
    """Times of an implementation on a cell in a mode; None where there is no time.

    Attributes:
        peak_share: tflops / the peak rate, 0 to 1.
        host_ms: median of the host's time to enqueue forward (and backward).
        max_ratio: greatest error / bound of the results; above 1 is wrong.
        note: why there is no time, or what is wrong.
    """

    impl: str
    mode: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    peak_share: float | None = None
    host_ms: float | None = None
    max_ratio: float | None = None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lens = f"{format_size(FULL.seqlens[0])} to {format_size(FULL.seqlens[-1])}"
    add("--seqlen", type=parse_sizes, help=f"lengths, such as 1k,8k ({lens}, doubling)")
    add("--head-dim", type=parse_sizes, help="head dims (128,64,256)")
    add("--heads", type=parse_heads, help="query heads / kv heads, such as 32/8,64/8")
    add("--causal", action=argparse.BooleanOptionalAction, help="only one of them; default: both")
    add("--dtype", type=parse_dtype, help="dtype of the inputs (bfloat16; on a CPU float32)")
    add("--tokens", type=parse_size, help="tokens of a batch of shorter sequences (16k)")
    add("--mode", choices=tuple(MODES), default="fwd_bwd")
    names = f"comma-separated, some of {', '.join(IMPLEMENTATIONS)} (default: all)"
    add("--implementations", type=names_of(IMPLEMENTATIONS, least=1), help=names)
    add("--iters", type=parse_size, help=f"most repetitions of a cell ({FULL.iters})")
    add("--budget", type=float, metavar="SECONDS", help="start no cell after this time")
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, saves the JSON after each cell, prints the tables; 1 if one of ours failed."""
    bench = Bench(setting_of(args), Outputs.of(args))
    bench.run()
    return bench.finish([] if args.quiet else tables(bench.rows), bench.remarks())


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting from the options; defaults depend on --quick and the device."""
    device = parse_device(args.device)
    full, quick = (ON_CPU, QUICK_ON_CPU) if device.type == "cpu" else (FULL, QUICK)
    given = {
        "seqlens": args.seqlen, "head_dims": args.head_dim, "heads": args.heads,
        "dtype": args.dtype, "tokens": args.tokens, "iters": args.iters, "mode": args.mode,
        "causal": None if args.causal is None else (args.causal,),
        "implementations": args.implementations, "device": device, "budget": args.budget,
    }  # fmt: skip
    known = {name: x for name, x in given.items() if x is not None}
    return replace(quick if args.quick else full, **known)


class Bench(Cells[Setting, Row]):
    """Measures one cell after another, and saves the report after each."""

    def __init__(self, setting: Setting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        gpu = setting.device.type == "cuda"
        name = torch.cuda.get_device_name(setting.device) if gpu else ""
        self.peak = peak_tflops(name, setting.dtype)

    def remarks(self) -> list[str]:
        """Lines for below the tables: reasons, notes and peak; the last line counts cells."""
        lines = [f"{name}: {why}" for name, why in self.unavailable.items()] + notes(self.rows)
        if self.peak:
            lines.append(f"peak: {self.peak:.1f} TFLOP/s by the datasheet, dense")
        cells = {(*table_of(row), row.seqlen, row.impl) for row in self.rows if row.samples}
        counts = f"{len(cells)} cells measured in {self.seconds:.0f} s"
        return [*lines, f"{counts}, {len(self.failures)} failures"]

    def more(self) -> dict[str, Any]:
        """The peak rate, and why implementations cannot run here."""
        return {"peak_tflops": self.peak, "unavailable": self.unavailable}

    def row(self, name: str, problem: Problem, note: str) -> Row:
        sizes = (*table_of(problem), problem.seqlen, problem.batch)
        return Row(name, self.setting.mode, *sizes, note=note)

    def timed(
        self, row: Row, problem: Problem, ratio: float | None, samples: list[Sample]
    ) -> list[Row]:
        rows = []
        host_ms = quantiles([sample.host_ms for sample in samples])[1]
        for mode in MODES[self.setting.mode]:
            p20, median, p80 = quantiles([sum(sample.ms[STAGES[mode]]) for sample in samples])
            tflops = problem.flops(mode) / median / 1e9
            share = tflops / self.peak if self.peak else None
            rows.append(
                replace(
                    row, mode=mode, median_ms=median, p20_ms=p20, p80_ms=p80, samples=len(samples),
                    tflops=tflops, peak_share=share, host_ms=host_ms, max_ratio=ratio,
                )
            )  # fmt: skip
        return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table per number of heads, head dim and mask; a line per length and implementation."""
    all_tables: list[Table] = []
    for key in dict.fromkeys(map(table_of, rows)):
        of_table = [row for row in rows if table_of(row) == key]
        timed = {row.mode for row in of_table if row.samples}
        modes = [mode for mode in STAGES if mode in timed]
        figures = [name for mode in modes for name in (mode, "TFLOP/s")]
        table = new_table(
            f"{title(of_table[0], cell=False)}: ms (p20-p80), TFLOP/s (share of peak)",
            ("batch x n", ""),
            (*figures, "error/bound"),
        )
        for cell in dict.fromkeys((row.seqlen, row.batch, row.impl) for row in of_table):
            seqlen, batch, impl = cell
            of_cell = [r for r in of_table if (r.seqlen, r.batch, r.impl) == cell]
            by_mode = {row.mode: row for row in of_cell}
            first = next(iter(by_mode.values()))
            figures = [text for mode in modes for text in _figures(by_mode.get(mode))]
            if modes and not first.samples:
                figures[0] = first.note.partition(":")[0]
            table.add_row(
                f"{batch} x {format_size(seqlen)}", impl, *figures, show(first.max_ratio, ".2f")
            )
        all_tables.append(table)
    return all_tables


def notes(rows: Sequence[Row]) -> list[str]:
    """A line for each note, with the cells that it concerns."""
    cells: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.note:
            cells.setdefault((row.impl, row.note), {})[title(row)] = None
    return [f"{impl}: {note} ({'; '.join(where)})" for (impl, note), where in cells.items()]


def _figures(row: Row | None) -> list[str]:
    if row is None or row.median_ms is None:
        return ["", ""]
    share = "" if row.peak_share is None else f" ({row.peak_share:.0%})"
    ms, p20, p80 = (_ms(x) for x in (row.median_ms, row.p20_ms, row.p80_ms))
    return [f"{ms} ({p20}-{p80})", f"{show(row.tflops, '.3g')}{share}"]


def _ms(x: float | None) -> str:
    """Milliseconds with three decimals, or with four digits."""
    return show(x, ".3f" if x is None or x < 10.0 else ".2f" if x < 100.0 else ".1f")
