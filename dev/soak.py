"""Thousands of calls of every kind in short-lived groups, in which nothing may grow or slow down.

The last call of every fifth group fails, because the ranks differ. Results are compared bit for bit
with the results of the first call of their kind.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import halo, ring_attention, tree_decode
from ring_attn.core.strategy import NAMES
from ring_attn.testing import Case
from ring_attn.testing.ranks import arguments_of
from tests.distributed.pool import Pool

SEQLENS = (1, 2, 7, 16, 33, 64, 95)
GROUP_CALLS = 50  # calls of a group
FAILING = 5  # every fifth group ends by an error
SAMPLES = 20
# Polls, 0.1 s apart, after which the threads of a group must have ended.
POLLS = 50
# The largest growth of memory after the warm-up, the first half, in MiB for 1,000 calls.
MAX_GROWTH = 1.0
# The largest ratio of CPU time between the last and the third quarter.
MAX_DRIFT = 1.2


class Sample(NamedTuple):
    """Resources of a process after some calls, and its CPU seconds since the sample before."""

    calls: int
    seconds: float
    mib: float
    descriptors: int
    threads: int


def call(kind: str, seqlen: int, group: dist.ProcessGroup, **changed: Any) -> list[Tensor]:
    """Make a call and return its results.

    `changed` are options of `ring_attention` by name, which have any types.
    """
    case = Case("causal", strategy=kind if kind in NAMES else "ring", seqlen=seqlen)
    (q, k, v, dout), given = arguments_of(case, dist.get_world_size(), dist.get_rank())
    options: dict[str, Any] = {**given, "group": group, **changed}
    layout = case.build_layouts(dist.get_world_size())[1]
    if kind == "halo":
        return [*halo(k, layout, 1, group=group)]
    if kind == "decode":
        one = torch.ones(2, 1, q.size(2), q.size(3))
        return [tree_decode(one, k, v, layout=layout, group=group)]
    for x in (q, k, v):
        x.requires_grad_()
    out = ring_attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def on_rank(calls: int) -> list[Sample]:
    of_two_ranks = [name for name, strategy in NAMES.items() if not strategy.needed]
    draw = random.Random(0)
    kinds = ["decode", "halo", *of_two_ranks]
    known: dict[tuple[str, int], list[Tensor]] = {}
    samples: list[Sample] = []
    start = time.process_time()
    for number in range(1, calls + 1):
        if number % GROUP_CALLS == 1:
            group = dist.new_group()
        kind, seqlen = draw.choice(kinds), draw.choice(SEQLENS)
        results = call(kind, seqlen, group)
        first = known.setdefault((kind, seqlen), results)
        assert all(map(torch.equal, results, first)), (number, kind, seqlen)
        if number % (GROUP_CALLS * FAILING) == 0:
            with suppress(RuntimeError):
                call("ring", 16, group, softmax_scale=1.0 + dist.get_rank())
                raise AssertionError("different calls did not raise")
        if number % GROUP_CALLS == 0:
            dist.destroy_process_group(group)
            del group
        if number % (calls // SAMPLES) == 0:
            seconds = time.process_time() - start
            gc.collect()
            samples.append(settled(number, seconds, samples))
            start = time.process_time()
    return samples


def settled(calls: int, seconds: float, before: Sequence[Sample]) -> Sample:
    """Return a sample after the threads of the last group have ended, if they end in time."""
    for _ in range(POLLS):
        time.sleep(0.1)
        now = sample(calls, seconds)
        first = before[0] if before else None
        if first and now.threads <= first.threads and now.descriptors <= first.descriptors:
            break
    return now


def sample(calls: int, seconds: float) -> Sample:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        calls=calls,
        seconds=seconds,
        mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )


def judged(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return (growth, largest growth) of a rank's memory, descriptors, threads and time."""
    half = samples[len(samples) // 2 :]  # after the warm-up
    quarter = len(samples) // 4
    third, fourth = half[:quarter], half[quarter:]
    slope, _ = statistics.linear_regression([x.calls for x in half], [x.mib for x in half])
    drift = statistics.median(x.seconds for x in fourth) / statistics.median(
        x.seconds for x in third
    )

    def growth(held: Callable[[Sample], int]) -> int:
        """Return the growth of the least number: a thread of one call may run at a sample."""
        return min(map(held, fourth)) - min(map(held, third))

    return {
        "MiB in 1,000 calls": (1000 * slope, MAX_GROWTH),
        "descriptors": (growth(lambda x: x.descriptors), 0),
        "threads": (growth(lambda x: x.threads), 0),
        "of the third quarter's time in the last": (drift, MAX_DRIFT),
    }


def soak(calls: int) -> list[list[Sample]]:
    """Return the samples of each of two ranks."""
    with Pool(2, group_timeout=300.0) as pool:
        return pool.run(on_rank, calls, timeout=max(300.0, calls / 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=20_000, help="a multiple of 1,000")


def run(args: argparse.Namespace) -> int:
    if args.calls < 1000 or args.calls % 1000:
        raise ValueError(f"--calls must be a multiple of 1,000, got {args.calls}")
    bad = False
    for rank, samples in enumerate(soak(args.calls)):
        print(*(f"rank {rank}: {sample}" for sample in samples), sep="\n")
        for name, (growth, limit) in judged(samples).items():
            too_much = growth > limit
            verdict = ": BAD" if too_much else ""
            print(f"rank {rank}: {growth:.2f} {name}, at most {limit}{verdict}")
            bad = bad or too_much
    return int(bad)
