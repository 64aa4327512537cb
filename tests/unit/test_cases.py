"""The table of cases, and the harness that runs all ranks of a case and finds planted faults."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ring_attn import testing
from ring_attn.testing import Case, run_all_ranks
from ring_attn.transport.local import LocalTransport


def test_cases_cover_what_they_say() -> None:
    backends = ("reference", "aten")
    everything, quick = testing.cases(backends=backends), testing.cases(True, backends=backends)
    for found in (everything, quick):
        assert len(set(found)) == len(found)
        assert {(c.layout, c.mask) for c in found} == {*product(testing.LAYOUTS, testing.MASKS)}
        assert {c.heads for c in found} == set(testing.HEADS)
        assert {c.strategy for c in found} == set(testing.STRATEGIES)
        scores = {(c.layout, c.softcap > 0.0, c.sinks) for c in found}
        assert scores == {*product(testing.LAYOUTS, (False, True), (False, True))}
    dtypes = product(backends, ("float16", "bfloat16", "float32"))
    assert {(c.backend, c.dtype) for c in everything} == {*dtypes, ("reference", "float64")}
    assert any(c.large_logits for c in everything) and any(c.noncontiguous for c in everything)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "q_exchange"])
def test_a_message_that_is_lost_is_found(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive buffer stays as it was allocated."""
    wait = LocalTransport.wait

    def lose(self: LocalTransport, channel: Any) -> None:
        pending = self._pending[channel]
        if self.rank == 1:
            pending.receives = [(rank, x.clone()) for rank, x in pending.receives]
        wait(self, channel)

    monkeypatch.setattr(LocalTransport, "wait", lose)
    failures = run_all_ranks(Case("full", strategy=strategy, seqlen=61), 4).failures
    assert {name for name in ("out", "dq", "dk", "dv") if f" {name}: " in str(failures)} == {
        "out", "dq", "dk", "dv",
    }  # fmt: skip


def test_a_transport_of_another_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=3 ranks, got 0 results"):
        run_all_ranks(Case("causal"), 3, lambda *_: [])
