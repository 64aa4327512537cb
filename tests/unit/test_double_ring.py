"""The double ring: inner rings, an outer ring between them, and who holds what in which buffer.

Plans and schedules are pure data, so all ranks are played through step by step with names in the
place of tensors. What is posted must be what is expected, and no buffer may be touched while a
message in it is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ring_attn.core.buffers import (
    Add,
    Clear,
    Move,
    Pack,
    Post,
    Return,
    Schedule,
    Wait,
    gradient_schedule,
    shard_schedule,
)

from ring_attn.core import sizes as cost
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Plan, Traveller, needed_displacements, plan_ring, ring_grid
from ring_attn.core.spec import AttentionSpec
from ring_attn.strategies.ring import make_call
from ring_attn.testing import LAYOUTS, Layouts, layouts_of

TRAVELLERS: tuple[Traveller, ...] = ("kv", "q")
GRIDS = ((4, 2), (6, 2), (6, 3), (8, 4))
# Every number of ranks up to eight with every inner ring that divides it.
ALL_GRIDS = [(p, inner) for p in range(1, 9) for inner in range(1, p + 1) if p % inner == 0]

CAUSAL = Mask(61, 61, causal=True)
PLANNED = {
    "full": Mask(19, 19),
    "causal": Mask(19, 19, causal=True),
    "longer kv": Mask(9, 19, causal=True),
    "rows that see nothing": Mask(19, 8, causal=True),
    "narrow window": Mask(19, 19, causal=True, window_size=(2, -1)),
    "window": Mask(19, 19, window_size=(4, 3)),
    "documents": Mask(19, 19, False, (-1, -1), (0, 5, 5, 10, 19), (0, 5, 5, 10, 19)),
    "documents of other lengths": Mask(19, 13, True, (-1, -1), (0, 5, 12, 19), (0, 1, 11, 13)),
    "no keys": Mask(7, 0),
}


def rings(layouts: Layouts, mask: Mask, inner_degree: int, travels: Traveller = "kv") -> list[Plan]:
    ranks = range(layouts[0].world_size)
    return [plan_ring(*layouts, mask, rank, travels, inner_degree) for rank in ranks]


def every_ring(world_size: int, inner_degree: int) -> Iterator[tuple[Layouts, Mask, list[Plan]]]:
    """The plans of all ranks, for every mask, layout and traveller."""
    for mask, kind, travels in product(PLANNED.values(), LAYOUTS, TRAVELLERS):
        layouts = layouts_of(kind, mask, world_size)
        yield layouts, mask, rings(layouts, mask, inner_degree, travels)


# -- the plan


@pytest.mark.parametrize(("world_size", "inner_degree"), ALL_GRIDS)
def test_each_visible_pair_once_and_each_message_expected(
    world_size: int, inner_degree: int
) -> None:
    for layouts, mask, ring in every_ring(world_size, inner_degree):
        assert_each_visible_pair_once(layouts, mask, ring)
        play(ring, shard_schedule, Shards)
        play(ring, gradient_schedule, Gradients)
        play(ring, partial(gradient_schedule, continued=True), Gradients)


def assert_each_visible_pair_once(layouts: Layouts, mask: Mask, ring: list[Plan]) -> None:
    times, dense = torch.zeros(mask.seqlen_q, mask.seqlen_k, dtype=torch.int64), mask.dense()
    for plan in ring:
        sources = [step.source for step in plan.steps]
        assert sources[0] == plan.rank and len(set(sources)) == len(sources)
        for step in plan.steps:
            pair = (plan.rank, step.source)
            if plan.travels == "q":
                pair = pair[::-1]
            rows, cols = (x.position_ids(rank) for x, rank in zip(layouts, pair, strict=True))
            if plan.travels == "kv":
                cols = cols[step.rows]
            else:
                rows = rows[step.rows]
            for tile in step.tiles:
                i, j = rows[tile.q, None], cols[None, tile.kv]
                diff = torch.arange(tile.kv.start, tile.kv.stop) - torch.arange(
                    tile.q.start, tile.q.stop
                ).unsqueeze(1)
                lo, hi = tile.band
                inside = torch.ones_like(diff)
                if lo is not None:
                    inside *= diff >= lo
                if hi is not None:
                    inside *= diff <= hi
                times[i, j] += inside
    assert torch.equal(times, dense.long())


# -- all ranks played through, with names in the place of tensors

Payload = Any


class Shards:
    """What buffers hold is whose shard it is."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.packed = plan, plan.rank

    def compute(self, index: int, held: Payload) -> Payload:
        assert held == self.plan.steps[index].source, "another shard than the plan says"
        return held


