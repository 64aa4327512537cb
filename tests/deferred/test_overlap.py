"""Transfers overlap with attention that the host queued before them; dq overlaps with dk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ring_attn.backends.reference import ReferenceBackend
from ring_attn.transport import streams
from ring_attn.transport.ranks.media import Lane
from tests.deferred.calls import Layers
from tests.deferred.device import Event, Transfer
from tests.deferred.program import Program
from tests.deferred.test_calls import RUN, case_of, check


def behind_attention(program: Program) -> list[tuple[int, int]]:
    """Pairs of counts for each transfer of shards in the second layer's forward.

    The layer's operators that it waits for, and those that the host had queued by then.
    """
    nodes, before = program.ranks[0].nodes, program.before()
    streams = Counter(node.stream for node in nodes if node.stream is not None)
    compute = streams.most_common(1)[0][0]
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


def behind_everything(self: Lane, step: int, peer: int, start: Any, after: Any) -> Event:
    return RUN(self, step, peer, start, None)


def test_shards_do_not_wait_for_attention() -> None:
    layers = Layers(case_of("ring", "full", heads="mha"), 4, layers=2)
    assert all(behind == 0 < given for behind, given in behind_attention(layers.record()))
    with mock.patch.object(Lane, "run", behind_everything):
        found = behind_attention(layers.record())
    assert all(behind == given > 0 for behind, given in found)


BACKWARD = ReferenceBackend.backward


def backward(self: Any, inputs: Any, tiles: Any, gradients: Any, *, scores: Any) -> None:
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
        yield


def without_the_end(device: Any, first: Any, *others: Any) -> None:
    ready = streams.record(device)
    first()
    for work in others:
        with streams.use(streams.new(device)):
            streams.wait(ready)
            work()


def test_dq_runs_beside_dk_and_dv() -> None:
    layers = Layers(case_of("ring", "causal"), 3, layers=2)
    with in_halves():
        check(layers)
        with mock.patch.object(streams, "side_by_side", without_the_end):
            assert layers.record().races()
