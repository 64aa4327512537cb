"""A strategy and a mask from outside the package: results, bytes, time and pictures come with them.

The strategy `star` sends each shard straight to every other rank, and gradients straight home. It
is one function, written here as a newcomer would write it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import (
    Array,
    Attend,
    Buffer,
    Clear,
    Copy,
    Delta,
    Differentiate,
    Entry,
    Finish,
    Free,
    New,
    Op,
    Pack,
    Post,
    Program,
    Round,
    Start,
    Step,
    Unpack,
    View,
    Wait,
)
from ring_attn.core.ranks import Ranks
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Strategy
from ring_attn.core.tiles import Grid
from ring_attn.machines.actions import schedule_of
from ring_attn.machines.check import check_calls
from ring_attn.machines.count import bytes_sent, num_messages, peak_bytes
from ring_attn.machines.draw import draw
from ring_attn.machines.time import simulate
from ring_attn.planning.devices import builtin_cluster
from ring_attn.strategies import registry
from ring_attn.strategies.base import Call, StrategyCode, input_arrays, result_arrays
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.testing import LAYOUTS, Case, run_all_ranks

# -- the strategy


def star(call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True) -> Program:
    arrays = input_arrays(call.spec, ranks, backward=backward)
    ops = tuple(_backward(call, ranks, arrays, rounded) if backward else _forward(call, ranks))
    saved = () if backward else ("q", "k", "v", "out", "lse")
    return Program(ranks.world_size, ranks.rank, backward, ops, arrays, saved)


def _shards(call: Call, ranks: Ranks) -> Iterator[tuple[list[Op], int, tuple]]:
    """Ops that bring the shard of the rank `by` before, and its tensors; the own one first."""
    grid = Grid(1, ranks.world_size)
    messages = ranks.moving_messages(grid, "kv", call.spec.kv_packet)
    message = [messages((0, by)) for by in range(ranks.world_size)]
    longest = max(m.nbytes for m in message) if ranks.rank is not None else 0
    mine = Buffer("mine", longest)
    yield [], 0, (View("k"), View("v"))
    for by in range(1, ranks.world_size):
        theirs = Buffer(f"shard {by}", longest)
        rows = ranks.moving(grid, "kv", (0, 0))
        copies = (Copy(0, View("k", rows)), Copy(1, View("v", rows)))
        hop, nbytes = ranks.hop(grid, (0, by)), message[0].nbytes
        ops: list[Op] = [
            Pack(mine, message[0], copies),
            Post("shards", by, hop, mine, theirs, message[by], nbytes),
            Wait("shards"),
            Free((mine,)),
        ]
        yield ops, by, (Entry(theirs, 0), Entry(theirs, 1))


def _forward(call: Call, ranks: Ranks) -> Iterator[Op]:
    spec, grid = call.spec, Grid(1, ranks.world_size)
    results = result_arrays(spec, ranks.rows("q"))
    state = Array(spec.batch, ranks.rows("q"), spec.nheads, spec.headdim_v, spec.accum_dtype)
    yield Start(View("q"), spec.headdim_v, state, slice(None))
    for ops, by, (k, v) in _shards(call, ranks):
        yield Step(f"step {by}", by)
        yield from ops
        yield Attend(ranks.tiles(grid, "kv", (0, by)), View("q"), k, v)
        if by:
            yield Free((k.buffer,))
    yield Finish("out", "lse", results["out"], results["lse"])


def _backward(call: Call, ranks: Ranks, arrays: dict[str, Array], rounded: bool) -> Iterator[Op]:
    spec, grid = call.spec, Grid(1, ranks.world_size)
    yield Delta(arrays["lse"])
    for name in ("q", "k", "v"):
        x = arrays[name]
        yield New(f"d{name} sum", Array(x.batch, x.rows, x.heads, x.dim, spec.accum_dtype), True)
    q_side = tuple(View(name) for name in ("q", "dout", "lse", "delta"))
    for ops, by, kv in _shards(call, ranks):
        yield Step(f"step {by}", by)
        yield from ops
        sums = Buffer(f"sums {by}", 0 if ranks.rank is None else 1 << 20)
        messages = ranks.moving_messages(grid, "kv", spec.kv_grad_packet)
        message = messages((0, by))
        dkv: tuple = (View("dk sum"), View("dv sum"))
        if by:
            yield Clear(sums, message)
            dkv = Entry(sums, 0), Entry(sums, 1)
        tiles = ranks.tiles(grid, "kv", (0, by))
        yield Differentiate("all", tiles, q_side, kv, View("dq sum"), dkv, View("out"))
        if by:
            home = messages((0, 0))
            theirs = Buffer(f"home {by}", sums.room)
            rows = ranks.moving(grid, "kv", (0, 0))
            hop = ranks.hop(grid, (0, -by))
            yield Post("gradients", by, hop, sums, theirs, home, message.nbytes)
            yield Wait("gradients")
            yield Free((kv[0].buffer, sums))
            names = ("dk sum", "dv sum")
            yield Unpack(
                theirs, home, tuple(Copy(i, View(n, rows), None, True) for i, n in enumerate(names))
            )
    dtype = spec.dtype if rounded else spec.accum_dtype
    for name in ("v", "k", "q"):
        x = arrays[name]
        array = Array(x.batch, x.rows, x.heads, x.dim, dtype)
        yield Round(View(f"d{name}"), View(f"d{name} sum"), array, scaled=name != "v")


# -- the mask


def chunked(seqlen: int, size: int) -> Mask:
    """Causal within chunks of so many positions, as in layers of Llama 4."""
    cuts = (*range(0, seqlen, size), seqlen)
    return Mask(seqlen, seqlen, True, (-1, -1), cuts, cuts)


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
    masks = ("causal", "window", "documents", "longer kv", "empty rows", chunked(61, 10))
    for turn, mask in enumerate(masks):
        dtype = ("float32", "bfloat16")[turn % 2]
        case = Case(mask, layout, strategy, "reference", dtype, seqlen=61, batch=1, sinks=turn > 2)
        assert not run_all_ranks(case, 4).failures


def calls_of(mask: Mask, world_size: int = 4) -> list[Call]:
    layout = SequenceLayout.zigzag(mask.seqlen_q, world_size)
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 4, 2, 16, 16)
    return [
        make_call(Strategy("star"), spec, (layout, layout), mask, rank, backend="reference")
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("backward", [False, True])
def test_checked_counted_timed_and_drawn(backward: bool) -> None:
    for mask in (Mask(96, 96, causal=True), chunked(96, 20)):
        calls = calls_of(mask)
        assert check_calls(calls, backward=backward) == []
        schedule = schedule_of(calls[0], backward=backward)
        for rank, call in enumerate(calls):
            program = program_of(call, backward=backward)
            assert num_messages(program) == (6 if backward else 3)
            assert int(schedule.bytes_sent[rank]) == bytes_sent(program) > 0
            assert draw(program).count("post ") == num_messages(program)
            assert peak_bytes(call, backward=backward) > 0
        assert simulate(schedule, builtin_cluster("H100")).seconds > 0


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="'star' is registered already"):
        registry.register("star", StrategyCode(star, lambda call: None))
    with pytest.raises(ValueError, match="core must be one of .*'star'"):
        Strategy("comet")
