"""Starts ranks on this machine, for tests, checks and benchmarks.

    results = run_ranks(train_step, 4, config)      # train_step(config) in 4 processes

Each process makes the default process group before it calls the function. Under torchrun, where the
ranks exist already, each rank calls the function in place, so that one program serves both.

Processes that start here end with the process that started them, however that process ends. They
ignore ^C, which reaches all processes of a terminal: it is for the process that started them.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from ring_attn.core.names import DEVICES
from ring_attn.core.values import check_one_of, env_int

T = TypeVar("T")
R = TypeVar("R")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Makes kernels of several NCCL communicators start in the host's order. Otherwise a kernel that
# waits for free SMs could block another kernel whose peers already wait for it.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def run_ranks(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    threads: int | None = None,
    device: str | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Calls `fn(*args)` in `nproc` ranks on this machine and returns every rank's result.

    Args:
        fn: a function at the top level of a module; arguments and results are pickled.
        nproc: number of ranks; 1 also starts a process.
        *args: the same for every rank.
        threads: CPU threads of each rank; None is OMP_NUM_THREADS if set, else the cores of this
            machine divided among the ranks.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU per rank); None is "cuda" if this machine has
            a GPU for every rank.
        timeout: seconds after which ranks that have no result are ended; None waits for ever.
            Ranks of torchrun are not ended.

    Returns:
        The results in the order of the ranks. Under torchrun every rank gets all of them.

    Raises:
        ValueError: this machine cannot provide `nproc`, `threads` or `device`, or torchrun started
            another number of ranks.
        RuntimeError: a rank failed; the text has the first failed rank and its traceback.
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
            raise ValueError(f"torchrun started {world_size} ranks, but {nproc} were asked for")
        return _run_in_place(fn, args, threads, device)
    needed, memory = nproc * RANK_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"{nproc} ranks need at least {needed / 2**30:.4g} GiB, this machine has "
            f"{memory / 2**30:.4g} GiB; use fewer ranks"
        )
    if threads is None:
        threads = env_int("OMP_NUM_THREADS", 0) or max(1, num_cores() // nproc)
    return _launch(pickle.dumps((fn, args, threads, device)), nproc, threads, timeout)


# Upper limit of the threads of a rank: more than any machine has cores.
MAX_THREADS = 4096

# Memory of a rank without tensors: Python, torch and the process group.
RANK_BYTES = 150 << 20


def timed_on_ranks(fn: Callable[[], object]) -> float:
    """Seconds of a call, from a barrier until the last rank is done."""
    wait = torch.cuda.synchronize if rank_device().type == "cuda" else lambda: None
    dist.barrier()
    wait()
    start = time.perf_counter()
    fn()
    wait()
    seconds = time.perf_counter() - start
    # Ranks that share a core finish one after another: a mean over ranks would be too short.
    worst = torch.tensor(seconds, dtype=torch.float64, device=rank_device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    """A context in which torch has that number of CPU threads in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def under_torchrun() -> bool:
    """Tells whether torchrun or another launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device() -> torch.device:
    """Device of a rank of `run_ranks`: its GPU with device "cuda", else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def num_cores() -> int:
    """Number of cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


def checked_device(device: str | None, nproc: int) -> str:
    """The device of `nproc` ranks on this machine; None is "cuda" if each can have a GPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = env_int("LOCAL_WORLD_SIZE", nproc) if under_torchrun() else nproc
    if device is None:
        return "cuda" if num_gpus >= local else "cpu"
    check_one_of("device", device, DEVICES)
    if device == "cuda" and num_gpus < local:
        raise ValueError(
            f"{local} ranks on device 'cuda' need as many GPUs, this machine has {num_gpus}; "
            "use fewer ranks or device 'cpu'"
        )
    return device


# The address of the ranks' store.
LOOPBACK = "127.0.0.1"


def _launch(work: bytes, nproc: int, threads: int, timeout: float | None) -> list[Any]:
    # This process holds the store, so that it outlives rank 0.
    # It listens on the loopback only: anyone who reaches it could write to it.
    server = socket.create_server((LOOPBACK, 0))
    store = dist.TCPStore(
        LOOPBACK,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    ranks = list[Worker]()
    try:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(threads)):
            for rank in range(nproc):
                variables = {
                    **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nproc)),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(store.port),
                    # The store exists already: rank 0 must not open another.
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    LAUNCH_ORDER: os.environ.get(LAUNCH_ORDER, "1"),
                }
                ranks.append(_start(_run_rank, variables, work))
        results = _results(ranks, timeout)
        for _, process in ranks:
            process.join()
        return results
    finally:
        _end(ranks)


