"""The calls of one rank on a group: the call under way, its number, and the calls before it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

from ring_attn.transport.base import Agreement
from ring_attn.transport.ranks.errors import REFUSED, describe_error, mark_counted, was_counted
from ring_attn.transport.ranks.headers import Headers
from ring_attn.transport.ranks.identity import Identity
from ring_attn.transport.ranks.watch import PERIOD_S

NOTHING = Agreement({})

# A rank reports this many of its last calls: one that refuses more in a row hides calls before.
CALLS_REPORTED = 32

# A long wait is polled first after PERIOD_S; each pause before a further poll doubles, up to
# LONGEST_S.
LONGEST_S = 5.0


@dataclass(slots=True)
class Waiting:
    """A wait under way.

    Attributes:
        since: when it began, by `time.monotonic`.
        peer: global rank for which this rank waits.
        next_poll_s: seconds after `since` at which to poll next.
        elsewhere: ranks that were found waiting in a call of another group; None if not searched.
        timeout_s: seconds after `since` at which the wait ends.
    """

    since: float
    peer: int
    next_poll_s: float = PERIOD_S
    elsewhere: str | None = None
    timeout_s: float = math.inf

    @property
    def is_half_over(self) -> bool:
        return time.monotonic() - self.since > self.timeout_s / 2

    def is_due(self) -> bool:
        """Return whether to poll now; if so, set the time of the next poll."""
        if time.monotonic() - self.since < self.next_poll_s:
            return False
        self.next_poll_s += min(self.next_poll_s, LONGEST_S)
        return True


class CallLedger:
    """The calls of one rank on a group, and what all ranks of the group have agreed on.

    Attributes:
        current: the call under way.
        waiting: the wait under way for a message of the call.
        headers: headers of messages, on NCCL, and the device's comparisons of them.
        sequence: numbers of all calls.
        numbers: numbers of forwards.
        unchecked: whether there were calls since all ranks have compared theirs.
        prepared: kinds of calls that all ranks have prepared.
        even_rows: numbers of rows of q and k that all ranks have had in one call.
    """

    def __init__(self) -> None:
        self.current: Identity | None = None
        self.waiting: Waiting | None = None
        self.headers = Headers()
        self.sequence, self.numbers = count(1), count(1)
        self.unchecked = False
        self.prepared: set[Hashable] = set()
        self.even_rows: set[tuple[int, int]] = set()
        self._recent: deque[Identity] = deque(maxlen=CALLS_REPORTED)
        self._occupied = threading.Lock()
        self._counting = threading.Lock()

    @property
    def recent(self) -> list[Identity]:
        """The last calls that this rank has made or refused, which it reports to other ranks."""
        return list(self._recent)

    def occupy(self) -> None:
        """Keep other threads out, until `end`."""
        if not self._occupied.acquire(blocking=False):
            raise RuntimeError(
                f"thread {threading.current_thread().name} calls while "
                f"{self.current or 'a call'} is under way on the same group: the ranks could not "
                "distinguish the calls' messages; call from one thread, or give each thread a "
                "process group of its own"
            )

    def begin(self, call: Identity) -> None:
        self._recent.append(call)
        self.current, self.unchecked = call, True

    def end(self) -> None:
        self.current = self.waiting = None
        self._occupied.release()

    def count_refused(self, error: BaseException) -> bool:
        """Count a call that this rank refuses; return False if this error was counted before."""
        if was_counted(error):
            return False
        mark_counted(error)
        with self._counting:
            refused = Identity(
                sequence=next(self.sequence),
                number=next(self.numbers),
                kind=REFUSED,
                agreement=NOTHING,
                note=f" it: {describe_error(error)}",
            )
            self._recent.append(refused)
        return True
