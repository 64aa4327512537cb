"""A thread that looks at waits that take long: are the peers in the same call at all?

A wait for a message cannot be left before its timeout, and a message of another call never comes.
So the thread compares notes with the ranks that are waited for, and closes the connections of a
group in which calls differ or a rank has failed; what waits then raises.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Protocol

# Seconds that a wait may take before anybody looks, and between looks; each next look is twice as
# long after the one before, up to the longest.
PERIOD_S = 0.1
LONGEST_S = 5.0


class Watched(Protocol):
    """An object that may wait for other ranks."""

    def look(self) -> None:
        """Ends a wait under way that can only time out."""
        ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(one: Watched) -> None:
    """Calls `one.look()` from time to time, as long as the object lives."""
    global _thread
    with _lock:
        _watched.add(one)
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
        for one in everyone:
            # A store that has gone: the wait under way ends by its own timeout.
            with contextlib.suppress(Exception):
                one.look()
        del everyone, one
