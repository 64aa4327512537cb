"""Measure calls: figures of the last call, named ranges for profilers, peak memory.

    figures    `with collect(): ...`, or RING_ATTN_STATS=1 in the environment; then `stats()`
    ranges     whenever torch's profiler is on, or its emit_nvtx for Nsight Systems; the
               profiler's export_chrome_trace writes them for Perfetto

The variable is read when this module is imported. A call that is not measured costs only one check
more. The names of the ranges are stable:

    ring_attn::forward, ring_attn::backward     a whole call
    ring_attn::step{i}.attend                   attention of step i: one hop of a ring, or one group
                                                of gathered heads
    ring_attn::step{i}.post, step{i}.wait       start of a transfer; wait for its end
    ring_attn::delta                            rowsum(dO * O), before a backward's first step
    ring_attn::finalize                         out and lse from the state
    ring_attn::merge                            merge of the partial results of all ranks
    ring_attn::gradient_sync                    see `gradient_sync`

The names of ranges within a step have its number, the names of ranges between steps have none. For
example, the exchange of heads around a ring is `ring_attn::post`, and out and lse of gathered heads
are `ring_attn::step{i}.finalize`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ring_attn.torch_private import profiler_enabled as profiler_enabled
from ring_attn.transport import streams
from ring_attn.transport.base import TransportStats
from ring_attn.transport.streams import Moment

Direction = Literal["forward", "backward"]

STATS_ALWAYS = os.environ.get("RING_ATTN_STATS", "0") not in ("", "0")

# Ranges that count as computing: calls of a backend, and the merge of partial results.
COMPUTE = ("attend", "finalize", "delta", "merge")


@dataclass(frozen=True)
class Figures:
    """Measurements of one call in one direction, on one rank.

    On CUDA, seconds are measured between events on the compute stream; on CPU, by the host's clock.

    Attributes:
        seconds: time from the beginning of the call to its end.
        compute_s: time in attention, without copies into and out of messages.
        wait_s: time in waits for transfers, which compute did not hide.
        in_flight_s: time from the start of a transfer to the end of its wait, summed over
            transfers; an upper bound of `transfer_s`.
        transfer_s: time from the start of a transfer to its arrival, summed over transfers. None if
            the time of an arrival is unknown: gloo does not report it.
        bytes_sent: bytes that this rank sent to other ranks, also in collectives.
        bytes_received: bytes that this rank received from other ranks.
        messages: number of exchanges; a collective counts as one.
        steps: number of steps of the program: hops of a ring, with or without tiles to compute, or
            groups of gathered heads.
        peak_bytes: maximum of the bytes that torch had allocated during the call; None on CPU,
            where `profiling.peak_bytes` counts the bytes of a call.
        device_bytes: memory of the GPU, or None.
    """

    seconds: float
    compute_s: float
    wait_s: float
    in_flight_s: float
    transfer_s: float | None
    bytes_sent: int
    bytes_received: int
    messages: int
    steps: int
    peak_bytes: int | None
    device_bytes: int | None

    @property
    def pressure(self) -> float | None:
        """Fraction of the device's memory that is allocated at the peak, in (0, 1)."""
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
    """Return the figures of the last call on this rank; on CUDA, wait until the call is done.

    Only calls within `collect()`, or in a process with RING_ATTN_STATS=1, are measured. Figures of
    an outer call include its inner calls, such as the ring within a hybrid.

    Returns:
        The figures of the last forward and backward, and the time of gradient synchronisation.

    Raises:
        RuntimeError: no call has been measured.

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
    return Stats(
        forward=last["forward"]() if "forward" in last else None,
        backward=last["backward"]() if "backward" in last else None,
        gradient_sync_s=_total(syncs) if syncs else None,
    )


@contextmanager
def collect() -> Iterator[None]:
    """Measure all calls within the block, of all threads; `stats` returns the last call's figures.

    Earlier figures are deleted. Each measured call resets torch's peak memory statistics for its
    CUDA device, so other code that reads the peak gets the peak since then.

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
    """Add the block's time to `Stats.gradient_sync_s`, if calls are measured.

    Use it around a custom all-reduce of a model's gradients.

    Args:
        device: the device of the gradients.

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
    """Return the peak of the bytes of tensors that `fn` allocates, without earlier tensors.

    On CPU, every allocation is counted, also inside torch's operators. On CUDA, the count is the
    caching allocator's.

    Args:
        fn: the measured function; its result is kept until the count is read.
        device: the device on which `fn` allocates.

    Returns:
        The peak in bytes.

    Example:
        >>> peak_bytes(lambda: torch.zeros(1000))
        4000
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
    events = run.profiler.kineto_results.events()
    # Allocations, and frees with a negative number of bytes.
    changes = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    del result
    return peak