class Gradients:
    """What buffers hold is a count of (shard, rank that has computed for it)."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.own = plan, Counter[tuple[int, int]]()

    @property
    def packed(self) -> Payload:
        return Counter(self.own)

    def compute(self, index: int, held: Payload) -> Payload:
        step = self.plan.steps[index]
        assert isinstance(held, Counter) and {shard for shard, _ in held} <= {step.source}
        return held + Counter({(step.source, self.plan.rank): 1})


class Player:
    """One rank's buffers, and which of them a message is under way from or to."""

    def __init__(self, plan: Plan, schedule: Schedule, side: Any) -> None:
        self.plan, self.schedule, self.side = plan, schedule, side
        self.buffers: list[Payload] = [None] * schedule.num_buffers
        self.under_way: dict[bool, Post] = {}
        self.posted: Counter[bool] = Counter()
        self.transfers: list[tuple[bool, int, int]] = []

    def read(self, buffer: int) -> Payload:
        assert buffer not in {p.recv for p in self.under_way.values()}, "read while received into"
        assert self.buffers[buffer] is not None, "nothing is in this buffer"
        return self.buffers[buffer]

    def write(self, buffer: int, payload: Payload) -> None:
        busy = {b for p in self.under_way.values() for b in (p.send, p.recv)}
        assert buffer not in busy, "written to while a message is under way"
        self.buffers[buffer] = payload


def play(
    ring: list[Plan], schedule_of: Callable[[Plan], Schedule], side_of: Callable[[Plan], Any]
) -> None:
    """All ranks side by side; a message is what its buffer held when it was posted."""
    players = [Player(plan, schedule_of(plan), side_of(plan)) for plan in ring]
    mail: dict[tuple[bool, int, int], tuple[Post, Payload]] = {}

    def do(player: Player, moves: tuple[Move, ...]) -> None:
        for move in moves:
            match move:
                case Pack(buffer):
                    player.write(buffer, player.side.packed)
                case Clear(buffer, _):
                    player.write(buffer, Counter())
                case Post():
                    assert_fits(player, move, ring)
                    outer = move.transfer.outer
                    mail[outer, player.posted[outer], player.plan.rank] = (
                        move,
                        player.read(move.send),
                    )
                    player.write(move.recv, None)
                    assert move.send != move.recv
                    player.under_way[outer] = move
                    player.posted[outer] += 1
                    transfer = move.transfer
                    player.transfers.append((outer, transfer.sends, transfer.brings))
                case Wait(outer):
                    mine = player.under_way.pop(outer)
                    sender = mine.transfer.hop.recv_from
                    theirs, payload = mail.pop((outer, player.posted[outer] - 1, sender))
                    assert theirs.transfer.hop.send_to == player.plan.rank
                    player.buffers[mine.recv] = payload
                case Add(into, buffer, _):
                    player.write(into, player.read(into) + player.read(buffer))
                case Return(buffer, replace_own):
                    returned = player.read(buffer)
                    assert {shard for shard, _ in returned} <= {player.plan.rank}
                    player.side.own = returned if replace_own else player.side.own + returned

    for index in range(len(ring[0].steps)):
        for player in players:
            do(player, player.schedule.steps[index].before)
        for player in players:
            if player.plan.steps[index].tiles or isinstance(player.side, Shards):
                compute(player, index)
        for player in players:
            do(player, player.schedule.steps[index].after)
    for player in players:
        do(player, player.schedule.end)

    assert not mail and not any(player.under_way for player in players)
    assert len({tuple(player.transfers) for player in players}) == 1, "ranks differ in what they do"
    if isinstance(players[0].side, Gradients):
        computed = {(s.source, p.rank): 1 for p in ring for s in p.steps if s.tiles}
        for player in players:
            rank = player.plan.rank
            expected = Counter({one: 1 for one in computed if one[0] == rank})
            assert player.side.own == expected, "a rank's part is missing, or there twice"


def compute(player: Player, index: int) -> None:
    """A step reads its shard, or adds to its gradients."""
    held, gradients = player.schedule.steps[index].held, isinstance(player.side, Gradients)
    if held is None:
        assert index == 0
        own = player.side.compute(0, player.side.packed)
        if gradients:
            player.side.own = own
    elif gradients:
        player.write(held, player.side.compute(index, player.read(held)))
    else:
        player.side.compute(index, player.read(held))


