"""Ranks as processes on this machine, for tests, checks and benchmarks.

    results = run_ranks(train_step, 4, config)      # train_step(config) in 4 processes

Each process creates the default process group before it calls the function. Under torchrun, where
the ranks exist already, each rank calls the function in place, so the same program works there.

The processes end when the process that started them ends, for any reason. They ignore ^C, which
reaches all processes of a terminal, so that only the process that started them handles it.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

from ring_attn.core.names import DEVICES
from ring_attn.values.checks import check_one_of
from ring_attn.values.outside import env_int

T = TypeVar("T")
R = TypeVar("R")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Makes kernels of several NCCL communicators start in the host's order. Otherwise a kernel that
# waits for free SMs could block another kernel whose peers already wait for it.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def run_ranks(
    fn: Callable[..., T],
    nproc: int,
    *args: object,
    threads: int | None = None,
    device: str | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Call `fn(*args)` in `nproc` ranks on this machine, and return the result of each rank.

    Args:
        fn: a function at the top level of a module; arguments and results are pickled.
        nproc: number of ranks; 1 also starts a process.
        *args: the arguments, the same for every rank.
        threads: CPU threads of each rank. None: OMP_NUM_THREADS if it is set, else the cores of
            this machine divided among the ranks.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU for each rank). None: "cuda" if this machine
            has a GPU for every rank, else "cpu".
        timeout: seconds after which ranks without a result are killed; None is no limit. Ranks of
            torchrun are not killed.

    Returns:
        The results in the order of the ranks. Under torchrun every rank gets all results.

    Raises:
        ValueError: this machine cannot provide `nproc`, `threads` or `device`, or torchrun started
            a different number of ranks.
        RuntimeError: a rank failed; the text names the first failed rank, and has its traceback.
        TimeoutError: ranks have no result within the timeout.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads must be at least 1 and at most {MAX_THREADS}, got {threads}")
    device = checked_device(device, nproc)
    if under_torchrun():
        world_size = env_int("WORLD_SIZE", 1)
        if world_size != nproc:
            raise ValueError(
                f"nproc must be the number of ranks that torchrun started, {world_size}, got "
                f"{nproc}: pass that number, or start another number of ranks"
            )
        return _run_in_place(fn, args, threads, device)
    check_memory(nproc)
    if threads is None:
        threads = env_int("OMP_NUM_THREADS", 0) or max(1, num_cores() // nproc)
    work = pickle.dumps((fn, args, threads, device, {}))
    return _launch(work, nproc, threads, timeout, START_METHOD)


def run_forked(
    fn: Callable[..., T],
    nproc: int,
    *args: object,
    preload: Sequence[str],
    timeout: float | None = None,
) -> list[T]:
    """Call `fn(*args)` in `nproc` CPU ranks, as `run_ranks` does, in processes that start fast.

    They are forked from a server that has imported the modules `preload` once: importing torch
    takes longer than a small step. The ranks get the current environment variables, not those that
    the server has started with.

    Args:
        fn, nproc, args, timeout: as in `run_ranks`.
        preload: names of modules that can be imported without side effects, such as threads.

    Raises:
        ValueError, RuntimeError, TimeoutError: as `run_ranks` does. Under torchrun, the ranks exist
            already.
    """
    if under_torchrun():
        raise ValueError("the ranks exist already (torchrun): run this in one process")
    check_memory(nproc)
    if START_METHOD != "forkserver":  # else the server has its modules
        get_context("forkserver").set_forkserver_preload([*preload])
    threads = env_int("OMP_NUM_THREADS", 0) or max(1, num_cores() // nproc)
    work = pickle.dumps((fn, args, threads, "cpu", dict(os.environ)))
    return _launch(work, nproc, threads, timeout, "forkserver")


def machine_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(nproc: int) -> None:
    """Refuse more ranks than this machine has memory for."""
    needed, memory = nproc * RANK_BYTES, machine_bytes()
    if needed > memory:
        raise ValueError(
            f"{nproc} ranks need at least {needed / 2**30:.4g} GiB, this machine has "
            f"{memory / 2**30:.4g} GiB; use fewer ranks"
        )


def check_tensors(what: str, nbytes: int, device: str, *, world_size: int = 1) -> None:
    """Refuse tensors that need more than the memory of a GPU, or of this machine's CPUs.

    Args:
        what: the tensors, for the message.
        nbytes: bytes of the tensors of all ranks.
        device: "cpu" or "cuda".
        world_size: ranks that share the tensors evenly, of which torchrun may have started some on
            other machines.

    Raises:
        ValueError: the tensors need more memory.
    """
    if device == "cuda":
        needed, memory = nbytes // world_size, torch.cuda.get_device_properties(0).total_memory
    else:
        num_local = env_int("LOCAL_WORLD_SIZE", 1) if under_torchrun() else world_size
        needed, memory = nbytes * min(num_local, world_size) // world_size, machine_bytes()
    if needed > memory:
        where = "a GPU" if device == "cuda" else "this machine"
        raise ValueError(
            f"{what} need at least {needed / 2**30:.4g} GiB, and {where} has "
            f"{memory / 2**30:.4g} GiB: pass smaller sizes"
        )


# Upper limit of the threads of a rank: no machine has as many cores.
MAX_THREADS = 4096

# Memory of a rank without tensors: Python, torch and the process group.
RANK_BYTES = 150 << 20


def timed_on_ranks(fn: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds of a call, from a barrier until the last rank of the group is done."""
    on_gpu = rank_device().type == "cuda"

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    dist.barrier(group)
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    seconds = time.perf_counter() - start
    # Ranks that share a core finish one after another: a mean over ranks would be too short.
    worst = torch.tensor(seconds, dtype=torch.float64, device=rank_device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst)


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    """Set the number of torch's CPU threads in this process, within a context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def under_torchrun() -> bool:
    """Return whether torchrun or another launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device() -> torch.device:
    """Return the device of a rank of `run_ranks`: its GPU with device "cuda", else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def num_cores() -> int:
    """Return the number of cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


