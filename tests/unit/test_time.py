"""The simulation of schedules whose times are computable by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest
import torch

from ring_attn.call import Call, Options
from ring_attn.core import program as ops
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import flops, shard_packet
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.cluster import Cluster, Device, Host, Link
from ring_attn.machines.time import Simulation, simulate
from ring_attn.planning.devices import Rate
from ring_attn.strategies.registry import programs_of
from ring_attn.transport.nccl_channels import communicator_of

SPEC = AttentionSpec("cpu", torch.float32, 1, 4, 4, 16, 16)
ROWS = 64
NBYTES = shard_packet(SPEC, "kv", ROWS).nbytes
# Seconds of a full tile of two shards.
STEP = flops(ROWS * ROWS, SPEC, backward=False) / 1e9
DOUBLE = Strategy(inner_degree=4)


def wire(steps: float) -> float:
    """The bandwidth at which a shard is sent for so many steps."""
    return NBYTES / (steps * STEP)


def cluster(
    *,
    speed: float = 1e9,
    node_size: int = 4,
    inside: float = 1e9,
    between: float = 1e9,
    latency: float = 0.0,
    **options: Any,
) -> Cluster:
    """A cluster with infinite memory bandwidth."""
    device = Device("toy", Rate(speed), Rate(speed), inf)
    links = (Link("wire", latency, inside), Link("cable", latency, between))
    return Cluster(device, node_size, *links, **options)


def simulated(
    on: Cluster,
    world_size: int = 4,
    strategy: Strategy = Strategy(),  # noqa: B008  # a frozen value
    *,
    kind: str = "contiguous",
    causal: bool = False,
    window: int = -1,
    backend: str = "reference",
    backward: bool = False,
    sends_together: bool | None = None,
) -> Simulation:
    layout = SequenceLayout.from_name(kind, ROWS * world_size, world_size)
    mask = Mask(layout.seqlen, layout.seqlen, causal, (window, -1))
    calls = [call_of(layout, mask, rank, strategy, backend) for rank in range(world_size)]
    calls = [replace(call, sends_together=sends_together) for call in calls]
    return simulate(programs_of(calls, backward=backward), calls[0], on)


def call_of(
    layout: SequenceLayout, mask: Mask, rank: int, strategy: Strategy, backend: str
) -> Call:
    return Call(
        options=Options(differentiated=True),
        spec=SPEC,
        backend=backend,
        layouts=(layout, layout),
        mask=mask,
        rank=rank,
        strategy=strategy,
    )


def each(found: Simulation, name: str) -> list[float]:
    """One of the times of every rank."""
    return [getattr(rank, name) for rank in found.ranks]


HALF = (ROWS + 1) / 2 / ROWS  # of a causal diagonal tile
SLOW = {"slowdown": 0.5}

# Cluster, options of `simulated`, and seconds in steps: in all, of compute, and waiting for bytes.
BY_HAND: dict[str, tuple[Cluster, dict[str, Any], float, float, float]] = {
    "hidden messages": (cluster(), {}, 4, 4, 0),
    # Only the last dq, half as large as k and v, outlasts compute.
    "hidden gradients": (cluster(), {"backward": True}, 10 + NBYTES / 2e9 / STEP, 10, 1 / 64),
    # All but the first head's three shards and the last head's gradients travel during compute.
    **{
        f"gathered by heads, {backward=}": (
            cluster(inside=wire(0.1)),
            {"strategy": Strategy("all_gather"), "backward": backward},
            compute + exposed,
            compute,
            exposed,
        )
        for backward, compute, exposed in ((False, 4, 0.075), (True, 10, 0.15))
    },
    # The first head's three shards enter a node over the network adapters of both ranks.
    "gathered between nodes": (
        cluster(inside=inf, node_size=2, between=wire(0.1)),
        {"strategy": Strategy("all_gather")},
        4.0375,
        4,
        0.0375,
    ),
    "latency": (cluster(inside=inf, latency=2 * STEP), {}, 3 * 2 + 1, 4, 3),
    # Shards and gradients travel at once, half as long again as a step; then the last gradients.
    "latencies": (
        cluster(inside=inf, latency=3.75 * STEP),
        {"backward": True},
        17.5,
        10,
        3 * 1.25 + 3.75,
    ),
    # Three hops, each as long as three steps, and the last step.
    "slow wire": (cluster(inside=wire(3)), {}, 10, 4, 6),
    # A message between nodes overlaps a round of four steps.
    "slow cable": (cluster(between=wire(3)), {"world_size": 8, "strategy": DOUBLE}, 8, 8, 0),
    "slower cable": (
        cluster(between=wire(4), inside=inf),
        {"world_size": 8, "strategy": DOUBLE},
        8,
        8,
        0,
    ),
    # Compute runs at half speed during a message, and at full speed after it.
    "slowed for half a step": (cluster(inside=wire(0.5), **SLOW), {}, 4.75, 4.75, 0),
    "slowed all the time": (cluster(inside=wire(4), **SLOW), {}, 3 * 4 + 1, 4 + 3, 3 * 2),
    # A copy begins a step after its shard has arrived, and is there a step after its end.
    # A shard is sent while the kernel of the shard before it runs.
    "three buffers": (
        cluster(inside=wire(0.7), stream_latency=0.4 * STEP),
        {"backend": "triton"},
        4.5,
        4,
        0.5,
    ),
    "streams": (cluster(inside=wire(1.5), stream_latency=STEP), {"backend": "triton"}, 9.5, 4, 5.5),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_times_by_hand(name: str) -> None:
    on, options, *expected = BY_HAND[name]
    found = simulated(on, **options)
    times = found.seconds, max(each(found, "compute")), max(each(found, "exposed"))
    assert [seconds / STEP for seconds in times] == pytest.approx(expected, abs=1e-9)
    assert max(each(found, "late")) == 0.0


def test_a_causal_ring_over_contiguous_shards_waits_for_its_last_rank() -> None:
    contiguous, zigzag = (
        simulated(cluster(inside=inf), causal=True, kind=kind) for kind in ("contiguous", "zigzag")
    )
    assert contiguous.seconds == pytest.approx((3 + HALF) * STEP)
    assert contiguous.ranks[0].compute == pytest.approx(HALF * STEP)
    assert max(each(contiguous, "late")) > 0
    assert zigzag.seconds < 0.62 * contiguous.seconds
    assert max(each(zigzag, "late")) < 0.05 * zigzag.seconds


@pytest.mark.parametrize("strategy", [Strategy("all_gather"), Strategy(ulysses_degree=4)])
def test_collectives_take_what_was_measured_of_them(strategy: Strategy) -> None:
    on = cluster(speed=inf)
    op = "all_to_all" if strategy.ulysses_degree > 1 else "all_gather"
    for latency in (0.0, 1.0):
        measured = replace(on, collectives={op: Link(op, latency, 1e6)})
        found = simulated(measured, strategy=strategy)
        sent, count = found.ranks[0].sent, found.ranks[0].messages
        assert found.seconds == pytest.approx(sent / 1e6 + count * latency)
    assert simulated(on, strategy=strategy).seconds == pytest.approx(sent / 1e9)


def test_a_window_is_computed_at_its_own_rate() -> None:
    on = cluster()
    half = replace(on.device, window_forward=Rate(5e8), window_backward=Rate(5e8))
    for backward, (window, factor) in product((False, True), ((-1, 1.0), (ROWS, 2.0))):
        usual, halved = (
            simulated(replace(on, device=d), 2, causal=True, window=window, backward=backward)
            for d in (on.device, half)
        )
        expected = [factor * seconds for seconds in each(usual, "compute")]
        assert each(halved, "compute") == pytest.approx(expected)


def test_a_device_waits_for_its_host() -> None:
    """A device waits for host time beyond its compute time, in the order of the actions."""
    host = Host(launch=3.0, copy=0.25, post=5.0, wait=1.0)
    found = simulated(cluster(speed=inf, inside=inf, host=host))
    # k and v are packed, posts and waits of three exchanges, four launches, out made from acc.
    assert found.seconds == pytest.approx(0.25 + 3 * (5 + 1) + 4 * 3 + 3 * 14 * 0.25 + 0.25)
    assert each(found, "idle") == pytest.approx(each(found, "clock"))
    assert each(found, "late") == each(found, "exposed") == [0.0] * 4
    found = simulated(cluster(speed=1e9 * STEP / 100.0, inside=inf, host=host))
    # The host is ahead from the second launch on; only the first launch waits.
    assert each(found, "idle") == pytest.approx([0.25 + 5 + 3] * 4)
    assert found.seconds == pytest.approx(0.25 + 5 + 3 + 4 * 100)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_kernels_that_carry_the_state_load_and_store_it(backend: str) -> None:
    """The first of four steps stores the state, the last loads it; other backends merge."""
    on = cluster(speed=inf, inside=inf)
    on = replace(on, device=replace(on.device, memory_bandwidth=1.0))
    acc = ROWS * SPEC.nheads * SPEC.headdim_v * 4
    state = acc + 2 * ROWS * SPEC.nheads * 4
    seconds = 2 * NBYTES + (6 * state if backend == "triton" else 3 * 5 * acc + 2 * acc)
    assert each(simulated(on, backend=backend), "clock") == pytest.approx([seconds] * 4)


@pytest.mark.parametrize("hops", [1, 2])
def test_gradients_are_cleared_added_and_rounded(hops: int) -> None:
    on = cluster(speed=inf, inside=inf)
    on = replace(on, device=replace(on.device, memory_bandwidth=1.0))
    found = simulated(on, 1 + hops, backward=True)
    one, statistics = NBYTES / 2, ROWS * SPEC.nheads * 4
    # q, dout, lse and delta are packed, out is read for delta. Zeros for dq, dk, dv, and for the dq
    # that is sent, which is added after each hop. Three gradients are read and written.
    packed = 2 * (2 * one + 2 * statistics) + 2 * one
    assert each(found, "moves") == [packed + (3 + hops + 3 * hops + 3 * 2) * one] * (1 + hops)


def test_every_second_of_a_rank_has_its_kind() -> None:
    for rank in simulated(cluster(inside=2e8), causal=True, backward=True).ranks:
        parts = rank.compute + rank.moves + rank.idle + rank.late + rank.exposed
        assert parts == pytest.approx(rank.clock)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [((ops.Post,), "rank 2 waits on .*shards"), ((ops.Post, ops.Wait), r"\[0, 1, 3\] do not end")],
)
def test_a_rank_that_posts_less_is_named(kinds: tuple[type, ...], words: str) -> None:
    layout, mask = SequenceLayout.contiguous(64, 4), Mask(64, 64)
    calls = [call_of(layout, mask, rank, Strategy(), "aten") for rank in range(4)]
    programs = programs_of(calls, backward=False)
    posts = programs[2].ops
    last = [max(i for i, op in enumerate(posts) if isinstance(op, kind)) for kind in kinds]
    left = tuple(op for i, op in enumerate(posts) if i not in last)
    programs[2] = replace(programs[2], ops=left)
    with pytest.raises(ValueError, match=words):
        simulate(programs, calls[0], cluster())


# -- multiprocessors of copies

GLUON = replace(SPEC, device_type="cuda", dtype=torch.bfloat16, headdim=128, headdim_v=128)


def on_gluon(on: Cluster, strategy: Strategy = Strategy()) -> Simulation:  # noqa: B008  # frozen
    """The forward of our kernel of sm_90, which is a persistent grid."""
    layout = SequenceLayout.contiguous(ROWS * 4, 4)
    mask = Mask(layout.seqlen, layout.seqlen)
    calls = [
        replace(call_of(layout, mask, rank, strategy, "triton"), spec=GLUON) for rank in range(4)
    ]
    return simulate(programs_of(calls, backward=False), calls[0], on)


@pytest.mark.parametrize(
    ("strategy", "max_ctas", "steps"),
    [
        # Three steps beside an exchange, and the last.
        (Strategy(), 8, 3 / (1 - 8 / 64) + 1),
        (Strategy(), 16, 3 / (1 - 16 / 64) + 1),
        # The next round's keys travel beside the first step.
        (Strategy(inner_degree=2), 8, 1 / (1 - 16 / 64) + 2 / (1 - 8 / 64) + 1),
    ],
)
def test_a_persistent_forward_loses_what_it_leaves_to_each_exchange(
    strategy: Strategy, max_ctas: int, steps: float
) -> None:
    """For the whole step, whether the copies are short or not."""
    toy = cluster(inside=1e12, between=1e12, max_ctas=max_ctas)
    device = replace(toy.device, architecture="sm_90", multiprocessors=64)
    one_step = flops(ROWS * ROWS, GLUON, backward=False) / 1e9
    found = on_gluon(replace(toy, device=device, slowdown=max_ctas / 64), strategy)
    assert each(found, "compute") == pytest.approx([steps * one_step] * 4)
    # Other kernels lose only the copies' time.
    other = replace(device, architecture="sm_80")
    found = on_gluon(replace(toy, device=other, slowdown=max_ctas / 64), strategy)
    assert each(found, "compute") == pytest.approx([4 * one_step] * 4, rel=1e-3)


def test_compute_loses_the_share_of_a_messages_channels() -> None:
    """4 of 8 channels copy a message of two ranks, which takes longer than their two steps."""
    on = cluster(inside=1e9, slowdown=0.5, channel_bandwidth=1.0)
    found = simulated(on, world_size=2)
    channels = communicator_of(2, 1).channels(NBYTES)
    assert 1 <= channels < 8
    steps = 1 / (1 - 0.5 * channels / 8) + 1
    assert each(found, "compute") == pytest.approx([steps * STEP] * 2)


def test_messages_of_two_communicators_that_leave_bandwidth_run_at_once() -> None:
    """Shards and gradients of a backward, each on some of NCCL's channels, share a link."""
    channels = communicator_of(4, 1).channels(NBYTES)
    of_channel = wire(8) / channels  # a shard takes as long as eight steps
    alone = cluster(inside=channels * of_channel)
    shared = cluster(inside=2 * channels * of_channel, channel_bandwidth=of_channel)
    one_after_another = simulated(alone, backward=True)
    at_once = simulated(shared, backward=True)
    assert at_once.seconds < 0.9 * one_after_another.seconds
    # On one communicator they follow one another, whatever the link has left.
    forward = [simulated(on).seconds for on in (alone, shared)]
    assert forward[0] == pytest.approx(forward[1])


