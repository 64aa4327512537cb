"""`ring-attn tune`: finds the fastest configs of the kernels on a GPU."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.bench.implementations import Ours, Shape, reason
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.kernel import parse_device
from ring_attn.bench.report import Report
from ring_attn.bench.timing import TimedCall, Watch, free_memory, time_in_turn
from ring_attn.cli.arguments import show
from ring_attn.kernels import configs
from ring_attn.kernels.configs import FOLDED, Config
from ring_attn.kernels.tuned import GLUON, section, takes_gluon, takes_one_pass
from ring_attn.testing import Inputs
from ring_attn.testing.launch import map_in_processes, num_cores
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE

# Kinds of configs to search, the most valuable first.
KINDS = ("fwd_whole", "fwd", "dkdv", "dkdv_whole", "dq", "dq_whole")

# Number of timed runs of a config, and of runs whose bits must be equal.
ITERS, REPEATS = 12, 20

# Most processes that build at once; each has its own context on the GPU.
MAX_JOBS = 12

# The share of a kind's time after which building and checking stop.
CHECK_SHARE = 0.7

# Default seconds of a search on a GPU.
BUDGET = 600.0


@dataclass(frozen=True)
class TuneRow:
    """Figures of a kind's config; None where there is no figure.

    `max_ratio` is the greatest error / bound; above 1 the config is wrong. `speed` is relative to
    the frozen config. `note` says why there is no time, or what is wrong.
    """

    kind: str
    name: str
    config: Config
    gluon: bool = False
    frozen: bool = False
    max_ratio: float | None = None
    median_ms: float | None = None
    speed: float | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Tells whether the config ran, and its results are wrong."""
        return self.max_ratio is not None and bool(self.note)

    @property
    def kind_of_backend(self) -> str:
        """The kind under which the backend takes the config."""
        return GLUON if self.gluon else self.kind

    def kernels(self, problem: Shape, data: Inputs) -> Ours:
        """Attention in which the kind has this config."""
        return Ours(problem, data, TritonBackend({self.kind_of_backend: self.config}))

    def call(self, problem: Shape, data: Inputs) -> Callable[[], list[Tensor]]:
        """A call of the kind's kernel alone."""
        return self.kernels(problem, data).one(kernel_of(self.kind))


def kernel_of(kind: str) -> str:
    """The kernel of a kind: "dkdv" of "dkdv_whole"."""
    return kind.partition("_")[0]


