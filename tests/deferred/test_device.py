"""Tests the deferred device on small programs; test_calls.py plants faults into calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ring_attn.transport import streams
from tests.deferred.device import HostSyncError, Recorder
from tests.deferred.program import at_random
from tests.deferred.ranks import Communicator, record

CPU = torch.device("cpu")


def connected(recorder: Recorder, rank: int, name: str = "ring") -> Communicator:
    made = type("Communicator", (Communicator,), {"recorder": recorder})
    return made(None, rank, 2, SimpleNamespace(group_name=name))


@pytest.mark.parametrize(
    "read", [Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.nonzero, bool, Tensor.cpu]
)
def test_the_host_waits_for_nothing(read: Callable[[Tensor], object]) -> None:
    def work(_: int, recorder: Recorder) -> None:
        given = torch.tensor([2.0])
        assert given.item() == 2.0  # a tensor of the host
        recorder.given(given)
        with pytest.raises(HostSyncError):
            read(given + 1)

    record(1, work)


def test_a_collective_needs_all_its_ranks() -> None:
    """A rank keeps the results that it had before the stuck collective."""

    def work(rank: int, recorder: Recorder) -> None:
        x, sums, everyone = torch.full((2,), float(rank)), torch.empty(1), torch.empty(4)
        connected(recorder, rank, "a")._reduce_scatter_base(sums, x).wait()
        recorder.result("sums", sums)
        connected(recorder, rank, "bc"[rank])._allgather_base(everyone, x).wait()
        recorder.result("everyone", everyone)

    program = record(2, work)
    assert "rank 0: transfer 0 of b" in program.stuck()
    for results in program.run(at_random(0)):
        assert results.keys() == {"sums"} and results["sums"].tolist() == [1.0]


def test_parts_of_a_tensor_are_told_apart() -> None:
    """Two streams that write to different columns do not race, though the bytes interleave."""

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
