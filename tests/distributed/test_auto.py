"""The strategy of "auto" between processes: one exchange, and the same on ranks that differ."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy
from ring_attn.planning import devices
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.planning.choice import Problem
from ring_attn.planning.devices import Cluster, Link, cpu_cluster, to_json
from ring_attn.planning.planner import choose
from ring_attn.transport.p2p import open_p2p
from tests.distributed.pool import Pools

pytestmark = pytest.mark.dist

SPEC = AttentionSpec("cpu", torch.float32, 1, 4, 1, 16, 16)
LAYOUT = SequenceLayout.zigzag(4096, 2)
MASK = Mask(4096, 4096, causal=True)


def clusters() -> tuple[Cluster, Cluster]:
    """On one, where every step costs a second, gathering is best; on the other a ring."""
    usual = cpu_cluster(2)
    device = usual.device
    steps = replace(device, forward=replace(device.forward, launch=1.0))
    fast, slow = Link("fast", 0.0, 1e12), Link("slow", 0.0, 1e7)
    return replace(usual, device=steps, inside=fast), replace(usual, inside=slow)


def choose_on(path: str, calls: int = 2, headdim: int = 16) -> tuple[Strategy, int, int]:
    """A rank's choice with its own file, messages of the first call, and of the rest."""
    os.environ[devices.CLUSTER_VARIABLE] = path.format(rank=dist.get_rank())
    transport = open_p2p(dist.group.WORLD, TransportOptions(timeout=20.0))
    spec = replace(SPEC, headdim=headdim)
    options: dict[str, Any] = {"backend": "aten", "same_bits": None, "backward": True}
    counts = [transport.stats.messages]
    found = []
    try:
        for _ in range(calls):
            found.append(agreed_strategy(spec, (LAYOUT, LAYOUT), MASK, transport, **options))
            counts.append(transport.stats.messages)
    finally:
        del os.environ[devices.CLUSTER_VARIABLE]
    assert all(one == found[0] for one in found)
    return found[0], counts[1] - counts[0], counts[-1] - counts[1]


def test_ranks_with_other_files_do_what_rank_0_says(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "{rank}.json")
    alone = []
    for rank, cluster in enumerate(clusters()):
        Path(path.format(rank=rank)).write_text(json.dumps({"clusters": {"2": to_json(cluster)}}))
        problem = Problem(SPEC, MASK, 2, cluster, "aten")
        alone.append(choose(problem, {"given": (LAYOUT, LAYOUT)}).strategy)
    assert alone[0] != alone[1], "the files must matter"
    results = ranks(2).run(choose_on, path)
    assert [strategy for strategy, _, _ in results] == [alone[0], alone[0]]
    assert [first for _, first, _ in results] == [1, 1]
    assert [rest for _, _, rest in results] == [0, 0]


def fails_on(path: str, headdim: int) -> str:
    try:
        choose_on(path, headdim=headdim)
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_error_is_the_same_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Rank 1 has a file, rank 0 has none: both hear of it, and can go on."""
    path = str(tmp_path / "{rank}.json")
    Path(path.format(rank=1)).write_text(json.dumps({"clusters": {"2": to_json(clusters()[0])}}))
    told = ranks(2).run(fails_on, path, 24)
    assert told[0] == told[1]
    assert "chosen by rank 0" in told[0] and "0.json" in told[0]
    Path(path.format(rank=0)).write_text(json.dumps({"clusters": {"2": to_json(clusters()[1])}}))
    assert len({strategy for strategy, _, _ in ranks(2).run(choose_on, path, 2, 24)}) == 1


def absent(seconds: float) -> str:
    if dist.get_rank() == 1:
        return ""
    transport = open_p2p(dist.group.WORLD, TransportOptions(timeout=seconds))
    options: dict[str, Any] = {"backend": "aten", "same_bits": None, "backward": True}
    try:
        agreed_strategy(SPEC, (LAYOUT, LAYOUT), MASK, transport, **options)
    except RuntimeError as error:
        return str(error)
    return "no error"


def opened(seconds: float) -> None:
    open_p2p(dist.group.WORLD, TransportOptions(timeout=seconds))


def test_a_rank_that_does_not_come_is_a_timeout(fresh_ranks: Any) -> None:
    pool = fresh_ranks(2)
    pool.run(opened, 2.0)
    told = pool.run(absent, 2.0)
    assert "strategy='auto': the ranks choose together" in told[0]
    assert "2" in told[0]