def assert_fits(player: Player, post: Post, ring: list[Plan]) -> None:
    """The receiver expects the rows of the very shard that is sent to it."""
    transfer, plan = post.transfer, player.plan
    receiver = ring[transfer.hop.send_to]
    assert receiver.rank != plan.rank
    sent, expected = plan.steps[transfer.sends].source, receiver.steps[transfer.brings].source
    assert sent == expected, "another shard than the receiver expects"
    assert plan.rows_moving(transfer.sends) == receiver.rows_moving(transfer.brings)


def test_the_player_finds_what_is_wrong() -> None:
    layouts = layouts_of("zigzag", PLANNED["causal"], 4)
    ring = rings(layouts, PLANNED["causal"], 2)

    def too_few(plan: Plan) -> Schedule:
        """The inner ring brings its shard where the outer ring's is due."""
        schedule = shard_schedule(plan)
        own, outer, inner = schedule.steps[0].before
        assert isinstance(outer, Post) and isinstance(inner, Post)
        first = replace(schedule.steps[0], before=(own, outer, replace(inner, recv=outer.recv)))
        return replace(schedule, steps=(first, *schedule.steps[1:]))

    with pytest.raises(AssertionError, match="written to while a message is under way"):
        play(ring, too_few, Shards)
    with pytest.raises(AssertionError, match="another shard than the receiver expects"):
        play([ring[0], *rings(layouts, PLANNED["causal"], 4)[1:]], shard_schedule, Shards)


# -- what the plan promises


def test_rounds_in_the_node_and_one_hop_between() -> None:
    layout, mask = SequenceLayout.contiguous(64, 8), Mask(64, 64)
    plan = plan_ring(layout, layout, mask, 1, inner_degree=4)
    assert [step.source for step in plan.steps] == [1, 0, 3, 2, 5, 4, 7, 6]
    outer = [transfer for transfer in plan.shard_transfers if transfer.outer]
    assert [(t.sends, t.brings, t.hop.send_to, t.hop.recv_from) for t in outer] == [(0, 4, 5, 5)]
    home = [t for t in plan.gradient_transfers() if t.brings == 0]
    assert [(t.outer, t.sends) for t in home] == [(False, 3), (True, 7)]
    # Of the shard of rank 6, held last; and rank 4 is the last to hold that of rank 1.
    assert (home[1].hop.send_to, home[1].hop.recv_from) == (6, 4)
    backward = plan_ring(layout, layout, mask, 1, "q", inner_degree=4)
    assert [step.source for step in backward.steps] == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_one_inner_ring_is_the_plain_ring(kind: str) -> None:
    for mask, travels in product(PLANNED.values(), TRAVELLERS):
        layouts = layouts_of(kind, mask, 6)
        plain = rings(layouts, mask, 1, travels)
        assert rings(layouts, mask, 6, travels) == plain
        for plan in plain:
            assert not any(t.outer for t in plan.shard_transfers + plan.gradient_transfers())
            assert shard_schedule(plan).num_buffers == (2 if plan.num_hops else 0)
            limit = min(plan.num_hops + 1, 3) if plan.num_hops else 0
            assert gradient_schedule(plan).num_buffers <= limit
            assert gradient_schedule(plan, continued=True).num_buffers == min(limit, 2)
            hops = [step.hop for step in plan.steps[:-1]]
            assert [t.hop for t in plan.shard_transfers] == hops
            assert [t.hop for t in plan.gradient_transfers()] == [*hops[1:], plan.home][: len(hops)]


