"""Calls captured in CUDA graphs on the deferred device, and replayed with other inputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, halo, ring_attention, tree_decode
from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.kernels.launch import Launch
from ring_attn.testing import Case
from ring_attn.testing.ranks import TRANSPORT, arguments_of
from ring_attn.transport import capture, streams
from ring_attn.transport.ranks import connection, headers, links
from ring_attn.transport.ranks.group import rank_group
from tests.deferred.cuda import CaptureError, Event
from tests.deferred.device import Recorder
from tests.deferred.graphs import Graph
from tests.deferred.program import at_random, in_host_order, same
from tests.deferred.ranks import NAMES, in_thread, record
from tests.deferred.test_cached import DEVICE, TILES, Kernel, made_table
from tests.deferred.test_calls import QUICK, SEQLEN, case_of
from tests.refusals import refused

CASE = case_of("ring", "causal")

REPLAYS = 2

Step = Callable[[list[Tensor]], tuple[Tensor, ...]]


class Replays:
    """A step, run once; then captured and replayed, or run, with new inputs in its buffers."""

    def __init__(self, *, captured: bool) -> None:
        self.captured = captured

    def shards(self, rank: int) -> list[Tensor]:
        raise NotImplementedError

    def step(self, rank: int, recorder: Recorder, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def other(self, x: Tensor, i: int) -> Tensor:
        return x.cos() * i if x.is_floating_point() else x - i

    def __call__(self, rank: int, recorder: Recorder) -> None:
        inputs = [x.clone() for x in self.shards(rank)]
        others = [[self.other(x, i + 1) for x in inputs] for i in range(REPLAYS)]
        recorder.given(*inputs, *(x for some in others for x in some))
        results = self.step(rank, recorder, inputs)
        graph = Graph(recorder)
        if self.captured:
            with graph.capture():
                results = self.step(rank, recorder, inputs)
        for i, other in enumerate(others):
            for x, new in zip(inputs, other, strict=True):
                x.copy_(new)
            if self.captured:
                graph.replay()
            else:
                results = self.step(rank, recorder, inputs)
            for name, x in zip(NAMES, results, strict=False):
                recorder.result(f"{name} {i}", x)


class Training(Replays):
    """Forward and backward."""

    def __init__(self, case: Case, world_size: int, *, captured: bool = True) -> None:
        super().__init__(captured=captured)
        self.world_size = world_size
        self._arguments = [arguments_of(case, world_size, rank) for rank in range(world_size)]
        self.options: dict[str, Any] = {}

    def shards(self, rank: int) -> list[Tensor]:
        shards, options = self._arguments[rank]
        sinks = options["sinks"]
        return [*shards, *([] if sinks is None else [sinks])]

    def step(self, rank: int, recorder: Recorder, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        q, k, v, dout, *sinks = inputs
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks)]
        options: dict[str, Any] = {**self._arguments[rank][1], **self.options}
        options["sinks"] = leaves[3] if sinks else None
        out, lse = ring_attention(*leaves[:3], return_lse=True, **options)
        grads = in_thread(recorder, lambda: torch.autograd.grad(out, leaves, dout))
        return (out.detach(), lse.detach(), *grads)


class Decoding(Replays):
    LAYOUT = SequenceLayout.contiguous(7, 3)

    def __init__(self, *, captured: bool = True) -> None:
        super().__init__(captured=captured)
        generator = torch.Generator().manual_seed(0)
        self._whole = [
            torch.randn(1, rows, heads, 16, generator=generator)
            for rows, heads in ((1, 4), (7, 2), (7, 2))
        ]

    def shards(self, rank: int) -> list[Tensor]:
        q, *cache = self._whole
        return [q, *(self.LAYOUT.shard(x, rank) for x in cache)]

    def step(self, rank: int, recorder: Recorder, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"window_size": (4, -1), "transport": TRANSPORT}
        out = tree_decode(*inputs, layout=self.LAYOUT, backend="reference", **options)
        return (out,)


class DecodingPages(Replays):
    """Sequences whose lengths and pages change from replay to replay, unread by the host."""

    def __init__(self, *, captured: bool) -> None:
        super().__init__(captured=captured)
        generator = torch.Generator().manual_seed(0)
        q, pools = (
            torch.randn(*shape, 16, generator=generator) for shape in ((2, 1, 4), (3, 2, 6, 2, 2))
        )
        table = torch.tensor([[5, 4], [3, 2]], dtype=torch.int32)
        tables = torch.tensor([9, 4], dtype=torch.int32), table
        self._shards = [[q, *pools[rank], *tables] for rank in range(3)]

    def shards(self, rank: int) -> list[Tensor]:
        return self._shards[rank]

    def step(self, rank: int, recorder: Recorder, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        *qkv, lengths, table = inputs
        out, lse = tree_decode(
            *qkv,
            cache_seqlens=lengths,
            block_table=table,
            window_size=(5, -1),
            return_lse=True,
            backend="reference",
            transport=TRANSPORT,
        )
        return out, lse


def check(world_size: int, captured: Replays, plain: Replays) -> None:
    """Asserts that replays and calls race with nothing, and have the same bits in any order."""
    results = record(world_size, plain).run(in_host_order)
    assert len(results[0]) >= REPLAYS
    for program in (record(world_size, one) for one in (captured, plain)):
        assert program.races() == []
        assert program.stuck() == [] and not program.unmatched
        assert same(results, program.run(in_host_order))
        assert same(results, program.run(at_random(0)))


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=() if name == "ring" else pytest.mark.slow) for name in QUICK],
)
def test_a_graph_of_forward_and_backward(strategy: str) -> None:
    mask, world_size = QUICK[strategy]
    world_size = 3 if strategy == "ring" else world_size
    case = case_of(strategy, mask, sinks=strategy == "ring")
    both = (Training(case, world_size, captured=captured) for captured in (True, False))
    check(world_size, *both)


def test_a_graph_of_decoding() -> None:
    check(3, Decoding(), Decoding(captured=False))
    check(3, DecodingPages(captured=True), DecodingPages(captured=False))


NEVER = SimpleNamespace(is_on=lambda: False, refuse=lambda why: None)


def test_work_that_no_graph_can_hold_is_found() -> None:
    """Writes the header in a capture as without, from pinned memory."""
    with mock.patch.object(headers, "capture", NEVER), pytest.raises(CaptureError, match="pinned"):
        record(2, Training(CASE, 2))


def test_a_graph_has_buffers_of_its_own() -> None:
    """Calls of other sizes, after the capture, drop the buffers of calls that are not captured."""

    def work(rank: int, recorder: Recorder) -> None:
        training, decoding, graph = Training(CASE, 3), Decoding(), Graph(recorder)
        inputs, cache = ([x.clone() for x in one.shards(rank)] for one in (training, decoding))
        recorder.given(*inputs, *cache)
        training.step(rank, recorder, inputs)
        with graph.capture():
            training.step(rank, recorder, inputs)
        for _ in range(3):
            decoding.step(rank, recorder, cache)
        graph.replay()

    assert record(3, work).races() == []
    outside = pytest.raises(CaptureError, match="outside of it")
    with mock.patch.object(connection, "capture", NEVER), outside:
        record(3, work)


def test_nobody_watches_captured_exchanges() -> None:
    """Looks for late exchanges, of which all that are not captured have ended."""

    def work(rank: int, recorder: Recorder) -> None:
        Training(CASE, 2)(rank, recorder)
        much_later, query = time.monotonic() + 1e6, Event.query
        over = lambda event: event.capture is None or query(event)  # noqa: E731
        with (
            mock.patch.object(Event, "query", over),
            mock.patch.object(links.time, "monotonic", lambda: much_later),
        ):
            rank_group(dist.group.WORLD).failure.poll()
        assert rank_group(dist.group.WORLD).failure.error is None

    record(2, work)
    with mock.patch.object(links, "capture", NEVER), pytest.raises(CaptureError, match="queried"):
        record(2, work)


def test_a_stream_that_is_not_joined_is_found() -> None:
    def work(_: int, recorder: Recorder) -> None:
        x, device = torch.zeros(3), torch.device("cpu")
        recorder.given(x)
        with Graph(recorder).capture():
            begun = streams.record(device)
            with streams.use(streams.new(device)):
                streams.wait(begun, device)
                x.add_(1)

    with pytest.raises(CaptureError, match="has not waited"):
        record(1, work)


# -- refused by name, and the group lives


def refusals(rank: int, recorder: Recorder) -> None:
    training = Training(CASE, 3)
    inputs = [x.clone() for x in training.shards(rank)]
    cache = [x.clone() for x in Decoding().shards(rank)]
    recorder.given(*inputs, *cache)
    layout = SequenceLayout.zigzag(SEQLEN, 3)
    made: list[Callable[[], object]] = [
        lambda: training.step(rank, recorder, inputs),
        lambda: halo(inputs[0], layout, 1),
        lambda: tree_decode(*cache, window_size=(4, -1), backend="reference"),
    ]
    words = ["make the same forward call once before", "halo", "pass the layout of the cache"]

    def refuse_all() -> None:
        for call, why in zip(made, words, strict=True):
            with Graph(recorder).capture(), refused(NotImplementedError, f"CUDA graph|{why}"):
                call()

    refuse_all()
    training.step(rank, recorder, inputs)
    with mock.patch.object(training, "options", {"transport": TransportOptions(timeout=9.0)}):
        refuse_all()  # as other options may need other communicators
    words[0] = "compare arguments"
    with mock.patch.dict(os.environ, RING_ATTN_DEBUG="1"):
        refuse_all()
    with Graph(recorder).capture():
        training.step(rank, recorder, inputs)


def test_calls_that_need_the_host_are_refused() -> None:
    record(3, refusals)


@pytest.mark.filterwarnings("ignore:backend='triton' on CPU")
def test_a_captured_launch_needs_its_kernel_and_table_from_before() -> None:
    """What a graph reads is not waited for, and lives on when the caches drop it."""

    def work(_: int, recorder: Recorder) -> None:
        kept, kernel, graph = KeptLaunches(), Kernel(recorder), Graph(recorder)
        x = torch.zeros(1, 1, 1, 1)
        recorder.given(x)

        def table() -> Tensor:
            return kept.table(TILES, ("blocks",), DEVICE, made_table).blocks

        @capture.a_call
        def run(x: Tensor) -> None:
            kept.run(
                (TILES, "kernel"),
                (x,),
                (),
                lambda: Launch(kernel, (1,), {"x_ptr": x, "table_ptr": table()}, {}, {}),
            )

        with graph.capture(), pytest.raises(NotImplementedError, match="a kernel would be loaded"):
            run(x)
        with streams.use(streams.new(DEVICE)):
            run(x)
        with graph.capture():
            run(x)
        kept.tables.clear()
        kept.repeats.clear()
        graph.replay()

    assert record(1, work).races() == []


def test_ranks_that_replay_other_graphs_hear_of_it() -> None:
    """Rank 1 replays the graph of a call with another scale, which each rank has made before."""

    def work(rank: int, recorder: Recorder) -> None:
        both = [Training(replace(CASE, softmax_scale=scale), 3) for scale in (0.5, 0.25)]
        inputs = [x.clone() for x in both[0].shards(rank)]
        recorder.given(*inputs)
        graphs = [Graph(recorder) for _ in both]
        for training, graph in zip(both, graphs, strict=True):
            training.step(rank, recorder, inputs)
            with graph.capture():
                training.step(rank, recorder, inputs)
        own = rank_group(dist.group.WORLD).calls.headers
        for number, chosen in enumerate((0, rank == 1, 0)):
            graphs[chosen].replay()
            recorder.result(f"heard {number}", own.replays[1])
        own.replays = own.replays[0], torch.tensor(True)
        with pytest.raises(RuntimeError, match="a replay of a CUDA graph"):
            both[0].step(rank, recorder, inputs)

    results = record(3, work).run(in_host_order)
    heard = [[bool(one[f"heard {number}"]) for one in results] for number in range(3)]
    assert heard[0] == 3 * [False] and heard[1][1:] == [True, True] and heard[2][1:] == heard[1][1:]
