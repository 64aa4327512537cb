"""The copy engines' transport without a GPU: its schedule, on arenas and streams of this process.

Every rank is a thread. What it tells its streams is kept back, and done by whoever waits: in any
order that streams and counters allow, drawn anew for every seed. The arenas check that no slot is
written to before what it held has been taken.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions, launch, ring_attention, tree_decode
from ring_attn.bench import gpu, transfers
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Hop
from ring_attn.strategies.base import Call
from ring_attn.strategies.core import make_call
from ring_attn.strategy import Strategy
from ring_attn.testing import poisoned_empty
from ring_attn.transport import open_transport
from ring_attn.transport import symmetric_memory as sm
from ring_attn.transport.base import CHANNELS, Channel, Transport
from ring_attn.transport.local import run_local
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.symmetric_memory import (
    COUNTERS,
    SLOTS,
    STREAMS,
    Arena,
    CudaEngine,
    Engine,
    Layout,
    Place,
    Put,
    Stream,
    SymmetricMemoryTransport,
    Until,
    check_places,
    exchange_commands,
)
from tests.strategies import Layouts, case, config, layouts_of, spec_of

WORD = 1 << 32

# Not a multiple of the messages, of which most so have several pieces and a short last one.
SLOT_BYTES = 720


@dataclass
class Op:
    """What a stream has been told: when it can be done, and how."""

    ready: Callable[[], bool]
    do: Callable[[], None]


class Fabric:
    """The memory and the streams of all ranks, and the lock that lets one rank run."""

    def __init__(
        self,
        world_size: int,
        *,
        seed: int = 0,
        slot_bytes: int = SLOT_BYTES,
        one_queue: bool = False,
    ) -> None:
        self.layout = Layout(world_size, slot_bytes)
        self.turn = threading.Condition()
        self.one_queue = one_queue
        self.random = random.Random(seed)
        self.queues: dict[tuple[Any, ...], deque[Op]] = {}
        self.arenas = [
            torch.full((self.layout.nbytes,), 0x55, dtype=torch.uint8) for _ in range(world_size)
        ]
        for arena in self.arenas:
            arena[: self.layout.header] = 0
        self.full: set[tuple[int, int]] = set()
        self.broken: BaseException | None = None
        # Ranks that are not at their end, and how many of them have found nothing to do since
        # anything has happened.
        self.alive, self.idle = world_size, 0
        self.released = False

    def tell(self, rank: int, channel: Channel, stream: Stream, op: Op) -> None:
        key = (rank,) if self.one_queue else (rank, channel, stream)
        self.queues.setdefault(key, deque()).append(op)
        self.idle = 0

    def step(self) -> bool:
        """Does one thing that can be done, if there is any."""
        heads = [queue for queue in self.queues.values() if queue and queue[0].ready()]
        if heads:
            self.random.choice(heads).popleft().do()
            self.happened()
        return bool(heads)

    def happened(self) -> None:
        """Lets ranks that wait look again."""
        self.idle = 0
        self.turn.notify_all()

    def until(self, done: Callable[[], bool]) -> None:
        """Does what can be done, and lets other ranks run, until that is so."""
        while not done():
            if self.broken is not None:
                raise RuntimeError("another rank failed") from self.broken
            if self.step():
                continue
            self.idle += 1
            if self.idle == self.alive:
                raise AssertionError("all ranks wait for each other")
            self.turn.wait()

    def word(self, rank: int, place: int) -> Tensor:
        return self.arenas[rank][place : place + 4].view(torch.int32)

    def set_word(self, rank: int, place: int, value: int) -> None:
        value %= WORD
        self.word(rank, place)[0] = value - WORD if value >= WORD // 2 else value

    def reached(self, rank: int, place: int, value: int) -> bool:
        """As the driver compares: the difference as a signed word."""
        return (int(self.word(rank, place)) - value) % WORD < WORD // 2


@dataclass
class Ended:
    """The end of an exchange."""

    fabric: Fabric
    left: set[Stream] = field(default_factory=lambda: set(STREAMS))

    def done(self) -> bool:
        return not self.left

    def join(self, stream: Any = None) -> None:
        """The host is the compute stream."""
        self.fabric.until(self.done)


class FakeEngine:
    """One rank of a fabric."""

    def __init__(self, rank: int, fabric: Fabric) -> None:
        self.rank = rank
        self.world_size = len(fabric.arenas)
        self.layout = fabric.layout
        self.fabric = fabric

    def now(self) -> None:
        """The host has computed what it was given."""

    def behind(self, channel: Channel, stream: Stream, now: None) -> None:
        self._tell(channel, stream, lambda: None)

    def write(self, channel: Channel, stream: Stream, peer: int, place: int, value: int) -> None:
        self._tell(channel, stream, partial(self.fabric.set_word, peer, place, value))

    def until(self, channel: Channel, stream: Stream, place: int, value: int) -> None:
        self._tell(
            channel, stream, lambda: None, partial(self.fabric.reached, self.rank, place, value)
        )

    def put(self, channel: Channel, peer: int, place: int, piece: Tensor) -> None:
        def do() -> None:
            empty = (peer, place) not in self.fabric.full
            assert empty or self.fabric.released, "a slot is written to that was not taken"
            self.fabric.full.add((peer, place))
            self.fabric.arenas[peer][place : place + piece.nbytes] = piece

        assert piece.nbytes <= self.layout.slot_bytes
        self._tell(channel, "out", do)

    def take(self, channel: Channel, place: int, piece: Tensor) -> None:
        def do() -> None:
            assert (self.rank, place) in self.fabric.full or self.fabric.released
            self.fabric.full.discard((self.rank, place))
            piece.copy_(self.fabric.arenas[self.rank][place : place + piece.nbytes])

        self._tell(channel, "in", do)

    def mark(self, channel: Channel) -> Ended:
        ended = Ended(self.fabric)
        for stream in STREAMS:
            self._tell(channel, stream, partial(ended.left.discard, stream))
        # Some of it may be done at once, ahead of the ranks that have not posted yet.
        for _ in range(self.fabric.random.choice([0, 0, 3, 30])):
            self.fabric.step()
        return ended

    def release(self, counters: Mapping[int, int]) -> None:
        with self.fabric.turn:
            self.fabric.released = True
            self.fabric.arenas[self.rank][self.layout.header :] = 0xFF
            for place, value in counters.items():
                self.fabric.set_word(self.rank, place, value)
            self.fabric.happened()

    def _tell(
        self,
        channel: Channel,
        stream: Stream,
        do: Callable[[], object],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.fabric.tell(self.rank, channel, stream, Op(ready, lambda: (do(), None)[1]))


def run_fabric(
    fabric: Fabric,
    fn: Callable[[int, SymmetricMemoryTransport], Any],
    *,
    timeout: float = 60.0,
    counted: int = 0,
    make_engine: Callable[[int, Fabric], Engine] = FakeEngine,
) -> list[Any]:
    """`fn(rank, transport)` on every rank, one running at a time.

    Args:
        fabric: of as many ranks.
        fn: what a rank does.
        timeout: of an exchange.
        counted: where the counters of all pairs and channels stand before.
        make_engine: of a rank.
    """
    world_size = len(fabric.arenas)
    results: dict[int, Any] = {}
    keys = [(x, c, r) for x in CHANNELS for c in COUNTERS for r in range(world_size)]

    def work(rank: int) -> None:
        with fabric.turn:
            try:
                arena = Arena(make_engine(rank, fabric), timeout)
                arena._counts = dict.fromkeys(keys, counted)
                transport = SymmetricMemoryTransport(arena, tuple(range(world_size)), rank)
                results[rank] = fn(rank, transport)
                # What others wait for of this rank is done.
                fabric.until(lambda: not any(q for k, q in fabric.queues.items() if k[0] == rank))
            except BaseException as error:
                fabric.broken = fabric.broken or error
            fabric.alive -= 1
            fabric.happened()

    for rank in range(world_size):
        for key in keys:
            fabric.set_word(rank, fabric.layout.counter(*key), counted)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if fabric.broken is not None:
        raise fabric.broken
    return [results[rank] for rank in range(world_size)]


# -- bits, under any order

MASKS = {
    "causal": Mask(61, 61, causal=True),
    "documents": Mask(61, 50, False, (9, -1), (0, 9, 9, 10, 40, 61), (0, 9, 12, 12, 30, 50)),
}
SIZES = config()
STRATEGIES = {
    "ring": (Strategy(), (2, 3, 4)),
    "double ring": (Strategy(inner_degree=2), (4,)),
    "all_gather": (Strategy("all_gather"), (2, 3)),
    "ulysses": (Strategy(ulysses_degree=2), (2,)),
    "hybrid": (Strategy(ulysses_degree=2), (4,)),
    "q_exchange": (Strategy("all_gather", exchange_q=True), (3,)),
}
CASES = [
    (name, world_size, kind, mask)
    for name, (_, world_sizes) in STRATEGIES.items()
    for world_size in world_sizes
    for kind, mask in (("contiguous", "causal"), ("zigzag", "documents"))
    if name != "q_exchange" or kind == "contiguous"
]


def attend(
    strategy: Strategy, mask: Mask, layouts: Layouts, rank: int, transport: Transport
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a rank."""
    inputs, _, _ = case(mask, SIZES)
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])
    q, k, v, dout = (x.shard(t, rank) for t, x in zip(inputs, sides, strict=True))
    call: Call = make_call(strategy, spec_of(inputs), layouts, mask, rank, backend="aten")
    out, lse, saved = call.forward(q, k, v, transport, None)
    grads = call.backward(saved, dout, transport, None)
    return out, lse, grads.dq, grads.dk, grads.dv


