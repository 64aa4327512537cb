"""Peak memory of a call is as predicted, and a ring's peak does not grow with the ranks."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from ring_attn.attention import drivers
from ring_attn.backends import get_backend
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.call import Call
from ring_attn.core import masks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Channel, Op
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.state import rounded_gradient
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side
from ring_attn.machines import count
from ring_attn.machines.run import Run
from ring_attn.planning.memory import peak_of
from ring_attn.profiling import peak_bytes
from ring_attn.strategies.registry import both_programs
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.strategies.tree_decode import make_call as make_decode
from ring_attn.transport.base import Batch, Transport
from tests.unit.test_programs import calls_of

# Issue 32 asks for peaks within 10 % of the prediction.
SHARE = 0.10
# Each op alone is counted more exactly, without kernels.
SHARE_OF_AN_OP = 0.03
ROWS = 128


class Echo(Transport):
    """A transport, for any number of ranks, that delivers zeros."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        super().__init__(tuple(range(world_size)), rank)

    def _among(self, members: tuple[int, ...]) -> Echo:
        return Echo(len(members), members.index(self.members[self.rank]))

    def _exchange(self, batch: Batch) -> None:
        for _, into in batch.receives:
            into.zero_()
        self.pending[batch.channel] = batch

    def wait(self, channel: Channel) -> None:
        batch = self.pending.pop(channel)
        if batch.finish is not None:
            batch.finish()


def calls(
    strategy: Strategy,
    world_size: int,
    gradients: tuple[Side, bool] | None = None,
    *,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    nheads_kv: int = 8,
    backend: str = "aten",
    rows: int = ROWS,
) -> list[Call]:
    mask = masks.causal(rows * world_size)
    spec = AttentionSpec("cpu", dtype, 1, 8, nheads_kv, 64, 64)
    return calls_of(strategy, mask, layout, world_size, spec, gradients, backend)


