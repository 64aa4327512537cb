"""The ring is the group that is passed in: part of the world, a mesh axis, ranks in any order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_attn import SequenceLayout, TransportOptions, ring_attention, unshard
from ring_attn.mask import Mask
from ring_attn.testing import (
    Expected,
    Inputs,
    check_all,
    dense_gradients,
    plain_gradients,
    random_qkv,
)
from ring_attn.transport.p2p import open_p2p

pytestmark = pytest.mark.dist

SEQLEN = 97
MASK = Mask(SEQLEN, SEQLEN, causal=True)
Group = dist.ProcessGroup | DeviceMesh | None


def inputs_of(ring: int) -> Inputs:
    """Each ring has a sequence of its own, so that a mix-up shows."""
    return random_qkv(seqlen_q=SEQLEN, nheads=4, nheads_kv=2, headdim=16, seed=ring)


def run_ring(ring: int, group: Group) -> Expected:
    """This rank's part in a ring, gathered within the ring."""
    process_group = group.get_group() if isinstance(group, DeviceMesh) else group
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    layout = SequenceLayout.zigzag(SEQLEN, world_size)
    q, k, v, dout = (layout.shard(x, rank) for x in inputs_of(ring))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(*leaves, causal=True, layout=layout, group=group, return_lse=True)
    grads = [unshard(x, layout, group=group) for x in torch.autograd.grad(out, leaves, dout)]
    whole = [unshard(out, layout, group=group), unshard(lse, layout, group=group, dim=2)]
    return Expected(*whole, *grads)


def assert_holds(results: list[tuple[int, Expected]]) -> None:
    """Every rank's gathered results against the oracle of its ring's sequence."""
    for rank, (ring, whole) in enumerate(results):
        oracle = dense_gradients(*inputs_of(ring), MASK)
        plain = plain_gradients(*inputs_of(ring), MASK)
        verdicts = check_all(whole, oracle, plain)
        assert all(verdict.ok for verdict in verdicts), (rank, [str(v) for v in verdicts])


def two_subgroups(rings: list[list[int]]) -> tuple[int, Expected]:
    """Two rings at the same time, each in a group of its own."""
    groups = [dist.new_group(ranks) for ranks in rings]
    ring = next(i for i, ranks in enumerate(rings) if dist.get_rank() in ranks)
    return ring, run_ring(ring, groups[ring])


@pytest.mark.parametrize("rings", [[[0, 1], [2, 3]], [[0, 3], [1, 2]]], ids=str)
def test_subgroups_of_the_world(ranks: Any, rings: list[list[int]]) -> None:
    assert_holds(ranks(4).run(two_subgroups, rings))


def local_subgroups() -> tuple[int, Expected]:
    """Groups that only their members make: the ring's own groups must be made likewise."""
    ring = dist.get_rank() // 2
    members = [2 * ring, 2 * ring + 1]
    return ring, run_ring(ring, dist.new_group(members, use_local_synchronization=True))


def test_groups_that_only_members_make(ranks: Any) -> None:
    assert_holds(ranks(4).run(local_subgroups))


def mesh_axis(axis: str) -> tuple[int, Expected]:
    """A ring along one axis of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, column = divmod(dist.get_rank(), 2)
    ring = row if axis == "cp" else column
    return ring, run_ring(ring, mesh[axis])


@pytest.mark.parametrize("axis", ["cp", "dp"])
def test_axis_of_a_mesh(ranks: Any, axis: str) -> None:
    assert_holds(ranks(4).run(mesh_axis, axis))


def whole_mesh() -> tuple[int, Expected]:
    """A mesh with one axis is itself the ring."""
    return 0, run_ring(0, init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)))


def test_mesh_with_one_axis(ranks: Any) -> None:
    assert_holds(ranks(3).run(whole_mesh))


def reversed_mesh() -> tuple[int, Expected]:
    """A mesh that lists the ranks in another order than the world's."""
    return 0, run_ring(0, DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("cp",)))


def test_mesh_of_unsorted_ranks(ranks: Any) -> None:
    assert_holds(ranks(3).run(reversed_mesh))


def unsorted_group() -> tuple[int, Expected]:
    """The group's order decides which shard a rank holds."""
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    assert dist.get_rank(group) == (1, 2, 0)[dist.get_rank()]
    return 0, run_ring(0, group)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
def test_group_of_unsorted_ranks(ranks: Any) -> None:
    assert_holds(ranks(3).run(unsorted_group))


# After these the ranks of a pool would have made different numbers of groups, so each has its own.


def some_ranks(members: list[int]) -> tuple[int, Expected] | None:
    """The members call; the others do not, and are not waited for."""
    group = dist.new_group(members)  # which sorts them
    return (5, run_ring(5, group)) if dist.get_rank() in members else None


@pytest.mark.parametrize("members", [[1, 2], [3, 0, 2], [1]], ids=str)
def test_other_ranks_take_no_part(fresh_ranks: Callable[..., Any], members: list[int]) -> None:
    results = fresh_ranks(4, group_timeout=15).run(some_ranks, members)
    assert [rank for rank in range(4) if results[rank] is not None] == sorted(members)
    assert_holds([result for result in results if result is not None])


def after_a_group_of_some() -> list[tuple[int, Expected]]:
    """Ranks 0 and 1 have made a group that rank 2 is not in; now all three are a ring, and two are.

    torch names a group that only its members make after the number of groups that a process has.
    """
    pair = dist.new_group([0, 1])
    results = [(0, run_ring(0, None))]
    if dist.get_rank() != 2:
        results.append((1, run_ring(1, pair)))
    pair = dist.new_group([1, 2])
    if dist.get_rank() != 0:
        results.append((2, run_ring(2, pair)))
    return results


def test_ranks_that_have_made_other_groups_before(fresh_ranks: Callable[..., Any]) -> None:
    for results in fresh_ranks(3, group_timeout=5).run(after_a_group_of_some):
        assert_holds(results)


def two_groups_of_the_same_ranks() -> None:
    """They are two rings: each has its own transport, and neither's messages reach the other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    transports = [open_p2p(group, TransportOptions()) for group in groups]
    assert transports[0] is not transports[1]
    results = [run_ring(0, group) for group in groups]
    assert torch.equal(results[0].dk, results[1].dk)
    for transport in transports:
        assert transport.stats.messages == 3  # one forward; a shard, and its gradient home


def rings_of_several_sizes() -> None:
    """A rank can be in several rings, and call them in turn."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = halves[dist.get_rank() // 2]
    for _ in range(3):
        in_world, in_half = run_ring(0, None), run_ring(0, mine)
        oracle = dense_gradients(*inputs_of(0), MASK)
        plain = plain_gradients(*inputs_of(0), MASK)
        for whole in (in_world, in_half):
            assert all(verdict.ok for verdict in check_all(whole, oracle, plain))


def transports_go_with_their_groups() -> int:
    """A transport is kept as long as its group is, and no longer."""
    import gc

    from ring_attn.transport.p2p import _transports

    gc.collect()
    before = len(_transports)
    group = dist.new_group()
    run_ring(0, group)
    assert len(_transports) == before + 1
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return len(_transports) - before


@pytest.mark.parametrize(
    ("world_size", "check_on_ranks"),
    [(2, two_groups_of_the_same_ranks), (4, rings_of_several_sizes)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_several_rings(ranks: Any, world_size: int, check_on_ranks: Callable[[], None]) -> None:
    ranks(world_size).run(check_on_ranks)


def test_transport_is_dropped_with_its_group(ranks: Any) -> None:
    assert ranks(2).run(transports_go_with_their_groups) == [0, 0]
