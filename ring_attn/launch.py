"""Starts ranks on this machine with torch's own launcher, for tests, checks and benchmarks.

    results = run_ranks(train_step, 4, config)      # train_step(config) in 4 processes

Inside each, the default process group is ready before the function is called. Under torchrun,
where the ranks exist already, the function is called in place, so that one program serves both.
"""

from __future__ import annotations

import ctypes
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
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# What lets ranks share a GPU: in torch's symmetric memory, and in NCCL from 2.30 on, which should
# have few thread blocks then and no multicast.
SHARED_GPUS = {
    "gloo": {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
    "nccl": {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    },
}


def run_ranks(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    threads: int | None = None,
    device: str | None = None,
    share_gpus: str | None = None,
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
        share_gpus: "gloo" or "nccl": with device "cuda" ranks take turns over the GPUs that there
            are, several on one, in a group of that backend. gloo is for transport
            "symmetric_memory" only; NCCL can do it from 2.30 on, where no rank may have loaded
            another. To try things out: processes on one GPU run by turns. None is one GPU each.

    Returns:
        The results in the order of the ranks. Under torchrun every rank gets all of them.

    Raises:
        ValueError: `nproc`, `threads`, `device` or `share_gpus` cannot be had here, or torchrun
            started another number of ranks.
        RuntimeError: a rank failed; the text names the first that did and has its traceback. Or an
            NCCL that cannot share a GPU.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    device = _checked_device(device, nproc, share_gpus)
    backend = share_gpus or BACKENDS[device]
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != nproc:
            raise ValueError(f"torchrun started {world_size} ranks, but {nproc} were asked for")
        return _run_in_place(fn, args, threads, device, backend)
    if threads is None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, num_cores() // nproc)
    return _launch(fn, nproc, args, threads, device, backend)


# The first with several ranks on one GPU.
LEAST_NCCL = (2, 30, 0)

# Whether this rank has a GPU that its group's backend does not show.
_shares_gpu = False


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device() -> torch.device:
    """Where a rank of `run_ranks` puts its tensors: its GPU with device "cuda", else the CPU."""
    if dist.get_backend() == "nccl" or _shares_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def nccl_version() -> tuple[int, int, int]:
    """Of the NCCL that torch has loaded, which need not be the one that it was built with."""
    code = ctypes.c_int()
    try:
        status = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except OSError as error:
        raise RuntimeError(f"this torch has no NCCL: {error}") from error
    if status:
        raise RuntimeError(f"NCCL does not tell its version: error {status}")
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def num_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def _checked_device(device: str | None, nproc: int, share_gpus: str | None) -> str:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", nproc)) if under_torchrun() else nproc
    if share_gpus is not None:
        if share_gpus not in SHARED_GPUS:
            raise ValueError(f"share_gpus must be of {list(SHARED_GPUS)}, got {share_gpus!r}")
        if device != "cuda" or num_gpus == 0:
            raise ValueError(
                f"share_gpus={share_gpus!r} needs device 'cuda' and a GPU, got device {device!r} "
                f"and {num_gpus} GPUs"
            )
        if share_gpus == "nccl" and num_gpus < local:
            _check_nccl(nccl_version())
        return device
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


def _check_nccl(version: tuple[int, int, int]) -> None:
    if version < LEAST_NCCL:
        least, seen = (".".join(map(str, one)) for one in (LEAST_NCCL[:2], version))
        raise RuntimeError(
            f"several ranks on one GPU need NCCL {least} or newer, {seen} is loaded: start with "
            "LD_PRELOAD=PATH/libnccl.so.2 of a newer nvidia-nccl wheel, or share_gpus='gloo'"
        )


def _launch(
    fn: Callable[..., T],
    nproc: int,
    args: tuple[Any, ...],
    threads: int,
    device: str,
    backend: str,
) -> list[T]:
    # Imported here: the launcher takes half a second that no rank needs.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="ring_attn_") as log_dir,
        _environment(OMP_NUM_THREADS=str(threads), **_variables(device, backend, nproc)),
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
            results = elastic_launch(config, _rank_main)(fn, args, threads, device, backend)
        except ChildFailedError as error:
            raise RuntimeError(_failure_text(error, nproc)) from None
    return [results[rank] for rank in range(nproc)]


def _variables(device: str, backend: str, nproc: int) -> dict[str, str]:
    """What ranks that share GPUs need in their environment, before they start."""
    shared = device == "cuda" and torch.cuda.device_count() < nproc
    return SHARED_GPUS[backend] if shared else {}


def _rank_main(
    fn: Callable[..., T], args: tuple[Any, ...], threads: int, device: str, backend: str
) -> T:
    torch.set_num_threads(threads)
    with _process_group(device, backend):
        return fn(*args)


def _run_in_place(
    fn: Callable[..., T], args: tuple[Any, ...], threads: int | None, device: str, backend: str
) -> list[T]:
    if threads is not None:
        torch.set_num_threads(threads)
    with _process_group(device, backend):
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, fn(*args))
    return results


@contextmanager
def _process_group(device: str, backend: str) -> Iterator[None]:
    """The default group for as long as it lasts; one that exists already is used and left alone."""
    global _shares_gpu
    if dist.is_initialized():
        yield
        return
    if device == "cuda":
        cuda = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(cuda)
        _shares_gpu = backend == "gloo"
        dist.init_process_group(backend, device_id=cuda if backend == "nccl" else None)
    else:
        dist.init_process_group(backend)
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
