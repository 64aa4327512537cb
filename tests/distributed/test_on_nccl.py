"""Calls between processes over NCCL, on ranks that share one GPU; and over gloo without a GPU.

    pytest --nccl hostid tests/distributed       each rank is a node: TCP, with every NCCL
    LD_PRELOAD=.../libnccl.so.2 pytest --nccl multi tests/distributed       one node, NCCL >= 2.30

Results are compared with the local ring on the same device, errors with what docs/failures.md
promises. Nothing here is timed: ranks that share a GPU take it in turns.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ring_attn import (
    SequenceLayout,
    TransportOptions,
    check,
    ring_attention,
    sync_gradients,
    tree_decode,
)
from ring_attn.backends.reference import ReferenceBackend
from ring_attn.core.mask import Mask
from ring_attn.core.program import CHANNELS, Hop
from ring_attn.testing import (
    STRATEGIES,
    Case,
    Heads,
    noisy_runs,
    plain_attention,
    run_all_ranks,
    run_rank,
)
from ring_attn.testing.cases import strategy_of
from ring_attn.transport import p2p, streams
from ring_attn.transport.base import Agreement
from ring_attn.transport.p2p import P2PTransport, open_p2p
from ring_attn.transport.ranks.links import NcclLink
from tests.bounds import assert_close
from tests.distributed.differing import DIFFERENT, HAPPENED, call, do
from tests.distributed.pool import (
    Ended,
    Pools,
    RankError,
    backend,
    calls_within,
    device,
    ended,
    everyone,
    mesh_of,
    on_ranks,
)

pytestmark = pytest.mark.nccl

Group = dist.ProcessGroup | None

# Rows of a rank, by the device: one that shares its cores with other tests gets few.
ROWS = {"cpu": 32, "cuda": 512}


# -- strategies, forward and backward

CASES = [
    (strategy, layout, world_size)
    for strategy in STRATEGIES
    for layout in ("zigzag", "contiguous")
    for world_size in (2, 4)
    if world_size == 4 or strategy in ("ring", "all_gather", "exchange", "ulysses", "q_exchange")
    if (strategy, layout) != ("q_exchange", "zigzag")
    if strategy != "auto"  # is one of the others
]


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("strategy", "layout", "world_size"), CASES)
def test_processes_have_the_bits_of_the_local_ring(
    ranks: Pools, one_thread: None, strategy: str, layout: str, world_size: int
) -> None:
    seqlen = world_size * ROWS[ranks.device]
    case = Case("causal", layout, strategy, "reference", seqlen=seqlen)
    run = partial(run_all_ranks, case, world_size, device=ranks.device)
    got, again = (run(ranks(world_size).run) for _ in range(2))
    assert not got.failures, got.failures
    assert got.differing(again) == []
    # NCCL sums the gradients of an all-gather in an order of its own.
    summed = ranks.nccl is not None and "all_gather" in strategy and world_size > 2
    assert set(got.differing(run())) <= ({"dk", "dv"} if summed else set())


@pytest.mark.slow
@on_ranks(4)
def test_one_communicator_has_the_bits_of_two() -> None:
    """Shards and gradients in one exchange; messages of one call cannot be those of another."""
    x = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    found, counts = [], []
    for one in (True, False):
        group, given = dist.new_group(), x.to(device()).requires_grad_()
        options = TransportOptions(one_communicator=one)
        attend = partial(ring_attention, group=group, transport=options, backend=backend())
        for _ in range(2):
            out = attend(given, given, given, causal=True, same_bits=False)
            found.append([out, *torch.autograd.grad(out.square().sum(), given)])
        check(group)
        links = p2p.rank_group(group).connection.links.values()
        counts.append([len(link.channels) for link in links if isinstance(link, NcclLink)])
        dist.destroy_process_group(group)
    pairs = [pair for other in found[1:] for pair in zip(found[0], other, strict=True)]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert counts == ([[1], [2]] if streams.are_used(device()) else [[], []])


# -- messages of all sizes

KIB, MIB = 1 << 10, 1 << 20
SIZES = [0, 64, 8 * KIB, 16 * KIB - 64, 16 * KIB, 16 * KIB + 64, 128 * KIB]
# Around these NCCL changes the number of its channels; gloo has no such limit.
LARGE_SIZES = [16 * MIB - 64, 16 * MIB + 64, 40 * MIB]


def numbered(nbytes: int, rank: int, lane: int) -> Tensor:
    """Bytes that tell their place, the rank that sends them, and the lane."""
    factor = 2 * rank + 5 * lane + 3
    return (torch.arange(nbytes, dtype=torch.int32, device=device()) * factor % 251).byte()


@pytest.mark.slow
@on_ranks(2)
def test_messages_of_all_sizes_arrive() -> None:
    rank, world_size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    transport = open_p2p(world, TransportOptions())
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    header = transport.pool(device()).header
    with transport.call("exchange of sizes", Agreement({}), device()):
        for step, nbytes in enumerate(SIZES + LARGE_SIZES * (device().type == "cuda")):
            received = []
            for lane, channel in enumerate(CHANNELS):
                space = torch.zeros(header, dtype=torch.uint8, device=device())
                message = torch.cat((space, numbered(nbytes, rank, lane)))
                received.append(torch.full_like(message, 255))
                transport.post(channel, step, Hop(after, before), message, received[lane])
            for lane, channel in enumerate(CHANNELS):
                transport.wait(channel)
                expected = numbered(nbytes, before, lane)
                assert torch.equal(received[lane][header:], expected), (nbytes, channel)
    transport.check()


# -- ranks that are late and early

TRIALS = {"cpu": 2, "cuda": 13}
# Of a delay: cycles of the GPU, about 2 ms; and seconds of the host.
CYCLES, SECONDS = 4_000_000, 2e-3


@contextmanager
def delays(seed: str) -> Iterator[None]:
    """Delays some posts, exchanges and attentions of this rank, on their streams."""
    drawn = random.Random(seed)

    def delay() -> None:
        if drawn.random() > 0.3:
            return
        if device().type == "cuda":
            torch.cuda._sleep(drawn.randrange(CYCLES))
        else:
            time.sleep(SECONDS * drawn.random())

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def after_delay(*args: Any, **keywords: Any) -> Any:
            delay()
            return function(*args, **keywords)

        return after_delay

    places = [(P2PTransport, "post"), (p2p, "coalesced")]
    places += [(ReferenceBackend, "forward_piece"), (ReferenceBackend, "backward_piece")]
    for owner, name in places:
        patched = mock.patch.object(owner, name, late(getattr(owner, name)))
        patched.start()
    try:
        yield
    finally:
        mock.patch.stopall()


def bits_that_delays_change(case: Case, trials: int) -> list[int]:
    """The trials in which a result differs from that without delays."""
    usual, changed = run_rank(case, device()), []
    for trial in range(trials):
        with delays(f"{dist.get_rank()} {trial}"):
            got = run_rank(case, device())
        if not all(map(torch.equal, got.tensors, usual.tensors)):
            changed.append(trial)
    check()
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "double_ring", "exchange", "hybrid"])
def test_delays_change_no_bit(ranks: Pools, strategy: str) -> None:
    case = Case("causal", "zigzag", strategy, "reference", seqlen=4 * ROWS[ranks.device])
    changed = ranks(4).run(bits_that_delays_change, case, TRIALS[ranks.device])
    assert changed == 4 * [[]]


@pytest.mark.nccl(only=True)
@pytest.mark.parametrize("ctas", [8, 16])
@pytest.mark.parametrize(("strategy", "world_size"), [("ring", 2), ("double_ring", 4)])
def test_a_persistent_kernel_beside_exchanges_ends(
    ranks: Pools, strategy: str, world_size: int, ctas: int
) -> None:
    """With one exchange under way, and with two; NCCL has so many blocks for each."""
    heads = Heads(8, 2, 128, 128)
    case = Case("causal", "zigzag", strategy, "triton", "bfloat16", heads, seqlen=2048, batch=1)
    with ranks.fresh(world_size, environment={"NCCL_MAX_CTAS": str(ctas)}) as pool:
        got = run_all_ranks(case, world_size, partial(pool.run, timeout=200.0), device="cuda")
    assert not got.failures, got.failures


# -- CUDA graphs

REPLAYS = 10
LAYOUT = SequenceLayout.zigzag(2 * 128, 2)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device()).manual_seed(dist.get_rank())
    return [torch.randn(shape, device=device(), generator=generator) for shape in shapes]


def train(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Forward and backward of a call: out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, causal=True, layout=LAYOUT, backend="reference", **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def generate(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The result of a decode; all ranks have the queries of rank 0."""
    return (tree_decode(q, k, v, layout=LAYOUT, backend="reference", **options),)


