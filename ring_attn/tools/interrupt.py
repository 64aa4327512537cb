"""Ends the `ring-attn` command on ^C, SIGTERM and SIGHUP: at once, with one line, leaving nothing.

    install()            in the command's process, before torch is imported
    before_end(save)     sets the function that saves the measurements so far
    end_with_parent()    in every process that the command starts; in a pool's, `use_folder`

A separate thread ends the process. So the end need not wait for long calls into C or for imports,
and no `except` of the interrupted code can swallow the signal.
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
from contextlib import contextmanager, suppress
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Time limit of the end; ending other processes may take half of it.
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
    """Whether this process is the `ring-attn` command, not a rank or a user's program."""
    if "--multiprocessing-fork" in sys.orig_argv:
        return False
    if Path(sys.argv[0]).name == "ring-attn":
        return True
    words = sys.orig_argv
    return any(pair == ("-m", "ring_attn") for pair in zip(words, words[1:], strict=False))


def install() -> None:
    """Starts the thread that ends this process; signals that are ignored stay ignored."""
    global _pipe
    reader, _pipe = os.pipe()
    os.set_blocking(_pipe, False)
    signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            # Python writes the number to the pipe; its handler in the main thread does nothing.
            signal.signal(number, lambda *_: None)
    # Orphaned descendants become children of this process, so `_end_children` reaches them all.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # multiprocessing's tracker frees the semaphores of killed processes: no need for its warning.
    sys.warnoptions.append("ignore:resource_tracker")
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()


def start_command(name: str) -> None:
    """Sets the command's name for the final line, and drops the previous command's `save`."""
    global _name, _save
    _name, _save = name, None


def before_end(save: Save) -> None:
    """Registers `save(signal name) -> path written`, to call before the process ends."""
    global _save
    _save = save


def finish_command() -> None:
    """Ignores signals from now on: the command is complete."""
    if _received.is_set():
        time.sleep(2 * MOST_SECONDS)  # the other thread ends this process
    if _pipe is not None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def end_by(number: int) -> None:
    """Ends the command as if it had received the signal; does nothing in other processes."""
    if _pipe is not None:
        os.write(_pipe, bytes([number]))
        time.sleep(2 * MOST_SECONDS)


@contextmanager
def held_back() -> Iterator[None]:
    """Blocks signals for processes started within, until these have set their handlers."""
    with _starting:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            # Starting a process starts the tracker, which unblocks two of the signals.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Makes the kernel end this process with its parent; signals end it without a traceback."""
    parent = parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the prctl
    _end_by_signals()


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder for processes that call `use_folder`; removed however this process ends."""
    with tempfile.TemporaryDirectory(prefix="ring_attn_") as folder:
        _folders.append(folder)
        try:
            yield folder
        finally:
            _folders.remove(folder)


def use_folder(folder: str) -> None:
    """Directs this process's temporary files to the folder, and ends the process with its parent.

    For pool workers, as `end_with_parent` would end them with the thread that started them.
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
    """Makes signals end this process silently, including those that `held_back` blocked."""
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
    _starting.acquire(timeout=MOST_SECONDS / 5)  # never released: no more processes may start
    _end_children()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun only rank 0 prints
    line = f"{_name}: interrupted by {signal_name}"
    try:
        path = _save(signal_name) if _save is not None else None
        if path is not None:
            line += f"; what was measured so far is in {path}"
    except Exception as error:
        text = " ".join(str(error).split())
        line += f"; what was measured so far could not be written: {type(error).__name__}: {text}"
    if sys.stderr is not None and sys.stderr.isatty():
        line = f"\r\033[K\033[?25h{line}"  # overwrites a progress line, and shows the cursor
    os.write(2, f"{line}\n".encode(errors="replace"))
    if sys.stdout is not None:
        sys.stdout.flush()


def _end_children() -> None:
    """Kills all descendants except multiprocessing's tracker, which ends by itself.

    Children of a killed process become children of this one, the subreaper.
    """
    deadline = time.monotonic() + MOST_SECONDS / 2
    while time.monotonic() < deadline:
        running = [pid for pid in _running_children() if not _is_tracker(pid)]
        if not running:
            return
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _running_children() -> Iterator[int]:
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            text = Path("/proc", entry, "stat").read_text(errors="replace")
            state, parent = text.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                yield int(entry)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
