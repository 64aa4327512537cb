"""`ring-attn calibrate`: measures this machine for the simulator, on all ranks at once."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.backends.rates import Rate
from ring_attn.cli.arguments import command_line, write_json
from ring_attn.cli.env import machine
from ring_attn.core.program import Collective, Hop
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.machines.cluster import Cluster, Device, Host, Link, compute_seconds
from ring_attn.planning import devices
from ring_attn.testing.launch import checked_device, rank_device, run_ranks, timed_on_ranks
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import check_group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import P2PTransport, open_p2p

ROWS, QUICK_ROWS = (128, 256, 512, 1024, 2048, 3072), (128, 256, 512)
MESSAGES, QUICK_MESSAGES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23), (1 << 14, 1 << 17)
# Small tiles and messages are measured more often, as short times vary more.
REPEATS, QUICK_REPEATS, MESSAGE_REPEATS, MAX_REPEATS = 3, 2, 15, 15
COPIED = 1 << 22

# The overlapped transfer of `slowdown` takes about this share of the compute's time.
OVERLAPPED_SHARE = 0.3

# Kinds of tiles with separate rates, by (backward, window).
KINDS = {
    (False, False): "forward",
    (True, False): "backward",
    (False, True): "window, forward",
    (True, True): "window, backward",
}

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class CalibrationSetting:
    """The measurements to take, the same on every rank."""

    spec: AttentionSpec
    backend: str
    rows: tuple[int, ...]
    messages: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class TileSample:
    """Seconds of one tile, and its sizes for `compute_seconds`."""

    backward: bool
    kind: str
    area: int
    rows: int
    edge: int
    per_pair: int
    seconds: float

    @property
    def window(self) -> bool:
        return self.kind == "window"

    def predicted(self, rate: Rate) -> float:
        shape = (self.area, self.rows, self.edge, self.per_pair)
        return float(compute_seconds(rate, *shape))


@dataclass(frozen=True)
class MessageSample:
    """Seconds of one exchange, in which each rank sends `nbytes`."""

    op: str
    nbytes: int
    seconds: float


Samples = Sequence[TileSample | MessageSample]


def run(args: argparse.Namespace) -> int:
    """Measures, prints the fits, and writes the JSON that `load_cluster` reads."""
    cluster, samples = calibrate(args)
    write_json(args.json, {
        "machine": machine(),
        "command": command_line(),
        "cluster": asdict(cluster),
        "samples": [asdict(sample) for sample in samples],
    })  # fmt: skip
    if not args.quiet:
        print(*_fits(cluster, samples), sep="\n")
    return 0


def calibrate(args: argparse.Namespace) -> tuple[Cluster, Samples]:
    """Measures `--world-size` ranks on this machine."""
    kind, world_size = checked_device(args.device, args.world_size), args.world_size
    spec = AttentionSpec(kind, args.dtype, 1, args.heads, args.heads, args.head_dim, args.head_dim)
    sizes = (QUICK_ROWS, QUICK_MESSAGES, QUICK_REPEATS) if args.quick else (ROWS, MESSAGES, REPEATS)
    chosen = choose_backend(spec, args.backend, Purpose(backward=True)).name
    setting = CalibrationSetting(spec, chosen, *sizes)
    ranks = run_ranks(measure, world_size, setting, threads=args.threads, device=kind)
    tiles, messages, bandwidth, slowdown = ranks[0]  # the same on every rank
    rates = {x: fit_rate([t for t in tiles if x == (t.backward, t.window)]) for x in KINDS}
    ops = dict.fromkeys(m.op for m in messages)
    links = {op: fit_link(op, [m for m in messages if m.op == op]) for op in ops}
    inside = links.pop("shift", Link("alone", 0.0, bandwidth))
    gpu = torch.cuda.get_device_properties(0) if kind == "cuda" else None
    made = Device(
        gpu.name if gpu else str(machine()["cpu"]),
        forward=rates[False, False],
        backward=rates[True, False],
        memory_bandwidth=bandwidth,
        memory_bytes=float(gpu.total_memory) if gpu else 0.0,
        window_forward=rates[False, True],
        window_backward=rates[True, True],
        source="measured",
    )
    host = devices.HOST if gpu else Host()
    cluster = Cluster(made, world_size, inside, inside, slowdown, links, host, 0.0 if gpu else None)
    return cluster, [*tiles, *messages]


def fit_rate(samples: Sequence[TileSample]) -> Rate:
    """Fits a rate with least relative errors and no negative parameter."""
    shapes = [[1.0, *(x * s.per_pair for x in (s.area, s.rows, s.edge))] for s in samples]
    launch, pair, row, edge = _nonnegative(shapes, samples)
    return Rate(1 / pair, launch, row / pair, edge / pair)


def fit_link(name: str, samples: Sequence[MessageSample]) -> Link:
    """Fits a link with least relative errors and no negative parameter."""
    latency, byte = _nonnegative([[1.0, s.nbytes] for s in samples], samples)
    return Link(name, latency, 1 / byte)


def _nonnegative(
    rows: Sequence[Sequence[float]], samples: Sequence[TileSample] | Sequence[MessageSample]
) -> list[float]:
    """The x >= 0, x[1] > 0 for which rows @ x has the least squared relative errors."""
    seconds = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    table = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    scale = table.abs().amax(0).clamp(min=1e-300)
    ones, best, fitted = torch.ones_like(seconds), math.inf, torch.zeros_like(scale)
    others = [i for i in range(len(scale)) if i != 1]
    for more in chain.from_iterable(combinations(others, n) for n in range(len(scale))):
        support = [1, *more]
        part = (table / scale)[:, support]
        solution = torch.linalg.lstsq(part, ones[:, None]).solution[:, 0]
        residual = float((part @ solution - ones).square().sum())
        # A further column must reduce the residual, and no coefficient may be negative.
        better = residual < best * (1 - 1e-6)
        if better and bool((solution >= 0).all()) and float(solution[0]) > 0:
            best, fitted = residual, torch.zeros_like(scale)
            fitted[support] = solution / scale[support]
    return fitted.tolist()


# -- within a rank


def measure(
    setting: CalibrationSetting,
) -> tuple[list[TileSample], list[MessageSample], float, float]:
    """Samples, bytes/s of a copy, and the slowdown of compute by transfers."""
    bench = _Bench(setting)
    tiles = [*bench.tiles()]
    if bench.world_size == 1:
        return tiles, [], bench.memory_bandwidth(), 0.0
    with bench.transport.call("calibrate", Agreement({}), bench.device):
        messages = [*bench.messages()]
        slowdown = bench.slowdown()
    return tiles, messages, bench.memory_bandwidth(), slowdown


class _Bench:
    """Times attention, messages and copies, from a barrier until the last rank is done."""

    def __init__(self, setting: CalibrationSetting) -> None:
        self.setting, self.spec = setting, setting.spec
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = rank_device()
        self.backend: Backend = get_backend(setting.backend)
        self.scores = Scores(1.0 / math.sqrt(self.spec.headdim))
        self.transport: P2PTransport = open_p2p(check_group(None), TransportOptions())

    def seconds(self, fn: Callable[[], object], repeats: int | None = None) -> float:
        """Seconds until the last rank is done: the median of some calls after a warm-up."""
        calls = range((repeats or self.setting.repeats) + 1)
        return statistics.median([timed_on_ranks(fn) for _ in calls][1:])

    def tiles(self) -> Iterator[TileSample]:
        """Squares without a mask and causal, half-wide rectangles and windows, of all sizes."""
        forward_pair, backward_pair = (flops(1, self.spec, backward=b) for b in (False, True))
        for rows in self.setting.rows:
            for kind, cols, lo, hi in (
                ("full", rows, None, None),
                ("full", rows // 2, None, None),
                ("causal", rows, None, 0),
                ("window", rows, -(rows // 4), 0),
                ("window", rows, -(rows // 2), rows // 8),
            ):
                tile = Tile(0, rows, 0, cols, lo, hi)
                forward, backward = self.calls(tile)
                repeats = self.setting.repeats * self.setting.rows[-1] // rows
                repeats = min(repeats, MAX_REPEATS)
                shape = (kind, tile.area, rows, tile.edge, forward_pair)
                yield TileSample(False, *shape, self.seconds(forward, repeats))
                shape = (kind, tile.area, (rows + cols) // 2, tile.edge, backward_pair)
                yield TileSample(True, *shape, self.seconds(backward, repeats))

    def calls(self, tile: Tile) -> tuple[Callable[[], object], Callable[[], object]]:
        """Two calls: one folds a tile into an existing state, one computes its gradients."""
        spec, scores, backend = self.spec, self.scores, self.backend

        def normal(rows: int, heads: int, dim: int) -> Tensor:
            return torch.randn(spec.batch, rows, heads, dim, device=self.device, dtype=spec.dtype)

        q, dout = (normal(tile.rows, spec.nheads, d) for d in (spec.headdim, spec.headdim_v))
        k, v = (normal(tile.cols, spec.nheads_kv, d) for d in (spec.headdim, spec.headdim_v))

        def fold(state: Any, last: bool) -> Any:
            return backend.forward(q, k, v, (tile,), state, scores=scores, last=last)

        state = fold(backend.new_state(q, spec.headdim_v), last=True)
        out, lse = backend.finalize(state, q.dtype)
        inputs = BackwardInputs(q, k, v, dout, *backend.row_statistics(out, dout, lse))
        state = fold(backend.new_state(q, spec.headdim_v), last=False)
        dq, dk, dv = (torch.zeros_like(x, dtype=spec.accum_dtype) for x in (q, k, v))

        def backward() -> None:
            backend.backward(inputs, (tile,), (dq, dk, dv), scores=scores, out=out)

        return lambda: fold(state, last=False), backward

    def messages(self) -> Iterator[MessageSample]:
        """Exchanges of every kind and size, all ranks at once."""
        for op in ("shift", *COLLECTIVES):
            for nbytes in self.setting.messages:
                part = max(nbytes // (1 if op == "shift" else self.world_size - 1) // 64 * 64, 64)
                leaving = part if op == "shift" else part * (self.world_size - 1)
                seconds = self.seconds(self.exchange(op, part), MESSAGE_REPEATS)
                yield MessageSample(op, leaving, seconds)

    def exchange(
        self, op: str, part: int, meanwhile: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """A call that posts an exchange of `part` bytes per rank, runs `meanwhile`, and waits."""
        ranks, transport = self.world_size, self.transport
        part += transport.pool(self.device).header if op == "shift" else 0
        whole = torch.zeros(ranks * part, dtype=torch.uint8, device=self.device)
        send = whole[:part] if op in ("shift", "all_gather") else whole
        size = part if op in ("shift", "reduce_scatter") else ranks * part
        route: Hop | Collective = Hop((self.rank + 1) % ranks, (self.rank - 1) % ranks)
        if op != "shift":
            # A reduce-scatter adds, so it needs numbers.
            dtype, counts = torch.float32, (part,) * ranks
            route = Collective(op, dtype, counts, counts)  # type: ignore[arg-type]

        def both() -> None:
            new = torch.empty(size, dtype=torch.uint8, device=self.device)
            transport.post("shards", 0, route, send, new)
            if meanwhile is not None:
                meanwhile()
            transport.wait("shards")

        return both

    def memory_bandwidth(self) -> float:
        """Bytes/s, read and written, of a copy of half the heads of some rows."""
        x = torch.zeros(COPIED // 512, 2, 64, device=self.device)
        return COPIED / self.seconds(lambda: x[:, :1].contiguous(), MESSAGE_REPEATS)

    def slowdown(self) -> float:
        """The share of its speed that compute loses during a transfer."""
        rows = self.setting.rows[-2]
        tile = Tile(0, rows, 0, rows)
        compute, _ = self.calls(tile)
        alone = self.seconds(compute)
        size = self.setting.messages[-1]
        transfer = self.seconds(self.exchange("shift", size))
        # All ranks must send as much as rank 0.
        share = torch.tensor(OVERLAPPED_SHARE * alone / transfer, device=self.device)
        dist.broadcast(share, 0)
        size = max(int(size * float(share)) // 64 * 64, 64)
        transfer = self.seconds(self.exchange("shift", size))
        lost = self.seconds(self.exchange("shift", size, compute)) - alone
        return min(max(lost / transfer, 0.0), 0.9)


def _fits(cluster: Cluster, samples: Samples) -> Iterator[str]:
    """Lines: the speeds, and by how much a fit misses a sample at most."""
    tiles = [x for x in samples if isinstance(x, TileSample)]
    for (backward, window), name in KINDS.items():
        rate = cluster.device.rate(backward=backward, window=window)
        of_kind = [t for t in tiles if (backward, window) == (t.backward, t.window)]
        error = f"off by {100 * largest_error(rate, of_kind):.0f} % at most"
        yield f"{name}: {rate.flops / 1e9:.1f} GFLOP/s, {error}"
    for name, link in {"shift": cluster.inside, **cluster.collectives}.items():
        yield f"{name}: {link.bandwidth / 1e9:.2f} GB/s, {link.latency:.2g} s"


def largest_error(rate: Rate, samples: Sequence[TileSample]) -> float:
    """The greatest relative error of a fitted rate."""
    return max((abs(s.predicted(rate) / s.seconds - 1) for s in samples), default=0.0)
