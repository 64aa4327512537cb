"""The simulation of schedules whose times are computable by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops, shard_packet
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.actions import schedule_of
from ring_attn.machines.time import Simulation, simulate
from ring_attn.planning.devices import (
    Cluster,
    Copies,
    Device,
    Host,
    Link,
    Rate,
    builtin_cluster,
)
from ring_attn.strategies.base import Call

SPEC = AttentionSpec("cpu", torch.float32, 1, 4, 4, 16, 16)
ROWS = 64
RING = Strategy()


def cluster(
    *,
    speed: float = 1e9,
    inside: float = 1e9,
    between: float = 1e9,
    latency: float = 0.0,
    **options: Any,
) -> Cluster:
    """A cluster with nodes of 4 ranks and infinite memory bandwidth."""
    device = Device("toy", 2 * speed, Rate(speed), Rate(speed), float("inf"))
    links = (Link("wire", latency, inside), Link("cable", latency, between))
    return Cluster(device, 4, *links, **options)


def simulated(
    on: Cluster,
    world_size: int = 4,
    strategy: Strategy = RING,
    *,
    kind: str = "contiguous",
    causal: bool = False,
    window: int = -1,
    backend: str = "reference",
    backward: bool = False,
    **options: Any,
) -> Simulation:
    layout = SequenceLayout.from_name(kind, ROWS * world_size, world_size)
    mask = Mask(layout.seqlen, layout.seqlen, causal, (window, -1))
    call = Call(SPEC, (layout, layout), mask, 0, strategy, 0.1, backend)
    return simulate(schedule_of(call, backward=backward), on, **options)


def step_seconds(speed: float = 1e9) -> float:
    """Seconds of a full tile of two shards."""
    return flops(ROWS * ROWS, SPEC, backward=False) / speed


def message_seconds(bandwidth: float = 1e9) -> float:
    return shard_packet(SPEC, "kv", ROWS).nbytes / bandwidth


def test_messages_that_are_faster_than_compute_are_hidden() -> None:
    found = simulated(cluster())
    assert message_seconds() < step_seconds()
    assert found.seconds == pytest.approx(4 * step_seconds())
    assert found.exposed.tolist() == [0.0] * 4
    assert found.share_of_peak == pytest.approx(0.5)
    latency = cluster(inside=float("inf"), latency=2 * step_seconds())
    assert simulated(latency).seconds == pytest.approx((3 * 2 + 1) * step_seconds())


def test_what_of_a_message_outlasts_compute_is_exposed() -> None:
    bandwidth = message_seconds(1.0) / (3 * step_seconds())
    found = simulated(cluster(inside=bandwidth))
    # Three hops, each as long as three steps, and the last step.
    assert found.seconds == pytest.approx(10 * step_seconds())
    assert found.exposed.tolist() == pytest.approx([6 * step_seconds()] * 4)
    assert found.late.tolist() == [0.0] * 4
    assert found.slowest_link is not None
    assert found.slowest_link.link == "inside"
    assert found.slowest_link.nbytes == 4 * 3 * shard_packet(SPEC, "kv", ROWS).nbytes
    assert found.slowest_link.busy == pytest.approx(9 * step_seconds())


def test_a_causal_ring_over_contiguous_shards_waits_for_its_last_rank() -> None:
    found = simulated(cluster(inside=float("inf")), causal=True)
    half = (ROWS + 1) / 2 / ROWS * step_seconds()
    assert found.seconds == pytest.approx(3 * step_seconds() + half)
    assert float(found.compute[0]) == pytest.approx(half)
    assert found.exposed.tolist() == pytest.approx([0.0] * 4, abs=1e-12)
    assert float(found.late.max()) > 0
    zigzag = simulated(cluster(inside=float("inf")), causal=True, kind="zigzag")
    assert zigzag.seconds < 0.62 * found.seconds
    assert float(zigzag.late.max()) < 0.05 * zigzag.seconds


def test_the_slow_link_between_nodes_is_named() -> None:
    bandwidth = message_seconds(1.0) / (3 * step_seconds())
    found = simulated(cluster(between=bandwidth), world_size=8)
    slowest = found.slowest_link
    assert slowest is not None
    assert slowest.link == "between"
    assert (slowest.sender, slowest.receiver) in {(3, 4), (7, 0)}
    assert str(slowest).startswith("cable between nodes, rank ")
    double = simulated(cluster(between=bandwidth), 8, Strategy(inner_degree=4))
    # The message between nodes overlaps a round of four steps.
    assert double.seconds == pytest.approx(8 * step_seconds())
    assert found.seconds > 2 * double.seconds


def test_ranks_share_the_ports_of_their_node() -> None:
    bandwidth = message_seconds(1.0) / (4 * step_seconds())
    for ports, rounds in ((None, 4), (4, 4), (2, 8), (1, 16)):
        on = cluster(between=bandwidth, inside=float("inf"), ports=ports)
        found = simulated(on, 8, Strategy(inner_degree=4))
        assert found.seconds == pytest.approx((rounds + 4) * step_seconds())


@pytest.mark.parametrize("steps_long", [0.5, 1.0, 4.0])
def test_compute_is_slower_under_a_transfer(steps_long: float) -> None:
    """Compute runs at half speed during a message, and at full speed after it."""
    bandwidth = message_seconds(1.0) / (steps_long * step_seconds())
    found = simulated(cluster(inside=bandwidth, slowdown=0.5))
    slowed = min(steps_long, 2.0) * step_seconds()
    assert found.compute.tolist() == pytest.approx([4 * step_seconds() + 3 * slowed / 2] * 4)
    assert found.exposed.tolist() == pytest.approx(
        [3 * max(steps_long - 2.0, 0.0) * step_seconds()] * 4
    )


@pytest.mark.parametrize("strategy", [Strategy("all_gather"), Strategy(ulysses_degree=4)])
def test_collectives_take_what_was_measured_of_them(strategy: Strategy) -> None:
    on = cluster(speed=float("inf"))
    op = "all_to_all" if strategy.ulysses_degree > 1 else "all_gather"
    for latency in (0.0, 1.0):
        measured = replace(on, collectives={op: Link(op, latency, 1e6)})
        found = simulated(measured, strategy=strategy)
        sent = int(found.schedule.bytes_sent[0])
        count = int(found.schedule.messages[0])
        assert found.seconds == pytest.approx(sent / 1e6 + count * latency)
    assert simulated(on, strategy=strategy).seconds == pytest.approx(sent / 1e9)


@pytest.mark.parametrize("backward", [False, True])
def test_a_window_is_computed_at_its_own_rate(backward: bool) -> None:
    on = cluster()
    half = replace(on.device, window_forward=Rate(5e8), window_backward=Rate(5e8))
    for window, factor in ((-1, 1.0), (ROWS, 2.0)):
        usual, halved = (
            simulated(replace(on, device=d), 2, causal=True, window=window, backward=backward)
            for d in (on.device, half)
        )
        assert torch.allclose(halved.compute, factor * usual.compute)


def test_a_device_waits_for_its_host() -> None:
    """A device waits for host time beyond its compute time, in the order of the actions."""
    fast = cluster(speed=float("inf"), inside=float("inf"))
    host = Host(launch=3.0, copy=0.25, post=5.0, wait=1.0)
    found = simulated(replace(fast, host=host))
    # k and v are packed, posts and waits of three exchanges, four launches, out made from acc.
    assert found.seconds == pytest.approx(0.25 + 3 * (5 + 1) + 4 * 3 + 3 * 14 * 0.25 + 0.25)
    assert found.host.tolist() == pytest.approx(found.finish.tolist())
    assert found.late.tolist() == found.exposed.tolist() == [0.0] * 4
    slow = cluster(speed=flops(ROWS * ROWS, SPEC, backward=False) / 100.0, inside=float("inf"))
    found = simulated(replace(slow, host=host))
    # The host is ahead from the second launch on; only the first launch waits.
    assert found.host.tolist() == pytest.approx([0.25 + 5 + 3] * 4)
    assert found.seconds == pytest.approx(0.25 + 5 + 3 + 4 * 100)


def test_kernels_that_carry_the_state_load_and_store_it() -> None:
    """The first of four steps stores the state, the last loads it; other backends merge."""
    on = cluster(speed=float("inf"), inside=float("inf"))
    on = replace(on, device=replace(on.device, memory_bandwidth=1.0))
    state = ROWS * SPEC.nheads * (SPEC.headdim_v + 2) * 4
    acc = ROWS * SPEC.nheads * SPEC.headdim_v * 4
    packed = 2 * shard_packet(SPEC, "kv", ROWS).nbytes
    for backend, bytes_ in (("triton", 6 * state), ("reference", 3 * 5 * acc + 2 * acc)):
        found = simulated(on, backend=backend)
        assert found.finish.tolist() == pytest.approx([packed + bytes_] * 4)


def test_spans_are_the_time_of_every_rank() -> None:
    found = simulated(cluster(inside=2e8), causal=True, backward=True, spans=True)
    busy = torch.zeros(4, dtype=torch.float64)
    for span in found.spans:
        assert bool((span.stop >= span.start).all())
        if span.kind != "transfer":
            busy += span.stop - span.start
    assert busy.tolist() == pytest.approx(found.finish.tolist())
    parts = found.compute + found.moves + found.host + found.late + found.exposed
    assert parts.tolist() == pytest.approx(found.finish.tolist())
    assert not simulated(cluster()).spans


# Extra time over compute, in per cent, of 8 steps of 1 ms with copies of 0.15 or 0.75 ms, by a
# model of 132 multiprocessors that places every block of attention and of copies.
def test_overlap_is_that_of_a_model_of_blocks() -> None:
    step = 8.23e-3 / 8
    for copy, beyond in zip((0.15e-3, 0.75e-3), (0, 4), strict=True):
        bandwidth = message_seconds(1.0) / copy
        on = cluster(speed=step_seconds(1.0) / step, inside=bandwidth, between=bandwidth)
        on = replace(
            on,
            device=replace(on.device, memory_bandwidth=float("inf")),
            slowdown=8 / 132,
            copies=Copies(4e-6),
        )
        found = simulated(on, 8, backend="triton").seconds / (8 * step) - 1
        assert 100 * found == pytest.approx(beyond, abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy(), Strategy(ulysses_degree=8)], ids=str)
def test_4096_ranks_in_seconds(strategy: Strategy) -> None:
    seqlen = 1 << 26
    layout = SequenceLayout.zigzag(seqlen, 4096)
    spec = AttentionSpec("cuda", torch.bfloat16, 1, 32, 8, 128, 128)
    mask = Mask(seqlen, seqlen, causal=True)
    begin = time.process_time()
    call = Call(spec, (layout, layout), mask, 0, strategy, 0.1, "reference")
    schedule = schedule_of(call, backward=False)
    found = simulate(schedule, builtin_cluster("H100"))
    # 4 s, and more where a virtual machine touches its memory for the first time.
    assert time.process_time() - begin < 30
    total = flops(seqlen * (seqlen + 1) // 2, spec, backward=False)
    assert float(schedule.flops.sum()) == pytest.approx(total, rel=1e-9)
    assert found.share_of_peak is not None and 0.3 < found.share_of_peak < 1
