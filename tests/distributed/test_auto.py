"""`strategy="auto"` between processes: exact, and one choice, agreed on once."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
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
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.machines.cluster import Cluster, Link
from ring_attn.planning import devices, planner
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.planning.choice import Problem
from ring_attn.planning.devices import cpu_cluster
from ring_attn.planning.planner import choose
from ring_attn.testing import Case, run_all_ranks
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p
from tests.distributed.pool import Pools, on_ranks
from tests.refusals import refused

SPEC = AttentionSpec("cpu", torch.float32, 1, 4, 1, 16, 16)
LAYOUT = SequenceLayout.zigzag(4096, 2)
MASK = Mask(4096, 4096, causal=True)
OPTIONS: dict[str, Any] = {"backend": "aten", "same_bits": None, "backward": True}


def clusters() -> tuple[Cluster, Cluster]:
    """Two clusters: gathering is best in the first, where a step costs a second; then a ring."""
    usual = cpu_cluster(2)
    device = usual.device
    steps = replace(device, forward=replace(device.forward, launch=1.0))
    fast, slow = Link("fast", 0.0, 1e12), Link("slow", 0.0, 1e7)
    return replace(usual, device=steps, inside=fast), replace(usual, inside=slow)


def choose_on(path: Path, headdim: int = 16) -> tuple[Strategy, int]:
    """The choice of two equal calls, and the messages that it took."""
    transport = open_p2p(dist.group.WORLD, TransportOptions(timeout=20.0))
    spec, before = replace(SPEC, headdim=headdim), transport.stats.messages
    with mock.patch.dict(os.environ, {devices.CLUSTER_VARIABLE: str(path)}):
        first, second = (
            agreed_strategy(spec, (LAYOUT, LAYOUT), MASK, transport, **OPTIONS) for _ in range(2)
        )
    assert first == second
    return first, transport.stats.messages - before


def write(path: Path, cluster: Cluster) -> None:
    path.write_text(json.dumps({"cluster": asdict(cluster)}))


@on_ranks(2)
def test_all_ranks_do_what_rank_0_says(tmp_path: Path) -> None:
    """Also where it raises: rank 1 has a file, rank 0 has none; then both can go on."""
    rank, path = dist.get_rank(), tmp_path / f"{dist.get_rank()}.json"
    first, second = (
        choose(Problem(SPEC, MASK, 2, cluster, "aten"), {"given": (LAYOUT, LAYOUT)}).strategy
        for cluster in clusters()
    )
    assert first != second, "the files must matter"
    if rank == 1:
        write(path, clusters()[1])
    with refused(ValueError, "chosen by global rank 0|0.json"):
        choose_on(path, headdim=24)
    if rank == 0:
        write(path, clusters()[0])
    assert choose_on(path) == (first, 2)


PACKING = ring_attn.pack([70, 5, 0, 33, 5, 9, 12, 1, 20, 6], 3)
ROWS, CUTS = PACKING.layout.seqlen, PACKING.cu_seqlens
PACKED = Mask(ROWS, ROWS, True, (-1, -1), CUTS, CUTS)


@pytest.mark.parametrize(
    ("world_size", "mask", "layout"),
    [
        (1, "causal", "zigzag"),
        (2, "window", "contiguous"),
        (4, "longer kv", "striped"),
        (3, PACKED, (PACKING.layout, PACKING.layout)),
    ],
)
def test_auto_is_exact_and_agrees_once(
    world_size: int, mask: str | Mask, layout: Any, ranks: Pools
) -> None:
    case = Case(mask, layout, "auto", seqlen=61, seed=world_size)
    first, second = (run_all_ranks(case, world_size, ranks(world_size).run) for _ in range(2))
    assert not first.failures and not second.failures
    for (forward, backward), (again, backward_again) in zip(first.sent, second.sent, strict=True):
        assert forward.messages - again.messages == 2 * (world_size > 1)
        assert backward == backward_again


@on_ranks(4)
def test_the_planner_hears_of_nodes() -> None:
    """The first rank of each ring plans, with the number of its ring's ranks that share a node."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu")), dist.get_rank()
    q = torch.randn(1, 8, 4, 8)
    for axes, is_first, node_size in (
        (("node", "gpu"), rank == 0, 2),
        ("gpu", rank % 2 == 0, 2),
        ("node", rank < 2, 1),
    ):
        with (
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
            mock.patch.object(planner, "choose", side_effect=planner.choose) as chosen,
        ):
            ring_attn.ring_attention(q, q, q, group=mesh[axes], strategy="auto")
        heard = [called.args[0].cluster.node_size for called in chosen.call_args_list]
        assert heard == [node_size] * is_first, axes


@on_ranks(2)
def test_debug_tells_an_error_of_one_rank_to_the_others() -> None:
    """Rank 1 raises when "auto" checks the whole call; rank 0 gets rank 1's error."""
    q = torch.randn(1, 8 - dist.get_rank(), 4, 8)
    documents = torch.tensor([0, 16], dtype=torch.int32)
    error, reported = ((RuntimeError, "rank 1 refused the call: ValueError|7"), (ValueError, "7"))[
        dist.get_rank()
    ]
    with mock.patch.dict(os.environ, RING_ATTN_DEBUG="1"), refused(error, reported):
        ring_attn.ring_attention(
            q[0], q[0], q[0], cu_seqlens=documents, group=dist.new_group(), strategy="auto"
        )
