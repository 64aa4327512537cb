"""A signal ends a command; no end leaves anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY = ["bench", "ring", "--world-size", "1", "--iters", "100000", "--quiet", "--seqlen", "64"]
TINY += ["--heads", "1", "--head-dim", "16", "--baseline", ""]


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait without a limit of its own: pytest ends a test that hangs."""
    while not reached():
        time.sleep(0.005)


class Started:
    """A command in a session of its own; an environment variable marks all its processes."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir(parents=True)
        self.mark = f"RING_ATTN_TEST={folder}".encode()
        here = {
            "RING_ATTN_TEST": str(folder),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "kept by torch"),
        }
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **here},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def running(self) -> list[Path]:
        """Folders of /proc of the command's processes that have not ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (entry / "environ").read_bytes():
                    found.append(entry)
        return found

    def ended(self) -> tuple[int, str]:
        """Waits for the end: exit status and stderr; checks that no process or file is left."""
        _, said = self.process.communicate()
        wait_until(lambda: not self.running())
        assert not list(self.folder.iterdir())
        return self.process.returncode, said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Started]]:
    started: list[Started] = []

    def begin(words: list[str]) -> Started:
        started.append(Started(words, tmp_path / str(len(started))))
        return started[-1]

    yield begin
    for one in started:
        for entry in one.running():
            os.kill(int(entry.name), signal.SIGKILL)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_ranks(
    start: Callable[[list[str]], Started], number: signal.Signals, to_all: bool
) -> None:
    """As ^C on a terminal signals all ranks, and `kill` the command alone."""
    command = start(["-m", "ring_attn", *TINY])
    wait_until(lambda: len(command.running()) > 2)  # the command, multiprocessing's tracker, a rank
    for _ in range(2):
        (os.killpg if to_all else os.kill)(command.process.pid, number)
    ended = (130, "ring-attn bench ring: interrupted\n"), (-number, "")
    assert command.ended() == ended[number != signal.SIGINT]


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed(
    start: Callable[[list[str]], Started], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    work = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    program = f"from ring_attn.testing.launch import run_ranks; run_ranks(exec, 1, {work!r})"
    command = start(["-c", program])
    wait_until(begun.exists)
    command.process.kill()
    assert command.ended() == (-signal.SIGKILL, "")


# The watch waits in the store nearly all the time, as on a slow network.
WATCHED = """
import datetime, time
import torch.distributed as dist
from ring_attn.transport.ranks import failure, group, watch

def poll(self):
    for _ in range(100):
        try:
            store.wait(["absent"], datetime.timedelta(milliseconds=1))
        except RuntimeError:
            pass

watch.PERIOD_S, failure.FailureReport.poll = 0.0, poll
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch.add(group.rank_group(dist.group.WORLD).failure)
time.sleep(0.1)
"""


def test_the_watch_ends_before_the_interpreter() -> None:
    ran = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


MASK_OF_A_LATER_PROCESS = """
import multiprocessing, signal
from ring_attn.testing import launch

def tell():
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))

def run():
    process = multiprocessing.get_context("forkserver").Process(target=tell)
    process.start()
    process.join()

if __name__ == "__main__":
    launch.START_METHOD = "forkserver"
    with launch.signals_wait(launch.START_METHOD):
        run()
    run()
"""


@pytest.mark.slow  # imports torch in three processes
def test_processes_that_start_later_get_signals(tmp_path: Path) -> None:
    """A server of forks that began while signals waited would block them in all that it forks."""
    (tmp_path / "program.py").write_text(MASK_OF_A_LATER_PROCESS)
    command = [sys.executable, str(tmp_path / "program.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n" * 2