def captured(
    step: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of a step, and the results that its replays fill."""
    step(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*inputs)
    return graph, results


@pytest.mark.nccl(only=True)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "decode"])
@on_ranks(2)
def test_replays_have_the_bits_of_calls(strategy: str) -> None:
    rows = LAYOUT.shard_len(dist.get_rank())
    group = dist.new_group()
    if strategy == "decode":
        step, shapes = partial(generate, group=group), [(1, 1, 4, 32), *2 * [(1, rows, 2, 32)]]
    else:
        step = partial(train, group=group, strategy=strategy)
        shapes = [(1, rows, 4, 32), *2 * [(1, rows, 2, 32)], (1, rows, 4, 32)]
    inputs = drawn(*shapes)
    graph, results = captured(step, inputs)
    for replay in range(REPLAYS):
        for x in inputs:
            x.mul_(0.9).add_(0.01 * (replay + 1))
        if strategy == "decode":
            dist.broadcast(inputs[0], 0)
        graph.replay()
        replayed = [x.clone() for x in results]
        assert all(map(torch.equal, replayed, step(*inputs))), replay
    check(group)
    del graph
    dist.destroy_process_group(group)


@pytest.mark.nccl(only=True)
@on_ranks(2)
def test_replays_of_different_graphs_are_found_at_the_next_check() -> None:
    rows, group = LAYOUT.shard_len(dist.get_rank()), dist.new_group()
    inputs = drawn(*4 * [(1, rows, 4, 32)])
    graphs = [
        captured(partial(train, group=group, softmax_scale=scale), inputs)[0]
        for scale in (0.25, 0.5)
    ]
    check(group)
    graphs[dist.get_rank()].replay()
    reported = everyone(ended(partial(check, group)))
    assert all(map(is_reported, reported)), reported
    del graphs
    dist.destroy_process_group(group)


# -- ranks that differ

# Differences that change no size: NCCL matches messages by their order and size only.
DIFFERENCES = (
    "values of sinks",
    "softmax_scale",
    "mask",
    "skipped",
    "backwards swapped",
    "backward left out",
)


def is_reported(end: Ended) -> bool:
    """Whether a call ended by an error about other ranks."""
    return end.error is not None and issubclass(end.error, RuntimeError)


def called_and_checked(run: Callable[[], object], group: Group) -> None:
    run()
    check(group)


# Texts of errors about ranks whose calls differ, on gloo.
IN_DIFFERENT_CALLS = (
    "disagree on the call|are in different calls|refused the call|backwards in different orders|"
    "skipped a backward"
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "exchange"])
@on_ranks(4)
def test_ranks_that_differ_raise_by_the_next_check(strategy: str) -> None:
    odd = dist.get_rank() == 2
    for name in DIFFERENCES:
        group = dist.new_group()
        how = {"strategy": strategy_of(strategy, 4)}
        if name in DIFFERENT:
            run = partial(call, group, **how | DIFFERENT[name][odd])
        else:
            run = partial(do, group, HAPPENED[name][odd], **how)
        reported = everyone(ended(partial(called_and_checked, run, group)))
        dist.destroy_process_group(group)
        assert all(map(is_reported, reported)), (name, reported)
        # Also of ranks that wait for the others' first backward.
        words = "messages of another call" if streams.are_used(device()) else IN_DIFFERENT_CALLS
        named = all(re.search(words, one.text) for one in reported)
        assert named or name == "backward left out", (name, reported)


# -- ranks that fail

VICTIM = 1
TIMEOUT = 3.0


def raise_an_error() -> NoReturn:
    raise MemoryError("out of memory")


def exit_without_destroy() -> None:
    atexit._run_exitfuncs()
    os._exit(1)


FAULTS: dict[str, Callable[[], object]] = {
    "killed": partial(signal.raise_signal, signal.SIGKILL),
    "stopped": partial(signal.raise_signal, signal.SIGSTOP),
    "raises": raise_an_error,
    "interrupted": partial(signal.raise_signal, signal.SIGINT),
    "exits": exit_without_destroy,
}
LOST = ("killed", "stopped", "exits")  # the victim tells nothing any more
# Part of the job -> the function of the package at which the fault strikes.
PARTS = {"first call": "connect", "forward": "start_batch", "backward": "start_batch"}


def train_until(part: str, strike: Callable[[], object] | None) -> None:
    """A step, at whose `part` the fault strikes, until its results may be used."""

    def here(name: str) -> Any:
        if strike is None or part not in name:
            return nullcontext()
        return calls_within(0, strike, PARTS[part])

    options = TransportOptions(timeout=TIMEOUT)
    x = torch.ones(1, 16, 2, 8, device=device(), requires_grad=True)
    with here("first call, forward"):
        out = ring_attention(x, x, x, transport=options, backend=backend())
    # In this thread, where `calls_within` sees it.
    with torch.autograd.set_multithreading_enabled(False), here("backward"):
        torch.autograd.grad(out.sum(), x)
    check()


def after_a_fault(fault: str, part: str) -> Ended:
    """How this rank's step ends, in which the fault strikes the victim."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if part != "first call":
        train_until(part, None)
    strike = FAULTS[fault] if dist.get_rank() == VICTIM else None
    return ended(partial(train_until, part, strike))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", PARTS)
def test_a_rank_that_fails_ends_the_others(ranks: Pools, part: str, fault: str) -> None:
    """They raise before results may be used; on NCCL torch's watchdog may end their process."""
    with ranks.fresh(2) as pool:
        pool.start(after_a_fault, fault, part)
        try:
            ends = pool.results(lost=[VICTIM] if fault in LOST else (), timeout=60.0)
        except RankError as error:
            text = str(error)
            by_watchdog = re.search(r"exit code -?[1-9]", text) and "no answer" not in text
            assert ranks.nccl is not None and by_watchdog, text
            return
    assert all(end is None or end.error is not None for end in ends), ends
    assert is_reported(ends[1 - VICTIM]), ends


@pytest.mark.slow
@pytest.mark.gloo  # the stand-in for NCCL waits for its longest
@on_ranks(2)
def test_groups_are_destroyed_in_any_order() -> None:
    """NCCL's end of a communicator may wait for the other ranks of a node, but not for ever."""
    groups = [dist.new_group() for _ in range(3)]
    x, options = torch.ones(1, 16, 2, 8, device=device()), TransportOptions(timeout=TIMEOUT)
    attend = partial(ring_attention, x, x, x, backend=backend())
    outs = [attend(group=group, transport=options) for group in groups]
    for group in groups:
        check(group)
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.destroy_process_group(group)
    outs.append(attend())
    assert all(torch.equal(out, outs[0]) for out in outs)


# -- beside other users of the GPU and of NCCL

DIM, HEADS = 32, 4


class Block(nn.Module):
    """A layer of attention, on this rank's rows or, without a layout, on all of them."""

    def __init__(self, layout: SequenceLayout | None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS))
        q, k, v = (part.contiguous() for part in qkv.unbind(2))
        if self.layout is None:
            seen = Mask(x.size(1), x.size(1), causal=True)
            attended, _ = plain_attention(q, k, v, seen)
        else:
            attended = ring_attention(q, k, v, causal=True, layout=self.layout, backend="reference")
        return x + self.out(attended.flatten(2))


