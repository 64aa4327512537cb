"""Ranks for the distributed tests: processes with a process group, started once for many tests.

The group is of gloo; with `nccl` it has NCCL for CUDA tensors, too, and all ranks share one GPU.

Processes are forked from a server that has torch loaded, so that one starts in well under a second;
those with a GPU start anew, since CUDA does not survive a fork.
A rank that raises, dies or hangs ends in a `RankError`, and the pool is not used again: messages of
half a ring may still be under way in it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ring_attn
from ring_attn.testing.one_gpu import Way, share_gpu

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._inductor.compile_fx",
    "ring_attn.testing",
    "ring_attn.testing.launch",
]
# For ranks on a GPU: a process that has asked torch for one, as torch's compiler does when it is
# imported, cannot fork others that use it.
PRELOAD_CUDA = [
    *(name for name in PRELOAD if name != "torch._inductor.compile_fx"),
    "ring_attn.backends.triton",
]
# Preloaded if a test module has loaded transformers: the import takes longer than ten ranks' start.
PRELOAD_DIFFUSERS = [
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
]
PRELOAD_TRANSFORMERS = [
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "ring_attn.integrations.trainer",
]

PACKAGE = str(Path(ring_attn.__file__).parent)

# Backends of a pool's groups, by the device of its ranks' tensors; objects travel by gloo.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# Seconds after which ranks hang: no right call on a busy machine takes as long. A rank that waits
# for another rank gives up somewhat earlier.
TIMEOUT = 600.0
GROUP_TIMEOUT = 500.0
# The limit of a call whose failure must be reported before its limit: a rank that waits for the
# limit hangs.
FAR = 1000.0
# Seconds that the other ranks get once a rank has failed: they soon fail too, or wait in vain.
GRACE = 5.0
# The threads of each gloo group wake up 100 times a second: with 137 groups four idle ranks took
# 60 % of a core. torch keeps meshes of destroyed groups, so ranks with so many are replaced.
MANY_GROUPS = 17
# Seconds from the request to stop until a process is stopped by a signal.
STOP = 30.0


def on_ranks(world_size: int, **options: float) -> Callable[[Callable[..., None]], Any]:
    """Runs a test on all ranks of the fixture `ranks`, with options of `Pool.run`."""

    def mark(test: Callable[..., None]) -> Any:
        return pytest.mark.usefixtures("ranks")(pytest.mark.on_ranks(world_size, **options)(test))

    return mark


def everyone(value: Any) -> list[Any]:
    """Gathers the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device() -> torch.device:
    """The device of this rank's tensors: the GPU if the ranks share one over NCCL, else the CPU."""
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def backend() -> str:
    """The backend of calls whose messages are tested.

    On a GPU "auto" would compile kernels, for longer than the time limits of these tests.
    """
    return "reference" if device().type == "cuda" else "auto"


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh on a rank, made once because each makes process groups; by default of all ranks."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device().type, shape, mesh_dim_names=("co", "ds")[: len(shape)])


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time; has each such rank's traceback."""


@dataclass(frozen=True)
class Ended:
    """How a call ended; `alone` if the error was not raised while another was being handled.

    No test asserts upon `took_s`: a busy machine makes every call longer.
    """

    error: type[BaseException] | None
    text: str
    took_s: float
    alone: bool = True


