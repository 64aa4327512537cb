"""Calls of the package on recorded devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_attn import ring_attention
from ring_attn.testing import Case, RankResult, Sent, put_together
from ring_attn.testing.ranks import arguments_of
from tests.deferred.device import HostReads, Recorder
from tests.deferred.program import Program
from tests.deferred.ranks import record

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
NOTHING_SENT = (Sent(0, 0), Sent(0, 0))


class Layers:
    """A few layers of attention, forward and backward, on any rank."""

    def __init__(self, case: Case, world_size: int, *, layers: int = 1) -> None:
        """Makes the shards of all ranks; the next layer's queries are `query + out`."""
        self.case, self.world_size, self.layers = case, world_size, layers
        self._arguments = [arguments_of(case, world_size, rank) for rank in range(world_size)]

    def __call__(self, rank: int, recorder: Recorder) -> None:
        shards, options = self._arguments[rank]
        *given, dout = (x.clone() for x in shards)
        if (sinks := options["sinks"]) is not None:
            given.append(sinks.clone())
        recorder.given(*given, dout)
        query, key, value, *own = leaves = [x.requires_grad_() for x in given]
        options = {**options, "sinks": own[0] if own else None}
        for _ in range(self.layers):
            out, lse = ring_attention(query, key, value, return_lse=True, **options)
            query = query + out if self.layers > 1 else query
        grads = in_thread(recorder, lambda: torch.autograd.grad(out, leaves, dout))
        for name, x in zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False):
            recorder.result(name, x)

    def whole(self, results: list[dict[str, Tensor]]) -> Any:
        ranks = [
            RankResult(
                tuple(x[None] if self.case.packed else x for x in one.values()), NOTHING_SENT
            )
            for one in results
        ]
        return put_together(self.case, ranks).whole

    def record(self) -> Program:
        return record(self.world_size, self)


def in_thread(recorder: Recorder, work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with recorder, HostReads(recorder):
                results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
