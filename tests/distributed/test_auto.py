"""`strategy="auto"` between processes: exact, agreed on once, the same on ranks that differ."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy
from ring_attn.planning import devices, planner
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.planning.choice import Choice, Problem
from ring_attn.planning.devices import Cluster, Link, cpu_cluster, to_json
from ring_attn.planning.planner import choose
from ring_attn.testing import Case, run_all_ranks
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


# -- calls

CASES = (("causal", "zigzag"), ("window", "contiguous"), ("longer kv", "striped"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_auto_is_exact_and_agrees_once(world_size: int, name: str, kind: str, ranks: Pools) -> None:
    case = Case(name, kind, "auto", seqlen=61, seed=world_size)
    first, second = (run_all_ranks(case, world_size, ranks(world_size).run) for _ in range(2))
    assert not first.failures and not second.failures
    for (forward, backward), (again, backward_again) in zip(first.sent, second.sent, strict=True):
        assert forward.messages - again.messages == (world_size > 1)
        assert backward == backward_again


def on_a_mesh(axes: tuple[str, ...]) -> list[int]:
    """The node sizes that the planner hears of on this rank, on a machine of two nodes."""
    heard: list[int] = []
    choose = planner.choose

    def listen(problem: Problem, layouts: Any) -> Choice:
        heard.append(problem.cluster.node_size)
        return choose(problem, layouts)

    planner.choose = listen  # type: ignore[assignment]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
        q = torch.randn(1, 8, 4, 8)
        ring_attn.ring_attention(q, q, q, group=mesh[axes], strategy="auto")
    finally:
        planner.choose = choose
        del os.environ["LOCAL_WORLD_SIZE"]
    return heard


@pytest.mark.parametrize(
    ("axes", "heard"),
    [
        (("node", "gpu"), [[2], [], [], []]),
        (("gpu",), [[2], [], [2], []]),
        # Between neighbours of such a ring lie the ranks of the other axis.
        (("node",), [[1], [1], [], []]),
    ],
    ids=str,
)
def test_the_planner_hears_of_nodes(
    ranks: Pools, axes: tuple[str, ...], heard: list[list[int]]
) -> None:
    assert ranks(4).run(on_a_mesh, axes) == heard


def debugged(wrong: bool) -> str:
    os.environ["RING_ATTN_DEBUG"] = "1"
    q = torch.randn(1, 8, 4, 8)
    options = {"causal": wrong and dist.get_rank() == 1}
    try:
        ring_attn.ring_attention(q, q, q, strategy="auto", **options)
        return "fine"
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["RING_ATTN_DEBUG"]


def test_debug_names_what_differs_before_the_ranks_choose(ranks: Pools) -> None:
    told = ranks(2).run(debugged, True)
    assert all("causal" in text and "ranks disagree" in text for text in told)
    assert ranks(2).run(debugged, False) == ["fine", "fine"]


def refused_on_one_rank() -> str:
    """Rank 1 finds an error where "auto" looks at the whole call."""
    q = torch.randn(1, 8 - dist.get_rank(), 4, 8)
    documents = torch.tensor([0, 16], dtype=torch.int32)
    with mock.patch.dict(os.environ, RING_ATTN_DEBUG="1"), pytest.raises(ValueError) as caught:
        ring_attn.ring_attention(
            q[0], q[0], q[0], cu_seqlens=documents, group=dist.new_group(), strategy="auto"
        )
    return str(caught.value)


def test_debug_tells_an_error_of_one_rank_to_the_others(ranks: Pools) -> None:
    told = ranks(2).run(refused_on_one_rank)
    assert "rank 1 raised ValueError" in told[0] and "7" in told[0]
    assert "7" in told[1]


def test_explain_is_public() -> None:
    choice = ring_attn.explain(
        seqlen=4096, world_size=4, nheads=8, headdim=64, causal=True, device_type="cpu"
    )
    assert isinstance(choice.strategy, ring_attn.Strategy) and choice.reason in str(choice)
