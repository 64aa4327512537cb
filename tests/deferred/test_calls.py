"""Calls on the deferred device: no races, the same bits in every order, and work that overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attn.attention.operators import requested_call
from ring_attn.backends.reference import ReferenceBackend
from ring_attn.core.program import Channel
from ring_attn.machines import run as machine
from ring_attn.testing import MASKS, RESULTS, Case, ranks, run_all_ranks
from ring_attn.torch_private import StartedWorks
from ring_attn.transport import p2p, streams
from ring_attn.transport.p2p import P2PTransport
from ring_attn.transport.ranks.links import NcclChannel
from tests.deferred.cuda import Event, HostSyncError
from tests.deferred.device import Recorder, Transfer
from tests.deferred.program import Program, at_random, in_host_order, same
from tests.deferred.ranks import Layers, record, second_class

SEQLEN = 29


def case_of(strategy: str, mask: str, **options: Any) -> Case:
    layout = "contiguous" if strategy == "q_exchange" else "zigzag"
    return Case(mask, layout, strategy, "reference", "float32", seqlen=SEQLEN, **options)


def check(layers: Layers, orders: int = 2) -> None:
    """Asserts that all orders have the same bits, and one layer those of a plain run."""
    program = layers.record()
    assert program.races() == []
    assert program.stuck() == [] and not program.unmatched
    results = program.run(in_host_order)
    assert all(same(results, program.run(at_random(seed))) for seed in range(orders))
    if layers.layers == 1:
        plain = run_all_ranks(layers.case, layers.world_size).whole
        whole = layers.whole(results)
        assert all(torch.equal(getattr(whole, x), getattr(plain, x)) for x in RESULTS)


# Masks vary, so that some ranks have nothing to send and others have much.
QUICK = {
    "ring": ("causal", 4),
    "double_ring": ("documents window", 4),
    "all_gather": ("causal", 3),
    "exchange": ("documents window", 4),
    "ulysses": ("window", 2),
    "hybrid": ("causal", 4),
    "q_exchange": ("causal", 3),
    "hybrid all_gather": ("documents", 4),
}


@pytest.mark.parametrize("strategy", QUICK)
def test_every_strategy(strategy: str) -> None:
    mask, world_size = QUICK[strategy]
    check(Layers(case_of(strategy, mask), world_size))


SECOND_CLASS = [
    pytest.param(name, marks=[] if name in ("ring", "ulysses") else pytest.mark.slow)
    for name in QUICK
]


@pytest.mark.parametrize("strategy", SECOND_CLASS)
def test_every_strategy_over_torchs_second_class(strategy: str) -> None:
    """Its collectives start at once, and each is waited for by its own work."""
    mask, world_size = QUICK[strategy]
    with second_class():
        check(Layers(case_of(strategy, mask), world_size))


def drop_works_but_the_last(communicator: Any, starts: Any) -> Any:
    """Waits only for the end of a coalescing, which torch's first class allows."""
    communicator._start_coalescing()
    for start, *arguments in starts:
        start(*arguments)
    return communicator._end_coalescing()


def write_before_the_end(communicator: Any, starts: Any) -> Any:
    """Writes what a collective sends after its start, before the coalescing ends."""
    communicator._start_coalescing()
    works = []
    for start, received, *arguments in starts:
        works.append(start(received, *arguments))
        if isinstance(received, Tensor):
            arguments[0].add_(0)
    return StartedWorks([*works, communicator._end_coalescing()])


@pytest.mark.parametrize("planted", [drop_works_but_the_last, write_before_the_end])
def test_what_only_torchs_first_class_allows_is_found(planted: Callable[..., Any]) -> None:
    layers = Layers(case_of("ulysses", "causal"), 2)
    with mock.patch.object(p2p, "coalesced", planted):
        assert layers.record().races() == []
        with second_class():
            assert layers.record().races() != []


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_two_layers_are_under_way(strategy: str) -> None:
    """The second call reuses buffers of the first, which is still running on the device."""
    check(Layers(case_of(strategy, "causal", heads="mha"), 2, layers=2))


