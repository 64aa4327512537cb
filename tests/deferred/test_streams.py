"""`transport.streams` names the device of the tensors, which is not torch's current one here."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn.backends import kept_launches
from ring_attn.checks import attention as checks
from ring_attn.transport import p2p, streams
from ring_attn.transport.ranks import links
from ring_attn.transport.ranks.group import rank_group
from tests.deferred.cuda import HOME, OTHER, POOL, Stream
from tests.deferred.device import Recorder
from tests.deferred.ranks import Layers, device_of, rank_of, record_rank
from tests.deferred.test_calls import case_of, in_halves
from tests.refusals import says

GPU = torch.device("cuda", HOME)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with device_of(recorder):
        yield recorder


def test_every_event_is_of_the_tensors_device(recorder: Recorder) -> None:
    x = torch.zeros(3)
    recorder.given(x)
    x.add_(1)
    side = streams.new(GPU)
    assert streams.current(GPU).queue is recorder.cuda.home is not side.queue
    event = streams.record(GPU)
    assert [node.what for node in event.after] == ["aten.add_.Tensor"]
    with streams.use(side):
        assert streams.current(GPU) == side
        streams.wait(event, GPU)
        assert streams.record(GPU).after == side.queue.tail == event.after
        x.add_(1)
    moment = streams.moment(side)
    assert moment.enable_timing and moment.after == side.queue.tail != event.after
    assert recorder.cuda.current == OTHER
    for device, current in ((GPU, HOME), (torch.device("cpu"), OTHER)):
        with streams.on(device):
            assert recorder.cuda.current == current


def test_no_two_callers_hold_one_stream(recorder: Recorder) -> None:
    with streams.use(compute := streams.new(GPU)):
        held = [streams.new(GPU) for _ in range(POOL - 1)]
        assert len({compute, *held}) == POOL
        with pytest.raises(RuntimeError) as refused:
            streams.new(GPU)
        assert says(str(refused.value), "32 streams|cuda:1|destroy process groups")
        again = Stream(recorder.cuda, held.pop().queue)
        assert streams.new(GPU) == again
        # Streams of other devices are others, and streams of torch's user may be current.
        streams.new(torch.device("cuda", OTHER))
    del held
    with streams.use(mine := Stream(recorder.cuda, compute.queue)):
        del compute
        assert all(streams.new(GPU) != mine for _ in range(POOL))


def test_two_threads_hold_two_streams(recorder: Recorder) -> None:
    """A second thread asks before the first holds its stream, which torch gives out again."""
    held, current = list[Stream](), torch.cuda.current_stream
    other = Thread(target=lambda: held.append(streams.new(GPU)))

    def slowly(device: torch.device) -> Stream:
        if other.ident is None:
            for _ in range(POOL - 1):
                torch.cuda.Stream(device)
            other.start()
            other.join(0.2)
        return current(device)

    with mock.patch.object(torch.cuda, "current_stream", slowly):
        held.append(streams.new(GPU))
        other.join()
    assert len(set(held)) == 2


def test_works_run_side_by_side(recorder: Recorder) -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    recorder.given(x, y)
    works = (lambda: x.add_(1)), (lambda: y.add_(1))
    compute, side = recorder.cuda.home, streams.new(GPU)
    streams.side_by_side(GPU, None, *works)
    streams.side_by_side(GPU, side, works[0])
    added = [node.stream for node in recorder.nodes if "add_" in node.what]
    assert side.queue.tail == () and added == 3 * [compute]
    *_, before = recorder.nodes
    streams.side_by_side(GPU, side, *works)
    *_, first, second = recorder.nodes
    assert (first.stream, second.stream) == (compute, side.queue)
    assert first.after == second.after == (before,)
    assert set(compute.tail) == {first, second}


def test_dq_has_one_stream_that_is_no_channels() -> None:
    """The user takes streams, too: torch's pool of 32 comes round more than once."""
    layers, channels, sides = Layers(case_of("ring", "causal"), 3), [], set[Any]()
    made, beside = links.NcclChannel.__init__, streams.side_by_side

    def channel(self: links.NcclChannel, *given: Any) -> None:
        made(self, *given)
        channels.append(self.stream)

    def side_by_side(device: torch.device, side: Any, *works: Any) -> None:
        sides.add(side)
        beside(device, side, *works)
        for _ in range(7):
            torch.cuda.Stream(device)

    def work(rank: int, recorder: Recorder) -> None:
        for _ in range(5):
            layers(rank, recorder)

    with (
        in_halves(),
        mock.patch.object(links.NcclChannel, "__init__", channel),
        mock.patch.object(streams, "side_by_side", side_by_side),
    ):
        record_rank(0, 3, work)
    # A rehearsal has a stream of its own.
    assert len(channels) == 2 and len(sides) == 2 and len({*channels, *sides}) == 4


def test_a_group_has_one_device() -> None:
    with rank_of(0, 2):
        assert dist.group.WORLD is not None
        shared = rank_group(dist.group.WORLD)
        shared.connection.check_device(GPU)
        shared.connection.check_device(torch.device("cpu"))
        shared.connection.check_device(GPU)
        with pytest.raises(ValueError) as refused:
            shared.connection.check_device(torch.device("cuda", OTHER))
        assert says(str(refused.value), "cuda:0|cuda:1|another process group")
        with mock.patch.object(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl"):
            assert p2p.group_device(dist.group.WORLD) == GPU


def test_launches_and_captures_are_on_the_tensors_device(recorder: Recorder) -> None:
    cuda = recorder.cuda
    cuda.captured = HOME
    with pytest.raises(NotImplementedError):
        checks.check_capture("ring_attention", mock.Mock(device=GPU))
    checks.check_capture("ring_attention", mock.Mock(device=torch.device("cuda", OTHER)))
    assert kept_launches.enqueue(lambda _: cuda.current, None, HOME) == HOME != cuda.current
