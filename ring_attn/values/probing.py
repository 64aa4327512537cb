"""Whether this thread probes a model: its forwards are not those of the user's step."""

from __future__ import annotations

import threading


class _Probing(threading.local):
    """Whether this thread probes a model."""

    on = False


probing = _Probing()