def checked_device(device: str | None, nproc: int) -> str:
    """Return the device of `nproc` ranks on this machine; None is "cuda" if each can have a GPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_local = env_int("LOCAL_WORLD_SIZE", nproc) if under_torchrun() else nproc
    if device is None:
        return "cuda" if num_gpus >= num_local else "cpu"
    check_one_of("device", device, DEVICES)
    if device == "cuda" and num_gpus < num_local:
        if num_local == 1:
            needed, advice = "1 rank on device 'cuda' needs a GPU", "use device 'cpu'"
        else:
            needed = f"{num_local} ranks on device 'cuda' need as many GPUs"
            advice = "use fewer ranks or device 'cpu'"
        raise ValueError(f"{needed}, this machine has {num_gpus}; {advice}")
    return device


# The address of the ranks' store.
LOOPBACK = "127.0.0.1"

# Size of a message to the store; torch's limit is 8 MiB.
STORED_BYTES = 4 << 20

# Key of the first error in the store.
FAILED = "failed"

START_METHOD = "spawn"  # a forked process cannot use CUDA


def _launch(
    work: bytes, nproc: int, threads: int, timeout: float | None, start_method: str
) -> list[Any]:
    """Start ranks, and return their results. Pickle has no types.

    `work` is pickled: the function, its arguments, the number of threads, the device, and
    environment variables.
    """
    # The store listens on the loopback only: anyone who reaches it could write to it.
    server = socket.create_server((LOOPBACK, 0))
    _, port = server.getsockname()
    with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(threads)), signals_wait(start_method):
        ranks = start_processes(
            _run_rank,
            args=(work, nproc, port),
            nprocs=nproc,
            join=False,
            daemon=True,
            start_method=start_method,
        )
    end = math.inf if timeout is None else time.monotonic() + timeout
    try:
        # The store is in this process, so that it outlives rank 0. It is created after the ranks,
        # since its threads would receive the signals that are blocked above.
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        while not ranks.join(None if timeout is None else max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                names = ", ".join(map(str, sorted(ranks.sentinels.values())))
                raise TimeoutError(f"ranks {names} of {nproc} have no result after {timeout:g} s")
        for rank in range(nproc):
            if not store.check([str(rank)]):
                raise RuntimeError(f"rank {rank} of {nproc} failed: it ended before its result")
        return [pickle.loads(store.get(str(rank))) for rank in range(nproc)]
    except ProcessExitedException as error:
        text = f"rank {error.error_index} of {nproc} failed: {error.msg}"
        if error.exit_code > 0 and store.check([FAILED]):  # else a signal has ended the rank
            text = store.get(FAILED).decode()
        raise RuntimeError(text) from None
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


def _run_rank(rank: int, work: bytes, nproc: int, port: int) -> None:
    """Run the function on one rank, in its process, and store the result."""
    _begin()
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # The store exists already: rank 0 must not open another.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCH_ORDER: os.environ.get(LAUNCH_ORDER, "1"),
    }
    os.environ.update(variables)
    try:
        fn, args, threads, device, environment = pickle.loads(work)
        os.environ.update(environment | variables)
        torch.set_num_threads(threads)
        _join(device)
        result = pickle.dumps(fn(*args))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        # The store keeps the first error: other ranks raise when they lose their connections.
        text = f"rank {rank} of {nproc} failed:\n{traceback.format_exc().rstrip()}"
        store.compare_set(FAILED, "", text)
        sys.stdout.flush()
        os._exit(1)  # an interpreter that ends may wait for messages that other ranks do not send
    for start in range(0, len(result), STORED_BYTES):
        part = result[start : start + STORED_BYTES]
        store.append(str(rank), part)  # type: ignore[attr-defined]  # torch's stub lacks it
    store.check([str(rank)])  # the store answers after all parts have arrived


def map_in_processes(
    function: Callable[[T], R], items: Sequence[T], jobs: int, lost: Callable[[T], R]
) -> Iterator[R]:
    """Yield the results of `function(item)`, in the order of the items.

    Args:
        function: a function at the top level of a module; items and results are pickled.
        items: arguments of the calls.
        jobs: number of processes; each handles many items.
        lost: returns the result of an item whose process dies even if it handles no other item.
    """
    left = [*items]
    while left:
        pool = ProcessPoolExecutor(jobs, get_context(START_METHOD), _begin)
        try:
            with signals_wait(START_METHOD):
                futures = [pool.submit(function, item) for item in left]
            for future in futures:
                result = future.result()
                left.pop(0)
                yield result
        except BrokenProcessPool:
            # Each of the items may have ended its process: the next one is tried by itself.
            if jobs == 1 and len(left) == 1:
                yield lost(left.pop())
            else:
                yield from map_in_processes(function, [left.pop(0)], 1, lost)
        finally:
            # Without a wait, a pool that ends with the interpreter may write to a closed pipe. With
            # a wait, ^C would wait for calls that still run.
            pool.shutdown(wait=not left, cancel_futures=True)


SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextmanager
def signals_wait(start_method: str) -> Iterator[None]:
    """Block signals within a context, also for processes that are started there.

    A process that gets a signal while it starts would print multiprocessing's EOFError.
    """
    resource_tracker.ensure_running()  # it unblocks signals
    if start_method == "forkserver":
        # Every process that the server ever forks has the signals blocked that the server has.
        forkserver.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _begin() -> None:
    """End this process when its parent ends; unblock all signals except that of ^C."""

    def wait() -> None:
        parent = parent_process()
        assert parent is not None, "this process was started by multiprocessing"
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGINT})
    faulthandler.enable()


def _run_in_place(
    fn: Callable[..., T], args: tuple[object, ...], threads: int | None, device: str
) -> list[T]:
    """Run the function on this rank, which a launcher started, and return all ranks' results."""
    if threads is not None:
        torch.set_num_threads(threads)
    if not dist.is_initialized():
        _join(device)
        # Once at the end: torch cannot create a second group from the launcher's store.
        atexit.register(dist.destroy_process_group)
    results: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, fn(*args))
    dist.barrier()
    return cast(list[T], results)


def _join(device: str) -> None:
    """Create the default process group."""
    cuda = None
    if device == "cuda":
        cuda = torch.device("cuda", env_int("LOCAL_RANK", 0))
        torch.cuda.set_device(cuda)
    dist.init_process_group(BACKENDS[device], device_id=cuda)
