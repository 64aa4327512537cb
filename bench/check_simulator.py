"""Is the simulator right? Predicted against measured on this machine, and against published rings.

    python -m ring_attn.bench.check_simulator --json check.json

Measured: ring, all-gather and Ulysses, forward and forward + backward, on ranks of this machine
with a thread each, after `ring-attn calibrate` has measured tiles and messages by themselves. No
whole call enters the calibration. Published: what others report of their rings on H100, H800 and
A100, each beside what our schedule would take there with their kernel; they are other programs,
whose copies and merges differ, so the deviation is reported and not judged.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from rich.table import Table

from ring_attn.arguments import add_common, parse_sizes, table_console, write_json
from ring_attn.backends import choose_backend
from ring_attn.bench.calibrate import calibrate
from ring_attn.env import machine
from ring_attn.launch import rank_device, run_ranks
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.planning.devices import Cluster, Rate, builtin_cluster, load_cluster
from ring_attn.planning.schedule import schedule_of
from ring_attn.planning.simulate import simulate
from ring_attn.spec import AttentionSpec, TransportOptions
from ring_attn.strategies.core import make_call
from ring_attn.strategy import Strategy, resolve_strategy
from ring_attn.transport.p2p import open_p2p
from ring_attn.validation import check_group

WORLD_SIZES, QUICK_WORLD_SIZES = (1, 2, 4), (1, 2)
SEQLENS, QUICK_SEQLENS = (4096, 8192, 16384), (512, 1024)
STRATEGIES = ("ring", "all_gather", "ulysses")
REPEATS = 3

# Issue 5: predictions within so much of what is measured, in the median.
AIM = 0.15


@dataclass(frozen=True)
class Case:
    """A call to be measured."""

    strategy: str
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    layout: str = "zigzag"

    def spec(self, device_type: str) -> AttentionSpec:
        """In float32."""
        dims = (self.heads, self.kv_heads, self.head_dim, self.head_dim)
        return AttentionSpec(device_type, torch.float32, 1, *dims)

    def layouts(self, world_size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """Of queries and keys."""
        layout = SequenceLayout.from_name(self.layout, self.seqlen, world_size)
        return layout, layout

    @property
    def mask(self) -> Mask:
        """Over the whole sequence."""
        return Mask(self.seqlen, self.seqlen, causal=self.causal)


@dataclass(frozen=True)
class Row:
    """One comparison; seconds."""

    world_size: int
    strategy: str
    seqlen: int
    mode: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, positive where too much was predicted."""
        return self.predicted / self.measured - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--world-sizes", type=parse_sizes, help="with commas between (1,2,4)")
    parser.add_argument("--seqlens", type=parse_sizes, help="with commas between (4k,8k,16k)")
    parser.add_argument("--calibration", help="JSON of `ring-attn calibrate`; else it is done anew")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and compares; 1 where the median error misses the aim."""
    world_sizes = args.world_sizes or (QUICK_WORLD_SIZES if args.quick else WORLD_SIZES)
    seqlens = args.seqlens or (QUICK_SEQLENS if args.quick else SEQLENS)
    rows: list[Row] = []
    for world_size in world_sizes:
        if args.calibration:
            cluster = load_cluster(args.calibration, world_size)
        else:
            cluster, _ = calibrate(world_size, quick=args.quick, device="cpu")
        cases = [Case(name, n, 8, 8, 64) for name in STRATEGIES for n in seqlens]
        rows += compare(world_size, cases, cluster)
    published = published_rings()
    median = median_error(rows)
    if args.json:
        write_json(
            args.json,
            {
                "machine": machine(),
                "command": f"check_simulator --world-sizes {','.join(map(str, world_sizes))} "
                f"--seqlens {','.join(map(str, seqlens))}",
                "median_error": median,
                "rows": [{**asdict(row), "error": row.error} for row in rows],
                "published": [{**asdict(row), "deviation": row.deviation} for row in published],
            },
        )
    console = table_console()
    if not args.quiet:
        console.print(_measured_table(rows), _published_table(published))
    console.print(f"median error {100 * median:.1f} % (aim {100 * AIM:.0f} %), {len(rows)} cases")
    return int(median > AIM)


def median_error(rows: Sequence[Row]) -> float:
    """Of the magnitudes."""
    return statistics.median(abs(row.error) for row in rows)


def compare(world_size: int, cases: Sequence[Case], cluster: Cluster) -> list[Row]:
    """Predicted and measured times of each case, forward and with the backward."""
    measured = run_ranks(measure, world_size, list(cases), threads=1, device="cpu")
    rows = []
    for index, case in enumerate(cases):
        predicted = predict(case, world_size, cluster)
        for mode, (seconds, wanted) in enumerate(
            zip(predicted, _slowest(measured, index), strict=True)
        ):
            name = ("forward", "forward + backward")[mode]
            rows.append(Row(world_size, case.strategy, case.seqlen, name, seconds, wanted))
    return rows


def _slowest(
    measured: Sequence[Sequence[Sequence[tuple[float, float]]]], index: int
) -> list[float]:
    """The median repetition's time of the slowest rank, forward and in all."""
    repetitions = zip(*(rank[index] for rank in measured), strict=True)
    slowest = [[max(times) for times in zip(*ranks, strict=True)] for ranks in repetitions]
    return [statistics.median(times) for times in zip(*slowest, strict=True)]


