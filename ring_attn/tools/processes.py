"""Calls one function on many items in processes that may die: `map_in_processes`."""

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
    """The results in the order of the items.

    Args:
        function: at the top level of a module; items and results are pickled.
        items: what it is called with.
        jobs: number of processes, which are kept from item to item.
        lost: the result of an item whose process died; another process takes the next one.
    """
    local, opened = threading.local(), list[ProcessPoolExecutor]()

    def call(item: T) -> R:
        # A thread has one process with one item in it at a time, so it is clear whose end it was.
        if not hasattr(local, "process"):
            # Its semaphores start multiprocessing's tracker, which no signal may end before it.
            with interrupt.held_back():
                local.process = ProcessPoolExecutor(
                    1,
                    get_context("spawn"),  # CUDA survives no fork
                    initializer=interrupt.use_folder,
                    initargs=(folder,),
                )
            opened.append(local.process)
        try:
            with interrupt.held_back():
                future = local.process.submit(function, item)
            result: R = future.result()
            return result
        except BrokenProcessPool:
            del local.process
            return lost(item)

    # Triton makes files that it would not remove when it is ended.
    with interrupt.temporary_folder() as folder:
        threads = ThreadPoolExecutor(jobs)
        try:
            yield from threads.map(call, items)
        finally:
            threads.shutdown(cancel_futures=True)
            for process in opened:
                process.shutdown()
