"""Figures of calls; when profiling is off, nothing is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from runpy import run_path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ring_attn import profiling, ring_attention
from ring_attn.profiling import collect, gradient_sync, observe, stats
from ring_attn.testing import random_qkv
from ring_attn.transport import streams
from ring_attn.transport.base import TransportStats

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "collected", type(profiling.collected)(0))


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def call_alone(*, backward: bool = True) -> None:
    q, k, v, dout = random_qkv(seqlen_q=37, nheads=2, nheads_kv=1, headdim=8)
    out = ring_attention(q.requires_grad_(), k, v, causal=True)
    if backward:
        out.backward(dout)


def test_stats_are_those_of_the_last_forward_and_what_followed() -> None:
    with profile(activities=[ProfilerActivity.CPU]), gradient_sync():  # neither collects figures
        call_alone()
    with pytest.raises(RuntimeError, match="RING_ATTN_STATS=1"):
        stats()
    with collect():
        call_alone()
        assert stats().gradient_sync_s is None
        for _ in range(2):
            with gradient_sync():
                threading.Event().wait(0.01)
    measured = stats()
    assert stats() == measured  # reading leaves the figures unchanged
    assert measured.forward is not None and measured.backward is not None
    for figures in (measured.forward, measured.backward):
        assert 0.0 < figures.compute_s <= figures.seconds
        assert figures.wait_s == figures.in_flight_s == figures.transfer_s == 0
        assert figures.steps == 1
        assert (figures.messages, figures.bytes_sent, figures.bytes_received) == (0, 0, 0)
    assert measured.gradient_sync_s is not None and measured.gradient_sync_s >= 0.02
    with collect():
        call_alone()
        with gradient_sync():
            pass
        call_alone(backward=False)
    measured = stats()
    assert measured.forward is not None
    assert measured.backward is None and measured.gradient_sync_s is None
    with collect():
        pass
    with pytest.raises(RuntimeError, match="no call has been measured"):
        stats()
    with collect(), pytest.raises(ZeroDivisionError), observe("forward", CPU, TransportStats()):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="or the last one failed"):
        stats()


def test_times_are_worked_out_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading clocks within a call would make the host wait for CUDA."""
    requested: list[tuple[int, ...]] = []
    seconds = streams.seconds_between

    def noted(*moments: int) -> float:
        requested.append(moments)
        return seconds(*moments)

    monkeypatch.setattr(streams, "seconds_between", noted)
    with collect():
        call_alone()
    assert not requested
    assert stats().forward is not None and requested


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiling, "Observer")
    call_alone()  # off, nothing is noted
    for value in ("0", "1"):
        monkeypatch.setenv("RING_ATTN_STATS", value)
        assert run_path(profiling.__file__)["collected"].depth == (value == "1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_cuda_an_arrival_is_seen_from_another_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = torch.cuda.Stream(device)
    observer = profiling.Observer(device)
    torch.cuda.synchronize()
    start = observer.mark()
    with torch.cuda.stream(copies):
        torch.cuda._sleep(100_000_000)
    observer.sent(start, copies.record_event())
    (seen,) = observer.transfers
    assert seen is not None and streams.seconds_between(*seen) > 0.01
    observer.sent(start, None)
    assert observer.transfers[-1] is None


def test_on_a_cpu_memory_is_not_reported() -> None:
    with collect():
        call_alone(backward=False)
    figures = stats().forward
    assert figures is not None
    assert figures.peak_bytes is figures.pressure is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_cuda_times_are_those_of_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cycles = 100_000_000  # about 50 ms
    torch.cuda.synchronize()
    with collect():
        with observe("forward", device, TransportStats()) as observer:
            with observer.span("attend"):
                torch.cuda._sleep(cycles)
                held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
            with observer.span("wait"):
                pass
        assert not torch.cuda.current_stream().query(), "the host has waited for the device"
        with gradient_sync(device):
            torch.cuda._sleep(cycles // 10)
    measured = stats()
    figures, sync_s = measured.forward, measured.gradient_sync_s
    assert figures is not None and sync_s is not None
    assert 0.01 < figures.compute_s <= figures.seconds
    assert figures.wait_s < 0.01 * figures.compute_s
    assert 0.05 * figures.compute_s < sync_s < 0.2 * figures.compute_s
    assert figures.peak_bytes is not None and figures.peak_bytes >= held.nbytes
    assert figures.device_bytes == torch.cuda.get_device_properties(device).total_memory
