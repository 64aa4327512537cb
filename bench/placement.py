"""Times `ring_attn.pack` and the usual layouts of a packed batch.

    packed          ring_attn.pack: documents whole on one rank if they fit
    zigzag          chunks r and 2P-1-r of the packed sequence, wherever documents begin
    per document    chunks r and 2P-1-r of every document: every ring spans all ranks

Batches are whole documents in random order. On the CPU all layouts are measured, in turn within
every repetition; a time is the slowest rank's for forward and backward. For GPUs they are
simulated, as by `ring-attn plan`.

    ring-attn bench placement --world-sizes 2,4 --json cpu.json
    ring-attn bench placement --world-sizes 8,64 --cluster h100 --json h100.json
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from rich.table import Table

import ring_attn
from ring_attn.bench.outputs import Outputs, add_outputs
from ring_attn.bench.report import Report, new_table, show
from ring_attn.bench.strategies import interleaved
from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.planning.balance import balance_of
from ring_attn.planning.devices import builtin_cluster
from ring_attn.planning.planner import explain
from ring_attn.tools.arguments import parse_size, parse_sizes
from ring_attn.tools.launch import run_ranks, send_part
from ring_attn.tools.texts import standard_library_files

# A token of source code has about four bytes.
BYTES_PER_TOKEN = 4

# Tokens per rank, and (q heads, kv heads, headdim): measured on CPUs, simulated for GPUs.
CPU_TOKENS, GPU_TOKENS = 8192, 32768
CPU_HEADS, GPU_HEADS = (4, 2, 64), (32, 8, 128)
BATCHES, ITERS, QUICK_TOKENS = 3, 5, 256

WAYS = {
    "packed": ("exchange", "ring", "all_gather", "auto"),
    "zigzag": ("ring", "exchange", "all_gather", "ulysses", "auto"),
    "per document": ("ring", "exchange", "all_gather"),
}
USUAL = (
    ("packed", "ring"),
    ("zigzag", "ring"),
    ("per document", "ring"),
    ("zigzag", "all_gather"),
)


def library(draw: random.Random, _most: int) -> int:
    """Length of a random file of the standard library, without tests, at four bytes per token."""
    return -(-len(draw.choice(standard_library_files())) // BYTES_PER_TOKEN)


def log_normal(mean: float, sigma: float, draw: random.Random, most: int) -> int:
    """exp of a normally distributed number, at most `most`."""
    return min(most, int(draw.lognormvariate(mean, sigma)))


DISTRIBUTIONS: dict[str, Callable[[random.Random, int], int]] = {
    "library": library,
    "long tail": partial(log_normal, 7.0, 1.5),  # median 1,100, mean 3,400
    "long": partial(log_normal, 9.5, 1.2),  # median 13,400, mean 27,400
    "one": lambda _draw, most: most,
}


# Milliseconds of each repetition, megabytes sent, and a note.
Timed = tuple[tuple[float, ...], float | None, str]


@dataclass(frozen=True)
class Setting:
    """Batches and ranks; `cluster` names a device to simulate, None measures on this machine."""

    distributions: tuple[str, ...]
    world_sizes: tuple[int, ...]
    tokens_per_rank: int
    longest: int
    heads: tuple[int, int, int]
    batches: int
    iters: int
    cluster: str | None
    budget: float | None = None


@dataclass(frozen=True)
class Row:
    """Balance and times of a batch in one layout with one strategy.

    Attributes:
        work: the most visible pairs of a rank / the mean.
        rows: the most rows of a rank / the mean.
        sent_mb: megabytes of the rank that sends most, forward and backward; only if simulated.
        note: strategy of a simulation, or why there is no time.
    """

    lengths: str
    seed: int
    machine: str
    world_size: int
    documents: int
    longest: int
    tokens: int
    way: str
    strategy: str
    median_ms: float | None
    samples_ms: tuple[float, ...]
    work: float
    rows: float
    sent_mb: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Way:
    """A layout of a batch, its boundaries of documents, and strategies to time."""

    name: str
    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    strategies: tuple[str, ...]


def batch_of(name: str, tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths of documents drawn until the next does not fit; none is longer than `longest`."""
    draw, lengths, most = random.Random(seed), list[int](), min(longest, tokens)
    while True:
        length = DISTRIBUTIONS[name](draw, tokens if name == "one" else most)
        if name == "library" and length > most:
            continue
        if sum(lengths) + length > tokens:
            return lengths
        lengths += [length] * (length > 0)