def ended(call: Callable[[], object]) -> Ended:
    """Runs a call and returns how it ended, whether it ran or raised."""
    start = time.monotonic()
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        alone = error.__cause__ is None and error.__context__ is None
        return Ended(type(error), str(error), time.monotonic() - start, alone)
    return Ended(None, "it ran", time.monotonic() - start)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a frame belongs to the package; the decorator of calls is outside of the call."""
    name = "" if frame is None else frame.f_code.co_filename
    return name.startswith(PACKAGE) and not name.endswith("compiling.py")


@contextlib.contextmanager
def calls_within(
    at: int | None = None, strike: Callable[[], object] | None = None, of: str | None = None
) -> Iterator[list[str]]:
    """Notes the functions of the package that its functions call, or those with the name `of`.

    Runs `strike` at the beginning of call `at`, counted from 0.
    """
    seen = list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_name
        if event == "call" and of in (None, name) and _is_ours(frame) and _is_ours(frame.f_back):
            seen.append(name)
            if len(seen) - 1 == at and strike is not None:
                strike()

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def forkserver(*, for_cuda: bool = False) -> Any:
    """The context whose processes are forked from a server that has loaded what ranks need."""
    context = multiprocessing.get_context("forkserver")
    more = PRELOAD_TRANSFORMERS if "transformers" in sys.modules else []
    more = more + (PRELOAD_DIFFUSERS if "diffusers" in sys.modules else [])
    context.set_forkserver_preload(PRELOAD_CUDA if for_cuda else PRELOAD + more)
    return context


def roomy(seconds: float) -> float:
    """Return a time limit for calls of all ranks, of at least `seconds` and in whole seconds.

    It is 20 times the time that the ranks need to form a ring here and now: on a slow or busy
    machine ranks come later.
    """
    group, x = dist.new_group(), torch.ones(1, 1, 1, 8)
    start = time.monotonic()
    ring_attn.ring_attention(x, x, x, group=group)
    took = max(everyone(time.monotonic() - start))
    dist.destroy_process_group(group)
    return float(max(seconds, math.ceil(20 * took)))


class Pool:
    """`world_size` processes with a default process group over gloo, or NCCL on one GPU."""

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout: float = GROUP_TIMEOUT,
        queued: bool = False,
        nccl: Way | None = None,
        environment: Mapping[str, str] | None = None,
        enter: Sequence[Callable[[], str]] = (),
    ) -> None:
        """Starts the processes, and does not wait for them.

        Args:
            world_size: number of ranks.
            group_timeout: seconds.
            queued: treats CPU tensors as CUDA's.
            nccl: the way in which the ranks share a GPU, see `share_gpu`.
            environment: further variables of all ranks.
            enter: for each rank a function that it calls first, and that returns rank 0's address
                as a host.
        """
        self.world_size = world_size
        context = forkserver(for_cuda=nccl is not None)
        medium = Medium(queued, nccl, dict(environment or {}))
        # The store lives here: its port is known before any rank starts, and it outlives them all.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            first = enter[rank] if enter else None
            args = (rank, world_size, self._store.port, group_timeout, medium, first, theirs)
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.closed = False
        self.num_groups = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.closed:
            self.close(now=True)

    @property
    def answered(self) -> list[int]:
        """The ranks whose results have come, since `start`."""
        return [rank for rank, pipe in enumerate(self._pipes) if pipe.poll()]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Calls a function of a module on every rank; returns the results in rank order."""
        self.start(fn, *args)
        return self.results(timeout=timeout)

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """First half of `run`: sends the call to every rank."""
        message = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send(message)

    def results(self, lost: Collection[int] = (), *, timeout: float = TIMEOUT) -> list[Any]:
        """Second half of `run`: results, None for ranks in `lost`, which a test stops or kills."""
        values, failed = dict[int, Any](), dict[int, str]()
        waiting = set(range(self.world_size)) - set(lost)
        deadline = time.monotonic() + timeout
        while waiting:
            left = deadline - time.monotonic()
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, left))
            if not ready:
                break
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                waiting.remove(rank)
                try:
                    values[rank], error, self.num_groups = pickle.loads(
                        self._pipes[rank].recv_bytes()
                    )
                except (EOFError, ConnectionError):
                    self._processes[rank].join(GRACE)
                    error = f"the process ended, exit code {self._processes[rank].exitcode}"
                if error is not None:
                    failed[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed |= dict.fromkeys(waiting, "no answer in time")
        if failed:
            self.close(now=True)
            text = "\n".join(f"--- rank {rank}: {failed[rank]}" for rank in sorted(failed))
            raise RankError(f"ranks {sorted(failed)} of {self.world_size} failed\n{text}")
        return [values.get(rank) for rank in range(self.world_size)]

    def close(self, *, now: bool = False, lost: Collection[int] = ()) -> list[int | None]:
        """Ends the processes and returns their exit codes, negative where a signal was needed.

        The signal is sent at once if `now`; nothing waits for the ranks in `lost`.
        """
        self.closed = True
        if not now:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # the process is gone
                    pipe.send(None)
            deadline = time.monotonic() + STOP
            for rank, process in enumerate(self._processes):
                if rank not in lost:
                    process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()  # ends a stopped process too
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        return [process.exitcode for process in self._processes]


class Pools:
    """One pool for each world size, started when first asked for."""

    def __init__(self, *, queued: bool, nccl: Way | None = None) -> None:
        self.queued, self.nccl = queued, nccl
        self._pools: dict[int, Pool] = {}

    @property
    def device(self) -> str:
        """The device of the ranks' tensors."""
        return "cpu" if self.nccl is None else "cuda"

    def fresh(self, world_size: int, **options: Any) -> Pool:
        """A pool for one test, which may stop or kill its processes, and closes it."""
        return Pool(world_size, queued=self.queued, nccl=self.nccl, **options)

    def __call__(self, world_size: int) -> Pool:
        """The pool of that size; a new pool if the last has been closed."""
        pool = self._pools.get(world_size)
        if pool is None or pool.closed:
            pool = self._pools[world_size] = self.fresh(world_size)
        return pool

    def close(self, groups: int = 0) -> None:
        """Closes pools with at least so many groups; not in a test, which may need its ranks."""
        for pool in self._pools.values():
            if not pool.closed and pool.num_groups >= groups:
                pool.close()


@dataclass(frozen=True)
class Medium:
    """How the ranks of a pool exchange tensors; see `Pool`."""

    queued: bool
    nccl: Way | None
    environment: dict[str, str]


def _work(
    rank: int,
    world_size: int,
    port: int,
    group_timeout: float,
    medium: Medium,
    enter: Callable[[], str] | None,
    pipe: Connection,
) -> None:
    """Main function of a rank: joins the group, then runs the calls it receives until None."""
    torch.set_num_threads(1)
    host = "127.0.0.1" if enter is None else enter()
    # The host's name need not resolve to an address that reaches this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not torch.cuda.is_available():
        # Must be set before triton is imported, which some functions of torch do.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.update(medium.environment)
    gpu = None
    if medium.nccl is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        # These tests are of messages; kernels have their own.
        os.environ["RING_ATTN_FIRST_USE"] = "off"
        gpu = share_gpu(medium.nccl)
    dist.init_process_group(
        BACKENDS["cpu" if gpu is None else "cuda"],
        device_id=gpu,
        store=dist.TCPStore(
            host, port, is_master=bool(enter) and rank == 0, wait_for_workers=False
        ),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    if medium.queued:
        from tests.distributed.queued import install

        install()
    while True:
        try:
            message = pipe.recv()
        except EOFError:  # the tests were killed
            return
        if message is None:
            return
        try:
            fn, args = pickle.loads(message)
            value = fn(*args)
            # Bytes, not objects: multiprocessing would send tensors as shared memory.
            answer = pickle.dumps((value, None, len(distributed_c10d._world.pg_map)))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc(), 1))
        pipe.send_bytes(answer)
