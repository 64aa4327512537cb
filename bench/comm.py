"""`ring-attn bench comm`: a hop of a ring and collectives, by size, alone and beside compute."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from ring_attn.bench.benchmark import Benchmark, Outputs
from ring_attn.bench.rows import Row, figure, key, length
from ring_attn.cli.arguments import progress
from ring_attn.cli.bench_options import COMM_ITERS, COMM_SIZES
from ring_attn.cli.calibrate import exchange_call
from ring_attn.cli.progress import leave_to_ranks, lines_of_rank
from ring_attn.testing.launch import (
    BACKENDS,
    check_memory,
    check_tensors,
    checked_device,
    rank_device,
    run_ranks,
    under_torchrun,
)
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import check_group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import P2PTransport, open_p2p
from ring_attn.values.outside import env_int

WARMUP = 2

# The largest message of --quick, and of CPUs.
SMALL = 4 << 20

# Rows of the square matrices of the compute beside messages, and products that are in a GPU's
# queue beside one message, at least.
SIDES = {"cuda": 4096, "cpu": 256}
QUEUED = 8

# Messages of a rank in units of 64 bytes.
ALIGNED = 64


@dataclass(frozen=True)
class CommSetting:
    """The messages of a run, and the options of their measurement."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    world_size: int
    device: str
    threads: int
    iters: int


@dataclass(frozen=True, kw_only=True)
class CommRow(Row):
    """Times of an operation; `impl` is the library, `mode` the operation.

    Attributes:
        nbytes: bytes that a rank sends in a hop, or of the whole buffer of a collective.
        gbps: bytes / time.
        bus_gbps: rate of a link, by the factor of the operation.
        beside_ms: median beside compute.
        beside_gbps: bytes / that time.
        slower: by how much longer compute takes beside messages.
    """

    nbytes: int = key("bytes", length)
    world_size: int = key("ranks")
    gbps: float | None = figure("GB/s", ".3g")
    bus_gbps: float | None = figure("bus GB/s", ".3g")
    beside_ms: float | None = figure("beside\ncompute ms", ".4g")
    beside_gbps: float | None = figure("GB/s\nbeside", ".3g")
    slower: float | None = figure("compute\nslower", "+.0%")


class CommBench(Benchmark[CommSetting, CommRow]):
    """Measures all operations and sizes in one set of ranks."""

    name, title = "comm", "messages between ranks"

    def run(self) -> None:
        setting = self.setting
        self.check_comparable(planned(setting))
        leave_to_ranks()
        ranks = run_ranks(
            measure,
            setting.world_size,
            setting,
            self.outputs,
            threads=setting.threads,
            device=setting.device,
        )
        self.rows = ranks[0]


def planned(setting: CommSetting) -> list[CommRow]:
    """Return the rows without figures."""
    return [
        CommRow(
            impl=BACKENDS[setting.device],
            mode=op,
            nbytes=nbytes,
            world_size=setting.world_size,
        )
        for op in setting.ops
        for nbytes in setting.sizes
    ]


def bus_factor(op: str, ranks: int) -> float:
    """Return the bytes on a rank's link for each byte of the size, as in nccl-tests."""
    if op == "hop":
        return 1.0
    share = (ranks - 1) / ranks
    return 2.0 * share if op == "all_reduce" else share


def run(args: argparse.Namespace) -> int:
    """Measure, write the files, print the table."""
    bench = CommBench(setting_of(args), Outputs.of(args, CommBench.name, CommRow))
    bench.run()
    return bench.conclude()


def setting_of(args: argparse.Namespace) -> CommSetting:
    """Return the setting of the command's options.

    Raises:
        ValueError: there is one rank, or this machine cannot provide the ranks.
    """
    started = env_int("WORLD_SIZE", 1) if under_torchrun() else None
    world_size = args.world_size or started or 2
    if world_size < 2:
        raise ValueError("--world-size must be at least 2, because one rank sends nothing, got 1")
    device = checked_device(args.device, world_size)
    if started is None:
        check_memory(world_size)
    largest = SMALL if args.quick or device == "cpu" else COMM_SIZES[-1]
    sizes = tuple(size for size in COMM_SIZES if size <= largest)
    sizes = tuple(sorted(args.sizes or sizes))
    parts = 1 if args.ops == ("hop",) else world_size
    if sizes[0] < ALIGNED * parts:
        raise ValueError(
            f"--size must be at least {ALIGNED * parts}, because a rank sends at least {ALIGNED} "
            f"bytes, got {sizes[0]}"
        )
    what = f"messages of {length(sizes[-1])} bytes"
    check_tensors(what, sizes[-1] * world_size, device, world_size=world_size)
    return CommSetting(
        ops=args.ops,
        sizes=sizes,
        world_size=world_size,
        device=device,
        threads=args.threads,
        iters=args.iters or (3 if args.quick else COMM_ITERS),
    )


