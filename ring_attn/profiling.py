"""Measures calls: figures of the last call, named ranges for profilers, peak memory.

    figures    `with collect(): ...`, or RING_ATTN_STATS=1 in the environment; then `stats()`
    ranges     wherever torch's profiler is on, or its emit_nvtx, for Nsight Systems; the
               profiler's export_chrome_trace writes them for Perfetto

The variable is read when this module is imported. A call that nobody observes pays for one check
and nothing else. The names of the ranges are stable:

    ring_attn::forward, ring_attn::backward     a whole call
    ring_attn::step{i}.attend                   attention of step i: one hop of a ring, or one group
                                                of gathered heads
    ring_attn::step{i}.post, step{i}.wait       starts a transfer; waits for it
    ring_attn::delta                            rowsum(dO * O), before a backward's first step
    ring_attn::finalize                         out and lse from the state
    ring_attn::merge                            merges the partial results of all ranks
    ring_attn::gradient_sync                    see `gradient_sync`

Ranges within a step carry its number, ranges between steps carry none: the exchange of heads around
a ring is `ring_attn::post`, out and lse of gathered heads are `ring_attn::step{i}.finalize`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ring_attn.torch_private import profiler_enabled
from ring_attn.transport import streams
from ring_attn.transport.base import TransportStats

Direction = Literal["forward", "backward"]

STATS_ALWAYS = os.environ.get("RING_ATTN_STATS", "0") not in ("", "0")

# Ranges that count as computing: calls of a backend, and the merge of partial results.
COMPUTE = ("attend", "finalize", "delta", "merge")


@dataclass(frozen=True)
class Figures:
    """Measurements of one call in one direction, on one rank.

    On CUDA, seconds are measured between events on the compute stream; on CPU, by the host's clock.

    Attributes:
        seconds: from the call's beginning to its end.
        compute_s: time in attention, without copies into and out of messages.
        wait_s: time in waits for transfers, which compute did not hide.
        in_flight_s: from each transfer's start to the end of its wait, summed over transfers: an
            upper bound of the time that they took.
        bytes_sent: bytes that left this rank; in a collective, the bytes meant for other ranks.
        bytes_received: bytes that came from other ranks.
        messages: exchanges; a collective counts as one.
        peak_bytes: most bytes that torch had allocated during the call; None on CPU, where
            `profiling.peak_bytes` counts a call's.
        device_bytes: memory of the GPU, or None.
    """

    seconds: float
    compute_s: float
    wait_s: float
    in_flight_s: float
    bytes_sent: int
    bytes_received: int
    messages: int
    peak_bytes: int | None
    device_bytes: int | None

    @property
    def pressure(self) -> float | None:
        """Share of the device's memory held at the peak, in (0, 1)."""
        if self.peak_bytes is None or self.device_bytes is None:
            return None
        return self.peak_bytes / self.device_bytes


@dataclass(frozen=True)
class Stats:
    """Figures of the last call on this rank.

    Attributes:
        forward: figures of the last forward; None if only a backward was measured.
        backward: figures of the last backward after that forward, or None.
        gradient_sync_s: time in all blocks of `gradient_sync` after that forward, or None.
    """

    forward: Figures | None
    backward: Figures | None
    gradient_sync_s: float | None


def stats() -> Stats:
    """Measured figures of the last call on this rank; on CUDA waits until the call is done.

    Only calls within `collect()`, or in a process with RING_ATTN_STATS=1, are measured. Figures of
    an outer call include its inner calls, such as the ring within a hybrid.

    Raises:
        RuntimeError: nothing has been measured.

    Example:
        >>> with collect(), gradient_sync():
        ...     pass  # ring_attention(q, k, v), the backward, an all-reduce of the gradients
        >>> stats().forward, stats().gradient_sync_s > 0.0
        (None, True)
    """
    last, syncs = collected.last, collected.syncs
    if not last and not syncs:
        raise RuntimeError(
            "no call has been measured, or the last one failed: call within "
            "`with ring_attn.profiling.collect():`, or set RING_ATTN_STATS=1 before the start"
        )
    forward, backward = (last[name]() if name in last else None for name in ("forward", "backward"))
    return Stats(forward, backward, _total(syncs) if syncs else None)


@contextmanager
def collect() -> Iterator[None]:
    """Measures all calls within the block, of all threads; `stats` returns the last one's figures.

    Drops earlier figures. Each measured call resets torch's peak for its CUDA device: other readers
    of that peak see only the time since.

    Example:
        >>> with collect():
        ...     pass  # ring_attention(q, k, v)
    """
    if not collected.depth:
        collected.forget()
    collected.depth += 1
    try:
        yield
    finally:
        collected.depth -= 1


