"""`ring-attn bench`: one screen of figures of this machine, in a minute.

The four benchmarks run with small sizes. Those on ranks share one set of ranks, since most of a
short run is the start of processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ring_attn.bench import comm, decode, kernel, ring
from ring_attn.bench.benchmark import Benchmark
from ring_attn.bench.report import console_for, print_table
from ring_attn.bench.ring_implementations import RingCase
from ring_attn.bench.rows import notes, table
from ring_attn.cli import bench_options as options
from ring_attn.cli.arguments import command_line, progress, write_json
from ring_attn.cli.env import machine
from ring_attn.testing.launch import rank_device, run_ranks, under_torchrun
from ring_attn.values.outside import env_int

# The most seconds of the kernels' part.
KERNEL_SECONDS = 15.0

# A benchmark on ranks is left out, if this many seconds are gone before it begins.
SECONDS = 45.0

# Options on a GPU, and on a CPU.
KERNEL = {
    # Without FlexAttention, which compiles for longer than the whole command may take.
    "cuda": "--impl ours,cudnn,torch-flash,fa2,fa3,fa4 --mask causal --seqlen 8k --head-dim 128 "
    "--heads 32/8 --mode fwd,bwd --iters 5",
    "cpu": "--mask causal --seqlen 256 --mode fwd,bwd",
}
RING = {
    "cuda": "--seqlen 32k --heads 32 --kv-heads 8 --head-dim 128 --strategy ring,auto "
    "--mode fwd,bwd --iters 3",
    "cpu": "--seqlen 1k --heads 2 --mode fwd,bwd --peer dense --iters 2",
}
DECODE = {
    "cuda": "--batch 1,16 --seqlen 32k --iters 5",
    "cpu": "--impl ours --batch 1 --seqlen 4k --iters 3",
}
COMM = {
    "cuda": "--op hop,all_gather,all_to_all --size 1M,64M --iters 5",
    "cpu": "--op hop,all_gather,all_to_all --size 64k,1M --iters 3",
}

# The figures on the screen, by benchmark; the file has all.
SHOWN = {
    "kernel": ("median_ms", "tflops", "tflops_share", "max_ratio"),
    "ring": ("median_ms", "tflops", "share", "exposed_ms", "peak_bytes", "max_error"),
    "decode": ("median_ms", "gbps", "share", "max_ratio"),
    "comm": ("median_ms", "gbps", "beside_gbps"),
}


def run(args: argparse.Namespace) -> int:
    """Measure and print all; return 1 if a result of ours is wrong."""
    start = time.monotonic()
    ring.silence_profiler()
    device = kernel.parse_device(args.device).type
    benches = [_kernels(device), *_on_ranks(device, start)]
    tables = {bench.name: table(bench.rows, bench.title, SHOWN[bench.name]) for bench in benches}
    console = console_for([*tables.values()])
    console.print(described(), markup=False)
    failures = []
    for bench in benches:
        if not bench.rows:
            console.print(f"{bench.title}: left out, since {SECONDS:.0f} s are over", markup=False)
            continue
        print_table(console, tables[bench.name])
        for line in [*notes(bench.rows), *bench.remarks]:
            console.print(line, markup=False)
        failures += bench.failures
    for failure in failures:
        console.print(failure, style="red", markup=False)
    seconds = time.monotonic() - start
    console.print(f"{seconds:.0f} s; ring-attn bench --help lists the benchmarks", markup=False)
    report = {
        "bench": "all",
        "machine": machine(),
        "command": command_line(),
        "seconds": seconds,
        "benches": {bench.name: bench.to_json() for bench in benches},
    }
    write_json(args.json, report)
    return 1 if failures else 0


def described() -> str:
    """Return a line about the machine."""
    found = machine()
    gpus = [gpu["name"] for gpu in found["devices"]]
    devices = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    versions = found["versions"]
    return (
        f"{devices}, {found['cores']} cores of {found['cpu']}, torch {versions['torch']}, triton "
        f"{versions['triton']}"
    )


def _kernels(device: str) -> Benchmark[Any, Any]:
    words = f"{KERNEL[device]} --device {device} --budget {KERNEL_SECONDS}"
    bench = kernel.Cells(kernel.setting_of(_parsed(options.bench_kernel, words)))
    bench.run()
    return bench


def _on_ranks(device: str, start: float) -> list[Benchmark[Any, Any]]:
    """Run the benchmarks on ranks: those of torchrun, one for each GPU, or two on a CPU."""
    gpus = torch.cuda.device_count() if device == "cuda" else 2
    ranks = env_int("WORLD_SIZE", 1) if under_torchrun() else gpus
    common = f"--device {device} --world-size {ranks}"
    of_ring = ring.RingBench(
        ring.setting_of(_parsed(options.bench_ring, f"{RING[device]} {common}"))
    )
    of_decode = decode.DecodeBench(
        decode.setting_of(_parsed(options.bench_decode, f"{DECODE[device]} {common}"))
    )
    of_comm = None
    if ranks > 1:
        arguments = _parsed(options.bench_comm, f"{COMM[device]} {common}")
        of_comm = comm.CommBench(comm.setting_of(arguments))
    progress.by_rank = not under_torchrun()
    measured = run_ranks(
        measure,
        ranks,
        of_ring.setting,
        of_ring.plans(),
        of_decode.setting,
        None if of_comm is None else of_comm.setting,
        SECONDS - (time.monotonic() - start),
        threads=1,
        device=device,
    )[0]
    of_ring.rows, of_ring.failures = measured[0]
    of_decode.rows, of_decode.failures = measured[1]
    if of_comm is None:
        return [of_ring, of_decode]
    of_comm.rows = measured[2]
    return [of_ring, of_decode, of_comm]


def measure(
    of_ring: ring.RingSetting,
    plans: Sequence[tuple[RingCase, Sequence[ring.Entry]]],
    of_decode: decode.DecodeSetting,
    of_comm: comm.CommSetting | None,
    seconds: float,
) -> tuple[
    tuple[list[ring.RingRow], list[str]],
    tuple[list[decode.DecodeRow], list[str]],
    list[comm.CommRow],
]:
    """Measure on every rank, and leave out what would begin after some seconds."""
    start = time.monotonic()

    def is_late() -> bool:
        """Return whether the time is over, the same on all ranks."""
        late = torch.tensor(float(time.monotonic() - start > seconds), device=rank_device())
        dist.broadcast(late, 0)
        return bool(late)

    rings = ring.measure(of_ring, plans)
    decoded: tuple[list[decode.DecodeRow], list[str]] = ([], [])
    if not is_late():
        rows, failures, _ = decode.measure(of_decode)
        decoded = (rows, failures)
    messages = [] if of_comm is None or is_late() else comm.measure(of_comm)
    return rings, decoded, messages


def _parsed(add: Callable[[argparse.ArgumentParser], None], words: str) -> argparse.Namespace:
    """Return the options of a benchmark."""
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(words.split())
