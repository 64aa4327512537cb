"""The ring is the group that is passed in: part of the world, a mesh axis, ranks in any order."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_attn import (
    SequenceLayout,
    Strategy,
    TransportOptions,
    prepare,
    ring_attention,
    sync_gradients,
    tree_decode,
    unshard,
)
from ring_attn.core.mask import Mask
from ring_attn.testing import STRATEGIES, Case, Expected, Inputs, expected, strategy_of
from ring_attn.testing.ranks import arguments_of
from ring_attn.transport import p2p, streams
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks import rendezvous
from ring_attn.transport.ranks.group import rank_group
from tests.bounds import assert_holds, expect
from tests.distributed.pool import FAR, Pools, on_ranks
from tests.refusals import refused

SEQLEN = 97
# Each ring has its own seed and so its own sequence, so that a mix-up shows.
CASE = Case("causal", seqlen=SEQLEN, batch=1)
# Seconds after which threads and descriptors have not ended: many times what a busy machine takes.
PATIENCE = 100.0
Group = dist.ProcessGroup | DeviceMesh | None


def run_ring(
    ring: int, group: Group, strategy: str | Strategy = "ring", kind: str = "zigzag"
) -> Expected:
    """Runs this rank's part in a ring; returns results gathered within the ring."""
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        one = group.get_group()
    else:
        one = None if isinstance(group, DeviceMesh) else group
    case = replace(CASE, seed=ring, strategy=strategy, layout=kind)
    shards, options = arguments_of(case, dist.get_world_size(one), dist.get_rank(one))
    leaves, dout = [x.requires_grad_() for x in shards[:3]], shards[3]
    out, lse = ring_attention(*leaves, group=group, return_lse=True, **options)
    layout, _ = options["layout"]
    grads = [unshard(x, layout, group=group) for x in torch.autograd.grad(out, leaves, dout)]
    whole = [unshard(out, layout, group=group), unshard(lse, layout, group=group, dim=2)]
    return Expected(*whole, *grads)


def assert_exact(ring: int, *given: Any) -> None:
    assert_holds(run_ring(ring, *given), *expected(replace(CASE, seed=ring)), (ring, *given))


@on_ranks(4)
def test_parts_of_the_world() -> None:
    """Several rings at the same time, whose groups, internal ones too, only their members make."""
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    pair = dist.new_group([2 * row, 2 * row + 1], use_local_synchronization=True)
    assert_exact(row, pair)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    assert_exact(row, mesh["cp"])
    assert_exact(column, mesh["dp"])
    for ring, members in enumerate(([1, 2], [3, 0, 2], [1])):
        group = dist.new_group(members)  # new_group sorts the ranks
        if rank in members:
            assert_exact(ring, group)
        # Each rank has now made another number of groups.
        assert_exact(ring, None)


@on_ranks(3)
def test_a_mesh_with_one_axis_is_the_ring() -> None:
    assert_exact(0, DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("cp",)))


@pytest.mark.skipif(
    "sort_ranks" not in signature(dist.new_group).parameters,
    reason="groups of this torch have their ranks in ascending order",
)
@on_ranks(4)
def test_group_of_unsorted_ranks() -> None:
    """The group's order decides which shard a rank holds: strategies, decoding, gradients."""
    unsorted = [2, 0, 3, 1]
    group = dist.new_group(unsorted, sort_ranks=False)
    rank = dist.get_rank(group)
    assert rank == unsorted.index(dist.get_rank())
    for ring, strategy in enumerate(STRATEGIES):
        kind = "contiguous" if strategy == "q_exchange" else "zigzag"
        assert_exact(ring, group, strategy_of(strategy, 4), kind)
    q, k, v, _ = CASE.build_inputs()
    layout = SequenceLayout.contiguous(SEQLEN, 4)
    query = q[:, -3:]
    shards = [layout.shard(x, rank) for x in (k, v)]
    out = tree_decode(query, *shards, layout=layout, group=group)
    inputs = Inputs(query, k, v, torch.zeros_like(query))
    assert_holds({"out": out}, *expect(inputs, Mask(3, SEQLEN, causal=True)))
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 10.0**rank)
    sync_gradients([parameter], group)
    assert parameter.grad.tolist() == [1111.0] * 3


