"""Times of recurrent layers on split rows; `cli.options` says of what."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from ring_attn.bench.report import Report
from ring_attn.bench.timing import turned
from ring_attn.cli.arguments import is_first_rank, new_table, show
from ring_attn.cli.launch import run_ranks, timed_on_ranks
from ring_attn.cli.options import RECURRENCE_ITERS, SEQLEN
from ring_attn.core.layout import SequenceLayout
from ring_attn.groups import check_group

HEADS, HEADDIM = 4, 64
LAYOUTS, MODES = ("contiguous", "zigzag"), ("fwd", "fwd_bwd")

# Kinds of layers: the function, and the model of transformers that has it.
KINDS = {
    "gated delta rule": ("torch_chunk_gated_delta_rule", "qwen3_next"),
    "mamba2": ("mamba2_chunk_scan", "mamba2"),
}


@dataclass(frozen=True)
class RecurrenceSetting:
    seqlen: int
    world_size: int
    iters: int
    heads: int = HEADS
    headdim: int = HEADDIM
    threads: int = 1


@dataclass(frozen=True)
class RecurrenceRow:
    """Times of the slowest rank; `ratio` is the median over the layer's own in this run."""

    kind: str
    layout: str
    mode: str
    impl: str  # "alone" or "split"
    median_ms: float
    samples_ms: tuple[float, ...]
    ratio: float


def run(args: argparse.Namespace) -> int:
    """Measures every kind in both layouts, and prints the ratios."""
    if find_spec("transformers") is None:
        raise ImportError("bench recurrence needs transformers: pip install 'ring-attn[trainer]'")
    setting = RecurrenceSetting(
        args.seqlen or (512 if args.quick else SEQLEN),
        args.world_size,
        args.iters or (1 if args.quick else RECURRENCE_ITERS),
    )
    bench = Report[RecurrenceSetting, RecurrenceRow](setting, args.json, quiet=args.quiet)
    bench.rows += run_ranks(measure, setting.world_size, setting, threads=1, device="cpu")[0]
    if not is_first_rank():
        return 0
    bench.save(last=True)
    worst = max((row for row in bench.rows if row.mode == "fwd_bwd"), key=lambda row: row.ratio)
    return bench.finish(
        [table(bench.rows)],
        [f"forward and backward: at most {worst.ratio:.2f} x ({worst.kind}, {worst.layout})"],
    )


def table(rows: Sequence[RecurrenceRow]) -> Table:
    names = ("kind", "layout", "mode", "")
    found = new_table("medians of the slowest rank", names, ("ms", "x alone"))
    for row in rows:
        figures = show(row.median_ms, ".1f"), show(row.ratio, ".2f")
        found.add_row(row.kind, row.layout, row.mode, row.impl, *figures)
    return found


# -- within a rank


def measure(setting: RecurrenceSetting) -> list[RecurrenceRow]:
    from ring_attn.models.recurrent import SPLITS, Place

    rows: list[RecurrenceRow] = []
    for kind, (name, model) in KINDS.items():
        function = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
        for layout_name in LAYOUTS:
            layout = SequenceLayout.from_name(layout_name, setting.seqlen, setting.world_size)
            place = Place(layout, None, check_group(None))
            given = inputs(kind, layout.shard_len(dist.get_rank()), setting)
            calls = {
                "alone": partial(function, **given),
                "split": partial(SPLITS[name], function, place, **given),
            }
            for mode in MODES:
                rows += timed(calls, setting.iters, kind, layout_name, mode)
    return rows


def timed(
    calls: Mapping[str, Callable[[], Any]], iters: int, kind: str, layout: str, mode: str
) -> list[RecurrenceRow]:
    def one(call: Callable[[], Any]) -> None:
        with torch.set_grad_enabled(mode == "fwd_bwd"):
            result = call()
            out = result[0] if isinstance(result, tuple) else result
            if mode == "fwd_bwd":
                out.sum().backward()

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, iters):
        for name in turned(list(calls), turn):
            _, seconds = timed_on_ranks(partial(one, calls[name]))
            if turn >= 0:
                samples[name].append(1e3 * seconds)
    medians = {name: statistics.median(ms) for name, ms in samples.items()}
    return [
        RecurrenceRow(kind, layout, mode, name, ms, tuple(samples[name]), ms / medians["alone"])
        for name, ms in medians.items()
    ]


def inputs(kind: str, rows: int, setting: RecurrenceSetting) -> dict[str, Any]:
    """A layer's arguments for so many rows, in float32."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = 1, rows, setting.heads

    def normal(*dims: int) -> Tensor:
        return torch.randn(*shape, *dims, generator=generator)

    wide = setting.headdim
    if kind == "mamba2":
        x = {"hidden_states": normal(wide), "dt": normal(), "B": normal(wide), "C": normal(wide)}
        fixed = {"A": -torch.rand(setting.heads, generator=generator)}
        options: dict[str, Any] = {"chunk_size": 64, "dt_softplus": True}
    else:
        x = {name: normal(wide) for name in ("query", "key", "value")}
        x |= {"g": -0.1 * normal().abs(), "beta": normal().sigmoid()}
        fixed, options = {}, {"use_qk_l2norm_in_kernel": True}
    return {name: t.requires_grad_() for name, t in x.items()} | fixed | options
