"""How ranks meet and connect: a rendezvous through the store, connections, and a second one.

The first rendezvous names missing ranks. The second keeps every rank from its first message until
all ranks are connected: a rank that went on, raised and closed its connections would break the
connections that a slower rank is still making.

Each rank makes a constant number of requests to the store, with keys of constant length, however
many ranks there are; one rank finds out for all which ranks are missing.

Nothing here makes groups of torch: no communicator is split, no name is taken from torch's
counters, and nothing is registered with torch. A connection closes when its last reference goes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist

from ring_attn.core.facts import Facts
from ring_attn.torch_private import PrefixStore, Store
from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks.errors import Disagreement

T = TypeVar("T")

# Seconds of the rendezvous that finds, after connecting has failed, which ranks are still alive.
RECHECK_S = 1.0

# Seconds that the store may take to answer, beyond the ranks' own time limit.
STORE_S = 1.0

# Seconds that ranks wait, after their time limit, for the lead of their meeting to find out which
# ranks are missing; more than its longest pause.
ANSWER_S = 3.0

# A rank that waits asks the store again after pauses, each a share of the time waited so far: 8,192
# ranks make 12,288 requests a second. A wait within the store would block this process's connection
# for other threads, and prints two warnings when its time is up.
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE = 0.005, 2.0, 1 / 2

NO_LIMIT = datetime.timedelta.max

# Returns the reason why a wait for other ranks cannot succeed, or None if no reason is known.
CannotSucceed = Callable[[], str | None]


class Answer(NamedTuple):
    """The decision of a rendezvous, which holds for all of its ranks."""

    kind: Literal["equal", "differ", "moved", "missing"]
    text: str = ""


class MissingRanksError(RuntimeError):
    """Some ranks did not arrive in time; the message names them.

    Attributes:
        is_unexplained: whether it is not known why they did not arrive.
    """

    def __init__(self, text: str, *, is_unexplained: bool = False) -> None:
        super().__init__(text)
        self.is_unexplained = is_unexplained


class MovedError(RuntimeError):
    """The meeting has no lead any more, because its ranks have opened another meeting."""


class DifferentError(RuntimeError):
    """Ranks have reported different facts; `found` has them, with the ranks."""

    def __init__(self, found: Disagreement) -> None:
        super().__init__(found.text())
        self.found = found


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, run in a new thread; raise TimeoutError if it takes longer.

    A request to a store whose host is gone cannot be interrupted: its thread is abandoned, and
    ends by itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ring_attn_bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]


def answered(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, which waits in the store for ranks for at most `seconds`."""
    try:
        return bounded(work, seconds + 3 * ANSWER_S + STORE_S)
    except TimeoutError as error:
        raise MissingRanksError(f"the group's store does not answer: {error}") from error


def poll_until(ask: Callable[[], T], seconds: float) -> T:
    """Return the first true answer, or the last one in time; ask again after growing pauses."""
    start = time.monotonic()
    while not (answer := ask()) and (waited := time.monotonic() - start) < seconds:
        pause = min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(min(pause, seconds - waited))
    return answer


def append(store: Store, key: str, text: str) -> None:
    """Append text to a key's value, in one request."""
    store.append(key, text)  # type: ignore[attr-defined]


def hashed(members: Sequence[int]) -> str:
    """Return a text of constant length for ranks in their order."""
    return hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]


