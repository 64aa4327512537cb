"""`ring-attn bench strategies`: times every strategy over many shapes, beside auto's choice."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import ring_attn
from ring_attn.bench.outputs import Outputs
from ring_attn.bench.report import Report
from ring_attn.bench.timing import turned
from ring_attn.cli.arguments import is_first_rank, new_table, show
from ring_attn.cli.calibrate import calibrate
from ring_attn.cli.launch import run_ranks, send_part, timed_on_ranks
from ring_attn.cli.options.bench_strategies import ITERS, MAX_ITERS, SECONDS
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.machines.cluster import Cluster
from ring_attn.planning.choice import Choice
from ring_attn.planning.devices import load_cluster, to_json
from ring_attn.planning.planner import explain
from ring_attn.strategies.strategy import Strategy

WARMUP, QUICK_ITERS = 1, 2

# Auto's choice should be within this share of the best.
SHARE = 0.10

# The strategy with which all others are compared.
BASELINE = "ring"


@dataclass(frozen=True)
class Shape:
    """A call without the number of ranks; the lengths of `documents` add up to `seqlen`.

    `layout` is a name of `SequenceLayout.from_name`, or for documents "packed" or "per document".
    """

    name: str
    seqlen: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    documents: tuple[int, ...] = ()
    layout: str = "zigzag"

    def placed(self, world_size: int) -> tuple[SequenceLayout, Sequence[int] | None]:
        """The layout, and the boundaries of the documents in its order."""
        if self.layout == "packed":
            packing = ring_attn.pack(self.documents, world_size)
            return packing.layout, packing.cu_seqlens
        cuts = [*accumulate(self.documents, initial=0)] if self.documents else None
        if self.layout != "per document":
            return SequenceLayout.from_name(self.layout, self.seqlen, world_size), cuts
        parts: list[list[Segment]] = [[] for _ in range(world_size)]
        for start, length in zip(cuts or (), self.documents, strict=False):
            shared = SequenceLayout.zigzag(length, world_size)
            for rank, part in enumerate(parts):
                part += [Segment(start + s.start, s.length) for s in shared.segments(rank)]
        return SequenceLayout.from_segments(parts), cuts


# Long-tailed lengths, as of files: most are short, one has a third of all tokens.
LONG_TAIL = (160, 2720, 48, 1000, 640, 96, 1480, 320, 64, 856, 480, 216, 112)

SHAPES = (
    Shape("mha 512", 512),
    Shape("mha 1k", 1024),
    Shape("mha 2k", 2048),
    Shape("mha 4k", 4096),
    Shape("mha 1k contiguous", 1024, layout="contiguous"),
    Shape("mha 3k contiguous", 3072, layout="contiguous"),
    Shape("mha 2k striped", 2048, layout="striped"),
    Shape("mha 1k full", 1024, causal=False, layout="contiguous"),
    Shape("mha 2k full", 2048, causal=False, layout="contiguous"),
    Shape("gqa 8/2 1k", 1024, 8, 2),
    Shape("gqa 8/2 3k", 3072, 8, 2),
    Shape("gqa 8/2 2k contiguous", 2048, 8, 2, layout="contiguous"),
    Shape("gqa 6/2 2k", 2048, 6, 2),
    Shape("mqa 8/1 1k", 1024, 8, 1),
    Shape("mqa 8/1 2k contiguous", 2048, 8, 1, layout="contiguous"),
    Shape("mqa 4/1 2k full", 2048, 4, 1, causal=False, layout="contiguous"),
    Shape("window 256 of 4k", 4096, window=(256, 0), layout="contiguous"),
    Shape("window 1k of 4k", 4096, 8, 2, window=(1024, 0), layout="contiguous"),
    Shape("window 256,256 of 2k", 2048, causal=False, window=(256, 256), layout="contiguous"),
    Shape("documents 4 x 1k", 4096, documents=4 * (1024,), layout="contiguous"),
    Shape("documents mixed 4k", 4096, 8, 2, documents=(300, 1800, 64, 900, 1032), layout="zigzag"),
    Shape("documents 16 x 128", 2048, documents=16 * (128,), layout="contiguous"),
    *(
        Shape(f"long tail {layout}", sum(LONG_TAIL), 4, 2, documents=LONG_TAIL, layout=layout)
        for layout in ("packed", "zigzag", "per document")
    ),
    Shape("wide heads 128", 2048, 4, 2, 128),
    Shape("narrow heads 32", 2048, 8, 8, 32),
)  # fmt: skip


@dataclass(frozen=True)
class StrategyRow:
    """Times of a strategy over a shape; `predicted_ms` is None if it was not simulated."""

    shape: str
    world_size: int
    strategy: str
    predicted_ms: float | None
    median_ms: float
    samples_ms: tuple[float, ...]
    is_auto: bool


@dataclass(frozen=True)
class StrategySetting:
    """The calls to measure; `iters` None repeats for SECONDS."""

    shapes: tuple[Shape, ...]
    world_sizes: tuple[int, ...]
    iters: int | None
    quick: bool


@dataclass(frozen=True)
class ShapeVerdict:
    """Auto's choice and the best fixed strategy, over one shape."""

    shape: str
    world_size: int
    auto: str
    auto_ms: float
    best: str
    best_ms: float
    predicted_ms: float | None = None
    ring_ms: float | None = None

    @property
    def ratio(self) -> float:
        """Auto's time / the best time."""
        return self.auto_ms / self.best_ms


