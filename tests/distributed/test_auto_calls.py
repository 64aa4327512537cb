"""`ring_attention(strategy="auto")` between processes: exact, agreed on once, and debugged."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from ring_attn.planning import planner
from ring_attn.planning.choice import Choice, Problem
from ring_attn.testing import Case, run_all_ranks
from tests.distributed.pool import Pools

pytestmark = pytest.mark.dist

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
