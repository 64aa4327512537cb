"""Thousands of calls of every kind in groups that come and go: nothing grows, nothing slows down.

Every fifth group ends by an error, of a last call in which the ranks differ. Results are compared
bit for bit with those of the first call of their kind.
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

from ring_attn import halo, ring_attention, tree_decode
from ring_attn.core.strategy import NAMES
from ring_attn.testing import Case
from ring_attn.testing.ranks import arguments_of
from tests.distributed.pool import Pool

SEQLENS = (1, 2, 7, 16, 33, 64, 95)
GROUP_CALLS, FAILING, SAMPLES = 50, 5, 20
# Looks, 0.1 s apart, until the threads of a group must have ended.
LOOKS = 50
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


def call(kind: str, seqlen: int, group: dist.ProcessGroup, **changed: Any) -> list[Tensor]:
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
    draw, kinds = random.Random(0), ["decode", "halo", *of_two_ranks]
    known, samples = dict[tuple[str, int], list[Tensor]](), list[Sample]()
    start = time.process_time()
    for number in range(1, calls + 1):
        if number % GROUP_CALLS == 1:
            group = dist.new_group()
        which = draw.choice(kinds), draw.choice(SEQLENS)
        results = call(*which, group)
        assert all(map(torch.equal, results, known.setdefault(which, results))), (number, which)
        if number % (GROUP_CALLS * FAILING) == 0:
            with suppress(RuntimeError):
                call("ring", 16, group, softmax_scale=1.0 + dist.get_rank())
                raise AssertionError("calls that differ have run")
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
    """Return a sample, after the threads of the last group have ended; what stays has grown."""
    for _ in range(LOOKS):
        time.sleep(0.1)
        now = sample(calls, seconds)
        first = before[0] if before else None
        if first and now.threads <= first.threads and now.descriptors <= first.descriptors:
            break
    return now


def sample(calls: int, seconds: float) -> Sample:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    held = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return Sample(calls, seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *held)


def judged(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Growth of a rank's memory, descriptors, threads and time, and the most that each may grow."""
    half, quarter = samples[len(samples) // 2 :], len(samples) // 4
    slope, _ = statistics.linear_regression([x.calls for x in half], [x.mib for x in half])
    third, fourth = (
        statistics.median(x.seconds for x in part) for part in (half[:quarter], half[quarter:])
    )
    return {
        "MiB in 1,000 calls": (1000 * slope, MOST_GROWTH),
        "descriptors": (half[-1].descriptors - half[0].descriptors, 0),
        "threads": (half[-1].threads - half[0].threads, 0),
        "of the third quarter's time in the last": (fourth / third, MOST_DRIFT),
    }


def soak(calls: int) -> list[list[Sample]]:
    """The samples of each of two ranks."""
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
        for name, (grown, most) in judged(samples).items():
            print(f"rank {rank}: {grown:.2f} {name}, at most {most}{': BAD' * (grown > most)}")
            bad |= grown > most
    return int(bad)
