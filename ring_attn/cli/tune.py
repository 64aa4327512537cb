"""`ring-attn tune`: find the fastest configs of the kernels on a GPU."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.bench.implementations import Ours, Shape, reason
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.kernel import parse_device
from ring_attn.bench.report import Report
from ring_attn.bench.timing import TimedCall, Watch, free_memory, time_in_turn
from ring_attn.cli.arguments import progress, show
from ring_attn.kernels import configs
from ring_attn.kernels.configs import FOLDED, Config
from ring_attn.kernels.tuned import GLUON, section, takes_gluon, takes_one_pass
from ring_attn.testing import Inputs
from ring_attn.testing.launch import check_tensors, map_in_processes, num_cores
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE
from ring_attn.values.outside import Json

# Kinds of configs to search, the most valuable first.
KINDS = ("fwd_whole", "fwd", "dkdv", "dkdv_whole", "dq", "dq_whole")

# Number of timed runs of a config, and of runs whose bits must be equal.
ITERS, REPEATS = 12, 20

# Maximum number of processes that build at once; each has a context on the GPU.
MAX_JOBS = 12

# The fraction of a kind's time after which building and checking stop.
CHECK_SHARE = 0.7

# Default seconds of a search on a GPU.
BUDGET = 600.0


@dataclass(frozen=True)
class TuneRow:
    """Figures of a kind's config; a figure that was not measured is None.

    `max_ratio` is the largest error / bound; above 1 the config is wrong. `speed` is relative to
    the frozen config. `note` is the reason why there is no time, or the fault of a wrong config.
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
        """Whether the config ran, and its results are wrong."""
        return self.max_ratio is not None and bool(self.note)

    @property
    def kind_of_backend(self) -> str:
        """The kind by which the backend selects the config."""
        return GLUON if self.gluon else self.kind

    def kernels(self, problem: Shape, data: Inputs) -> Ours:
        """Return attention in which the kind has this config."""
        return Ours(problem, data, TritonBackend({self.kind_of_backend: self.config}))

    def call(self, problem: Shape, data: Inputs) -> Callable[[], list[Tensor]]:
        """Return a call of only the kind's kernel."""
        return self.kernels(problem, data).one(kernel_of(self.kind))


def kernel_of(kind: str) -> str:
    """Return the kernel of a kind: "dkdv" for "dkdv_whole"."""
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
        """The kinds of configs to search, the most valuable first."""
        x = torch.empty(0, self.head_dim, dtype=self.dtype, device=self.device)
        # The backward in one pass has one config per head dim: there is nothing to search.
        one_pass = takes_one_pass(x, self.head_dim)
        kernels = set(self.kernels) - ({"dq", "dkdv"} if one_pass else set())
        return [kind for kind in KINDS if kernel_of(kind) in kernels]

    def problem_of(self, kind: str) -> Shape:
        """Return the problem of a kind: causal, or half as long and without a mask."""
        has_mask = not kind.endswith("_whole")
        return Shape(
            batch=1,
            seqlen=self.rows if has_mask else self.rows // 2,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            causal=has_mask,
            dtype=self.dtype,
            device=self.device,
        )