def test_shards_and_rounds_that_nobody_needs_are_left_out() -> None:
    layout = SequenceLayout.contiguous(32, 8)
    # A window of one shard: the rank before, which for the first of a node is in another one.
    window = Mask(32, 32, causal=True, window_size=(4, -1))
    assert needed_displacements(layout, layout, window, 4) == ((0, 0), (0, 1), (1, 1))
    plan = plan_ring(layout, layout, window, 5, inner_degree=4)
    assert [step.source for step in plan.steps] == [5, 4, 0]
    assert [(t.outer, t.sends, t.brings) for t in plan.shard_transfers] == [
        (True, 0, 2),
        (False, 0, 1),
    ]
    # Documents of the ranks of one node each: nothing goes between nodes.
    documents = Mask(32, 32, True, (-1, -1), (0, 16, 32), (0, 16, 32))
    assert needed_displacements(layout, layout, documents, 4) == tuple((0, b) for b in range(4))
    for plan in rings((layout, layout), documents, 4):
        between = cost.bytes_by_link(plan, spec_with(8), 4, backward=True).between
        assert between == 0
    # Of four nodes the second is jumped over: ranks 0, 1 and 4, 5 share a document.
    far = Mask(32, 32, False, (-1, -1), (0, 0, 8, 16, 32), (0, 8, 16, 24, 32))
    displacements = needed_displacements(layout, layout, far, 2)
    rounds = sorted({a for a, _ in displacements})
    assert rounds != list(range(4)) and rounds[0] == 0
    play(rings((layout, layout), far, 2), shard_schedule, Shards)


@pytest.mark.parametrize(("world_size", "inner_degree"), [*GRIDS, (24, 8), (32, 8), (12, 6)])
def test_what_goes_between_nodes_has_a_whole_round(world_size: int, inner_degree: int) -> None:
    outer_degree, mask = world_size // inner_degree, Mask(world_size, world_size)
    layouts = layouts_of("contiguous", mask, world_size)
    for travels in TRAVELLERS:
        for plan in rings(layouts, mask, inner_degree, travels):
            node = plan.rank // inner_degree
            for transfer in plan.shard_transfers + plan.gradient_transfers():
                crosses = transfer.hop.send_to // inner_degree != node
                assert crosses == transfer.outer
            shards = [t for t in plan.shard_transfers if t.outer]
            first = range(0, world_size, inner_degree)
            assert [t.sends for t in shards] == list(first[:-1])
            assert [t.brings for t in shards] == list(first[1:])
            for schedule in (shard_schedule(plan), gradient_schedule(plan)):
                assert_waits_a_round_later(schedule, inner_degree, outer_degree)
            assert shard_schedule(plan).num_buffers == (3 if inner_degree == 2 else 4)
            wanted = 5 if outer_degree > 2 else 3
            assert gradient_schedule(plan).num_buffers == wanted


def assert_waits_a_round_later(schedule: Schedule, inner_degree: int, outer_degree: int) -> None:
    posted = waited = 0
    moves = [
        (index, after, move)
        for index, step in enumerate(schedule.steps)
        for after, some in ((False, step.before), (True, step.after))
        for move in some
    ]
    end = len(schedule.steps)
    moves += [(end, True, move) for move in schedule.end]
    times: list[tuple[int, int]] = []
    for index, after, move in moves:
        if isinstance(move, Post) and move.transfer.outer:
            # Of steps computed already.
            times.append((posted := index + after, -1))
        elif isinstance(move, Wait) and move.outer:
            waited = min(index + after, end)
            times[-1] = (posted, waited)
    assert len(times) == outer_degree - 1
    # The gradients of the last round alone have nothing left to hide behind.
    for posted, waited in times:
        assert waited - posted == inner_degree or posted == end


# -- bytes and messages


def spec_with(nheads: int, dtype: torch.dtype = torch.bfloat16) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, 1, nheads, nheads, 16, 16)


@pytest.mark.parametrize(("world_size", "inner_degree"), GRIDS)
def test_bytes_between_nodes_are_spread_over_the_ranks(world_size: int, inner_degree: int) -> None:
    mask, spec = Mask(8 * world_size, 8 * world_size), spec_with(2)
    layouts = layouts_of("contiguous", mask, world_size)
    plain, double = (
        [
            cost.bytes_by_link(plan, spec, inner_degree, backward=False)
            for plan in rings(layouts, mask, inner)
        ]
        for inner in (1, inner_degree)
    )
    shard, nodes = spec.kv_packet(8).nbytes, world_size // inner_degree
    for rank, (one, other) in enumerate(zip(plain, double, strict=True)):
        boundary = rank % inner_degree == inner_degree - 1
        assert one == ((0, (world_size - 1) * shard) if boundary else ((world_size - 1) * shard, 0))
        assert other.between == (nodes - 1) * shard
        assert sum(other) == sum(one)
    slowest = max(link.between for link in double)
    assert slowest < max(link.between for link in plain)
    # Bytes a step on the slow link, where a round is inner_degree steps.
    assert slowest / world_size < shard / inner_degree
    backward = [
        cost.bytes_by_link(plan, spec, inner_degree, backward=True)
        for plan in rings(layouts, mask, inner_degree)
    ]
    gradients = spec.kv_grad_packet(8).nbytes
    assert {link.between for link in backward} == {(nodes - 1) * (shard + gradients)}


