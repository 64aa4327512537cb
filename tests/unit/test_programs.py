"""Programs have no fault for any strategy, layout and mask; planted faults are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch

from ring_attn.call import Call, GradientPlan, Options
from ring_attn.core import program as ops
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.ranks import OneRank
from ring_attn.core.sizes import SHARE_OF_DQ, flops, shard_packet
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Strategy
from ring_attn.core.tiles import NO_TILES, Grid, Side
from ring_attn.machines.check import add_work, check
from ring_attn.machines.count import bytes_sent
from ring_attn.machines.time import simulate
from ring_attn.planning.balance import by_area
from ring_attn.planning.devices import Rate, cpu_cluster
from ring_attn.planning.planner import explain
from ring_attn.strategies.registry import make_call, program_of, programs_of
from ring_attn.strategies.ring import CODE
from ring_attn.testing import LAYOUTS, RESULTS, Case, Layouts, Sent, layouts_of, masks
from ring_attn.testing.ranks import calls_of as case_calls
from ring_attn.testing.ranks import run_calls, whole_of
from ring_attn.transport.options import TransportOptions

MASKS = masks(61)
ORDERS: tuple[tuple[Side, bool] | None, ...] = (None, ("kv", False), ("q", False), ("kv", True))


def strategies(world_size: int) -> list[Strategy]:
    """Every strategy for a number of ranks."""
    divisors = [d for d in range(2, world_size + 1) if world_size % d == 0]
    return [
        Strategy(),
        Strategy("all_gather"),
        Strategy("all_gather", heads_per_chunk=2),
        Strategy("exchange"),
        Strategy(exchange_q=True),
        Strategy("all_gather", exchange_q=True),
        Strategy("exchange", exchange_q=True),
        *(Strategy(inner_degree=d) for d in divisors),
        *(Strategy(core, ulysses_degree=d) for d in divisors for core in CORES),
        *(
            Strategy(ulysses_degree=outer, inner_degree=inner)
            for outer, inner in product(divisors, divisors)
            if world_size % (outer * inner) == 0
        ),
    ]


def spec_of(
    nheads: int = 4,
    nheads_kv: int = 2,
    dtype: torch.dtype = torch.float32,
    headdim: int = 8,
    headdim_v: int = 12,
) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, 1, nheads, nheads_kv, headdim, headdim_v)


def calls_of(
    strategy: Strategy,
    mask: Mask,
    layout: str | Layouts,
    world_size: int,
    spec: AttentionSpec | None = None,
    gradients: tuple[Side, bool] | None = None,
    backend: str = "reference",
) -> list[Call]:
    """The calls of all ranks; empty if the strategy refuses the layout."""
    layouts = layouts_of(layout, mask, world_size)
    try:
        calls = [
            make_call(strategy, spec or spec_of(), layouts, mask, rank, backend=backend)
            for rank in range(world_size)
        ]
    except NotImplementedError:
        return []
    plan = gradients and GradientPlan(*gradients)
    return [replace(call, gradients=plan) for call in calls]


def sent(calls: list[Call], *, backward: bool = False) -> list[Sent]:
    """Bytes and messages that each rank sends in one direction."""
    programs = programs_of(calls, backward=backward)
    return [Sent(bytes_sent(program), len([*program.posts()])) for program in programs]


def every_call(world_size: int) -> Iterator[list[Call]]:
    """Calls of every strategy, layout and mask, with heads and dtypes in turn."""
    for strategy, layout in product(strategies(world_size), LAYOUTS):
        for turn, mask in enumerate(MASKS.values()):
            heads = ((4, 2), (3, 3), (4, 1), (6, 3), (5, 1))[turn % 5]
            dtype = (torch.float32, torch.bfloat16)[turn % 2]
            order = ORDERS[turn % len(ORDERS)]
            calls = calls_of(strategy, mask, layout, world_size, spec_of(*heads, dtype), order)
            if calls:
                yield calls


@pytest.mark.parametrize(
    ("world_size", "every"),
    [
        (2, 3),
        *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2, 3, 4)),
        pytest.param(6, 3, marks=pytest.mark.slow),  # all calls of six ranks take a minute
    ],
)
def test_no_program_has_a_fault_and_all_is_timed(world_size: int, every: int) -> None:
    """Of `every` n-th call."""
    count = 0
    chosen = islice(every_call(world_size), 0, None, every)
    for calls, backward in product(chosen, (False, True)):
        assert check(programs_of(calls, backward=backward), calls[0]) == [], calls[0]
        if count % 7 == 0:
            assert_all_is_timed(calls, backward=backward)
        count += 1
    assert count > 100


def assert_all_is_timed(calls: list[Call], *, backward: bool) -> None:
    """Compares bytes, messages and FLOPs of a simulation with those of each rank's program."""
    on, spec = cpu_cluster(), calls[0].spec
    device = replace(on.device, forward=Rate(1.0), backward=Rate(1.0))
    programs = programs_of(calls, backward=backward)
    found = simulate(programs, calls[0], replace(on, device=device))
    assert [Sent(rank.sent, rank.messages) for rank in found.ranks] == sent(
        calls, backward=backward
    )
    shares = {"attended": 1.0}
    if backward:
        shares = {"differentiated by q": SHARE_OF_DQ, "differentiated by k and v": 1 - SHARE_OF_DQ}
    expected = []
    for call in calls:
        passes: Counter[str] = Counter()
        add_work(program_of(call, backward=backward), spec, passes)
        pairs = sum(share * passes[name] for name, share in shares.items())
        expected.append(flops(1, spec, backward=backward) / spec.nheads * pairs)
    assert [rank.compute for rank in found.ranks] == pytest.approx(expected)


