"""The deferred device on programs of a few operators, each with a fault or without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ring_attn.transport import streams
from tests.deferred.device import HostSyncError, Recorder
from tests.deferred.program import at_random, in_host_order, same
from tests.deferred.ranks import Communicator, record

CPU = torch.device("cpu")


def connected(recorder: Recorder, rank: int, name: str = "ring") -> Communicator:
    made = type("Communicator", (Communicator,), {"recorder": recorder})
    return made(None, rank, 2, SimpleNamespace(group_name=name))


def exchange(rank: int, recorder: Recorder, fault: str = "") -> None:
    """Sends twice its rank and one to the other, and hands out what comes plus one.

    The exchange is posted on a stream of its own, which waits for the moment when the message was
    there; the memory of the message is given back when all is done.
    """
    given = torch.full((4,), float(rank))
    communicator, side = connected(recorder, rank), streams.new(CPU)
    send, recv = given * 2, torch.empty(4)
    ready = streams.record(CPU)
    send += 1
    if fault != "event too early":
        ready = streams.record(CPU)
    if fault == "event of another stream":
        with streams.use(side):
            ready = streams.record(CPU)
    with streams.use(side):
        if fault != "post waits for nothing":
            side.wait_event(ready)
        communicator._start_coalescing()
        communicator.recv([recv], 1 - rank, 0)
        communicator.send([send], 1 - rank, 0)
        work = communicator._end_coalescing()
        work.wait()
        end = streams.record(CPU)
    if fault == "written while it is sent":
        send.zero_()
    if fault == "given back early":
        del send
        torch.ones(4)
    if fault != "no wait":
        streams.current(CPU).wait_event(end)
    recorder.result("out", recv + 1)


FAULTS = (
    "event too early",
    "event of another stream",
    "post waits for nothing",
    "written while it is sent",
    "given back early",
    "no wait",
)


def test_an_exchange_has_one_result_in_every_order() -> None:
    program = record(2, exchange)
    assert program.races() == []
    states, (results,) = program.every_result()
    assert states > 100
    assert [one["out"].tolist() for one in results] == [[4.0] * 4, [2.0] * 4]
    assert same(results, program.run(in_host_order))
    assert all(same(results, program.run(at_random(seed))) for seed in range(20))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_some_order_shows_it(fault: str) -> None:
    """The check of races, which runs nothing, and runs in some orders."""
    program = record(2, lambda rank, recorder: exchange(rank, recorder, fault))
    assert program.races()
    right = record(2, exchange).run(in_host_order)
    assert any(not same(right, program.run(at_random(seed))) for seed in range(50))


def used_elsewhere(recorder: Recorder, *, tell: bool) -> None:
    """A tensor that another stream reads last, and what becomes of its memory."""
    x, side = torch.full((4,), 2.0) * 3, streams.new(CPU)
    side.wait_event(streams.record(CPU))
    with streams.use(side):
        y = x + 1
    if tell:
        recorder.record_stream(x, side)
    del x
    streams.current(CPU).wait_stream(side)
    recorder.record_stream(y, streams.current(CPU))
    recorder.result("y", y)


@pytest.mark.parametrize("tell", [True, False])
def test_memory_that_another_stream_uses_is_recorded(tell: bool) -> None:
    program = record(1, lambda _, recorder: used_elsewhere(recorder, tell=tell))
    assert bool(program.races()) != tell
    assert (len(program.every_result()[1]) > 1) != tell


@pytest.mark.parametrize(
    "read", [Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.nonzero, bool, Tensor.cpu]
)
def test_the_host_waits_for_nothing(read: Callable[[Tensor], object]) -> None:
    def work(_: int, recorder: Recorder) -> None:
        given = torch.tensor([2.0])
        assert given.item() == 2.0  # the host's own
        recorder.given(given)
        with pytest.raises(HostSyncError):
            read(given + 1)

    record(1, work)


def test_a_collective_needs_all_its_ranks() -> None:
    def work(rank: int, recorder: Recorder, order: tuple[str, str]) -> None:
        x = torch.full((2,), float(rank))
        first, second = (connected(recorder, rank, name) for name in order)
        sums, everyone = torch.empty(1), torch.empty(4)
        first._reduce_scatter_base(sums, x).wait()
        recorder.result("sums", sums)
        second._allgather_base(everyone, x).wait()
        recorder.result("everyone", everyone)

    program = record(2, lambda rank, recorder: work(rank, recorder, ("a", "b")))
    assert not program.races() and not program.stuck()
    results = program.run(at_random(0))
    assert [x["sums"].tolist() for x in results] == [[1.0], [1.0]]
    assert all(x["everyone"].tolist() == [0.0, 0.0, 1.0, 1.0] for x in results)
    crossed = record(2, lambda r, recorder: work(r, recorder, ("a", "b") if r else ("a", "c")))
    assert "rank 0: transfer 0 of c" in crossed.stuck()
    assert [list(x) for x in crossed.run(at_random(0))] == [["sums"], ["sums"]]


def test_parts_of_a_tensor_are_told_apart() -> None:
    """Two streams that write to heads of their own do not race, though the rows interleave."""

    def work(_: int, recorder: Recorder, *, apart: bool) -> None:
        x, side = torch.zeros(3, 4), streams.new(CPU)
        side.wait_event(streams.record(CPU))
        with streams.use(side):
            x[:, :2].add_(1)
        x[:, 2 if apart else 1 :].add_(2)
        streams.current(CPU).wait_stream(side)
        recorder.result("x", x)

    assert record(1, lambda r, recorder: work(r, recorder, apart=True)).races() == []
    assert record(1, lambda r, recorder: work(r, recorder, apart=False)).races() != []
