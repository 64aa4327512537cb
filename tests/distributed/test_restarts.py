"""torchrun starts a job again, over one store: every start forms its ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
        said = [node.communicate(timeout=100)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(said)
    return [int((folder / f"formed.{rank}").read_text()) for rank in range(sum(ranks_by_node))]


ROWS = [
    ((world_size,), when, victims)
    for when in ("before", "during", "after")
    for world_size, victims in ((2, "0"), (3, "2"), (3, "0,1"), (4, "1,3"))
]


@pytest.mark.parametrize(
    ("ranks_by_node", "when", "victims"),
    [
        pytest.param((2,), "before", "1"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ROWS),
    ],
    ids=str,
)
def test_every_start_forms_its_ring(
    tmp_path: Path, ranks_by_node: tuple[int, ...], when: str, victims: str
) -> None:
    assert torchrun(tmp_path, ranks_by_node, when, victims) == [1] * sum(ranks_by_node)


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["0", "1", "2"])
def test_nodes_that_count_starts_in_their_own_way(tmp_path: Path, victims: str) -> None:
    """torchrun counts a start only on the node whose rank has died."""
    counts = torchrun(tmp_path, (2, 1), "before", victims)
    assert sorted(set(counts)) == [0, 1], counts
