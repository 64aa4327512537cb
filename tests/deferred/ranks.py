"""Ranks whose devices are recorded, one after the other in this process; calls on them.

    program = record(4, work)      # work(rank, recorder) on every rank, as if it were in a process

Ranks do not meet: no host waits for another, and every rendezvous finds all ranks present.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_attn import ring_attention
from ring_attn.testing import Case, RankResult, Sent, put_together
from ring_attn.testing.ranks import arguments_of
from ring_attn.torch_private import NCCL_CLASS, SECOND_NCCL_CLASS
from ring_attn.transport import p2p, streams
from ring_attn.transport.ranks import failure, group, headers, links, rendezvous
from tests.deferred.cuda import HOME, CaptureError, Queue
from tests.deferred.device import HostReads, Part, Recorder, Transfer
from tests.deferred.program import Program
from tests.stand_in import Completed, Parts, SecondClass, StandIn


class Work:
    def __init__(self, recorder: Recorder, transfer: Transfer) -> None:
        self._recorder, self._transfer = recorder, transfer

    def wait(self) -> bool:
        queue = self._recorder.cuda.home
        queue.tail = (*queue.tail, self._transfer)
        return True


class Communicator(StandIn):
    """Records transfers on a stream of its own.

    As in torch, each start makes that stream wait for the current stream. Keeps no buffer alive.
    """

    recorder: Recorder

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options)
        self._queue = Queue(HOME)
        self._group: Transfer | None = None
        self._transfers: list[Transfer] = []

    def _start_coalescing(self) -> None:
        self._group = self._new()

    def _end_coalescing(self) -> Work | Completed:
        transfer, self._group = self._group, None
        assert transfer is not None
        # A transfer of empty messages is a kernel, too, which waits for its peers.
        return self._start(transfer)

    @contextmanager
    def _outside_coalescing(self) -> Iterator[None]:
        group, self._group = self._group, None
        try:
            yield
        finally:
            self._group = group

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connects, which no capture allows."""
        if self.recorder.cuda.capture is not None:
            raise CaptureError("a communicator is made")

    def shutdown(self) -> None:
        """Does nothing: ranks do not meet."""

    def abort(self) -> None:
        """Marks all transfers of the communicator as aborted, and as over.

        Each communicator has a thread that aborts it: none waits for what another one aborts.
        """
        ended = [node for node in self.recorder.ended if not getattr(node, "aborted", False)]
        for transfer in self._transfers:
            transfer.aborted, transfer.cut_after = True, tuple(ended)
        self.recorder.end(self._transfers)

    def _new(self) -> Transfer:
        name = self.options.group_name
        return Transfer("", (), [], [], communicator=name, member=self.rank)

    def start(self, sends: Parts, receives: Parts, total: Tensor | None = None) -> Work | None:
        transfer = self._group or self._new()
        ref = self.recorder.ref
        self.recorder.given(*(x for x, _ in (*sends, *receives)))
        outgoing = [Part(ref(x), peer) for x, peer in sends if x.numel()]
        incoming = [Part(ref(x), peer) for x, peer in receives if x.numel()]
        if total is not None:
            target = ref(total)
            parts = [self.recorder.scratch(target) for _ in receives]
            incoming = [Part(part, peer) for peer, part in enumerate(parts)]
            transfer.sums.append((target, parts))
            transfer.writes.append(target)
        transfer.sends += outgoing
        transfer.receives += incoming
        transfer.reads += [part.ref for part in outgoing]
        transfer.writes += [part.ref for part in incoming]
        return None if self._group else self._start(transfer)

    def _start(self, transfer: Transfer) -> Work:
        cuda = self.recorder.cuda
        if (capture := cuda.capture_of(cuda.home)) is not None:
            capture.join(self._queue)
        transfer.what = f"transfer {len(self._transfers)} of {self.options.group_name}"
        transfer.after = self.recorder.cuda.home.tail
        self.recorder.queue(transfer, self._queue)
        if cuda.capture is None:  # else no abort reaches the transfer
            self._transfers.append(transfer)
        return Work(self.recorder, transfer)


class SecondCommunicator(SecondClass, Communicator):
    """Records what torch's second class of NCCL process groups would start."""

    def _end_coalescing(self) -> Work | Completed:
        if self._has_messages:
            return super()._end_coalescing()
        self._is_coalescing, self._group = False, None
        return Completed()


