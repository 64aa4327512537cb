"""Requests to a group's store whose answer this rank awaits only for a limited time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from ring_attn.torch_private import Store
from ring_attn.transport.ranks.rendezvous import bounded

T = TypeVar("T")


class LimitedStore:
    """A group's store; once it has not answered in time, it is not asked any more.

    Attributes:
        store: torch's store.
        seconds: how long it may take to answer; 0 after it has not answered in time.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self.store, self.seconds = store, seconds

    def within_limit(self, work: Callable[[], T], most: float = math.inf) -> T | None:
        """Return the result of `work` with the store; None if it fails or takes too long.

        `most` is a further limit in seconds.
        """
        if not self.seconds:
            return None
        try:
            return bounded(work, min(self.seconds, most))
        except TimeoutError:
            self.seconds = 0.0
        except RuntimeError:
            pass
        return None
