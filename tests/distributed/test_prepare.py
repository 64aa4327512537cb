"""Ranks that connect before their first call, for every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_attn
from ring_attn import SequenceLayout, TransportOptions, ring_attention
from ring_attn.testing import STRATEGIES, strategy_of
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.group import rank_group
from tests.distributed.pool import on_ranks
from tests.refusals import refused

OPTIONS = TransportOptions(timeout=3)
PREPARED = [name for name in STRATEGIES if name != "auto"]


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.sweep(3)
@on_ranks(4)
def test_calls_are_the_same_behind_prepare(name: str) -> None:
    strategy = strategy_of(name, 4)
    layout = SequenceLayout.contiguous(13, 4)
    outs = []
    for prepared in (True, False):
        group = dist.new_group()
        if prepared:
            ring_attn.prepare(group, strategy, transport=OPTIONS)
            assert list(rank_group(group)._media) == ["cpu"]
        rows = layout.shard_len(dist.get_rank())
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1, rows, 4, 8)
        out = ring_attention(
            x, x, x, layout=layout, strategy=strategy, group=group, transport=OPTIONS
        )
        outs.append((out, open_p2p(group, OPTIONS).stats.messages))
        dist.destroy_process_group(group)
    assert outs[0][1] == outs[1][1] > 0, "what prepares is not counted"
    assert torch.equal(outs[0][0], outs[1][0])


@pytest.mark.gloo
@on_ranks(2)
def test_ranks_that_prepare_for_another_strategy_are_told() -> None:
    name = ("ring", "all_gather")[dist.get_rank()]
    with refused(RuntimeError, "all_gather"):
        ring_attn.prepare(dist.new_group(), name, transport=OPTIONS)


@on_ranks(2)
def test_what_cannot_be_prepared_is_refused() -> None:
    cases: list[Any] = ["auto", "hybrid", "no such", 3]
    for case in cases:
        with pytest.raises(TypeError if case == 3 else ValueError):
            ring_attn.prepare(None, case)
