"""One rank's state in a process group, shared by all transports of that group.

connection   links to the other ranks, pools of message buffers
calls        the call under way, and those before it
failure      the first error, and what ranks report to each other about it

Each of them holds its own state; `RankGroup` does what concerns several of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from functools import partial

import torch
import torch.distributed as dist

from ring_attn.core.facts import Facts
from ring_attn.torch_private import group_store, group_timeout
from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks import watch
from ring_attn.transport.ranks.calls import CallLedger, Waiting
from ring_attn.transport.ranks.connection import Connection
from ring_attn.transport.ranks.elsewhere import waits_elsewhere
from ring_attn.transport.ranks.errors import Disagreement, describe_error, noticed
from ring_attn.transport.ranks.failure import OLD_S, FailureReport
from ring_attn.transport.ranks.links import Link
from ring_attn.transport.ranks.member import Member
from ring_attn.transport.ranks.rendezvous import DifferentError, MissingRanksError, meet
from ring_attn.transport.ranks.store import LimitedStore

logger = logging.getLogger("ring_attn")

# Seconds that a process's exit waits for the device, to compare the last calls.
EXIT_S = 1.0

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


class RankGroup:
    """One rank's state in a group. The ranks connect together at the first call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.member = Member(dist.get_rank(group), dist.get_process_group_ranks(group))
        store = LimitedStore(group_store(group), group_timeout(group))
        self.store = store
        self.calls = CallLedger()
        # Not a method: a cycle of references would keep buffers and communicators of a destroyed
        # group until Python's collector runs.
        self._search_elsewhere = partial(waits_elsewhere, self.member, store.store)
        self.connection = Connection(self.member, store, group, self._search_elsewhere)
        self.failure = FailureReport(
            self.member, store, self.calls, self.connection, self._search_elsewhere
        )

    def link(self, device: torch.device, seconds: float) -> Link:
        """Return the link for tensors of this device; all ranks connect it at the first call.

        Raises:
            RuntimeError: ranks are missing, have different files of configs, or cannot connect; or
                the group has failed before.
        """
        self.refuse_failed()
        if device.type not in self.connection.links:
            self._connect(device, seconds)
        return self.connection.links[device.type]

    def _connect(self, device: torch.device, seconds: float) -> None:
        self.connection.check_nccl(device)
        try:
            self.connection.connect(device, seconds, self.failure.on_arrival)
        except BaseException as error:
            is_about_ranks = isinstance(error, (MissingRanksError, DifferentError))
            cause = str(error) if is_about_ranks else describe_error(error)
            if isinstance(error, MissingRanksError) and error.is_unexplained:
                cause = self._missing(error)
            self.failure.fail(cause, shared=is_about_ranks)
            if isinstance(error, Exception):
                place = (
                    f"when {self.member.name} could not form the ring of "
                    f"{rank_name(self.member.global_ranks)}, timeout {seconds:g} s"
                )
                raise RuntimeError(noticed(cause, place)) from error
            raise
        watch.add(self.failure)

    def _missing(self, error: MissingRanksError) -> str:
        """Return why ranks did not arrive, and what to do."""
        # Again: half a timeout ago, the other ranks may not have begun to wait.
        elsewhere = self.connection.elsewhere or self._search_elsewhere()
        if elsewhere:
            return f"{error}: {elsewhere}"
        if self.connection.has_met:
            return f"{error}. All ranks of the group must make this call"
        noted_earlier = self.failure.noted_earlier()
        if noted_earlier is not None:
            return (
                f"{error}. They may have ended because of an earlier error (in this run of the "
                f"job, or in one before it): {noted_earlier}"
            )
        return (
            f"{error}: they are still loading, hung or crashed, or they never call ring_attn. "
            "All ranks of the group must make their first call of ring_attention together; call "
            "ring_attn.prepare(group) after the model is loaded, or raise the timeout"
        )

    def refuse_call(self, error: BaseException) -> None:
        """Count a call that this rank refuses because of an error, and report it to other ranks.

        An error is counted once.
        """
        if not self.calls.count_refused(error):
            return
        if self.failure.error is None and self.member.world_size > 1 and not _forked:
            self.failure.report_refusal()

    def difference(self, reported: Facts, seconds: float) -> Disagreement | None:
        """Return how the facts differ that ranks report in the call under way; None if they agree.

        Without a message, so the group stays usable.

        Raises:
            RuntimeError: a rank is missing, has failed or has refused the call. The group has
                failed, too.
        """
        notes = self.connection.notes
        assert notes is not None, "the ranks have met"
        self.failure.write_calls(notes)
        try:
            meet(self.connection.next_rendezvous(), seconds, reported, self.failure.cannot_meet)
            return None
        except DifferentError as error:
            return error.found
        except MissingRanksError as error:
            cause = self._missing(error) if error.is_unexplained else str(error)
            # As it is: the other ranks' errors would else begin with "left its call".
            self.failure.fail(cause, shared=True)
            place = (
                f"when {self.member.name} compared its call with those of all ranks, "
                f"timeout {seconds:g} s"
            )
            raise RuntimeError(noticed(cause, place)) from error

    def settle(self) -> None:
        """Wait until the device has compared all calls; refuse a group that has failed by then.

        The watch ends the wait if an exchange is overdue.
        """
        calls, member = self.calls, self.member
        calls.occupy()
        try:
            next_rank = member.global_ranks[(member.rank + 1) % member.world_size]
            calls.waiting = Waiting(time.monotonic(), next_rank, OLD_S)
            while self.failure.error is None and not calls.headers.settled:
                time.sleep(0.001)
            mismatch = calls.headers.found()
            if mismatch is not None:
                self.failure.fail(mismatch)
            self.refuse_failed()
        finally:
            calls.end()

    def refuse_failed(self) -> None:
        """Refuse a group that has failed: messages of its unfinished call may still arrive."""
        if self.failure.error is not None:
            self.calls.unchecked = False
            self.connection.close()
            raise RuntimeError(
                noticed(str(self.failure.error), "in an earlier call: this ring has failed before")
            ) from self.failure.error

    def refuse_fork(self) -> None:
        """Refuse a process forked from a rank: connections and threads stayed with the parent."""
        if _forked:
            raise RuntimeError(
                f"process {os.getpid()} was forked from {self.member.name} after "
                "init_process_group: only the rank itself can call; start processes by 'spawn' or "
                "'forkserver', or fork before init_process_group"
            )

    def on_destroyed(self) -> None:
        """End the connections of a group that has been destroyed on this rank."""
        if _forked or not self.connection.links:
            return
        self._log_unchecked(self.store.seconds)
        # No shutdown after a failure: it would wait for ranks that have aborted.
        if self.failure.is_reported():
            self.connection.close()
        self.connection.finish()

    def on_exit(self) -> None:
        """Abort NCCL's communicators at the process's exit, whatever the other ranks do."""
        if _forked:
            return
        self._log_unchecked(EXIT_S)
        self.connection.abort_nccl()

    def _log_unchecked(self, seconds: float) -> None:
        """Log the error of calls that nobody has checked: nothing can be raised at the end."""
        failure, headers = self.failure, self.calls.headers
        deadline = time.monotonic() + seconds
        while failure.error is None and not headers.settled and time.monotonic() < deadline:
            time.sleep(0.001)
        error = failure.error or headers.found()
        if self.calls.unchecked and error is not None:
            logger.error("%s: results on %s are wrong", error, self.member.name)


# -- all groups


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()
_groups_lock = threading.Lock()


def rank_group(group: dist.ProcessGroup) -> RankGroup:
    with _groups_lock:
        if group not in _groups:
            made = _groups[group] = RankGroup(group)
            # torch keeps a group alive until `destroy_process_group`.
            weakref.finalize(group, made.on_destroyed).atexit = False
        return _groups[group]


@atexit.register
def _exit() -> None:
    """End the watch, and the connections of all groups that were not destroyed."""
    watch.end()
    for group in list(_groups.values()):
        group.on_exit()