# -- planted faults

# Changes a list of ops at one index.
Edit = Callable[[list[Any], int], object]
RING = calls_of(Strategy(), Mask(61, 61, causal=True), "zigzag", 4, None, ("kv", False))


def ops_of(rank: int, *, backward: bool) -> list[ops.Op]:
    return list(program_of(RING[rank], backward=backward).ops)


def faults(rank: int, todo: list[ops.Op], *, backward: bool) -> set[str]:
    """The kinds of faults where one rank of a ring has other ops."""
    programs = programs_of(RING, backward=backward)
    programs[rank] = replace(programs[rank], ops=tuple(todo))
    return {fault.kind for fault in check(programs, RING[0])}


# The fault that is found where an op of a kind is left out, or done twice.
ONCE: dict[type, str] = {
    **dict.fromkeys((ops.Pack, ops.Unpack, ops.Clear, ops.Add, ops.Free), "buffer"),
    **dict.fromkeys((ops.Post, ops.Wait), "order"),
    **dict.fromkeys((ops.Attend, ops.Differentiate), "work"),
    **dict.fromkeys((ops.Start, ops.Finish, ops.New, ops.Delta, ops.Round), "tensor"),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_an_op_left_out_or_done_twice_is_found(backward: bool, rank: int) -> None:
    todo = ops_of(rank, backward=backward)
    for at, op in enumerate(todo):
        if type(op) in ONCE:
            for others in (todo[:at] + todo[at + 1 :], todo[: at + 1] + todo[at:]):
                assert ONCE[type(op)] in faults(rank, others, backward=backward), (at, op)


def changed(change: Callable[[Any], ops.Op]) -> Edit:
    return lambda todo, at: todo.__setitem__(at, change(todo[at]))


def behind(other: type) -> Edit:
    """Swaps an op with the next op of another kind."""

    def swap(todo: list[ops.Op], at: int) -> None:
        b = next(i for i in range(at + 1, len(todo)) if isinstance(todo[i], other))
        todo[at], todo[b] = todo[b], todo[at]

    return swap


def to_itself(op: ops.Post) -> ops.Op:
    return op._replace(route=ops.Hop((op.route.send_to + 1) % 4, op.route.recv_from))


# Whether backward, the kind of fault, the kind of op to edit, the edit, and its nth op.
PLANTED: dict[str, tuple[Any, ...]] = {
    "sent to another rank": (False, "message", ops.Post, changed(to_itself)),
    "posted on another channel": (
        False,
        "order",
        ops.Post,
        changed(lambda op: op._replace(channel="outer")),
    ),
    "more bytes than are expected": (
        False,
        "message",
        ops.Pack,
        changed(lambda op: op._replace(message=shard_packet(spec_of(), "kv", 999))),
    ),
    "sent before it is packed": (False, "buffer", ops.Pack, behind(ops.Post)),
    "a shard is read before it is there": (False, "buffer", ops.Wait, behind(ops.Post)),
    "a buffer is freed while it is sent": (True, "buffer", ops.Wait, behind(ops.Free), 2),
    "sums are written while they are sent": (True, "buffer", ops.Add, behind(ops.Post)),
    "posts in another order": (True, "order", ops.Post, behind(ops.Post), 2),
    "a tensor that does not exist": (
        False,
        "tensor",
        ops.Pack,
        changed(lambda op: op._replace(copies=(ops.Copy(0, ops.View("x")),))),
    ),
    "a step computes nothing": (
        True,
        "work",
        ops.Differentiate,
        changed(lambda op: op._replace(tiles=NO_TILES)),
    ),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, rank: int) -> None:
    backward, kind, of, edit, *nth = PLANTED[name]
    todo = ops_of(rank, backward=backward)
    assert faults(rank, todo, backward=backward) == set()
    edit(todo, [i for i, op in enumerate(todo) if isinstance(op, of)][nth[0] if nth else 0])
    assert kind in faults(rank, todo, backward=backward)


# -- shards and gradients in one exchange

TOGETHER = [replace(call, sends_together=True) for call in RING]
TOGETHER_STRATEGIES = [
    Strategy(),
    Strategy(inner_degree=2),
    Strategy(ulysses_degree=2),
    Strategy(exchange_q=True),
]


def groups_of(todo: list[ops.Op]) -> list[int]:
    """Indices of the ops that start two exchanges."""
    return [
        i for i, op in enumerate(todo) if isinstance(op, ops.PostTogether) and len(op.posts) == 2
    ]


@pytest.mark.parametrize("strategy", TOGETHER_STRATEGIES)
@pytest.mark.parametrize("order", ORDERS[1:])
def test_gradients_start_together_with_shards(strategy: Strategy, order: tuple[Side, bool]) -> None:
    """On the channels of shards, in as many bytes and exchanges."""
    if order[1] and strategy.inner_degree > 1:
        return  # sums in order are of plain rings
    mask = Mask(61, 61, causal=True)
    layout = "contiguous" if strategy.exchange_q else "zigzag"
    apart = calls_of(strategy, mask, layout, 4, None, order)
    calls = [replace(call, sends_together=True) for call in apart]
    assert check(programs_of(calls, backward=True), calls[0]) == []
    assert_all_is_timed(calls, backward=True)
    assert sent(calls, backward=True) == sent(apart, backward=True)
    for call in calls:
        todo = [*program_of(call, backward=True).ops]
        inner = [op.program.ops for op in todo if isinstance(op, ops.Inner)]
        todo += [op for of_inner in inner for op in of_inner]
        used = {op.channel for op in todo if isinstance(op, ops.Post | ops.PostTogether | ops.Wait)}
        assert not used & {"gradients", "outer_gradients"}
        assert groups_of(todo) or call.world_size // strategy.ulysses_degree == 2


# Changes to an op that starts two exchanges, on one rank, and the fault.
TOGETHER_FAULTS: dict[str, tuple[str, Edit]] = {
    "in another order": ("order", changed(lambda op: op._replace(posts=op.posts[::-1]))),
    "one is left out": ("order", changed(lambda op: op._replace(posts=op.posts[:1]))),
    "on another channel": ("order", changed(lambda op: op._replace(channel="outer"))),
    "not waited for": ("buffer", lambda todo, at: todo.pop(next_wait(todo, at))),
    "the second to another rank": (
        "message",
        changed(lambda op: op._replace(posts=(op.posts[0], to_itself(op.posts[1])))),
    ),
}


def next_wait(todo: list[Any], at: int) -> int:
    return next(i for i in range(at, len(todo)) if isinstance(todo[i], ops.Wait))


@pytest.mark.parametrize("name", TOGETHER_FAULTS)
def test_a_planted_fault_in_two_exchanges_is_found(name: str) -> None:
    kind, edit = TOGETHER_FAULTS[name]
    programs = programs_of(TOGETHER, backward=True)
    assert check(programs, TOGETHER[0]) == []
    todo = list(programs[2].ops)
    edit(todo, groups_of(todo)[0])
    programs[2] = replace(programs[2], ops=tuple(todo))
    assert kind in {fault.kind for fault in check(programs, TOGETHER[0])}


@pytest.mark.parametrize("strategy", TOGETHER_STRATEGIES[:3])
@pytest.mark.parametrize("sent_side", ["kv", "q"])
def test_results_are_the_same_together(strategy: Strategy, sent_side: Side) -> None:
    case = Case("causal", "zigzag", strategy, "reference", seqlen=29)
    inputs, layouts = case.build_inputs(), case.build_layouts(4)
    plan = GradientPlan(sent_side, in_order=False)
    found = []
    for together in (True, False):
        calls = [
            replace(call, gradients=plan, sends_together=together) for call in case_calls(case, 4)
        ]
        found.append(whole_of(run_calls(calls, inputs, layouts), layouts))
    assert all(torch.equal(getattr(found[0], x), getattr(found[1], x)) for x in RESULTS)


LONG, SHORT = 128 * 1024, 16 * 1024


@pytest.mark.parametrize(
    ("seqlen", "device", "asked", "in_order", "together"),
    [
        (LONG, "cuda", None, False, True),
        (SHORT, "cuda", None, False, False),
        (LONG, "cuda", None, True, False),
        (LONG, "cpu", None, False, False),
        (LONG, "cuda", False, False, False),
        (SHORT, "cuda", True, False, True),
        (SHORT, "cpu", True, True, True),
    ],
)
def test_long_steps_send_together(
    seqlen: int, device: str, asked: bool | None, in_order: bool, together: bool
) -> None:
    """They hide both messages; all ranks choose the same."""
    options = Options(differentiated=True, transport=TransportOptions(one_communicator=asked))
    layout = SequenceLayout.zigzag(seqlen, 8)
    chosen = {
        CODE.sends_together(
            Call(
                options=options,
                spec=AttentionSpec(device, torch.bfloat16, 1, 64, 8, 128, 128),
                backend="triton",
                layouts=(layout, layout),
                mask=Mask(seqlen, seqlen, causal=True),
                rank=rank,
                strategy=Strategy(),
                gradients=GradientPlan("kv", in_order),
            )
        )
        for rank in range(8)
    }
    assert chosen == {together}


# -- double rings


def receiver(post: ops.Post) -> int:
    """Return the rank of the program that receives a hop's message."""
    assert isinstance(post.route, ops.Hop)
    return post.route.send_to if post.ranks is None else post.ranks[post.route.send_to]


@pytest.mark.parametrize(("world_size", "inner_degree"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_what_goes_between_nodes_has_a_whole_round(world_size: int, inner_degree: int) -> None:
    strategy, mask = Strategy(inner_degree=inner_degree), Mask(8 * world_size, 8 * world_size)
    calls = calls_of(strategy, mask, "contiguous", world_size, None, ("kv", False))
    for rank, call in enumerate(calls):
        for backward, outer in ((False, {"outer"}), (True, {"outer", "outer_gradients"})):
            posts = [*program_of(call, backward=backward).posts()]
            between = [p for p in posts if receiver(p) // inner_degree != rank // inner_degree]
            assert {p.channel for p in between} == outer
            assert between == [p for p in posts if p.channel in outer]
            steps = [p.step for p in between if p.channel == "outer"]
            assert steps == [*range(0, world_size - inner_degree, inner_degree)]
            first = rank // inner_degree * inner_degree
            for post in posts:
                inner = None if post in between else (*range(first, first + inner_degree),)
                assert post.ranks == inner, "NVLink's hops do not share the network's channels"


def test_rounds_that_nobody_needs_are_left_out() -> None:
    layout = SequenceLayout.contiguous(32, 8)
    window = Mask(32, 32, causal=True, window_size=(4, -1))
    order = OneRank((layout, layout), window, 5).order(Grid(2, 4), "kv")
    assert order == ((0, 0), (0, 1), (1, 1))
    documents = Mask(32, 32, True, (-1, -1), (0, 16, 32), (0, 16, 32))
    for call in calls_of(Strategy(inner_degree=4), documents, "contiguous", 8):
        for backward in (False, True):
            for post in program_of(call, backward=backward).posts():
                assert receiver(post) // 4 == call.rank // 4


@pytest.mark.parametrize("strategy", [Strategy(), Strategy("exchange"), Strategy("all_gather")])
def test_programs_are_made_on_the_host(strategy: Strategy) -> None:
    with torch.device("meta"):  # torch's default device, which cannot compute
        for call in calls_of(strategy, Mask(59, 59, True, (7, -1)), "zigzag", 3):
            assert all(program_of(call, backward=backward).ops for backward in (False, True))


def test_plain_data_is_on_the_host() -> None:
    sizes: dict[str, Any] = {"seqlen": 61, "world_size": 3, "nheads": 4, "headdim": 16}
    mask, layout = Mask(61, 61, True, (7, -1)), SequenceLayout.zigzag(61, 3)
    with torch.device("meta"):
        choice = explain(**sizes, window_size=(7, 0), causal=True, cluster=cpu_cluster(3))
        assert sum(layout.mask_area(mask)) == mask.area == int(mask.dense().sum())
        plain = mask.tensor, *mask.tables, layout.position_ids(0)
        assert {x.device.type for x in plain} == {"cpu"}
        assert by_area(mask, 3).seqlen == 61
    assert choice.best.prediction is not None


# -- pictures