class Tuning(Report[TuneSetting, TuneRow]):
    """A search of one kind after another, with a report that is saved after each kind."""

    def __init__(self, setting: TuneSetting, path: Path | None = None) -> None:
        super().__init__(setting, path, budget=setting.budget)
        self._arch = configs.architecture(setting.device)
        self._watch = Watch(setting.device)

    def run(self) -> None:
        """Search kinds while time is left; later kinds get the time that earlier ones leave."""
        kinds = self.setting.kinds
        for index, kind in enumerate(kinds):
            progress.begin(f"configs of {kind}", done=index, total=len(kinds))
            seconds_left = self.left()
            if seconds_left > 0.0:
                num_left = len(kinds) - index
                self.search(kind, seconds_left / num_left)
            free_memory(self.setting.device)
            self.save()

    def to_json(self) -> dict[str, Json]:
        """Return the report, with the configs in the form that RING_ATTN_CONFIGS reads."""
        setting = self.setting
        chosen = {row.kind_of_backend: row.config for row in best(self.rows)}
        table = section(setting.device, setting.head_dim, setting.dtype, chosen)
        return super().to_json() | {"configs": table}

    def summary(self) -> list[str]:
        """Return lines with speeds, wrong configs, the use of the file, and counts."""
        rows = self.rows
        lines = [
            f"{row.kind}: {row.name}, {show(row.speed, '.3f')} x the frozen config"
            for row in best(rows)
        ]
        lines += [f"WRONG {row.kind}: {row.name}: {row.note}" for row in rows if row.wrong]
        lines.append(f"{CONFIGS_VARIABLE}=PATH on every rank uses these configs, PATH of --json")
        num_timed = sum(bool(row.speed) for row in rows)
        num_wrong = sum(row.wrong for row in rows)
        lines.append(f"{len(rows)} configs, {num_timed} timed, {num_wrong} wrong")
        return lines

    def search(self, kind: str, seconds: float) -> None:
        """Build, check and time candidates of one kind, the frozen config first."""
        start, problem = time.monotonic(), self.setting.problem_of(kind)
        deadline = start + CHECK_SHARE * seconds
        rows = self._built(problem, self._candidates(kind), deadline)
        judge, data = OracleJudge(problem), problem.data()
        rows = [self._checked(row, problem, data, judge, deadline) for row in rows]
        del judge  # frees memory before the timing
        rows = self._timed(problem, data, rows, start + seconds)
        for row in rows:
            if row.frozen and row.note:
                self.failures.append(f"{kind}, the frozen config: {row.note}")
        self.rows += rows

    def _candidates(self, kind: str) -> list[TuneRow]:
        """Return the candidates of a kind: the frozen config, then the search space.

        For a forward that Gluon can run, the configs of Gluon come first, the first one of them
        frozen.
        """
        setting = self.setting
        sizes = (self._arch, setting.head_dim, setting.dtype)
        x = torch.empty(0, setting.head_dim, dtype=setting.dtype, device=setting.device)
        frozen = configs.frozen(kind, *sizes)
        in_triton = [frozen, *configs.search_space(kind, *sizes)]
        in_gluon: Sequence[Config] = []
        if kernel_of(kind) == "fwd" and takes_gluon(x, setting.head_dim):
            in_gluon = configs.search_space(GLUON, *sizes)
        rows = [
            TuneRow(kind, f"gluon {config}", config, gluon=True, frozen=config == in_gluon[0])
            for config in in_gluon
        ]
        rows += [
            TuneRow(kind, str(config), config, frozen=not in_gluon and config == frozen)
            for config in in_triton
        ]
        return list(dict.fromkeys(rows))  # the search space may have the frozen config, too

    def _built(self, problem: Shape, rows: Sequence[TuneRow], deadline: float) -> list[TuneRow]:
        """Build all configs; add a note to those that do not compile or crash their process."""
        tasks = [BuildTask(problem, row, math.inf if row.frozen else deadline) for row in rows]
        if self.setting.device.type == "cuda":
            jobs = min(MAX_JOBS, num_cores())
            errors = map_in_processes(build, tasks, jobs, lambda _: "the process died")
        else:
            errors = map(build, tasks)
        return [
            replace(row, note=f"not built: {error}" if error else "")
            for row, error in zip(rows, errors, strict=True)
        ]

    def _checked(
        self, row: TuneRow, problem: Shape, data: Inputs, judge: OracleJudge, deadline: float
    ) -> TuneRow:
        """Return the row with its error, and a note if it is wrong or cannot be checked."""
        if row.note:
            return row
        if time.monotonic() > deadline and not row.frozen:
            return replace(row, note="not checked: there was no time left")
        try:
            ratio, note = judge.verdict(row.kernels)
            first = row.call(problem, data)()
            if not note and not self._repeats(lambda: row.call(problem, data)(), first):
                note = f"different bits in one of {self.setting.repeats} equal runs"
        except Exception as error:
            return replace(row, note=f"cannot run: {reason(error)}")
        return replace(row, max_ratio=ratio, note=note)

    def _repeats(self, call: Callable[[], list[Tensor]], first: list[Tensor]) -> bool:
        """Return whether further calls return the same bits as the first one."""
        for _ in range(self.setting.repeats - 1):
            if not all(torch.equal(x, y) for x, y in zip(first, call(), strict=True)):
                return False
        return True

    def _timed(
        self, problem: Shape, data: Inputs, rows: Sequence[TuneRow], end: float
    ) -> list[TuneRow]:
        """Measure the times of all rows without a note."""
        found = {row.name: row for row in rows}
        calls = {row.name: TimedCall([row.call(problem, data)]) for row in rows if not row.note}

        def failed(name: str, error: Exception) -> None:
            found[name] = replace(found[name], note=f"cannot run: {reason(error)}")

        samples = time_in_turn(
            calls,
            self._watch,
            self.setting.iters,
            seconds=max(end - time.monotonic(), 0.0),
            failed=failed,
        )
        medians = {
            name: statistics.median(sample.ms[0] for sample in of_name)
            for name, of_name in samples.items()
            if of_name
        }
        frozen_median = medians.get(rows[0].name)
        for name, median in medians.items():
            speed = None if frozen_median is None else frozen_median / median
            found[name] = replace(found[name], median_ms=median, speed=speed)
        return [*found.values()]