# -- within a rank


def measure(setting: CommSetting, outputs: Outputs | None = None) -> list[CommRow]:
    """Measure all operations and sizes; rank 0 writes the files of `outputs` after each."""
    bench = CommBench(setting, outputs)
    transport = open_p2p(check_group(None), TransportOptions())
    rows = planned(setting)
    found = []
    load = _Load(rank_device())
    work = [row.nbytes + SMALL / 16 for row in rows]
    with (
        lines_of_rank("ring-attn bench comm"),
        transport.call("bench comm", Agreement({}), rank_device()),
    ):
        for number, row in enumerate(rows):
            stage = f"message {number + 1} of {len(rows)}"
            progress.begin(stage, done=sum(work[:number]), total=sum(work))
            found.append(_measured(row, transport, setting, load))
            bench.rows = found
            bench.save()
    return found


def _measured(row: CommRow, transport: P2PTransport, setting: CommSetting, load: _Load) -> CommRow:
    """Return the row of an operation with its figures."""
    call = operation(row.mode, row.nbytes, transport)
    alone = [_slowest(call) for _ in range(WARMUP + setting.iters)][WARMUP:]
    row = row.timed([1e3 * seconds for seconds in alone])
    assert row.median_ms is not None
    wait = partial(time.sleep, max(4e-3 * row.median_ms, 0.02))
    lone_rate = load.rate(wait)
    beside: list[float] = []

    def messages() -> None:
        beside.extend(_slowest(call) for _ in range(WARMUP + setting.iters))

    # A GPU's queue must outlast the messages.
    rate = load.rate(messages, seconds=2e-3 * row.median_ms * (WARMUP + setting.iters))
    slower = _mean(lone_rate / rate - 1.0)
    beside_row = row.timed([1e3 * seconds for seconds in beside[WARMUP:]])
    assert beside_row.median_ms is not None
    gbps = row.nbytes * 1e-6 / row.median_ms
    return replace(
        row,
        gbps=gbps,
        bus_gbps=gbps * bus_factor(row.mode, row.world_size),
        beside_ms=beside_row.median_ms,
        beside_gbps=row.nbytes * 1e-6 / beside_row.median_ms,
        slower=slower,
    )


def operation(op: str, nbytes: int, transport: P2PTransport) -> Callable[[], object]:
    """Return a call of an operation: those of strategies go through our transport."""
    device = rank_device()
    if op == "all_reduce":
        buffer = torch.zeros(max(nbytes // 4, 1), device=device)
        return lambda: dist.all_reduce(buffer)
    ranks = 1 if op == "hop" else transport.world_size
    part = max(nbytes // ranks // ALIGNED * ALIGNED, ALIGNED)
    return exchange_call(transport, device, "shift" if op == "hop" else op, part)


def _slowest(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the slowest rank; compute beside it may go on."""
    dist.barrier()
    start = time.perf_counter()
    call()
    if rank_device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=rank_device())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _mean(value: float) -> float:
    """Return the mean of a value over the ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=rank_device())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class _Load:
    """Matrix products that run beside something else: in a thread, or on a stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        side = SIDES[device.type]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._a = torch.ones(side, side, device=device, dtype=dtype)
        self._product = torch.empty_like(self._a)
        self._device = device
        self._count = 0
        self._seconds = 1.0  # of one product
        self._seconds = 1.0 / self.rate(lambda: time.sleep(0.05))

    def rate(self, beside: Callable[[], object], seconds: float = 0.1) -> float:
        """Return the products a second while `beside` runs, which takes about `seconds`."""
        if self._device.type == "cuda":
            return self._rate_on_stream(beside, seconds)
        self._count = 0
        start = time.perf_counter()
        with self._in_thread():
            beside()
            count, elapsed = self._count, time.perf_counter() - start
        return max(count, 1) / elapsed

    @contextmanager
    def _in_thread(self) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                torch.matmul(self._a, self._a, out=self._product)
                self._count += 1

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _rate_on_stream(self, beside: Callable[[], object], seconds: float) -> float:
        """Queue products on another stream, run `beside`, and time the products by events."""
        num = max(QUEUED, round(seconds / self._seconds))
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(num):
                torch.matmul(self._a, self._a, out=self._product)
            stop.record()
        beside()
        stream.synchronize()
        return num / (1e-3 * start.elapsed_time(stop))
