"""Time of the attention kernels on one device, against torch's and flash-attn's, and of the ring.

Within every repetition all implementations run in turn, so that drift of the clocks hits them
alike; each is checked against float64 before it is timed. The batch keeps the number of tokens at
--tokens (16k) up to that length, and is 1 beyond, as in FlashAttention's papers. Times are those of
the device between events, with a cold L2 and the host ahead; medians, p20 and p80 over the
repetitions. A forward keeps what its backward needs, unless --mode fwd. FLOPs are 4 x pairs x
head_dim a head forward and 2.5 times that backward, by the exact number of visible pairs.

    ours           --backend as the whole attention: deterministic, a ring of one rank
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN
    flex           compiled flex_attention, its own tiles (flex-autotune: searched ones, in minutes)
    flash-attn     flash_attn, where installed (flash-attn-3, flash-attn-4: interface, cute)

Exit status 1 where a result of ours is wrong or a call of ours failed.
"""

from __future__ import annotations

import argparse
import gc
import math
import shlex
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from ring_attn.arguments import (
    add_common,
    dtype_name,
    format_size,
    parse_dtype,
    parse_output,
    parse_size,
    parse_sizes,
    write_json,
)
from ring_attn.backends import get_backend
from ring_attn.bench.implementations import (
    FLASH_PACKAGES,
    IMPLEMENTATIONS,
    Attention,
    Data,
    Ours,
    Problem,
    forget_compiled,
    make,
    reason,
    unavailable,
)
from ring_attn.bench.judge import Judge
from ring_attn.bench.kernel_report import NOT_MEASURED, Row, notes, plot, tables, title
from ring_attn.bench.timing import (
    Watch,
    gpu_state,
    head_start_ms,
    measured_tflops,
    peak_tflops,
    quantiles,
    watch_for,
)
from ring_attn.env import machine
from ring_attn.launch import DEVICES
from ring_attn.testing import Verdict

MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}

DEFAULT = ("ours", "torch-flash", "cudnn", "flex", *FLASH_PACKAGES)

# A cell's repetitions end early where they have taken so long, but not before so many. The first
# only warms up, unless it takes so long that a start-up does not show.
CELL_SECONDS, LEAST_ITERS, SLOW_MS = 4.0, 2, 500.0

# What ours may raise without failing the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)

# Wide enough for a row, wherever it is printed.
WIDTH = 150

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """What is measured where the options do not say it."""

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


