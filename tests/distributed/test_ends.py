"""How a group's connections end at the process's exit (with the group: `test_groups`)."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_attn import ring_attention, torch_private
from ring_attn.torch_private import flattened
from ring_attn.transport.ranks import links
from tests.distributed.pool import ended
from tests.refusals import refused


def layer() -> None:
    x = torch.ones(1, 3, 4, 8, requires_grad=True)
    ring_attention(x, x, x).sum().backward()


def exits(rank: int) -> list[Any]:
    """Errors logged while the interpreter of one rank exits, which the others wait for."""
    layer()
    store = distributed_c10d._get_default_store()
    with mock.patch.object(links.logger, "error") as logged:
        if dist.get_rank() == rank:
            atexit._run_exitfuncs()
            store.set("exited", "")
        else:
            store.wait(["exited"])
    return [str(one.args) for one in logged.call_args_list]


def test_a_rank_that_exits_waits_for_no_other(fresh_ranks: Callable[..., Any]) -> None:
    """As after an exception between calls: the end of its process tells the others."""
    assert fresh_ranks(2, queued=True).run(exits, 1) == [[], []]


def test_a_group_that_sends_nothing_is_refused() -> None:
    """torch's fake process group has a store without functions."""
    x = torch.ones(1, 4, 2, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        end = ended(lambda: ring_attention(x, x, x))
    finally:
        dist.destroy_process_group()
    assert end.error is RuntimeError and "'fake'" in end.text and "gloo" in end.text, end


def test_the_worlds_device_is_kept_by_two_threads() -> None:
    """Each thread hides the world's device from torch while torch makes a group of a mesh."""
    world, mesh, started = mock.Mock(bound_device_id="cuda:0"), mock.Mock(), count()
    made = mock.Mock()
    made.get_group.return_value = mock.Mock(bound_device_id=None)

    def flatten() -> mock.Mock:
        time.sleep(0.2 if next(started) == 0 else 0.4)  # the second thread ends later
        return made

    mesh._flatten = flatten
    known = mock.Mock(group=mock.Mock(WORLD=world))
    with mock.patch.object(torch_private, "dist", known):
        threads = [threading.Thread(target=flattened, args=(mesh,)) for _ in range(2)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    assert world.bound_device_id == "cuda:0"


def test_a_group_of_a_mesh_on_another_gpu_is_refused() -> None:
    """torch's second class connects a group of a mesh at once, on a GPU that torch guesses."""
    device, guessed = torch.device("cuda", 3), torch.device("cuda", 0)
    world, mesh = mock.Mock(bound_device_id=device), mock.Mock()
    group = mesh._flatten.return_value.get_group.return_value
    known = mock.Mock(group=mock.Mock(WORLD=world))
    with mock.patch.object(torch_private, "dist", known):
        for same in (device, None):
            group.bound_device_id = same
            assert flattened(mesh) is group
        group.bound_device_id = guessed
        with refused(RuntimeError, "cuda:0|cuda:3|set LOCAL_RANK to 3"):
            flattened(mesh)
    assert world.bound_device_id == device
