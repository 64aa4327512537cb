"""`map_in_processes`: calls one function on many items, in processes that may crash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from ring_attn.tools import interrupt

T = TypeVar("T")
R = TypeVar("R")


def map_in_processes(
    function: Callable[[T], R], items: Sequence[T], jobs: int, lost: Callable[[T], R]
) -> Iterator[R]:
    """Results of `function(item)`, in the order of the items.

    Args:
        function: defined at the top level of a module; items and results are pickled.
        items: arguments of the calls.
        jobs: number of processes; each takes many items.
        lost: makes the result of an item whose process died; a new process replaces it.
    """
    local, opened = threading.local(), list[ProcessPoolExecutor]()

    def call(item: T) -> R:
        # Each thread owns one process with one item at a time, so a crash blames the right item.
        try:
            # The pool's semaphores start multiprocessing's tracker; no signal may end it early.
            with interrupt.held_back():
                if not hasattr(local, "process"):
                    local.process = ProcessPoolExecutor(
                        1,
                        get_context("spawn"),  # CUDA does not survive a fork
                        initializer=interrupt.use_folder,
                        initargs=(folder,),
                    )
                    opened.append(local.process)
                future = local.process.submit(function, item)
            result: R = future.result()
            return result
        except BrokenProcessPool:
            del local.process
            return lost(item)

    # Triton's temporary files would remain if its process is killed.
    with interrupt.temporary_folder() as folder:
        threads = ThreadPoolExecutor(jobs)
        try:
            yield from threads.map(call, items)
        finally:
            threads.shutdown(cancel_futures=True)
            for process in opened:
                process.shutdown()
