"""A thread that checks, during long waits, whether all ranks are in the same call.

A wait for a message cannot be left before its timeout, and a message of another call never comes.
So the thread compares this rank's notes with its peers' notes. If calls differ or a rank has
failed, it closes the group's connections, and pending waits raise.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Protocol

# Seconds between looks of the thread. A long wait is looked at after PERIOD_S; the pause before
# each further look doubles, up to LONGEST_S.
PERIOD_S = 0.1
LONGEST_S = 5.0


class Watched(Protocol):
    """An object that may wait for other ranks."""

    def look(self) -> None:
        """Ends a pending wait that can only time out."""
        ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(watched: Watched) -> None:
    """Calls `watched.look()` every PERIOD_S seconds, as long as the object lives."""
    global _thread
    with _lock:
        _watched.add(watched)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="ring_attn_watch", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        time.sleep(PERIOD_S)
        with _lock:
            everyone = list(_watched)
            if not everyone:
                _thread = None
                return
        for watched in everyone:
            # If the store is gone, the wait under way ends by its own timeout.
            with contextlib.suppress(Exception):
                watched.look()
        del everyone, watched
