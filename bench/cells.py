"""Benchmarks on one device: `OneDevice`, their options, and `Cells`, which checks and times
implementations of attention on one problem after another.
"""

from __future__ import annotations

import argparse
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ring_attn.bench.implementations import (
    OURS,
    Attention,
    Data,
    Problem,
    forget_compiled,
    make,
    reason,
    unavailable,
)
from ring_attn.bench.judge import Judge, worst_of
from ring_attn.bench.outputs import Outputs, add_outputs
from ring_attn.bench.report import Report
from ring_attn.bench.timing import Call, Sample, free_memory, time_in_turn, watch_for
from ring_attn.core.dtypes import dtype_name
from ring_attn.tools.arguments import format_size, parse_dtype, parse_size
from ring_attn.tools.launch import DEVICES

# The time limit of a cell's repetitions.
CELL_SECONDS = 4.0

# Errors of ours that do not fail the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)


class CellSetting(Protocol):
    """The fields of a setting that `Cells` reads; problems of one table are consecutive."""

    @property
    def implementations(self) -> tuple[str, ...]: ...
    @property
    def mode(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def iters(self) -> int: ...
    def problems(self) -> Iterator[Problem]: ...


@dataclass
class Tried:
    """An implementation on a cell, built and checked, or a note why it cannot run."""

    note: str = ""
    attention: Attention | None = None
    ratio: float | None = None


S = TypeVar("S", bound=CellSetting)
R = TypeVar("R")


class Cells(Report[S, R]):
    """Measures one cell after another, and saves the report after each.

    Attributes:
        backend: the backend of ours.
        unavailable: reasons why implementations cannot run on this machine.
    """

    def __init__(self, setting: S, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        self.backend = "triton" if setting.device.type == "cuda" else "auto"
        self.unavailable = {
            name: why
            for name in setting.implementations
            if (why := unavailable(name, setting.device)) is not None
        }
        self._names = [name for name in setting.implementations if name not in self.unavailable]
        self._backward = setting.mode != "fwd"
        self._watch = watch_for(setting.device)
        self._judged: set[tuple[object, ...]] = set()

    def row(self, name: str, problem: Problem, note: str) -> R:
        """The row of an implementation without a time."""
        raise NotImplementedError

    def timed(
        self, row: R, problem: Problem, ratio: float | None, samples: list[Sample]
    ) -> list[R]:
        """The rows with times, for each mode."""
        raise NotImplementedError

    def run(self) -> None:
        """Measures cells until the budget is spent."""
        problems = list(self.setting.problems()) if self._names else []
        for problem, note in self.in_budget([(title(p), float(p.tokens), p) for p in problems]):
            if note:
                self.rows += [self.row(name, problem, note) for name in self._names]
            else:
                self._measure(problem)

    def _measure(self, problem: Problem) -> None:
        """Builds, checks, then times all implementations that can run a cell."""
        forget_compiled()
        free_memory(self.setting.device)
        try:
            data = problem.data()
            judge = Judge(problem, data, backward=self._backward)
            judge.prepare()
        except torch.OutOfMemoryError as error:
            note = f"cannot be judged: {reason(error)}"
            self.rows += [self.row(name, problem, note) for name in self._names]
            return
        tried = {name: self._tried(name, problem, data, judge) for name in self._names}
        del judge
        samples = self._time(tried, problem)
        for name, trial in tried.items():
            row = self.row(name, problem, trial.note)
            taken = samples.get(name, [])
            self.rows += self.timed(row, problem, trial.ratio, taken) if taken else [row]

    def _tried(self, name: str, problem: Problem, data: Data, judge: Judge) -> Tried:
        """Checks an implementation, on the short sequence once per table, and builds it."""

        def build(problem: Problem, data: Data) -> Attention:
            return make(name, problem, data, backend=self.backend, backward=self._backward)

        key, tried = (name, *table_of(problem)), Tried()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                whole = [] if key in self._judged else judge.whole(build)
                self._judged.add(key)
                tried.ratio, wrong = worst_of(whole + judge.sampled(build))
                tried.note = f"wrong: {wrong}" if wrong else ""
                if wrong and name in OURS:
                    self.failures.append(f"{name}, {title(problem)}: {wrong}")
                tried.attention = build(problem, data)
            except Exception as error:
                tried.note = self._failed(name, problem, error, warned)
        return tried

    def _time(self, tried: dict[str, Tried], problem: Problem) -> dict[str, list[Sample]]:
        """Times all implementations that can run: forward, then backward."""
        calls = {}
        for name, trial in tried.items():
            if trial.attention is not None:
                stages = [trial.attention.forward, trial.attention.backward]
                calls[name] = Call(stages[: 1 + self._backward], trial.attention.release)

        def failed(name: str, error: Exception) -> None:
            tried[name].note = self._failed(name, problem, error, [])

        return time_in_turn(
            calls, self._watch, self.setting.iters, seconds=CELL_SECONDS, failed=failed
        )

    def _failed(self, name: str, problem: Problem, error: Exception, warned: Sequence[Any]) -> str:
        """The note of a call that raised; ours may raise `REFUSALS`, other errors are failures."""
        why = reason(error, [str(warning.message) for warning in warned])
        if name in OURS and not isinstance(error, REFUSALS):
            traceback.print_exception(error)
            self.failures.append(f"{name}, {title(problem)}: {why}")
        free_memory(self.setting.device)
        return f"cannot run: {why}"


def table_of(what: Any) -> tuple[int, int, int, bool]:
    """Key of the table that shows a row or problem."""
    return what.heads, what.kv_heads, what.head_dim, what.causal


def title(what: Any, *, cell: bool = True) -> str:
    """The name of a cell, a row or problem, or that of its table."""
    heads = f"{what.heads}/{what.kv_heads} heads of {what.head_dim}"
    mask = "causal" if what.causal else "full"
    return f"{heads}, {mask}" + (f", {what.batch} x {format_size(what.seqlen)}" if cell else "")


# -- options


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """Device, heads and time limit of a benchmark."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    budget: float | None = None

    def problem(self, seqlen: int, *, causal: bool) -> Problem:
        return Problem(
            1, seqlen, self.heads, self.kv_heads, self.head_dim, causal, self.dtype, self.device
        )

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{heads}, {dtype_name(self.dtype)}"


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `one_device`, and those of every command."""
    add = parser.add_argument
    add("--heads", type=parse_heads, help="query heads / kv heads (32/8; on a CPU 4/2)")
    add("--head-dim", type=parse_size, help="default: 128; on a CPU 16")
    add("--dtype", type=parse_dtype, help="default: bfloat16; on a CPU float32")
    add("--budget", type=float, metavar="SECONDS", help="start no measurement after this time")
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    add_outputs(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Query and kv heads: "32/8,16" is ((32, 8), (16, 16)).

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    pairs = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{part!r}: kv heads must divide the query heads")
        pairs.append((heads, kv_heads))
    return tuple(pairs)


def parse_device(name: str | None) -> torch.device:
    """The device of that name; None is the GPU if there is one, else the CPU.

    Raises:
        ValueError: "cuda" is requested, but torch can use no GPU.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    return device


def one_device(args: argparse.Namespace) -> OneDevice:
    """The setting from the options; a CPU gets small sizes, only to test the benchmark.

    Raises:
        ValueError: the device does not exist, or there are several pairs of heads.
    """
    device = parse_device(args.device)
    gpu = device.type == "cuda"
    heads, *more = args.heads or (((32, 8),) if gpu else ((4, 2),))
    if more:
        raise ValueError(f"--heads must be one pair, got {args.heads}")
    return OneDevice(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=args.head_dim or (128 if gpu else 16),
        dtype=args.dtype or (torch.bfloat16 if gpu else torch.float32),
        device=device,
        budget=args.budget,
    )