class Rendezvous:
    """A place in the store where ranks wait for each other.

    Each rank arrives, or cancels the rendezvous for all ranks with a reason. The first answer that
    is written to the store is final. The last rank to arrive compares the facts that all ranks have
    reported; the first rank whose time is up names the missing ranks.
    """

    def __init__(self, store: Store, name: str, rank: int, members: Sequence[int]) -> None:
        """Prepare a rendezvous of global ranks, by a key `name` that was never used before."""
        self.store, self._name, self._rank, self._members = store, name, rank, members

    def arrive(self, reported: Facts | None = None) -> None:
        """Enter this rank and its facts; return at once."""
        append(self.store, f"{self._name}/here", json.dumps([self._rank, reported or {}]) + "\n")
        # The count exceeds the members if a rank has left and arrived again.
        if self.store.add(f"{self._name}/count", 1) >= len(self._members):
            self._compare()

    def cancel(self, why: str) -> None:
        """End the rendezvous on all ranks that still wait, with a reason."""
        self.answer("missing", f"{rank_name(self._rank)} has given up: {why}")

    def wait(
        self,
        seconds: float,
        cannot_succeed: CannotSucceed | None = None,
        *,
        limit: float | None = None,
    ) -> None:
        """Wait until all members have arrived.

        Args:
            seconds: how long to wait.
            cannot_succeed: returns why some member will not arrive, if that is known.
            limit: the time limit of the caller, for the error, if only `seconds` of it are left.

        Raises:
            MissingRanksError: names the missing ranks, or the rank that has cancelled.
            DifferentError: the ranks have reported different facts.
            MovedError: this meeting has no lead any more.
        """

        def poll() -> Answer | None:
            answer = self.poll()
            if answer is None and cannot_succeed is not None:
                reason = cannot_succeed()
                if reason is not None:
                    return Answer("missing", reason)
            return answer

        answer = poll_until(poll, seconds)
        when = f"within {seconds if limit is None else limit:g} s"
        if answer is None:
            # One rank asks who is missing, in the name of all whose time is up.
            asks = json.dumps([self._rank, when])
            if self.store.compare_set(f"{self._name}/asks", "", asks).decode() == asks:
                self._name_missing(when)
            answer = poll_until(poll, 2 * ANSWER_S)
        if answer is None:
            raise MissingRanksError(f"no rank has named the missing ones {when}")
        match answer.kind:
            case "differ":
                raise DifferentError(Disagreement(*json.loads(answer.text)))
            case "moved":
                raise MovedError(
                    "another group of the same ranks meets at the same place of the store"
                )
            case "missing":
                is_unexplained = re.search(r"did not arrive within \S+ s$", answer.text) is not None
                raise MissingRanksError(answer.text, is_unexplained=is_unexplained)

    def answer(self, kind: str, text: str = "") -> None:
        """End the rendezvous on all ranks, unless a rank has answered before."""
        self.store.compare_set(f"{self._name}/answer", "", json.dumps([kind, text]))

    def is_answered(self) -> bool:
        return self.store.check([f"{self._name}/answer"])

    def poll(self) -> Answer | None:
        """Return the answer for all ranks, or None if there is none so far."""
        if not self.is_answered():
            return None
        kind, text = json.loads(self.store.get(f"{self._name}/answer"))
        return Answer(kind, text)

    def _compare(self) -> None:
        """Answer, if all members have arrived."""
        arrived = self.arrived()
        if len(arrived) < len(self._members):
            return
        found = Disagreement.of({member: arrived[member] for member in self._members})
        if found is None:
            self.answer("equal")
        else:
            self.answer("differ", json.dumps(found))

    def _name_missing(self, when: str, lost: Sequence[int] = ()) -> None:
        """Cancel: the ranks `lost` and those that have not arrived are missing."""
        arrived = self.arrived()
        missing = [rank for rank in self._members if rank not in arrived or rank in lost]
        if missing:
            self.cancel(f"{rank_name(missing)} did not arrive {when}")
        else:
            self._compare()

    def arrived(self) -> dict[int, Facts]:
        """Return what each rank that has arrived has reported."""
        if not self.store.check([f"{self._name}/here"]):
            return {}
        lines = self.store.get(f"{self._name}/here").decode().splitlines()
        return dict(json.loads(line) for line in lines)


class Meeting(Rendezvous):
    """The first rendezvous of a group; its first member, the lead, answers for all."""

    def _is_lead(self) -> bool:
        return self._rank == self._members[0]

    def _compare(self) -> None:
        if self._is_lead():
            super()._compare()

    def poll(self) -> Answer | None:
        answer = super().poll()
        if answer is not None or not self._is_lead():
            return answer
        if self.store.add(f"{self._name}/count", 0) >= len(self._members):
            self._compare()
        if self.store.check([f"{self._name}/asks"]):
            _, when = json.loads(self.store.get(f"{self._name}/asks"))
            self._name_missing(when)
        return super().poll()

    def _name_missing(self, when: str, lost: Sequence[int] = ()) -> None:
        if not self._is_lead():
            if poll_until(self.poll, ANSWER_S) is not None:
                return
            lost = self._members[:1]  # the lead has not answered
        super()._name_missing(when, lost)


