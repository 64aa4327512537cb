"""A ring on one device whose ranks take turns, each from its first step to its last.

    rank r, step i    compute stream    tiles with the shard in one of the driver's two buffers
                      copy streams      the shard of step i + 1 from where it lies to the other

The driver, the plans and the kernels are the ring's own. What another rank would send is taken from
where that rank's tensors lie: on the device, or in pinned host memory (`offload`). So beyond the
tensors themselves the device holds one rank's working memory, and a rank can be timed alone, with
or without copies under way beside its kernels.

Gradients of K and V are not sent on but kept, one sum for each shard, which every rank in its turn
reads and writes as the message that it is. The lowest rank goes first: for a causal mask over
contiguous shards that is the order of the ring, and results have the ring's own bits. Elsewhere
sums are not whole, and only time can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.bench.implementations import Problem
from ring_attn.bench.local_ring import TimedTransport, Times
from ring_attn.bench.timing import SPIN_CYCLES_PER_MS, Watch
from ring_attn.cost import gradient_packet, shard_packet
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Hop, Plan
from ring_attn.strategies.base import Gradients
from ring_attn.strategies.messages import rounded_gradient
from ring_attn.strategies.ring import (
    RingCall,
    make_call,
    predicted_peak_bytes,
    ring_backward,
    ring_forward,
)
from ring_attn.transport.base import Channel, PointToPoint, TransportStats

# What lies in host memory; the rest of a rank's tensors is on the device.
Offload = Literal["none", "kv", "all"]
INPUTS, INPUTS_BACK = ("q", "k", "v"), ("q", "k", "v", "dout")
RESULTS, GRADIENTS, SUMS = ("out", "lse"), ("dq", "dk", "dv"), ("sum_k", "sum_v")
KV_SIDE = ("k", "v", "dk", "dv", *SUMS)
OFFLOADED: dict[Offload, tuple[str, ...]] = {
    "none": (),
    "kv": KV_SIDE,
    "all": (*INPUTS_BACK, *RESULTS, *GRADIENTS, *SUMS),
}

# A copy that is slowed down is cut into pieces of so many bytes, with pauses between them: not so
# small that launches fill the device's queue.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Copies:
    """When messages are copied, and how fast.

    Attributes:
        hidden: by streams of their own while a step is computed; else while the rank waits, so that
            nothing is under way beside the kernels.
        gbps: GB/s at most, by pauses between pieces (a waiting thread on one SM); None is as fast
            as they go.
    """

    hidden: bool = True
    gbps: float | None = None


class Shards:
    """The tensors of all ranks by name, each on the device or in host memory."""

    def __init__(self, device: torch.device, offload: Offload, *, dry: bool = False) -> None:
        """
        Args:
            device: where ranks compute.
            offload: what lies in host memory.
            dry: host memory is asked for and never touched, so nothing is copied there.
        """
        self.device, self.dry = device, dry
        self._away = OFFLOADED[offload]
        self._tensors: dict[tuple[str, int], Tensor] = {}

    def put(self, name: str, rank: int, x: Tensor) -> None:
        """Keeps a tensor of the device where that name belongs."""
        if name not in self._away:
            self._tensors[name, rank] = x
            return
        pinned = self.device.type == "cuda" and not self.dry
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)
        if not self.dry:
            kept.copy_(x, non_blocking=True)
        self._tensors[name, rank] = kept

    def at(self, name: str, rank: int) -> Tensor:
        """A tensor where it lies."""
        return self._tensors[name, rank]

    def get(self, name: str, rank: int) -> Tensor:
        """A tensor on the device; a copy of it where it lies in host memory."""
        x = self._tensors[name, rank]
        if name not in self._away:
            return x
        found = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return found if self.dry else found.copy_(x, non_blocking=True)

    def drop(self, name: str, rank: int) -> None:
        """Forgets a tensor, if there is one."""
        self._tensors.pop((name, rank), None)


@dataclass
class TurnTransport:
    """The end of the one rank whose turn it is.

    Attributes:
        call: the rank's.
        plan: of the direction that is computed.
        shards: what all ranks have.
        copies: when and how fast.
        streams: one for each channel; None on a CPU, or where copies are not hidden.
        watch: tells how long copies took.
        spans: the marks around each exchange's copies.
    """

    call: RingCall
    plan: Plan
    shards: Shards
    copies: Copies
    streams: dict[str, torch.cuda.Stream] | None = None
    watch: Watch | None = None
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    stats: TransportStats = field(default_factory=TransportStats)

    def __post_init__(self) -> None:
        if self.call.inner_degree != 1 or self.plan.travels != "kv" or self.call.spec.batch != 1:
            raise NotImplementedError(
                "ranks can take turns in a plain ring over one sequence whose K and V travel, got "
                f"inner_degree={self.call.inner_degree}, batch={self.call.spec.batch} and "
                f"{self.plan.travels!r} travelling: give fewer kv heads than heads, and batch 1"
            )
        self.rank, self.world_size = self.call.rank, self.plan.world_size
        transfers = self.plan.gradient_transfers(continued=self.call.in_order)
        self._gradients = {transfer.sends: transfer for transfer in transfers}
        self._waiting: dict[Channel, list[tuple[Tensor, Tensor | None]]] = {}
        self._done: dict[Channel, torch.cuda.Event] = {}

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts to copy what would come, and to keep what would go."""
        self.stats.messages += 1
        self.stats.bytes_sent += send.nbytes
        self.stats.bytes_received += recv.nbytes
        jobs = self._shard(step, recv) if channel == "shards" else self._sum(step, send, recv)
        if not self.copies.hidden:
            self._waiting[channel] = jobs
        elif self.streams is None:
            self._copy(jobs)
        else:
            stream = self.streams[channel]
            # The buffer may still be read by what was enqueued before, and holds what is sent.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._copy(jobs)
                self._done[channel] = torch.cuda.Event()
                self._done[channel].record()

    def wait(self, channel: Channel) -> None:
        """Until the exchange is complete; on CUDA the compute stream waits, not the host."""
        if channel in self._waiting:
            self._copy(self._waiting.pop(channel))
        if channel in self._done:
            torch.cuda.current_stream().wait_event(self._done.pop(channel))

    def _shard(self, step: int, recv: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        (transfer,) = self.plan.steps[step].posts
        coming = self.plan.steps[transfer.brings]
        rows = self.plan.rows_moving(transfer.brings)
        views = shard_packet(self.call.spec, "kv", rows).views(recv)
        return [
            (view, self.shards.at(name, coming.source)[:, coming.rows])
            for view, name in zip(views, ("k", "v"), strict=True)
        ]

    def _sum(self, step: int, send: Tensor, recv: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        transfer = self._gradients[step]
        jobs: list[tuple[Tensor, Tensor | None]] = [*self._sums(transfer.sends, send, kept=True)]
        if transfer.brings == 0:
            # The rank's own sum is complete only when all have had their turn: `Turns.finish`.
            return [*jobs, (recv, None)]
        return [*jobs, *self._sums(transfer.brings, recv, kept=False)]

    def _sums(self, index: int, buffer: Tensor, *, kept: bool) -> list[tuple[Tensor, Tensor]]:
        rows, source = self.plan.rows_moving(index), self.plan.steps[index].source
        views = gradient_packet(self.call.spec, "kv", rows).views(buffer)
        sums = [self.shards.at(name, source) for name in SUMS]
        return [(x, y) if kept else (y, x) for x, y in zip(sums, views, strict=True)]

    def _copy(self, jobs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        start = self.watch.mark() if self.watch else None
        for into, source in jobs:
            if source is None:
                into.zero_()
            elif not self.shards.dry:
                _copy(into, source, self.copies.gbps if self.shards.device.type == "cuda" else None)
        if self.watch:
            self.spans.append((start, self.watch.mark()))


def _copy(into: Tensor, source: Tensor, gbps: float | None) -> None:
    if gbps is None:
        into.copy_(source, non_blocking=True)
        return
    piece = PIECE_BYTES // into.element_size()
    parts = zip(into.reshape(-1).split(piece), source.reshape(-1).split(piece), strict=True)
    for to, part in parts:
        to.copy_(part, non_blocking=True)
        torch.cuda._sleep(int(to.nbytes / gbps / 1e6 * SPIN_CYCLES_PER_MS))


class Turns:
    """The ranks of one ring call, and their tensors."""

    def __init__(
        self,
        calls: Sequence[RingCall],
        shards: Shards,
        copies: Copies | None = None,
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
            calls: one for each rank.
            shards: with q, k, v of each, and dout for a backward.
            copies: hidden, as fast as they go, by default.
            watch: tells how long copies took; not asked where there is none.
        """
        self.calls, self.shards = calls, shards
        self.stats = TransportStats()
        self.copy_spans: list[tuple[Any, Any]] = []
        self._copies, self._watch = copies or Copies(), watch
        self._streams: dict[str, torch.cuda.Stream] | None = None
        if shards.device.type == "cuda" and self._copies.hidden:
            self._streams = {name: torch.cuda.Stream() for name in ("shards", "gradients")}

    def run(self, *, backward: bool) -> None:
        """Every rank in its turn; what they compute is kept in `shards`."""
        with _no_kernels(self.calls[0].backend) if self.shards.dry else nullcontext():
            for rank in range(len(self.calls)):
                for name, x in zip(RESULTS, self.forward(rank), strict=True):
                    self.shards.put(name, rank, x)
            if not backward:
                return
            self.begin_backward()
            for rank in range(len(self.calls)):
                grads = self.backward(rank)
                for name, x in zip(GRADIENTS, grads[:3], strict=True):
                    self.shards.put(name, rank, x)
            del grads, x
            self.finish()

    def forward(self, rank: int, times: Times | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of one rank; with `times` what it takes is marked, but for its inputs."""
        q, k, v = (self.shards.get(name, rank) for name in INPUTS)
        with self._turn(rank, times, backward=False) as transport:
            return ring_forward(q, k, v, self.calls[rank], transport)

    def begin_backward(self) -> None:
        """Clears the sums of all ranks' gradients of K and V."""
        for rank, call in enumerate(self.calls):
            rows, spec = call.plan(backward=True).rows_moving(0), call.spec
            for name, dim in zip(SUMS, (spec.headdim, spec.headdim_v), strict=True):
                shape = (spec.batch, rows, spec.nheads_kv, dim)
                zeros = torch.zeros(shape, dtype=spec.accum_dtype, device=self.shards.device)
                self.shards.put(name, rank, zeros)

    def backward(self, rank: int, times: Times | None = None) -> Gradients:
        """dq of one rank, after its forward; dk and dv of the rows that nobody else needs."""
        inputs = {name: self.shards.get(name, rank) for name in (*INPUTS_BACK, *RESULTS)}
        q, k, v, dout, out, lse = inputs.values()
        del inputs
        with self._turn(rank, times, backward=True) as transport:
            return ring_backward(q, k, v, out, lse, dout, self.calls[rank], transport)

    def finish(self) -> None:
        """Puts the sums in their places in dk and dv.

        Raises:
            NotImplementedError: sums that are not whole, since ranks did not take turns in the
                ring's order.
        """
        for rank, call in enumerate(self.calls):
            if not call.in_order or call.layouts[1].kind != "contiguous" or call.mask.right != 0:
                raise NotImplementedError(
                    "gradients of ranks that take turns are whole for a causal mask over "
                    f"contiguous shards and in_order=True, got {call.layouts[1]}, {call.mask} and "
                    f"in_order={call.in_order}"
                )
            sends = call.plan(backward=True).sends
            factors = (get_backend(call.backend).gradient_factor(call.scores), 1.0)
            for name, total, factor in zip(("dk", "dv"), SUMS, factors, strict=True):
                found = self.shards.get(total, rank)
                grad = self.shards.at(name, rank)
                if not self.shards.dry:
                    grad[:, sends].copy_(rounded_gradient(found, grad.dtype, factor))
                self.shards.drop(total, rank)

    @contextmanager
    def _turn(self, rank: int, times: Times | None, *, backward: bool) -> Iterator[PointToPoint]:
        call = self.calls[rank]
        transport = TurnTransport(
            call, call.plan(backward=backward), self.shards, self._copies, self._streams,
            self._watch, stats=self.stats,
        )  # fmt: skip
        if times is None:
            yield transport
        else:
            times.resume()
            yield TimedTransport(transport, times)
            times.pause()
        self.copy_spans += transport.spans


@contextmanager
def _no_kernels(backend: str) -> Iterator[None]:
    """Within it triton's kernels are prepared and not launched; other backends compute."""
    if backend != "triton":
        yield
        return
    with mock.patch("ring_attn.backends.kept_launches.enqueue", lambda *_: None):
        yield


def calls_in_order(problem: Problem, mask: Mask, world_size: int, backend: str) -> list[RingCall]:
    """The calls of all ranks over contiguous shards whose gradients are whole in the end."""
    layout = SequenceLayout.contiguous(problem.seqlen, world_size)
    calls = [
        make_call(problem.spec, (layout, layout), mask, rank, backend=backend)
        for rank in range(world_size)
    ]
    return [replace(call, travels_back="kv", in_order=True) for call in calls]


def drawn(
    calls: Sequence[RingCall],
    device: torch.device,
    offload: Offload,
    *,
    backward: bool,
    dry: bool = False,
    seed: int = 0,
) -> Shards:
    """Normally distributed inputs of all ranks, the same wherever they lie; empty if dry."""
    shards = Shards(device, offload, dry=dry)
    generator = torch.Generator(device).manual_seed(seed)
    spec = calls[0].spec
    for rank, call in enumerate(calls):
        rows = call.layouts[0].shard_len(rank)
        for name in INPUTS_BACK if backward else INPUTS:
            heads = spec.nheads_kv if name in KV_SIDE else spec.nheads
            x = torch.empty((1, rows, heads, spec.headdim), dtype=spec.dtype, device=device)
            shards.put(name, rank, x if dry else x.normal_(generator=generator))
    return shards


@dataclass(frozen=True)
class Held:
    """Most bytes at a time."""

    device: int
    host: int


def predicted_bytes(
    calls: Sequence[RingCall], offload: Offload, *, backward: bool, pinned: bool = False
) -> Held:
    """What `Turns.run` holds at a time, inputs and results with it.

        device    what lies there + what the rank in its turn works in: `predicted_peak_bytes`
        host      what is offloaded

    Args:
        calls: of all ranks.
        offload: what lies in host memory.
        backward: of forward and backward, else of the forward alone.
        pinned: torch rounds each pinned tensor up to a power of two.
    """
    inputs = INPUTS_BACK if backward else INPUTS
    names = (*inputs, *RESULTS, *(SUMS + GRADIENTS if backward else ()))
    away = OFFLOADED[offload]
    size = {(name, call.rank): _nbytes(name, call) for name in names for call in calls}
    host = sum(
        1 << (nbytes - 1).bit_length() if pinned and nbytes else nbytes
        for (name, _), nbytes in size.items()
        if name in away
    )
    most = 0
    for call in calls:
        # What the call itself makes, or is given for its own, is in its peak.
        held = predicted_peak_bytes(call, backward=backward)
        for (name, rank), nbytes in size.items():
            if name in inputs:
                there = name not in away or rank == call.rank
            elif name in SUMS or (backward and name in RESULTS and rank != call.rank):
                there = name not in away
            else:
                there = name not in away and rank < call.rank
            held += nbytes * there
        most = max(most, held)
    return Held(most, host)


def _nbytes(name: str, call: RingCall) -> int:
    spec, plan = call.spec, call.plan(backward=True)
    rows = plan.rows_moving(0) if name in SUMS else call.layouts[0].shard_len(call.rank)
    if name == "lse":
        return rows * spec.nheads * spec.accum_dtype.itemsize
    heads = spec.nheads_kv if name in KV_SIDE else spec.nheads
    itemsize = (spec.accum_dtype if name in SUMS else spec.dtype).itemsize
    return rows * heads * spec.headdim * itemsize
