"""`ring-attn bench kernel`: our attention kernels on one device, next to those of other packages.

`Cells` checks and times implementations of attention on one problem after another.
"""

from __future__ import annotations

import argparse
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product

import torch

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.bench.benchmark import Benchmark, Outputs
from ring_attn.bench.implementations import Implementation, Ours, Shape, reason
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.peers import PEERS
from ring_attn.bench.roofs import Roofs, measure_roofs
from ring_attn.bench.rows import Row, figure, key, length
from ring_attn.bench.timing import (
    STAGES,
    TimedCall,
    Timing,
    Watch,
    free_memory,
    quantiles,
    time_in_turn,
)
from ring_attn.cli.bench_options import (
    IMPLEMENTATIONS,
    KERNEL_HEADS,
    KERNEL_ITERS,
    KERNEL_SEQLENS,
    MODES,
)
from ring_attn.cli.masks import MaskChoice
from ring_attn.core.dtypes import dtype_name
from ring_attn.testing import Inputs
from ring_attn.testing.launch import check_tensors

# The time limit of a cell's repetitions.
CELL_SECONDS = 4.0

# Errors of ours that do not fail the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class CellSetting:
    """The cells of a run, and the options of their measurement."""

    seqlens: tuple[int, ...]
    head_dims: tuple[tuple[int, int], ...]  # of q and k, and of v
    heads: tuple[tuple[int, int], ...]  # of q, and of k and v
    dtype: torch.dtype
    iters: int
    tokens: int  # number of tokens of a batch of shorter sequences
    batch: int | None = None  # None is `tokens` / length, at least 1
    masks: tuple[MaskChoice, ...] = (MaskChoice("causal"), MaskChoice("full"))
    modes: tuple[str, ...] = MODES
    impls: tuple[str, ...] = IMPLEMENTATIONS
    device: torch.device = torch.device("cpu")
    budget: float | None = None

    @property
    def backward(self) -> bool:
        return self.modes != ("fwd",)

    def problems(self) -> Iterator[Shape]:
        """Yield the problem of each cell."""
        for (heads, kv_heads), (head_dim, head_dim_v), mask, seqlen in product(
            self.heads, self.head_dims, self.masks, self.seqlens
        ):
            yield Shape(
                batch=self.batch or max(1, self.tokens // seqlen),
                seqlen=seqlen,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=mask.causal,
                dtype=self.dtype,
                device=self.device,
                head_dim_v=head_dim_v,
                masked=mask,
            )


@dataclass(frozen=True, kw_only=True)
class CellRow(Row):
    """Times of an implementation on a cell in a mode.

    Attributes:
        tflops: TFLOP/s.
        tflops_share: share of the rate of a matrix product.
        gbps: GB/s of the tensors that must at least be read and written.
        gbps_share: share of the rate of a copy.
        host_ms: milliseconds that the host needs for a forward, and for its backward if there is
            one.
        max_ratio: greatest error / bound of the results; above 1 a result is wrong.
    """

    mask: str = key("mask")
    batch: int = key("batch")
    seqlen: int = key("length", length)
    heads: int = key("heads")
    kv_heads: int = key("kv heads")
    head_dim: int = key("head dim")
    head_dim_v: int = key("dim of v")
    dtype: str = key("")
    tflops: float | None = figure("TFLOP/s", ".4g")
    tflops_share: float | None = figure("of\nproduct", ".0%")
    gbps: float | None = figure("GB/s", ".3g")
    gbps_share: float | None = figure("of\ncopy", ".0%")
    host_ms: float | None = figure("host ms", ".3g", hidden=True)
    max_ratio: float | None = figure("error/\nbound", ".2f")


class Cells(Benchmark[CellSetting, CellRow]):
    """Measures one cell after another, and saves the report after each."""

    name, title = "kernel", "attention on one device"

    def __init__(self, setting: CellSetting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs, budget=setting.budget)
        self._watch = Watch(setting.device)
        self._unavailable = {
            name: why
            for name in setting.impls
            if name != "ours" and (why := PEERS[name].unavailable(setting.device))
        }
        self._names = [name for name in setting.impls if name not in self._unavailable]
        self._roofs: Roofs | None = None

    def run(self) -> None:
        """Measure cells until the budget is spent."""
        problems = list(self.setting.problems())
        planned = [row for problem in problems for row in self._planned(problem)]
        self.check_comparable(planned)
        self._roofs = measure_roofs(self.setting.device, self.setting.dtype)
        self.remarks.append(str(self._roofs))
        work = [problem.batch * problem.seqlen**2 for problem in problems]
        for number, problem in enumerate(problems):
            stage = f"cell {number + 1} of {len(problems)}"
            self.begin(stage, done=sum(work[:number]), total=sum(work))
            if self.left() > 0.0:
                self.rows += self._measured(problem)
            else:
                why = f"not measured: beyond the budget of {self.setting.budget:g} s"
                self.rows += [
                    row.without_time(self._unavailable.get(row.impl, why))
                    for row in self._planned(problem)
                ]
            self.save()

    def _planned(self, problem: Shape) -> list[CellRow]:
        """Return the rows of a cell, without figures, of all implementations."""
        return [
            CellRow(
                impl=name,
                mode=mode,
                mask=str(problem.choice),
                batch=problem.batch,
                seqlen=problem.seqlen,
                heads=problem.heads,
                kv_heads=problem.kv_heads,
                head_dim=problem.head_dim,
                head_dim_v=problem.dim_v,
                dtype=dtype_name(problem.dtype),
            )
            for name in self.setting.impls
            for mode in self.setting.modes
        ]

    def _measured(self, problem: Shape) -> list[CellRow]:
        """Build, check, and then time all implementations that can run a cell."""
        free_memory(self.setting.device)
        reasons = {**self._unavailable}
        ratios = dict[str, float]()
        calls = dict[str, TimedCall]()

        def failed(name: str, error: Exception) -> None:
            reasons[name] = f"cannot run: {reason(error)}"
            # Ours may refuse a cell or lack memory; other errors are failures.
            if name == "ours" and not isinstance(error, REFUSALS):
                traceback.print_exception(error)
                self.failures.append(f"ours, {described(problem)}: {reason(error)}")
            free_memory(self.setting.device)

        judge = OracleJudge(problem)
        for name in self._names:
            build = partial(make, name, backward=self.setting.backward)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")  # torch explains in them why a kernel cannot run
                try:
                    ratio, wrong = judge.verdict(build, backward=self.setting.backward)
                    attention = build(problem, problem.data())
                except Exception as error:
                    failed(name, explained(error, [str(each.message) for each in warned]))
                    continue
            if wrong and name == "ours":
                self.failures.append(f"ours, {described(problem)}: {wrong}")
            if wrong:
                reasons[name] = f"wrong: {wrong}"
            ratios[name] = ratio
            stages = [attention.forward, attention.backward][: 1 + self.setting.backward]
            calls[name] = TimedCall(stages, attention.release)
        del judge
        samples = time_in_turn(
            calls, self._watch, self.setting.iters, seconds=CELL_SECONDS, failed=failed
        )
        rows = []
        for row in self._planned(problem):
            row = replace(
                row.without_time(reasons.get(row.impl, "")), max_ratio=ratios.get(row.impl)
            )
            if samples.get(row.impl):
                row = self._timed(row, problem, samples[row.impl])
            rows.append(row)
        return rows

    def _timed(self, row: CellRow, problem: Shape, samples: Sequence[Timing]) -> CellRow:
        """Return a row with its figures."""
        row = row.timed([sum(sample.ms[STAGES[row.mode]]) for sample in samples])
        assert row.median_ms is not None and self._roofs is not None
        tflops = problem.flops(row.mode) * 1e-9 / row.median_ms
        gbps = problem.nbytes(row.mode) * 1e-6 / row.median_ms
        return replace(
            row,
            tflops=tflops,
            tflops_share=tflops / self._roofs.tflops,
            gbps=gbps,
            gbps_share=gbps / self._roofs.gbps,
            host_ms=quantiles([sample.host_ms for sample in samples])[1],
        )


def explained(error: Exception, warned: Sequence[str]) -> Exception:
    """Return the error with the warnings before it, in which torch says why a kernel cannot run."""
    if not warned or isinstance(error, torch.OutOfMemoryError):
        return error
    reasons = dict.fromkeys(" ".join(text.split("(Triggered")[0].split()) for text in warned)
    error.args = ("; ".join([str(error), *reasons]),)
    return error


def make(name: str, problem: Shape, data: Inputs, *, backward: bool = True) -> Implementation:
    """Return one of `IMPLEMENTATIONS` for the data of a problem."""
    if name != "ours":
        why = PEERS[name].reason_against(problem)
        if why:
            raise NotImplementedError(why)
        return PEERS[name].make(problem, data, backward)
    # On a CPU, triton would run in its interpreter.
    backend = "auto" if problem.device.type == "cpu" else "triton"
    purpose = Purpose.of(problem.mask, backward=backward, same_bits=None)
    chosen = choose_backend(problem.spec, backend, purpose).name
    return Ours(problem, data, get_backend(chosen))


def described(problem: Shape) -> str:
    """Return the name of a problem, for messages."""
    dims = str(problem.head_dim)
    if problem.dim_v != problem.head_dim:
        dims = f"{dims}/{problem.dim_v}"
    return (
        f"{problem.heads}/{problem.kv_heads} heads of {dims}, {problem.choice}, "
        f"{problem.batch} x {length(problem.seqlen)}"
    )


# -- options, which have the names of the fields of `CellSetting`


FULL = CellSetting(
    seqlens=KERNEL_SEQLENS,
    head_dims=((128, 128), (64, 64), (256, 256)),
    heads=KERNEL_HEADS,
    dtype=torch.bfloat16,
    tokens=16384,
    iters=KERNEL_ITERS,
)
QUICK = replace(FULL, seqlens=(2048, 8192), head_dims=((128, 128),), heads=((32, 8),), iters=5)
ON_CPU = CellSetting(
    seqlens=(256, 512),
    head_dims=((64, 64),),
    heads=((4, 2),),
    dtype=torch.float32,
    tokens=512,
    iters=3,
    impls=("ours", "torch-flash"),
)


def setting_of(args: argparse.Namespace) -> CellSetting:
    """Return the setting of the command's options; others have the default of the device."""
    device = parse_device(args.device)
    on_gpu = QUICK if args.quick else FULL
    on_cpu = replace(ON_CPU, seqlens=ON_CPU.seqlens[:1]) if args.quick else ON_CPU
    default = on_cpu if device.type == "cpu" else on_gpu
    names = [field.name for field in fields(CellSetting)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    setting = replace(default, **{**given, "device": device})
    for problem in setting.problems():
        what = f"q, k, v and out of {problem.batch} x {length(problem.seqlen)} rows"
        check_tensors(what, problem.nbytes("fwd"), device.type)
        _ = problem.mask  # refuses masks with too many slices
    return setting


def parse_device(name: str | None) -> torch.device:
    """Return the device of a name; None means the GPU if there is one, otherwise the CPU."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: this machine has no GPU that torch can use; pass --device cpu"
        )
    return device


def run(args: argparse.Namespace) -> int:
    """Measure, save the files after each cell, print the tables; return 1 if one of ours failed."""
    bench = Cells(setting_of(args), Outputs.of(args, Cells.name, CellRow))
    bench.run()
    return bench.conclude()
