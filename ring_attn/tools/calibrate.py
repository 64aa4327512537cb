"""Measure this machine for the simulator: attention, copies and messages, with all ranks at work.

    ring-attn calibrate --json machine.json           # 1, 2 and 4 ranks, one thread each
    ring-attn plan --cluster machine.json ...

Every figure is that of ranks which work at the same time, so what they take from each other (cores,
memory, the loopback) is in it. What is received or copied lands in new memory, as it does in a
call: on a CPU its pages are made then, which may take longer than the copy. What is fitted: times
of tiles to `devices.Rate`, times of messages to `devices.Link`; the table shows by how much the
fits miss.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from ring_attn.backends import choose_backend, get_backend
from ring_attn.backends.base import Backend
from ring_attn.cost import flops
from ring_attn.plan import Band, Hop, Tile
from ring_attn.planning.devices import Cluster, Device, Link, Rate, compute_seconds, to_json
from ring_attn.spec import AttentionSpec, Scores, TransportOptions
from ring_attn.tools.arguments import (
    add_common,
    dtype_name,
    parse_dtype,
    parse_size,
    parse_sizes,
    table_console,
    write_if_interrupted,
    write_json,
)
from ring_attn.tools.env import machine
from ring_attn.tools.launch import check_memory, rank_device, run_ranks, send_part
from ring_attn.transport.p2p import P2PTransport, open_p2p
from ring_attn.validation import check_group

WORLD_SIZES = (1, 2, 4)
ROWS, QUICK_ROWS = (128, 256, 512, 1024, 2048, 3072), (128, 256, 512)
MESSAGES, QUICK_MESSAGES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23), (1 << 14, 1 << 17)
# Short measurements vary more.
REPEATS, QUICK_REPEATS, MESSAGE_REPEATS, MOST_REPEATS = 3, 2, 15, 15
COPIED = 1 << 22

# A transfer that is to lie under a tile's compute takes about this share of it.
OVERLAPPED_SHARE = 0.3

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Setting:
    """The measurements to take, the same in every rank."""

    spec: AttentionSpec
    backend: str
    rows: tuple[int, ...]
    messages: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class TileSample:
    """Seconds of one tile: as `devices.compute_seconds` takes it."""

    backward: bool
    kind: str
    area: int
    rows: int
    edge: int
    per_pair: int
    seconds: float

    def predicted(self, rate: Rate) -> float:
        """Seconds at that rate."""
        shape = (self.area, self.rows, self.edge, self.per_pair)
        return float(compute_seconds(rate, *(torch.tensor(x) for x in shape)))


@dataclass(frozen=True)
class MessageSample:
    """Seconds of one exchange with so many bytes leaving each rank."""

    op: str
    nbytes: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `ring-attn calibrate`."""
    parser.add_argument(
        "--world-sizes", type=parse_sizes, help="numbers of ranks, with commas between (1,2,4)"
    )
    parser.add_argument("--heads", type=parse_size, default=8, help="query heads (8)")
    parser.add_argument(
        "--kv-heads", type=parse_size, help="KV heads; as many as --heads by default"
    )
    parser.add_argument("--head-dim", type=parse_size, default=64, help="of q, k and v (64)")
    parser.add_argument("--dtype", type=parse_dtype, default=torch.float32, help="float32")
    parser.add_argument("--backend", default="auto", help="as for ring_attention (auto)")
    parser.add_argument(
        "--threads", type=parse_size, default=1, help="CPU threads of each rank (1)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda where there are enough GPUs"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, prints what was fitted, and writes the JSON that `load_cluster` reads."""
    world_sizes = args.world_sizes or (WORLD_SIZES[:2] if args.quick else WORLD_SIZES)
    command = (
        f"ring-attn calibrate --world-sizes {','.join(map(str, world_sizes))} --heads "
        f"{args.heads} --kv-heads {args.kv_heads or args.heads} --head-dim {args.head_dim} "
        f"--dtype {dtype_name(args.dtype)} --backend {args.backend} --threads {args.threads}"
    ) + (" --quick" if args.quick else "")
    found: dict[int, tuple[Cluster, list[dict[str, Any]]]] = {}
    samples: dict[str, list[dict[str, Any]]] = {}

    def report() -> dict[str, Any]:
        return {
            "machine": machine(),
            "command": command,
            "clusters": {str(ranks): to_json(cluster) for ranks, (cluster, _) in found.items()},
            "samples": samples,
        }

    write_if_interrupted(args.json, report)
    for world_size in world_sizes:
        taken = samples.setdefault(str(world_size), [])
        found[world_size] = calibrate(
            world_size,
            heads=args.heads,
            kv_heads=args.kv_heads or args.heads,
            head_dim=args.head_dim,
            dtype=args.dtype,
            backend=args.backend,
            threads=args.threads,
            device=args.device,
            quick=args.quick,
            on_sample=taken.append,
        )
    if args.json:
        write_json(args.json, report())
    if not args.quiet:
        table_console().print(_table(found))
    return 0


def calibrate(
    world_size: int,
    *,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    threads: int = 1,
    device: str | None = None,
    quick: bool = False,
    on_sample: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[Cluster, list[dict[str, Any]]]:
    """The cluster that so many ranks on this machine are, and the measurements behind it.

    `on_sample` gets each measurement as it comes.
    """
    kind = device or ("cuda" if torch.cuda.device_count() >= world_size else "cpu")
    spec = AttentionSpec(kind, dtype, 1, heads, kv_heads, head_dim, head_dim)
    setting = Setting(
        spec,
        choose_backend(spec, backend).name,
        QUICK_ROWS if quick else ROWS,
        QUICK_MESSAGES if quick else MESSAGES,
        QUICK_REPEATS if quick else REPEATS,
    )
    if kind == "cpu":
        # q, k, v, out, their gradients and the state of the largest tile, in each rank.
        rows = setting.rows[-1] * (2 * heads + 2 * kv_heads) * head_dim
        check_memory("the tiles", 2 * rows * dtype.itemsize * world_size, "use fewer --heads")
    ranks = run_ranks(
        measure, world_size, setting, threads=threads, device=device, on_part=on_sample
    )
    tiles, messages, bandwidth, slowdown = ranks[0]  # the same on every rank
    forward, backward, window_forward, window_backward = (
        fit_rate([t for t in tiles if t.backward == b and (t.kind == "window") == window])
        for window in (False, True)
        for b in (False, True)
    )
    links = {
        op: fit_link(op, [m for m in messages if m.op == op])
        for op in dict.fromkeys(m.op for m in messages)
    }
    inside = links.pop("shift", Link("alone", 0.0, bandwidth))
    name = str(machine().get("cpu", kind)) if kind == "cpu" else torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else 0
    made = Device(
        name, 0.0, forward, backward, bandwidth, float(memory), window_forward, window_backward
    )
    cluster = Cluster(made, world_size, inside, inside, None, slowdown, links)
    return cluster, [*map(asdict, tiles), *map(asdict, messages)]


Sample = TypeVar("Sample", TileSample, MessageSample)

Measured = tuple[list[TileSample], list[MessageSample], float, float]


def fit_rate(samples: Sequence[TileSample]) -> Rate:
    """The rate that meets the times best, relative to each; no part of it negative.

    Example:
        >>> from dataclasses import replace
        >>> rate = Rate(1e9, 1e-3, 50.0, 20.0)
        >>> shapes = [(n * n, n, 0) for n in (64, 256)] + [(n * n // 2, n, n) for n in (64, 256)]
        >>> samples = [TileSample(False, "", *shape, 1000, 0.0) for shape in shapes]
        >>> fitted = fit_rate([replace(s, seconds=s.predicted(rate)) for s in samples])
        >>> round(fitted.flops / 1e9, 3), round(fitted.row_columns), round(fitted.edge_columns)
        (1.0, 50, 20)
    """
    table = torch.tensor(
        [[1.0, *(x * s.per_pair for x in (s.area, s.rows, s.edge))] for s in samples],
        dtype=torch.float64,
    )
    seconds = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    launch, pair, row, edge = _nonnegative(table / seconds[:, None], needed=1)
    return Rate(1 / pair, launch, row / pair, edge / pair)


def fit_link(name: str, samples: Sequence[MessageSample]) -> Link:
    """The link that meets the times best, relative to each.

    Example:
        >>> samples = [MessageSample("shift", n, 1e-3 + n / 1e9) for n in (10**4, 10**6, 10**7)]
        >>> link = fit_link("loopback", samples)
        >>> round(link.latency, 6), round(link.bandwidth / 1e9, 6)
        (0.001, 1.0)
    """
    table = torch.tensor([[1.0, s.nbytes] for s in samples], dtype=torch.float64)
    seconds = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    latency, byte = _nonnegative(table / seconds[:, None], needed=1)
    return Link(name, latency, 1 / byte)


def _nonnegative(table: Tensor, needed: int) -> list[float]:
    """x >= 0 with the least squares |table x - 1|, x[needed] > 0: the best of all supports."""
    scale = table.abs().amax(0).clamp(min=1e-300)
    columns = table.size(1)
    best, found = math.inf, [0.0] * columns
    for count in range(1, columns + 1):
        for support in combinations(range(columns), count):
            if needed not in support:
                continue
            part = (table / scale)[:, support]
            solution = torch.linalg.lstsq(
                part, torch.ones(len(table), 1, dtype=table.dtype)
            ).solution
            residual = float((part @ solution - 1).square().sum())
            # A column more has to be worth it, and may not take from the others.
            if (
                bool((solution >= 0).all())
                and residual < best * (1 - 1e-6)
                and float(solution[support.index(needed)]) > 0
            ):
                best = residual
                found = [0.0] * columns
                for column, value in zip(
                    support, (solution[:, 0] / scale[list(support)]).tolist(), strict=True
                ):
                    found[column] = value
    return found


# -- within a rank


def measure(setting: Setting) -> Measured:
    """All samples of this rank."""
    bench = _Bench(setting)
    tiles = [_sent(sample) for sample in bench.tiles()]
    messages = [_sent(sample) for sample in bench.messages()] if bench.world_size > 1 else []
    slowdown = bench.slowdown() if bench.world_size > 1 else 0.0
    return tiles, messages, bench.memory_bandwidth(), slowdown


def _sent(sample: Sample) -> Sample:
    send_part(asdict(sample))
    return sample


class _Bench:
    """Times attention, messages and copies from a barrier until all ranks are done."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.spec = setting, setting.spec
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = rank_device()
        self.backend: Backend = get_backend(setting.backend)
        self.scores = Scores(1.0 / math.sqrt(self.spec.headdim))
        self.transport: P2PTransport = open_p2p(check_group(None), TransportOptions())

    def seconds(self, fn: Callable[[], object], repeats: int | None = None) -> float:
        """Until the last rank is done: the median of some repetitions, after one not counted.

        Ranks that share a core are done one after another; a mean over them would be too little.
        """
        samples = []
        for _ in range((repeats or self.setting.repeats) + 1):
            dist.barrier()
            self._finished()
            start = time.perf_counter()
            fn()
            self._finished()
            elapsed = torch.tensor(time.perf_counter() - start, device=self.device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            samples.append(float(elapsed))
        return statistics.median(samples[1:])

    def _finished(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tiles(self) -> Iterator[TileSample]:
        """FULL and CAUSAL squares, FULL rectangles half as wide and windows, of several sizes."""
        forward_pair, backward_pair = (flops(1, self.spec, backward=b) for b in (False, True))
        for rows in self.setting.rows:
            for kind, cols, band in (
                ("full", rows, Band(None, None)),
                ("full", rows // 2, Band(None, None)),
                ("causal", rows, Band(None, 0)),
                ("window", rows, Band(-(rows // 4), 0)),
                ("window", rows, Band(-(rows // 2), rows // 8)),
            ):
                tile = Tile(slice(0, rows), slice(0, cols), band)
                lo, hi = band
                edge = 0 if hi is None else min(cols - 1 - hi, rows)
                edge += 0 if lo is None else min(rows - 1 + lo, rows)
                forward, backward = self.calls(tile)
                repeats = self.setting.repeats * self.setting.rows[-1] // rows
                repeats = min(repeats, MOST_REPEATS)
                shape = (kind, tile.area, rows, edge, forward_pair)
                yield TileSample(False, *shape, self.seconds(forward, repeats))
                shape = (kind, tile.area, (rows + cols) // 2, edge, backward_pair)
                yield TileSample(True, *shape, self.seconds(backward, repeats))

    def calls(self, tile: Tile) -> tuple[Callable[[], object], Callable[[], object]]:
        """Folding a tile into a state that has been begun, and its gradients."""
        spec, scores, backend = self.spec, self.scores, self.backend

        def normal(rows: int, heads: int, dim: int) -> Tensor:
            return torch.randn(spec.batch, rows, heads, dim, device=self.device, dtype=spec.dtype)

        q, dout = (normal(tile.rows, spec.nheads, d) for d in (spec.headdim, spec.headdim_v))
        k, v = (normal(tile.cols, spec.nheads_kv, d) for d in (spec.headdim, spec.headdim_v))

        def fold(state: Any, last: bool) -> Any:
            return backend.forward(q, k, v, (tile,), state, scores=scores, last=last)

        state = fold(backend.new_state(q, spec.headdim_v), last=True)
        out, lse = backend.finalize(state, q.dtype)
        delta = backend.delta(out, dout)
        state = fold(backend.new_state(q, spec.headdim_v), last=False)
        grads = [torch.zeros_like(x, dtype=spec.accum_dtype) for x in (q, k, v)]

        def backward() -> None:
            backend.backward(
                q, k, v, dout, lse, delta, (tile,), *grads, scores=scores, out=out
            )  # fmt: skip

        return lambda: fold(state, last=False), backward

    def messages(self) -> Iterator[MessageSample]:
        """Exchanges of every kind and size, all ranks at once."""
        for op in ("shift", *COLLECTIVES):
            for nbytes in self.setting.messages:
                part = max(nbytes // (1 if op == "shift" else self.world_size - 1) // 64 * 64, 64)
                leaving = part if op == "shift" else part * (self.world_size - 1)
                seconds = self.seconds(self.exchange(op, part), MESSAGE_REPEATS)
                yield MessageSample(op, leaving, seconds)

    def exchange(self, op: str, part: int) -> Callable[[], None]:
        """One exchange with so many bytes for a rank, posted and waited for."""
        post = self.post(op, part)

        def both() -> None:
            post()
            self.transport.wait("shards")

        return both

    def post(self, op: str, part: int) -> Callable[[], None]:
        """The posting of it."""
        ranks, transport = self.world_size, self.transport
        whole = torch.zeros(ranks * part, dtype=torch.uint8, device=self.device)
        one = whole[:part]

        def new(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        if op == "shift":
            hop = Hop((self.rank + 1) % ranks, (self.rank - 1) % ranks)
            return lambda: transport.post("shards", 0, hop, one, new(part))
        if op == "all_gather":
            return lambda: transport.all_gather("shards", 0, one, new(ranks * part))
        if op == "reduce_scatter":
            send = whole.view(torch.float32)
            return lambda: transport.reduce_scatter(
                "shards", 0, send, new(part).view(torch.float32)
            )
        counts = [part] * ranks
        return lambda: transport.all_to_all("shards", 0, whole, counts, new(ranks * part), counts)

    def memory_bandwidth(self) -> float:
        """Bytes/s of copying half the heads of some rows: read, and written to a new tensor."""
        x = torch.zeros(COPIED // 512, 2, 64, device=self.device)
        return COPIED / self.seconds(lambda: x[:, :1].contiguous(), MESSAGE_REPEATS)

    def slowdown(self) -> float:
        """The share of its speed that compute loses while a transfer is under way."""
        rows = self.setting.rows[-2]
        tile = Tile(slice(0, rows), slice(0, rows), Band(None, None))
        compute, _ = self.calls(tile)
        alone = self.seconds(compute)
        size = self.setting.messages[-1]
        transfer = self.seconds(self.exchange("shift", size))
        # Every rank must send as much: that of rank 0 decides.
        share = torch.tensor(OVERLAPPED_SHARE * alone / transfer, device=self.device)
        dist.broadcast(share, 0)
        size = max(int(size * float(share)) // 64 * 64, 64)
        transfer = self.seconds(self.exchange("shift", size))
        post = self.post("shift", size)

        def both() -> None:
            post()
            compute()
            self.transport.wait("shards")

        lost = self.seconds(both) - alone
        return min(max(lost / transfer, 0.0), 0.9)


def _table(found: dict[int, tuple[Cluster, list[dict[str, Any]]]]) -> Table:
    columns = ("ranks", "what", "GFLOP/s, GB/s", "s at 0", "columns a row, an edge", "missed by")
    table = Table(*columns, title="this machine, all ranks at work")
    for ranks, (cluster, samples) in found.items():
        tiles = [TileSample(**s) for s in samples if "kind" in s]
        for name, backward, window in (
            ("forward", False, False),
            ("backward", True, False),
            ("window, forward", False, True),
            ("window, backward", True, True),
        ):
            rate = cluster.device.rate(backward=backward, window=window)
            some = [t for t in tiles if t.backward == backward and (t.kind == "window") == window]
            table.add_row(
                str(ranks), name, f"{rate.flops / 1e9:.1f}", f"{rate.launch:.2g}",
                f"{rate.row_columns:.0f}, {rate.edge_columns:.0f}",
                f"{100 * worst_miss(rate, some):.0f} %",
            )  # fmt: skip
        copied = f"{cluster.device.memory_bandwidth / 1e9:.1f}"
        table.add_row(str(ranks), "copy", copied, "", "", "")
        if ranks > 1:
            for name, link in {"shift": cluster.inside, **cluster.collectives}.items():
                speed = f"{link.bandwidth / 1e9:.2f}"
                table.add_row(str(ranks), name, speed, f"{link.latency:.2g}", "", "")
            table.add_row(str(ranks), "slowdown", f"{100 * cluster.slowdown:.0f} %", "", "", "")
    return table


def worst_miss(rate: Rate, samples: Sequence[TileSample]) -> float:
    """The greatest relative error of a fitted rate."""
    return max((abs(s.predicted(rate) / s.seconds - 1) for s in samples), default=0.0)
