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
from ring_attn.torch_private import (
    NCCL_CLASS,
    NCCL_METHODS,
    SECOND_NCCL_CLASS,
    coalesced,
    nccl_class,
    num_high_priority_groups,
)
from ring_attn.transport import streams
from ring_attn.transport.options import MAX_CTAS
from ring_attn.transport.ranks import connection, failure, links
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
from tests.stand_in import Completed, SecondClass, StandIn

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@contextmanager
def in_place_of_nccl(
    make: Callable[..., Any], name: str = NCCL_CLASS
) -> Iterator[tuple[Any, list[Any]]]:
    """Gives a class in the place of torch's, and the communicators that `make` makes for it."""
    made: list[Any] = []

    def noted(*given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    nccl = mock.Mock(Options=StandIn.Options, side_effect=noted, __name__=name)
    stand_in = mock.patch.object(
        links, "NcclChannel", lambda *given: mock.Mock(communicator=given[3])
    )
    with stand_in:
        yield nccl, made


def test_communicators_from_their_options_to_their_end() -> None:
    """A communicator for each channel, aborted or shut down as its owner ends."""
    channels: tuple[Channel, ...] = ("shards", "shards", "gradients")
    connected = mock.call.eager_connect_single_device(GPU)
    with in_place_of_nccl(lambda *given: mock.Mock(given=given)) as (stand_in, made):
        nccl, other = (
            links.NcclLink(stand_in, dist.HashStore(), "meeting", 0, (5, 1, 2, 3)) for _ in range(2)
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
    with in_place_of_nccl(make) as (stand_in, _), mock.patch.object(links, "meet"):
        nccl = links.NcclLink(stand_in, dist.HashStore(), "meeting", 0, tuple(range(5000)))
        for members in groups:
            nccl.channel(members, "shards", 1.0, GPU, MAX_CTAS)
    names = [call.args[3].group_name for call in make.call_args_list]
    assert len(set(names)) == len(groups) and len({len(name) for name in names}) == 1


def test_all_communicators_are_aborted_at_once() -> None:
    """An abort waits for launched kernels, here of two channels that are behind each other."""
    with in_place_of_nccl(StandIn) as (stand_in, made):
        nccl = links.NcclLink(stand_in, dist.HashStore(), "meeting", 0, (0, 1))
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
    monkeypatch.setattr(links, "num_high_priority_groups", lambda: groups)
    logs = mock.patch.object(links.logger, "warning")
    with in_place_of_nccl(StandIn) as (stand_in, _), logs as logged:
        nccl = links.NcclLink(stand_in, dist.HashStore(), "meeting", 0, (0, 1))
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


class Waited:
    """A work that notes its name when it is waited for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self._name, self._waited = name, waited

    def wait(self) -> None:
        self._waited.append(self._name)


class Second(SecondClass):
    """Torch's second class, with works that note when they are waited for."""

    def __init__(self) -> None:
        super().__init__(None, 0, 2, None, GPU)
        self.waited: list[str] = []

    def start(self, sends: Any, receives: Any, total: Tensor | None = None) -> Any:
        name = "message" if len(sends) + len(receives) == 1 else "collective"
        return Waited(name, self.waited)

    def _end_coalescing(self) -> Any:
        work = super()._end_coalescing()
        return work if isinstance(work, Completed) else Waited("group", self.waited)


def test_all_works_of_a_second_class_are_waited_for() -> None:
    x, second = torch.ones(2), Second()
    operations = (second.alltoall_base, x, x, [1, 1], [1, 1]), (second._allgather_base, x, x)
    coalesced(second, operations).wait()
    assert second.waited == ["collective", "collective"]
    second.waited.clear()
    coalesced(second, [(second.recv, [x], 1, 0), (second.send, [x], 1, 0)]).wait()
    assert second.waited[-1] == "group"


def test_of_the_first_class_only_the_group_is_waited_for() -> None:
    """There works of single operations have no end, and a capture refuses to wait for one."""
    waited: list[str] = []
    methods = {
        "_start_coalescing": lambda self: None,
        "_end_coalescing": lambda self: Waited("group", waited),
        "send": lambda *_: Waited("message", waited),
    }
    first = type(NCCL_CLASS, (), methods)()
    coalesced(first, [(first.send,), (first.send,)]).wait()
    assert waited == ["group"]


def test_a_second_class_is_connected_when_it_is_made() -> None:
    """On the device of the tensors, within the time limit; it is ended like the first class."""
    made_by = lambda *given: mock.Mock(given=given)  # noqa: E731
    with in_place_of_nccl(made_by, SECOND_NCCL_CLASS) as (stand_in, made):
        nccl = links.NcclLink(stand_in, dist.HashStore(), "meeting", 0, (5, 1))
        nccl.channel((0,), "shards", 1.0, GPU, MAX_CTAS)
        nccl.close()
    ((one,), (_, rank, size, options, device)) = made, made[0].given
    assert (rank, size, device) == (0, 1, GPU)
    assert (options.config.max_ctas, options.config.cga_cluster_size) == (MAX_CTAS, 0)
    assert one.method_calls == [mock.call.abort()]


@pytest.mark.parametrize("name", [NCCL_CLASS, SECOND_NCCL_CLASS])
def test_a_communicator_that_is_never_made(name: str) -> None:
    """Two ranks came; the other one dies while NCCL connects them, for which NCCL has no limit."""
    store, ended_at_last = dist.HashStore(), threading.Event()
    connects = mock.Mock(eager_connect_single_device=lambda device: ended_at_last.wait())

    def make(*given: Any) -> mock.Mock:
        if name == SECOND_NCCL_CLASS:
            ended_at_last.wait()
        return connects

    key = f"meeting/{hashed((0, 1))}/shards/{MAX_CTAS}"
    threading.Thread(target=meet, args=(Rendezvous(store, key, 7, (5, 7)), FAR)).start()
    with in_place_of_nccl(make, name) as (stand_in, _):
        nccl = links.NcclLink(stand_in, store, "meeting", 0, (5, 7))
        end = ended(lambda: nccl.channel((0, 1), "shards", 1.0, GPU, MAX_CTAS))
    ended_at_last.set()
    assert end.error is MissingRanksError, end
    assert says(end.text, "could not connect|ranks [7] did not arrive"), end


# -- torch's classes of NCCL process groups


def class_named(name: str, without: str = "") -> type:
    """A class of torch's for groups of the backend "nccl", with all that this package uses."""
    methods = {piece: lambda self: None for piece in NCCL_METHODS if piece != without}
    return type(name, (), {**methods, "Options": StandIn.Options, "name": lambda self: "nccl"})


def group_over(backend: object) -> mock.Mock:
    return mock.Mock(**{"_get_backend.return_value": backend})


FIRST, SECOND = class_named(NCCL_CLASS), class_named(SECOND_NCCL_CLASS)


@pytest.mark.parametrize(
    ("of_group", "ours"),
    [
        (NCCL_CLASS, FIRST),
        (SECOND_NCCL_CLASS, SECOND),
        ("ProcessGroupNCCLLazy", SECOND),
        ("Backend", SECOND),
    ],
)
def test_communicators_have_the_class_of_their_group(of_group: str, ours: type) -> None:
    backend = class_named(of_group)()
    classes = {NCCL_CLASS: FIRST, SECOND_NCCL_CLASS: SECOND}
    with mock.patch.multiple(dist, create=True, **classes):
        assert nccl_class(group_over(backend)) is ours
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        assert nccl_class(group_over(mock.Mock(wrapped_pg=backend))) is ours
        without_nccl = mock.Mock(**{"_get_backend.side_effect": RuntimeError("no such backend")})
        assert nccl_class(without_nccl) is FIRST


@pytest.mark.parametrize("piece", [*NCCL_METHODS, "Options.config.max_ctas"])
def test_a_piece_that_torch_lacks_is_named(piece: str) -> None:
    found = class_named(SECOND_NCCL_CLASS, without=piece)
    if piece == "Options":
        del found.Options
    elif piece.startswith("Options"):
        options = StandIn.Options()
        del options.config.max_ctas
        found.Options = lambda: options
    patched = mock.patch.multiple(dist, create=True, **{NCCL_CLASS: FIRST, found.__name__: found})
    with patched, refused(NotImplementedError, f"{found.__name__}|{piece}|use an older torch"):
        nccl_class(group_over(found()))


def test_a_class_whose_communicators_cannot_be_made_is_refused() -> None:
    third = class_named("ProcessGroupNCCL3")
    with (
        mock.patch.object(dist, NCCL_CLASS, third, create=True),
        mock.patch.object(dist, SECOND_NCCL_CLASS, third, create=True),  # a newer torch has it
        refused(NotImplementedError, "ProcessGroupNCCL3|constructor|use an older torch"),
    ):
        nccl_class(group_over(third()))


def test_a_group_whose_ranks_may_change_is_refused() -> None:
    backend = SECOND()
    backend.options = mock.Mock(enable_reconfigure=True)
    with (
        mock.patch.object(dist, SECOND_NCCL_CLASS, SECOND, create=True),
        mock.patch.object(dist, NCCL_CLASS, FIRST, create=True),
        refused(NotImplementedError, "enable_reconfigure=True|pass a group without it"),
    ):
        nccl_class(group_over(backend))


def test_only_groups_with_a_stream_of_high_priority_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default a process group takes a stream of the lowest priority."""
    backends = [FIRST() for _ in range(3)]
    for backend, is_high in zip(backends, (True, False, True), strict=True):
        backend.options = mock.Mock(is_high_priority_stream=is_high)
    monkeypatch.setattr("ring_attn.torch_private.all_groups", lambda: [*map(group_over, backends)])
    assert num_high_priority_groups() == 2


@pytest.mark.queued
@on_ranks(2)
def test_a_first_call_over_another_class_is_refused_before_anything_is_sent() -> None:
    if not streams.are_used(CPU):
        return  # CPU tensors do not go through NCCL
    group, x = dist.new_group(), torch.ones(1, 2, 2, 8)
    third = class_named("ProcessGroupNCCL3")
    backend = third()
    backend.options = mock.Mock(_timeout=datetime.timedelta(seconds=9))
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *_: backend),
        mock.patch.object(dist, NCCL_CLASS, third),
        mock.patch.object(dist, SECOND_NCCL_CLASS, third, create=True),  # a newer torch has it
        mock.patch.object(Meetings, "attend") as attend,
    ):
        first, second = (ended(lambda: ring_attention(x, x, x, group=group)) for _ in range(2))
    assert first.error is NotImplementedError and "ProcessGroupNCCL3" in first.text, first
    assert second.error is RuntimeError and "ProcessGroupNCCL3" in second.text, second
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


def equal_over_both_classes(strategy: str) -> bool:
    """Whether a call and its gradients have the same bits over both of torch's classes."""
    from tests.distributed.queued import Communicator, SecondCommunicator

    found = []
    classes = {NCCL_CLASS: Communicator, SECOND_NCCL_CLASS: SecondCommunicator}
    for name, communicator in classes.items():
        made = type(name, (communicator,), {})
        group = dist.new_group()
        generator = torch.Generator().manual_seed(dist.get_rank())
        q, k, v = (torch.randn(1, 4, 4, 8, generator=generator).requires_grad_() for _ in range(3))
        with mock.patch.object(connection, "nccl_class", lambda _, made=made: made):
            out = ring_attention(q, k, v, causal=True, strategy=strategy, group=group)
            found.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
        ((_, channel), *_) = rank_group(group).connection.links["cpu"].channels.items()
        assert type(channel.communicator) is made
        dist.destroy_process_group(group)
    return all(map(torch.equal, *found))


@pytest.mark.queued
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
def test_both_classes_give_the_same_bits(ranks: Pools, strategy: str) -> None:
    if ranks.queued:
        assert ranks(2).run(equal_over_both_classes, strategy) == [True, True]


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
