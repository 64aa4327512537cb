"""Point-to-point transport between processes: torch.distributed over NCCL or gloo.

Each step is one batch of one send and one receive on every rank, idle ranks too: an asymmetric
batch is undefined in NCCL, and an unbatched pair can deadlock. Shards and gradients have a process
group each, apart from the caller's, so that neither waits for the other nor for unrelated traffic.

On CUDA a group runs its copies on a stream of its own. Posting makes that stream wait for what the
compute stream has been given so far, which is the last reader of the buffer that is received into;
waiting makes the compute stream wait for the copies. The host waits for neither.
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ring_attn.plan import Hop
from ring_attn.spec import TransportOptions
from ring_attn.transport.base import (
    CHANNELS,
    Channel,
    TransportStats,
    check_ranks,
    group_timeout,
)

# gloo takes a message that is shorter than its buffer for the whole, and the rest of the buffer for
# received. So the end of a buffer is marked before, and must be overwritten after.
UNWRITTEN = torch.tensor(list(b"\xffring_attn: end\xff"), dtype=torch.uint8)


@dataclass
class _Pending:
    """One exchange under way.

    Attributes:
        step: of the ring, or which collective of the call.
        works: as torch.distributed gave them, with what this rank could not do if one fails, and
            the parts that it receives, whose ends are marked.
    """

    step: int
    works: list[tuple[dist.Work, str, Sequence[Tensor]]]
    on_cuda: bool


class P2PTransport:
    """One batched, symmetric send and receive a step; and the collectives of torch.distributed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        options: TransportOptions,
        count: int = 0,
        members: tuple[int, ...] | None = None,
        stats: TransportStats | None = None,
    ) -> None:
        """Makes the ring's own groups; every rank of them calls it together.

        Args:
            group: the caller's.
            options: equal on every rank.
            count: how many transports this group has already, for names that all ranks agree on.
            members: the ranks of the group that take part, all by default.
            stats: counted into; new by default.

        Raises:
            RuntimeError: a rank did not take part in time.
        """
        members = tuple(range(dist.get_world_size(group))) if members is None else members
        self.rank = members.index(dist.get_rank(group))
        self.world_size = len(members)
        self.stats = stats or TransportStats()
        everyone = dist.get_process_group_ranks(group)
        self._ranks = [everyone[member] for member in members]
        # Weakly: what the group's transports are kept by must not be kept by them.
        self._parent = weakref.ref(group)
        self._options, self._count = options, count
        self._members = members
        self._subs: dict[tuple[int, ...], P2PTransport] = {}
        self._timeout = datetime.timedelta(seconds=options.timeout or group_timeout(group))
        self._failed: RuntimeError | None = None
        self._pending: dict[Channel, _Pending] = {}
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        # The outer channels are opened by the first double ring.
        for channel in CHANNELS[:2] if self.world_size > 1 else ():
            self._group(channel)

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts one exchange of uint8 buffers; neither may be touched before `wait`."""
        self._exchange(channel, step, [(hop.recv_from, recv)], [(hop.send_to, send)], send.is_cuda)

    def all_gather(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to bring every rank's (n,) uint8 `send`, in their order, to (world_size * n,)."""
        if self._alone(recv, send):
            return
        if not send.is_cuda:
            # gloo's own gathers into a buffer of its own, and copies from there what has come and
            # what has not: nobody could tell that a message was too short.
            parts = recv.chunk(self.world_size)
            parts[self.rank].copy_(send)
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            self._exchange(
                channel, step, [(r, parts[r]) for r in others], [(r, send) for r in others], False
            )
            return
        group = self._group(channel)
        gather = _named("all_gather_single", "all_gather_into_tensor")
        self._start(
            channel,
            step,
            [(f"gather from global ranks {self._ranks}", [])],
            True,
            2 * ((self.world_size - 1) * send.nbytes,),
            lambda: [gather(recv, send, group=group, async_op=True)],
        )

    def reduce_scatter(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to sum all ranks' (world_size * n,) `send`; rank r receives the r-th n of them."""
        if self._alone(recv, send):
            return
        group = self._group(channel)
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        self._start(
            channel,
            step,
            [(f"sum over global ranks {self._ranks}", [])],
            send.is_cuda,
            2 * ((self.world_size - 1) * recv.nbytes,),
            lambda: [scatter(recv, send, group=group, async_op=True)],
        )

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Starts to bring from every rank its part for this one; counts in bytes."""
        if self._alone(recv, send):
            return
        group = self._group(channel)
        parts = [part for part in recv.split(list(recv_counts)) if part.numel()]
        self._mark(parts)
        self._start(
            channel,
            step,
            [(f"exchange with global ranks {self._ranks}", parts)],
            send.is_cuda,
            (send.nbytes - send_counts[self.rank], recv.nbytes - recv_counts[self.rank]),
            lambda: [
                dist.all_to_all_single(
                    recv, send, list(recv_counts), list(send_counts), group=group, async_op=True
                )
            ],
        )

    def wait(self, channel: Channel) -> None:
        """Until the exchange is complete; RuntimeError names step, peer and timeout if it fails."""
        if self.world_size == 1:
            return
        pending, start = self._pending.pop(channel), time.perf_counter()
        for work, what, received in pending.works:
            try:
                # With a timeout NCCL's wait would block the host; its watchdog has the timeout.
                done = work.wait() if pending.on_cuda else work.wait(self._timeout)
                if not pending.on_cuda:
                    if not done:
                        raise RuntimeError("timed out")
                    for part in received:
                        _check_whole(part)
            except RuntimeError as error:
                elapsed = time.perf_counter() - start
                raise self._error(pending.step, what, elapsed, error) from error
        self.stats.wait_s += time.perf_counter() - start

    def follow(self, channel: Channel, stream: torch.cuda.Stream) -> bool:
        """Makes a stream wait for the exchange under way, as `wait` makes the compute stream."""
        pending = self._pending.get(channel)
        if pending is None or not pending.on_cuda:
            return False
        with torch.cuda.stream(stream):
            for work, *_ in pending.works:
                work.wait()
        return True

    def sub(self, ranks: tuple[int, ...]) -> P2PTransport:
        """The transport among some of these ranks; all of them call it together the first time."""
        if ranks not in self._subs:
            check_ranks(ranks, self.rank, self.world_size)
            members = tuple(self._members[rank] for rank in ranks)
            whole = members == self._members
            self._subs[ranks] = (
                self
                if whole
                else P2PTransport(self._caller, self._options, self._count, members, self.stats)
            )
        return self._subs[ranks]

    def _group(self, channel: Channel) -> dist.ProcessGroup:
        if channel not in self._groups:
            group = self._caller
            among = "" if len(self._ranks) == dist.get_world_size(group) else f"/{self._members}"
            try:
                with _group_name(f"ring_attn/{group.group_name}{among}/{channel}/{self._count}"):
                    self._groups[channel] = dist.new_group(
                        self._ranks,
                        timeout=self._timeout,
                        backend=dist.get_backend_config(group),
                        pg_options=_nccl_options(self._options),
                        use_local_synchronization=True,
                        group_desc=f"ring_attn_{channel}",
                    )
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self.rank} could not form the ring of global ranks {self._ranks}, "
                    f"timeout {self._timeout.total_seconds():g} s: all ranks of the group must "
                    f"make their first call of ring_attention together. Cause: "
                    f"{_first_line(error)}"
                ) from error
        return self._groups[channel]

    @property
    def _caller(self) -> dist.ProcessGroup:
        group = self._parent()
        assert group is not None, "its transports are found by the group"
        return group

    def _alone(self, recv: Tensor, send: Tensor) -> bool:
        """Does a collective of one rank, which needs no group."""
        if self.world_size == 1:
            recv.copy_(send)
        return self.world_size == 1

    def _mark(self, parts: Sequence[Tensor]) -> None:
        for part in parts:
            # What is shorter than the mark could hold it by chance, and is not checked.
            if not part.is_cuda and part.numel() >= len(UNWRITTEN):
                part[-len(UNWRITTEN) :] = UNWRITTEN

    def _exchange(
        self,
        channel: Channel,
        step: int,
        receives: Sequence[tuple[int, Tensor]],
        sends: Sequence[tuple[int, Tensor]],
        on_cuda: bool,
    ) -> None:
        """One batch of messages from and to other ranks."""
        group = self._group(channel)
        self._mark([part for _, part in receives])
        # The receives first: the order of the works in `wait`, where they are what compute needs.
        ops = [dist.P2POp(dist.irecv, x, self._ranks[r], group) for r, x in receives]
        ops += [dist.P2POp(dist.isend, x, self._ranks[r], group) for r, x in sends]
        whats: list[tuple[str, Sequence[Tensor]]] = [
            (f"receive from rank {r} (global rank {self._ranks[r]})", [part])
            for r, part in receives
        ]
        whats += [(f"send to rank {r} (global rank {self._ranks[r]})", []) for r, _ in sends]
        sent, received = (sum(x.nbytes for _, x in part) for part in (sends, receives))
        nbytes = sent, received
        self._start(channel, step, whats, on_cuda, nbytes, lambda: dist.batch_isend_irecv(ops))

    def _start(
        self,
        channel: Channel,
        step: int,
        whats: Sequence[tuple[str, Sequence[Tensor]]],
        on_cuda: bool,
        nbytes: tuple[int, int],
        start: Callable[[], list[dist.Work]],
    ) -> None:
        """Starts what is under way until `wait`; `nbytes` are sent and received by it."""
        if self._failed is not None:
            # Messages of the broken call may still be on their way.
            raise RuntimeError("this ring has failed before and cannot go on") from self._failed
        try:
            works = start()
        except RuntimeError as error:
            raise self._error(step, whats[0][0], 0.0, error) from error
        # A coalesced batch is one work for all of its exchanges.
        named = [(work, *what) for work, what in zip(works, whats, strict=False)]
        self._pending[channel] = _Pending(step, named, on_cuda)
        self.stats.bytes_sent += nbytes[0]
        self.stats.bytes_received += nbytes[1]
        self.stats.messages += 1

    def _error(self, step: int, what: str, elapsed: float, error: Exception) -> RuntimeError:
        self._failed = RuntimeError(
            f"ring step {step}: rank {self.rank} could not {what} after {elapsed:.1f} s, timeout "
            f"{self._timeout.total_seconds():g} s: the peer died, stalled, or called with other "
            f"shapes (RING_ATTN_DEBUG=1 tells). Nothing is kept between calls: restart from a "
            f"checkpoint. Cause: {_first_line(error)}"
        )
        return self._failed


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[TransportOptions, P2PTransport]] = (
    weakref.WeakKeyDictionary()
)


def open_p2p(group: dist.ProcessGroup, options: TransportOptions) -> P2PTransport:
    """The transport of a group, made at its first call: every rank of the group takes part then."""
    by_options = _transports.setdefault(group, {})
    if options not in by_options:
        by_options[options] = P2PTransport(group, options, len(by_options))
    return by_options[options]


def _nccl_options(options: TransportOptions) -> object | None:
    if options.nccl_max_ctas is None:
        return None
    nccl = dist.ProcessGroupNCCL.Options()
    nccl.config.max_ctas = options.nccl_max_ctas
    return nccl


@contextmanager
def _group_name(name: str) -> Iterator[None]:
    """Names the group that `new_group` makes within.

    torch names a locally synchronised group after the number of groups that this process has. Ranks
    that have made different numbers of them, for pipeline stages or embeddings, would wait for each
    other under different names.
    """
    torchs_own = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: distributed_c10d.GroupName(name)
    try:
        yield
    finally:
        distributed_c10d._process_group_name = torchs_own


def _named(*names: str) -> Callable[..., Any]:
    """The first of these functions that this torch.distributed has: collectives are renamed."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _check_whole(recv: Tensor) -> None:
    if torch.equal(recv[-len(UNWRITTEN) :], UNWRITTEN):
        raise RuntimeError(f"the message is shorter than the {recv.numel()} bytes that are due")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
