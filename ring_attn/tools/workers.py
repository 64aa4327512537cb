"""Processes that call one function on one item after another, and may die or hang: `Workers`.

A compiler that takes its process down, or a kernel that never ends, costs its own item and no
other: the process is replaced.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

# Why an item was not begun.
NO_TIME = "there was no time left"

T = TypeVar("T")
R = TypeVar("R")


class Workers(Generic[T, R]):
    """A fixed number of processes; they start when they are first needed and are kept."""

    def __init__(
        self, function: Callable[[T], tuple[R, bool]], lost: Callable[[T, str], R], count: int
    ) -> None:
        """
        Args:
            function: at the top level of a module; returns its result, and whether its process can
                go on. Items and results are pickled.
            lost: the result of an item whose process came to an end, by the reason.
            count: of processes.
        """
        self._function, self._lost = function, lost
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(function) for _ in range(count)]
        for worker in self._workers:
            self._free.put(worker)

    def map(self, items: Sequence[T], limit: float, deadline: float | None = None) -> list[R]:
        """The results in the order of the items.

        Args:
            items: what the function is called with.
            limit: seconds of one call, after which its process is killed.
            deadline: by `time.monotonic`; what has not begun by then is lost.
        """

        def call(item: T) -> R:
            worker = self._free.get()
            try:
                if deadline is not None and time.monotonic() > deadline:
                    return self._lost(item, NO_TIME)
                result: R = worker.call(item, limit)
                return result
            except _Ended as end:
                return self._lost(item, str(end))
            finally:
                self._free.put(worker)

        threads = ThreadPoolExecutor(len(self._workers))
        try:
            return list(threads.map(call, items))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Kills the processes: one may hang in a kernel."""
        for worker in self._workers:
            worker.stop()


class _Ended(Exception):
    """A process came to an end; the text says how."""


class _Worker:
    """One process at a time, and the pipe to it."""

    def __init__(self, function: Callable[[Any], tuple[Any, bool]]) -> None:
        self._function = function
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, item: Any, limit: float) -> Any:
        pipe = self._pipe or self._start()
        try:
            pipe.send(item)
            if not pipe.poll(limit):
                self.stop()
                raise _Ended(f"it took more than {limit:g} s")
            result, goes_on = pipe.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise _Ended("the process died") from error
        if not goes_on:
            self.stop()
        return result

    def stop(self) -> None:
        """Kills the process, if there is one."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = None

    def _start(self) -> Connection:
        context = get_context("spawn")  # CUDA does not survive a fork
        pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, self._function), daemon=True)
        self._process.start()
        end.close()
        self._pipe = pipe
        return pipe


def _serve(pipe: Connection, function: Callable[[Any], tuple[Any, bool]]) -> None:
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(function(item))
