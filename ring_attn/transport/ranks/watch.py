"""A thread that polls the waits of all groups, every PERIOD_S seconds.

A wait for a message cannot be left before its timeout, and a message of another call never arrives.
So the thread compares this rank's notes with its peers' notes. If calls differ or a rank has
failed, it closes the group's connections, and pending waits raise.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

# Seconds between polls.
PERIOD_S = 0.1

# Seconds that the thread may take to end with the process: the store's host may be gone.
ENDING_S = 1.0


class Watched(Protocol):
    """Something that the thread polls for as long as it lives."""

    def poll(self) -> None:
        """End a wait that cannot succeed."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_exiting = threading.Event()


def add(watched: Watched) -> None:
    """Poll an object from now on, as long as it lives."""
    global _thread
    with _lock:
        _watched.add(watched)
        if _thread is None:
            _thread = threading.Thread(target=_poll_all, name="ring_attn_watch", daemon=True)
            _thread.start()


def end() -> None:
    """End the thread: in the store while the interpreter ends, it would abort the process."""
    _exiting.set()
    if _thread is not None:
        _thread.join(ENDING_S)


def _poll_all() -> None:
    global _thread
    while not _exiting.wait(PERIOD_S):
        with _lock:
            everyone = list(_watched)
            if not everyone:
                _thread = None
                return
        for watched in everyone:
            # If the store is gone, the wait under way ends by its own timeout.
            with contextlib.suppress(Exception):
                watched.poll()
        del everyone, watched
