"""The ring on one device: what a rank computes, against its share of the whole.

All ranks run in this process, over the `local` transport, with the ring's own driver: plans, steps,
data and bits are those of a ring of so many devices, but the ranks take turns on one. Every moment
between a rank's waits is marked on the device's stream, and nobody else runs in between.

    kernels   in: the backend's own calls (forward, finalize, delta, backward or its halves),
              between marks around each. Out: everything else.
    rank      in: all that a rank puts on its compute stream: the kernels, the packing of its shard
              for sending, clearing, adding and rounding of gradients. Out: the copies of messages,
              which is the network here, and waiting for other ranks.
    whole     the same two figures of one call over the whole sequence, by the same driver with one
              rank; a rank's share is 1 / P of it
    host      time that the host takes to enqueue a rank's steps, per step
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.bench.implementations import Data, Problem
from ring_attn.bench.timing import Watch, head_start_ms
from ring_attn.layout import SequenceLayout
from ring_attn.plan import Hop
from ring_attn.strategies.ring import RingCall, make_call, ring_backward, ring_forward
from ring_attn.transport.base import Channel, PointToPoint
from ring_attn.transport.local import LocalTransport, run_local

# The backend's calls that count as kernels.
CALLS = ("forward", "finalize", "delta", "backward", "backward_q", "backward_kv")


@dataclass
class Times:
    """What one rank has taken, as marks; `resume` and `pause` bracket what is its own.

    Attributes:
        watch: of the device; the host's clock is read beside it.
        counts_posts: what the transport does to begin an exchange is the rank's own.
        spans: marks around what is its own.
        kernels: marks around the backend's calls.
        host_s: of the host, within the spans.
        depth: of the backend's calls that are under way.
    """

    watch: Watch
    counts_posts: bool = True
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    kernels: list[tuple[Any, Any]] = field(default_factory=list)
    host_s: float = 0.0
    depth: int = 0
    _start: tuple[Any, float] | None = None

    def resume(self) -> None:
        """From here on what is enqueued is this rank's."""
        self._start = self.watch.mark(), time.perf_counter()

    def pause(self) -> None:
        """Up to here."""
        assert self._start is not None, "paused before it was resumed"
        mark, host = self._start
        self.host_s += time.perf_counter() - host
        self.spans.append((mark, self.watch.mark()))
        self._start = None

    @property
    def waits(self) -> list[tuple[Any, Any]]:
        """The marks between a pause and the next resume: what a rank waits for messages."""
        ends = [stop for _, stop in self.spans[:-1]]
        return list(zip(ends, [start for start, _ in self.spans[1:]], strict=True))

    def total_ms(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Of all spans, once the device is done."""
        return sum(self.watch.ms(start, stop) for start, stop in spans)


class TimedTransport:
    """A transport of ranks on one device, whose waits are not the rank's own time."""

    def __init__(self, inner: PointToPoint, times: Times) -> None:
        self.rank, self.world_size, self.stats = inner.rank, inner.world_size, inner.stats
        self._inner, self._times = inner, times

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """As the inner transport; the local one copies nothing here."""
        if self._times.counts_posts:
            self._inner.post(channel, step, hop, send, recv)
            return
        self._times.pause()
        self._inner.post(channel, step, hop, send, recv)
        self._times.resume()

    def wait(self, channel: Channel) -> None:
        """As the inner transport; the local one copies here and lets other ranks run."""
        self._times.pause()
        self._inner.wait(channel)
        self._times.resume()


class LocalRing:
    """All ranks of a ring over one problem; an `Attention` whose results are whole again."""

    name = "ring"

    def __init__(
        self, problem: Problem, data: Data, *, world_size: int, layout: str, backend: str
    ) -> None:
        self._layout = SequenceLayout.from_name(layout, problem.seqlen, world_size)
        self._world_size = world_size
        self._calls = [
            make_call(
                problem.spec, (self._layout, self._layout), problem.mask, rank, backend=backend
            )
            for rank in range(world_size)
        ]
        self._shards = [
            [self._layout.shard(x, rank) for x in data.rows_first] for rank in range(world_size)
        ]
        self._outs: list[list[Tensor]] = []
        self._grads: list[list[Tensor]] = []
        self._host_ms: dict[str, float] = {}  # of the latest timed run, by its name

    @property
    def calls(self) -> list[RingCall]:
        """The call of each rank."""
        return self._calls

    def forward(self) -> None:
        """Computes every rank's out and lse."""
        self._outs = run_local(self._world_size, self._forward)

    def backward(self) -> None:
        """Computes every rank's gradients of the last forward."""
        self._grads = run_local(self._world_size, self._backward)

    def timed_forward(self, watch: Watch) -> list[Times]:
        """`forward`, and what each rank has taken."""
        self._outs, times = self._timed("forward", self._forward, watch)
        return times

    def timed_backward(self, watch: Watch) -> list[Times]:
        """`backward`, and what each rank has taken."""
        self._grads, times = self._timed("backward", self._backward, watch)
        return times

    def results(self) -> list[Tensor]:
        """out, and after a backward dq, dk, dv: (batch, seqlen, heads, dim)."""
        shards = [[out, *grads] for (out, _), grads in zip(self._outs, self._grads, strict=False)]
        shards = shards or [[out] for out, _ in self._outs]
        return [self._layout.unshard(parts) for parts in zip(*shards, strict=True)]

    def release(self) -> None:
        """Lets go of the last results."""
        self._outs, self._grads = [], []

    def _forward(self, rank: int, transport: PointToPoint) -> list[Tensor]:
        q, k, v, _ = self._shards[rank]
        return list(ring_forward(q, k, v, self._calls[rank], transport))

    def _backward(self, rank: int, transport: PointToPoint) -> list[Tensor]:
        q, k, v, dout = self._shards[rank]
        out, lse = self._outs[rank]
        dq, dk, dv, _ = ring_backward(q, k, v, out, lse, dout, self._calls[rank], transport)
        return [dq, dk, dv]

    def _timed(
        self, name: str, work: Callable[[int, PointToPoint], list[Tensor]], watch: Watch
    ) -> tuple[list[list[Tensor]], list[Times]]:
        times = [Times(watch) for _ in range(self._world_size)]
        current = threading.local()

        def timed(rank: int, transport: LocalTransport) -> list[Tensor]:
            current.times = times[rank]
            times[rank].resume()
            found = work(rank, TimedTransport(transport, times[rank]))
            times[rank].pause()
            return found

        with timed_calls(get_backend(self._calls[0].backend), current):
            # All ranks are enqueued while the device spins.
            watch.ready(head_start_ms(self._host_ms.get(name, 0.0)))
            start = time.perf_counter()
            found = run_local(self._world_size, timed)
            self._host_ms[name] = 1e3 * (time.perf_counter() - start)
            watch.done()
        return found, times


@contextmanager
def timed_calls(backend: Any, current: threading.local) -> Iterator[None]:
    """Within it, calls of the backend are marked in the thread's own `current.times`."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            times: Times = current.times
            times.depth += 1
            start = times.watch.mark() if times.depth == 1 else None
            try:
                return call(*args, **options)
            finally:
                times.depth -= 1
                if times.depth == 0:  # a call within a call is timed with it
                    times.kernels.append((start, times.watch.mark()))

        return run

    names = [name for name in CALLS if hasattr(backend, name)]
    patches = [mock.patch.object(backend, name, timed(getattr(backend, name))) for name in names]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@dataclass(frozen=True)
class RingRow:
    """One layout in one direction; times in ms, medians over the repetitions.

    Attributes:
        layout: by name.
        mode: "fwd", "bwd" or "fwd_bwd".
        world_size: ranks.
        seqlen: of the whole.
        whole_kernels_ms: one call over the whole.
        whole_ms: the same with the driver's own passes.
        share_ms: whole_kernels_ms / world_size.
        kernels_ms: of each rank.
        rank_ms: of each rank, with the driver's own passes.
        steps: of a rank.
        host_ms_per_step: of the slowest rank.
        efficiency: share_ms / the most that a rank's kernels take.
        efficiency_with_driver: whole_ms / world_size / the most that a rank takes.
        overhead: what all ranks' kernels take together, over the whole, less 1.
        same_bits: whether out, dq, dk, dv have the bits of the whole call's.
        max_ratio: greatest error / bound of the ring's results.
        note: why there are no times.
    """

    layout: str
    mode: str
    world_size: int
    seqlen: int
    whole_kernels_ms: float | None = None
    whole_ms: float | None = None
    share_ms: float | None = None
    kernels_ms: tuple[float, ...] = ()
    rank_ms: tuple[float, ...] = ()
    steps: int = 0
    host_ms_per_step: float | None = None
    efficiency: float | None = None
    efficiency_with_driver: float | None = None
    overhead: float | None = None
    same_bits: bool | None = None
    max_ratio: float | None = None
    note: str = ""


# One repetition of a ring in one direction: (kernels, rank, host) ms of each rank.
Sample = list[tuple[float, float, float]]


def results(ring: LocalRing, *, backward: bool) -> list[Tensor]:
    """out, and with `backward` dq, dk, dv, of one untimed run."""
    ring.forward()
    if backward:
        ring.backward()
    found = ring.results()
    ring.release()
    return found


def samples(
    rings: Mapping[str, LocalRing], watch: Watch, iters: int, *, backward: bool
) -> dict[str, dict[str, list[Sample]]]:
    """Every ring in turn within every repetition: by ring, by mode, a sample of each."""
    found: dict[str, dict[str, list[Sample]]] = {name: {} for name in rings}
    for repetition in range(-1, iters):  # the first only warms up
        for name, ring in rings.items():
            for mode, one in _sample(ring, watch, backward=backward).items():
                if repetition >= 0:
                    found[name].setdefault(mode, []).append(one)
    return found


def _sample(ring: LocalRing, watch: Watch, *, backward: bool) -> dict[str, Sample]:
    """Times one repetition of a ring, or of the whole as a ring of one."""
    found = {"fwd": _figures(ring.timed_forward(watch))}
    if backward:
        found["bwd"] = _figures(ring.timed_backward(watch))
        pairs = zip(found["fwd"], found["bwd"], strict=True)
        found["fwd_bwd"] = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
    ring.release()
    return found


def _figures(times: Sequence[Times]) -> Sample:
    return [(t.total_ms(t.kernels), t.total_ms(t.spans), 1e3 * t.host_s) for t in times]


def row(
    layout: str,
    mode: str,
    ring: LocalRing,
    samples: Mapping[str, Sequence[Sample]],
    whole: Mapping[str, Sequence[Sample]],
    bits: bool,
    ratio: float,
    note: str = "",
) -> RingRow:
    """The figures of one ring in one direction.

    Args:
        layout: by name.
        mode: "fwd", "bwd" or "fwd_bwd".
        ring: that was measured.
        samples: repetitions of the ring, by mode.
        whole: of the whole, between those of the ring.
        bits: whether the results have the bits of the whole.
        ratio: greatest error / bound.
        note: what is wrong.
    """
    calls = ring.calls
    whole_kernels, whole_rank, _ = _medians(whole[mode])[0]
    ranks = _medians(samples[mode])
    kernels, device, host = (tuple(column) for column in zip(*ranks, strict=True))
    steps = sum(
        len(calls[0].plan(backward=back).steps)
        for back in {"fwd": (False,), "bwd": (True,), "fwd_bwd": (False, True)}[mode]
    )
    share = whole_kernels / len(calls)
    return RingRow(
        layout,
        mode,
        len(calls),
        calls[0].mask.seqlen_q,
        whole_kernels_ms=whole_kernels,
        whole_ms=whole_rank,
        share_ms=share,
        kernels_ms=kernels,
        rank_ms=device,
        steps=steps,
        host_ms_per_step=max(host) / steps,
        efficiency=share / max(kernels),
        efficiency_with_driver=whole_rank / len(calls) / max(device),
        overhead=sum(kernels) / whole_kernels - 1.0,
        same_bits=bits,
        max_ratio=ratio,
        note=note,
    )


def _medians(samples: Sequence[Sample]) -> list[tuple[float, float, float]]:
    """Of each rank, over the repetitions."""
    found = []
    for rank in zip(*samples, strict=True):
        kernels, device, host = (statistics.median(x) for x in zip(*rank, strict=True))
        found.append((kernels, device, host))
    return found


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two sets of results are equal, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
