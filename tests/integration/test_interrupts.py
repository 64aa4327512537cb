"""A signal ends a command with one line and its rows so far, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY = ["demo", "--nproc", "1", "--seqlen", "113", "--dim", "16", "--layers", "1"]
TINY += ["--steps", "1000000"]


class Started:
    """A command in a session of its own; an environment variable marks all its processes."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir(parents=True)
        self.mark = f"RING_ATTN_TEST={folder}".encode()
        here = {
            "RING_ATTN_TEST": str(folder), "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "kept by torch"),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, *words], env={**os.environ, **here}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def running(self) -> list[int]:
        """The command's processes that have not ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_for(self, reached: Callable[[], bool], seconds: float = 180.0) -> None:
        """Waits until `reached()` is true or the command has ended."""
        deadline = time.monotonic() + seconds
        while not reached() and self.process.poll() is None:
            assert time.monotonic() < deadline, "the command did not come so far"
            time.sleep(0.005)

    def wait_for_row(self) -> None:
        """Waits until the demo has shown its first step, after a line of titles."""
        assert self.process.stdout is not None
        while self.process.stdout.readline().split()[:1] != ["0"]:
            assert self.process.poll() is None

    def ended(self) -> tuple[int, str]:
        """Waits for the end: exit status and stderr; checks that no process or file is left."""
        _, said = self.process.communicate(timeout=180)
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
    # Each rank becomes `sleep`, which shows that its parent has started it: a rank that
    # is still starting would end with multiprocessing's own EOFError. A rank first sleeps 1 s:
    # leaving at once would break connections that the other rank is still making.
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
