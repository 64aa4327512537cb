"""Notes that ranks leave each other in the store of their group, beside their messages.

A rank that waits for long writes down its last calls, and reads the calls of the ranks for which it
waits. The first rank whose call fails writes down its error for all. While messages come in time,
notes cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice, product
from typing import Any

from ring_attn.torch_private import Store
from ring_attn.transport.base import difference, rank_name
from ring_attn.transport.ranks.formation import append
from ring_attn.transport.ranks.identity import Identity

# A note holds at most this many characters of an error's text.
MAX_CHARACTERS = 600

# A rank that waits reads the calls of at most so many ranks that have refused one.
MAX_REFUSALS = 8


class Board:
    """One rank's access to the notes of a group in its store; ranks are global ranks."""

    def __init__(self, store: Store, meeting: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, f"{meeting}/board", rank

    def tell_calls(self, calls: Iterable[Identity], waits_for: int | None = None) -> None:
        """Writes down this rank's last calls, and the rank for which it waits."""
        reports = [(call.sequence, call.report()) for call in calls]
        note = json.dumps({"calls": reports, "waits_for": waits_for})
        self._store.set(f"{self._prefix}/calls/{self._rank}", note)

    def held_up(self, peer: int) -> list[int]:
        """The peer, and the ranks that hold it up: each waits for the next one, as far as known.

        The last one waits for none, or for one of the others: that note may be old.
        """
        ranks = [self._rank]
        while peer not in ranks:
            ranks.append(peer)
            note = self._read(f"calls/{peer}")
            if note is None or note["waits_for"] is None:
                break
            peer = note["waits_for"]
        else:
            ranks.append(peer)
        return ranks[1:]

    def tell_refusal(self, calls: Iterable[Identity]) -> None:
        """Writes down this rank's calls, of which it has refused the last one."""
        self.tell_calls(calls)
        append(self._store, f"{self._prefix}/refused", f"{self._rank}\n")

    def refusals(self) -> list[int]:
        """The ranks that have told a refused call, as often as each one has told it."""
        key = f"{self._prefix}/refused"
        return [*map(int, self._store.get(key).split())] if self._store.check([key]) else []

    def refused(self, calls: Iterable[Identity], old: int = 0) -> str | None:
        """The reason why a rank that refused a call will not come to these calls; None if unknown.

        Does not believe the first `old` refusals.
        """
        ranks = dict.fromkeys(rank for rank in self.refusals()[old:] if rank != self._rank)
        reasons = (self.difference(calls, rank) for rank in islice(ranks, MAX_REFUSALS))
        return next((reason for reason in reasons if reason is not None), None)

    def why(self, calls: Iterable[Identity], peer: int) -> str | None:
        """The reason why a peer sends nothing: a rank failed, or calls differ; None if unknown."""
        return self.failure() or self.difference(calls, peer)

    def difference(self, calls: Iterable[Identity], peer: int) -> str | None:
        """The difference of a peer's calls from these; None if unknown."""
        note = self._read(f"calls/{peer}")
        reports = note["calls"] if note else []
        for call, (sequence, theirs) in product(calls, reports):
            if call.sequence != sequence:
                continue
            differs = difference({self._rank: call.report(), peer: theirs})
            if differs is not None:
                ours = rank_name(self._rank)
                return f"{rank_name(peer)}'s call differs from {ours}'s; {differs}"
        return None

    def tell_failure(self, text: str) -> bool:
        """Writes down why this rank's call ended; returns False if another rank failed before."""
        if self._read("failed") is not None:
            return False
        note = json.dumps({"rank": self._rank, "text": text[:MAX_CHARACTERS]})
        self._store.set(f"{self._prefix}/failed", note)
        return True

    def failure(self) -> str | None:
        """The first rank that failed, and its error; None if no other rank wrote one down."""
        note = self._read("failed")
        if note is None or note["rank"] == self._rank:
            return None
        return f"{rank_name(note['rank'])} left its call: {note['text']}"

    def _read(self, name: str) -> Any:
        key = f"{self._prefix}/{name}"
        # `get` waits for a key that does not exist.
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
