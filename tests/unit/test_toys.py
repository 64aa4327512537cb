"""A strategy from outside the package gets results, bytes, time and pictures.

The strategy `star` sends each shard straight to every other rank, and gradients straight home. It
is one function, written here as a newcomer would write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from ring_attn.core import program as ops
from ring_attn.core.mask import Mask
from ring_attn.core.masks import chunked
from ring_attn.core.ranks import Ranks
from ring_attn.core.sizes import gradient_packet, shard_packet
from ring_attn.core.strategy import CORES, Strategy
from ring_attn.core.tiles import Grid
from ring_attn.machines.actions import schedule_of
from ring_attn.machines.check import check_calls
from ring_attn.machines.count import peak_bytes
from ring_attn.machines.draw import draw
from ring_attn.machines.time import simulate
from ring_attn.planning.devices import builtin_cluster
from ring_attn.strategies import registry
from ring_attn.strategies.base import (
    Call,
    StrategyCode,
    differentiate,
    input_arrays,
    new_sums,
    result_arrays,
    rounded_sums,
    sums_of,
)
from ring_attn.strategies.registry import program_of
from ring_attn.testing import LAYOUTS, Case, run_all_ranks
from tests.unit.test_programs import assert_schedule_is_that_of_each, calls_of, sent


def star(call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True) -> ops.Program:
    arrays = input_arrays(call.spec, ranks, backward=backward)
    todo = tuple(_backward(call, ranks, arrays, rounded) if backward else _forward(call, ranks))
    saved = () if backward else ("q", "k", "v", "out", "lse")
    return ops.Program(ranks.world_size, ranks.rank, backward, todo, arrays, saved)


def _shards(call: Call, ranks: Ranks) -> Iterator[tuple[list[ops.Op], int, tuple]]:
    """Yields receive ops, distance `by` and tensors of each shard, its own shard first."""
    grid = Grid(1, ranks.world_size)
    order = [(0, by) for by in range(ranks.world_size)]
    message = ranks.moving_messages(grid, "kv", partial(shard_packet, call.spec, "kv"), order)
    longest = max(m.nbytes for m in message) if ranks.rank is not None else 0
    mine = ops.Buffer("mine", longest)
    yield [], 0, (ops.View("k"), ops.View("v"))
    for by in range(1, ranks.world_size):
        theirs = ops.Buffer(f"shard {by}", longest)
        rows = ranks.moving(grid, "kv", (0, 0))
        copies = (ops.Copy(0, ops.View("k", rows)), ops.Copy(1, ops.View("v", rows)))
        hop, nbytes = ranks.hop(grid, (0, by)), message[0].nbytes
        sends: list[ops.Op] = [
            ops.Pack(mine, message[0], copies),
            ops.Post("shards", by, hop, mine, theirs, message[by], nbytes),
            ops.Wait("shards"),
            ops.Free((mine,)),
        ]
        yield sends, by, (ops.Entry(theirs, 0), ops.Entry(theirs, 1))


def _forward(call: Call, ranks: Ranks) -> Iterator[ops.Op]:
    spec, grid = call.spec, Grid(1, ranks.world_size)
    results = result_arrays(spec, ranks.rows("q"))
    state = ops.Array(spec.batch, ranks.rows("q"), spec.nheads, spec.headdim_v, spec.accum_dtype)
    yield ops.Start(ops.View("q"), spec.headdim_v, state, slice(None))
    for sends, by, (k, v) in _shards(call, ranks):
        yield ops.Step(f"step {by}", by)
        yield from sends
        yield ops.Attend(ranks.tiles(grid, "kv", (0, by)), ops.View("q"), k, v)
        if by:
            yield ops.Free((k.buffer,))
    yield ops.Finish("out", "lse", results["out"], results["lse"])


def _backward(
    call: Call, ranks: Ranks, arrays: dict[str, ops.Array], rounded: bool
) -> Iterator[ops.Op]:
    grid, grads = Grid(1, ranks.world_size), sums_of(call.spec, arrays)
    make, order = partial(gradient_packet, call.spec, "kv"), [(0, r) for r in range(grid.inner)]
    messages = ranks.moving_messages(grid, "kv", make, order)
    yield ops.Delta(arrays["lse"])
    yield from new_sums(grads)
    for sends, by, kv in _shards(call, ranks):
        yield ops.Step(f"step {by}", by)
        yield from sends
        sums = ops.Buffer(f"sums {by}", 0 if ranks.rank is None else 1 << 20)
        message, home = messages[by], messages[0]
        dkv: tuple = (ops.View("dk sum"), ops.View("dv sum"))
        if by:
            yield ops.Clear(sums, message)
            dkv = ops.Entry(sums, 0), ops.Entry(sums, 1)
        yield differentiate("kv", ranks.tiles(grid, "kv", (0, by)), kv, dkv, own=not by)
        if by:
            theirs = ops.Buffer(f"home {by}", sums.room)
            hop, rows = ranks.hop(grid, (0, -by)), ranks.moving(grid, "kv", (0, 0))
            yield ops.Post("gradients", by, hop, sums, theirs, home, message.nbytes)
            yield ops.Wait("gradients")
            yield ops.Free((kv[0].buffer, sums))
            views = (ops.View("dk sum", rows), ops.View("dv sum", rows))
            copies = tuple(ops.Copy(i, view, None, True) for i, view in enumerate(views))
            yield ops.Unpack(theirs, home, copies)
    yield from rounded_sums(grads, call.spec, rounded=rounded)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry.register("star", StrategyCode(star, lambda call: "a star adds gradients up"))
    yield
    CORES.remove("star")
    del registry._CODES["star"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("around", [1, 2])
def test_results_are_right(layout: str, around: int) -> None:
    strategy = Strategy("star", ulysses_degree=around)
    masks = ("causal", "window", "documents", "longer kv", "empty rows", "chunked")
    for turn, mask in enumerate(masks):
        dtype = ("float32", "bfloat16")[turn % 2]
        case = Case(mask, layout, strategy, "reference", dtype, seqlen=61, batch=1, sinks=turn > 2)
        assert not run_all_ranks(case, 4).failures


@pytest.mark.parametrize("backward", [False, True])
def test_checked_counted_timed_and_drawn(backward: bool) -> None:
    for mask in (Mask(96, 96, causal=True), chunked(96, 20)):
        calls = calls_of(Strategy("star"), mask, "zigzag", 4)
        assert check_calls(calls, backward=backward) == []
        assert {one.messages for one in sent(calls, backward=backward)} == {6 if backward else 3}
        assert_schedule_is_that_of_each(calls, backward=backward)
        schedule = schedule_of(calls[0], backward=backward)
        for call in calls:
            drawn = draw(program_of(call, backward=backward))
            assert drawn.count("post ") == (6 if backward else 3)
            assert peak_bytes(call, backward=backward) > 0
        assert simulate(schedule, builtin_cluster("H100")).seconds > 0


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="'star' is registered already"):
        registry.register("star", StrategyCode(star, lambda call: None))
    with pytest.raises(ValueError, match="core must be one of .*'star'"):
        Strategy("comet")
