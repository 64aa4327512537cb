"""Transfers between processes on one GPU: copy engines against copies by SMs.

    python -m ring_attn.bench.transfers --json DIR/transfers.json      on a GPU

A ring of 2 and of 4 processes of 8k rows each, 32 / 8 heads of 128 in bf16, over symmetric memory.
The same transport moves the same bytes in two ways: by cudaMemcpyAsync, and by a kernel.

    exchange   ms of one exchange of K and V, all ranks at once, the median of the slowest rank;
               GB/s is what each rank sends in that time
    call       ms of forward or backward with real transfers, and with none: then buffers hold
               whatever they held, and only the time means something
    exposed    the difference: what transfers add to the kernels, packing and waiting included
    host       us that the host takes to post one exchange and wait for it

The processes share the device, and without MPS they run by turns: kernels of two do not overlap,
nor do one's kernels and another's copies unless the device lets them. So `exposed` here is how the
two ways compare, and no prediction for GPUs of their own. Copies stay within the device's memory:
GB/s is not that of a link, and the driver may copy within a device by a kernel of its own.

Exit status 1 where results with transfers are not finite, or differ between the two ways.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import Tensor

from ring_attn.arguments import parse_sizes, table_console, write_json
from ring_attn.bench.timing import gpu_state
from ring_attn.env import machine
from ring_attn.launch import rank_device, run_ranks
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Hop
from ring_attn.spec import AttentionSpec, TransportOptions
from ring_attn.strategies.ring import RingCall, make_call
from ring_attn.transport.base import Channel, PointToPoint, TransportStats
from ring_attn.transport.symmetric_memory import CudaEngine, open_symmetric_memory

WARMUP, ITERS, EXCHANGES = 2, 5, 20
TIMEOUT = 60.0


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        rows: of each rank.
        nheads: of queries and of keys.
        headdim: of all.
        backend: that computes.
    """

    rows: int = 8192
    nheads: tuple[int, int] = (32, 8)
    headdim: int = 128
    backend: str = "triton"

    def call(self, rank: int, world_size: int, device_type: str) -> RingCall:
        """A causal zigzag ring."""
        seqlen = world_size * self.rows
        layout = SequenceLayout.zigzag(seqlen, world_size)
        spec = AttentionSpec(
            device_type, torch.bfloat16, 1, *self.nheads, self.headdim, self.headdim
        )
        mask = Mask(seqlen, seqlen, causal=True)
        return make_call(spec, (layout, layout), mask, rank, backend=self.backend)


@dataclass(frozen=True)
class Row:
    """Of one way to copy, or of none, in one ring; times are the slowest rank's medians.

    Attributes:
        world_size: ranks.
        copies: "engine", "sm" or "none".
        mib: of the message of K and V.
        exchange_ms: of one exchange; None without copies, likewise the next two.
        gbps: sent by each rank in that time.
        host_us: of posting and waiting.
        forward_ms: of a call.
        backward_ms: likewise.
    """

    world_size: int
    copies: str
    mib: float
    exchange_ms: float | None
    gbps: float | None
    host_us: float | None
    forward_ms: float
    backward_ms: float


class SmEngine(CudaEngine):
    """Copies by a kernel, everything else as it is."""

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        """Elementwise, so that no copy is recognised in it; messages are of whole words."""
        with torch.cuda.stream(stream):
            torch.bitwise_or(source.view(torch.int64), 0, out=to.view(torch.int64))


class NoTransfers:
    """A transport that moves nothing, for the time of everything else."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.stats = TransportStats()

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Nothing."""

    def wait(self, channel: Channel) -> None:
        """Nothing."""


def measure(world_size: int, setting: Setting) -> tuple[list[Row], list[str]]:
    """On a rank: the rows, and what is wrong."""
    group: Any = dist.group.WORLD
    rank, device = dist.get_rank(), rank_device()
    ways: dict[str, PointToPoint] = {
        "none": NoTransfers(rank, world_size),
        "engine": open_symmetric_memory(group, TransportOptions(TIMEOUT, None, "symmetric_memory")),
        # Options of its own: it is another transport.
        "sm": open_symmetric_memory(
            group, TransportOptions(TIMEOUT + 1, None, "symmetric_memory"), SmEngine
        ),
    }
    call = setting.call(rank, world_size, device.type)
    nbytes = call.spec.kv_packet(setting.rows).nbytes
    tensors = random_tensors(setting, rank, device)
    rows, results = [], {}
    for name, transport in ways.items():
        exchange_ms = gbps = host_us = None
        if name != "none":
            exchange_ms, host_us = exchange_times(transport, nbytes, device)
            gbps = nbytes / exchange_ms / 1e6
        results[name], (forward_ms, backward_ms) = call_times(call, tensors, transport)
        rows.append(
            Row(
                *(world_size, name, nbytes / 2**20, exchange_ms, gbps, host_us),
                *(forward_ms, backward_ms),
            )
        )
    return rows, wrong_results(results)


