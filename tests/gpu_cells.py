"""Cells with planted faults, for the runner of `python -m dev gpu`; they need no torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dev.gpu import device
from dev.gpu.cells import Cell, NotHere, Stage

STAGE, SECONDS = "planted", 240.0
# Seconds of a cell that ends, and of one that hangs: on a busy machine a worker may need seconds
# to get there.
LIMIT, HANG_LIMIT = 120.0, 4.0

# Bytes of a pthread_mutex_t at least; zeros are an unlocked one.
MUTEX_BYTES = 128


def passes() -> dict[str, float]:
    """Fail with CUDA's error if an earlier cell of this process has lost the context."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.synchronize()
    return {"pid": os.getpid()}


def is_wrong() -> None:
    raise AssertionError("dq: error / bound 31.2")


def is_refused() -> None:
    raise NotHere("there is no ncu")


def lose_context() -> None:
    """From here on every call of CUDA raises."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    synchronize()


def hang(library: type[ctypes.CDLL] = ctypes.CDLL) -> None:
    """Lock a mutex twice, in C: no signal ends it, nor does an exception."""
    c, mutex = library(None), ctypes.create_string_buffer(MUTEX_BYTES)
    for _ in range(2):
        c.pthread_mutex_lock(mutex)


def hang_with_the_gil() -> None:
    hang(ctypes.PyDLL)


def hang_with_a_child() -> None:
    """The child would outlive a worker that is killed alone."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    thread.join()


def crash() -> None:
    ctypes.string_at(0)


def wait_for_two_workers() -> None:
    """Wait until the log of another worker is there."""
    folder = Path(os.environ[device.FOLDER])
    while len(list(folder.glob("worker*.log"))) < 2:
        time.sleep(0.01)


def listed() -> dict[str, Any]:
    """One more cell, as a stage lists its cells in a worker."""
    return {"cells": [("listed", "tests.gpu_cells:passes", [], LIMIT)]}


HANGS = (hang, hang_with_the_gil, hang_with_a_child)
FAULTS = (is_wrong, is_refused, lose_context, *HANGS, crash)
LIMITS = {fault.__name__: HANG_LIMIT if fault in HANGS else LIMIT for fault in FAULTS}


def planted(workers: int = 1) -> Stage:
    """A stage in which each fault has a good cell after it."""
    cells = []
    for name, limit in LIMITS.items():
        cells.append(Cell(STAGE, name, f"tests.gpu_cells:{name}", limit=limit))
        cells.append(Cell(STAGE, f"after {name}", "tests.gpu_cells:passes", limit=LIMIT))
    lists = "tests.gpu_cells:listed"
    return Stage(STAGE, SECONDS, "one cell", tuple(cells), lists, workers=workers)


# -- in Triton's interpreter

WRONG, WRONG_LIMIT = "wrong results", 120.0
KERNEL = ("portable", 64, "full")


def forward_of_a_wrong_scale() -> dict[str, Any]:
    """The kernel gets twice the scale of the oracle."""
    from dev.gpu import contact
    from ring_attn.core.spec import Scores

    with mock.patch.object(contact, "Scores", lambda scale: Scores(2 * scale)):
        return contact.forward(*KERNEL)


def wrong_results() -> Stage:
    """The forward of `contact`, right and wrong."""
    cells = (
        Cell(WRONG, "right", "dev.gpu.contact:forward", KERNEL, WRONG_LIMIT),
        Cell(WRONG, "wrong", "tests.gpu_cells:forward_of_a_wrong_scale", limit=WRONG_LIMIT),
    )
    return Stage(WRONG, 2 * WRONG_LIMIT, "wrong results are found", cells)


# -- over the stub of libcuda, in processes of their own

LAUNCHES, LAUNCHES_LIMIT = "launches", 240.0
FORWARD, FORWARD_OF = "dev.gpu.contact:forward", ("gluon 0", 64, "full")


def over_the_stub() -> Stage:
    """Right cells around those with faults, and a test of pytest."""
    faults = tuple(
        Cell(LAUNCHES, name, f"tests.gpu_cells:{name}", limit=LIMITS[name])
        for name in ("hang", "crash")
    )
    test = "tests/kernels/test_gpu.py::test_decode[1]"
    given = {
        "forward": ("dev.gpu.launching:launch", (FORWARD, *FORWARD_OF)),
        "wrong stride": ("tests.kernels.stub_cells:with_a_wrong_stride", ()),
        "stale pointers": ("tests.kernels.stub_cells:with_stale_pointers", ()),
        "repeated": ("tests.kernels.stub_cells:call_twice", ()),
        "test": ("dev.gpu.tests:run", (test,)),
    }
    cells = tuple(
        Cell(LAUNCHES, name, target, arguments, LAUNCHES_LIMIT)
        for name, (target, arguments) in given.items()
    )
    seconds = len(cells) * LAUNCHES_LIMIT
    return Stage(LAUNCHES, seconds, "faults cost their cells", (*cells[:2], *faults, *cells[2:]))
