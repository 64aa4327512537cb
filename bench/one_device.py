"""What the benchmarks on one device share: their options, where they run, and what they leave.

They are modules of their own, run by `make gpu` or by hand.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.table import Table

from ring_attn.arguments import (
    add_common,
    dtype_name,
    parse_dtype,
    parse_size,
    table_console,
    write_json,
)
from ring_attn.bench.implementations import Problem
from ring_attn.bench.kernel import parse_heads
from ring_attn.bench.timing import gpu_state
from ring_attn.env import machine
from ring_attn.launch import DEVICES


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """What the benchmarks on one device have in common: where, and which heads."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    backend: str
    device: torch.device
    budget: float | None = None

    def problem(self, seqlen: int) -> Problem:
        """One causal sequence, the whole of a ring."""
        return Problem(
            1, seqlen, self.heads, self.kv_heads, self.head_dim, True, self.dtype, self.device
        )

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{heads}, {dtype_name(self.dtype)}"


S = TypeVar("S", bound=OneDevice)
R = TypeVar("R")


class Findings(Generic[S, R]):
    """What a benchmark finds, on disk as it grows.

    Attributes:
        setting: what is measured.
        rows: dataclasses, one for each line of its table.
        failures: what is wrong, in words.
    """

    def __init__(self, setting: S, command: str = "", json: Path | None = None) -> None:
        """
        Args:
            setting: what is measured.
            command: the words that measure it again.
            json: where the report goes, whenever it is saved.
        """
        self.setting = setting
        self.rows: list[R] = []
        self.failures: list[str] = []
        self._command, self._json, self._start = command, json, time.monotonic()
        self._states = {"before": gpu_state()}

    def more(self) -> dict[str, Any]:
        """What its report says beside."""
        return {}

    def report(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        setting = {
            **asdict(self.setting),
            "dtype": dtype_name(self.setting.dtype),
            "device": self.setting.device.type,
        }
        rows: list[Any] = self.rows
        return {
            "machine": machine(),
            "gpu_state": self._states,
            "command": self._command,
            "setting": setting,
            "rows": [asdict(row) for row in rows],
            "failures": self.failures,
            **self.more(),
            "seconds": self.seconds,
        }

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds of its budget."""
        budget = self.setting.budget
        return (math.inf if budget is None else budget) - self.seconds

    def save(self, *, last: bool = False) -> None:
        """Writes the report; a run that is killed leaves a whole one."""
        if last:
            self._states["after"] = gpu_state()
        if self._json:
            part = self._json.with_name(f"{self._json.name}.part")
            write_json(part, self.report())
            part.replace(self._json)


def finish(bench: Findings[Any, Any], shown: Table | None, lines: Sequence[str] = ()) -> int:
    """Prints the table, what is wrong, and last lines; 1 if something is wrong."""
    console = table_console()
    if shown is not None:
        console.print(shown)
    for failure in bench.failures:
        console.print(failure, style="red", markup=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # whole, to be pasted
    return 1 if bench.failures else 0


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `one_device`, and those of every command."""
    add = parser.add_argument
    add("--heads", type=parse_heads, help="query heads / kv heads (32/8; on a CPU 4/2)")
    add("--head-dim", type=parse_size, help="128; on a CPU 16")
    add("--dtype", type=parse_dtype, help="bfloat16; on a CPU float32")
    add("--backend", help="triton; on a CPU auto")
    add("--budget", type=float, metavar="SECONDS", help="start nothing that would not end in time")
    add("--device", choices=DEVICES, help="default: cuda where there is one")
    add_common(parser)


def one_device(args: argparse.Namespace) -> OneDevice:
    """What the options describe; on a CPU small sizes, which only show that it works.

    Raises:
        ValueError: no such device, or several pairs of heads.
    """
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    if gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    heads, *more = args.heads or (((32, 8),) if gpu else ((4, 2),))
    if more:
        raise ValueError(f"--heads must be one pair, got {args.heads}")
    return OneDevice(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=args.head_dim or (128 if gpu else 16),
        dtype=args.dtype or (torch.bfloat16 if gpu else torch.float32),
        backend=args.backend or ("triton" if gpu else "auto"),
        device=device,
        budget=args.budget,
    )


def chosen_of(option: str, words: str, names: Collection[str]) -> list[str]:
    """Some of the names, with commas between; ValueError says which there are."""
    chosen = words.split(",")
    for name in chosen:
        if name not in names:
            raise ValueError(f"{option} must be of {list(names)}, got {name!r}")
    return chosen
