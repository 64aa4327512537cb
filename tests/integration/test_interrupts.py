"""A signal ends a command with one line and its rows so far; no end leaves anything behind."""

from __future__ import annotations

import json
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

# Each length's row is written when it is measured.
LENGTHS = ",".join(map(str, range(64, 4096)))
TINY = ["bench", "ring", "--world-size", "1", "--iters", "1", "--quiet", "--seqlen", LENGTHS]
TINY += ["--heads", "1", "--head-dim", "16", "--baseline", ""]


def wait_until(reached: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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

    def running(self) -> list[Path]:
        """Folders of /proc of the command's processes that have not ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (entry / "environ").read_bytes():
                    found.append(entry)
        return found

    def answers_signals(self) -> bool:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line for line in text.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1)

    def ended(self) -> tuple[int, str]:
        """Waits for the end: exit status and stderr; checks that no process or file is left."""
        _, said = self.process.communicate(timeout=180)
        wait_until(lambda: not self.running(), 30.0)
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


def test_a_signal_while_torch_is_imported(start: Callable[[list[str]], Started]) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    commands = {number: start(["-m", "ring_attn", "env"]) for number in signals}
    waiting = dict(commands)

    def all_have_a_signal() -> bool:
        for number, command in commands.items():
            if number in waiting and command.answers_signals():
                waiting.pop(number).process.send_signal(number)
        return not waiting

    # Each at once: a command that ends before its signal would never answer.
    wait_until(all_have_a_signal)
    for number, command in commands.items():
        assert command.ended() == (128 + number, f"ring-attn: interrupted by {number.name}\n")


@pytest.mark.slow
@pytest.mark.dist
def test_a_signal_to_all_ranks_leaves_what_was_measured(
    start: Callable[[list[str]], Started], tmp_path: Path
) -> None:
    report = tmp_path / "ring.json"
    command = start(["-m", "ring_attn", *TINY, "--json", str(report)])
    wait_until(report.exists)
    for _ in range(2):
        os.killpg(command.process.pid, signal.SIGINT)
    code, said = command.ended()
    assert code == 130
    assert said.count("\n") == 1 and "ring-attn bench ring: interrupted by SIGINT" in said
    assert str(report) in said
    written = json.loads(report.read_text())
    assert written["interrupted"] == "SIGINT" and written["rows"]


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_end_with_a_process_that_is_killed(start: Callable[[list[str]], Started]) -> None:
    # The rank becomes `sleep`, which shows that its parent has started it: a rank that is still
    # starting would end with multiprocessing's own EOFError.
    work = "run_ranks(exec, 1, \"import os; os.execlp('sleep', 'sleep', '600')\")"
    command = start(["-c", f"from ring_attn.tools.launch import run_ranks; {work}"])

    def is_sleeping() -> bool:
        assert command.process.poll() is None
        return any(p.joinpath("cmdline").read_bytes()[:5] == b"sleep" for p in command.running())

    wait_until(is_sleeping)
    command.process.kill()
    assert command.ended() == (-signal.SIGKILL, "")


def test_processes_of_processes_end_too(start: Callable[[list[str]], Started]) -> None:
    work = "import subprocess; subprocess.run(['sh', '-c', 'sleep 600 & wait'])"
    ending = "interrupt.finish_command()"  # as every command ends
    begin = "from ring_attn.tools import interrupt; interrupt.install()"
    command = start(["-c", f"{begin}; {work}; {ending}"])
    wait_until(lambda: len(command.running()) == 3)
    command.process.send_signal(signal.SIGTERM)
    assert command.ended()[0] == 128 + signal.SIGTERM


# The watch waits in the store nearly all the time, as on a slow network.
WATCHED = """
import datetime, time
import torch.distributed as dist
from ring_attn.transport.ranks import group, watch

def look(self):
    for _ in range(100):
        try:
            store.wait(["absent"], datetime.timedelta(milliseconds=1))
        except RuntimeError:
            pass

watch.PERIOD_S, group.RankGroup.look = 0.0, look
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch.add(group.rank_group(dist.group.WORLD))
time.sleep(0.1)
"""


def test_the_watch_ends_before_the_interpreter() -> None:
    ran = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
