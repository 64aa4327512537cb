"""The table of cases, and the harness that runs all ranks of one: planted faults are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from ring_attn import testing
from ring_attn.core.strategy import Strategy
from ring_attn.testing import Case, run_all_ranks
from ring_attn.transport.local import LocalTransport


def test_cases_cover_what_they_say() -> None:
    backends = ("reference", "aten")
    everything, quick = testing.cases(backends=backends), testing.cases(True, backends=backends)
    assert len(set(everything)) == len(everything)
    for found in (everything, quick):
        assert {(c.layout, c.mask) for c in found} == {
            (layout, mask) for layout in testing.LAYOUTS for mask in testing.MASKS
        }
        assert {c.heads for c in found} == set(testing.HEADS)
        assert {c.backend for c in found} == set(backends)
        for layout in testing.LAYOUTS:
            assert {(c.softcap > 0.0, c.sinks) for c in found if c.layout == layout} == {
                *((False, False), (False, True), (True, False), (True, True))
            }
    assert {(c.backend, c.dtype) for c in everything} >= {
        (backend, dtype) for backend in backends for dtype in ("float16", "bfloat16", "float32")
    } | {("reference", "float64")}
    assert {1, 63, 113, 257} <= {c.seqlen for c in everything}
    assert any(c.large_logits for c in everything) and any(c.noncontiguous for c in everything)
    for strategy in testing.STRATEGIES:
        assert {replace(c, strategy="") for c in everything if c.strategy == strategy} == {
            replace(c, strategy="") for c in everything if c.strategy == "ring"
        }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_strategies_of_cases(world_size: int) -> None:
    least = {4: 2, 6: 2, 8: 2}.get(world_size)
    for name in testing.STRATEGIES:
        if least is None and name in ("hybrid", "hybrid all_gather", "double_ring"):
            with pytest.raises(NotImplementedError, match=f"two factors, got {world_size}"):
                testing.strategy_of(name, world_size)
            continue
        strategy = testing.strategy_of(name, world_size)
        if name.startswith("hybrid"):
            assert strategy.ulysses_degree == least
            assert strategy.core == ("ring" if name == "hybrid" else "all_gather")
        elif name == "double_ring":
            assert strategy == Strategy(inner_degree=least)
        else:
            assert strategy == name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_layouts_of_cases_hold_every_row(world_size: int) -> None:
    for case in testing.cases(backends=("reference",)):
        mask, layouts = case.build_mask(), case.build_layouts(world_size)
        assert [layout.seqlen for layout in layouts] == [mask.seqlen_q, mask.seqlen_k]
        if case.layout == "boundaries" and world_size > 1:
            assert all(0 in layout.shard_lens for layout in layouts)


# -- planted faults


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "q_exchange"])
def test_a_message_that_is_lost_is_found(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was received is left as it was allocated."""
    wait = LocalTransport.wait

    def lose(self: LocalTransport, channel: Any) -> None:
        pending = self._pending[channel]
        if self.rank == 1:
            pending.take = lambda *_: None
        wait(self, channel)

    monkeypatch.setattr(LocalTransport, "wait", lose)
    failures = run_all_ranks(Case("full", strategy=strategy, seqlen=61), 4).failures
    assert {name for name in ("out", "dq", "dk", "dv") if f" {name}: " in str(failures)} == {
        "out", "dq", "dk", "dv",
    }  # fmt: skip


def test_heads_mixed_up_on_one_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = testing.ranks._shards

    def mixed(inputs: Any, layouts: Any, rank: int, noncontiguous: bool) -> list[Tensor]:
        q, *others = shards(inputs, layouts, rank, noncontiguous)
        return [q.roll(1, 2) if rank == 1 else q, *others]

    monkeypatch.setattr(testing.ranks, "_shards", mixed)
    for strategy in testing.STRATEGIES[:-1]:
        layout = "contiguous" if strategy == "q_exchange" else "zigzag"
        assert run_all_ranks(Case("causal", layout, strategy, seqlen=61), 4).failures


def test_a_transport_of_another_world_size_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=3 ranks, got 0 results"):
        run_all_ranks(Case("causal"), 3, lambda *_: [])
