"""`ring-attn bench kernel`: time of our attention kernels on one device, next to torch's.

`Cells` checks and times implementations of attention on one problem after another.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.bench.implementations import Implementation, Ours, Shape, TorchFlash, reason
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.report import Report
from ring_attn.bench.timing import (
    STAGES,
    TimedCall,
    Timing,
    Watch,
    free_memory,
    quantiles,
    time_in_turn,
)
from ring_attn.cli.arguments import format_size, new_table, show
from ring_attn.cli.options import KERNEL_HEADS, KERNEL_ITERS, KERNEL_SEQLENS
from ring_attn.testing import Inputs

IMPLEMENTATIONS = ("ours", "torch-flash")

# The time limit of a cell's repetitions.
CELL_SECONDS = 4.0

# Errors of ours that do not fail the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class CellSetting:
    """The cells of a run, and the options of their measurement."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    iters: int
    tokens: int  # number of tokens of a batch of shorter sequences
    device: torch.device = torch.device("cpu")
    budget: float | None = None

    def problems(self) -> Iterator[Shape]:
        """Yield the problem of each cell."""
        for (heads, kv_heads), head_dim, causal, seqlen in product(
            self.heads, self.head_dims, (True, False), self.seqlens
        ):
            yield Shape(
                batch=max(1, self.tokens // seqlen),
                seqlen=seqlen,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=causal,
                dtype=self.dtype,
                device=self.device,
            )


@dataclass(frozen=True)
class CellRow:
    """Times of an implementation on a cell in a mode; None where there is no time.

    Attributes:
        rate: TFLOP/s.
        max_ratio: greatest error / bound of the results; above 1 a result is wrong.
        note: the reason why there is no time, or the wrong result.
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
    rate: float | None = None
    max_ratio: float | None = None
    note: str = ""


class Cells(Report[CellSetting, CellRow]):
    """Measures one cell after another, and saves the report after each."""

    def __init__(self, setting: CellSetting, path: Path | None = None) -> None:
        super().__init__(setting, path, budget=setting.budget)
        self._watch = Watch(setting.device)

    def run(self) -> None:
        """Measure cells until the budget is spent."""
        for problem in self.setting.problems():
            if self.left() > 0.0:
                self.rows += self._measured(problem)
            else:
                note = f"not measured: beyond the budget of {self.setting.budget:g} s"
                self.rows += [row_of(name, problem, note) for name in IMPLEMENTATIONS]
            self.save()

    def remarks(self) -> list[str]:
        """Return the lines below the table: notes, the time, and the number of failures."""
        lines = [f"{row.impl}: {row.note} ({title(row)})" for row in self.rows if row.note]
        return [*lines, f"{self.seconds:.0f} s, {len(self.failures)} failures"]

    def _measured(self, problem: Shape) -> list[CellRow]:
        """Build, check, and then time all implementations that can run a cell."""
        free_memory(self.setting.device)
        rows = {name: row_of(name, problem) for name in IMPLEMENTATIONS}
        calls = dict[str, TimedCall]()

        def failed(name: str, error: Exception) -> None:
            rows[name] = replace(rows[name], note=f"cannot run: {reason(error)}")
            # Ours may refuse a cell or lack memory; other errors are failures.
            if name == "ours" and not isinstance(error, REFUSALS):
                traceback.print_exception(error)
                self.failures.append(f"ours, {title(problem)}: {reason(error)}")
            free_memory(self.setting.device)

        judge = OracleJudge(problem)
        for name in IMPLEMENTATIONS:
            build = partial(make, name)
            try:
                ratio, wrong = judge.verdict(build)
                attention = build(problem, problem.data())
            except Exception as error:
                failed(name, error)
                continue
            if wrong and name == "ours":
                self.failures.append(f"ours, {title(problem)}: {wrong}")
            note = f"wrong: {wrong}" if wrong else ""
            rows[name] = replace(rows[name], max_ratio=ratio, note=note)
            calls[name] = TimedCall([attention.forward, attention.backward], attention.release)
        del judge
        samples = time_in_turn(
            calls, self._watch, self.setting.iters, seconds=CELL_SECONDS, failed=failed
        )
        timed = (timed_rows(row, problem, samples.get(name, [])) for name, row in rows.items())
        return [row for of_name in timed for row in of_name]


def make(name: str, problem: Shape, data: Inputs) -> Implementation:
    """Return one of IMPLEMENTATIONS for the data of a problem."""
    if name == "torch-flash":
        return TorchFlash(problem, data)
    # On a CPU, triton would run in its interpreter.
    backend = "auto" if problem.device.type == "cpu" else "triton"
    chosen = choose_backend(problem.spec, backend, Purpose(backward=True)).name
    return Ours(problem, data, get_backend(chosen))


def row_of(impl: str, problem: Shape, note: str = "") -> CellRow:
    """Return the row of an implementation without times."""
    return CellRow(
        impl=impl,
        mode="fwd_bwd",
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        causal=problem.causal,
        seqlen=problem.seqlen,
        batch=problem.batch,
        note=note,
    )


def timed_rows(row: CellRow, problem: Shape, samples: Sequence[Timing]) -> list[CellRow]:
    """Return a row for each mode, or only `row` if there are no samples."""
    rows = []
    for mode, stages in STAGES.items() if samples else ():
        p20, median, p80 = quantiles([sum(sample.ms[stages]) for sample in samples])
        rows.append(
            replace(
                row,
                mode=mode,
                median_ms=median,
                p20_ms=p20,
                p80_ms=p80,
                samples=len(samples),
                rate=problem.flops(mode) * 1e-9 / median,
            )
        )
    return rows or [row]


# -- the table


def title(what: Shape | CellRow) -> str:
    """Return the name of a problem or of the problem of a row."""
    heads = f"{what.heads}/{what.kv_heads} heads of {what.head_dim}"
    mask = "causal" if what.causal else "full"
    return f"{heads}, {mask}, {what.batch} x {format_size(what.seqlen)}"


def table(rows: Sequence[CellRow]) -> Table:
    """Return the table with a line for each cell, implementation and mode."""
    made = new_table("medians", ("cell", "", "mode"), ("ms", "TFLOP/s", "error/bound"))
    for row in rows:
        made.add_row(
            title(row),
            row.impl,
            row.mode,
            show(row.median_ms, ".4g"),
            show(row.rate, ".3g"),
            show(row.max_ratio, ".2f"),
        )
    return made


# -- options, which have the names of the fields of `CellSetting`


FULL = CellSetting(
    seqlens=KERNEL_SEQLENS,
    head_dims=(128, 64, 256),
    heads=KERNEL_HEADS,
    dtype=torch.bfloat16,
    tokens=16384,
    iters=KERNEL_ITERS,
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=(128,), heads=((32, 8),), iters=5)
ON_CPU = CellSetting(
    seqlens=(256, 512),
    head_dims=(64,),
    heads=((4, 2),),
    dtype=torch.float32,
    tokens=512,
    iters=3,
)


def setting_of(args: argparse.Namespace) -> CellSetting:
    """Return the setting of the command's options; others have the default of the device."""
    device = parse_device(args.device)
    on_gpu = QUICK if args.quick else FULL
    default = ON_CPU if device.type == "cpu" else on_gpu
    names = [field.name for field in fields(CellSetting)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return replace(default, **{**given, "device": device})


def parse_device(name: str | None) -> torch.device:
    """Return the device of a name; None means the GPU if there is one, otherwise the CPU."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: this machine has no GPU that torch can use; pass --device cpu"
        )
    return device


def run(args: argparse.Namespace) -> int:
    """Measure, save the JSON after each cell, print the tables; return 1 if one of ours failed."""
    bench = Cells(setting_of(args), args.json)
    bench.run()
    status = bench.finish([] if args.quiet else [table(bench.rows)], bench.remarks())
    bench.draw(args.plot)
    return status
