"""Measurement of times on a device.

On CUDA a time is measured between two events on the stream, and the host gets a head start: before
a call, the L2 cache is overwritten, and a kernel spins for longer than the host needed to enqueue
the same call the last time. Thus the time is that of the device, unless the host needs tens of
milliseconds and the device less. On a CPU it is the time of the host.

Compared calls alternate within every repetition, so that a drift of the clock affects all of them
equally. p20, median and p80 are over the repetitions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

# The stages of a call in each mode: a forward, then its backward.
STAGES = {"fwd": slice(0, 1), "bwd": slice(1, 2), "fwd_bwd": slice(0, 2)}

# Bytes to overwrite before every call: larger than any L2.
FLUSH_BYTES = 256 << 20

# Cycles per millisecond, at 2 GHz, of the kernel that spins while the host enqueues a call.
SPIN_CYCLES_PER_MS = 2_000_000

# The kernel spins for this multiple of the host's time, within these limits, because the first call
# compiles.
HEAD_START_FACTOR = 1.5
MIN_HEAD_START_MS = 1.0
MAX_HEAD_START_MS = 100.0

# Repetitions end at the time limit, but at least this many follow the warm-up.
MIN_ITERS = 2

# A moment: an event on the stream of a GPU, or seconds of the host's clock.
Moment = torch.cuda.Event | float


class Watch:
    """A clock: events on the current CUDA stream, or the host's clock for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def ready(self, head_start_ms: float) -> None:
        """Wait until a GPU is idle, flush its L2 cache, and keep it busy for some time."""
        if self._flush is not None:
            torch.cuda.synchronize()
            self._flush.zero_()
            torch.cuda._sleep(int(head_start_ms * SPIN_CYCLES_PER_MS))

    def mark(self) -> Moment:
        """Return the current moment of the device."""
        if self._flush is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Moment, stop: Moment) -> float:
        """Return the milliseconds between two moments."""
        if self._flush is None:
            return 1e3 * (cast(float, stop) - cast(float, start))
        return float(cast(torch.cuda.Event, start).elapsed_time(cast(torch.cuda.Event, stop)))

    def done(self) -> None:
        """Wait until a GPU is idle."""
        if self._flush is not None:
            torch.cuda.synchronize()


class TimedCall(NamedTuple):
    """Stages that are timed one by one, and a function that cleans up after them, untimed."""

    stages: Sequence[Callable[[], object]]
    after: Callable[[], object] = lambda: None


class Timing(NamedTuple):
    """Milliseconds of each stage of a call, and of the host for all stages."""

    ms: tuple[float, ...]
    host_ms: float


def time_call(watch: Watch, call: TimedCall, host_ms: float) -> Timing:
    """Time a call, for which the host needed `host_ms` the last time."""
    head_start = max(MIN_HEAD_START_MS, HEAD_START_FACTOR * host_ms)
    watch.ready(min(head_start, MAX_HEAD_START_MS))
    start = time.perf_counter()
    marks = [watch.mark()]
    for stage in call.stages:
        stage()
        marks.append(watch.mark())
    host_ms = 1e3 * (time.perf_counter() - start)
    watch.done()
    call.after()
    return Timing(tuple(watch.ms(start, stop) for start, stop in pairwise(marks)), host_ms)


def time_in_turn(
    calls: Mapping[str, TimedCall],
    watch: Watch,
    iters: int,
    *,
    failed: Callable[[str, Exception], None],
    seconds: float = float("inf"),
) -> dict[str, list[Timing]]:
    """Time all calls, which alternate within every repetition.

    Args:
        calls: the calls by name.
        watch: the clock of the device.
        iters: number of repetitions after the warm-up.
        failed: called with the name and the error of a call that raises; it has no samples.
        seconds: time limit, after which no repetition starts except the first MIN_ITERS.
    """
    samples: dict[str, list[Timing]] = {name: [] for name in calls}
    host_ms = dict.fromkeys(calls, 0.0)
    started = time.monotonic()
    for repetition in range(-1, iters):
        fewest = min((len(samples[name]) for name in host_ms), default=0)
        if fewest >= MIN_ITERS and time.monotonic() - started > seconds:
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
    """Return the items rotated by `turn`, so that each of them is the first one at times."""
    start = turn % max(len(items), 1)
    return [*items[start:], *items[:start]]


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return p20, median and p80."""
    cuts = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(samples, dtype=torch.float64).quantile(cuts).tolist()
    return p20, median, p80
