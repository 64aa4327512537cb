"""Notes that ranks leave each other in the store of their group, in addition to their messages.

A rank that waits for long writes down its last calls, and reads the calls of the ranks for which it
waits. The first rank whose call fails writes down its error for all. While messages arrive in time,
notes cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice, product

from ring_attn.core.facts import places_of_difference
from ring_attn.torch_private import Store
from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks.errors import Disagreement
from ring_attn.transport.ranks.identity import Identity
from ring_attn.transport.ranks.rendezvous import append, poll_until
from ring_attn.values.outside import Json

# A note holds at most this many characters of an error's text.
MAX_CHARACTERS = 1200

# Seconds to wait for a peer's layout and mask, after a difference was found.
DETAILS_S = 0.5

# A rank that waits reads the calls of at most so many ranks that have refused one.
MAX_REFUSALS = 8


class Notes:
    """One rank's access to the notes of a group in its store; ranks are global ranks."""

    def __init__(self, store: Store, meeting: str, rank: int) -> None:
        self.store, self.meeting, self._rank = store, meeting, rank
        self._prefix = f"{meeting}/notes"

    def write_calls(self, calls: Iterable[Identity], waits_for: int | None = None) -> None:
        """Write down this rank's last calls, and the rank for which it waits."""
        reports = [(call.sequence, call.report()) for call in calls]
        note = json.dumps({"calls": reports, "waits_for": waits_for})
        self.store.set(f"{self._prefix}/calls/{self._rank}", note)

    def write_refusal(self, calls: Iterable[Identity]) -> None:
        """Write down this rank's calls, of which it has refused the last one."""
        self.write_calls(calls)
        append(self.store, f"{self._prefix}/refused", f"{self._rank}\n")

    def write_failure(self, text: str, *, shared: bool = False) -> bool:
        """Write down why this rank's call ended; return False if another rank failed before.

        If `shared`, the text names the ranks, and the other ranks raise it as it is.
        """
        if self._read("failed") is not None:
            return False
        note = json.dumps({"rank": self._rank, "text": text[:MAX_CHARACTERS], "shared": shared})
        self.store.set(f"{self._prefix}/failed", note)
        return True

    def waits(self, peer: int) -> list[int]:
        """Return the peer and the ranks that hold it up: each waits for the next one, if known.

        The last one waits for no rank, or for one of the others: that note may be old.
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

    def wait_of(self, rank: int) -> tuple[str, int] | None:
        """Return the call of a rank that waits for long, and the rank for which it waits."""
        note = self._read(f"calls/{rank}")
        if note is None or note["waits_for"] is None:
            return None
        _, report = note["calls"][-1]
        return report["call"][0], note["waits_for"]

    def refusals(self) -> list[int]:
        """Return the ranks that have refused calls, each as often as it has reported a refusal."""
        key = f"{self._prefix}/refused"
        if not self.store.check([key]):
            return []
        return [int(rank) for rank in self.store.get(key).split()]

    def refusal(self, calls: Iterable[Identity], num_old: int = 0) -> str | None:
        """Return why a rank that refused a call will not make these calls; None if unknown.

        The first `num_old` refusals may be of dead ranks, and are ignored.
        """
        recent = self.refusals()[num_old:]
        others = dict.fromkeys(rank for rank in recent if rank != self._rank)
        for rank in islice(others, MAX_REFUSALS):
            reason = self.difference(calls, rank)
            if reason is not None:
                return reason
        return None

    def reason(self, calls: Iterable[Identity], peer: int) -> str | None:
        """Return why a peer sends nothing: a rank failed, or calls differ; None if unknown."""
        return self.failure() or self.difference(calls, peer)

    def difference(self, calls: Iterable[Identity], peer: int) -> str | None:
        """Return how a peer's calls differ from these; None if they do not, as far as known."""
        note = self._read(f"calls/{peer}")
        reports = note["calls"] if note else []
        for call, (sequence, report_of_peer) in product(calls, reports):
            if call.sequence != sequence:
                continue
            reports = {self._rank: call.report(), peer: report_of_peer}
            found = Disagreement.of(reports)
            if found is not None:
                return found.text(self._places(call, peer) if found.has_places else {})
        return None

    def _places(self, call: Identity, peer: int) -> dict[str, str]:
        """Return where the layout or mask of a call first differs from a peer's, if known.

        Both ranks write down their layouts and masks when they find a difference.
        """
        self.store.set(f"{self._prefix}/details/{call.sequence}/{self._rank}", call.details)
        key = f"{self._prefix}/details/{call.sequence}/{peer}"
        if not poll_until(lambda: self.store.check([key]), DETAILS_S):
            return {}
        of_ranks = {self._rank: call.details, peer: self.store.get(key).decode()}
        return places_of_difference({rank_name(rank): of_ranks[rank] for rank in sorted(of_ranks)})

    def failure(self) -> str | None:
        """Return why a rank failed first, with its name; None if no other rank has failed."""
        note = self._read("failed")
        if note is None or note["rank"] == self._rank:
            return None
        if note["shared"]:
            return str(note["text"])
        return f"{rank_name(note['rank'])} left its call: {note['text']}"

    def has_failed(self) -> bool:
        """Return whether any rank has failed, this one too."""
        return self._read("failed") is not None

    def _read(self, name: str) -> Json:
        key = f"{self._prefix}/{name}"
        # `get` waits for a key that does not exist.
        return json.loads(self.store.get(key)) if self.store.check([key]) else None