class BuildTask(NamedTuple):
    """A config to build, before a time of the monotonic clock."""

    problem: Shape
    row: TuneRow
    deadline: float


def build(task: BuildTask) -> str:
    """Run a config once, which adds it to triton's cache on disk; return the error, or ""."""
    if time.monotonic() > task.deadline:  # all processes share this clock
        return "there was no time left"
    try:
        task.row.call(task.problem, task.problem.data())()
    except Exception as error:
        return reason(error)
    return ""


def best(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """Return the fastest row of every timed kind that keeps a ring's results equal bit for bit.

    For equal bits, the kinds of a kernel must fold blocks of the same length. A kind that was not
    timed keeps its frozen config, and so its length. Both kinds of the forward in Gluon share one
    config.
    """
    fastest: list[TuneRow] = []
    for kernel, block in FOLDED.items():
        of_kernel = [row for row in rows if kernel_of(row.kind) == kernel]
        frozen_lengths = {getattr(row.config, block) for row in of_kernel if row.frozen}
        timed = [row for row in of_kernel if row.speed]
        kinds = {row.kind for row in timed}
        # Rows that can be combined: (length of blocks, name of a config in Gluon or "") -> the
        # fastest row of each kind.
        combinations: dict[tuple[int, str], dict[str, TuneRow]] = {}
        for row in sorted(timed, key=_speed):
            key = (getattr(row.config, block), row.name if row.gluon else "")
            combinations.setdefault(key, {})[row.kind] = row  # replaces a slower row
        usable = [
            list(by_kind.values())
            for (length, _), by_kind in combinations.items()
            if by_kind.keys() == kinds and (len(kinds) == 2 or length in frozen_lengths)
        ]
        if usable:
            fastest += max(usable, key=_product_of_speeds)
    return fastest


def _speed(row: TuneRow) -> float:
    """Return the speed of a timed row."""
    return row.speed or 0.0


def _product_of_speeds(rows: Iterable[TuneRow]) -> float:
    """Return the product of the speeds of a kernel's kinds."""
    return math.prod(_speed(row) for row in rows)


def setting_of(args: argparse.Namespace) -> TuneSetting:
    """Return the setting of the options; a CPU gets small sizes, only to test the search."""
    if args.device is None and not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU that torch can use: pass --device cpu to test the search with "
            "tiny sizes in Triton's interpreter"
        )
    path = os.environ.get(CONFIGS_VARIABLE)
    if path:
        raise ValueError(f"{CONFIGS_VARIABLE} must be unset for a search, got {path!r}: unset it")
    device = parse_device(args.device)
    on_gpu = device.type == "cuda"
    all_heads = args.heads or ((32, 8) if on_gpu else (4, 2),)
    head_dims = args.head_dims or (128 if on_gpu else 16,)
    if len(all_heads) > 1 or len(head_dims) > 1:
        raise ValueError(
            f"--heads must be one pair and --head-dim one size, got {all_heads} and {head_dims}"
        )
    heads, kv_heads = all_heads[0]
    rows = 32768 if on_gpu else 128
    setting = TuneSetting(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dims[0],
        dtype=args.dtype or (torch.bfloat16 if on_gpu else torch.float32),
        device=device,
        budget=BUDGET if on_gpu and args.budget is None else args.budget,
        kernels=args.kernels,
        rows=rows // 4 if args.quick else rows,
        iters=ITERS if on_gpu else 1,
        repeats=REPEATS if on_gpu else 2,
    )
    problem = setting.problem_of("fwd")
    check_tensors(f"q, k, v and out of {problem.seqlen} rows", problem.nbytes("fwd"), device.type)
    refused = TritonBackend().supports(problem.spec, explicit=True)
    if refused is not None:
        raise ValueError(f"backend triton {refused}")
    return setting


def run(args: argparse.Namespace) -> int:
    """Search, and save the JSON after each kind; return 1 if a frozen config is wrong."""
    bench = Tuning(setting_of(args), args.json)
    bench.run()
    return bench.finish([], bench.summary())
