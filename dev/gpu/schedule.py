"""Runs stages: cells go to workers, and a hang, a crash or a dead context costs one cell."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from string import Template

from dev.gpu.cells import Cell, Figures, Stage
from dev.gpu.results import LISTING, Results
from dev.gpu.watch import Died, Worker

# Seconds until a worker is ready (the first one reads torch from a cold disk), of a listing, and of
# a cell at least: with less none begins.
START_SECONDS = 120.0
LIST_SECONDS = 60.0
LEAST_SECONDS = 3.0

# After so many workers that do not start, no other one with their variables is tried.
MOST_FAILED_STARTS = 2


class Run:
    """A run of stages until a deadline; workers are kept from stage to stage."""

    def __init__(
        self, results: Results, folder: Path, seconds: float, environment: Mapping[str, str]
    ) -> None:
        self.results = results
        self._folder = folder
        self._environment = dict(environment)
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        self._idle: list[Worker] = []
        self._started = 0
        # By variables of workers: those that did not start.
        self._failed_starts = Counter[tuple[tuple[str, str], ...]]()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._start, 1)

    def run(
        self,
        stages: Sequence[Stage],
        done: Collection[str] = (),
        after_stage: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the cells of all stages except those in `done`; time that a stage leaves is kept."""
        end = self._start
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            end = min(end + stage.seconds, self._deadline)
            start = self.seconds
            self._keep(stage.workers, self._environment_of(stage))
            if following is not None and not stage.alone and time.monotonic() < self._deadline:
                self._start_ahead(stage, following, done)
            self._run_stage(stage, done, end)
            self.results.add(
                cell=stage.name, state="stage", at=self.seconds, s=round(self.seconds - start, 1)
            )
            after_stage()

    def close(self) -> None:
        """End all workers."""
        for worker in self._idle:
            worker.kill()
        self._idle.clear()

    def _run_stage(self, stage: Stage, done: Collection[str], end: float) -> None:
        environment = self._environment_of(stage)
        cells = [*stage.cells]
        if stage.lists:
            cells += self._listed(stage, environment, end)
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        left = [cell for cell in cells if cell.label not in done]
        for cell in left:
            waiting.put(cell)
        lanes = [
            threading.Thread(target=self._lane, args=(waiting, environment, end))
            for _ in range(min(stage.workers, len(left)))
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def _environment_of(self, stage: Stage) -> dict[str, str]:
        known = defaultdict(str, self._environment)
        own = {name: Template(x).substitute(known) for name, x in stage.environment.items()}
        return self._environment | own

    def _start_ahead(self, stage: Stage, following: Stage, done: Collection[str]) -> None:
        """Start the workers of the following stage, which import modules while this one runs."""
        environment = self._environment_of(following)
        known = sum(cell.label not in done for cell in following.cells)
        needed = following.workers if following.lists else min(following.workers, known)
        if environment == self._environment_of(stage):
            needed -= stage.workers
        for _ in range(needed):
            worker = self._new_worker(environment)
            with self._lock:
                self._idle.append(worker)

    def _listed(self, stage: Stage, environment: Mapping[str, str], end: float) -> list[Cell]:
        """Return the cells that a worker lists, if it can."""
        listing = Cell(stage.name, LISTING, stage.lists, stage.lists_with, limit=LIST_SECONDS)
        figures = self._run_cell(listing, environment, end).get("figures", {})
        return [
            Cell(stage.name, name, target, tuple(arguments), limit)
            for name, target, arguments, limit in figures.get("cells", ())
            if stage.only in name
        ]

    def _lane(
        self, waiting: queue.SimpleQueue[Cell], environment: Mapping[str, str], end: float
    ) -> None:
        """Run one cell after another, as long as there are any."""
        while True:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            self._run_cell(cell, environment, end)

    def _run_cell(self, cell: Cell, environment: Mapping[str, str], end: float) -> Figures:
        """Run a cell in an idle or a new worker; write and return its row."""
        row: Figures
        if end - time.monotonic() < min(cell.limit, LEAST_SECONDS):
            row = {"state": "no time"}
        else:
            row = self._run_in_worker(cell, environment, end)
        self.results.add(cell=cell.label, at=self.seconds, **row)
        return row

    def _run_in_worker(self, cell: Cell, environment: Mapping[str, str], end: float) -> Figures:
        try:
            worker = self._worker(environment, end)
        except TimeoutError:
            return {"state": "no time"}
        except Died as error:
            return {"state": "no start", "error": str(error)}
        self.results.add(cell=cell.label, state="begun", at=self.seconds)
        left = end - time.monotonic()
        row = self._verdict(worker, cell, min(cell.limit, left))
        if row["state"] == "hung" and left < cell.limit:
            row["state"] = "cut"
        return row

    def _verdict(self, worker: Worker, cell: Cell, seconds: float) -> Figures:
        """Return the row of a cell; the worker is kept only if it is healthy."""
        row: Figures
        try:
            row = worker.ask(cell, seconds)
        except TimeoutError:
            row = {"state": "hung", "s": round(seconds, 2), "stacks": worker.stacks()}
            row["error"] = f"no verdict within {seconds:.0f} s"
        except Died as error:
            row = {"state": "died", "error": str(error), "log": worker.end_of_log()}
        if row["state"] in ("hung", "died", "poisoned"):
            worker.kill()
        else:
            self._idle.append(worker)
        return row

    def _worker(self, environment: Mapping[str, str], end: float) -> Worker:
        """Return a worker with these variables.

        Raises:
            TimeoutError: a new one is not ready when the time ends.
            Died: a new one does not start.
        """
        key = tuple(sorted(environment.items()))
        if self._failed_starts[key] >= MOST_FAILED_STARTS:
            raise Died("workers of this stage do not start, so no other one was tried")
        worker = self._idle_worker(environment) or self._new_worker(environment)
        if worker.is_ready:
            return worker
        left = end - time.monotonic()
        try:
            worker.wait_until_ready(min(START_SECONDS, left))
        except (TimeoutError, Died) as error:
            text = worker.end_of_log()
            worker.kill()
            if isinstance(error, TimeoutError) and left < START_SECONDS:
                raise
            self._failed_starts[key] += 1
            last_line = text.strip().rpartition("\n")[2]
            raise Died(f"{last_line}\nthe worker does not start: {error}\n{text}") from None
        return worker

    def _idle_worker(self, environment: Mapping[str, str]) -> Worker | None:
        """Take an idle worker with these variables, at best one that is ready."""
        with self._lock:
            fitting = [worker for worker in self._idle if worker.environment == environment]
            fitting.sort(key=lambda worker: not worker.is_ready)
            for worker in fitting[:1]:
                self._idle.remove(worker)
                return worker
        return None

    def _new_worker(self, environment: Mapping[str, str]) -> Worker:
        with self._lock:
            self._started += 1
            log = self._log(self._started)
        return Worker(log, environment)

    def _keep(self, count: int, environment: Mapping[str, str]) -> None:
        """End idle workers that a stage does not need: their memory is on the device."""
        useful = [worker for worker in self._idle if worker.environment == environment]
        for worker in [*self._idle]:
            if worker not in useful[:count]:
                self._idle.remove(worker)
                worker.kill()

    def _log(self, number: int) -> Path:
        return self._folder / f"worker{number}.log"
