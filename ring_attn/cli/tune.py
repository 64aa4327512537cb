"""`ring-attn tune`: finds the fastest configs of the kernels on a GPU."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.bench.implementations import Kernels, Shape, reason
from ring_attn.bench.judge import OracleJudge, worst_of
from ring_attn.bench.kernel import parse_device
from ring_attn.bench.report import Report
from ring_attn.bench.timing import TimedCall, Watch, free_memory, time_in_turn
from ring_attn.cli.arguments import show
from ring_attn.cli.launch import map_in_processes, num_cores
from ring_attn.kernels import configs
from ring_attn.kernels.configs import FOLDED, Config
from ring_attn.kernels.tuned import GLUON, section, takes_gluon, takes_one_pass
from ring_attn.testing import Inputs
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE

# Kinds of configs to search, the most valuable first.
KINDS = ("fwd_whole", "fwd", "dkdv", "dkdv_whole", "dq", "dq_whole", "decode")

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
        """The problem of a kind: with a causal mask, without a mask, or one token."""
        decodes, whole = kind == "decode", kind.endswith("_whole")
        rows = self.rows // 2 if whole else self.rows
        sizes = 1, rows, self.heads, self.kv_heads, self.head_dim, not (decodes or whole)
        return Shape(*sizes, self.dtype, self.device, 1 if decodes else None)


def candidate(kind: str, config: Config, frozen: Config | None, *, gluon: bool = False) -> TuneRow:
    """The row of a config before it is built; `frozen` is None if another kernel is the default."""
    name = f"gluon {label(config)}" if gluon else label(config)
    return TuneRow(kind, name, config, gluon, config == frozen)


def configs_of(row: TuneRow) -> dict[str, Config]:
    """The config of a row, by the kind's name in the backend."""
    return {GLUON if row.gluon else row.kind: row.config}


class Tuning(Report[TuneSetting, TuneRow]):
    """Searches one kind after another, and saves the report after each."""

    def __init__(self, setting: TuneSetting, path: Path | None = None) -> None:
        super().__init__(setting, path)
        self._arch = configs.architecture(setting.device)
        self._watch = Watch(setting.device)

    def run(self) -> None:
        """Searches kinds while time is left; later kinds get unused time."""
        kinds = self.setting.kinds
        for index, kind in enumerate(kinds):
            left = self.left()
            if left <= 0.0:
                break
            try:
                self._search(kind, left / (len(kinds) - index))
            except Exception as error:  # the other kinds continue
                traceback.print_exception(error)
                self.failures.append(f"{kind} failed: {reason(error)}")
            free_memory(self.setting.device)
            self.save()
        self.save()

    def to_json(self) -> dict[str, Any]:
        """Adds the configs in the form that RING_ATTN_CONFIGS reads."""
        setting = self.setting
        chosen: dict[str, Config] = {}
        for row in best(self.rows):
            chosen |= configs_of(row)
        table = section(setting.device, setting.head_dim, setting.dtype, chosen)
        return super().to_json() | {"configs": table}

    def summary(self) -> list[str]:
        """Lines: speeds, wrong configs, how to use the file, and counts."""
        chosen, path = best(self.rows), self._path
        lines = [
            f"{r.kind}: {r.name} is {show(r.speed, '.3f')} x the frozen config" for r in chosen
        ]
        lines += [f"WRONG {row.kind}: {row.name}: {row.note}" for row in self.rows if row.wrong]
        file = "--json PATH writes the file that RING_ATTN_CONFIGS reads"
        if path is not None:
            file = f"{CONFIGS_VARIABLE}={path} on every rank uses these configs"
        timed, wrong = sum(bool(r.speed) for r in self.rows), sum(r.wrong for r in self.rows)
        return [*lines, file, f"{len(self.rows)} configs, {timed} timed, {wrong} wrong"]

    def _search(self, kind: str, seconds: float) -> None:
        """Builds, checks and times candidates of one kind, the frozen config first."""
        start, problem = time.monotonic(), self.setting.problem_of(kind)
        deadline, data = start + CHECK_SHARE * seconds, problem.data()
        rows = self._built(problem, self._candidates(kind), deadline)
        judge = OracleJudge(problem, data, backward=kind != "decode")
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
            in_gluon = [candidate(kind, config, gluon[0], gluon=True) for config in gluon]
        space = [frozen, *configs.search_space(kind, *sizes)]
        return in_gluon + list(dict.fromkeys(candidate(kind, c, default) for c in space))

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

        def build(problem: Shape, data: Inputs) -> Kernels:
            return Kernels(problem, data, configs_of(row))

        def results() -> list[Tensor]:
            return build(problem, data).one(kernel_of(row.kind))()

        try:
            ratio, note = worst_of(judge.verdicts(build))
            first = [] if note else results()
            for repeat in range(1, self.setting.repeats):
                if not note and not all(map(torch.equal, first, results())):
                    note = f"other bits after {repeat} equal runs of {self.setting.repeats}"
        except Exception as error:
            return replace(row, note=f"cannot run: {reason(error)}")
        return replace(row, max_ratio=ratio, note=note)

    def _timed(
        self, problem: Shape, data: Inputs, rows: Sequence[TuneRow], end: float
    ) -> list[TuneRow]:
        """Times all rows without a note."""
        right = {row.name: row for row in rows if not row.note}
        calls = {
            name: TimedCall([Kernels(problem, data, configs_of(row)).one(kernel_of(row.kind))])
            for name, row in right.items()
        }
        notes: dict[str, str] = {}

        def failed(name: str, error: Exception) -> None:
            notes[name] = f"cannot run: {reason(error)}"

        samples = time_in_turn(
            calls, self._watch, self.setting.iters, seconds=max(end - time.monotonic(), 0.0),
            failed=failed,
        )  # fmt: skip
        medians = {
            name: statistics.median(sample.ms[0] for sample in of_name)
            for name, of_name in samples.items()
            if of_name
        }
        frozen, found = medians.get(rows[0].name), []
        for row in rows:
            row = replace(row, note=notes.get(row.name, row.note))
            if median := medians.get(row.name):
                row = replace(row, median_ms=median, speed=frozen and frozen / median)
            found.append(row)
        return found