@dataclass(frozen=True, kw_only=True)
class TuneSetting:
    """Device, heads, kernels and sizes of a search, and its time limit."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    budget: float | None
    kernels: tuple[str, ...]
    rows: int
    iters: int
    repeats: int

    @property
    def kinds(self) -> list[str]:
        x = torch.empty(0, self.head_dim, dtype=self.dtype, device=self.device)
        # The backward in one pass has one config per head dim: there is nothing to search.
        one_pass = takes_one_pass(x, self.head_dim)
        kernels = set(self.kernels) - ({"dq", "dkdv"} if one_pass else set())
        return [kind for kind in KINDS if kernel_of(kind) in kernels]

    def problem_of(self, kind: str) -> Shape:
        """The problem of a kind: with a causal mask, or half as long and without a mask."""
        whole = kind.endswith("_whole")
        rows = self.rows // 2 if whole else self.rows
        sizes = 1, rows, self.heads, self.kv_heads, self.head_dim
        return Shape(*sizes, not whole, self.dtype, self.device)


class Tuning(Report[TuneSetting, TuneRow]):
    """Searches one kind after another, and saves the report after each."""

    def __init__(self, setting: TuneSetting, path: Path | None = None) -> None:
        super().__init__(setting, path, budget=setting.budget)
        self._arch = configs.architecture(setting.device)
        self._watch = Watch(setting.device)

    def run(self) -> None:
        """Searches kinds while time is left; later kinds get unused time."""
        kinds = self.setting.kinds
        for index, kind in enumerate(kinds):
            if (left := self.left()) > 0.0:
                self._search(kind, left / (len(kinds) - index))
            free_memory(self.setting.device)
            self.save()

    def to_json(self) -> dict[str, Any]:
        """Adds the configs in the form that RING_ATTN_CONFIGS reads."""
        setting = self.setting
        chosen = {row.kind_of_backend: row.config for row in best(self.rows)}
        table = section(setting.device, setting.head_dim, setting.dtype, chosen)
        return super().to_json() | {"configs": table}

    def summary(self) -> list[str]:
        """Lines: speeds, wrong configs, how to use the file, and counts."""
        chosen = best(self.rows)
        lines = [f"{r.kind}: {r.name}, {show(r.speed, '.3f')} x the frozen config" for r in chosen]
        lines += [f"WRONG {row.kind}: {row.name}: {row.note}" for row in self.rows if row.wrong]
        file = f"{CONFIGS_VARIABLE}=PATH on every rank uses these configs, PATH of --json"
        timed, wrong = sum(bool(r.speed) for r in self.rows), sum(r.wrong for r in self.rows)
        return [*lines, file, f"{len(self.rows)} configs, {timed} timed, {wrong} wrong"]

    def _search(self, kind: str, seconds: float) -> None:
        """Builds, checks and times candidates of one kind, the frozen config first."""
        start, problem = time.monotonic(), self.setting.problem_of(kind)
        deadline = start + CHECK_SHARE * seconds
        rows = self._built(problem, self._candidates(kind), deadline)
        judge, data = OracleJudge(problem), problem.data()
        rows = [self._checked(row, problem, data, judge, deadline) for row in rows]
        del judge
        rows = self._timed(problem, data, rows, start + seconds)
        for row in rows:
            if row.frozen and row.note:
                self.failures.append(f"{kind}, the frozen config: {row.note}")
        self.rows += rows

    def _candidates(self, kind: str) -> list[TuneRow]:
        """The frozen config, then the search space; for a forward in Gluon, those configs too."""
        setting = self.setting
        sizes = (self._arch, setting.head_dim, setting.dtype)
        x = torch.empty(0, setting.head_dim, dtype=setting.dtype, device=setting.device)
        in_gluon, frozen = list[TuneRow](), configs.frozen(kind, *sizes)
        default: Config | None = frozen
        if kernel_of(kind) == "fwd" and takes_gluon(x, setting.head_dim):
            gluon, default = configs.search_space(GLUON, *sizes), None
            in_gluon = [TuneRow(kind, f"gluon {c}", c, True, c == gluon[0]) for c in gluon]
        space = [frozen, *configs.search_space(kind, *sizes)]
        rows = (TuneRow(kind, str(c), c, frozen=c == default) for c in space)
        return in_gluon + list(dict.fromkeys(rows))

    def _built(self, problem: Shape, rows: Sequence[TuneRow], deadline: float) -> list[TuneRow]:
        """Builds all configs; notes those that do not compile or crash their process."""
        tasks = [(problem, row, math.inf if row.frozen else deadline) for row in rows]
        notes: Iterator[str] = map(build, tasks)
        if self.setting.device.type == "cuda":
            jobs = min(MAX_JOBS, num_cores())
            notes = map_in_processes(build, tasks, jobs, lambda _: "the process died")
        return [
            replace(row, note=f"not built: {why}" if why else "")
            for row, why in zip(rows, notes, strict=True)
        ]

    def _checked(
        self, row: TuneRow, problem: Shape, data: Inputs, judge: OracleJudge, deadline: float
    ) -> TuneRow:
        """The row with its error, and a note if it is wrong or cannot be checked."""
        if row.note:
            return row
        if time.monotonic() > deadline and not row.frozen:
            return replace(row, note="not checked: there was no time left")
        try:
            ratio, note = judge.verdict(row.kernels)
            runs = (row.call(problem, data)() for _ in range(self.setting.repeats))
            first = next(runs)
            if not note and not all(all(map(torch.equal, first, other)) for other in runs):
                note = f"other bits in one of {self.setting.repeats} equal runs"
        except Exception as error:
            return replace(row, note=f"cannot run: {reason(error)}")
        return replace(row, max_ratio=ratio, note=note)

    def _timed(
        self, problem: Shape, data: Inputs, rows: Sequence[TuneRow], end: float
    ) -> list[TuneRow]:
        """Times all rows without a note."""
        found = {row.name: row for row in rows}
        calls = {row.name: TimedCall([row.call(problem, data)]) for row in rows if not row.note}

        def failed(name: str, error: Exception) -> None:
            found[name] = replace(found[name], note=f"cannot run: {reason(error)}")

        samples = time_in_turn(
            calls, self._watch, self.setting.iters, seconds=max(end - time.monotonic(), 0.0),
            failed=failed,
        )  # fmt: skip
        medians = {
            name: statistics.median(sample.ms[0] for sample in of_name)
            for name, of_name in samples.items()
            if of_name
        }
        frozen = medians.get(rows[0].name)
        for name, median in medians.items():
            speed = frozen and frozen / median
            found[name] = replace(found[name], median_ms=median, speed=speed)
        return [*found.values()]


def build(task: tuple[Shape, TuneRow, float]) -> str:
    """Runs a config once, which puts it into triton's cache on disk; returns the error, or ""."""
    problem, row, deadline = task
    if time.monotonic() > deadline:  # all processes share this clock
        return "there was no time left"
    try:
        row.call(problem, problem.data())()
    except Exception as error:
        return reason(error)
    return ""