class Meetings:
    """The meetings of a group, numbered in the group's store.

    A store may outlive processes: torchrun keeps one store over all restarts, which each node
    numbers in its own way, and a process may make a group anew in the same store. So no rank knows
    whether the ranks that arrived at a meeting still live. Only the lead opens a meeting and
    answers in it, so a meeting whose lead is dead has no answer; a new lead calls the ranks that
    wait there.
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self.store, self._rank, self._members = store, rank, members
        # Groups of other members may have a store with the same prefix.
        self._place = f"ring_attn/{hashed(members)}"
        self._opened = ""

    def find(
        self, seconds: float = 0.0, while_waiting: Callable[[], None] = lambda: None
    ) -> str | None:
        """Return the name of the open meeting, or None if the lead opens none within `seconds`.

        Calls `while_waiting` again and again during the wait.
        """
        if self._rank == self._members[0]:
            self._opened = self._opened or self._open()
            return self._opened
        number = self.store.add(self._place, 0)
        if number and not self._at(number).is_answered():
            return self._name(number)

        def num_opened() -> int:
            while_waiting()
            return self.store.add(self._place, 0) - number

        opened = poll_until(num_opened, seconds)
        return self._name(number + opened) if opened else None

    def last(self) -> tuple[str, list[int], bool]:
        """Return the last meeting's name, the ranks that arrived, and whether it is answered.

        This writes nothing. Without a meeting, the name is empty.
        """
        number = self.store.add(self._place, 0)
        if not number:
            return "", [], False
        meeting = self._at(number)
        return self._name(number), [*meeting.arrived()], meeting.is_answered()

    def attend(
        self,
        seconds: float,
        reported: Facts,
        on_arrival: Callable[[str], CannotSucceed],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until all members have arrived at one meeting; raise as `Rendezvous.wait`.

        Calls `on_arrival` with the name of each meeting that this rank attends, since the lead of
        the first one may have died; and `while_waiting` again and again until a meeting is open.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            name = self.find(left, while_waiting)
            if name is None:
                break
            meeting = Meeting(self.store, name, self._rank, self._members)
            cannot_succeed = on_arrival(name)
            meeting.arrive(reported)
            try:
                return meeting.wait(deadline - time.monotonic(), cannot_succeed, limit=seconds)
            except MovedError:
                if self._opened:
                    raise
        last = self._at(self.store.add(self._place, 0)).poll()
        lead = rank_name(self._members[:1])
        text = f"{lead} did not arrive within {seconds:g} s"
        if last is not None and last.kind == "missing":
            text = f"{last.text}, and {lead} did not come back within {seconds:g} s"
        raise MissingRanksError(text, is_unexplained=True)

    def _open(self) -> str:
        number = self.store.add(self._place, 1)
        if number > 1:
            self._at(number - 1).answer("moved")
        return self._name(number)

    def _name(self, number: int) -> str:
        return f"{self._place}/{number}"

    def _at(self, number: int) -> Rendezvous:
        return Rendezvous(self.store, self._name(number), self._rank, self._members)


def meet(
    rendezvous: Rendezvous,
    seconds: float,
    reported: Facts | None = None,
    cannot_succeed: CannotSucceed | None = None,
) -> None:
    """Arrive at a rendezvous and wait there; raise as `Rendezvous.wait`."""

    def arrive_and_wait() -> None:
        rendezvous.arrive(reported)
        rendezvous.wait(seconds, cannot_succeed)

    answered(arrive_and_wait, seconds)


class PollingStore(Store):
    """The store of a group, for gloo, which waits in the store for the other ranks' addresses.

    A thread that waits for a key blocks the client for all other threads, so this store polls. A
    second client would first look up the host's name: 5 s if the name server loses the request.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        # The key exists: gloo waits for each key before reading it.
        return self.store.get(key)

    def wait(self, keys: list[str], timeout: datetime.timedelta = NO_LIMIT) -> None:
        seconds = timeout.total_seconds()
        if not poll_until(lambda: self.store.check(keys), seconds):
            raise RuntimeError(f"no rank has set {keys} within {seconds:g} s")


def connect_gloo(
    store: Store,
    meeting: str,
    rank: int,
    everyone: Sequence[int],
    seconds: float,
    cannot_succeed: CannotSucceed,
    polling: PollingStore,
) -> dist.ProcessGroupGloo:
    """Connect all ranks by gloo; return when all of them are connected.

    Ranks are global ranks. A rank that was at the meeting may yet leave its call: then
    `cannot_succeed` returns why.

    The caller keeps `polling`, a store over `store`, as long as the connections: with
    TORCH_GLOO_LAZY_INIT=1, gloo connects two ranks at their first message.
    """
    connected = Rendezvous(store, f"{meeting}/connected", rank, everyone)
    connections: list[dist.ProcessGroupGloo] = []
    place, size = everyone.index(rank), len(everyone)

    def connect() -> None:
        try:
            prefix = PrefixStore(f"{meeting}/gloo", polling)
            timeout = datetime.timedelta(seconds=seconds)
            connections.append(dist.ProcessGroupGloo(prefix, place, size, timeout))
            connected.arrive()
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the store has gone
                connected.cancel(str(error))

    # gloo tries each peer five times, each time for the whole timeout, and cannot be interrupted:
    # a thread that takes too long is abandoned.
    threading.Thread(target=connect, name="ring_attn_connect", daemon=True).start()
    try:
        answered(lambda: connected.wait(seconds, cannot_succeed), seconds)
    except RuntimeError as error:
        reason = cannot_succeed()
        if reason is not None:
            raise MissingRanksError(reason) from error
        recheck = Rendezvous(store, f"{meeting}/left", rank, everyone)
        raise not_connected(recheck, error) from error
    return connections[0]


def not_connected(recheck: Rendezvous, error: Exception) -> MissingRanksError:
    """Return the error of ranks that arrived but did not connect; it names those that left."""
    text = "all ranks arrived, but they could not connect to each other"
    try:
        meet(recheck, RECHECK_S)
    except MissingRanksError as missing:
        return MissingRanksError(f"{text}; when asked again, {missing}")
    return MissingRanksError(f"{text}: {error}")