def build(task: tuple[Shape, TuneRow, float]) -> str:
    """Runs a config once, which puts it into triton's cache on disk; returns the error, or ""."""
    problem, row, deadline = task
    if time.monotonic() > deadline:  # all processes share this clock
        return "there was no time left"
    try:
        Kernels(problem, problem.data(), configs_of(row)).one(kernel_of(row.kind))()
    except Exception as error:
        return reason(error)
    return ""


def best(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """The fastest row of every timed kind that keeps a ring's results equal bit for bit.

    For that, the kinds of a kernel must fold blocks of one length; a kind that was not timed keeps
    its frozen config, and so its length. Both kinds of the forward in Gluon share one config.
    """
    decoding = [row for row in rows if row.kind == "decode" and row.speed]
    fastest: list[TuneRow] = []
    for kernel, block in FOLDED.items():
        of_kernel = [row for row in rows if kernel_of(row.kind) == kernel]
        kinds = {kind: [r for r in of_kernel if r.kind == kind and r.speed] for kind in KINDS}
        timed = [of_kind for of_kind in kinds.values() if of_kind]
        lengths = {row.name: getattr(row.config, block) for row in of_kernel}
        frozen = {lengths[row.name] for row in of_kernel if row.frozen}
        options = [
            option
            for option in product(*timed)
            if len({(lengths[row.name], row.gluon and row.name) for row in option}) == 1
            and (len(timed) == 2 or lengths[option[0].name] in frozen)
        ]
        if options:
            fastest += max(options, key=lambda rows: math.prod(row.speed or 0.0 for row in rows))
    return fastest + sorted(decoding, key=lambda row: -(row.speed or 0.0))[:1]


def label(config: Config) -> str:
    """A config as text: tile, warps, stages, and fields that differ from their defaults."""
    tile = f"{config.BLOCK_M}x{config.BLOCK_N} {config.num_warps}w {config.num_stages}s"
    others = (
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if field.default not in (MISSING, getattr(config, field.name))
    )
    return " ".join([tile, *others])


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
    refused = get_backend("triton").supports(setting.problem_of("fwd").spec, explicit=True)
    if refused is not None:
        raise ValueError(f"backend triton {refused}")
    return setting


def run(args: argparse.Namespace) -> int:
    """Searches, saves the JSON after each kind; 1 if a frozen config is wrong."""
    bench = Tuning(setting_of(args), args.json)
    bench.run()
    return bench.finish([], bench.summary())