@pytest.mark.parametrize(
    ("name", "world_size", "kind", "mask"), CASES, ids=[f"{n}-{w}-{k}" for n, w, k, _ in CASES]
)
def test_bits_of_the_local_transport(name: str, world_size: int, kind: str, mask: str) -> None:
    layouts = layouts_of(kind, MASKS[mask], world_size)
    work = partial(attend, STRATEGIES[name][0], MASKS[mask], layouts)
    with poisoned_empty():
        expected = run_local(world_size, work)
        for seed, one_queue in ((0, False), (1, False), (2, True)):
            got = run_fabric(Fabric(world_size, seed=seed, one_queue=one_queue), work)
            for rank, (mine, local) in enumerate(zip(got, expected, strict=True)):
                assert all(map(torch.equal, mine, local)), (seed, one_queue, rank)


def test_forty_orders_of_a_ring() -> None:
    work = partial(attend, Strategy(), MASKS["causal"], layouts_of("zigzag", MASKS["causal"], 3))
    expected = run_local(3, work)
    for seed in range(40):
        got = run_fabric(Fabric(3, seed=seed, slot_bytes=[100, 1000, 9000][seed % 3]), work)
        assert all(all(map(torch.equal, *both)) for both in zip(got, expected, strict=True))


def test_counters_go_round() -> None:
    work = partial(attend, Strategy(), MASKS["causal"], layouts_of("zigzag", MASKS["causal"], 2))
    expected = run_local(2, work)
    got = run_fabric(Fabric(2, seed=5), work, counted=WORD - 3)
    assert all(all(map(torch.equal, *both)) for both in zip(got, expected, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(world_size: int) -> None:
    """With parts of all sizes, none among them; and among some ranks only."""

    def work(rank: int, transport: Transport) -> list[Tensor]:
        among = transport.sub(tuple(r for r in range(world_size) if r != 1)) if rank != 1 else None
        got = []
        for one in (transport, among):
            if one is None:
                continue
            n = one.world_size
            mine = torch.full((1500,), rank, dtype=torch.uint8)
            gathered = torch.zeros(n * 1500, dtype=torch.uint8)
            one.all_gather("shards", 0, mine, gathered)
            one.wait("shards")
            generator = torch.Generator().manual_seed(rank)
            floats = torch.randn(n * 333, generator=generator)
            summed = torch.zeros(333)
            one.reduce_scatter("gradients", 0, floats, summed)
            one.wait("gradients")
            sizes = [[17 * a * b for b in range(n)] for a in range(n)]
            counts, due = sizes[one.rank], [row[one.rank] for row in sizes]
            parts = torch.arange(sum(counts)).to(torch.uint8)
            received = torch.zeros(sum(due), dtype=torch.uint8)
            one.all_to_all("shards", 1, parts, counts, received, due)
            one.wait("shards")
            got += [gathered, summed, received]
        return got

    expected = run_local(world_size, work)
    for seed in range(3):
        got = run_fabric(Fabric(world_size, seed=seed), work)
        for mine, local in zip(got, expected, strict=True):
            assert all(map(torch.equal, mine, local))


def test_what_is_counted() -> None:
    def work(rank: int, transport: SymmetricMemoryTransport) -> tuple[int, int, int]:
        send, recv = (torch.zeros(n, dtype=torch.uint8) for n in (1000 + rank, 1001 - rank))
        transport.post("shards", 0, Hop(1 - rank, 1 - rank), send, recv)
        assert transport.follow("shards", None)  # type: ignore[arg-type]
        transport.wait("shards")
        assert not transport.follow("shards", None)  # type: ignore[arg-type]
        stats = transport.stats
        return stats.bytes_sent, stats.bytes_received, stats.messages

    assert run_fabric(Fabric(2), work) == [(1000, 1001, 1), (1001, 1000, 1)]


# -- the tests find what is wrong


def test_a_slot_that_is_written_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def heedless(*args: Any) -> Any:
        for command in exchange_commands(*args):
            if not (isinstance(command, Until) and command.counter == "room"):
                yield command

    monkeypatch.setattr(sm, "_commands", heedless)
    work = partial(attend, Strategy(), MASKS["causal"], layouts_of("zigzag", MASKS["causal"], 2))
    with pytest.raises(AssertionError, match="not taken"):
        for seed in range(20):
            run_fabric(Fabric(2, seed=seed), work)


def test_ranks_that_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def thrifty(*args: Any) -> Any:
        for command in exchange_commands(*args):
            if not (isinstance(command, sm.Write) and command.counter == "room"):
                yield command

    monkeypatch.setattr(sm, "_commands", thrifty)
    work = partial(attend, Strategy(), MASKS["causal"], layouts_of("zigzag", MASKS["causal"], 2))
    with pytest.raises(AssertionError, match="wait for each other"):
        run_fabric(Fabric(2), work)


# -- the schedule by itself


@pytest.mark.parametrize("size", [0, 1, 8, 9, 16, 17, 40])
def test_pieces_cover_the_message_and_counters_grow(size: int) -> None:
    commands = list(exchange_commands(Hop(1, 2), (size, 13), 8))
    puts = [c for c in commands if isinstance(c, Put)]
    assert [i for put in puts for i in range(put.start, put.stop)] == list(range(size))
    assert [put.slot for put in puts] == [i % SLOTS for i in range(len(puts))]
    rooms = [c.value for c in commands if isinstance(c, Until) and c.counter == "room"]
    arrived = [c.value for c in commands if isinstance(c, Until) and c.counter == "arrived"]
    assert rooms == [1 + i for i in range(len(puts))] and arrived == [1, 2]


def test_places_in_an_arena_do_not_overlap() -> None:
    layout = Layout(72)
    words = [
        layout.counter(channel, counter, rank)
        for channel in CHANNELS
        for counter in COUNTERS
        for rank in range(72)
    ]
    assert len(set(words)) == len(words) and max(words) + 4 <= layout.header
    slots = sorted(layout.slot(channel, slot) for channel in CHANNELS for slot in range(SLOTS))
    ends = [*slots[1:], layout.nbytes]
    assert slots[0] == layout.header
    assert all(end - start == layout.slot_bytes for start, end in zip(slots, ends, strict=True))


# -- the engine of CUDA, with streams and driver of this process


@dataclass
class FakeStream:
    """A stream of a rank, by the name that the engine gave it."""

    fabric: Fabric
    rank: int
    cuda_stream: int

    def tell(self, do: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        name: Any = self.cuda_stream
        self.fabric.tell(self.rank, "shards", name, Op(ready, do))

    def wait_event(self, event: Any) -> None:
        self.tell(lambda: None, event.done)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.fabric)
        self.tell(partial(event.left.discard, "out"))
        return event


class FakeEvent(Ended):
    """An event of one stream."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric, {"out"})

    query = Ended.done


class FakeDriver:
    """Addresses are bytes of the arenas."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def place(self, address: int) -> tuple[int, int]:
        for rank, arena in enumerate(self.fabric.arenas):
            if 0 <= address - arena.data_ptr() < self.fabric.layout.header:
                return rank, address - arena.data_ptr()
        raise AssertionError("an address outside all headers")

    def wait(self, stream: FakeStream, address: int, value: int) -> None:
        rank, place = self.place(address)
        assert rank == stream.rank, "a stream waits for a counter of another rank"
        stream.tell(lambda: None, partial(self.fabric.reached, rank, place, value))

    def write(self, stream: FakeStream, address: int, value: int) -> None:
        stream.tell(partial(self.fabric.set_word, *self.place(address), value))


def cuda_engine(rank: int, fabric: Fabric) -> CudaEngine:
    """One that has come together with the others, but for what only a GPU has."""

    class Made(CudaEngine):
        def now(self) -> Any:
            return FakeStream(fabric, rank, 99).record_event()

        def copy(self, stream: Any, to: Tensor, source: Tensor) -> None:
            assert to.nbytes == source.nbytes <= fabric.layout.slot_bytes
            stream.tell(lambda: (to.copy_(source), None)[1])

        def mark(self, channel: Channel) -> Any:
            events = sm._Events([self._stream(channel, s).record_event() for s in STREAMS])
            ended = Ended(fabric)
            ended.done = events.done  # type: ignore[method-assign]
            return ended

    engine = Made.__new__(Made)
    engine.rank, engine.world_size = rank, len(fabric.arenas)
    engine.layout, engine._driver = fabric.layout, FakeDriver(fabric)  # type: ignore[assignment]
    engine._connect(fabric.arenas[rank], lambda r: fabric.arenas[r])
    engine._streams = {
        (channel, stream): FakeStream(fabric, rank, 2 * i + j)  # type: ignore[misc]
        for i, channel in enumerate(CHANNELS)
        for j, stream in enumerate(STREAMS)
    }
    return engine


@pytest.mark.parametrize("world_size", [2, 3])
def test_addresses_of_the_cuda_engine(world_size: int) -> None:
    mask = MASKS["causal"]
    work = partial(attend, Strategy(), mask, layouts_of("zigzag", mask, world_size))
    expected = run_local(world_size, work)
    for seed in range(4):
        got = run_fabric(Fabric(world_size, seed=seed), work, make_engine=cuda_engine)
        assert all(all(map(torch.equal, *both)) for both in zip(got, expected, strict=True))


def test_released_counters_are_past_those_that_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = Fabric(2)
    engine = cuda_engine(0, fabric)
    monkeypatch.setattr(sm.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(sm.torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(sm.torch.cuda, "Stream", lambda: None)
    engine._device = torch.device("cpu")
    place = fabric.layout.counter("gradients", "arrived", 1)
    for value in (7, (1 << 31) - 1, WORD - 1, WORD + 5):
        engine.release({place: value})
        assert fabric.reached(0, place, value) and not fabric.reached(0, place, value + 1)
    assert fabric.arenas[0][fabric.layout.header :].eq(0xFF).all()


def test_no_driver_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the driver")
    with pytest.raises(NotImplementedError, match=r"no stream memory operations.*libcuda"):
        sm._Driver()


# -- a rank that is lost


def test_a_late_peer_ends_in_nan_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    fabric = Fabric(2)
    arena = Arena(FakeEngine(0, fabric), 0.2)
    transport = SymmetricMemoryTransport(arena, (0, 1), 0)
    send, recv = torch.zeros(3000), torch.zeros(3000)
    with fabric.turn:
        # The other one never posts. A second rank that runs: so this one waits, as a stream does.
        start = time.monotonic()
        transport.post("shards", 3, Hop(1, 1), send.view(torch.uint8), recv.view(torch.uint8))
        transport.wait("shards")
    assert 0.2 <= time.monotonic() - start < 10
    assert recv.isnan().all()
    said = ("ring step 3", "rank 0", r"ranks \[1\]", "0.2 s", "checkpoint")
    with pytest.raises(RuntimeError, match=".*".join(said)):
        transport.all_gather("gradients", 0, send[:10], recv[:20])
    with pytest.raises(RuntimeError, match="failed before"):
        transport.post("shards", 4, Hop(1, 1), send.view(torch.uint8), recv.view(torch.uint8))
    assert "ring step 3" in capsys.readouterr().err


def test_the_watch_ends_with_its_arena() -> None:
    before = set(threading.enumerate())
    run_fabric(Fabric(2), _one_exchange)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def _one_exchange(rank: int, transport: Transport) -> None:
    send, recv = torch.full((5,), rank, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    transport.post("shards", 0, Hop(1 - rank, 1 - rank), send, recv)
    transport.wait("shards")
    assert recv.eq(1 - rank).all()


# -- refusals

HERE = Place("a", "gpu 0")


@pytest.mark.parametrize(
    ("places", "error", "says"),
    [
        ([HERE, Place("b", "gpu 1")], RuntimeError, "one node.*'a', 'b'.*p2p"),
        ([HERE, HERE], RuntimeError, "2 ranks are on 1 GPUs.*OVERLAPPING_DEVICES"),
        ([HERE, Place("a", "gpu 1", lacks="no driver")], NotImplementedError, "rank 1: no driver"),
    ],
    ids=["nodes", "one gpu", "lacks"],
)
def test_places_that_are_refused(places: list[Place], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_places(places)


def test_places_that_are_taken() -> None:
    check_places([HERE, Place("a", "gpu 1")])
    check_places([Place("a", "gpu 0", shares=True)] * 2)


def run_refusals() -> list[tuple[str, str]]:
    """On a rank without GPU: type and text of each error."""
    layout = SequenceLayout.contiguous(6, 2)
    q = layout.shard(torch.randn(1, 6, 2, 8), dist.get_rank())
    copies = TransportOptions(kind="symmetric_memory")
    group: Any = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: ring_attention(q, q, q, transport=copies),
        lambda: tree_decode(q[:, :1], q, q, transport=copies),
        lambda: open_transport(group, copies),
        lambda: ring_attention(q, q, q, transport=TransportOptions(kind="nvshmem")),  # type: ignore[arg-type]
        lambda: ring_attention(q, q, q, transport=TransportOptions(kind=1)),  # type: ignore[arg-type]
        lambda: ring_attention(
            q, q, q, transport=TransportOptions(nccl_max_ctas=2, kind="symmetric_memory")
        ),
    ]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    open_transport(alone, copies).all_gather("shards", 0, q, out := torch.zeros_like(q))
    assert torch.equal(out, q)
    got = []
    for call in calls:
        try:
            call()
        except Exception as error:
            got.append((type(error).__name__, str(error)))
    return got


@pytest.mark.dist
def test_what_cannot_be_had_is_refused_by_every_rank(ranks: Any) -> None:
    for got in ranks(2).run(run_refusals):
        kinds = [kind for kind, _ in got]
        assert kinds == ["ValueError", "ValueError", "NotImplementedError", "ValueError",
                         "TypeError", "ValueError"]  # fmt: skip
        texts = [text for _, text in got]
        assert "between GPUs, got cpu" in texts[0] and "got cpu" in texts[1]
        assert "rank 0: there is no GPU" in texts[2] and "p2p" in texts[2]
        assert "'p2p', 'symmetric_memory'" in texts[3] and "nvshmem" in texts[3]
        assert "transport kind" in texts[4] and "nccl_max_ctas" in texts[5]


# -- ranks on one GPU, and the benchmark of transfers between them


@pytest.mark.parametrize(
    ("share", "device", "says"),
    [("gloo", "cpu", "needs device 'cuda'"), ("mpi", "cuda", r"\['gloo', 'nccl'\], got 'mpi'")],
)
def test_gpus_that_cannot_be_shared(share: str, device: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launch.run_ranks(print, 2, device=device, share_gpus=share)


def test_nccl_that_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "nccl_version", lambda: (2, 29, 7))
    with pytest.raises(RuntimeError, match=r"NCCL 2\.30 or newer, 2\.29\.7 is.*LD_PRELOAD"):
        launch.run_ranks(print, 2, device="cuda", share_gpus="nccl")
    monkeypatch.setattr(launch, "nccl_version", lambda: (2, 30, 0))
    assert launch._checked_device("cuda", 2, "nccl") == "cuda"
    assert launch._variables("cuda", "nccl", 2)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert not launch._variables("cuda", "nccl", 1)


def run_benchmark() -> tuple[list[transfers.Row], list[str]]:
    """On a rank, over gloo: everything but the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transfers,
            "open_symmetric_memory",
            lambda group, options, *_: open_p2p(group, TransportOptions(options.timeout)),
        )
        patch.setattr(transfers.torch.cuda, "synchronize", lambda: None)
        setting = transfers.Setting(rows=24, nheads=(4, 2), headdim=8, backend="aten")
        return transfers.measure(2, setting)


@pytest.mark.dist
def test_the_benchmark_of_transfers(ranks: Any) -> None:
    (rows, wrong), (other, _) = ranks(2).run(run_benchmark)
    assert rows == other and not wrong
    assert [row.copies for row in rows] == ["none", "engine", "sm"]
    assert rows[0].exchange_ms is None
    assert all(row.exchange_ms and row.gbps and row.host_us for row in rows[1:])
    assert rows[1].mib == 2 * 24 * 2 * 8 * 2 / 2**20
    assert transfers.table(rows).row_count == 3
    x = torch.ones(2)
    bad = {"engine": [x, x / 0, x, x, x], "sm": [x, x / 0, x, x, 2 * x]}
    assert transfers.wrong_results(bad) == ["lse is not finite", "dv differs between engine and sm"]


def test_the_run_of_transfers_fits_its_time(tmp_path: Path) -> None:
    parts = gpu.transfer_parts(tmp_path)
    assert [part.name for part in parts] == ["transport tests", "transfers"]
    assert sum(part.seconds for part in parts) <= gpu.SETS["transfers"]
    assert not any(part.skip for part in parts)
    tests = f"--ignore={gpu.TRANSPORT_TESTS}"
    assert any(tests in part.command for part in gpu.parts(tmp_path))