def model_of(layout: SequenceLayout | None) -> nn.Sequential:
    """Two layers, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(layout), Block(layout))


def gradients_of(model: nn.Module, x: Tensor) -> Tensor:
    """All gradients of the sum of squares, as one vector; DTensors are gathered."""
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]
    return torch.cat([x.flatten() for x in whole])


def compare_with_one_process(*, fsdp: bool) -> None:
    """Gradients of a model whose sequence is split are those of one process."""
    layout = SequenceLayout.zigzag(64, dist.get_world_size())
    x = torch.randn(1, layout.seqlen, DIM, generator=torch.Generator().manual_seed(1))
    model, shard = model_of(layout).to(device()), layout.shard(x, dist.get_rank()).to(device())
    for module in (*model, model) if fsdp else ():
        sharded = fully_shard(module, mesh=mesh_of())
        sharded.set_gradient_divide_factor(1.0)  # a sum, not a mean
        sharded.set_force_sum_reduction_for_comms(True)
    for _ in range(3):  # reuses buffers and streams
        model.zero_grad()
        got = gradients_of(model, shard)
        if not fsdp:
            sync_gradients(model.parameters())
            got = torch.cat([p.grad.flatten() for p in model.parameters()])
        check()
    oracle = gradients_of(model_of(None).double(), x.double())
    noisy = noisy_runs(lambda: gradients_of(model_of(None), x))
    assert_close("gradients", got.cpu(), oracle, noisy)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [True, False], ids=["FSDP2", "sync_gradients"])
@on_ranks(2)
def test_a_model_beside_other_collectives(fsdp: bool) -> None:
    compare_with_one_process(fsdp=fsdp)


@pytest.mark.nccl(only=True)
def test_fsdp_without_nccls_order_of_launches(ranks: Pools) -> None:
    """Kernels of two communicators may then start in any order; here there is room for both."""
    with ranks.fresh(2, environment={"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}) as pool:
        pool.run(partial(compare_with_one_process, fsdp=True))


@pytest.mark.slow
@on_ranks(2)
def test_seventeen_groups_have_streams_of_their_own() -> None:
    groups = [dist.new_group() for _ in range(17)]
    x = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(0)).to(device())
    x = x * (1.0 + dist.get_rank())
    with torch.no_grad():
        attend = partial(ring_attention, x, x, x, backend=backend())
        outs = [attend(group=group) for group in 2 * groups]
    assert all(torch.equal(out, outs[0]) for out in outs)
    if streams.are_used(device()) and device().type == "cuda":
        channels = [
            channel
            for group in groups
            for channel in p2p.rank_group(group).connection.links["cuda"].channels.values()
        ]
        assert len({channel.stream for channel in channels}) == len(channels) >= 17
    for group in groups:
        check(group)
        dist.destroy_process_group(group)