@contextmanager
def gradient_sync(device: torch.device | str = "cpu") -> Iterator[None]:
    """Adds the block's time to `Stats.gradient_sync_s`, where calls are measured.

    Meant for the caller's own all-reduce of a model's gradients.

    Args:
        device: where the gradients are.

    Example:
        >>> with gradient_sync():
        ...     pass  # dist.all_reduce(gradients)
    """
    place = torch.device(device)
    start = _now(place) if collected.depth else None
    with _named("ring_attn::gradient_sync"):
        yield
    if start is not None:
        collected.syncs.append((start, _now(place)))


def peak_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak bytes of tensors that `fn` holds beyond those held before.

    On CPU counts every allocation, also inside torch's operators; on CUDA reads the count of the
    caching allocator.

    Args:
        fn: the measured function; its result is kept until the count is read.
        device: where `fn` allocates.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = fn()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        result = fn()
    kineto = run.profiler.kineto_results
    allocations = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    held = most = 0
    for _, nbytes in sorted(allocations, key=lambda event: event[0]):
        held += nbytes
        most = max(most, held)
    del result
    return most


# -- what `machines.run` uses

# Nanoseconds of the host's clock; on a device with streams, an event on one of them.
Moment = Any
Span = tuple[Moment, Moment]


class Observer:
    """Names the parts of one call on one rank; with a device also measures them."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.step: int | None = None  # None between steps
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self._device = device

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Opens the range of a part of the call: one of `COMPUTE`, "post" or "wait"."""
        step = "" if self.step is None else f"step{self.step}."
        with _named(f"ring_attn::{step}{what}"):
            start = self.mark()
            yield
            if self._device is not None:
                self.spans[what].append((start, _now(self._device)))

    def mark(self) -> Moment:
        """This moment on the device's clock; None where nothing is measured."""
        return None if self._device is None else _now(self._device)

    def landed(self, start: Moment) -> None:
        """Records the end of the wait for a transfer."""
        if self._device is not None:
            self.spans["flight"].append((start, _now(self._device)))


@contextmanager
def observe(direction: Direction, device: torch.device, sent: TransportStats) -> Iterator[Observer]:
    """Observes one call; where figures are collected, keeps them when the call ends.

    `sent` are the counts of the rank's transport.
    """
    if not collected.depth:
        with _named(f"ring_attn::{direction}"):
            yield Observer()
        return
    collected.forget(direction)
    peak = device_bytes = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    observer, before = Observer(device), replace(sent)
    with _named(f"ring_attn::{direction}"):
        start = _now(device)
        yield observer
        end = _now(device)
    after = replace(sent)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        device_bytes = torch.cuda.get_device_properties(device).total_memory

    def figures() -> Figures:
        """On CUDA waits for the call to end."""
        return Figures(
            seconds=_seconds(start, end),
            compute_s=sum(_total(observer.spans[name]) for name in COMPUTE),
            wait_s=_total(observer.spans["wait"]),
            in_flight_s=_total(observer.spans["flight"]),
            bytes_sent=after.bytes_sent - before.bytes_sent,
            bytes_received=after.bytes_received - before.bytes_received,
            messages=after.messages - before.messages,
            peak_bytes=peak,
            device_bytes=device_bytes,
        )

    collected.last[direction] = figures


def _now(device: torch.device) -> Moment:
    if streams.are_used(device):
        return streams.moment(streams.current(device))
    return time.perf_counter_ns()


def _seconds(start: Moment, end: Moment) -> float:
    """Seconds between two moments; on a device with streams the host waits for the second."""
    if isinstance(end, int):
        return (end - start) * 1e-9
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1e-3


# -- records of calls


def _total(spans: Iterable[Span]) -> float:
    return sum((_seconds(*span) for span in spans), 0.0)


@dataclass
class _Collected:
    """The last calls of all threads: on CUDA, autograd has its own for a backward."""

    depth: int  # number of open requests to collect
    # Computed when asked for: on CUDA that waits.
    last: dict[str, Callable[[], Figures]] = field(default_factory=dict)
    syncs: list[Span] = field(default_factory=list)

    def forget(self, direction: Direction = "forward") -> None:
        """Drops the figures that the beginning call will replace."""
        self.last.pop("backward", None)
        if direction == "forward":
            self.last.pop("forward", None)
            self.syncs.clear()


collected = _Collected(int(STATS_ALWAYS))


def _named(name: str) -> AbstractContextManager[object]:
    """A named range for torch's profiler; does nothing where the profiler is off."""
    return record_function(name) if profiler_enabled() else nullcontext()