class Strategies(Report[StrategySetting, StrategyRow]):
    def __init__(self, setting: StrategySetting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        self.clusters: dict[str, Any] = {}

    def more(self) -> dict[str, Any]:
        verdicts = [{**asdict(v), "ratio": v.ratio} for v in judged(self.rows)]
        return {"clusters": self.clusters, "verdicts": verdicts}


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and counts the cases with auto within 10 % of the best."""
    shapes = chosen_shapes(args.shapes, quick=args.quick)
    iters = args.iters or (QUICK_ITERS if args.quick else None)
    setting = StrategySetting(shapes, args.world_sizes, iters, args.quick)
    bench = Strategies(setting, Outputs.of(args))
    for world_size in setting.world_sizes:
        if args.cluster is None:
            cluster = calibrate(world_size, quick=args.quick)
        else:
            cluster = load_cluster(args.cluster, world_size)
        bench.clusters[str(world_size)] = to_json(cluster)
        sweep(bench, world_size, cluster)
    if not is_first_rank():
        return 0  # rank 0 alone has the rows
    bench.save(last=True)
    verdicts = judged(bench.rows)
    within = [v for v in verdicts if v.ratio <= 1 + SHARE]
    summary = (
        f"auto is within {SHARE:.0%} of the best fixed strategy in {len(within)} of "
        f"{len(verdicts)} cases; median ratio {statistics.median(v.ratio for v in verdicts):.3f}, "
        f"greatest {max(v.ratio for v in verdicts):.3f}"
    )
    tables = [] if args.quiet else [verdict_table(verdicts)]
    return bench.finish(tables, [summary])


def chosen_shapes(words: str | None, *, quick: bool) -> tuple[Shape, ...]:
    """The shapes with one of the words in their names; quick ones are an eighth as long."""
    separate = [word.strip() for word in words.split(",")] if words else [""]
    shapes = [shape for shape in SHAPES if any(word in shape.name for word in separate)]
    if not shapes:
        raise ValueError(f"--shapes {words}: the names are {', '.join(s.name for s in SHAPES)}")
    return tuple(map(_shortened, shapes) if quick else shapes)


def _shortened(shape: Shape) -> Shape:
    window = [n if n < 0 else n // 8 for n in shape.window]
    documents = tuple(n // 8 for n in shape.documents)
    seqlen = sum(documents) or shape.seqlen // 8
    return replace(shape, seqlen=seqlen, window=(window[0], window[1]), documents=documents)


def explained(shape: Shape, world_size: int, cluster: Cluster) -> Choice:
    """The planner's choice for a shape, with every strategy simulated."""
    layout, cu_seqlens = shape.placed(world_size)
    return explain(
        seqlen=shape.seqlen,
        world_size=world_size,
        nheads=shape.heads,
        nheads_kv=shape.kv_heads,
        headdim=shape.head_dim,
        dtype=torch.float32,
        causal=shape.causal,
        window_size=shape.window,
        cu_seqlens=cu_seqlens,
        layout=layout,
        cluster=cluster,
        device_type="cpu",
        effort="all",
    )


def sweep(bench: Strategies, world_size: int, cluster: Cluster) -> None:
    setting = bench.setting
    choices = [explained(shape, world_size, cluster) for shape in setting.shapes]
    work = [
        (shape, tuple(c.strategy for c in choice.candidates if not c.refused))
        for shape, choice in zip(setting.shapes, choices, strict=True)
    ]

    with bench.progress(len(work)) as begin:

        def on_part(part: tuple[int, list[list[float]]]) -> None:
            index, times = part
            shape, choice = setting.shapes[index], choices[index]
            usable = [c for c in choice.candidates if not c.refused]
            bench.rows += [
                StrategyRow(
                    shape.name, world_size, candidate.label, 1e3 * candidate.seconds,
                    statistics.median(samples), tuple(samples), candidate is choice.best,
                )
                for candidate, samples in zip(usable, times, strict=True)
            ]  # fmt: skip
            begin(f"{shape.name} on {world_size} ranks is done", 1)

        begin(f"{world_size} ranks start", 0)
        run_ranks(
            measure, world_size, work, setting.iters, threads=1, device="cpu", on_part=on_part
        )


def judged(rows: Sequence[StrategyRow]) -> list[ShapeVerdict]:
    verdicts = []
    for shape, world_size in dict.fromkeys((row.shape, row.world_size) for row in rows):
        of_case = [row for row in rows if (row.shape, row.world_size) == (shape, world_size)]
        auto = next(row for row in of_case if row.is_auto)
        best = min(of_case, key=lambda row: row.median_ms)
        ring = next((row.median_ms for row in of_case if row.strategy == BASELINE), None)
        verdicts.append(
            ShapeVerdict(
                shape, world_size, auto.strategy, auto.median_ms, best.strategy, best.median_ms,
                auto.predicted_ms, ring,
            )
        )  # fmt: skip
    return verdicts


def verdict_table(verdicts: Sequence[ShapeVerdict]) -> Table:
    table = new_table(
        "forward and backward, medians of the slowest rank",
        ("shape", "ranks", "auto", "best fixed"),
        ("ms", "predicted", "best ms", "ratio", "ring"),
    )
    for v in verdicts:
        ms = (show(x, ".1f") for x in (v.auto_ms, v.predicted_ms, v.best_ms))
        figures = (*ms, show(v.ratio, ".3f"), show(v.ring_ms, ".1f"))
        style = "" if v.ratio <= 1 + SHARE else "red"
        table.add_row(v.shape, str(v.world_size), v.auto, v.best, *figures, style=style)
    return table


# -- within a rank


def measure(work: Sequence[tuple[Shape, Sequence[Strategy]]], iters: int | None) -> None:
    """Sends, for each shape, the slowest rank's milliseconds by strategy and repetition."""
    for index, (shape, strategies) in enumerate(work):
        send_part((index, _measured(shape, strategies, iters)))


def _measured(shape: Shape, strategies: Sequence[Strategy], iters: int | None) -> list[list[float]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout, cuts = shape.placed(world_size)
    torch.manual_seed(0)

    def normal(heads: int) -> Tensor:
        return layout.shard(torch.randn(1, shape.seqlen, heads, shape.head_dim), rank)

    q, k, v = (normal(n).requires_grad_() for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    dout = normal(shape.heads)
    cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)

    def call(strategy: Strategy) -> None:
        packed = cu_seqlens is not None
        inputs = [x[0] if packed else x for x in (q, k, v)]
        out = ring_attn.ring_attention(
            *inputs, causal=shape.causal, window_size=shape.window, cu_seqlens=cu_seqlens,
            layout=layout, strategy=strategy,
        )  # fmt: skip
        torch.autograd.grad(out, (q, k, v), dout[0] if packed else dout)

    return interleaved([partial(call, strategy) for strategy in strategies], iters)


def interleaved(calls: Sequence[Callable[[], None]], iters: int | None) -> list[list[float]]:
    """The slowest rank's milliseconds, by call and repetition; calls alternate; collective.

    `iters` None repeats for SECONDS.
    """

    def repeated(turns: range) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in calls]
        for turn in turns:
            for index in turned(range(len(calls)), turn):
                _, seconds = timed_on_ranks(calls[index])
                samples[index].append(1e3 * seconds)
        return samples

    repeated(range(WARMUP))
    if iters is None:
        # All ranks have the slowest rank's times, so they choose the same number.
        (round_ms,) = map(sum, zip(*repeated(range(1)), strict=True))
        iters = min(max(int(1e3 * SECONDS / round_ms), ITERS), MAX_ITERS)
    return repeated(range(iters))
