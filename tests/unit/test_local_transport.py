"""The local transport: all ranks in this process, one at a time."""

import threading

import pytest
import torch

from ring_attn.core.program import Hop
from ring_attn.transport.local import LocalTransport, run_local
from tests.refusals import refused


class Broken(Exception):
    """The error of a failing rank."""


@pytest.mark.parametrize("failing", range(3))
def test_whoever_waits_is_reported(failing: int) -> None:
    reported: list[tuple[int, str]] = []
    threads = threading.active_count()

    def fn(rank: int, transport: LocalTransport) -> None:
        hop = Hop((rank + 1) % 3, (rank - 1) % 3)
        send, recv = torch.zeros(2, 1, dtype=torch.uint8)
        try:
            for step in range(2):
                if (rank, step) == (failing, 1):
                    raise Broken("before its second message")
                transport.post("shards", step, hop, send, recv)
                transport.wait("shards")
        except RuntimeError as error:
            reported.append((rank, str(error)))
            raise

    with pytest.raises(Broken, match="before its second message"):
        run_local(3, fn)
    message = "another rank of the local ring failed: before its second message"
    assert sorted(reported) == [(rank, message) for rank in range(3) if rank != failing]
    assert threading.active_count() == threads, "a rank is still waiting"


@pytest.mark.parametrize("sent_to", [0, 1])
def test_a_wrong_pairing_is_reported(sent_to: int) -> None:
    """When all ranks wait, or have ended, the error says who waits for whom, on which channel."""

    def fn(rank: int, transport: LocalTransport) -> None:
        peers = {0: (1, 2), 1: (2, 0), 2: (sent_to, 1)}[rank]
        send, recv = torch.zeros(2, 1, dtype=torch.uint8)
        if rank == 1 and sent_to == 0:
            return  # a rank that has ended sends nothing
        transport.post("gradients", 0, Hop(*peers), send, recv)
        transport.wait("gradients")

    reported = ("rank 2 waits for a message from rank 1", "rank 0 waits for a message from rank 2")
    with refused(RuntimeError, reported[sent_to]):
        run_local(3, fn)
