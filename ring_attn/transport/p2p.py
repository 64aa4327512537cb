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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ring_attn.plan import Hop
from ring_attn.spec import TransportOptions
from ring_attn.transport.base import CHANNELS, Channel, TransportStats

# gloo takes a message that is shorter than its buffer for the whole, and the rest of the buffer for
# received. So the end of a buffer is marked before, and must be overwritten after.
UNWRITTEN = torch.tensor(list(b"\xffring_attn: end\xff"), dtype=torch.uint8)


@dataclass
class _Pending:
    """One exchange under way."""

    step: int
    hop: Hop
    works: list[dist.Work]
    recv: Tensor


class P2PTransport:
    """One batched, symmetric send and receive a step."""

    def __init__(self, group: dist.ProcessGroup, options: TransportOptions, count: int = 0) -> None:
        """Makes the ring's own groups; every rank of `group` calls it together.

        Args:
            group: the caller's.
            options: equal on every rank.
            count: how many transports this group has already, for names that all ranks agree on.

        Raises:
            RuntimeError: a rank did not take part in time.
        """
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.stats = TransportStats()
        self._ranks = dist.get_process_group_ranks(group)
        timeout = options.timeout or _timeout_of(group)
        self._timeout = datetime.timedelta(seconds=timeout)
        self._failed: RuntimeError | None = None
        self._pending: dict[Channel, _Pending] = {}
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        try:
            for channel in CHANNELS if self.world_size > 1 else ():
                with _group_name(f"ring_attn/{group.group_name}/{channel}/{count}"):
                    self._groups[channel] = dist.new_group(
                        self._ranks,
                        timeout=self._timeout,
                        backend=dist.get_backend_config(group),
                        pg_options=_nccl_options(options),
                        use_local_synchronization=True,
                        group_desc=f"ring_attn_{channel}",
                    )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} could not form the ring of global ranks {self._ranks}, timeout "
                f"{timeout:g} s: all ranks of the group must make their first call of "
                f"ring_attention together. Cause: {_first_line(error)}"
            ) from error

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts one exchange of uint8 buffers; neither may be touched before `wait`."""
        if self._failed is not None:
            # Messages of the broken call may still be on their way.
            raise RuntimeError("this ring has failed before and cannot go on") from self._failed
        group = self._groups[channel]
        if not recv.is_cuda:
            recv[-len(UNWRITTEN) :] = UNWRITTEN
        # The receive first: the order of the works in `wait`, where it is what compute needs.
        ops = [
            dist.P2POp(dist.irecv, recv, self._ranks[hop.recv_from], group),
            dist.P2POp(dist.isend, send, self._ranks[hop.send_to], group),
        ]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._error(step, "exchange with", hop.recv_from, 0.0, error) from error
        self._pending[channel] = _Pending(step, hop, works, recv)
        self.stats.bytes_sent += send.numel()
        self.stats.messages += 1

    def wait(self, channel: Channel) -> None:
        """Until the exchange is complete; RuntimeError names step, peer and timeout if it fails."""
        pending = self._pending.pop(channel)
        start, on_cuda = time.perf_counter(), pending.recv.is_cuda
        for index, work in enumerate(pending.works):
            try:
                # With a timeout NCCL's wait would block the host; its watchdog has the timeout.
                done = work.wait() if on_cuda else work.wait(self._timeout)
                if not done and not on_cuda:
                    raise RuntimeError("timed out")
                if index == 0 and not on_cuda:
                    _check_whole(pending.recv)
            except RuntimeError as error:
                receives = index == 0
                what = "receive from" if receives else "send to"
                peer = pending.hop.recv_from if receives else pending.hop.send_to
                elapsed = time.perf_counter() - start
                raise self._error(pending.step, what, peer, elapsed, error) from error
        self.stats.wait_s += time.perf_counter() - start

    def _error(
        self, step: int, what: str, peer: int, elapsed: float, error: Exception
    ) -> RuntimeError:
        self._failed = RuntimeError(
            f"ring step {step}: rank {self.rank} could not {what} rank {peer} "
            f"(global rank {self._ranks[peer]}) after {elapsed:.1f} s, timeout "
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


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds of the group's own timeout."""
    for device in ("cuda", "cpu"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        timeout: datetime.timedelta = backend.options._timeout
        return timeout.total_seconds()
    raise RuntimeError("the process group has no backend for cpu or cuda")


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


def _check_whole(recv: Tensor) -> None:
    if torch.equal(recv[-len(UNWRITTEN) :], UNWRITTEN):
        raise RuntimeError(f"the message is shorter than the {recv.numel()} bytes that are due")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
