"""The failure of a group: this rank's first error, and the reports of ranks to each other.

A call that is left half done makes every later message ambiguous. So a group fails as a whole: the
failing rank writes down its error for the others and closes its connections, which they notice, and
every later call on the group raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks import watch
from ring_attn.transport.ranks.calls import LONGEST_S, CallLedger, Waiting
from ring_attn.transport.ranks.connection import Connection
from ring_attn.transport.ranks.errors import LEFT_OUT, NO_CALL
from ring_attn.transport.ranks.links import Posted
from ring_attn.transport.ranks.member import Member
from ring_attn.transport.ranks.notes import Notes
from ring_attn.transport.ranks.rendezvous import CannotSucceed, poll_until
from ring_attn.transport.ranks.store import LimitedStore
from ring_attn.transport.ranks.watch import PERIOD_S

logger = logging.getLogger("ring_attn")

# Where the host does not wait, a rank reads the note of a failure once an exchange is that old, and
# then every LONGEST_S: one operation of the store, since all ranks of a job do this.
OLD_S = 2.0

# Seconds between the note of a failure and closing connections, so that other ranks can read the
# note. When a connection is lost within a message, gloo does not always wake the receiver (4 of
# 2,338 faults raised on purpose), which would then wait until its timeout.
NOTICE_S = 3 * PERIOD_S

# Seconds that the note of a failure may take: a rank cut off from all others has no store either.
NOTE_S = 4.0

# After a lost connection, a rank waits this many seconds for a note that gives the reason.
REASON_S = 0.3


class Earlier(NamedTuple):
    """The notes of a meeting when this rank first read them.

    They may be of dead ranks: of an earlier start of the job over the same store.

    Attributes:
        failure: why a rank had failed; None if none had.
        num_refusals: how often ranks had reported that they refused a call.
    """

    failure: str | None
    num_refusals: int


class FailureReport:
    """Why this rank's group has failed, and how its ranks report failures to each other.

    Attributes:
        error: the first error, after which no call is possible; None while the group works.
    """

    def __init__(
        self,
        member: Member,
        store: LimitedStore,
        calls: CallLedger,
        connection: Connection,
        search_elsewhere: Callable[[], str | None],
    ) -> None:
        """Prepare reports; `search_elsewhere` finds ranks that wait in a call of another group."""
        self.error: RuntimeError | None = None
        self._member, self._store = member, store
        self._calls, self._connection = calls, connection
        self._search_elsewhere = search_elsewhere
        self._lock = threading.Lock()
        # Sequence of the last call, and the rank waited for, that this rank has written down.
        self._reported: tuple[int, int | None] = (-1, None)
        # The time at which to read the note of a failure next.
        self._next_note = 0.0
        # After a refused call, the wait until the ranks have met.
        self._unmet_refusal: Waiting | None = None
        # By name of the meeting.
        self._earlier: dict[str, Earlier] = {}

    # -- this rank fails or refuses a call

    def fail(self, text: str, *, shared: bool = False) -> None:
        """End the group for good, on this rank and the others, unless it has failed before.

        If `shared`, the text names the ranks, and the other ranks raise it as it is.
        """
        with self._lock:
            if self.error is not None:
                return
            self.error = RuntimeError(text)
        notes = self._connection.notes
        try:
            # Before the connections close: a device whose exchanges are cut off goes on, and may
            # send results of missing data, which no rank takes for right once the note is there.
            if notes is not None:
                is_first = self._store.within_limit(
                    lambda: notes.write_failure(text, shared=shared), NOTE_S
                )
                if is_first:
                    time.sleep(NOTICE_S)
        finally:
            self._connection.close()

    def report_refusal(self) -> None:
        """Report the last call of the ledger, which this rank has refused.

        At once, since the other ranks may be in this call, or may wait for this rank to connect,
        and this rank may never make another call.
        """
        last = self._calls.recent[-1]
        self._store.within_limit(self._write_refusal)
        self._reported = last.sequence, None
        if not self._connection.has_met:
            self._unmet_refusal = Waiting(time.monotonic(), self._member.global_ranks[0])
            watch.add(self)

    def _write_refusal(self) -> None:
        notes = self._connection.open_notes()
        if notes is not None:
            self._read_earlier(notes)
            notes.write_refusal(self._calls.recent)

    def write_calls(self, notes: Notes, waits_for: int | None = None) -> None:
        """Write down this rank's last calls, and the rank for which it waits."""
        calls = self._calls.recent
        notes.write_calls(calls, waits_for)
        self._reported = calls[-1].sequence, waits_for

    # -- why another rank does not arrive or send

    def on_arrival(self, notes: Notes) -> CannotSucceed:
        """Return a function that returns why some rank will not arrive at a meeting, if known.

        What the notes contained when this rank first read them may be of dead ranks. A rank that
        lives reports its refusal again.
        """
        earlier = self._read_earlier(notes)
        calls = self._calls.recent
        if self._unmet_refusal is not None:
            self._write_refusal()

        def cannot_succeed() -> str | None:
            refusal = notes.refusal(calls, earlier.num_refusals)
            if refusal is not None:
                return refusal
            failure = notes.failure()
            return None if failure == earlier.failure else failure

        return cannot_succeed

    def _read_earlier(self, notes: Notes) -> Earlier:
        """Return the notes of a meeting as they were when this rank first read them."""
        if notes.meeting not in self._earlier:
            self._earlier[notes.meeting] = Earlier(notes.failure(), len(notes.refusals()))
        return self._earlier[notes.meeting]

    def noted_earlier(self) -> str | None:
        """Return why ranks may have left the meeting for which this rank came too late, if known.

        This is what they had noted before. It may be of an earlier start of the job.
        """

        def read() -> str | None:
            notes = self._connection.notes_of_last_meeting()
            if notes is None:
                return None
            return self._read_earlier(notes).failure or notes.refusal(self._calls.recent)

        return self._store.within_limit(read, NOTE_S)

    def cannot_meet(self) -> str | None:
        """Return why a rank will not arrive at a rendezvous: it has failed, or refused a call."""
        notes = self._connection.notes
        assert notes is not None, "the ranks have met"
        return notes.failure() or notes.refusal(self._calls.recent)

    def reason(self, peer: int, *, timed_out: bool) -> str | None:
        """Return why no messages of a peer arrive; None if no rank has written it down.

        After the whole timeout, name the rank for which the peer waits, itself or through others:
        at once, since gloo then closes all connections, and peers look for this rank's note.
        """
        notes = self._connection.notes
        if notes is None:
            return None

        def written_reason() -> str | None:
            return self._store.within_limit(lambda: notes.reason(self._calls.recent, peer), NOTE_S)

        if not timed_out:
            return poll_until(written_reason, REASON_S)
        reason = written_reason()
        if reason is not None:
            return reason
        ranks = self._store.within_limit(lambda: notes.waits(peer), NOTE_S)
        return self._describe_waits(ranks) if ranks else None

    def _describe_waits(self, ranks: list[int]) -> str:
        """Describe ranks of which each waits for the next one."""
        *others, last = ranks
        is_circle = last in (self._member.global_rank, *others)
        if is_circle:
            first_name, *names = map(rank_name, ranks)
            waited_for = ", which is waiting for ".join(names)
            return f"{first_name} is waiting for {waited_for}: one of them hung"
        waiting = self._calls.waiting
        if waiting is not None:
            # Again: half a timeout ago, the other rank may not have begun to wait.
            elsewhere = waiting.elsewhere or self._store.within_limit(
                self._search_elsewhere, NOTE_S
            )
            if elsewhere:
                return elsewhere
        call = self._calls.current
        if call is not None and call.kind == "backward":
            return (
                f"{rank_name(last)} did not run {call}: it crashed, hung or skipped this backward "
                f"(it is not waiting for any rank). {LEFT_OUT}"
            )
        return (
            f"{rank_name(last)} crashed, hung or never made this call (it is not waiting for any "
            f"rank). {NO_CALL}"
        )

    def is_reported(self) -> bool:
        """Return whether this rank has failed, or another one has written down that it failed."""
        if self.error is not None:
            return True
        notes = self._connection.notes
        return notes is not None and bool(self._store.within_limit(notes.failure, NOTE_S))

    # -- polls of the watch

    def poll(self) -> None:
        """Fail if a long wait cannot succeed: a rank has failed, or calls differ."""
        # After a failure, too: a rank that comes later cannot know whether older notes still hold.
        self.repeat_refusal()
        if self.error is not None:
            return
        notes = self._connection.notes
        if notes is None:
            return
        self._poll_exchanges(notes)
        if self.error is None:
            self._poll_wait(notes)

    def repeat_refusal(self) -> None:
        """Write a refusal down again, as the ranks may meet elsewhere by now."""
        refusal = self._unmet_refusal
        if refusal is None or self._connection.has_met or not refusal.is_due():
            return
        self._write_refusal()
        if refusal.next_poll_s > self._store.seconds:
            self._unmet_refusal = None  # the ranks that waited have given up

    def _poll_exchanges(self, notes: Notes) -> None:
        """Fail if an exchange of the device is overdue, or if it is old and a rank has failed."""
        for link in list(self._connection.links.values()):
            overdue = link.overdue()
            if overdue is not None:
                self._report_overdue(overdue, notes)
                return
            if time.monotonic() < self._next_note or link.overdue(OLD_S) is None:
                continue
            self._next_note = time.monotonic() + LONGEST_S
            failure = notes.failure()
            if failure is not None:
                logger.error("%s", failure)
                self.error = RuntimeError(failure)
                return

    def _report_overdue(self, overdue: Posted, notes: Notes) -> None:
        """Report an exchange that has not ended, before torch's watchdog ends the process.

        Keeps the connections: without them the device would go on with data that has not arrived.
        """
        peer = self._member.global_ranks[overdue.peer]
        seconds = time.monotonic() - overdue.since
        text = (
            f"ring step {overdue.step}: {self._member.name} posted an exchange with "
            f"{rank_name(peer)} on channel {overdue.channel!r} {seconds:.0f} s ago, and it has "
            "not ended; one of the two devices has not reached it, or cannot reach the other"
        )
        reason = notes.reason(self._calls.recent, peer)
        if reason is not None:
            text = f"{reason}. (Noticed in {text})"
        logger.error("%s", text)
        self.error = RuntimeError(text)
        notes.write_failure(text)

    def _poll_wait(self, notes: Notes) -> None:
        """Report the wait of the host, if it takes long, and fail if it cannot succeed."""
        waiting = self._calls.waiting
        reported_sequence, reported_peer = self._reported
        if waiting is None or not waiting.is_due():
            has_ended = waiting is None or waiting.peer != reported_peer
            if reported_peer is not None and has_ended:
                self.write_calls(notes)
            return
        calls = self._calls.recent
        if (reported_sequence, reported_peer) != (calls[-1].sequence, waiting.peer):
            self.write_calls(notes, waiting.peer)
        reason = notes.reason(calls, waiting.peer)
        if reason is not None:
            self.fail(reason, shared=True)
        elif waiting.elsewhere is None and waiting.is_half_over:
            # Once: it reads the notes of all groups. After the timeout the ranks may have left.
            waiting.elsewhere = self._search_elsewhere() or ""