def ways_of(lengths: Sequence[int], world_size: int) -> list[Way]:
    """The layouts to compare."""
    cuts = tuple(accumulate(lengths, initial=0))
    packing = ring_attn.pack(lengths, world_size)
    zigzag = SequenceLayout.zigzag(cuts[-1], world_size)
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    for start, length in zip(cuts, lengths, strict=False):
        shared = SequenceLayout.zigzag(length, world_size)
        for rank, part in enumerate(parts):
            part += [Segment(start + s.start, s.length) for s in shared.segments(rank)]
    per_document = SequenceLayout.from_segments(parts)
    layouts = (packing.layout, packing.cu_seqlens), (zigzag, cuts), (per_document, cuts)
    return [Way(name, *pair, WAYS[name]) for name, pair in zip(WAYS, layouts, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world-sizes", type=parse_sizes, default=(2, 4), help="numbers of ranks (2,4)")
    add("--lengths", default=",".join(DISTRIBUTIONS), help="distributions of lengths (all)")
    add("--tokens", type=parse_size, help=f"per rank ({CPU_TOKENS}; simulated {GPU_TOKENS})")
    add(
        "--longest",
        type=parse_size,
        help=f"most tokens of a document ({4 * CPU_TOKENS}; simulated {4 * GPU_TOKENS})",
    )
    add("--batches", type=parse_size, default=BATCHES, help=f"per distribution ({BATCHES})")
    add("--iters", type=parse_size, default=ITERS, help=f"repetitions ({ITERS})")
    add("--cluster", metavar="DEVICE", help="simulate nodes of 8 such GPUs: H100, B200")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Measures or simulates, and prints times of the usual layouts relative to the packed one."""
    names = tuple(name.strip() for name in args.lengths.split(","))
    for name in names:
        if name not in DISTRIBUTIONS:
            raise ValueError(f"--lengths must be of {', '.join(DISTRIBUTIONS)}, got {name!r}")
    usual = CPU_TOKENS if args.cluster is None else GPU_TOKENS
    tokens = args.tokens or (QUICK_TOKENS if args.quick else usual)
    setting = Setting(
        names, args.world_sizes, tokens, args.longest or 4 * usual,
        CPU_HEADS if args.cluster is None else GPU_HEADS, args.batches, args.iters, args.cluster,
    )  # fmt: skip
    bench = Report[Setting, Row](setting, Outputs.of(args))
    batches = [
        (name, seed) for name in names for seed in range(args.batches if name != "one" else 1)
    ]
    with bench.progress(len(batches) * len(setting.world_sizes)) as begin:
        for world_size in setting.world_sizes:
            for name, seed in batches:
                begin(f"{name} {seed} on {world_size} ranks", 1)
                lengths = batch_of(name, tokens * world_size, setting.longest, seed)
                bench.rows += rows_of(setting, name, seed, lengths, world_size)
                bench.save()
    if os.environ.get("RANK", "0") != "0":  # torchrun runs this on every rank
        return 0
    bench.save(last=True)
    return bench.finish([] if args.quiet else [ratio_table(bench.rows)], [])


def rows_of(
    setting: Setting, name: str, seed: int, lengths: Sequence[int], world_size: int
) -> list[Row]:
    """The rows of one batch."""
    ways = ways_of(lengths, world_size)
    if setting.cluster is None:
        times: list[list[float]] = []
        run_ranks(measure, world_size, ways, setting.heads, setting.iters, threads=1, device="cpu",
                  on_part=times.extend)  # fmt: skip
        timed: list[Timed] = [(tuple(samples), None, "") for samples in times]
    else:
        timed = [simulated(setting, way, s, world_size) for way in ways for s in way.strategies]
    rows, in_turn = [], iter(timed)
    for way in ways:
        n = way.layout.seqlen
        mask = Mask(n, n, True, (-1, -1), way.cu_seqlens, way.cu_seqlens)
        balance = balance_of(way.layout, mask)
        for strategy in way.strategies:
            samples, sent, note = next(in_turn)
            rows.append(
                Row(
                    name, seed, setting.cluster or "cpu", world_size, len(lengths), max(lengths), n,
                    way.name, strategy, statistics.median(samples) if samples else None, samples,
                    balance.of_work, balance.of_rows, sent, note,
                )
            )  # fmt: skip
    return rows


def simulated(setting: Setting, way: Way, strategy: str, world_size: int) -> Timed:
    """Milliseconds and megabytes from the planner; "auto" is the best of all strategies."""
    nheads, nheads_kv, headdim = setting.heads
    try:
        choice = explain(
            seqlen=way.layout.seqlen, world_size=world_size, nheads=nheads, nheads_kv=nheads_kv,
            headdim=headdim, causal=True, cu_seqlens=way.cu_seqlens, layout=way.layout,
            strategies=None if strategy == "auto" else [strategy],
            cluster=builtin_cluster(str(setting.cluster)),
        )  # fmt: skip
    except ValueError as refused:
        return (), None, str(refused)
    assert choice.best.prediction is not None, "it was simulated"
    total = choice.best.prediction.total
    return (1e3 * total.seconds,), total.bytes_sent / 1e6, choice.best.label


def measure(ways: Sequence[Way], heads: tuple[int, int, int], iters: int) -> None:
    """Sends the slowest rank's milliseconds of each way and strategy, by repetition."""
    nheads, nheads_kv, headdim = heads
    calls = []
    for way in ways:
        rows = way.layout.shard_len(dist.get_rank())
        torch.manual_seed(dist.get_rank())
        q, k, v, dout = (
            torch.randn(rows, n, headdim) for n in (nheads, nheads_kv, nheads_kv, nheads)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        cu_seqlens = torch.tensor(way.cu_seqlens, dtype=torch.int32)
        calls += [
            partial(_call, leaves, dout, way.layout, cu_seqlens, name) for name in way.strategies
        ]
    send_part(interleaved(calls, iters))


def _call(
    leaves: list[torch.Tensor],
    dout: torch.Tensor,
    layout: SequenceLayout,
    cu_seqlens: torch.Tensor,
    strategy: str,
) -> None:
    out = ring_attn.ring_attention(
        *leaves, causal=True, cu_seqlens=cu_seqlens, layout=layout, strategy=strategy
    )
    torch.autograd.grad(out, leaves, dout)


def ratio_table(rows: Sequence[Row]) -> Table:
    """Times of the usual layouts relative to the packed exchange, and of the best of both sides."""
    exchange = [("packed", "exchange")]
    every = [(way, strategy) for way, names in WAYS.items() for strategy in names]
    packed = [way for way in every if way[0] == "packed"]
    columns = {f"{way}, {strategy}": ([(way, strategy)], exchange) for way, strategy in USUAL}
    columns["best not packed / best packed"] = [x for x in every if x not in packed], packed
    table = new_table(
        "time / that of packed exchange: least, median, most of the batches",
        ("lengths", "machine", "ranks"),
        tuple(columns),
    )
    for key in dict.fromkeys((row.lengths, row.machine, row.world_size) for row in rows):
        of_key = [row for row in rows if (row.lengths, row.machine, row.world_size) == key]
        by_column = [ratios(of_key, *column) for column in columns.values()]
        spreads = ((min(r), statistics.median(r), max(r)) if r else () for r in by_column)
        table.add_row(*map(str, key), *(" ".join(show(x, ".2f") for x in s) for s in spreads))
    return table


Ways = Sequence[tuple[str, str]]


def ratios(rows: Sequence[Row], ways: Ways, over: Ways) -> list[float]:
    """For each batch, the best time of `ways` / the best time of `over`."""
    times = {(row.seed, row.way, row.strategy): row.median_ms for row in rows}
    of_batches = []
    for seed in dict.fromkeys(row.seed for row in rows):
        both = [
            [ms for way in side if (ms := times.get((seed, *way))) is not None]
            for side in (ways, over)
        ]
        if all(both):
            of_batches.append(min(both[0]) / min(both[1]))
    return of_batches