# -- the interface for `machines.run`

Span = tuple[Moment, Moment]


class Observer:
    """Name the parts of one call on one rank as ranges, and with a device measure them."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.step: int | None = None  # None between steps
        self.steps = 0
        self.spans: dict[str, list[Span]] = defaultdict(list)
        # From the start of each transfer to its arrival; None if that is unknown.
        self.transfers: list[Span | None] = []
        self._device = device

    def begin_step(self, number: int | None) -> None:
        """Count a step, and give its number to later ranges; None ends a step."""
        self.step = number
        self.steps += number is not None

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Open the range of a part of the call: one of `COMPUTE`, "post" or "wait"."""
        step = "" if self.step is None else f"step{self.step}."
        with _named(f"ring_attn::{step}{what}"):
            start = self.mark()
            yield
            if self._device is not None:
                self.spans[what].append((start, _now(self._device)))

    def mark(self) -> Moment:
        """Return the current moment on the device's clock; None if nothing is measured."""
        return None if self._device is None else _now(self._device)

    def sent(self, start: Moment, end: streams.Event | None) -> None:
        """Record the start of a transfer, and its arrival `end`, an event on a device's stream."""
        if self._device is None:
            return
        if end is None:
            self.transfers.append(None)
            return
        # The event of an exchange has no time. Another stream waits for it and records the time, so
        # that neither the host nor the compute stream waits.
        clock = _clock_stream(self._device)
        end.wait(clock)
        self.transfers.append((start, streams.moment(clock)))

    def landed(self, start: Moment) -> None:
        """Record the end of the wait for a transfer, which began at `start`."""
        if self._device is not None:
            self.spans["flight"].append((start, _now(self._device)))


@contextmanager
def observe(direction: Direction, device: torch.device, sent: TransportStats) -> Iterator[Observer]:
    """Observe one call; if figures are collected, keep them when the call ends.

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
        """Return the figures; on CUDA, wait for the end of the call."""
        return Figures(
            seconds=streams.seconds_between(start, end),
            compute_s=sum(_total(observer.spans[name]) for name in COMPUTE),
            wait_s=_total(observer.spans["wait"]),
            in_flight_s=_total(observer.spans["flight"]),
            transfer_s=_total_of_known(observer.transfers),
            bytes_sent=after.bytes_sent - before.bytes_sent,
            bytes_received=after.bytes_received - before.bytes_received,
            messages=after.messages - before.messages,
            steps=observer.steps,
            peak_bytes=peak,
            device_bytes=device_bytes,
        )

    collected.last[direction] = figures


def _now(device: torch.device) -> Moment:
    """Return the current moment: an event on the current stream, or the time of the host."""
    if streams.are_used(device):
        return streams.moment(streams.current(device))
    return time.perf_counter_ns()


@cache
def _clock_stream(device: torch.device) -> streams.Stream:
    """Return the stream on which the arrivals of measured transfers are recorded."""
    return streams.new(device)


# -- records of calls


def _total(spans: Iterable[Span]) -> float:
    """Return the sum of spans in seconds."""
    return sum((streams.seconds_between(*span) for span in spans), 0.0)


def _total_of_known(spans: Sequence[Span | None]) -> float | None:
    """Return the sum of spans in seconds; None if a span is unknown."""
    known = [span for span in spans if span is not None]
    return _total(known) if len(known) == len(spans) else None


@dataclass
class _Collected:
    """The last calls of all threads: on CUDA, autograd runs a backward in a different thread."""

    depth: int  # number of open `collect` blocks, plus 1 if RING_ATTN_STATS is set
    # Functions, so that figures are computed only for `stats`: on CUDA that waits.
    last: dict[str, Callable[[], Figures]] = field(default_factory=dict)
    syncs: list[Span] = field(default_factory=list)

    def forget(self, direction: Direction = "forward") -> None:
        """Delete the figures that the beginning call will replace."""
        self.last.pop("backward", None)
        if direction == "forward":
            self.last.pop("forward", None)
            self.syncs.clear()


collected = _Collected(int(STATS_ALWAYS))


def _named(name: str) -> AbstractContextManager[object]:
    """Return a named range for torch's profiler; it does nothing if the profiler is off."""
    return record_function(name) if profiler_enabled() else nullcontext()