@pytest.mark.parametrize(
    "read", [Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.nonzero, bool, Tensor.cpu]
)
def test_the_host_waits_for_nothing(read: Callable[[Tensor], object]) -> None:
    def work(_: int, recorder: Recorder) -> None:
        given = torch.tensor([2.0])
        assert given.item() == 2.0  # a tensor of the host
        recorder.given(given)
        with pytest.raises(HostSyncError):
            read(given + 1)

    record(1, work)


# Each mask with a strategy; the strategies take turns.
PAIRS = [(list(QUICK)[i % len(QUICK)], mask) for i, mask in enumerate(MASKS)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mask"), PAIRS)
def test_every_mask(strategy: str, mask: str) -> None:
    sinks, world_size = mask in ("causal", "documents"), QUICK[strategy][1]
    check(Layers(case_of(strategy, mask, sinks=sinks), world_size, layers=2), orders=1)


def wait_for_nothing(self: P2PTransport, channel: Channel) -> None:
    if self.world_size > 1:
        self.pending.pop(channel)


def post_at_once(
    self: NcclChannel, step: int, peer: int, start: Any, after: Any, call: Any
) -> Event:
    return RUN(self, step, peer, start, [], call)


def send_a_copy(self: P2PTransport, *given: Any, after: Any = None) -> Event | None:
    channel, step, hop, send, recv = given
    return POST(self, channel, step, hop, send.clone(), recv)


def record_elsewhere(self: machine.Run) -> None:
    with streams.use(streams.new(self.device)):
        NOTE_USES(self)


RUN, POST, NOTE_USES = NcclChannel.run, P2PTransport.post, machine.Run.note_uses

# Name of a fault -> object, attribute and faulty function to patch.
FAULTS: dict[str, tuple[object, str, object]] = {
    "a wait": (P2PTransport, "wait", wait_for_nothing),
    "what a post waits for": (NcclChannel, "run", post_at_once),
    "the last uses of a buffer": (machine, "last_uses", lambda send, recv: []),
    "an event on the wrong stream": (machine.Run, "note_uses", record_elsewhere),
    "memory given back early": (P2PTransport, "post", send_a_copy),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    # The second layer reuses the first layer's buffers, and waits for their last uses alone.
    layers = Layers(case_of("ring", "causal"), 3, layers=2)
    right = layers.record().run(in_host_order)
    with mock.patch.object(*FAULTS[fault]):
        program = layers.record()
    assert program.races()
    assert any(not same(right, program.run(at_random(seed))) for seed in range(20))


# -- shards and gradients in one exchange, on one communicator


@contextmanager
def one_communicator() -> Iterator[None]:
    """Makes the calls of `Layers` send shards and gradients together."""
    together = replace(ranks.TRANSPORT, one_communicator=True)
    with mock.patch.object(ranks, "TRANSPORT", together):
        yield


def communicators(program: Program) -> set[str]:
    nodes = program.ranks[0].nodes
    return {node.communicator for node in nodes if isinstance(node, Transfer)}


def exchange_receives(communicator: Any, starts: Any) -> Any:
    """Starts the receives of several messages in the opposite order."""
    receives = [start for start in starts if start[0].__name__ == "recv"]
    others = [start for start in starts if start[0].__name__ != "recv"]
    return COALESCED(communicator, [*reversed(receives), *others])


COALESCED = p2p.coalesced


def test_one_communicator_has_the_bits_of_two() -> None:
    """And exchanged receives are found, of messages whose equal sizes do not show it."""
    case = replace(case_of("ring", "full"), seqlen=16, batch=1)
    plain = run_all_ranks(case, 4).whole  # two exchanges
    with one_communicator():
        layers = Layers(case, 4)
        program = layers.record()
        with mock.patch.object(p2p, "coalesced", exchange_receives):
            exchanged = layers.record()
    assert len(communicators(program)) == 1
    assert program.races() == [] and program.stuck() == [] and not program.unmatched
    for schedule in (in_host_order, at_random(0)):
        whole = layers.whole(program.run(schedule))
        assert all(torch.equal(getattr(whole, x), getattr(plain, x)) for x in RESULTS)
    wrong = layers.whole(exchanged.run(in_host_order))
    assert not all(torch.equal(getattr(wrong, x), getattr(plain, x)) for x in RESULTS)


@pytest.mark.slow
@pytest.mark.parametrize("over_second_class", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "double_ring", "hybrid"])
def test_one_communicator_in_every_order(strategy: str, over_second_class: bool) -> None:
    mask, world_size = QUICK[strategy]
    ranks_of_ring = 8 if strategy == "hybrid" else world_size
    with one_communicator(), second_class() if over_second_class else nullcontext():
        check(Layers(case_of(strategy, mask), ranks_of_ring, layers=2))


# -- transfers overlap with attention that the host queued before them; dq overlaps with dk


def behind_attention(program: Program) -> list[tuple[int, int]]:
    """Pairs of counts for each transfer of shards in the second layer's forward.

    The layer's operators that it waits for, and those that the host had queued by then.
    """
    nodes, before = program.ranks[0].nodes, program.before()
    used = Counter(node.stream for node in nodes if node.stream is not None)
    compute = used.most_common(1)[0][0]
    places = [i for i, node in enumerate(nodes) if isinstance(node, Transfer)]
    # The first three exchanges connect; the next three belong to the first layer.
    first, *others = places[6:9]
    found = []
    for place in others:
        given = [node for node in nodes[first:place] if node.stream is compute]
        bits = before[program.starts[nodes[place]]]
        behind = sum(bits >> program.number[program.ends[node]] & 1 for node in given)
        found.append((behind, len(given)))
    return found


def behind_everything(self: NcclChannel, step: int, peer: int, start: Any, *others: Any) -> Event:
    return RUN(self, step, peer, start, None, others[-1])


def test_shards_do_not_wait_for_attention() -> None:
    layers = Layers(case_of("ring", "full", heads="mha"), 4, layers=2)
    assert all(behind == 0 < given for behind, given in behind_attention(layers.record()))
    with mock.patch.object(NcclChannel, "run", behind_everything):
        found = behind_attention(layers.record())
    assert all(behind == given > 0 for behind, given in found)


BACKWARD = ReferenceBackend.backward


def backward(
    self: Any, inputs: Any, tiles: Any, gradients: Any, *, scores: Any, in_one_pass: bool
) -> None:
    assert not in_one_pass
    wanted = [
        torch.zeros(x.shape) if wanted is None else wanted
        for x, wanted in zip(inputs[:3], gradients, strict=True)
    ]
    BACKWARD(self, inputs, tiles, wanted, scores=scores)


@contextmanager
def in_halves() -> Iterator[None]:
    """Makes the reference backend compute dq apart from dk and dv."""
    with (
        mock.patch.object(ReferenceBackend, "backward", backward),
        mock.patch.object(ReferenceBackend, "in_order", True),
        mock.patch.object(ReferenceBackend, "in_one_pass", lambda *_: False),
    ):
        requested_call.cache_clear()  # a call keeps its programs
        yield
    requested_call.cache_clear()


def without_the_end(device: Any, side: Any, first: Any, *others: Any) -> None:
    ready = streams.record(device)
    first()
    with streams.use(side):
        streams.wait(ready, device)
        for work in others:
            work()


def test_dq_runs_beside_dk_and_dv() -> None:
    with in_halves():
        layers = Layers(case_of("ring", "causal"), 3, layers=2)
        check(layers)
        with mock.patch.object(streams, "side_by_side", without_the_end):
            assert layers.record().races()
