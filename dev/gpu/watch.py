"""A worker process seen from outside: asked, limited in time, and killed with all its children."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dev.gpu.cells import Cell, Figures

ROOT = Path(__file__).parents[2]

# Seconds until faulthandler begins to print stacks, and those that it then gets to print them all;
# characters of a log that a row keeps.
STACK_START_SECONDS, STACK_SECONDS = 5.0, 0.5
LOG_CHARACTERS = 4000

# Seconds that a killed process gets to end.
KILL_SECONDS = 10.0


class Died(Exception):
    """The worker has ended without an answer; the text has its exit status."""


class Worker:
    """A process in a session of its own, so that one signal ends it and its children."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.is_ready = False
        self._log = log.open("ab+")
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "dev.gpu.worker"],
            cwd=ROOT,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the worker has imported its modules, or raise as `answer`."""
        self.answer(seconds)
        self.is_ready = True

    def answer(self, seconds: float) -> Figures:
        """Return the next answer.

        Raises:
            TimeoutError: it did not come within the time.
            Died: the process has ended.
        """
        try:
            line = self._lines.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            raise Died(self._end())
        answer: Figures = json.loads(line)
        return answer

    def ask(self, cell: Cell, seconds: float) -> Figures:
        """Run a cell; return its answer, or raise as `answer`."""
        assert self._process.stdin is not None
        request = {"target": cell.target, "arguments": cell.arguments}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._end()) from None
        return self.answer(seconds)

    def _end(self) -> str:
        try:
            return f"exit status {self._process.wait(KILL_SECONDS)}"
        except subprocess.TimeoutExpired:
            return "it closed its output, and does not end"

    def stacks(self) -> str:
        """Return the stacks of the worker's threads, and of its children that answer SIGUSR1."""
        start = os.fstat(self._log.fileno()).st_size
        self._signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_START_SECONDS
        while os.fstat(self._log.fileno()).st_size == start and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(STACK_SECONDS)
        self._log.seek(start)
        return self._log.read().decode(errors="replace")[-LOG_CHARACTERS:]

    def end_of_log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        self._log.seek(max(0, size - LOG_CHARACTERS))
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """End the process and its children at once.

        A process whose kernel hangs may need seconds to leave the driver, or never leave it.
        """
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
