"""NCCL's communicators, with a class in NCCL's place that records how it is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_attn import TransportOptions, ring_attention
from ring_attn.core.program import Channel
from ring_attn.core.spec import MAX_CTAS
from ring_attn.torch_private import coalesced
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks import group as ranks_group
from ring_attn.transport.ranks import media, progress
from ring_attn.transport.ranks.group import rank_group
from ring_attn.transport.ranks.media import Lane, Late
from tests.distributed.pool import ended, on_ranks
from tests.refusals import says

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Recorder:
    """A ProcessGroupNCCL that connects to nothing."""

    made: ClassVar[list[Recorder]] = []
    Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.connected: list[torch.device] = []
        self.ended: list[str] = []
        # All members meet under one name in the store.
        store.set(f"member {rank}", "")
        store.wait([f"member {other}" for other in range(size)])
        Recorder.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


def groups_of(kind: str) -> tuple[dist.ProcessGroup, list[int]]:
    """A group that this rank is in, and its members."""
    rank = dist.get_rank()
    if kind == "world":
        world = dist.group.WORLD
        assert world is not None
        return world, [0, 1, 2, 3]
    if kind == "subgroup":
        return dist.new_group([3, 1, 0, 2], sort_ranks=False), [3, 1, 0, 2]
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        return mesh["cp"].get_group(), [rank // 2 * 2, rank // 2 * 2 + 1]
    # Pipeline stages have made different numbers of groups; only members make these groups.
    members = [0, 1] if rank < 2 else [2, 3]
    for _ in range(rank // 2):
        dist.new_group(members, use_local_synchronization=True)
    return dist.new_group(members, use_local_synchronization=True), members


KINDS = (("world", True), ("subgroup", False), ("mesh", True), ("stages", True))


def made_for(kind: str, eager: bool) -> list[str]:
    """Names of the communicators of two channels, one asked for twice, and of one with an option.

    No communicator is split off another one, even if the world is bound to a device.
    """
    group, members = groups_of(kind)
    world = dist.group.WORLD
    assert world is not None
    Recorder.made.clear()
    channels: tuple[Channel, ...] = ("shards", "shards", "gradients")
    if eager:
        world.bound_device_id = GPU
    try:
        with (
            mock.patch.object(dist, "ProcessGroupNCCL", Recorder, create=True),
            mock.patch.multiple(media, streams=mock.MagicMock(), Progress=mock.Mock()),
            mock.patch.object(dist, "new_group", side_effect=AssertionError("a group of torch's")),
        ):
            for channel in channels:
                open_p2p(group, TransportOptions()).join(channel, GPU)
            open_p2p(group, TransportOptions(nccl_max_ctas=4)).join("shards", GPU)
    finally:
        world.bound_device_id = None
    for one, ctas in zip(Recorder.made, (MAX_CTAS, MAX_CTAS, 4), strict=True):
        options = one.options
        assert (one.rank, one.size) == (members.index(dist.get_rank()), len(members))
        assert one.connected == [GPU] and not hasattr(options, "split_from")
        assert (options.config.max_ctas, options.config.cga_cluster_size) == (ctas, 0)
        assert options.is_high_priority_stream
    return [one.options.group_name for one in Recorder.made]


def made_for_all() -> list[list[str]]:
    return [made_for(*kind) for kind in KINDS]


def test_communicators_are_made_by_their_members(fresh_ranks: Any) -> None:
    first, second, *_ = fresh_ranks(4).run(made_for_all)
    assert first == second and all(len(set(names)) == 3 for names in first)


def test_communicators_end_with_their_owner() -> None:
    """Communicators are shut down once nothing holds them, and aborted when the ring fails."""
    store = dist.HashStore()
    Recorder.made.clear()
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", Recorder, create=True),
        mock.patch.multiple(media, streams=mock.MagicMock(), Progress=mock.Mock()),
    ):
        nccl = media.Nccl(store, "meeting", 0)
        nccl.lane((0,), "shards", TransportOptions(), 1.0, GPU)
        (one,) = Recorder.made
        nccl.close()
        assert one.ended == ["abort"]
        del nccl
    assert one.ended == ["abort", "shutdown"]


def test_several_operations_are_one_group() -> None:
    """Operations start as one NCCL group: started one by one they could wait for each other."""
    log: list[str] = []
    communicator = mock.Mock()
    communicator._start_coalescing.side_effect = lambda: log.append("start")
    communicator._end_coalescing.side_effect = lambda: log.append("end") or "work"
    tensors: list[Tensor] = [torch.zeros(1), torch.zeros(1)]
    starts = [lambda i=i: log.append(f"op {i}") for i in range(len(tensors))]
    assert coalesced(communicator, starts) == "work"
    assert log == ["start", "op 0", "op 1", "end"]


# -- exchanges that the host does not wait for


class Work:
    """An exchange queued on the device."""

    def wait(self) -> None:
        """Does nothing: on CUDA too the host is not blocked."""


def test_a_late_exchange_is_named() -> None:
    """The device is in the second exchange, while the host has posted a third."""
    streams = mock.Mock(pinned=lambda x: x)
    with mock.patch.multiple(progress, streams=streams), mock.patch.object(media, "streams"):
        lane = Lane((1, 4, 6), "gradients", 0.0, None, None, CPU, progress.Progress(CPU))
        assert lane.late() is None
        for step in range(3):
            lane.run(step, 2, Work, ())
        flags = lane.progress._flags
        flags.copy_(torch.tensor([2, 1]))
        late = lane.late()
        assert late is not None and late[:3] == (1, "gradients", 6) and late.begun
        flags.copy_(torch.tensor([2, 2]))
        late = lane.late()
        assert late is not None and late.step == 2 and not late.begun
        flags.copy_(torch.tensor([3, 3]))
        assert lane.late() is None


def test_numbers_of_exchanges_begin_again() -> None:
    with mock.patch.multiple(progress, streams=mock.Mock(pinned=lambda x: x)):
        one = progress.Progress(CPU)
        for step in range(2 * progress.NUMBERS + 3):
            one.begin(step, 0)
            if step % 5 < 4:
                one.end()
            found = one.first_under_way()
            assert (found is None) == (step % 5 < 4)


@pytest.mark.gloo
@on_ranks(2)
def test_the_watch_names_step_peer_and_channel() -> None:
    """Rank 0's watch reports a late exchange, rank 1 reads the report, the next call raises it."""
    group, x = dist.new_group(), torch.ones(1, 2, 2, 8)
    ring_attention(x, x, x, group=group)
    shared, rank = rank_group(group), dist.get_rank()
    assert shared._board is not None
    texts = []
    if rank == 0:
        late = Late(3, "shards", 1, 47.0, True)
        with (
            mock.patch.object(media.Gloo, "late", lambda _: late),
            mock.patch.object(ranks_group.logger, "error") as said,
        ):
            shared.look()
        texts.append(said.call_args.args[1])
    dist.barrier()
    texts += [shared._board.failure() or ""] * (rank == 1)
    end = ended(lambda: ring_attention(x, x, x, group=group))
    texts += [end.text] * (rank == 0)
    assert all(says(text, "step 3|rank 1|'shards'|47 s") for text in texts), texts