def best(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """The fastest row of every timed kind that keeps a ring's results equal bit for bit.

    For that, the kinds of a kernel must fold blocks of one length; a kind that was not timed keeps
    its frozen config, and so its length. Both kinds of the forward in Gluon share one config.
    """
    fastest = list[TuneRow]()
    for kernel, block in FOLDED.items():
        of_kernel = [row for row in rows if kernel_of(row.kind) == kernel]
        frozen = {getattr(row.config, block) for row in of_kernel if row.frozen}
        timed = sorted((r for r in of_kernel if r.speed), key=lambda row: row.speed or 0.0)
        # Kind -> the fastest row, of those that fold blocks of one length.
        options = dict[tuple[int, object], dict[str, TuneRow]]()
        for row in timed:
            alike = getattr(row.config, block), row.gluon and row.name
            options.setdefault(alike, {})[row.kind] = row
        kinds = {row.kind for row in timed}
        usable = [
            [*of_kinds.values()]
            for (length, _), of_kinds in options.items()
            if of_kinds.keys() == kinds and (len(kinds) == 2 or length in frozen)
        ]
        if usable:
            fastest += max(usable, key=lambda rows: math.prod(row.speed or 0.0 for row in rows))
    return fastest


def setting_of(args: argparse.Namespace) -> TuneSetting:
    """The setting from the options; a CPU gets small sizes, only to test the search."""
    if args.device is None and not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU that torch can use; --device cpu uses tiny sizes and "
            "Triton's interpreter"
        )
    if path := os.environ.get(CONFIGS_VARIABLE):
        raise ValueError(f"{CONFIGS_VARIABLE} must be unset for a search, got {path!r}: unset it")
    device = parse_device(args.device)
    gpu, share = device.type == "cuda", 4 if args.quick else 1
    heads, head_dims = args.heads or ((32, 8) if gpu else (4, 2),), args.head_dims
    head_dims = head_dims or (128 if gpu else 16,)
    if len(heads) > 1 or len(head_dims) > 1:
        raise ValueError(f"one pair of --heads and one --head-dim, got {(heads, head_dims)}")
    setting = TuneSetting(
        heads=heads[0][0],
        kv_heads=heads[0][1],
        head_dim=head_dims[0],
        dtype=args.dtype or (torch.bfloat16 if gpu else torch.float32),
        device=device,
        budget=BUDGET if gpu and args.budget is None else args.budget,
        kernels=args.kernels,
        rows=(32768 if gpu else 128) // share,
        iters=ITERS if gpu else 1,
        repeats=REPEATS if gpu else 2,
    )
    refused = TritonBackend().supports(setting.problem_of("fwd").spec, explicit=True)
    if refused is not None:
        raise ValueError(f"backend triton {refused}")
    return setting


def run(args: argparse.Namespace) -> int:
    """Searches, saves the JSON after each kind; 1 if a frozen config is wrong."""
    bench = Tuning(setting_of(args), args.json)
    bench.run()
    return bench.finish([], bench.summary())