@dataclass(frozen=True)
class Setting:
    """What is measured, in full."""

    sizes: Sizes
    causal: tuple[bool, ...]
    mode: str
    backend: str
    implementations: tuple[str, ...]
    device: torch.device
    budget: float | None
    measure_peak: bool

    @property
    def command(self) -> str:
        """The words that measure this again."""
        sizes = self.sizes
        words = {
            "--seqlen": ",".join(map(format_size, sizes.seqlens)),
            "--head-dim": ",".join(map(str, sizes.head_dims)),
            "--heads": ",".join(f"{q}/{kv}" for q, kv in sizes.heads),
            "--dtype": dtype_name(sizes.dtype),
            "--tokens": format_size(sizes.tokens),
            "--mode": self.mode,
            "--backend": self.backend,
            "--implementations": ",".join(self.implementations),
            "--iters": str(sizes.iters),
            "--device": self.device.type,
        }
        flags = [f"{name} {shlex.quote(value)}" for name, value in words.items()]
        if len(self.causal) == 1:
            flags.append("--causal" if self.causal[0] else "--no-causal")
        if self.budget is not None:
            flags.append(f"--budget {self.budget:g}")
        if self.measure_peak:
            flags.append("--measure-peak")
        return " ".join(["ring-attn bench kernel", *flags])

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ring-attn bench kernel`."""
    add = parser.add_argument
    lens = f"{format_size(FULL.seqlens[0])} to {format_size(FULL.seqlens[-1])}"
    add("--seqlen", type=parse_sizes, help=f"lengths, such as 1k,8k ({lens}, doubling)")
    add("--head-dim", type=parse_sizes, help="head dims (128,64,256)")
    add("--heads", type=parse_heads, help="query heads / kv heads, such as 32/8,64/8")
    add("--causal", action=argparse.BooleanOptionalAction, help="one of them alone; both if absent")
    add("--dtype", type=parse_dtype, help="of the inputs (bfloat16; on a CPU float32)")
    add("--tokens", type=parse_size, help="of a batch, up to that length (16k)")
    add("--mode", choices=tuple(MODES), default="fwd_bwd")
    add("--backend", help="of ours (triton; on a CPU auto)")
    add(
        "--implementations",
        default=",".join(DEFAULT),
        help=f"comma-separated, of {', '.join(IMPLEMENTATIONS)}",
    )
    add("--iters", type=parse_size, help=f"most repetitions of a cell ({FULL.iters})")
    add("--budget", type=float, metavar="SECONDS", help="start no cell that would not end in time")
    add("--device", choices=DEVICES, help="default: cuda where there is one")
    add("--measure-peak", action="store_true", help="share of a large matmul's rate instead")
    add(
        "--plot",
        metavar="PATH.png",
        type=parse_output,
        help="draw TFLOP/s over length (matplotlib)",
    )
    add_common(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Query and kv heads: "32/8,16" is ((32, 8), (16, 16)).

    Raises:
        argparse.ArgumentTypeError: anything else; argparse shows the text.
    """
    found = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{part!r}: kv heads must divide the query heads")
        found.append((heads, kv_heads))
    return tuple(found)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the JSON as it goes, prints the tables, plots; 1 if one of ours failed."""
    setting = setting_of(args)
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    bench = Bench(setting, args.json)
    bench.run()
    console = Console(width=WIDTH)
    if not args.quiet:
        console.print(*tables(bench.rows))
    for line in bench.remarks():
        console.print(line, highlight=False, markup=False)
    for failure in bench.failures:
        console.print(failure, style="red", markup=False)
    if args.plot is not None:
        plot(bench.rows, args.plot)
    console.print(bench.summary(), highlight=False)
    return 1 if bench.failures else 0


def setting_of(args: argparse.Namespace) -> Setting:
    """What the options describe; --quick and a CPU change what is not given."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    names = tuple(dict.fromkeys(name for name in args.implementations.split(",") if name))
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"--implementations must be of {list(IMPLEMENTATIONS)}, got {name!r}")
    if not names:
        raise ValueError(f"--implementations needs at least one of {list(IMPLEMENTATIONS)}")
    base = ON_CPU if device.type == "cpu" else QUICK if args.quick else FULL
    sizes = Sizes(
        seqlens=args.seqlen or base.seqlens,
        head_dims=args.head_dim or base.head_dims,
        heads=args.heads or base.heads,
        dtype=args.dtype or base.dtype,
        tokens=args.tokens or base.tokens,
        iters=args.iters or base.iters,
    )
    backend = args.backend or ("triton" if device.type == "cuda" else "auto")
    if backend != "auto":
        get_backend(backend)  # raises for a name that does not exist
    return Setting(
        sizes=sizes,
        causal=(True, False) if args.causal is None else (args.causal,),
        mode=args.mode,
        backend=backend,
        implementations=names,
        device=device,
        budget=args.budget,
        measure_peak=args.measure_peak,
    )


@dataclass
class Tried:
    """How far one implementation has come on one cell."""

    note: str = ""
    attention: Attention | None = None
    ratio: float | None = None
    host_ms: float = 0.0  # of the latest call
    samples: list[dict[str, float]] = field(default_factory=list)


class Bench:
    """One run: measures cell by cell and keeps the report on disk up to date."""

    def __init__(self, setting: Setting, json: Path | None = None) -> None:
        """
        Args:
            setting: what is measured.
            json: where the report goes, after every cell.
        """
        self.setting = setting
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.unavailable = {
            name: why
            for name in setting.implementations
            if (why := unavailable(name, setting.device)) is not None
        }
        self._names = [name for name in setting.implementations if name not in self.unavailable]
        self._backward = setting.mode != "fwd"
        self._json, self._start = json, time.monotonic()
        self._watch: Watch = watch_for(setting.device)
        self._states = {"before": gpu_state()}
        self._judged: set[tuple[object, ...]] = set()
        self._ran: set[str] = set()  # backends of ours
        self._dead = False
        self._largest = 0, 0.0  # FLOPs of the largest cell so far, and its seconds for each
        self.peak = self._peak()

    def run(self) -> None:
        """Measures every cell that the budget has time for."""
        for problem in self.setting.problems() if self._names else ():
            note = self._not_measured(problem)
            if note:
                self.rows += [self._row(name, problem, note) for name in self._names]
            else:
                self._measure(problem)
                self._save()
        self._states["after"] = gpu_state()
        self._save()

    def remarks(self) -> list[str]:
        """What the tables do not say."""
        lines = [f"{name}: {why}" for name, why in self.unavailable.items()] + notes(self.rows)
        if self._ran and self.setting.backend == "auto":
            lines.append(f"ours: backend auto chose {', '.join(sorted(self._ran))}")
        if self.peak:
            how = "a matmul here" if self.setting.measure_peak else "the datasheet, dense"
            lines.append(f"peak: {self.peak:.1f} TFLOP/s by {how}")
        for note in dict.fromkeys(r.note for r in self.rows if r.note.startswith(NOT_MEASURED)):
            left = dict.fromkeys(f"{title(r)}, {r.seqlen}" for r in self.rows if r.note == note)
            lines.append(f"{len(left)} cells {note} ({'; '.join(left)})")
        return lines

    def summary(self) -> str:
        """One line for all."""
        cells = {(*row.table, row.seqlen, row.impl) for row in self.rows if row.samples}
        seconds = time.monotonic() - self._start
        return f"{len(cells)} cells measured in {seconds:.0f} s, {len(self.failures)} failures"

    def report(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        setting = self.setting
        return {
            "machine": machine(),
            "gpu_state": self._states,
            "command": setting.command,
            "setting": {
                **asdict(setting.sizes),
                "dtype": dtype_name(setting.sizes.dtype),
                "causal": setting.causal,
                "mode": setting.mode,
                "backend": setting.backend,
                "budget": setting.budget,
            },
            "peak_tflops": self.peak,
            "peak_is": "measured" if setting.measure_peak else "datasheet",
            "backends": sorted(self._ran),
            "unavailable": self.unavailable,
            "rows": [asdict(row) for row in self.rows],
            "failures": self.failures,
            "seconds": time.monotonic() - self._start,
        }

    def _save(self) -> None:
        if self._json:
            part = self._json.with_name(f"{self._json.name}.part")
            write_json(part, self.report())
            part.replace(self._json)  # a run that is killed leaves a whole report

    def _peak(self) -> float | None:
        setting = self.setting
        if setting.measure_peak:
            return measured_tflops(setting.device, setting.sizes.dtype)
        if setting.device.type == "cpu":
            return None
        return peak_tflops(torch.cuda.get_device_name(setting.device), setting.sizes.dtype)

    def _not_measured(self, problem: Problem) -> str:
        """Why a cell is left out: by the rate of the largest so far it would not end in time."""
        budget = self.setting.budget
        if self._dead:
            return f"{NOT_MEASURED}: the device failed before"
        # Each runs once to be judged, and is then timed.
        runs = LEAST_ITERS + 1
        expected = self._largest[1] * problem.flops(self.setting.mode) * runs
        if budget is not None and time.monotonic() - self._start + expected > budget:
            return f"{NOT_MEASURED}: beyond the budget of {budget:g} s"
        return ""

    def _measure(self, problem: Problem) -> None:
        """One cell: builds, judges, then times all implementations that can run it."""
        forget_compiled()
        self._free_memory()
        try:
            data, judge = self._data_and_judge(problem)
        except torch.OutOfMemoryError as error:
            note = f"cannot be judged: {reason(error)}"
            self.rows += [self._row(name, problem, note) for name in self._names]
            return
        tried = {name: self._judged_attention(name, problem, data, judge) for name in self._names}
        del judge
        self._time(tried, problem)
        for name, one in tried.items():
            self.rows += self._rows(name, problem, one)
        ms = sum(one.samples[-1][self.setting.mode] for one in tried.values() if one.samples)
        flops = problem.flops(self.setting.mode)
        if ms and flops >= self._largest[0]:
            self._largest = flops, 1e-3 * ms / flops

    def _data_and_judge(self, problem: Problem) -> tuple[Data, Judge]:
        """What is computed on, and what results are held against."""
        data = problem.data()
        judge = Judge(problem, data, backward=self._backward)
        judge.prepare()
        return data, judge

    def _judged_attention(self, name: str, problem: Problem, data: Data, judge: Judge) -> Tried:
        """The short sequence is checked once for a table."""

        def build(problem: Problem, data: Data) -> Attention:
            backend, backward = self.setting.backend, self._backward
            return make(name, problem, data, backend=backend, backward=backward)

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
        if isinstance(attention, Ours):
            self._ran.add(attention.backend)
        return Tried(failed or note, attention, ratio)

    def _verdict(
        self, name: str, problem: Problem, verdicts: Sequence[Verdict]
    ) -> tuple[float, str]:
        """Greatest error / bound, and what is wrong; of ours that is a failure."""
        wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
        if name == "ours":
            self.failures += [f"{name}, {title(problem)}: {text}" for text in wrong]
        ratios = [math.inf if math.isnan(v.ratio) else v.ratio for v in verdicts]
        return max(ratios), f"wrong: {wrong[0]}" if wrong else ""

    def _time(self, tried: dict[str, Tried], problem: Problem) -> None:
        """Fills in the samples: ms by mode, and of the host."""
        started = time.monotonic()
        for repetition in range(-1, self.setting.sizes.iters):
            least = min((len(one.samples) for one in tried.values() if one.attention), default=0)
            if least >= LEAST_ITERS and time.monotonic() - started > CELL_SECONDS:
                break
            running = [name for name, one in tried.items() if one.attention is not None]
            for name in _turned(running, repetition):
                one = tried[name]
                assert one.attention is not None, "those without one do not run"
                sample = partial(self._sample, one.attention, one.host_ms)
                figures, note = self._attempt(name, problem, sample)
                if figures is None:
                    one.attention, one.samples, one.note = None, [], note
                    continue
                one.host_ms = figures["host"]
                if repetition >= 0 or figures[self.setting.mode] > SLOW_MS:
                    one.samples.append(figures)

    def _sample(self, attention: Attention, host_ms: float) -> dict[str, float]:
        """One call, for which the host needed `host_ms` the last time."""
        watch = self._watch
        watch.ready(head_start_ms(host_ms))
        host = time.perf_counter()
        marks = [watch.mark()]
        attention.forward()
        marks.append(watch.mark())
        if self._backward:
            attention.backward()
            marks.append(watch.mark())
        host = time.perf_counter() - host
        watch.done()
        attention.release()
        spans = {"fwd": (0, 1), "bwd": (1, 2), "fwd_bwd": (0, 2)}
        ms = {mode: watch.ms(*(marks[i] for i in spans[mode])) for mode in MODES[self.setting.mode]}
        return {**ms, "host": 1e3 * host}

    def _attempt(self, name: str, problem: Problem, call: Callable[[], T]) -> tuple[T | None, str]:
        """What the call returns; None, and why, where it cannot run. Ours may refuse, not fail."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return call(), ""
            except Exception as error:
                why = reason(error, [str(warning.message) for warning in said])
                if name == "ours" and not isinstance(error, REFUSALS):
                    traceback.print_exc()
                    self.failures.append(f"{name}, {title(problem)}: {why}")
        if not self._alive():
            self._dead = True
            self.failures.append(f"the device failed while {name} ran, {title(problem)}")
        self._free_memory()
        return None, f"cannot run: {why}"

    def _rows(self, name: str, problem: Problem, tried: Tried) -> list[Row]:
        if not tried.samples:
            return [self._row(name, problem, tried.note)]
        rows = []
        host_ms = quantiles([sample["host"] for sample in tried.samples])[1]
        for mode in MODES[self.setting.mode]:
            p20, median, p80 = quantiles([sample[mode] for sample in tried.samples])
            tflops = problem.flops(mode) / median / 1e9
            rows.append(
                replace(
                    self._row(name, problem, tried.note),
                    mode=mode,
                    median_ms=median,
                    p20_ms=p20,
                    p80_ms=p80,
                    samples=len(tried.samples),
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

    def _alive(self) -> bool:
        """False once a kernel has broken the device's context: nothing runs any more then."""
        if self.setting.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return False
        return True

    def _free_memory(self) -> None:
        """Gives back what the last cell, or a call that failed, has left."""
        gc.collect()
        if self.setting.device.type == "cuda" and not self._dead:
            torch.cuda.empty_cache()


def _turned(names: Sequence[str], repetition: int) -> Sequence[str]:
    """The order turns, so that none always runs after the same other."""
    turn = repetition % max(len(names), 1)
    return [*names[turn:], *names[:turn]]
