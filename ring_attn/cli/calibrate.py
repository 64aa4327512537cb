"""`ring-attn calibrate`: measure this machine for the simulator, on all ranks at once."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.backends.rates import Rate
from ring_attn.cli.arguments import command_line, progress, write_json
from ring_attn.cli.env import machine
from ring_attn.cli.progress import leave_to_ranks, lines_of_rank
from ring_attn.core.program import Collective, Hop
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import State
from ring_attn.core.tiles import Tile
from ring_attn.machines.cluster import Cluster, Device, Host, Link, compute_seconds
from ring_attn.planning import devices
from ring_attn.testing.launch import (
    check_tensors,
    checked_device,
    rank_device,
    run_ranks,
    timed_on_ranks,
)
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
OPS = ("shift", *COLLECTIVES)


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
        """Return the seconds that a rate predicts."""
        return float(compute_seconds(rate, self.area, self.rows, self.edge, self.per_pair))


@dataclass(frozen=True)
class MessageSample:
    """Seconds of one exchange, in which each rank sends `nbytes`."""

    op: str
    nbytes: int
    seconds: float


Samples = Sequence[TileSample | MessageSample]


def run(args: argparse.Namespace) -> int:
    """Measure, print the fits, and write the JSON that `load_cluster` reads."""
    cluster, samples = calibrate(args)
    report = {
        "machine": machine(),
        "command": command_line(),
        "cluster": asdict(cluster),
        "samples": [asdict(sample) for sample in samples],
    }
    write_json(args.json, report)
    if not args.quiet:
        print(*_fits(cluster, samples), sep="\n")
    return 0


def calibrate(args: argparse.Namespace) -> tuple[Cluster, Samples]:
    """Measure `--world-size` ranks on this machine."""
    world_size = args.world_size
    kind = checked_device(args.device, world_size)
    spec = AttentionSpec(
        device_type=kind,
        dtype=args.dtype,
        batch=1,
        nheads=args.heads,
        nheads_kv=args.heads,
        headdim=args.head_dim,
        headdim_v=args.head_dim,
    )
    setting = CalibrationSetting(
        spec,
        backend=choose_backend(spec, args.backend, Purpose(backward=True)).name,
        rows=QUICK_ROWS if args.quick else ROWS,
        messages=QUICK_MESSAGES if args.quick else MESSAGES,
        repeats=QUICK_REPEATS if args.quick else REPEATS,
    )
    row_bytes = 4 * args.heads * args.head_dim * args.dtype.itemsize
    check_tensors(
        f"q, k, v and out of {max(setting.rows)} rows on each rank",
        world_size * max(setting.rows) * row_bytes,
        kind,
        world_size=world_size,
    )
    leave_to_ranks()
    ranks = run_ranks(measure, world_size, setting, threads=args.threads, device=kind)
    measured = ranks[0]  # the same on every rank
    return _fitted_cluster(measured, world_size, kind), [*measured.tiles, *measured.messages]


def _fitted_cluster(measured: Measured, world_size: int, kind: str) -> Cluster:
    """Return the cluster whose rates and links fit the measurements."""
    rates = {
        (backward, window): fit_rate(
            [tile for tile in measured.tiles if (tile.backward, tile.window) == (backward, window)]
        )
        for backward, window in KINDS
    }
    ops = dict.fromkeys(message.op for message in measured.messages)
    links = {
        op: fit_link(op, [message for message in measured.messages if message.op == op])
        for op in ops
    }
    # One rank sends no messages.
    inside = links.pop("shift", Link("alone", 0.0, measured.memory_bandwidth))
    gpu = torch.cuda.get_device_properties(0) if kind == "cuda" else None
    device = Device(
        gpu.name if gpu else machine()["cpu"],
        forward=rates[False, False],
        backward=rates[True, False],
        memory_bandwidth=measured.memory_bandwidth,
        memory_bytes=float(gpu.total_memory) if gpu else 0.0,
        window_forward=rates[False, True],
        window_backward=rates[True, True],
        multiprocessors=gpu.multi_processor_count if gpu else 0,
        source="measured",
    )
    return Cluster(
        device,
        node_size=world_size,
        inside=inside,
        between=inside,
        slowdown=measured.slowdown,
        collectives=links,
        host=devices.HOST if gpu else Host(),
        stream_latency=0.0 if gpu else None,
        max_ctas=TransportOptions().max_ctas,
    )


def fit_rate(samples: Sequence[TileSample]) -> Rate:
    """Fit a rate with least relative errors and no negative parameter."""
    shapes = [
        [1.0, each.area * each.per_pair, each.rows * each.per_pair, each.edge * each.per_pair]
        for each in samples
    ]
    launch, pair, row, edge = _nonnegative(shapes, samples)
    return Rate(1 / pair, launch, row / pair, edge / pair)


def fit_link(name: str, samples: Sequence[MessageSample]) -> Link:
    """Fit a link with least relative errors and no negative parameter."""
    latency, byte = _nonnegative([[1.0, sample.nbytes] for sample in samples], samples)
    return Link(name, latency, 1 / byte)


def _nonnegative(
    rows: Sequence[Sequence[float]], samples: Sequence[TileSample] | Sequence[MessageSample]
) -> list[float]:
    """Return the x >= 0, x[1] > 0 for which rows @ x has the least squared relative errors.

    All sets of columns are tried, since there are at most four columns.
    """
    seconds = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    # A row for each sample, divided by its seconds, so that rows @ x should be 1.
    table = torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    scale = table.abs().amax(0).clamp(min=1e-300)
    scaled = table / scale
    ones = torch.ones_like(seconds)
    least, fitted = math.inf, torch.zeros_like(scale)
    others = [column for column in range(len(scale)) if column != 1]
    sets = chain.from_iterable(combinations(others, size) for size in range(len(scale)))
    for further in sets:
        columns = [1, *further]
        part = scaled[:, columns]
        solution = torch.linalg.lstsq(part, ones[:, None]).solution[:, 0]
        residual = float((part @ solution - ones).square().sum())
        # A further column must reduce the residual, and no coefficient may be negative.
        is_better = residual < least * (1 - 1e-6)
        if is_better and bool((solution >= 0).all()) and float(solution[0]) > 0:
            least = residual
            fitted = torch.zeros_like(scale)
            fitted[columns] = solution / scale[columns]
    return fitted.tolist()


# -- within a rank


class Measured(NamedTuple):
    """The measurements of a rank, the same on every rank.

    Attributes:
        tiles: times of attention.
        messages: times of exchanges; none on one rank.
        memory_bandwidth: bytes/s, read and written, of a copy.
        slowdown: the fraction of its speed that compute loses during a transfer.
    """

    tiles: list[TileSample]
    messages: list[MessageSample]
    memory_bandwidth: float
    slowdown: float


def measure(setting: CalibrationSetting) -> Measured:
    """Measure attention, messages, copies, and the slowdown of compute by transfers."""
    bench = _Bench(setting)
    with lines_of_rank("ring-attn calibrate"):
        tiles = [*bench.tiles()]
        if bench.world_size == 1:
            return Measured(tiles, [], bench.memory_bandwidth(), slowdown=0.0)
        with bench.transport.call("calibrate", Agreement({}), bench.device):
            messages = [*bench.messages()]
            bench.begin_stage("slowdown", len(setting.rows) + len(OPS))
            slowdown = bench.slowdown()
        return Measured(tiles, messages, bench.memory_bandwidth(), slowdown)


class _Bench:
    """Measure attention, messages and copies, from a barrier until the last rank is done."""

    def __init__(self, setting: CalibrationSetting) -> None:
        self.setting, self.spec = setting, setting.spec
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = rank_device()
        self.backend: Backend = get_backend(setting.backend)
        self.scores = Scores(1.0 / math.sqrt(self.spec.headdim))
        self.transport: P2PTransport = open_p2p(check_group(None), TransportOptions())

    def begin_stage(self, name: str, number: int) -> None:
        """Name a stage for lines of progress. Stages count the same, though their times differ."""
        progress.begin(name, done=number, total=len(self.setting.rows) + len(OPS) + 1)

    def seconds(self, fn: Callable[[], object], repeats: int | None = None) -> float:
        """Return the seconds until the last rank is done: the median of calls after a warm-up."""
        num_calls = (repeats or self.setting.repeats) + 1
        _, *times = [timed_on_ranks(fn) for _ in range(num_calls)]
        return statistics.median(times)

    def tiles(self) -> Iterator[TileSample]:
        """Measure squares, causal squares, half-wide rectangles and windows, of all sizes."""
        forward_pair = flops(1, self.spec, backward=False)
        backward_pair = flops(1, self.spec, backward=True)
        for index, rows in enumerate(self.setting.rows):
            self.begin_stage(f"attention, {rows} rows", index)
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
                yield TileSample(
                    backward=False,
                    kind=kind,
                    area=tile.area,
                    rows=rows,
                    edge=tile.edge,
                    per_pair=forward_pair,
                    seconds=self.seconds(forward, repeats),
                )
                yield TileSample(
                    backward=True,
                    kind=kind,
                    area=tile.area,
                    rows=(rows + cols) // 2,
                    edge=tile.edge,
                    per_pair=backward_pair,
                    seconds=self.seconds(backward, repeats),
                )

    def calls(self, tile: Tile) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return two calls: one adds a tile to an existing state, one computes its gradients."""
        spec, scores, backend = self.spec, self.scores, self.backend

        def normal(rows: int, heads: int, dim: int) -> Tensor:
            return torch.randn(spec.batch, rows, heads, dim, device=self.device, dtype=spec.dtype)

        q = normal(tile.rows, spec.nheads, spec.headdim)
        dout = normal(tile.rows, spec.nheads, spec.headdim_v)
        k = normal(tile.cols, spec.nheads_kv, spec.headdim)
        v = normal(tile.cols, spec.nheads_kv, spec.headdim_v)

        def fold(state: State, last: bool) -> State:
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
        """Measure exchanges of every kind and size, on all ranks at once."""
        for index, op in enumerate(OPS):
            self.begin_stage(f"messages, {op}", len(self.setting.rows) + index)
            num_peers = 1 if op == "shift" else self.world_size - 1
            for nbytes in self.setting.messages:
                part = max(nbytes // num_peers // 64 * 64, 64)
                seconds = self.seconds(self.exchange(op, part), MESSAGE_REPEATS)
                yield MessageSample(op, nbytes=part * num_peers, seconds=seconds)

    def exchange(
        self, op: str, part: int, meanwhile: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """Return a call that posts an exchange, runs `meanwhile`, and waits for the exchange."""
        return exchange_call(self.transport, self.device, op, part, meanwhile)

    def memory_bandwidth(self) -> float:
        """Return the bytes/s, read and written, of a copy of half the heads of some rows."""
        x = torch.zeros(COPIED // 512, 2, 64, device=self.device)
        return COPIED / self.seconds(lambda: x[:, :1].contiguous(), MESSAGE_REPEATS)

    def slowdown(self) -> float:
        """Return the fraction of its speed that compute loses during a transfer."""
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


def exchange_call(
    transport: P2PTransport,
    device: torch.device,
    op: str,
    part: int,
    meanwhile: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """Return a call that posts an exchange, runs `meanwhile`, and waits for the exchange.

    Args:
        transport: the transport, in a call that all ranks make.
        device: the device of the messages.
        op: "shift" to the next rank, or one of `COLLECTIVES`.
        part: number of bytes for each rank.
        meanwhile: a function that runs while the exchange is under way.
    """
    rank, ranks = transport.rank, transport.world_size
    part += transport.pool(device).header if op == "shift" else 0
    whole = torch.zeros(ranks * part, dtype=torch.uint8, device=device)
    send = whole[:part] if op in ("shift", "all_gather") else whole
    size = part if op in ("shift", "reduce_scatter") else ranks * part
    route: Hop | Collective = Hop((rank + 1) % ranks, (rank - 1) % ranks)
    if op != "shift":
        # A reduce-scatter adds, so it needs numbers.
        dtype, counts = torch.float32, (part,) * ranks
        route = Collective(op, dtype, counts, counts)  # type: ignore[arg-type]

    def post_and_wait() -> None:
        received = torch.empty(size, dtype=torch.uint8, device=device)
        transport.post("shards", 0, route, send, received)
        if meanwhile is not None:
            meanwhile()
        transport.wait("shards")

    return post_and_wait


def _fits(cluster: Cluster, samples: Samples) -> Iterator[str]:
    """Yield lines with the speeds, and with the largest difference of a fit and a sample."""
    tiles = [sample for sample in samples if isinstance(sample, TileSample)]
    for (backward, window), name in KINDS.items():
        rate = cluster.device.rate(backward=backward, window=window)
        of_kind = [tile for tile in tiles if (tile.backward, tile.window) == (backward, window)]
        error = f"off by {100 * largest_error(rate, of_kind):.0f} % at most"
        yield f"{name}: {rate.flops / 1e9:.1f} GFLOP/s, {error}"
    for name, link in {"shift": cluster.inside, **cluster.collectives}.items():
        yield f"{name}: {link.bandwidth / 1e9:.2f} GB/s, {link.latency:.2g} s"


def largest_error(rate: Rate, samples: Sequence[TileSample]) -> float:
    """Return the largest relative error of a fitted rate."""
    errors = [abs(sample.predicted(rate) / sample.seconds - 1) for sample in samples]
    return max(errors, default=0.0)
