"""Calls of the package on recorded devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ring_attn import TransportOptions, ring_attention
from ring_attn.testing import Case, RankResult, Sent, put_together
from ring_attn.testing.ranks import _mask_arguments, _shards
from tests.deferred.device import HostReads, Recorder
from tests.deferred.program import Program
from tests.deferred.ranks import record

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
TRANSPORT = TransportOptions(timeout=60.0)
NOTHING_SENT = (Sent(0, 0), Sent(0, 0))


class Layers:
    """A few layers of attention, forward and backward, on any rank."""

    def __init__(self, case: Case, world_size: int, *, layers: int = 1) -> None:
        """Makes the shards of all ranks; the next layer's queries are `query + out`."""
        self.case, self.world_size, self.layers = case, world_size, layers
        mask, layouts = case.build_mask(), case.build_layouts(world_size)
        inputs, self._sinks = case.build_inputs(), case.build_sinks()
        self._shards = [
            [x.squeeze(0) if case.packed else x for x in shards]
            for shards in (
                _shards(inputs, layouts, rank, case.noncontiguous) for rank in range(world_size)
            )
        ]
        self._options: dict[str, Any] = {
            "softmax_scale": case.softmax_scale,
            "softcap": case.softcap,
            "layout": layouts,
            "strategy": case.build_strategy(world_size),
            "backend": case.backend,
            "same_bits": case.same_bits,
            "transport": TRANSPORT,
            **_mask_arguments(mask),
        }

    def __call__(self, rank: int, recorder: Recorder) -> None:
        *given, dout = (x.clone() for x in self._shards[rank])
        if self._sinks is not None:
            given.append(self._sinks.clone())
        recorder.given(*given, dout)
        leaves = [x.requires_grad_() for x in given]
        query, sinks = leaves[0], leaves[3] if self._sinks is not None else None
        for _ in range(self.layers):
            out, lse = ring_attention(
                query, *leaves[1:3], sinks=sinks, return_lse=True, **self._options
            )
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
