"""Time of the attention kernels on one device, against torch's and flash-attn's, and of the ring.

Within every repetition all implementations run in turn, so that drift of the clocks hits them
alike; each is checked against float64 before it is timed. The batch keeps the number of tokens at
--tokens (16k) up to that length, and is 1 beyond, as in FlashAttention's papers. Times are those of
the device between events, with a cold L2 and the host ahead; medians, p20 and p80 over the
repetitions. A forward keeps what its backward needs, unless --mode fwd. FLOPs are 4 x pairs x
head_dim a head forward and 2.5 times that backward, by the exact number of visible pairs.

    ours           triton (on a CPU auto) as the whole attention: deterministic, a ring of one rank
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN
    flex           compiled flex_attention, with its own tiles
    flash-attn     flash_attn, where installed (flash-attn-3, flash-attn-4: interface, cute)

Exit status 1 where a result of ours is wrong or a call of ours failed.
"""

from __future__ import annotations

import argparse
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from rich.table import Table

from ring_attn.bench.implementations import (
    FLASH_PACKAGES,
    IMPLEMENTATIONS,
    Attention,
    Data,
    Problem,
    forget_compiled,
    make,
    reason,
    unavailable,
)
from ring_attn.bench.judge import Judge
from ring_attn.bench.one_device import parse_device, parse_heads
from ring_attn.bench.outputs import Outputs, add_outputs
from ring_attn.bench.report import Report, new_table, show
from ring_attn.bench.timing import (
    Call,
    Sample,
    free_memory,
    peak_tflops,
    quantiles,
    time_in_turn,
    watch_for,
)
from ring_attn.testing import Verdict
from ring_attn.tools.arguments import (
    format_size,
    parse_dtype,
    parse_size,
    parse_sizes,
    setting_from,
)
from ring_attn.tools.launch import DEVICES

# What is measured in each mode, and the stages of a call that it spans.
MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}
STAGES = {"fwd": slice(0, 1), "bwd": slice(1, 2), "fwd_bwd": slice(0, 2)}

DEFAULT = ("ours", "torch-flash", "cudnn", "flex", *FLASH_PACKAGES)

# A cell's repetitions end early once they have taken so long.
CELL_SECONDS = 4.0

# What ours may raise without failing the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Default sizes of a run."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    tokens: int
    iters: int


FULL = Sizes(
    seqlens=tuple(1024 << n for n in range(8)),
    head_dims=(128, 64, 256),
    heads=((32, 8), (64, 8)),
    dtype=torch.bfloat16,
    tokens=16384,
    iters=15,
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=(128,), heads=((32, 8),), iters=5)
ON_CPU = Sizes((256, 512), (64,), ((4, 2),), torch.float32, 512, 3)
QUICK_ON_CPU = replace(ON_CPU, seqlens=(256,), iters=2)


