"""Ends the `ring-attn` command on ^C, SIGTERM and SIGHUP: at once, in one line, nothing left over.

    install()            in the command's process, before torch is imported
    before_end(save)     saves what has been measured so far
    end_with_parent()    in every process that the command starts; `use_folder` in a pool's

A thread of its own ends the process. It waits neither for long calls into C nor for imports, and
no `except` of the code that is interrupted can swallow the signal.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Saving may take so long, and ending processes half of it.
MOST_SECONDS = 10.0

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Save = Callable[[str], str | None]

_name = "ring-attn"
_save: Save | None = None
_pipe: int | None = None
_folders: list[str] = []
_starting = threading.Lock()
_received = threading.Event()


def is_command() -> bool:
    """Whether this process is the `ring-attn` command, and not a rank or a user's program."""
    if "--multiprocessing-fork" in sys.orig_argv:
        return False
    if Path(sys.argv[0]).name == "ring-attn":
        return True
    words = sys.orig_argv
    return any(pair == ("-m", "ring_attn") for pair in zip(words, words[1:], strict=False))


def install() -> None:
    """Starts the thread that ends this process; a signal that is ignored stays ignored."""
    global _pipe
    reader, _pipe = os.pipe()
    os.set_blocking(_pipe, False)
    signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            # Python writes the number to the pipe; its handler in the main thread does nothing.
            signal.signal(number, lambda *_: None)
    # Processes whose parent was ended become children of this one: none escapes `_end_children`.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # multiprocessing's tracker frees the semaphores of ended processes; it need not say so.
    sys.warnoptions.append("ignore:resource_tracker")
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()


def start_command(name: str) -> None:
    """Names the command for the line that ends it; nothing has been measured yet."""
    global _name, _save
    _name, _save = name, None


def before_end(save: Save) -> None:
    """Calls `save` with the signal's name before the process ends; it returns where it wrote."""
    global _save
    _save = save


def received() -> bool:
    """Whether a signal has come, so that this process is about to end."""
    return _received.is_set()


def settle() -> None:
    """Returns unless a signal has come: then its thread ends the process, and this one waits."""
    if received():
        time.sleep(2 * MOST_SECONDS)


def finish_command() -> None:
    """Ends the time in which signals are answered: the command has done all it was asked for."""
    settle()
    if _pipe is not None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def end_by(number: int) -> None:
    """Ends the command as if it had received the signal; returns in any other process."""
    if _pipe is not None:
        os.write(_pipe, bytes([number]))
        time.sleep(2 * MOST_SECONDS)


@contextmanager
def held_back() -> Iterator[None]:
    """Holds signals back from processes started inside, until these say how they end."""
    settle()
    with _starting:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            # Every process has the tracker start, which lets two of the signals through again.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Has the kernel end this process with its parent; signals end it without a traceback."""
    parent = parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the kernel was asked
    _end_by_signals()


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder for processes that call `use_folder`; it goes however this process ends."""
    with tempfile.TemporaryDirectory(prefix="ring_attn_") as folder:
        _folders.append(folder)
        try:
            yield folder
        finally:
            _folders.remove(folder)


def use_folder(folder: str) -> None:
    """Makes this process's temporary files in the folder, and ends the process with its parent.

    For workers of a pool: the kernel's signal would end them with the thread that started them.
    """
    tempfile.tempdir = folder
    parent = parent_process()

    def end_after_parent() -> None:
        if parent is not None:
            parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_after_parent, daemon=True).start()
    _end_by_signals()


def _end_by_signals() -> None:
    """Signals end this process in silence; those that were held back do so now."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _watch(reader: int) -> NoReturn:
    number = 0
    while number not in SIGNALS:
        number = os.read(reader, 1)[0]
    _received.set()
    status = 128 + number
    last_resort = threading.Timer(MOST_SECONDS, os._exit, (status,))
    last_resort.daemon = True
    last_resort.start()
    try:
        _end(signal.Signals(number).name)
    finally:
        os._exit(status)


def _end(signal_name: str) -> None:
    _starting.acquire(timeout=MOST_SECONDS / 5)  # never released: no process is started any more
    _end_children()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first rank speaks for all
    said = f"{_name}: interrupted by {signal_name}"
    try:
        where = _save(signal_name) if _save is not None else None
        if where is not None:
            said += f"; what was measured so far is in {where}"
    except Exception as error:
        text = " ".join(str(error).split())
        said += f"; what was measured so far could not be written: {type(error).__name__}: {text}"
    if sys.stderr is not None and sys.stderr.isatty():
        said = f"\r\033[K\033[?25h{said}"  # over a progress line, with the cursor that it hid
    os.write(2, f"{said}\n".encode(errors="replace"))
    if sys.stdout is not None:
        sys.stdout.flush()


def _end_children() -> None:
    """Kills all processes below this one, but multiprocessing's tracker, which ends by itself."""
    deadline = time.monotonic() + MOST_SECONDS / 2
    while time.monotonic() < deadline:
        running = [pid for pid in _descendants() if not _is_tracker(pid)]
        if not running:
            return
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _descendants() -> list[int]:
    """The processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2]
        except OSError:
            continue
        state, parent = fields.split()[:2]
        children.setdefault(int(parent), []).append(int(entry))
        if state in "ZX":
            ended.add(int(entry))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += [pid for pid in below if pid not in ended]
        waiting += below
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
