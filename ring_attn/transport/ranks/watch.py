"""A thread that looks at the waits of all groups, every PERIOD_S seconds.

A wait for a message cannot be left before its timeout, and a message of another call never comes.
So the thread compares this rank's notes with its peers' notes. If calls differ or a rank has
failed, it closes the group's connections, and pending waits raise.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ring_attn.transport.ranks.group import RankGroup

# Seconds between looks.
PERIOD_S = 0.1

# Seconds that the thread may take to end with the process: the store's host may be gone.
ENDING_S = 1.0


_watched: weakref.WeakSet[RankGroup] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_exiting = threading.Event()


def add(group: RankGroup) -> None:
    """Looks at the group from now on, as long as the group lives."""
    global _thread
    with _lock:
        _watched.add(group)
        if _thread is None:
            _thread = threading.Thread(target=_look_on, name="ring_attn_watch", daemon=True)
            _thread.start()


def end() -> None:
    """Ends the thread: in the store while the interpreter ends, it would abort the process."""
    _exiting.set()
    if _thread is not None:
        _thread.join(ENDING_S)


def _look_on() -> None:
    global _thread
    while not _exiting.wait(PERIOD_S):
        with _lock:
            everyone = list(_watched)
            if not everyone:
                _thread = None
                return
        for group in everyone:
            # If the store is gone, the wait under way ends by its own timeout.
            with contextlib.suppress(Exception):
                group.look()
        del everyone, group
