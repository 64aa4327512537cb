"""Starts ranks on this machine with torch's own launcher, for tests, checks and benchmarks.

    results = run_ranks(train_step, 4, config)      # train_step(config) in 4 processes

Inside each, the default process group is ready before the function is called. Under torchrun,
where the ranks exist already, the function is called in place, so that one program serves both.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

DEVICES = ("cpu", "cuda")


def run_ranks(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    threads: int | None = None,
    device: str | None = None,
) -> list[T]:
    """Calls `fn(*args)` in `nproc` ranks on this machine and returns every rank's result.

    Args:
        fn: a function at the top level of a module; arguments and results are pickled.
        nproc: number of ranks; 1 also starts a process.
        *args: the same for every rank.
        threads: CPU threads of each rank; if None, OMP_NUM_THREADS where it is set, else the cores
            of this machine divided among the ranks.
        device: "cpu" (gloo) or "cuda" (nccl, one GPU per rank); None is "cuda" where this machine
            has a GPU for every rank.

    Returns:
        The results in the order of the ranks. Under torchrun every rank gets all of them.

    Raises:
        ValueError: `nproc`, `threads` or `device` cannot be had here, or torchrun started another
            number of ranks.
        RuntimeError: a rank failed; the text names the first that did and has its traceback.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    device = _checked_device(device, nproc)
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != nproc:
            raise ValueError(f"torchrun started {world_size} ranks, but {nproc} were asked for")
        return _run_in_place(fn, args, threads, device)
    if threads is None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, num_cores() // nproc)
    return _launch(fn, nproc, args, threads, device)


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device() -> torch.device:
    """Where a rank of `run_ranks` puts its tensors: its GPU with nccl, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def num_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def _checked_device(device: str | None, nproc: int) -> str:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", nproc)) if under_torchrun() else nproc
    if device is None:
        return "cuda" if num_gpus >= local else "cpu"
    if device not in DEVICES:
        raise ValueError(f"device must be one of {list(DEVICES)}, got {device!r}")
    if device == "cuda" and num_gpus < local:
        raise ValueError(
            f"{local} ranks on device 'cuda' need as many GPUs, this machine has {num_gpus}; "
            "use fewer ranks or device 'cpu'"
        )
    return device


def _launch(
    fn: Callable[..., T], nproc: int, args: tuple[Any, ...], threads: int, device: str
) -> list[T]:
    # Imported here: the launcher takes half a second that no rank needs.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="ring_attn_") as log_dir,
        _environment(OMP_NUM_THREADS=str(threads)),
        _signal_handlers_kept(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # the machine's own name need not resolve
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        try:
            results = elastic_launch(config, _rank_main)(fn, args, threads, device)
        except ChildFailedError as error:
            raise RuntimeError(_failure_text(error, nproc)) from None
    return [results[rank] for rank in range(nproc)]


def _rank_main(fn: Callable[..., T], args: tuple[Any, ...], threads: int, device: str) -> T:
    torch.set_num_threads(threads)
    with _process_group(device):
        return fn(*args)


def _run_in_place(
    fn: Callable[..., T], args: tuple[Any, ...], threads: int | None, device: str
) -> list[T]:
    if threads is not None:
        torch.set_num_threads(threads)
    with _process_group(device):
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(*args))
    return results


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    """The default group for as long as it lasts; one that exists already is used and left alone."""
    if dist.is_initialized():
        yield
        return
    if device == "cuda":
        cuda = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(cuda)
        dist.init_process_group("nccl", device_id=cuda)
    else:
        dist.init_process_group("gloo")
    try:
        yield
        # A rank that leaves early would close connections that others still read from.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _failure_text(error: Any, nproc: int) -> str:
    """The first failure's traceback, as torch's launcher stored it, and who else failed."""
    rank, failure = error.get_first_failure()
    others = sorted(set(error.failures) - {rank})
    also = f" (then ranks {others})" if others else ""
    message = failure.message
    data = failure.error_file_data.get("message")
    if isinstance(data, dict):
        message = data.get("extraInfo", {}).get("py_callstack") or data.get("message", message)
    text = message if isinstance(message, str) else json.dumps(message)
    return f"rank {rank} of {nproc} failed{also}, exit status {failure.exitcode}:\n{text.rstrip()}"


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets variables for the ranks to inherit, and puts back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """torch's launcher installs its own handlers and leaves them there."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            if handler is not None and signal.getsignal(name) is not handler:
                signal.signal(name, handler)
