"""Signals end a command in one line, with what it has measured, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY = ["demo", "--nproc", "1", "--seqlen", "113", "--dim", "16", "--layers", "1"]
TINY += ["--steps", "1000000"]


class Started:
    """A command in a session of its own; all its processes are known by a variable."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir(parents=True)
        self.mark = f"RING_ATTN_TEST={folder}".encode()
        name, value = self.mark.decode().split("=", 1)
        here = {
            name: value,
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

    def running(self) -> list[int]:
        """Its processes that have not ended."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_for(self, reached: Callable[[], bool], seconds: float = 60.0) -> None:
        """Returns once it is so, or the command has ended."""
        deadline = time.monotonic() + seconds
        while not reached() and self.process.poll() is None:
            assert time.monotonic() < deadline, "the command did not come so far"
            time.sleep(0.005)

    def wait_for_row(self) -> None:
        """Returns when the demo has shown a step: a line of titles comes before it."""
        assert self.process.stdout is not None
        while self.process.stdout.readline().split()[:1] != ["0"]:
            assert self.process.poll() is None

    def ended(self) -> tuple[int, str]:
        """Its exit status and what it said on stderr; nothing of it is left."""
        _, said = self.process.communicate(timeout=60)
        deadline = time.monotonic() + 30
        while self.running():
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.01)
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
        for pid in one.running():
            os.kill(pid, signal.SIGKILL)


def answers_signals(command: Started) -> bool:
    lines = Path(f"/proc/{command.process.pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGHUP - 1) & 1)


def test_a_signal_while_torch_is_imported(start: Callable[[list[str]], Started]) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    commands = {number: start(["-m", "ring_attn", "env"]) for number in signals}
    for number, command in commands.items():
        command.wait_for(partial(answers_signals, command))
        command.process.send_signal(number)
    for number, command in commands.items():
        code, said = command.ended()
        assert code == 128 + number
        assert said == f"ring-attn: interrupted by {number.name}\n"


@pytest.mark.slow
@pytest.mark.dist
def test_a_signal_to_all_ranks_leaves_what_was_measured(
    start: Callable[[list[str]], Started], tmp_path: Path
) -> None:
    report = tmp_path / "demo.json"
    command = start(["-m", "ring_attn", *TINY, "--json", str(report)])
    command.wait_for_row()
    for _ in range(2):
        os.killpg(command.process.pid, signal.SIGINT)
    code, said = command.ended()
    assert code == 130
    assert said.count("\n") == 1 and "ring-attn demo: interrupted by SIGINT" in said
    assert str(report) in said
    written = json.loads(report.read_text())
    assert written["interrupted"] == "SIGINT"
    assert [row["step"] for row in written["rows"]] == list(range(len(written["rows"])))
    assert written["rows"]


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed(start: Callable[[list[str]], Started]) -> None:
    # In the place of a rank `sleep` runs, which shows that its parent has handed over all it must:
    # to a rank that is still being started, multiprocessing's own EOFError is the end. A rank
    # that left at once would break connections that the other one is still making.
    work = "import os, time; time.sleep(1); os.execlp('sleep', 'sleep', '600')"
    ranks = f'run_ranks(exec, 2, "{work}")'
    command = start(["-c", f"from ring_attn.tools.launch import run_ranks; {ranks}"])

    def sleeping() -> int:
        return sum(
            Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
            for pid in command.running()
        )

    command.wait_for(lambda: sleeping() == 2)
    command.process.kill()
    code, said = command.ended()
    assert (code, said) == (-signal.SIGKILL, "")