def tensors_of(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Return q, k, v and dout of the rank's rows, and a transport."""
    spec, rows = call.spec, call.layouts[0].shard_len(call.rank)
    q, dout = (torch.randn(1, rows, spec.nheads, 64).to(spec.dtype) for _ in range(2))
    k, v = (torch.randn(1, rows, spec.nheads_kv, 64).to(spec.dtype) for _ in range(2))
    return q, k, v, dout, Echo(call.world_size, call.rank)


def measured(call: Call, *, backward: bool) -> int:
    q, k, v, dout, transport = tensors_of(call)

    def work() -> object:
        result = drivers.forward(call, q, k, v, transport)
        if not backward:
            return result
        return result, drivers.backward(call, result.saved, dout, transport)

    return peak_bytes(work)


# The side that is sent in a ring's backward, and whether gradients are continued rank by rank.
ORDERS: list[tuple[Side, bool]] = [("kv", False), ("q", False), ("kv", True)]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips kernels, since Triton's interpreter takes memory."""
    monkeypatch.setattr(KeptLaunches, "run", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("strategy", "order"),
    [*product([Strategy(), Strategy(inner_degree=2)], ORDERS), (Strategy("exchange"), None)],
    ids=str,
)
def test_nothing_grows_with_the_ranks(strategy: Strategy, order: tuple[Side, bool] | None) -> None:
    last = [calls(strategy, n, order)[-1] for n in (8, 16, 32)]
    for backward in (False, True):
        peaks = {count.peak_bytes(both_programs(x, backward=backward), x) for x in last}
        assert len(peaks) == 1


RING = Strategy()
CELLS: dict[str, tuple[int, Strategy, Any]] = {
    "ring of one": (1, RING, ORDERS[0]),
    **{f"ring of {n}, {order}": (n, RING, order) for n in (2, 4) for order in ORDERS},
    **{f"double ring, {order}": (6, Strategy(inner_degree=2), order) for order in ORDERS},
    "double ring of 8": (8, Strategy(inner_degree=4), ORDERS[1]),
    "all_gather of one": (1, Strategy("all_gather"), None),
    "all_gather": (2, Strategy("all_gather"), None),
    "all_gather, in order": (2, Strategy("all_gather"), ("kv", True)),
    "all_gather, two heads": (4, Strategy("all_gather", heads_per_chunk=2), None),
    "all_gather, two heads, in order": (4, Strategy("all_gather", heads_per_chunk=2), ("kv", True)),
    "all_gather, four heads": (4, Strategy("all_gather", heads_per_chunk=4), None),
    "ulysses": (4, Strategy(ulysses_degree=4), None),
    "ulysses of three": (3, Strategy(ulysses_degree=3), None),
    "hybrid": (4, Strategy(ulysses_degree=2), None),
    "hybrid of threes": (6, Strategy(ulysses_degree=3), None),
    "exchange": (4, Strategy("exchange"), None),
    "hybrid all_gather": (4, Strategy("all_gather", ulysses_degree=2), None),
    "q_exchange": (4, Strategy("all_gather", exchange_q=True), None),
    "q_exchange ring": (4, Strategy("ring", exchange_q=True), None),
}


def assert_holds(ranks: list[Call], *, backward: bool) -> None:
    most = [measured(call, backward=backward) for call in ranks]
    assert max(most) == pytest.approx(peak_of(ranks[0], backward=backward).call, rel=SHARE)
    strategy = ranks[0].strategy
    if strategy.core == "ring" and strategy.ulysses_degree == 1:
        both = both_programs(ranks[-1], backward=backward)
        assert most[-1] == pytest.approx(count.peak_bytes(both, ranks[-1]), rel=SHARE)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("nheads_kv", [4, 1])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.sweep(7)
def test_every_strategy_holds_what_is_predicted(
    layout: str, nheads_kv: int, name: str, no_kernels: None
) -> None:
    world_size, strategy, order = CELLS[name]
    layout = "contiguous" if strategy.exchange_q else layout  # the only one
    sizes: dict[str, Any] = {"layout": layout, "nheads_kv": nheads_kv, "backend": "triton"}
    for backward in (False, True):
        assert_holds(calls(strategy, world_size, order, **sizes), backward=backward)


# Methods of `machines.run.Run` that run one op each, but not those that run other ops.
RUNS = [name for name in vars(Run) if name in {op.__name__.lower() for op in get_args(Op)}]


def measured_ops(call: Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the peak bytes during each op of a forward and a backward: "forward 3 attend"."""

    def noted(name: str, run_op: Any) -> Any:
        def method(run: Run, op: Op) -> None:
            direction = "backward" if run.program.backward else "forward"
            with record_function(f"op {direction} {run.index} {name}"):
                run_op(run, op)

        return method

    for name in RUNS:
        monkeypatch.setattr(Run, name, noted(name, getattr(Run, name)))
    q, k, v, dout, transport = tensors_of(call)
    # The first call of a process makes values that stay.
    drivers.backward(call, drivers.forward(call, q, k, v, transport).saved, dout, transport)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        done = drivers.forward(call, q, k, v, transport)
        grads = drivers.backward(call, done.saved, dout, transport)
    del done, grads
    events = run.profiler.kineto_results.events()
    allocations = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name().removeprefix("op "))
        for e in events
        if e.name().startswith("op ")
    )
    peaks = {}
    held = position = 0
    for start, stop, name in spans:
        while position < len(allocations) and allocations[position][0] < start:
            held += allocations[position][1]
            position += 1
        peak = held
        while position < len(allocations) and allocations[position][0] <= stop:
            held += allocations[position][1]
            peak = max(peak, held)
            position += 1
        peaks[name] = peak
    return peaks


def predicted_ops(call: Call) -> dict[str, int]:
    """Return what `count` says of the same."""
    forward, backward = both_programs(call, backward=True)
    backend = get_backend(call.backend)
    memory = count.Memory(forward, call.spec, backend, dict(forward.arrays), 0)
    peaks = op_peaks(memory, "forward")
    arrays = {name: memory.arrays[name] for name in (*forward.saved, "out", "lse")}
    held = sum(x.nbytes for name, x in arrays.items() if name in memory.own)
    arrays["dout"] = backward.arrays["dout"]
    memory = count.Memory(backward, call.spec, backend, arrays, held)
    return peaks | op_peaks(memory, "backward")


def op_peaks(memory: count.Memory, direction: str) -> dict[str, int]:
    peaks = {}
    for index, op in enumerate(memory.program.ops):
        memory.index, memory.peak = index, memory.held
        memory.do(op)
        peaks[f"{direction} {index} {type(op).__name__.lower()}"] = memory.peak
    return peaks


OPS_OF: dict[str, tuple[Strategy, Any]] = {
    **{f"ring, {order}": (RING, order) for order in ORDERS},
    "double ring": (Strategy(inner_degree=2), ("kv", False)),
    "all_gather": (Strategy("all_gather"), None),
    "exchange": (Strategy("exchange"), None),
}


@pytest.mark.parametrize("name", OPS_OF)
def test_every_op_takes_what_is_counted(
    name: str, no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that an op makes, and `count` does not know, is found also beside a larger peak."""
    strategy, order = OPS_OF[name]
    call = calls(strategy, 4, order, nheads_kv=4, backend="triton")[1]
    with monkeypatch.context() as patch:
        found = measured_ops(call, patch)
    counted = predicted_ops(call)
    compared = found.keys() & counted.keys()
    assert {name.split()[-1] for name in compared} >= {"attend", "differentiate", "post", "finish"}
    for op in compared:
        # Numbers of calls and other scalars have a few bytes.
        assert counted[op] == pytest.approx(found[op], rel=SHARE_OF_AN_OP, abs=1024), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "rows"), [("aten", 1024), ("reference", 300)])