def held_by_the_process() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@contextmanager
def no_collector() -> Iterator[None]:
    """Leaves cycles of references, which would keep threads and descriptors."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@on_ranks(4)
def test_everything_goes_with_the_group() -> None:
    """Destroying a group frees its connections, threads and transports, after any calls.

    No call makes a group of torch's: with init_process_group(device_id=...) that needs all ranks.
    """
    run_ring(0, None)  # opens what the process keeps for all groups
    with no_collector():
        make_groups_and_destroy_them()


def make_groups_and_destroy_them() -> None:
    before, transports = held_by_the_process(), len(p2p.transports_of_groups)
    x = torch.ones(1, 2, 4, 8)
    for _ in range(2):
        group = dist.new_group()
        with mock.patch.object(
            distributed_c10d, "_new_process_group_helper", side_effect=AssertionError
        ):
            run_ring(0, group)
            held = held_by_the_process()
            for strategy in STRATEGIES:
                run_ring(0, group, strategy_of(strategy, 4), "contiguous")
            for timeout in (7.0, 8.0):
                ring_attention(x, x, x, group=group, transport=TransportOptions(timeout=timeout))
            tree_decode(x[:, :1], x, x, group=group)
        if not streams.are_used(torch.device("cpu")):
            # Over NCCL each part of the group has its own communicators.
            now = held_by_the_process()
            assert now[0] <= held[0] and now[1] <= held[1], (held, now)
        state = weakref.ref(rank_group(group))
        dist.destroy_process_group(group)
        del group
        assert state() is None, "a cycle of references keeps the group's state"
    assert len(p2p.transports_of_groups) == transports
    # A connection is closed on both sides once both ranks have let go of it.
    dist.barrier()

    def is_freed() -> bool:
        return all(now <= one for now, one in zip(held_by_the_process(), before, strict=True))

    threads = [thread.name for thread in threading.enumerate()]
    assert rendezvous.poll_until(is_freed, PATIENCE), (held_by_the_process(), before, threads)


@on_ranks(4)
def test_a_mesh_with_two_axes_is_not_split_off_the_world() -> None:
    """The world's bound device is hidden while torch flattens a mesh; axes give the degrees."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "outer", "inner"))
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    device, seen = torch.device("cuda", 0), list[object]()
    flatten = DeviceMesh._flatten
    world = dist.group.WORLD
    assert world is not None

    def watched(self: DeviceMesh, *args: Any) -> DeviceMesh:
        seen.append(world.bound_device_id)
        return flatten(self, *args)

    world.bound_device_id = device
    try:
        with mock.patch.object(DeviceMesh, "_flatten", watched):
            for two_axes in (mesh["outer", "inner"], whole):
                for name in ("hybrid", "double_ring"):
                    assert_exact(0, two_axes, name)
        seen.append(world.bound_device_id)
    finally:
        world.bound_device_id = None
    # A mesh of the whole world needs no group at all.
    assert seen in ([None, device], [device]), seen


@on_ranks(2)
def test_threads_on_two_groups() -> None:
    groups = [dist.new_group() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        rings = [threads.submit(run_ring, i, group) for i, group in enumerate(groups)]
        users = [dist.new_group() for _ in range(3)]
    assert len({group.group_name for group in users}) == 3
    assert not any("ring" in group.group_name for group in users)
    for i, ring in enumerate(rings):
        assert_holds(ring.result(), *expected(replace(CASE, seed=i)))


@pytest.mark.gloo
@on_ranks(2)
def test_two_threads_on_one_group() -> None:
    group = dist.new_group()
    expected = run_ring(0, group)

    def is_right_or_refused(_: int) -> bool:
        try:
            return torch.equal(run_ring(0, group).out, expected.out)
        except RuntimeError as error:
            return "thread" in str(error) or "ring" in str(error)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(is_right_or_refused, range(10)))


def forked_child() -> str:
    run_ring(0, None)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_ring(0, None)
            text = "it ran"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    run_ring(0, None)
    return text


def test_a_forked_child_is_refused(fresh_ranks: Callable[..., Any]) -> None:
    for rank, text in enumerate(fresh_ranks(2).run(forked_child)):
        assert text.startswith("RuntimeError: process "), text
        assert "forked" in text and f"rank {rank}" in text and "spawn" in text


