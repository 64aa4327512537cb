"""Whether this thread probes a model: its forwards are not those of the user's step."""

from __future__ import annotations

import threading


class _Probing(threading.local):
    """Whether this thread probes a model, and whether it must not call other ranks there."""

    on = False
    alone = False


probing = _Probing()
