"""NCCL's communicators, with a class in NCCL's place that records how it is made."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import ring_attention
from ring_attn.core.program import CHANNELS, Channel
from ring_attn.testing.cases import strategy_of
from ring_attn.torch_private import NCCL_CLASS, coalesced, nccl_class, refuse_other_nccl
from ring_attn.transport import streams
from ring_attn.transport.options import MAX_CTAS
from ring_attn.transport.ranks import failure, links
from ring_attn.transport.ranks.calls import NOTHING
from ring_attn.transport.ranks.group import rank_group
from ring_attn.transport.ranks.headers import UNKNOWN, Compared
from ring_attn.transport.ranks.identity import Identity
from ring_attn.transport.ranks.links import NcclChannel, Posted
from ring_attn.transport.ranks.rendezvous import (
    Meetings,
    MissingRanksError,
    Rendezvous,
    hashed,
    meet,
)
from tests.distributed.differing import SINKS, STRATEGIES, WORLD_SIZE, call, decode
from tests.distributed.pool import FAR, Ended, Pools, ended, on_ranks
from tests.refusals import refused, says
from tests.stand_in import StandIn

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@contextmanager
def in_place_of_nccl(make: Callable[..., Any]) -> Iterator[list[Any]]:
    """Gives the communicators that `make` has made in the place of NCCL's."""
    made: list[Any] = []

    def noted(*given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    nccl = mock.Mock(Options=StandIn.Options, side_effect=noted, __name__=NCCL_CLASS)
    with (
        mock.patch.object(dist, NCCL_CLASS, nccl, create=True),
        mock.patch.object(links, "NcclChannel", lambda *given: mock.Mock(communicator=given[3])),
    ):
        yield made


def test_communicators_from_their_options_to_their_end() -> None:
    """A communicator for each channel, aborted or shut down as its owner ends."""
    channels: tuple[Channel, ...] = ("shards", "shards", "gradients")
    connected = mock.call.eager_connect_single_device(GPU)
    with in_place_of_nccl(lambda *given: mock.Mock(given=given)) as made:
        nccl, other = (
            links.NcclLink(dist.HashStore(), "meeting", 0, (5, 1, 2, 3)) for _ in range(2)
        )
        for channel in channels:
            nccl.channel((0,), channel, 1.0, GPU, MAX_CTAS)
        names = set()
        for one in made:
            _, rank, size, options = one.given
            assert (rank, size, one.method_calls) == (0, 1, [connected])
            assert (options.config.max_ctas, options.config.cga_cluster_size) == (MAX_CTAS, 0)
            # It is not split off another one.
            assert options.is_high_priority_stream and not hasattr(options, "split_from")
            # torch's flight recorder names global ranks.
            assert options.global_ranks_in_group == [5]
            names.add(options.group_name)
        assert len(names) == len(made) == 2
        nccl.close()
        assert all(one.method_calls == [connected, mock.call.abort()] for one in made)
        # Another number of blocks takes another communicator.
        for max_ctas in (MAX_CTAS, 3):
            other.channel((0,), "shards", 1.0, GPU, max_ctas)
        assert made[-1].given[3].config.max_ctas == 3
        other.finish(1.0)
        assert made[-1].method_calls == [connected, mock.call.shutdown()]


def test_names_of_communicators_do_not_grow_with_their_members() -> None:
    """The store's keys begin with them, and the store refuses long keys."""
    groups = [(0,), tuple(range(5000)), (*range(4999, -1, -1),)]
    make = mock.Mock()
    with in_place_of_nccl(make), mock.patch.object(links, "meet"):
        nccl = links.NcclLink(dist.HashStore(), "meeting", 0, tuple(range(5000)))
        for members in groups:
            nccl.channel(members, "shards", 1.0, GPU, MAX_CTAS)
    names = [call.args[3].group_name for call in make.call_args_list]
    assert len(set(names)) == len(groups) and len({len(name) for name in names}) == 1


def test_all_communicators_are_aborted_at_once() -> None:
    """An abort waits for launched kernels, here of two channels that are behind each other."""
    with in_place_of_nccl(StandIn) as made:
        nccl = links.NcclLink(dist.HashStore(), "meeting", 0, (0, 1))
        for channel in CHANNELS:
            nccl.channel((0,), channel, 1.0, GPU, MAX_CTAS)
    for one in made:
        one.behind = [other for other in made if other is not one]
    with mock.patch.object(links.logger, "error") as logged:
        nccl.close()
    assert len(made) > 1 and not logged.called, logged.call_args_list
    assert all(one.aborted.is_set() for one in made)


@pytest.mark.parametrize(("ours", "groups", "warns"), [(20, 12, False), (20, 13, True)])
def test_streams_that_are_shared_are_logged(
    ours: int, groups: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has 32 streams of high priority, and every communicator takes the next one."""
    monkeypatch.setattr(streams, "num_held", lambda: ours)
    monkeypatch.setattr(links, "num_process_groups", lambda: groups)
    with in_place_of_nccl(StandIn), mock.patch.object(links.logger, "warning") as logged:
        nccl = links.NcclLink(dist.HashStore(), "meeting", 0, (0, 1))
        nccl.channel((0,), "shards", 1.0, GPU, MAX_CTAS)
        nccl.close()
    assert logged.called == warns


def test_an_interrupt_leaves_no_group_open() -> None:
    """An open group of NCCL's would swallow what its thread starts later on any communicator."""
    launched: list[str] = []

    def launch(name: str) -> list[Any]:
        launched.append(name)
        return []

    def interrupt() -> None:
        raise KeyboardInterrupt

    one, other = (StandIn(None, 0, 2, None) for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        coalesced(one, [(one.launch, partial(launch, "first")), (interrupt,)])
    coalesced(other, [(other.launch, partial(launch, "second"))])
    assert launched[-1] == "second"


class Second(StandIn):
    """As torch's second class of NCCL process groups: a group holds only sends and receives.

    A collective starts at once, and only its own work waits for it.
    """

    def __init__(self) -> None:
        super().__init__(None, 0, 2, None)
        self.waited: list[str] = []

    def _work(self, name: str) -> Any:
        return mock.Mock(wait=lambda: self.waited.append(name))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return None

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return None

    def _allgather_base(self, recv: Tensor, send: Tensor) -> Any:
        return self._work("all_gather")

    def alltoall_base(self, *_: object) -> Any:
        return self._work("all_to_all")

    def _end_coalescing(self) -> Any:
        super()._end_coalescing()
        return self._work("group")


def test_all_works_of_a_second_class_are_waited_for() -> None:
    x, second = torch.ones(2), Second()
    operations = (second.alltoall_base, x, x, [1, 1], [1, 1]), (second._allgather_base, x, x)
    coalesced(second, operations).wait()
    assert second.waited == ["all_to_all", "all_gather", "group"]
    second.waited.clear()
    coalesced(second, [(second.recv, [x], 1, 0), (second.send, [x], 1, 0)]).wait()
    assert second.waited == ["group"]
    # In torch's first class the group's work waits for all of them.
    first = type(NCCL_CLASS, (Second,), {})()
    coalesced(
        first, [(getattr(first, start.__name__), *given) for start, *given in operations]
    ).wait()
    assert first.waited == ["group"]


def test_a_communicator_that_is_never_made() -> None:
    """Two ranks came; the other one dies while NCCL connects them, for which NCCL has no limit."""
    store, ended_at_last = dist.HashStore(), threading.Event()
    connects = mock.Mock(eager_connect_single_device=lambda device: ended_at_last.wait())
    nccl = links.NcclLink(store, "meeting", 0, (5, 7))
    name = f"meeting/{hashed((0, 1))}/shards/{MAX_CTAS}"
    threading.Thread(target=meet, args=(Rendezvous(store, name, 7, (5, 7)), FAR)).start()
    with in_place_of_nccl(lambda *_: connects):
        end = ended(lambda: nccl.channel((0, 1), "shards", 1.0, GPU, MAX_CTAS))
    ended_at_last.set()
    assert end.error is MissingRanksError, end
    assert says(end.text, "could not connect|ranks [7] did not arrive"), end


# -- torch's other classes of NCCL process groups


def class_named(name: str) -> type:
    """A class as torch 2.15 has for groups of the backend "nccl"; its `name` says the backend."""
    return type(name, (), {"name": lambda self: "nccl"})


@pytest.mark.parametrize("name", ["ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "Backend"])
def test_a_group_of_another_class_is_refused_by_name(name: str) -> None:
    for backend in (class_named(name)(), mock.Mock(wrapped_pg=class_named(name)())):
        group = mock.Mock(**{"_get_backend.return_value": backend})
        with refused(NotImplementedError, f"{name}|TORCH_DIST_USE_NCCL2=0|'nccl-legacy'"):
            refuse_other_nccl(group)


def test_groups_of_the_supported_class_and_of_other_backends_are_not_refused() -> None:
    gloo = type("ProcessGroupGloo", (), {"name": lambda self: "gloo"})
    for cls in (class_named(NCCL_CLASS), gloo):
        refuse_other_nccl(mock.Mock(**{"_get_backend.return_value": cls()}))
    refuse_other_nccl(mock.Mock(**{"_get_backend.side_effect": RuntimeError("no such backend")}))


def test_another_class_by_the_supported_name_is_refused() -> None:
    second = class_named("ProcessGroupNCCL2")
    for found in (second, class_named("ProcessGroupNCCL3")):
        classes = {NCCL_CLASS: found, "ProcessGroupNCCL2": second}
        patched = mock.patch.multiple(dist, **classes, create=True)
        with patched, refused(NotImplementedError, f"{found.__name__}|use an older torch"):
            nccl_class()
    legacy = class_named(NCCL_CLASS)
    with mock.patch.multiple(dist, create=True, ProcessGroupNCCL=legacy, ProcessGroupNCCL2=second):
        assert nccl_class() is legacy


@pytest.mark.queued
@on_ranks(2)
def test_a_first_call_over_another_class_is_refused_before_anything_is_sent() -> None:
    if not streams.are_used(CPU):
        return  # CPU tensors do not go through NCCL
    group, x = dist.new_group(), torch.ones(1, 2, 2, 8)
    backend = class_named("ProcessGroupNCCL2")()
    backend.options = mock.Mock(_timeout=datetime.timedelta(seconds=9))
    patched = mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *_: backend)
    with patched, mock.patch.object(Meetings, "attend") as attend:
        first, second = (ended(lambda: ring_attention(x, x, x, group=group)) for _ in range(2))
    assert first.error is NotImplementedError and "ProcessGroupNCCL2" in first.text, first
    assert second.error is RuntimeError and "ProcessGroupNCCL2" in second.text, second
    attend.assert_not_called()


def test_a_late_exchange_is_named() -> None:
    """Exchanges end with their call, and only one that is late in a call under way is asked for."""
    ends = [mock.Mock(**{"query.return_value": False}) for _ in range(4)]
    calls = [Compared(Identity(n, n, "forward", NOTHING), torch.tensor(UNKNOWN)) for n in (1, 2)]
    places = {"new": mock.Mock(), "use": mock.MagicMock(), "record_on": mock.Mock(side_effect=ends)}
    with mock.patch.multiple(links.streams, **places):
        channel = NcclChannel((1, 4, 6), "gradients", 0.0, None, CPU)
        assert channel.overdue() is None
        for step in range(4):
            channel.run(step, 2, mock.Mock(), (), calls[step // 2])
        overdue = channel.overdue(60.0)
        assert overdue is None and not any(end.query.called for end in ends)
        overdue = channel.overdue()
        assert overdue is not None and (overdue.step, overdue.channel, overdue.peer) == (
            0,
            "gradients",
            6,
        )
        ends[0].query.return_value = True
        assert channel.overdue().step == 1
        calls[0].result.fill_(0)
        ends[1].query.side_effect = AssertionError("its call has ended")
        assert channel.overdue().step == 2
        calls[1].result.fill_(0)
        assert channel.overdue() is None


@pytest.mark.gloo
@on_ranks(2)
def test_the_watch_names_step_peer_and_channel() -> None:
    """Rank 0's watch reports a late exchange, rank 1 reads the report, the next call raises it."""
    group, x = dist.new_group(), torch.ones(1, 2, 2, 8)
    ring_attention(x, x, x, group=group)
    shared, rank = rank_group(group), dist.get_rank()
    assert shared.connection.notes is not None
    texts = []
    if rank == 0:
        overdue = Posted(3, "shards", 1, time.monotonic() - 47.0, mock.Mock(), mock.Mock())
        # Only the medium of this group: the watch looks at other groups meanwhile.
        with (
            mock.patch.object(failure.logger, "error") as said,
            mock.patch.object(shared.connection.links["cpu"], "overdue", lambda: overdue),
        ):
            shared.failure.poll()
        texts.append(said.call_args.args[1])
    dist.barrier()
    texts += [shared.connection.notes.failure() or ""] * (rank == 1)
    end = ended(lambda: ring_attention(x, x, x, group=group))
    texts += [end.text] * (rank == 0)
    assert all(says(text, "step 3|rank 1|'shards'|47 s") for text in texts), texts


# -- identities beside the messages, as on NCCL, where messages have no tags


def after_other_sinks(strategy: str) -> Ended:
    """How a call ends after calls that agree, and after one in which rank 1 had other sinks."""
    groups = [dist.new_group() for _ in range(2)]
    run = decode if strategy == "decode" else partial(call, strategy=strategy_of(strategy, 4))
    outs = [run(groups[0], sinks=SINKS) for _ in range(2)]
    assert torch.equal(*outs)
    run(groups[1], sinks=SINKS)
    sinks = SINKS.flip(0) if dist.get_rank() == 1 else SINKS
    ended(lambda: run(groups[1], sinks=sinks))
    after = ended(lambda: run(groups[1], sinks=SINKS))
    for group in groups:
        dist.destroy_process_group(group)
    return after


@pytest.mark.queued
@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name != "auto"), "decode"])
def test_headers_where_there_are_no_tags(ranks: Pools, strategy: str) -> None:
    """The device compares headers; at the next call a host raises if they differed."""
    ends = ranks(WORLD_SIZE).run(after_other_sinks, strategy)
    assert {end.error for end in ends} == {RuntimeError}, ends
    reported = "messages of another call" if ranks.queued else "failed before"
    assert any(reported in end.text for end in ends), ends
