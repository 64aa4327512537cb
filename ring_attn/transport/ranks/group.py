"""One rank's state in a process group, shared by all transports of that group.

A call that is left half done makes every later message ambiguous. So a group fails as a whole: the
failing rank writes down its error for the others and closes its connections, which they notice, and
every later call on the group raises.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist

from ring_attn.core.facts import Facts
from ring_attn.torch_private import group_store, group_timeout, refuse_other_nccl
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Agreement, as_facts, rank_name
from ring_attn.transport.buffers import HEADER_BYTES, Pool
from ring_attn.transport.ranks import watch
from ring_attn.transport.ranks.board import Board
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE, hash_of_configs
from ring_attn.transport.ranks.errors import describe_error, mark_counted, was_counted
from ring_attn.transport.ranks.formation import (
    DifferentError,
    Meetings,
    MissingRanksError,
    RollCall,
    answered,
    bounded,
    meet,
    poll,
)
from ring_attn.transport.ranks.headers import Headers
from ring_attn.transport.ranks.identity import REFUSED, Identity
from ring_attn.transport.ranks.media import Gloo, Medium, Nccl, Posted
from ring_attn.transport.ranks.watch import PERIOD_S
from ring_attn.transport.streams import Stream

T = TypeVar("T")

logger = logging.getLogger("ring_attn")

NOTHING = Agreement({})

# A rank reports this many of its last calls: one that refuses more in a row hides calls before.
CALLS_REPORTED = 32

# A long wait is looked at after PERIOD_S; each pause before a further look doubles, to LONGEST_S.
LONGEST_S = 5.0

# Where the host does not wait, a rank reads the note of a failure once an exchange is that old, and
# then every LONGEST_S: one operation of the store, since all ranks of a job do this.
OLD_S = 2.0

# Seconds between the note of a failure and closing connections, so that other ranks can read the
# note. When a connection is lost within a message, gloo does not always wake the receiver (4 of
# 2,338 faults raised on purpose), which would then wait until its timeout.
NOTICE_S = 3 * PERIOD_S

# Seconds that a process's exit waits for the device, to compare the last calls.
LOOK_BACK_S = 1.0

# Seconds that the note of a failure may take: a rank cut off from all others has no store either.
NOTE_S = 4.0

# After a lost connection, a rank waits this many seconds for a note that says why.
REASON_S = 0.3

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class Waiting:
    """A wait under way: when it began, for which global rank, and when to look next."""

    since: float
    peer: int
    next_look_s: float = PERIOD_S

    def is_due(self) -> bool:
        """Tells whether to look now; if so, sets the time of the next look."""
        if time.monotonic() - self.since < self.next_look_s:
            return False
        self.next_look_s += min(self.next_look_s, LONGEST_S)
        return True


class RankGroup:
    """One rank's state in a group. The ranks connect together at the first call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self.global_rank = self.global_ranks[self.rank]
        # The first error, after which no call is possible.
        self.failed: RuntimeError | None = None
        # The call under way, and headers of its messages where these have no tags.
        self.call: Identity | None = None
        self.headers = Headers()
        # Whether there were calls since all ranks have compared theirs.
        self.unchecked = False
        self.waiting: Waiting | None = None
        # Numbers of calls, and of forwards.
        self.sequence, self.numbers = count(1), count(1)
        # Kinds of calls that all ranks have prepared.
        self.prepared: set[Hashable] = set()
        # Numbers of rows of q and k that all ranks have had in one call.
        self.even_rows: set[tuple[int, int]] = set()
        self._store = group_store(group)
        # Seconds that the store may take to answer; 0 when it has not answered in time.
        self._store_s = group_timeout(group)
        self._calls: deque[Identity] = deque(maxlen=CALLS_REPORTED)
        # The last call and the wait that this rank has written down.
        self._reported: tuple[int, int | None] = (-1, None)
        # When to read the note of a failure next.
        self._next_note = 0.0
        self._lock, self._occupied = threading.Lock(), threading.Lock()
        self._meetings = Meetings(self._store, self.global_rank, self.global_ranks)
        self._meeting, self._met = "", False
        self._board: Board | None = None
        # After a refused call, the wait for the meeting.
        self._refused: Waiting | None = None
        self._media: dict[str, Medium] = {}
        self._roll_calls = 0
        # By type: the device of all this rank's calls, to which its communicators belong.
        self.devices: dict[str, torch.device] = {}
        # One pool for each compute stream, whose operators run in order.
        self._pools: dict[Stream, Pool] = {}
        self._side: Stream | None = None

    @property
    def world_size(self) -> int:
        return len(self.global_ranks)

    def occupy(self) -> None:
        """Keeps other threads out, until `end`."""
        if not self._occupied.acquire(blocking=False):
            raise RuntimeError(
                f"thread {threading.current_thread().name} calls while {self.call or 'a call'} is "
                "under way on the same group: the ranks could not tell the calls' messages apart; "
                "call from one thread, or give each thread a process group of its own"
            )

    def begin(self, call: Identity) -> None:
        self._calls.append(call)
        self.call, self.unchecked = call, True

    def end(self) -> None:
        self.call = self.waiting = None
        self._occupied.release()

    def settle(self) -> None:
        """Waits until the device has compared all calls; refuses a ring that has failed by then.

        The watch ends the wait if an exchange is late.
        """
        self.occupy()
        try:
            next_rank = self.global_ranks[(self.rank + 1) % self.world_size]
            self.waiting = Waiting(time.monotonic(), next_rank, OLD_S)
            while self.failed is None and not self.headers.settled:
                time.sleep(0.001)
            mismatch = self.headers.found()
            if mismatch is not None:
                self.fail(mismatch)
            self.refuse_failed()
        finally:
            self.end()

    def refuse(self, error: BaseException) -> None:
        """Counts a call that this rank refuses because of an error, once for each error.

        Tells the other ranks at once, as they may be in this call, or wait for this rank to connect
        for it, and this rank may never make another one.
        """
        if was_counted(error):
            return
        mark_counted(error)
        note = f" by {describe_error(error)}"
        with self._lock:
            call = Identity(next(self.sequence), next(self.numbers), REFUSED, NOTHING, note=note)
            self._calls.append(call)
        calls = list(self._calls)
        if self.failed is None and self.world_size > 1 and not _forked:
            self._in_time(self._tell_refusal)
            self._reported = calls[-1].sequence, None
            if not self._met:
                self._refused = Waiting(time.monotonic(), self.global_ranks[0])
                watch.add(self)

    def medium(self, device: torch.device, seconds: float) -> Medium:
        """The medium for tensors of this device; all ranks connect it together at the first call.

        Refuses missing ranks, a ring that has failed before, different files of configs, and
        classes of NCCL process groups that are not supported.
        """
        self.refuse_failed()
        if device.type not in self._media:
            group = self._group()
            if group is not None and streams.are_used(device):
                refuse_other_nccl(group)
            self._store_s = seconds
            try:
                self._media[device.type] = self._new_medium(device, seconds)
            except BaseException as error:
                text = (
                    f"{rank_name(self.global_rank)} could not form the ring of "
                    f"{rank_name(self.global_ranks)}, timeout {seconds:g} s: "
                    f"{describe_error(error)}. "
                    "All ranks of the group must make their first call of ring_attention together"
                )
                self.fail(text)
                if isinstance(error, Exception):
                    raise RuntimeError(text) from error
                raise
            watch.add(self)
        return self._media[device.type]

    def roll_call(self) -> RollCall:
        """The next roll-call of all ranks, which are connected already."""
        self._roll_calls += 1
        place = f"{self._meeting}/roll_call/{self._roll_calls}", self.global_rank, self.global_ranks
        return RollCall(self._store, *place)

    def why_in_vain(self) -> str | None:
        """Return why a rank will not come to a roll-call: it has failed, or refused a call."""
        board = self._board
        assert board is not None, "the ranks have met"
        return board.failure() or board.refused(list(self._calls))

    def agree(self, told: Facts, seconds: float) -> str | None:
        """What differs in the facts that ranks of the call under way tell; keeps the ring alive."""
        board, calls = self._board, list(self._calls)
        assert board is not None, "the ranks have met"
        self._tell_calls(board, calls, None)
        try:
            meet(self.roll_call(), seconds, told, self.why_in_vain)
            return None
        except DifferentError as error:
            return error.told
        except MissingRanksError as error:
            text = f"{rank_name(self.global_rank)} could not compare its call with all ranks, "
            raise RuntimeError(f"{text}timeout {seconds:g} s: {error}") from error

    def pool(self, device: torch.device) -> Pool:
        if capture.is_on():
            return Pool(device, HEADER_BYTES)  # of the graph's own memory
        stream = streams.current(device)
        if stream not in self._pools:
            self._pools[stream] = Pool(device, HEADER_BYTES)
        return self._pools[stream]

    def side(self, device: torch.device) -> Stream | None:
        """The group's one stream for work beside the current stream's; None without streams."""
        if self._side is None and streams.are_used(device):
            self._side = streams.new(device)
        return self._side

    def fail(self, text: str) -> None:
        """Ends the ring for good, on this rank and the others, unless it has failed before."""
        with self._lock:
            if self.failed is not None:
                return
            self.failed = RuntimeError(text)
        board = self._board
        try:
            # Before the connections close: a device whose exchanges are cut off goes on, and may
            # send results of missing data, which no rank takes for right once the note is there.
            if board is not None and self._in_time(lambda: board.tell_failure(text), NOTE_S):
                time.sleep(NOTICE_S)
        finally:
            self._close()

    def destroyed(self) -> None:
        """Ends the connections of a group that has been destroyed on this rank."""
        if _forked or not self._media:
            return
        self._look_back(self._store_s)
        board = self._board
        # No shutdown after a failure: it would wait for ranks that have aborted.
        if self.failed is not None or (board and self._in_time(board.failure, NOTE_S)):
            self._close()
        for medium in self._taken_media():
            medium.finish(self._store_s)

    def exit(self) -> None:
        """Aborts NCCL's communicators at the process's exit, whatever the other ranks do."""
        if _forked:
            return
        self._look_back(LOOK_BACK_S)
        for medium in self._taken_media():
            if isinstance(medium, Nccl):
                medium.close()

    def _look_back(self, seconds: float) -> None:
        """Logs the error of calls that nobody has checked: nothing can be raised at the end."""
        deadline = time.monotonic() + seconds
        while self.failed is None and not self.headers.settled and time.monotonic() < deadline:
            time.sleep(0.001)
        error = self.failed or self.headers.found()
        if self.unchecked and error is not None:
            logger.error("%s: results on %s are wrong", error, rank_name(self.global_rank))

    def _close(self) -> None:
        for medium in self._taken_media():
            medium.close()
        self._pools.clear()

    def _taken_media(self) -> list[Medium]:
        """All media, which only the first caller gets."""
        with self._lock:
            media, self._media = list(self._media.values()), {}
        return media

    def reason(self, peer: int, *, timed_out: bool) -> str | None:
        """The reason why no messages of a peer come; None if no rank has written it down.

        After the whole timeout, names the rank for which the peer waits, itself or through others:
        at once, since gloo then closes all connections, and peers look for this rank's note.
        """
        if (board := self._board) is None:
            return None
        why = lambda: self._in_time(lambda: board.why(self._calls, peer), NOTE_S)  # noqa: E731
        known, ranks = why() if timed_out else poll(why, REASON_S), None
        if timed_out and known is None:
            ranks = self._in_time(lambda: board.held_up(peer), NOTE_S)
        if not ranks:
            return known
        *others, last = map(rank_name, ranks)
        if ranks[-1] not in (self.global_rank, *ranks[:-1]):
            return f"{last} died, stalled, or did not make this call: it waits for no rank"
        return f"one of {', which waits for '.join(others)}, which waits for {last}, stalled"

    def look(self) -> None:
        """Ends the ring if a long wait is in vain: a rank has failed, or calls differ."""
        waiting, board, refused = self.waiting, self._board, self._refused
        if self.failed is not None:
            return
        if not self._met and refused is not None and refused.is_due():
            self._tell_refusal()
            if refused.next_look_s > self._store_s:
                self._refused = None  # whoever waited has given up
        if board is None:
            return
        for medium in list(self._media.values()):
            late = medium.late()
            if late is not None:
                self._tell_late(late, board)
                return
            if time.monotonic() >= self._next_note and medium.late(OLD_S) is not None:
                self._next_note = time.monotonic() + LONGEST_S
                failure = board.failure()
                if failure is not None:
                    logger.error("%s", failure)
                    self.failed = RuntimeError(failure)
                    return
        calls, (_, waited_for) = list(self._calls), self._reported
        if waiting is None or not waiting.is_due():
            if waited_for is not None and (waiting is None or waiting.peer != waited_for):
                self._tell_calls(board, calls, None)
            return
        if self._reported != (calls[-1].sequence, waiting.peer):
            self._tell_calls(board, calls, waiting.peer)
        reason = board.why(calls, waiting.peer)
        if reason is not None:
            self.fail(reason)

    def _tell_calls(self, board: Board, calls: list[Identity], waits_for: int | None) -> None:
        board.tell_calls(calls, waits_for)
        self._reported = calls[-1].sequence, waits_for

    def _tell_late(self, late: Posted, board: Board) -> None:
        """Reports an exchange that has not ended, before torch's watchdog ends the process.

        Keeps the connections: without them the device would go on with data that has not arrived.
        """
        peer, seconds = self.global_ranks[late.peer], time.monotonic() - late.since
        text = (
            f"ring step {late.step}: {rank_name(self.global_rank)} posted an exchange with "
            f"{rank_name(peer)} on channel {late.channel!r} {seconds:.0f} s ago, and it has "
            "not ended; one of the two devices has not come to it, or cannot reach the other"
        )
        reason = board.why(self._calls, peer)
        text = text if reason is None else f"{text}; {reason}"
        logger.error("%s", text)
        self.failed = RuntimeError(text)
        board.tell_failure(text)

    def refuse_failed(self) -> None:
        """Refuses a ring that has failed: messages of its unfinished call may still come."""
        if self.failed is not None:
            self.unchecked = False
            self._close()
            raise RuntimeError(
                "this ring has failed before and cannot go on, its ranks are not at the same call "
                "any more: make a new process group on all of them, or restart from a checkpoint. "
                f"First error: {self.failed}"
            ) from self.failed

    def refuse_other_device(self, device: torch.device) -> None:
        """Refuses tensors on another device than the rank's first call had."""
        known = self.devices.setdefault(device.type, device)
        if device != known:
            raise ValueError(
                f"{rank_name(self.global_rank)} has tensors on {device}, got {known} in the "
                "group's first call, to which its connections belong: pass tensors on "
                f"{known}, or another process group"
            )

    def refuse_fork(self) -> None:
        """Refuses a process forked from a rank: connections and threads stayed with the parent."""
        if _forked:
            raise RuntimeError(
                f"process {os.getpid()} was forked from {rank_name(self.global_rank)} after "
                "init_process_group: only the rank itself can call; start processes by 'spawn' or "
                "'forkserver', or fork before init_process_group"
            )

    def _in_time(self, work: Callable[[], T], most: float = math.inf) -> T | None:
        """The result of `work` with the store; None if that takes too long, or `most` seconds."""
        if not self._store_s:
            return None
        try:
            return bounded(work, min(self._store_s, most))
        except TimeoutError:
            self._store_s = 0.0
        except RuntimeError:
            pass
        return None

    def _new_medium(self, device: torch.device, seconds: float) -> Medium:
        if not self._met:
            configs = as_facts({CONFIGS_VARIABLE: hash_of_configs()})
            answered(partial(self._meetings.attend, seconds, configs, self._arrive), seconds)
            self._met = True
        if streams.are_used(device):
            return Nccl(self._store, self._meeting, self.rank, self.global_ranks)
        assert self._board is not None, "the ranks have met"
        met = self._store, self._meeting, self.rank, self.global_ranks
        return Gloo(*met, seconds, self._board.failure)

    def _arrive(self, meeting: str) -> Callable[[], str | None]:
        """Takes a meeting for the ranks' own; returns what says why some rank will not come."""
        self._meeting = meeting
        self._board = board = Board(self._store, meeting, self.global_rank)
        # Notes that stand here may be of dead ranks. A rank that lives tells its refusal again.
        failure, refusals, calls = board.failure(), len(board.refusals()), list(self._calls)
        if self._refused is not None:
            self._tell_refusal()

        def in_vain() -> str | None:
            refused = board.refused(calls, refusals)
            return refused or (told if (told := board.failure()) != failure else None)

        return in_vain

    def _tell_refusal(self) -> None:
        """Tells this rank's calls, of which it has refused one, where the ranks meet by now."""
        meeting = self._meeting if self._met else self._meetings.find()
        if meeting is not None:
            Board(self._store, meeting, self.global_rank).tell_refusal(list(self._calls))


# -- all groups


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()
_groups_lock = threading.Lock()


def rank_group(group: dist.ProcessGroup) -> RankGroup:
    with _groups_lock:
        if group not in _groups:
            made = _groups[group] = RankGroup(group)
            # torch keeps a group alive until `destroy_process_group`.
            weakref.finalize(group, made.destroyed).atexit = False
        return _groups[group]


@atexit.register
def _exit() -> None:
    """Ends the watch, and the connections of all groups that were not destroyed."""
    watch.end()
    for group in list(_groups.values()):
        group.exit()