# The name of torch's class of communicators, and what stands in its place.
_communicators: ContextVar[tuple[str, type[Communicator]]] = ContextVar(
    "communicators", default=(NCCL_CLASS, Communicator)
)


@contextmanager
def second_class() -> Iterator[None]:
    """Records ranks whose torch has only the second class of NCCL process groups."""
    token = _communicators.set((SECOND_NCCL_CLASS, SecondCommunicator))
    try:
        yield
    finally:
        _communicators.reset(token)


@contextmanager
def device_of(recorder: Recorder) -> Iterator[None]:
    """Records all operators, streams and transfers of this thread on a device."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(streams, "are_used", lambda device: True))
        stack.enter_context(recorder.cuda.patched())
        # torch looks at the stream's type before it asks a mode.
        lend = lambda x, stream: recorder.lend(x, stream)  # noqa: E731
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lend))
        name, communicator = _communicators.get()
        made = type(name, (communicator,), {"recorder": recorder})
        stack.enter_context(mock.patch.object(dist, NCCL_CLASS, made, create=True))
        # The host never knows how far the device has got; while it records, data is missing.
        stack.enter_context(mock.patch.object(headers.Compared, "differs", lambda _: None))
        stack.enter_context(recorder)
        stack.enter_context(HostReads(recorder))
        yield


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of a group whose other ranks answer each rendezvous at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with (
        mock.patch.object(group, "group_store", lambda _: dist.HashStore()),
        mock.patch.object(group, "group_timeout", lambda _: 1.0),
        mock.patch.object(p2p, "group_timeout", lambda _: 1.0),
        mock.patch.object(rendezvous.Meetings, "attend", lambda *given: given[3]("meeting")),
        mock.patch.object(group, "meet"),
        mock.patch.object(links, "meet"),
        mock.patch.object(rendezvous.Rendezvous, "wait", lambda *_: None),
        mock.patch.object(failure, "NOTICE_S", 0.0),
        # A record shows what this thread does: a poll of the watch would come at any time.
        mock.patch.object(group.watch, "add"),
        # The host would wait until the device has compared the last calls.
        mock.patch.object(group.RankGroup, "on_destroyed"),
    ):
        try:
            yield
        finally:
            dist.destroy_process_group()


def record_rank(
    rank: int, world_size: int, work: Callable[[int, Recorder], object], fail_at: int = 0
) -> Recorder:
    """Records the work that `work(rank, recorder)` queues on the device of a rank.

    The work passes its results to `recorder.result`; operator `fail_at` raises.
    """
    recorder = Recorder(fail_at)
    with rank_of(rank, world_size), device_of(recorder):
        work(rank, recorder)
        recorder.stop()
    return recorder


def record(world_size: int, work: Callable[[int, Recorder], object]) -> Program:
    return Program([record_rank(rank, world_size, work) for rank in range(world_size)])


NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
NOTHING_SENT = (Sent(0, 0), Sent(0, 0))


class Layers:
    """A few layers of attention, forward and backward, on any rank."""

    def __init__(self, case: Case, world_size: int, *, layers: int = 1) -> None:
        """Makes the shards of all ranks; the next layer's queries are `query + out`."""
        self.case, self.world_size, self.layers = case, world_size, layers
        self._arguments = [arguments_of(case, world_size, rank) for rank in range(world_size)]

    def __call__(self, rank: int, recorder: Recorder) -> None:
        shards, options = self._arguments[rank]
        *given, dout = (x.clone() for x in shards)
        if (sinks := options["sinks"]) is not None:
            given.append(sinks.clone())
        recorder.given(*given, dout)
        query, key, value, *own = leaves = [x.requires_grad_() for x in given]
        options = {**options, "sinks": own[0] if own else None}
        for _ in range(self.layers):
            out, lse = ring_attention(query, key, value, return_lse=True, **options)
            query = query + out if self.layers > 1 else query
        grads = in_thread(recorder, lambda: torch.autograd.grad(out, leaves, dout))
        for name, x in zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False):
            recorder.result(name, x)

    def whole(self, results: list[dict[str, Tensor]]) -> Any:
        ranks = [
            RankResult(
                tuple(x[None] if self.case.packed else x for x in one.values()), NOTHING_SENT
            )
            for one in results
        ]
        return put_together(self.case, ranks).whole

    def record(self) -> Program:
        return record(self.world_size, self)


def in_thread(recorder: Recorder, work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with recorder, HostReads(recorder):
                results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