def test_two_messages_that_start_together_follow_one_another() -> None:
    """A step that hides both is as long as with two communicators, another one is longer."""
    channels = communicator_of(4, 1).channels(NBYTES)
    for steps, is_longer in ((0.1, False), (8, True)):
        of_channel = wire(steps) / channels
        on = cluster(inside=2 * channels * of_channel, channel_bandwidth=of_channel)
        apart, together = (
            simulated(on, backward=True, sends_together=together) for together in (False, True)
        )
        assert (together.seconds > 1.1 * apart.seconds) == is_longer
        assert each(together, "sent") == each(apart, "sent")
        assert each(together, "messages") == each(apart, "messages")
        hidden = each(together, "exposed") == pytest.approx(each(apart, "exposed"))
        assert hidden != is_longer


def test_messages_that_leave_their_rail_take_longer() -> None:
    """A plain ring's hop to the next node does, from its last device to the first; a round of a
    double ring stays on each device's rail.
    """
    found = {}
    for off_rail in (0.0, STEP / 4):
        on = cluster(inside=inf, between=wire(2), off_rail_latency=off_rail)
        for strategy in (Strategy(), DOUBLE):
            found[off_rail, strategy] = simulated(on, 8, strategy).seconds / STEP
    # Rank 4 gets each of its 7 shards from rank 3, one after another.
    ring = found[STEP / 4, Strategy()] - found[0.0, Strategy()]
    assert ring == pytest.approx(7 / 4)
    assert found[STEP / 4, DOUBLE] == found[0.0, DOUBLE]
