"""Time of decoding on one device: one query per sequence and a long cache of keys and values.

Decoding reads the cache once and computes almost nothing, so memory bandwidth limits it. GB/s is
the bytes of K and V / time; `% of copy` compares that with the bytes that a copy within the device
reads and writes. All run in turn within every repetition, with a cold L2.

    parts          --backend: the keys in parallel parts, as in `tree_decode`
    whole          the same backend as a forward: a program per query head reads all keys
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN

Each result is compared with float64. The exit status is 1 if one of ours is wrong.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from rich.table import Table

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.bench.cells import Cells, OneDevice, add_device_arguments, one_device
from ring_attn.bench.implementations import SDPA_BACKENDS, Problem
from ring_attn.bench.outputs import Outputs
from ring_attn.bench.timing import Call, Sample, Watch, quantiles, time_in_turn
from ring_attn.tools.arguments import format_size, new_table, parse_size, parse_sizes, show

ITERS = 15
# Size of the copy that measures a GPU's memory bandwidth.
COPY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Setting(OneDevice):
    """The caches and repetitions of a run; `backend` computes parts and whole."""

    seqlens: tuple[int, ...]
    batches: tuple[int, ...]
    backend: str
    iters: int = ITERS
    mode: str = "fwd"
    implementations: tuple[str, ...] = ("parts", "whole", *SDPA_BACKENDS)

    def problems(self) -> Iterator[Problem]:
        for seqlen, batch in product(self.seqlens, self.batches):
            problem = self.problem(seqlen, causal=False)
            yield replace(problem, batch=batch, queries=1)


@dataclass(frozen=True)
class Row:
    """Times of an implementation on a cache; None where there is no time.

    Attributes:
        gbps: GB/s: bytes of K and V / the median.
        of_copy: `gbps` / the GB/s of a copy.
        ratio: greatest error / bound.
        note: why there is no time, or what is wrong.
    """

    name: str
    seqlen: int
    batch: int
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    gbps: float | None = None
    of_copy: float | None = None
    ratio: float | None = None
    note: str = ""


class Decode(Cells[Setting, Row]):
    """Measures one cache after another, and saves the report after each."""

    def __init__(self, setting: Setting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        self.copy_gbps = copy_gbps(setting.device, self._watch)
        self.backend = setting.backend
        for problem in islice(setting.problems(), 1):
            chosen = choose_backend(problem.spec, setting.backend, Purpose(decoding=True))
            if not get_backend(chosen.name).decodes:
                self.unavailable["parts"] = f"{chosen.name} has no parts"
                self._names.remove("parts")

    def more(self) -> dict[str, Any]:
        """The GB/s of a copy, and why implementations cannot run here."""
        return {"copy_gbps": self.copy_gbps, "unavailable": self.unavailable}

    def row(self, name: str, problem: Problem, note: str) -> Row:
        return Row(name, problem.seqlen, problem.batch, note=note)

    def timed(
        self, row: Row, problem: Problem, ratio: float | None, samples: list[Sample]
    ) -> list[Row]:
        low, median, high = (1e3 * x for x in quantiles([sample.ms[0] for sample in samples]))
        nbytes = 2 * problem.tokens * problem.kv_heads * problem.head_dim * problem.dtype.itemsize
        gbps = nbytes / median / 1e3
        of_copy = None if self.copy_gbps is None else gbps / self.copy_gbps
        return [
            replace(
                row, median_us=median, p20_us=low, p80_us=high, gbps=gbps, of_copy=of_copy,
                ratio=ratio,
            )
        ]  # fmt: skip


def copy_gbps(device: torch.device, watch: Watch) -> float | None:
    """GB/s that a copy within a GPU reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    x = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    samples = time_in_turn({"copy": Call([lambda: y.copy_(x)])}, watch, ITERS)["copy"]
    return 2 * COPY_BYTES / statistics.median(sample.ms[0] for sample in samples) / 1e6


def table(rows: Sequence[Row], setting: Setting) -> Table:
    """A line for each implementation on each cache."""
    lines = new_table(
        f"decoding, one query per sequence, {setting}",
        ("cache", "batch", ""),
        ("us", "GB/s", "% of copy", "error / bound"),
        "note",
    )
    for row in rows:
        lines.add_row(
            format_size(row.seqlen), str(row.batch), row.name, show(row.median_us, ".4g"),
            show(row.gbps, ".4g"), show(row.of_copy, ".0%"), show(row.ratio, ".2f"), row.note,
        )  # fmt: skip
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=parse_sizes, help="cache lengths (8k,32k,128k,1M; on a CPU 300,600)")
    add("--batch", type=parse_sizes, help="numbers of sequences (1,8; on a CPU 1)")
    add("--backend", help="our backend (triton; on a CPU auto)")
    add("--iters", type=parse_size, default=ITERS, help=f"repetitions ({ITERS})")
    add_device_arguments(parser)


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting from the options; raises like `one_device`."""
    shared = one_device(args)
    gpu = shared.device.type == "cuda"
    seqlens: tuple[int, ...] = (8192, 32768, 131072, 1 << 20) if gpu else (300, 600)
    batches: tuple[int, ...] = (1, 8) if gpu else (1,)
    if args.quick:
        seqlens, batches = seqlens[:1], batches[:1]
    return Setting(
        **vars(shared),
        seqlens=args.seqlen or seqlens,
        batches=args.batch or batches,
        backend=args.backend or ("triton" if gpu else "auto"),
        iters=args.iters,
    )


def run(args: argparse.Namespace) -> int:
    """Measures, saves the JSON after each cache, prints the table; 1 if one of ours is wrong."""
    bench = Decode(setting_of(args), Outputs.of(args))
    bench.run()
    reasons = [f"{name}: {why}" for name, why in bench.unavailable.items()]
    return bench.finish([] if args.quiet else [table(bench.rows, bench.setting)], reasons)