def test_a_backend_takes_what_is_predicted(backend: str, rows: int, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"dtype": dtype, "nheads_kv": 2, "backend": backend, "rows": rows}
    for backward in (False, True):
        assert_holds(calls(RING, 2, **sizes), backward=backward)


# A number of the forward has 8 bytes, and torch makes a tensor of 12 of a factor.
NUMBERS = (0, 8, 12, 20)
EXACT = {
    "ring": RING,
    "all_gather": Strategy("all_gather"),
    "exchange": Strategy("exchange"),
    "ulysses of two": Strategy(ulysses_degree=2),
    "ulysses of three": Strategy(ulysses_degree=3),
}
# The scores of 48 or 72 keys are more than a row of 16; the rows of a batch lie apart.
EXACT_CASES = [
    (name, world_size, batch)
    for name, world_size, batch in product(EXACT, (2, 3), (1, 2))
    if EXACT[name].ulysses_degree in (1, world_size)
]


def exact_call(name: str, world_size: int, batch: int, dtype: torch.dtype, backend: str) -> Call:
    heads, rows = 2 * world_size, 24
    spec = AttentionSpec("cpu", dtype, batch, 2 * heads, heads, 16, 16)
    mask = Mask(rows * world_size, rows * world_size)
    return calls_of(EXACT[name], mask, "contiguous", world_size, spec, None, backend)[1]


def measured_without_lse(call: Call, *, backward: bool) -> int:
    """Return the peak of a call whose user does not keep lse."""
    spec, transport = call.spec, Echo(call.world_size, call.rank)
    q, k, v, dout = (
        torch.randn(spec.batch, 24, heads, 16).to(spec.dtype)
        for heads in (spec.nheads, spec.nheads_kv, spec.nheads_kv, spec.nheads)
    )

    def work() -> object:
        out, _, saved, _ = drivers.forward(call, q, k, v, transport)
        del _
        return out, saved, drivers.backward(call, saved, dout, transport) if backward else ()

    work()  # the first call of a process makes values that stay
    return peak_bytes(work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "world_size", "batch"), EXACT_CASES)
def test_peaks_of_16_bits_are_exact(
    name: str, world_size: int, batch: int, dtype: torch.dtype
) -> None:
    """Copies in float32, and those that torch's einsum makes, are counted, too."""
    call = exact_call(name, world_size, batch, dtype, "reference")
    for backward in (False, True):
        found = measured_without_lse(call, backward=backward)
        predicted = count.peak_bytes(both_programs(call, backward=backward), call)
        assert found - predicted in NUMBERS, backward


@pytest.mark.parametrize(("name", "world_size", "batch"), EXACT_CASES)
def test_peaks_without_kernels_are_exact(
    name: str, world_size: int, batch: int, no_kernels: None
) -> None:
    """all_gather copies the statistics of some heads of a batch; Ulysses does not keep lse."""
    call = exact_call(name, world_size, batch, torch.float32, "triton")
    for backward in (False, True):
        found = measured_without_lse(call, backward=backward)
        predicted = count.peak_bytes(both_programs(call, backward=backward), call)
        assert found - predicted in NUMBERS, backward


@pytest.mark.parametrize("size", [300, 24])
def test_a_step_of_several_pieces_holds_a_state_beside_them(size: int) -> None:
    spec, mask = AttentionSpec("cpu", torch.float32, 1, 8, 2, 64, 64), masks.chunked(1024, size)
    ranks = calls_of(RING, mask, "contiguous", 1, spec, None, "reference")
    for backward in (False, True):
        assert_holds(ranks, backward=backward)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decoding_copies_neither_keys_nor_values(
    dtype: torch.dtype, batch: int, no_kernels: None
) -> None:
    q = torch.zeros(batch, 4, 8, 64, dtype=dtype)
    k, v = torch.zeros(2, batch, 4096, 2, 64, dtype=dtype)
    call = make_decode(AttentionSpec.of(q, k, v), backend="triton")
    mask = Mask(4, 4096, causal=True)
    tiles = decode_tiles(SequenceLayout.contiguous(4096, 1).segments(0), mask)
    transport: Any = Echo(1)
    most = peak_bytes(lambda: drivers.decode(call, tiles, q, k, v, transport))
    assert most < k.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_takes_the_result_alone(dtype: torch.dtype) -> None:
    grad = torch.linspace(-1, 1, 4096).view(1, 64, 1, 64)
    expected = (0.7 * grad).to(dtype)
    assert torch.equal(rounded_gradient(grad.clone(), dtype, 0.7), expected)
    assert peak_bytes(lambda: rounded_gradient(grad, dtype, 0.7)) == expected.nbytes