def random_tensors(setting: Setting, rank: int, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of a rank."""
    generator = torch.Generator(device).manual_seed(rank)
    nheads, nheads_kv = setting.nheads
    return [
        torch.randn(
            *(1, setting.rows, n, setting.headdim),
            device=device, dtype=torch.bfloat16, generator=generator,
        )
        for n in (nheads, nheads_kv, nheads_kv, nheads)
    ]  # fmt: skip


def exchange_times(
    transport: PointToPoint, nbytes: int, device: torch.device
) -> tuple[float, float]:
    """Milliseconds of one exchange round the ring, and host microseconds: medians, slowest rank."""
    rank, n = transport.rank, transport.world_size
    hop = Hop((rank + 1) % n, (rank - 1) % n)
    send, recv = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = list[float]()

    def several() -> None:
        start = time.perf_counter()
        for step in range(EXCHANGES):
            transport.post("shards", step, hop, send, recv)
            transport.wait("shards")
        host.append(1e6 * (time.perf_counter() - start) / EXCHANGES)

    several_ms = [timed(several) for _ in range(WARMUP + ITERS)][WARMUP:]
    return slowest(statistics.median(several_ms) / EXCHANGES), slowest(
        statistics.median(host[WARMUP:])
    )


def call_times(
    call: RingCall, tensors: Sequence[Tensor], transport: PointToPoint
) -> tuple[list[Tensor], tuple[float, float]]:
    """Results of a call, and milliseconds of forward and backward."""
    q, k, v, dout = tensors
    results = list[Tensor]()
    forward_ms, backward_ms = list[float](), list[float]()
    for _ in range(WARMUP + ITERS):
        done: dict[str, Any] = {}

        def forward(done: dict[str, Any] = done) -> None:
            done["forward"] = call.forward(q, k, v, transport, None)

        def backward(done: dict[str, Any] = done) -> None:
            done["backward"] = call.backward(done["forward"].saved, dout, transport, None)

        forward_ms.append(timed(forward))
        backward_ms.append(timed(backward))
        grads = done["backward"]
        results = [done["forward"].out, done["forward"].lse, grads.dq, grads.dk, grads.dv]
    medians = (statistics.median(one[WARMUP:]) for one in (forward_ms, backward_ms))
    forward_median, backward_median = medians
    return results, (slowest(forward_median), slowest(backward_median))


def timed(work: Callable[[], None]) -> float:
    """Milliseconds from a common start to this rank's end, on the host's clock.

    Events would not see what another process keeps the device busy with before the first of them.
    """
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def slowest(value: float) -> float:
    """The largest of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def wrong_results(results: dict[str, list[Tensor]]) -> list[str]:
    """Of the two ways with real transfers."""
    names = ("out", "lse", "dq", "dk", "dv")
    engine, sm = results["engine"], results["sm"]
    wrong = [f"{n} is not finite" for n, x in zip(names, engine, strict=True) if not finite(x)]
    return wrong + [
        f"{n} differs between engine and sm"
        for n, a, b in zip(names, engine, sm, strict=True)
        if not torch.equal(a, b)
    ]


def finite(x: Tensor) -> bool:
    """All of it."""
    return bool(x.isfinite().all())


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, with what transfers add to a call without."""
    shown = Table(
        *("ranks", "copies", "MiB", "exchange ms", "GB/s", "host us"),
        *("fwd ms", "exposed", "bwd ms", "exposed"),
        title="transfers, processes on one GPU",
        box=box.SIMPLE,
    )
    without = {row.world_size: row for row in rows if row.copies == "none"}
    for row in rows:
        base = without[row.world_size]

        def number(x: float | None, digits: int = 2) -> str:
            return "" if x is None else f"{x:.{digits}f}"

        shown.add_row(
            *(str(row.world_size), row.copies, number(row.mib, 0), number(row.exchange_ms, 3)),
            *(number(row.gbps, 0), number(row.host_us, 0), number(row.forward_ms)),
            "" if row is base else number(row.forward_ms - base.forward_ms),
            number(row.backward_ms),
            "" if row is base else number(row.backward_ms - base.backward_ms),
        )
    return shown


def main() -> int:
    """0; 1 if results are wrong; 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", default="2,4", help="numbers of processes (2,4)")
    parser.add_argument("--rows", type=int, default=Setting.rows, help="of each rank (8192)")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench transfers: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    setting, rows, wrong = Setting(rows=args.rows), list[Row](), list[str]()
    for world_size in parse_sizes(args.world_sizes):
        results = run_ranks(
            measure, world_size, world_size, setting, device="cuda", share_gpus="gloo", threads=2
        )
        rows += results[0][0]
        for rank, (_, of_rank) in enumerate(results):
            wrong += [f"{world_size} ranks, rank {rank}: {text}" for text in of_rank]
        if args.json:
            write_json(
                args.json,
                {
                    "machine": machine(),
                    "gpu_state": gpu_state(),
                    "setting": asdict(setting),
                    "rows": [asdict(row) for row in rows],
                    "wrong": wrong,
                },
            )
    table_console().print(table(rows))
    print(f"{len(rows)} rows, {len(wrong)} wrong{''.join(f'; {text}' for text in wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