def test_bytes_by_link_of_a_node_and_of_none() -> None:
    layouts, mask, spec = layouts_of("zigzag", CAUSAL, 6), CAUSAL, spec_with(2)
    for plan, backward in product(rings(layouts, mask, 3), (False, True)):
        total = cost.bytes_sent(plan, spec, backward=backward)
        assert cost.bytes_by_link(plan, spec, 6, backward=backward) == (total, 0)
        assert cost.bytes_by_link(plan, spec, 1, backward=backward) == (0, total)
        assert sum(cost.bytes_by_link(plan, spec, 3, backward=backward)) == total
    with pytest.raises(ValueError, match="node_size must be at least 1, got 0"):
        cost.bytes_by_link(plan, spec, 0, backward=False)


def test_as_many_messages_as_a_plain_ring() -> None:
    mask = Mask(64, 64, causal=True)
    layouts = layouts_of("zigzag", mask, 8)
    for inner_degree, backward, in_order in product((1, 2, 4, 8), (False, True), (False, True)):
        plan = plan_ring(*layouts, mask, 3, inner_degree=inner_degree)
        expected = 7 + (7 + in_order if backward else 0)
        assert cost.num_messages(plan, backward=backward, in_order=in_order) == expected


# -- the call


def test_the_traveller_is_the_cheaper_side_of_this_ring() -> None:
    mask, chosen = CAUSAL, set()
    layouts = layouts_of("zigzag", mask, 6)
    for nheads_kv in (8, 1):
        spec = AttentionSpec("cpu", torch.bfloat16, 1, 8, nheads_kv, 64, 64)
        call = make_call(spec, layouts, mask, 1, backend="reference", inner_degree=3)
        total = {
            travels: sum(
                cost.bytes_sent(plan, spec, backward=True)
                for plan in rings(layouts, mask, 3, travels)
            )
            for travels in TRAVELLERS
        }
        assert call.inner_degree == 3
        assert call.travels_back == ("q" if total["q"] < total["kv"] else "kv")
        chosen.add(call.travels_back)
    assert chosen == {"kv", "q"}


# -- refusals


@pytest.mark.parametrize(("world_size", "inner_degree"), [(6, 4), (4, 3), (4, 8), (4, 0)])
def test_inner_degree_must_divide_the_world_size(world_size: int, inner_degree: int) -> None:
    layouts, mask = layouts_of("contiguous", CAUSAL, world_size), CAUSAL
    message = f"inner_degree must divide the world size, got {inner_degree} and {world_size}"
    for refused in (
        partial(ring_grid, world_size, inner_degree),
        partial(plan_ring, *layouts, mask, 0, "kv", inner_degree),
        partial(needed_displacements, *layouts, mask, inner_degree),
        partial(make_call, spec_with(2), layouts, mask, 0, inner_degree=inner_degree),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


def test_same_bits_is_refused_but_of_one_inner_ring() -> None:
    mask = Mask(1024, 1024, causal=True)
    layouts = layouts_of("contiguous", mask, 4)
    one = partial(make_call, spec_with(2, torch.float32), layouts, mask, 0, backend="triton")
    for same_bits in (None, False):
        assert not one(same_bits=same_bits, inner_degree=2).same_bits
    with pytest.raises(NotImplementedError, match="got 2 inner rings of 2"):
        one(same_bits=True, inner_degree=2)
    for inner_degree in (1, 4):
        assert one(inner_degree=inner_degree).same_bits
        assert one(same_bits=True, inner_degree=inner_degree).same_bits


def test_the_order_of_a_double_ring_is_not_that_of_one_process() -> None:
    """Why: an earlier node's shards come from one's own place in it downwards, then from the last.

    One process folds keys from the diagonal downwards, so the sources would have to descend.
    """
    mask = Mask(64, 64, causal=True)
    layouts = layouts_of("contiguous", mask, 8)
    for inner_degree in (1, 2, 4, 8):
        descending = []
        for plan in rings(layouts, mask, inner_degree):
            sources = [step.source for step in plan.steps if step.tiles]
            descending.append(sources == sorted(sources, reverse=True))
        assert all(descending) == (inner_degree in (1, 8))
