"""Time on a device: clocks, and the timing of calls.

On CUDA a time is measured between two events on the stream, and the host gets a head start: before
a call, the L2 cache is overwritten, and a kernel spins for longer than the host needed last time to
enqueue the same call. So the time is the device's, unless the host needs tens of milliseconds and
the device less. On a CPU the time is the host's.

Compared calls alternate within every repetition, so that clock drift affects all of them alike;
p20, median and p80 are over the repetitions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# The stages of a call in each mode: a forward, then its backward.
STAGES = {"fwd": slice(0, 1), "bwd": slice(1, 2), "fwd_bwd": slice(0, 2)}

# Bytes to overwrite before every call: larger than any L2.
FLUSH_BYTES = 256 << 20

# Cycles per millisecond, at 2 GHz, of the kernel that spins while the host enqueues.
SPIN_CYCLES_PER_MS = 2_000_000

# The kernel spins for this multiple of the host's time, within these bounds: a first call compiles.
HEAD_START_FACTOR, LEAST_HEAD_START_MS, MAX_HEAD_START_MS = 1.5, 1.0, 100.0

# Repetitions end at the time limit, but there are at least LEAST_ITERS after the first, a warm-up.
LEAST_ITERS = 2


class Watch:
    """Events on the current CUDA stream; for a CPU, which has no queue, the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def ready(self, head_start_ms: float) -> None:
        """Waits until a GPU is idle, flushes its L2 cache, and keeps it busy for that time."""
        if self._flush is not None:
            torch.cuda.synchronize()
            self._flush.zero_()
            torch.cuda._sleep(int(head_start_ms * SPIN_CYCLES_PER_MS))

    def mark(self) -> Any:
        if self._flush is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, stop: Any) -> float:
        return 1e3 * (stop - start) if self._flush is None else start.elapsed_time(stop)

    def done(self) -> None:
        if self._flush is not None:
            torch.cuda.synchronize()


class TimedCall(NamedTuple):
    """Stages to time one by one, and an untimed function that cleans up after them."""

    stages: Sequence[Callable[[], object]]
    after: Callable[[], object] = lambda: None


class Timing(NamedTuple):
    """Milliseconds of one call: of each stage, and of the host for all stages."""

    ms: tuple[float, ...]
    host_ms: float


def time_call(watch: Watch, call: TimedCall, host_ms: float) -> Timing:
    """Times a call that the host enqueued in `host_ms` the last time."""
    watch.ready(min(max(LEAST_HEAD_START_MS, HEAD_START_FACTOR * host_ms), MAX_HEAD_START_MS))
    start = time.perf_counter()
    marks = [watch.mark()]
    for stage in call.stages:
        stage()
        marks.append(watch.mark())
    took = 1e3 * (time.perf_counter() - start)
    watch.done()
    call.after()
    return Timing(tuple(watch.ms(*pair) for pair in pairwise(marks)), took)


def time_in_turn(
    calls: Mapping[str, TimedCall],
    watch: Watch,
    iters: int,
    *,
    failed: Callable[[str, Exception], None],
    seconds: float = float("inf"),
) -> dict[str, list[Timing]]:
    """Times all calls alternately within every repetition.

    `iters` repetitions follow the warm-up; after `seconds` none starts, except the first
    LEAST_ITERS. `failed` is called with the name and the error of a call that raises, which then
    has no samples.
    """
    samples: dict[str, list[Timing]] = {name: [] for name in calls}
    host_ms = dict.fromkeys(calls, 0.0)
    started = time.monotonic()
    for repetition in range(-1, iters):
        least = min((len(samples[name]) for name in host_ms), default=0)
        if least >= LEAST_ITERS and time.monotonic() - started > seconds:
            break
        for name in turned([*host_ms], repetition):
            try:
                sample = time_call(watch, calls[name], host_ms[name])
            except Exception as error:
                failed(name, error)
                del host_ms[name]
                samples[name] = []
                continue
            host_ms[name] = sample.host_ms
            if repetition >= 0:
                samples[name].append(sample)
    return samples


def turned(items: Sequence[T], turn: int) -> list[T]:
    """The items rotated by `turn`, so that no call always runs first."""
    start = turn % max(len(items), 1)
    return [*items[start:], *items[:start]]


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """p20, median, p80."""
    cuts = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(samples, dtype=torch.float64).quantile(cuts).tolist()
    return p20, median, p80
