"""Schedules of all ranks are what the drivers do: every post and wait, in order; and their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ring_attn.planning.schedule import Schedule, Transfer, Wait, schedule_of
from ring_attn.strategies.core import make_call
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import (
    Hop,
    needed_displacements,
    pair_tiles,
    plan_ring,
    ring_grid,
    travelling_rows,
)
from ring_attn.core.program import Channel
from ring_attn.core.sizes import bytes_by_link, choose_traveller, flops
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.work import pair_work
from ring_attn.strategies.base import Call
from ring_attn.strategies.ring import RingCall
from ring_attn.testing import LAYOUTS, Layouts, layouts_of, masks, random_qkv
from ring_attn.transport.local import LocalTransport, run_local

MASKS = masks(61)

# What a rank did: (op, channel, bytes that left it, to whom or with whom), or ("wait", channel).
Event = tuple[Any, ...]


class Recorder:
    """A transport that writes down what a driver asks of it."""

    def __init__(self, inner: LocalTransport, ranks: tuple[int, ...], events: list[Event]) -> None:
        self.rank, self.world_size, self.stats = inner.rank, inner.world_size, inner.stats
        self._inner, self._ranks, self._events = inner, ranks, events

    def join(self, channel: Channel, device: torch.device) -> None:
        self._inner.join(channel, device)

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        self._events.append(("shift", channel, send.nbytes, self._ranks[hop.send_to]))
        self._inner.post(channel, step, hop, send, recv)

    def all_gather(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        self._collective("all_gather", channel, (self.world_size - 1) * send.nbytes)
        self._inner.all_gather(channel, step, send, recv)

    def reduce_scatter(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        self._collective("reduce_scatter", channel, (self.world_size - 1) * recv.nbytes)
        self._inner.reduce_scatter(channel, step, send, recv)

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        self._collective("all_to_all", channel, send.nbytes - send_counts[self.rank])
        self._inner.all_to_all(channel, step, send, send_counts, recv, recv_counts)

    def wait(self, channel: Channel) -> None:
        self._events.append(("wait", channel))
        self._inner.wait(channel)

    def sub(self, ranks: tuple[int, ...]) -> Recorder:
        members = tuple(self._ranks[rank] for rank in ranks)
        return Recorder(self._inner.sub(ranks), members, self._events)

    def _collective(self, op: str, channel: Channel, nbytes: int) -> None:
        self._events.append((op, channel, nbytes, self._ranks))


def recorded(
    make: Callable[[int], Call], spec: AttentionSpec, layouts: Layouts
) -> list[list[list[Event]]]:
    """What every rank did in the forward and in the backward."""
    lens = layouts[0].seqlen, layouts[1].seqlen
    inputs = random_qkv(
        batch=spec.batch,
        seqlen_q=lens[0],
        seqlen_k=lens[1],
        nheads=spec.nheads,
        nheads_kv=spec.nheads_kv,
        headdim=spec.headdim,
        headdim_v=spec.headdim_v,
        dtype=spec.dtype,
    )
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])
    world_size = layouts[0].world_size

    def work(rank: int, transport: LocalTransport) -> list[list[Event]]:
        call = make(rank)
        q, k, v, dout = (x.shard(t, rank) for t, x in zip(inputs, sides, strict=True))
        logs: list[list[Event]] = [[], []]
        forward, backward = (Recorder(transport, tuple(range(world_size)), log) for log in logs)
        saved = call.forward(q, k, v, forward, None).saved
        call.backward(saved, dout, backward, None)
        return logs

    return run_local(world_size, work)


def scheduled(schedule: Schedule, rank: int) -> list[Event]:
    """What stands in a schedule for one rank."""
    events: list[Event] = []
    for action in schedule.actions():
        if isinstance(action, Wait) and action.active[rank]:
            events.append(("wait", action.channel))
        elif isinstance(action, Transfer) and action.active[rank]:
            if action.op == "shift":
                whom: Any = int(action.to[rank])
            else:
                [whom] = [tuple(group) for group in action.groups.tolist() if rank in group]
            events.append((action.op, action.channel, int(action.nbytes[rank]), whom))
    return events


def assert_as_driven(
    make: Callable[[int], Call],
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    **options: Any,
) -> None:
    """Both directions of all ranks."""
    schedules = [
        schedule_of(strategy, spec, layouts, mask, backward=backward, **options)
        for backward in (False, True)
    ]
    for rank, logs in enumerate(recorded(make, spec, layouts)):
        for log, schedule in zip(logs, schedules, strict=True):
            assert scheduled(schedule, rank) == log
            sent = sum(event[2] for event in log if event[0] != "wait")
            assert int(schedule.bytes_sent[rank]) == sent
            assert int(schedule.messages[rank]) == sum(event[0] != "wait" for event in log)


def assert_made_as_driven(
    strategy: Strategy, spec: AttentionSpec, layouts: Layouts, mask: Mask
) -> None:
    """Of the call that a strategy makes."""
    options = {"backend": "reference", "same_bits": False}
    make = partial(make_call, strategy, spec, layouts, mask, **options)
    assert_as_driven(make, strategy, spec, layouts, mask)


def spec_of(
    nheads: int = 4, nheads_kv: int = 2, dtype: torch.dtype = torch.float32
) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, 1, nheads, nheads_kv, 8, 12)


def degrees(world_size: int) -> list[Strategy]:
    """Every strategy that so many ranks can have."""
    divisors = [d for d in range(2, world_size + 1) if world_size % d == 0]
    return [
        Strategy(),
        Strategy("all_gather"),
        Strategy("all_gather", heads_per_chunk=2),
        *(Strategy(inner_degree=d) for d in divisors),
        *(Strategy(core, ulysses_degree=d) for d in divisors for core in ("ring", "all_gather")),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_driver_does_what_is_scheduled(world_size: int) -> None:
    spec = spec_of()
    for strategy in degrees(world_size):
        for name, kind in product(("causal", "window", "documents unequal"), LAYOUTS):
            mask = MASKS[name]
            layouts = layouts_of(kind, mask, world_size)

            assert_made_as_driven(strategy, spec, layouts, mask)


@pytest.mark.parametrize("core", ["ring", "all_gather"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchanged_queries(world_size: int, core: Any) -> None:
    strategy, spec = Strategy(core, exchange_q=True), spec_of(dtype=torch.bfloat16)
    names = ("causal", "longer kv", "three rows")
    for name, kind in product(names, ("contiguous", "boundaries")):
        mask = MASKS[name]
        layouts = layouts_of(kind, mask, world_size)
        assert_made_as_driven(strategy, spec, layouts, mask)


@pytest.mark.parametrize("inner_degree", [2, 3])
def test_double_rings_of_six_ranks(inner_degree: int) -> None:
    strategy, spec = Strategy(inner_degree=inner_degree), spec_of()
    for mask in MASKS.values():
        layouts = layouts_of("zigzag", mask, 6)
        assert_made_as_driven(strategy, spec, layouts, mask)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_rings_with_either_side_travelling(kind: str, travels: Any, in_order: bool) -> None:
    spec = spec_of(dtype=torch.bfloat16)
    for mask in MASKS.values():
        layouts = layouts_of(kind, mask, 3)
        make = partial(
            RingCall, spec, layouts, mask,
            softmax_scale=0.5, backend="reference", travels_back=travels, in_order=in_order,
        )  # fmt: skip
        options = {"travels": travels, "in_order": in_order}
        assert_as_driven(make, Strategy(), spec, layouts, mask, **options)


@pytest.mark.parametrize(("nheads", "nheads_kv"), [(3, 3), (6, 2), (5, 1), (4, 4), (2, 1), (7, 7)])
@pytest.mark.parametrize("degree", [2, 4])
def test_heads_that_do_not_divide(nheads: int, nheads_kv: int, degree: int) -> None:
    strategy = Strategy(ulysses_degree=degree)
    spec, mask = spec_of(nheads, nheads_kv, torch.bfloat16), MASKS["longer kv"]
    layouts = layouts_of("zigzag", mask, 4)
    assert_made_as_driven(strategy, spec, layouts, mask)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_work_of_all_pairs_is_that_of_the_plans(world_size: int) -> None:
    for mask, kind in product(MASKS.values(), LAYOUTS):
        layouts = layouts_of(kind, mask, world_size)
        work = pair_work(*layouts, mask)
        for q_rank, kv_rank in product(range(world_size), repeat=2):
            tiles = pair_tiles(*layouts, mask, q_rank, kv_rank)
            assert int(work.area[q_rank, kv_rank]) == sum(tile.area for tile in tiles)
            for rows, sides in ((work.q, [t.q for t in tiles]), (work.kv, [t.kv for t in tiles])):
                run = int(rows.start[q_rank, kv_rank]), int(rows.stop[q_rank, kv_rank])
                ends = (
                    min((s.start for s in sides), default=0),
                    max((s.stop for s in sides), default=0),
                )
                assert run == ends
        for travels in ("kv", "q"):
            rows = work.travelling(travels)
            for rank in range(world_size):
                expected = travelling_rows(*layouts, mask, rank, travels)
                assert (int(rows.start[rank]), int(rows.stop[rank])) == (
                    expected.start,
                    expected.stop,
                )
        for degree in (d for d in range(1, world_size + 1) if world_size % d == 0):
            order = work.displacements(ring_grid(world_size, degree))
            assert order == needed_displacements(*layouts, mask, degree)


@pytest.mark.parametrize("inner_degree", [1, 2, 4])
@pytest.mark.parametrize("node_size", [1, 2, 3, 8])
def test_bytes_by_link_are_those_of_the_plans(node_size: int, inner_degree: int) -> None:
    spec, mask = spec_of(), MASKS["window causal"]
    layouts = layouts_of("zigzag", mask, 8)
    for backward in (False, True):
        schedule = schedule_of(
            Strategy(inner_degree=inner_degree),
            spec,
            layouts,
            mask,
            backward=backward,
            travels="kv",
        )
        within, between = schedule.bytes_by_link(node_size)
        for rank in range(8):
            plan = plan_ring(*layouts, mask, rank, inner_degree=inner_degree)
            expected = bytes_by_link(plan, spec, node_size, backward=backward)
            assert (int(within[rank]), int(between[rank])) == tuple(expected)


def test_a_gathering_crosses_nodes_for_every_rank_there() -> None:
    spec, mask = spec_of(), Mask(64, 64)
    layouts = layouts_of("contiguous", mask, 8)
    schedule = schedule_of(Strategy("all_gather"), spec, layouts, mask, backward=False)
    within, between = schedule.bytes_by_link(2)
    assert between.tolist() == (6 * within).tolist()


@pytest.mark.parametrize("inner_degree", [1, 2])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)])
def test_the_same_side_travels_as_in_the_call(heads: tuple[int, int], inner_degree: int) -> None:
    spec = spec_of(*heads, dtype=torch.bfloat16)
    for mask in MASKS.values():
        layouts = layouts_of("contiguous", mask, 4)
        strategy = Strategy(inner_degree=inner_degree)
        travels = choose_traveller(spec, *layouts, mask)
        chosen, told = (
            schedule_of(strategy, spec, layouts, mask, backward=True, **options)
            for options in ({}, {"travels": travels})
        )
        assert chosen.bytes_sent.tolist() == told.bytes_sent.tolist()


def test_operations_are_those_of_the_mask() -> None:
    spec, mask = spec_of(), MASKS["documents unequal"]
    for strategy, backward in product(degrees(4), (False, True)):
        layouts = layouts_of("zigzag", mask, 4)
        schedule = schedule_of(strategy, spec, layouts, mask, backward=backward)
        total = sum(layouts[0].mask_area(mask))
        assert float(schedule.flops.sum()) == flops(total, spec, backward=backward)


def test_what_does_not_fit_is_refused() -> None:
    layout = SequenceLayout.contiguous(64, 4)
    with pytest.raises(ValueError, match="ulysses_degree must divide the world size, got 3 and 4"):
        schedule_of(
            Strategy(ulysses_degree=3), spec_of(), (layout, layout), Mask(64, 64), backward=False
        )
    with pytest.raises(ValueError, match=r"\(32, 64\) positions"):
        schedule_of(Strategy(), spec_of(), (layout, layout), Mask(32, 64), backward=False)
    with pytest.raises(NotImplementedError, match="strides"):
        striped = SequenceLayout.striped(64, 4)
        schedule_of(Strategy(), spec_of(), (layout, striped), Mask(64, 64), backward=False)