def map_in_processes(
    function: Callable[[T], R], items: Sequence[T], jobs: int, lost: Callable[[T], R]
) -> Generator[R, None, None]:
    """Results of `function(item)`, in the order of the items.

    Args:
        function: defined at the top level of a module; items and results are pickled.
        items: arguments of the calls.
        jobs: number of processes; each takes many items.
        lost: makes the result of an item whose process died; a new process replaces it.
    """
    results = dict[int, R]()
    idle, busy = list[Worker](), dict[Connection, tuple[int, Worker]]()
    given = 0
    try:
        for index in range(len(items)):
            while index not in results:
                while given < len(items) and len(busy) < jobs:
                    worker = idle.pop() if idle else _start(_run_items, function)
                    busy[worker[0]] = given, worker
                    worker[0].send(items[given])
                    given += 1
                for pipe in wait([*busy]):
                    assert isinstance(pipe, Connection), "only pipes are waited for"
                    at, worker = busy.pop(pipe)
                    try:
                        results[at] = pipe.recv()
                        idle.append(worker)
                    except (EOFError, ConnectionError):
                        results[at] = lost(items[at])
            yield results.pop(index)
    finally:
        _end([*idle, *(worker for _, worker in busy.values())])


SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

# Our end of a pipe, and the process at the other end.
Worker = tuple[Connection, Any]


def _start(run: Callable[..., None], *args: Any) -> Worker:
    """Starts a process that calls `run(pipe, *args)`."""
    context = get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_process, args=(run, theirs, *args), daemon=True)
    with _signals_held_back():
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Raises signals at the end of the block; a process that is started within has them blocked.

    Half started, a process would print multiprocessing's EOFError.
    """
    held = list[int]()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in handlers.items() if handler != signal.SIG_IGN]
    resource_tracker.ensure_running()  # it unblocks signals
    # Handlers as well as the mask: threads of torch's store take signals that this one blocks.
    for number in caught:
        signal.signal(number, lambda number, _: held.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number in caught:
            signal.signal(number, handlers[number])
        for taken in held:
            signal.raise_signal(taken)


def _run_process(run: Callable[..., None], pipe: Connection, *args: Any) -> None:
    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None, "this process was started by multiprocessing"
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # SIGINT stays blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGINT})
    faulthandler.enable()
    run(pipe, *args)


def _run_items(pipe: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        pipe.send(function(pipe.recv()))


def _end(workers: Sequence[Worker]) -> None:
    for _, process in workers:
        process.kill()
    for _, process in workers:
        process.join()


def _results(ranks: Sequence[Worker], timeout: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    end = None if timeout is None else time.monotonic() + timeout
    while len(results) < len(ranks):
        waiting = {pipe: rank for rank, (pipe, _) in enumerate(ranks) if rank not in results}
        arrived = wait([*waiting], None if end is None else max(0.0, end - time.monotonic()))
        if not arrived:
            names = ", ".join(map(str, waiting.values()))
            raise TimeoutError(f"ranks {names} of {len(ranks)} have no result after {timeout:g} s")
        for pipe in arrived:
            assert isinstance(pipe, Connection), "only pipes are waited for"
            rank = waiting[pipe]
            try:
                results[rank], error = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                error = f" {_ending(ranks[rank][1])}"
            if error:
                raise RuntimeError(f"rank {rank} of {len(ranks)} failed:{error}")
    return [results[rank] for rank in range(len(ranks))]


def _ending(process: Any) -> str:
    process.join()
    if process.exitcode < 0:
        return f"it was ended by {signal.Signals(-process.exitcode).name}"
    return f"it ended with status {process.exitcode} before it had a result"


def _run_rank(pipe: Connection, variables: dict[str, str], work: bytes) -> None:
    os.environ.update(variables)
    try:
        fn, args, threads, device = pickle.loads(work)
        torch.set_num_threads(threads)
        _join(device)
        report = pickle.dumps((fn(*args), ""))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        report = pickle.dumps((None, f"\n{traceback.format_exc().rstrip()}"))
    pipe.send_bytes(report)


def _run_in_place(
    fn: Callable[..., T], args: tuple[Any, ...], threads: int | None, device: str
) -> list[T]:
    if threads is not None:
        torch.set_num_threads(threads)
    if not dist.is_initialized():
        _join(device)
        # Not after each call: torch cannot make a second group from the launcher's store.
        atexit.register(dist.destroy_process_group)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, fn(*args))
    dist.barrier()
    return results


def _join(device: str) -> None:
    cuda = None
    if device == "cuda":
        cuda = torch.device("cuda", env_int("LOCAL_RANK", 0))
        torch.cuda.set_device(cuda)
    dist.init_process_group(BACKENDS[device], device_id=cuda)