def predict(case: Case, world_size: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the forward, and of both directions."""
    strategy = resolve_strategy(case.strategy, world_size)
    seconds = [
        simulate(
            schedule_of(
                strategy, case.spec("cpu"), case.layouts(world_size), case.mask, backward=backward
            ),
            cluster,
        ).seconds
        for backward in (False, True)
    ]
    return seconds[0], sum(seconds)


def measure(cases: Sequence[Case]) -> list[list[tuple[float, float]]]:
    """This rank's seconds of every repetition of every case: the forward, and both directions."""
    return [[_one(case) for _ in range(REPEATS + 1)][1:] for case in cases]


def _one(case: Case) -> tuple[float, float]:
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    transport = open_p2p(check_group(None), TransportOptions())
    spec, layouts = case.spec(device.type), case.layouts(world_size)
    strategy = resolve_strategy(case.strategy, world_size)
    call = make_call(
        strategy, spec, layouts, case.mask, rank, backend=choose_backend(spec, "auto").name
    )
    rows = layouts[0].shard_len(rank)
    q, k, v, dout = (
        torch.randn(1, rows, heads, case.head_dim, device=device)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    dist.barrier()
    start = time.perf_counter()
    saved = call.forward(q, k, v, transport, None).saved
    forward = time.perf_counter() - start
    call.backward(saved, dout, transport, None)
    return forward, time.perf_counter() - start


# -- published


@dataclass(frozen=True)
class Published:
    """A ring that others have measured.

    Attributes:
        source: who.
        conditions: on what, with which kernel.
        what: the direction and strategy.
        published: TFLOP/s of a GPU, by mask area.
        predicted: of our schedule with that kernel there.
    """

    source: str
    conditions: str
    what: str
    published: float
    predicted: float

    @property
    def deviation(self) -> float:
        """Relative, positive where more is predicted than was published."""
        return self.predicted / self.published - 1


# These rings add a step's output to the sum of those before outside of the kernel, with PyTorch's
# operators. Bytes read and written for an element of the output, counted from the operators:
# ring-flash-attention casts to float32, subtracts, scales by a sigmoid, subtracts (2+4, 8+4, 4+4,
# 8+4); TransformerEngine scales and adds (2+4, 4+4+4).
MERGED_BYTES = {"ring-flash-attention": 38.0, "TransformerEngine": 18.0}

ZHUZILIN = "ring-flash-attention 8996282"
MAGI = "MagiAttention v1.1 benchmark, read off figures"


def published_rings() -> list[Published]:
    """What others have published, and what is predicted for it."""
    return [*_ring_flash_attention(), *_magi()]


def _ring_flash_attention() -> list[Published]:
    """8 GPUs of a node, 8k tokens each, 32 heads of 128 with 8 kv heads, causal, flash-attention 2.

    Published are iterations a second; the device's rate is that of their own single-GPU run.
    """
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 32, 8, 128, 128)
    seqlen = 8 * 8192
    pairs = seqlen * (seqlen + 1) / 2
    per_pair = 4 * 128 * 32
    # GPU, link, single GPU's iterations a second over 8, then of the ring and of the zigzag ring.
    cases = (
        ("H800", "NVLink 4 (H800)", "fwd", 73.9, 38.5, 63.0),
        ("H800", "NVLink 4 (H800)", "fwd+bwd", 19.3, 10.4, 17.4),
        ("A100", "NVLink 3", "fwd", 46.7, 24.0, 38.2),
        ("A100", "NVLink 3", "fwd+bwd", 11.8, 6.2, 10.6),
    )
    rows = []
    for gpu, link, mode, single, ring, zigzag in cases:
        work = pairs * per_pair * (3.5 if mode == "fwd+bwd" else 1) / 8
        cluster = _with_single_gpu_time(gpu, link, mode, spec, 1 / (8 * single))
        cluster = _merging(cluster, MERGED_BYTES["ring-flash-attention"])
        for layout, iterations in (("contiguous", ring), ("zigzag", zigzag)):
            seconds = _seconds(Strategy(), spec, layout, seqlen, 8, cluster, mode)
            rows.append(
                Published(
                    ZHUZILIN,
                    f"8 {gpu}, 8k tokens each, 32:8 heads of 128, causal, flash-attention 2",
                    f"{layout} ring, {mode}",
                    work * iterations / 1e12,
                    work / seconds / 1e12,
                )
            )
    return rows


def _with_single_gpu_time(
    gpu: str, link: str, mode: str, spec: AttentionSpec, seconds: float
) -> Cluster:
    """The cluster with a device whose attention over 8k tokens takes so long by itself."""
    built_in = builtin_cluster("A100" if gpu == "A100" else "H100", inside=link)
    layout = SequenceLayout.contiguous(8192, 1)
    modes = (False, True) if mode == "fwd+bwd" else (False,)
    predicted = sum(
        simulate(
            schedule_of(
                Strategy(), spec, (layout, layout), Mask(8192, 8192, causal=True), backward=b
            ),
            built_in,
        ).seconds
        for b in modes
    )
    return _faster(built_in, predicted / seconds)


def _faster(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    forward, backward = (
        replace(rate, flops=rate.flops * factor) for rate in (device.forward, device.backward)
    )
    return replace(cluster, device=replace(device, forward=forward, backward=backward))


def _merging(cluster: Cluster, nbytes: float) -> Cluster:
    """The cluster with kernels that leave so many bytes an element of out to be merged apart."""
    device = cluster.device

    def slower(rate: Rate, per_element: float) -> Rate:
        columns = nbytes / device.memory_bandwidth * rate.flops / per_element
        return replace(rate, row_columns=rate.row_columns + columns)

    # Operations for a pair, by element of out: two products forward, five in the backward.
    forward, backward = slower(device.forward, 4.0), slower(device.backward, 10.0)
    return replace(cluster, device=replace(device, forward=forward, backward=backward))


def _magi() -> list[Published]:
    """8k tokens a GPU, 64 heads of 128 with 8 kv heads, FlashAttention 3, H100 with 400 Gb/s."""
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 64, 8, 128, 128)
    cluster = builtin_cluster("H100 FA3")
    ranks = (8, 16, 32, 64)
    published = (
        ("ring p2p", "ring", "causal fwd", (421, 454, 451, 446)),
        ("ring p2p", "ring", "causal bwd", (432, 475, 469, 457)),
        ("ring p2p", "ring", "full fwd", (511, 535, 516, 513)),
        ("ring p2p", "ring", "full bwd", (497, 519, 514, 505)),
        ("ring all-gather", "all_gather", "causal fwd", (602, 592, 591, 580)),
        ("ring all-gather", "all_gather", "causal bwd", (516, 525, 522, 523)),
        ("Ulysses", "ulysses", "causal fwd", (602, 557, 580, 586)),
        ("Ulysses", "ulysses", "causal bwd", (582, 560, 573, 585)),
    )
    rows = []
    for name, strategy, what, rates in published:
        mask, mode = what.split()
        for world_size, rate in zip(ranks, rates, strict=True):
            seqlen = 8192 * world_size
            causal = mask == "causal"
            pairs = seqlen * (seqlen + 1) / 2 if causal else float(seqlen) ** 2
            work = pairs * 4 * 128 * 64 * (2.5 if mode == "bwd" else 1) / world_size
            chosen = resolve_strategy(strategy, world_size)
            merging = cluster
            if strategy == "ring":
                merging = _merging(cluster, MERGED_BYTES["TransformerEngine"])
            seconds = _seconds(chosen, spec, "zigzag", seqlen, world_size, merging, mode, causal)
            rows.append(
                Published(
                    MAGI,
                    f"{world_size} H100, 8k tokens each, 64:8 heads of 128, FlashAttention 3",
                    f"{name}, {what}",
                    float(rate),
                    work / seconds / 1e12,
                )
            )
    return rows


def _seconds(
    strategy: Strategy,
    spec: AttentionSpec,
    kind: str,
    seqlen: int,
    world_size: int,
    cluster: Cluster,
    mode: str,
    causal: bool = True,
) -> float:
    layout = SequenceLayout.from_name(kind, seqlen, world_size)
    mask = Mask(seqlen, seqlen, causal=causal)
    directions = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}[mode]
    return sum(
        simulate(
            schedule_of(strategy, spec, (layout, layout), mask, backward=backward), cluster
        ).seconds
        for backward in directions
    )


def _measured_table(rows: Sequence[Row]) -> Table:
    table = Table(
        "ranks", "strategy", "rows", "mode", "predicted ms", "measured ms", "error",
        title="simulator against this machine",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row.world_size), row.strategy, str(row.seqlen), row.mode,
            f"{1e3 * row.predicted:.1f}", f"{1e3 * row.measured:.1f}", f"{100 * row.error:+.0f} %",
        )  # fmt: skip
    return table


def _published_table(rows: Sequence[Published]) -> Table:
    columns = ("what", "on", "published", "predicted TFLOP/s", "deviation")
    table = Table(*columns, title="our schedule with their kernel, against what others published")
    for row in rows:
        table.add_row(
            row.what, row.conditions.split(",")[0], f"{row.published:.0f}", f"{row.predicted:.0f}",
            f"{100 * row.deviation:+.0f} %",
        )  # fmt: skip
    return table


def main() -> int:
    """`python -m ring_attn.bench.check_simulator`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
