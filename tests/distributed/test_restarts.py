"""Jobs and groups that start again over one store: every start forms its ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions, ring_attention
from tests.distributed.pool import BACKENDS, FAR, Ended, Pool, Pools, backend, device, ended, roomy
from tests.refusals import refused

ROOT = Path(__file__).parents[2]


def torchrun(folder: Path, ranks_by_node: tuple[int, ...], when: str, victims: str) -> list[int]:
    """Runs `restarted` on several nodes; returns how often each rank's node has counted a start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(ranks_by_node)}"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=1"]
    torchrun += ["--rdzv-id=1", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    words = ["--module", "tests.distributed.restarted", when, victims, str(folder)]
    nodes = [
        subprocess.Popen(
            [*torchrun, f"--nproc-per-node={count}", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for count in ranks_by_node
    ]
    try:
        said = [node.communicate(timeout=1000)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(said)
    return [int((folder / f"formed.{rank}").read_text()) for rank in range(sum(ranks_by_node))]


@pytest.mark.parametrize(
    ("when", "victims"),
    [
        ("before", "1"),
        ("refused", "0"),
        ("refused", "1"),
    ],
)
@pytest.mark.slow
def test_every_start_forms_its_ring(tmp_path: Path, when: str, victims: str) -> None:
    """`test_faults` has deaths within the calls."""
    ranks = 2 if when == "before" else 3
    assert torchrun(tmp_path, (ranks,), when, victims) == [1] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["0", "1", "2"])
def test_nodes_that_count_starts_in_their_own_way(tmp_path: Path, victims: str) -> None:
    """torchrun counts a start only on the node whose rank has died."""
    counts = torchrun(tmp_path, (2, 1), "before", victims)
    assert sorted(set(counts)) == [0, 1], counts


def same_again(usual: Tensor, attend: Callable[..., Tensor], options: TransportOptions) -> None:
    assert torch.equal(attend(transport=options), usual)


def start_again(victims: tuple[int, ...]) -> tuple[float, list[Ended]]:
    """How calls end in groups made anew with one store: a victim is away, then all are here.

    Returns the time limit of the calls from which a victim is away, too.
    """
    timeout = roomy(1.0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store, of_group = dist.distributed_c10d._get_default_store(), BACKENDS[device().type]
    x, ends = torch.full((1, 5, 2, 8), 1.0 + rank, device=device()), list[Ended]()
    attend = partial(ring_attention, x, x, x, backend=backend())
    usual = attend()
    starts = [start for victim in victims for start in (victim, None)]
    for number, victim in enumerate(starts, 1):
        dist.destroy_process_group()
        with refused(RuntimeError, "torchrun"):
            attend()
        # torch's own connections may use addresses of an earlier start, which the store still has.
        with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
            dist.init_process_group(of_group, store=store, rank=rank, world_size=world_size)
        if rank != victim:
            options = TransportOptions(timeout=FAR if victim is None else timeout)
            ends.append(ended(partial(same_again, usual, attend, options)))
        store.add("left", 1)
        while store.add("left", 0) < number * world_size:
            time.sleep(0.01)
    return timeout, ends


@pytest.mark.gloo
@pytest.mark.nccl
def test_groups_made_anew_with_the_old_store(ranks: Pools) -> None:
    victims = (1, 0, 2)
    with ranks.fresh(3) as pool:
        reported_by_victims(pool, victims)
        assert pool.close() == [0, 0, 0]


def reported_by_victims(pool: Pool, victims: tuple[int, ...]) -> None:
    """Every start without a victim ends by an error that names the victim, every other one runs."""
    for rank, (timeout, ends) in enumerate(pool.run(start_again, victims)):
        errors = [None if end.error is None else end.text for end in ends]
        reported = [one for one in errors if one is not None]
        assert len(ends) == 5 and len(reported) == 2, errors
        away = [victim for victim in victims if victim != rank]
        for victim, text in zip(away, reported, strict=True):
            assert f"ranks [{victim}] did not arrive within {timeout:g} s" in text, text
