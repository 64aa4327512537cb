"""Cells of several ranks that share one GPU over NCCL: processes that a worker starts and keeps.

The ways are those of `ring_attn.testing.one_gpu`, which test different paths of NCCL. "multi" needs
a newer NCCL than torch may have; `--prepare` carries it. A trial has ranks of gloo ("gloo").
Speeds mean nothing: the ranks take the GPU in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from dev.gpu.device import FOLDER

# The path of a newer NCCL, which `carry` unpacks. Workers of the stage "multi" load it first.
LIBRARY = "RING_ATTN_GPU_NCCL"

# Seconds until the ranks have a process group, and of a case.
START_SECONDS, CASE_SECONDS = 40.0, 40.0

# Seconds in which ranks must notice that a peer was killed: the group's timeout and torch's
# watchdog, which then ends the process.
NOTICE_SECONDS = 40.0


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer."""


class Ranks:
    """Processes with a process group, which run the same case each.

    They are forked from the worker, which has imported torch and never uses CUDA itself.
    """

    def __init__(self, way: str, world_size: int) -> None:
        from dev.gpu.rank_program import serve

        context, port = multiprocessing.get_context("fork"), _free_port()
        self._processes = []
        self._pipes = list[Connection]()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = environment(way, rank, world_size, port)
            process = context.Process(target=serve, args=(way, variables, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self.answers(START_SECONDS)  # they are ready
        except BaseException:
            self.close()
            raise

    def run(self, case: str, *arguments: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """Run a function of `rank_program` on all ranks; return their answers.

        Raises:
            RankFailed: naming the ranks that raised, died or did not answer in time.
        """
        for rank in range(len(self._processes)):
            self.send(rank, case, *arguments)
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[Any]:
        outcomes = self.outcomes(seconds)
        errors = {rank: x["error"] for rank, x in enumerate(outcomes) if "error" in x}
        if errors:
            raise RankFailed("; ".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        return [outcome["figures"] for outcome in outcomes]

    def outcomes(self, seconds: float) -> list[Figures]:
        """Return figures or the error of each rank."""
        end = time.monotonic() + seconds
        return [self._outcome(rank, end) for rank in range(len(self._processes))]

    def _outcome(self, rank: int, end: float) -> Figures:
        process, pipe = self._processes[rank], self._pipes[rank]
        wait([pipe, process.sentinel], timeout=max(0.0, end - time.monotonic()))
        try:
            if pipe.poll():
                outcome: Figures = pipe.recv()
                return outcome
        except (EOFError, ConnectionResetError):
            process.join(1.0)
        if process.is_alive():
            return {"error": "no answer in time", "silent": True}
        return {"error": f"ended with {process.exitcode}"}

    def send(self, rank: int, case: str, *arguments: Any) -> None:
        """Start a case on one rank."""
        self._pipes[rank].send((case, arguments))

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    def close(self) -> None:
        """End the processes at once: what NCCL does at the exit is not of these cases."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


_kept: dict[tuple[str, int], Ranks] = {}


def run(way: str, world_size: int, case: str, *arguments: Any) -> Figures:
    """Run a case on ranks that are kept for the next one; a failure ends them."""
    key = way, world_size
    for other in [key_ for key_ in _kept if key_ != key]:
        _kept.pop(other).close()
    start = time.monotonic()
    if key not in _kept:
        _kept[key] = Ranks(way, world_size)
    started = time.monotonic() - start
    try:
        answers = _kept[key].run(case, *arguments)
    except BaseException:
        _kept.pop(key).close()
        raise
    return {"ranks": answers, "start_s": round(started, 1)}


def notices(way: str, case: str, *arguments: Any) -> Figures:
    """Run a case after which every rank must have raised; its ranks are not used again."""
    ranks = Ranks(way, 2)
    try:
        for rank in range(2):
            ranks.send(rank, case, *arguments)
        outcomes = ranks.outcomes(NOTICE_SECONDS)
    finally:
        ranks.close()
    unaware = [rank for rank, outcome in enumerate(outcomes) if "error" not in outcome]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome.get("silent")]
    if unaware or silent:
        raise AssertionError(f"ranks {unaware} noticed nothing, ranks {silent} hang: {outcomes}")
    return {"errors": [str(outcome["error"])[:500] for outcome in outcomes]}


def killed(way: str, when: str) -> Figures:
    """Kill rank 1 before or within a call; rank 0 must raise or end within NOTICE_SECONDS."""
    ranks = Ranks(way, 2)
    try:
        if when == "later":
            ranks.run("call_once")
        ranks.send(0, "call_often")
        if when == "later":
            ranks.send(1, "call_often")
            time.sleep(1.0)
        ranks.kill(1)
        start = time.monotonic()
        outcome = ranks.outcomes(NOTICE_SECONDS)[0]
    finally:
        ranks.close()
    if "error" not in outcome or outcome.get("silent"):
        raise AssertionError(f"rank 0 did not notice that rank 1 was killed: {outcome}")
    return {"error": str(outcome["error"])[:500], "after_s": round(time.monotonic() - start, 1)}


def environment(way: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Variables of a rank."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if way == "gloo":
        return variables | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    if device.is_trial():
        raise NotHere("needs a GPU: NCCL")
    if way == "multi" and LIBRARY not in os.environ:
        raise NotHere("several ranks as one node need NCCL 2.30 or newer, which was not carried")
    from ring_attn.testing.one_gpu import Way, sharing_environment

    log = Path(os.environ.get(FOLDER, ".")) / f"nccl_{way}_{rank}.txt"
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}
    return variables | debug | sharing_environment(cast(Way, way), rank)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