@dataclass(frozen=True)
class Setting:
    """The cells of a run, and how they are measured."""

    sizes: Sizes
    causal: tuple[bool, ...]
    mode: str
    implementations: tuple[str, ...]
    device: torch.device
    budget: float | None

    def problems(self) -> Iterator[Problem]:
        """Every cell, those of one table together."""
        sizes = self.sizes
        for heads, kv_heads in sizes.heads:
            for head_dim in sizes.head_dims:
                for causal in self.causal:
                    for seqlen in sizes.seqlens:
                        batch = max(1, sizes.tokens // seqlen)
                        yield Problem(
                            batch, seqlen, heads, kv_heads, head_dim, causal, sizes.dtype,
                            self.device,
                        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Times of an implementation on a cell in a mode; None where there is no time.

    Attributes:
        peak_share: tflops over the peak rate, 0 to 1.
        host_ms: median of the host's time to enqueue forward (and backward).
        max_ratio: greatest error / bound of its results; above 1 is wrong.
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

    @property
    def table(self) -> tuple[int, int, int, bool]:
        """Key of the table that shows this row."""
        return self.heads, self.kv_heads, self.head_dim, self.causal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lens = f"{format_size(FULL.seqlens[0])} to {format_size(FULL.seqlens[-1])}"
    add("--seqlen", type=parse_sizes, help=f"lengths, such as 1k,8k ({lens}, doubling)")
    add("--head-dim", type=parse_sizes, help="head dims (128,64,256)")
    add("--heads", type=parse_heads, help="query heads / kv heads, such as 32/8,64/8")
    add("--causal", action=argparse.BooleanOptionalAction, help="one of them alone; both if absent")
    add("--dtype", type=parse_dtype, help="of the inputs (bfloat16; on a CPU float32)")
    add("--tokens", type=parse_size, help="of a batch, up to that length (16k)")
    add("--mode", choices=tuple(MODES), default="fwd_bwd")
    add(
        "--implementations",
        default=",".join(DEFAULT),
        help=f"comma-separated, of {', '.join(IMPLEMENTATIONS)}",
    )
    add("--iters", type=parse_size, help=f"most repetitions of a cell ({FULL.iters})")
    add("--budget", type=float, metavar="SECONDS", help="start no cell later")
    add("--device", choices=DEVICES, help="default: cuda where there is one")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the JSON as it goes, prints the tables; 1 if one of ours failed."""
    bench = Bench(setting_of(args), Outputs.of(args))
    bench.run()
    return bench.finish([] if args.quiet else tables(bench.rows), bench.remarks())


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting that the options describe; defaults depend on --quick and the device."""
    device = parse_device(args.device)
    names = tuple(dict.fromkeys(name for name in args.implementations.split(",") if name))
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"--implementations must be of {list(IMPLEMENTATIONS)}, got {name!r}")
    if not names:
        raise ValueError(f"--implementations needs at least one of {list(IMPLEMENTATIONS)}")
    full, quick = (ON_CPU, QUICK_ON_CPU) if device.type == "cpu" else (FULL, QUICK)
    base = quick if args.quick else full
    sizes = Sizes(
        seqlens=args.seqlen or base.seqlens,
        head_dims=args.head_dim or base.head_dims,
        heads=args.heads or base.heads,
        dtype=args.dtype or base.dtype,
        tokens=args.tokens or base.tokens,
        iters=args.iters or base.iters,
    )
    causal = (True, False) if args.causal is None else (args.causal,)
    return setting_from(
        Setting, args, sizes=sizes, causal=causal, implementations=names, device=device
    )


@dataclass
class Tried:
    """The progress of an implementation on a cell."""

    note: str = ""
    attention: Attention | None = None
    ratio: float | None = None


class Bench(Report[Setting, Row]):
    """Measures cell by cell, and saves the report after each."""

    def __init__(self, setting: Setting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        self.unavailable = {
            name: why
            for name in setting.implementations
            if (why := unavailable(name, setting.device)) is not None
        }
        self._names = [name for name in setting.implementations if name not in self.unavailable]
        self._backward = setting.mode != "fwd"
        self._watch = watch_for(setting.device)
        self._judged: set[tuple[object, ...]] = set()
        gpu = setting.device.type == "cuda"
        self.backend = "triton" if gpu else "auto"
        name = torch.cuda.get_device_name(setting.device) if gpu else ""
        self.peak = peak_tflops(name, setting.sizes.dtype)

    def run(self) -> None:
        """Measures every cell that the budget has time for."""
        problems = list(self.setting.problems()) if self._names else []
        with self.progress(len(problems)) as begin:
            for problem in problems:
                if self.left() <= 0.0:
                    note = f"not measured: beyond the budget of {self.setting.budget:g} s"
                    self.rows += [self._row(name, problem, note) for name in self._names]
                    continue
                begin(f"{problem.seqlen} rows, heads of {problem.head_dim}", 1)
                self._measure(problem)
                self.save()
        self.save(last=True)

    def remarks(self) -> list[str]:
        """Remarks for below the tables: reasons, backend and peak; the last line counts cells."""
        lines = [f"{name}: {why}" for name, why in self.unavailable.items()] + notes(self.rows)
        if self.peak:
            lines.append(f"peak: {self.peak:.1f} TFLOP/s by the datasheet, dense")
        cells = {(*row.table, row.seqlen, row.impl) for row in self.rows if row.samples}
        counts = f"{len(cells)} cells measured in {self.seconds:.0f} s"
        return [*lines, f"{counts}, {len(self.failures)} failures"]

    def more(self) -> dict[str, Any]:
        """The peak rate, and which implementations cannot run here."""
        return {
            "peak_tflops": self.peak,
            "unavailable": self.unavailable,
        }

    def _measure(self, problem: Problem) -> None:
        """Builds, judges, then times all implementations that can run a cell."""
        forget_compiled()
        free_memory(self.setting.device)
        try:
            data, judge = self._data_and_judge(problem)
        except torch.OutOfMemoryError as error:
            note = f"cannot be judged: {reason(error)}"
            self.rows += [self._row(name, problem, note) for name in self._names]
            return
        tried = {name: self._judged_attention(name, problem, data, judge) for name in self._names}
        del judge
        samples = self._time(tried, problem)
        for name, one in tried.items():
            self.rows += self._rows(name, problem, one, samples.get(name, []))

    def _data_and_judge(self, problem: Problem) -> tuple[Data, Judge]:
        """The inputs of a problem, and its prepared oracle."""
        data = problem.data()
        judge = Judge(problem, data, backward=self._backward)
        judge.prepare()
        return data, judge

    def _judged_attention(self, name: str, problem: Problem, data: Data, judge: Judge) -> Tried:
        """The short sequence is checked once for a table."""

        def build(problem: Problem, data: Data) -> Attention:
            return make(name, problem, data, backend=self.backend, backward=self._backward)

        def verdicts() -> list[Verdict]:
            key = (name, problem.heads, problem.kv_heads, problem.head_dim, problem.causal)
            whole = [] if key in self._judged else judge.whole(build)
            self._judged.add(key)
            return whole + judge.sampled(build)

        found, note = self._attempt(name, problem, verdicts)
        if found is None:
            return Tried(note)
        ratio, note = self._verdict(name, problem, found)
        attention, failed = self._attempt(name, problem, lambda: build(problem, data))
        return Tried(failed or note, attention, ratio)

    def _verdict(
        self, name: str, problem: Problem, verdicts: Sequence[Verdict]
    ) -> tuple[float, str]:
        """Greatest error / bound, and the error as a note; for ours it is a failure too."""
        wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
        if name == "ours":
            self.failures += [f"{name}, {title(problem)}: {text}" for text in wrong]
        ratios = [math.inf if math.isnan(v.ratio) else v.ratio for v in verdicts]
        return max(ratios), f"wrong: {wrong[0]}" if wrong else ""

    def _time(self, tried: dict[str, Tried], problem: Problem) -> dict[str, list[Sample]]:
        """The samples of all that can run, forward and then backward."""
        calls = {}
        for name, one in tried.items():
            if one.attention is not None:
                stages = [one.attention.forward, one.attention.backward]
                calls[name] = Call(stages[: 1 + self._backward], one.attention.release)

        def failed(name: str, error: Exception) -> None:
            tried[name].note = self._failed(name, problem, error, [])

        return time_in_turn(
            calls, self._watch, self.setting.sizes.iters, seconds=CELL_SECONDS, failed=failed
        )

    def _attempt(self, name: str, problem: Problem, call: Callable[[], T]) -> tuple[T | None, str]:
        """The call's result and ""; or None and the reason where it cannot run."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return call(), ""
            except Exception as error:
                return None, self._failed(name, problem, error, said)

    def _failed(self, name: str, problem: Problem, error: Exception, said: Sequence[Any]) -> str:
        """The note of a call that cannot run. Ours may refuse; any other error is a failure."""
        why = reason(error, [str(warning.message) for warning in said])
        if name == "ours" and not isinstance(error, REFUSALS):
            traceback.print_exception(error)
            self.failures.append(f"{name}, {title(problem)}: {why}")
        free_memory(self.setting.device)
        return f"cannot run: {why}"

    def _rows(
        self, name: str, problem: Problem, tried: Tried, samples: Sequence[Sample]
    ) -> list[Row]:
        if not samples:
            return [self._row(name, problem, tried.note)]
        rows = []
        host_ms = quantiles([sample.host_ms for sample in samples])[1]
        for mode in MODES[self.setting.mode]:
            taken = [sum(sample.ms[STAGES[mode]]) for sample in samples]
            p20, median, p80 = quantiles(taken)
            tflops = problem.flops(mode) / median / 1e9
            rows.append(
                replace(
                    self._row(name, problem, tried.note),
                    mode=mode,
                    median_ms=median,
                    p20_ms=p20,
                    p80_ms=p80,
                    samples=len(samples),
                    tflops=tflops,
                    peak_share=tflops / self.peak if self.peak else None,
                    host_ms=host_ms,
                    max_ratio=tried.ratio,
                )
            )
        return rows

    def _row(self, name: str, problem: Problem, note: str) -> Row:
        return Row(
            name, self.setting.mode, problem.heads, problem.kv_heads, problem.head_dim,
            problem.causal, problem.seqlen, problem.batch, note=note,
        )  # fmt: skip


def title(what: Row | Problem) -> str:
    """Title of a table, or name of a cell."""
    heads = f"{what.heads}/{what.kv_heads} heads of {what.head_dim}"
    mask = "causal" if what.causal else "full"
    if isinstance(what, Row):
        return f"{heads}, {mask}"
    return f"{heads}, {mask}, {what.batch} x {format_size(what.seqlen)}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each number of heads, head dim and mask: a line a length and implementation."""
    found: list[Table] = []
    for key in dict.fromkeys(row.table for row in rows):
        mine = [row for row in rows if row.table == key]
        modes = [mode for mode in STAGES if any(row.mode == mode and row.samples for row in mine)]
        figures = [name for mode in modes for name in (mode, "TFLOP/s")]
        table = new_table(
            f"{title(mine[0])}: ms (p20-p80), TFLOP/s (share of peak)",
            ("batch x n", ""),
            (*figures, "error/bound"),
        )
        for cell in dict.fromkeys((row.seqlen, row.batch, row.impl) for row in mine):
            by_mode = {row.mode: row for row in mine if (row.seqlen, row.batch, row.impl) == cell}
            seqlen, batch, impl = cell
            first = next(iter(by_mode.values()))
            figures = [text for mode in modes for text in _figures(by_mode.get(mode))]
            if modes and not first.samples:
                figures[0] = first.note.partition(":")[0]
            table.add_row(
                f"{batch} x {format_size(seqlen)}", impl, *figures, show(first.max_ratio, ".2f")
            )
        found.append(table)
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why cells have no times, or are wrong."""
    cells: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.note:
            where = f"{title(row)}, {row.batch} x {format_size(row.seqlen)}"
            cells.setdefault((row.impl, row.note), {})[where] = None
    return [f"{impl}: {note} ({'; '.join(where)})" for (impl, note), where in cells.items()]


def _figures(row: Row | None) -> list[str]:
    if row is None or row.median_ms is None:
        return ["", ""]
    share = "" if row.peak_share is None else f" ({row.peak_share:.0%})"
    ms, p20, p80 = (_ms(x) for x in (row.median_ms, row.p20_ms, row.p80_ms))
    return [f"{ms} ({p20}-{p80})", f"{show(row.tflops, '.3g')}{share}"]


def _ms(x: float | None) -> str:
    """Milliseconds with microseconds, or with four digits."""
    return show(x, ".3f" if x is None or x < 10.0 else ".2f" if x < 100.0 else ".1f")