# -- the store of a group


def connections_to(port: int) -> int:
    """The number of TCP connections of this machine's processes to a port."""
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return sum(x[2].endswith(f":{port:04X}") and x[3] == "01" for x in lines)


@pytest.mark.gloo
@on_ranks(3)
def test_a_group_opens_no_connection_to_the_store() -> None:
    """A connection looks up the names of hosts, which takes 5 s if a request is lost."""
    store = distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    group = dist.new_group()
    dist.barrier()
    before = connections_to(store.port)
    dist.barrier()
    run_ring(0, group)
    dist.barrier()
    assert connections_to(store.port) == before >= 3


class SlowStore(rendezvous.PollingStore):
    """A store that takes 1.5 s to write down a note."""

    def set(self, key: str, value: str) -> None:
        time.sleep(1.5)
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)


@pytest.mark.gloo
@on_ranks(2)
def test_a_slow_store_is_waited_for() -> None:
    """The reason of a failure reaches the other rank, though the note of it takes over a second."""
    group = dist.new_group()
    run_ring(0, group)
    shared = rank_group(group)
    assert shared.connection.notes is not None
    if dist.get_rank() == 0:
        shared.connection.notes.store = SlowStore(shared.store.store)
        shared.failure.fail("memory is full")
    else:
        with refused(RuntimeError, "rank 0 left its call: memory is full"):
            run_ring(0, group)
    dist.barrier()


# -- ranks that connect before their first call

OPTIONS = TransportOptions(timeout=FAR)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "auto"])
@pytest.mark.sweep(3)
@on_ranks(4)
def test_calls_are_the_same_behind_prepare(name: str) -> None:
    strategy = strategy_of(name, 4)
    layout = SequenceLayout.contiguous(13, 4)
    outs = []
    for prepared in ("the group", "the strategy", "nothing"):
        group = dist.new_group()
        if prepared != "nothing":
            chosen = strategy if prepared == "the strategy" else None
            prepare(group, chosen, transport=OPTIONS)
            assert list(rank_group(group).connection.links) == ["cpu"]
        rows = layout.shard_len(dist.get_rank())
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1, rows, 4, 8)
        out = ring_attention(
            x, x, x, layout=layout, strategy=strategy, group=group, transport=OPTIONS
        )
        outs.append((out, open_p2p(group, OPTIONS).stats.messages))
        dist.destroy_process_group(group)
    (plain, messages), *others = reversed(outs)
    for out, counted in others:
        assert counted == messages > 0, "messages that prepare are not counted"
        assert torch.equal(out, plain)


@pytest.mark.gloo
@on_ranks(2)
def test_ranks_that_prepare_for_different_strategies_are_refused() -> None:
    name = ("ring", "all_gather")[dist.get_rank()]
    with refused(RuntimeError, "all_gather"):
        prepare(dist.new_group(), name, transport=OPTIONS)


@on_ranks(2)
def test_strategies_that_cannot_be_prepared_are_refused() -> None:
    with refused(ValueError, "strategy must be known before the first call, got 'auto'"):
        prepare(strategy="auto")
    with refused(ValueError, "strategy must be one of|'bogus'"):
        prepare(strategy="bogus")
    with refused(ValueError, "needs a degree"):
        prepare(strategy="hybrid")


def a_call_right_away() -> tuple[Tensor, Tensor]:
    """Return this rank's rows of out, and the gradient of q, of a causal call."""
    layout = SequenceLayout.zigzag(29, dist.get_world_size())
    torch.manual_seed(0)
    x = layout.shard(torch.randn(1, 29, 2, 8), dist.get_rank()).requires_grad_()
    out = ring_attention(x, x, x, causal=True, layout=layout)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.gloo
def test_gloo_may_connect_at_the_first_message(ranks: Pools) -> None:
    """gloo then reads its store during the call, long after the group has been made."""
    with ranks.fresh(2, environment={"TORCH_GLOO_LAZY_INIT": "1"}) as pool:
        lazy = pool.run(a_call_right_away)
    usual = ranks(2).run(a_call_right_away)
    for found, exact in zip(lazy, usual, strict=True):
        assert all(map(torch.equal, found, exact))
