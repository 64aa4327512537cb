"""Thousands of calls of every kind in groups that come and go: nothing grows, nothing slows down.

Every fifth group ends by an error, of a last call in which the ranks differ. Results are compared
bit for bit with the first call's of their kind.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, halo, ring_attention, tree_decode
from ring_attn.strategies.strategy import NAMES
from ring_attn.testing import strategy_of
from tests.distributed.pool import Pool

SEQLENS = (1, 2, 7, 16, 33, 64, 95)
GROUP_CALLS, FAILING = 50, 5
# Most growth of memory after the warm-up, which is the first half, in MiB for 1,000 calls.
MOST_GROWTH = 1.0
# Most that the last quarter may take of the third one's time of the CPU.
MOST_DRIFT = 1.2


class Sample(NamedTuple):
    """The holdings of a process after so many calls, and its CPU's seconds for the last ones."""

    calls: int
    seconds: float
    mib: float
    descriptors: int
    threads: int


def call(kind: str, seqlen: int, group: dist.ProcessGroup, **options: Any) -> list[Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seqlen)
    layout = SequenceLayout.contiguous(seqlen, world_size)
    q, k, v = (
        layout.shard(x[None], rank).requires_grad_(kind in NAMES)
        for x in torch.randn(3, seqlen, 4, 8, generator=generator)
    )
    options |= {"group": group, "transport": TransportOptions(timeout=60.0)}
    if kind == "halo":
        return [*halo(k, layout, 1, group=group)]
    if kind == "decode":
        return [tree_decode(torch.ones(1, 1, 4, 8), k, v, layout=layout, **options)]
    strategy = strategy_of(kind, world_size)
    out = ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def usable(world_size: int) -> list[str]:
    kinds = ["decode", "halo"]
    for name in NAMES:
        with suppress(NotImplementedError):
            strategy_of(name, world_size)
            kinds.append(name)
    return kinds


def on_rank(calls: int, every: int) -> list[Sample]:
    draw, kinds = random.Random(0), usable(dist.get_world_size())
    known, samples = dict[tuple[str, int], list[Tensor]](), list[Sample]()
    start = time.process_time()
    for number in range(calls):
        if number % GROUP_CALLS == 0:
            group = dist.new_group()
        which = draw.choice(kinds), draw.choice(SEQLENS)
        results = call(*which, group)
        assert all(map(torch.equal, results, known.setdefault(which, results))), (number, which)
        if (number + 1) % GROUP_CALLS == 0:
            if (number + 1) // GROUP_CALLS % FAILING == 0:
                with suppress(RuntimeError):
                    call("ring", 16, group, softmax_scale=1.0 + dist.get_rank())
                    raise AssertionError("calls that differ have run")
            dist.destroy_process_group(group)
            del group
        if (number + 1) % every == 0:
            seconds = time.process_time() - start
            gc.collect()
            time.sleep(0.5)  # threads of the last group end
            samples.append(sample(number + 1, seconds))
            start = time.process_time()
    return samples


def sample(calls: int, seconds: float) -> Sample:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    held = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return Sample(calls, seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *held)


def growth(samples: Sequence[Sample]) -> float:
    """MiB for 1,000 calls, in the second half."""
    half = samples[len(samples) // 2 :]
    slope, _ = statistics.linear_regression([x.calls for x in half], [x.mib for x in half])
    return 1000 * slope


def drift(samples: Sequence[Sample]) -> float:
    """The last quarter's time by the third one's."""
    quarter = len(samples) // 4
    last, third = samples[-quarter:], samples[-2 * quarter : -quarter]
    return statistics.median(x.seconds for x in last) / statistics.median(x.seconds for x in third)


def faults(samples: Sequence[Sample]) -> list[str]:
    """Things that grow or slow down on a rank, in words; `samples` are at least 8."""
    middle, last = samples[len(samples) // 2], samples[-1]
    found = {
        f"memory grows by {growth(samples):.2f} MiB in 1,000 calls": growth(samples) > MOST_GROWTH,
        f"{middle.descriptors} descriptors become {last.descriptors}": last.descriptors
        > middle.descriptors,
        f"{middle.threads} threads become {last.threads}": last.threads > middle.threads,
        f"the last quarter takes {drift(samples):.2f} of the third's time": drift(samples)
        > MOST_DRIFT,
    }
    return [text for text, bad in found.items() if bad]


def soak(calls: int, world_size: int) -> list[list[Sample]]:
    """The samples of each rank, 20 of them."""
    pool = Pool(world_size, group_timeout=300.0)
    try:
        return pool.run(on_rank, calls, calls // 20, timeout=max(300.0, calls / 2))
    finally:
        if not pool.closed:
            pool.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=20_000, help="a multiple of 1,000")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")


def run(args: argparse.Namespace) -> int:
    if args.calls < 1000 or args.calls % 1000:
        raise ValueError(f"--calls must be a multiple of 1,000, got {args.calls}")
    by_rank = soak(args.calls, args.world_size)
    for rank, samples in enumerate(by_rank):
        print(*(f"rank {rank}: {sample}" for sample in samples), sep="\n")
        print(f"rank {rank}: {growth(samples):.2f} MiB in 1,000 calls, drift {drift(samples):.2f}")
    bad = [(rank, text) for rank, samples in enumerate(by_rank) for text in faults(samples)]
    for rank, text in bad:
        print(f"rank {rank}: {text}")
    return int(bool(bad))
