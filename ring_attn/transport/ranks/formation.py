"""Ranks come together: a roll-call through the store, connections, and a second roll-call.

The first roll-call names missing ranks. The second keeps every rank from its first message until
all ranks are connected: a rank that went on, raised and closed its connections would break the
connections that a slower rank is still making.

Each rank makes a constant number of requests to the store, with keys of constant length, however
many ranks there are; one rank finds out for all who is missing.

Makes no groups of torch: splits no communicator, takes no name from torch's counters, and registers
nothing with torch. A connection closes when the last reference to it goes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ring_attn.core.facts import Facts
from ring_attn.torch_private import PrefixStore, Store
from ring_attn.transport.base import difference, rank_name

T = TypeVar("T")

# Seconds of the roll-call that finds, after connecting has failed, which ranks are still alive.
ASKED_AGAIN_S = 1.0

# Seconds that the store may take to answer, beyond the ranks' own time limit.
STORE_S = 1.0

# Seconds that ranks wait, after their time limit, for the lead of their meeting to find out who is
# missing; more than its longest pause.
ANSWER_S = 3.0

# A rank that waits asks the store again after pauses, each a share of the time waited so far: 8,192
# ranks make 12,288 requests a second. A wait within the store would block this process's connection
# for other threads, and prints two warnings when its time is up.
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE = 0.005, 2.0, 1 / 2

NO_LIMIT = datetime.timedelta.max

InVain = Callable[[], str | None]
Answer = tuple[str, str]  # what came of a roll-call, and a text


class MissingRanksError(RuntimeError):
    """Some ranks did not come in time; the message names the missing ranks."""


class MovedError(RuntimeError):
    """A meeting that was waited for has no lead any more: its ranks have opened another one."""


class DifferentError(RuntimeError):
    """Ranks told different facts; `told` has them with the ranks."""

    def __init__(self, told: str) -> None:
        super().__init__(f"all ranks must have the same values, got {told}")
        self.told = told


def bounded(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, which runs in a new thread; a TimeoutError if it takes longer.

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
    """The result of `work`, which waits in the store for other ranks for at most `seconds`."""
    try:
        return bounded(work, seconds + 3 * ANSWER_S + STORE_S)
    except TimeoutError as error:
        raise MissingRanksError(f"the group's store does not answer: {error}") from error


def poll(ask: Callable[[], T], seconds: float) -> T:
    """The first true answer, or the last one in time; asks again after growing pauses."""
    start = time.monotonic()
    while not (answer := ask()) and (waited := time.monotonic() - start) < seconds:
        pause = min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(min(pause, seconds - waited))
    return answer


def append(store: Store, key: str, text: str) -> None:
    """Adds text to the end of a key's value, in one request."""
    store.append(key, text)  # type: ignore[attr-defined]


def hashed(members: Sequence[int]) -> str:
    """A text of constant length for some ranks in their order."""
    return hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:16]


class RollCall:
    """Ranks that wait for each other: each rank comes, or gives up for all and says why.

    One rank answers for all, and the first answer holds. The last rank to come compares the facts
    that all have told; the first rank whose time is up names the missing ranks.
    """

    def __init__(self, store: Store, name: str, rank: int, members: Sequence[int]) -> None:
        """Prepares a roll-call of global ranks, by a key `name` never used before."""
        self._store, self._name, self._rank, self._members = store, name, rank, members

    def come(self, told: Facts | None = None) -> None:
        append(self._store, f"{self._name}/here", json.dumps([self._rank, told or {}]) + "\n")
        # More than all, if a rank has left and come again.
        if self._store.add(f"{self._name}/count", 1) >= len(self._members):
            self._compare()

    def give_up(self, why: str) -> None:
        """Ends the roll-call on all ranks that have not seen everyone come."""
        self.answer("missing", f"{rank_name(self._rank)} has given up: {why}")

    def wait(
        self, seconds: float, in_vain: InVain | None = None, *, asked: float | None = None
    ) -> None:
        """Waits until all members have come; else names the missing ranks, or who gave up.

        `in_vain` says why some member will not come, if that is known. `asked` is the time limit
        that the caller set, if only `seconds` of it are left: the error states the limit.
        """

        def news() -> Answer | None:
            answer = self.look()
            if answer is None and in_vain is not None and (reason := in_vain()) is not None:
                return "missing", reason
            return answer

        answer = poll(news, seconds)
        when = f"within {seconds if asked is None else asked:g} s"
        if answer is None:
            asks = json.dumps([self._rank, when])
            if self._store.compare_set(f"{self._name}/asks", "", asks).decode() == asks:
                self._name_missing(when)
            answer = poll(news, 2 * ANSWER_S)
        kind, text = answer or ("missing", f"no rank has named the missing ones {when}")
        if kind == "differ":
            raise DifferentError(text)
        if kind == "moved":
            raise MovedError("another group of the same ranks meets at the same place of the store")
        if kind == "missing":
            raise MissingRanksError(text)

    def answer(self, kind: str, text: str = "") -> None:
        """Ends the roll-call on all ranks, unless a rank has answered before."""
        self._store.compare_set(f"{self._name}/answer", "", json.dumps([kind, text]))

    def is_answered(self) -> bool:
        return self._store.check([f"{self._name}/answer"])

    def look(self) -> Answer | None:
        """The answer for all; None so far."""
        if not self.is_answered():
            return None
        kind, text = json.loads(self._store.get(f"{self._name}/answer"))
        return kind, text

    def _compare(self) -> None:
        """Answers, if all have come."""
        told = self._told()
        if len(told) < len(self._members):
            return
        differs = difference({member: told[member] for member in self._members})
        self.answer("alike" if differs is None else "differ", differs or "")

    def _name_missing(self, when: str, lost: Sequence[int] = ()) -> None:
        """Gives up: the ranks `lost` and those that have not come are missing."""
        told = self._told()
        missing = [rank for rank in self._members if rank not in told or rank in lost]
        if missing:
            self.give_up(f"{rank_name(missing)} did not come {when}")
        else:
            self._compare()

    def _told(self) -> dict[int, Facts]:
        if not self._store.check([f"{self._name}/here"]):
            return {}
        lines = self._store.get(f"{self._name}/here").decode().splitlines()
        return dict(json.loads(line) for line in lines)


class Meeting(RollCall):
    """The first roll-call of a group; its first member, the lead, answers for all."""

    def _compare(self) -> None:
        if self._rank == self._members[0]:
            super()._compare()

    def look(self) -> Answer | None:
        answer = super().look()
        if answer is None and self._rank == self._members[0]:
            if self._store.add(f"{self._name}/count", 0) >= len(self._members):
                self._compare()
            if self._store.check([f"{self._name}/asks"]):
                _, when = json.loads(self._store.get(f"{self._name}/asks"))
                self._name_missing(when)
            answer = super().look()
        return answer

    def _name_missing(self, when: str, lost: Sequence[int] = ()) -> None:
        lead = self._members[0]
        if self._rank != lead:
            if poll(self.look, ANSWER_S) is not None:
                return
            lost = [lead]
        super()._name_missing(when, lost)


class Meetings:
    """The meetings of a group, numbered in the group's store.

    A store may outlive processes: torchrun keeps one store over all restarts, which each node
    numbers in its own way, and a process may make a group anew in the same store. So no rank can
    tell whether those who came to a meeting still live. The lead opens a meeting and alone answers,
    which nobody does for a dead lead; a new lead calls those who wait for a dead one.
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank, self._members = store, rank, members
        # Groups of other members may have a store with the same prefix.
        self._place = f"ring_attn/{hashed(members)}"
        self._opened = ""

    def find(self, seconds: float = 0.0) -> str | None:
        """The name of the open meeting; None if the lead opens none within so many seconds."""
        if self._rank == self._members[0]:
            self._opened = self._opened or self._open()
            return self._opened
        number = self._store.add(self._place, 0)
        if number and not self._at(number).is_answered():
            return self._name(number)
        opened = poll(lambda: self._store.add(self._place, 0) - number, seconds)
        return self._name(number + opened) if opened else None

    def attend(self, seconds: float, told: Facts, arrive: Callable[[str], InVain]) -> None:
        """Waits until all members have come to one meeting, as `RollCall.wait`.

        Calls `arrive` with the name of each meeting to which this rank comes: the lead of the first
        one may have died.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and (name := self.find(left)) is not None:
            meeting = Meeting(self._store, name, self._rank, self._members)
            in_vain = arrive(name)
            meeting.come(told)
            try:
                return meeting.wait(deadline - time.monotonic(), in_vain, asked=seconds)
            except MovedError:
                if self._opened:
                    raise
        kind, text = self._at(self._store.add(self._place, 0)).look() or ("", "")
        last = f"; they met before: {text}" if kind == "missing" else ""
        lead = rank_name(self._members[:1])
        raise MissingRanksError(f"{lead} did not come within {seconds:g} s{last}")

    def _open(self) -> str:
        number = self._store.add(self._place, 1)
        if number > 1:
            self._at(number - 1).answer("moved")
        return self._name(number)

    def _name(self, number: int) -> str:
        return f"{self._place}/{number}"

    def _at(self, number: int) -> RollCall:
        return RollCall(self._store, self._name(number), self._rank, self._members)


def meet(
    roll_call: RollCall,
    seconds: float,
    told: Facts | None = None,
    in_vain: InVain | None = None,
) -> None:
    """Comes to a roll-call and waits there, as `RollCall.wait`."""

    def come_and_wait() -> None:
        roll_call.come(told)
        roll_call.wait(seconds, in_vain)

    answered(come_and_wait, seconds)


class PollingStore(Store):
    """The store of a group, for gloo, which waits in the store for the other ranks' addresses.

    A thread that waits for a key blocks the client for all other threads, so this store polls. A
    second client would first look up the host's name: 5 s if the name server loses the request.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        # The key exists: gloo waits for each key before reading it.
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: datetime.timedelta = NO_LIMIT) -> None:
        seconds = timeout.total_seconds()
        if not poll(lambda: self._store.check(keys), seconds):
            raise RuntimeError(f"no rank has set {keys} within {seconds:g} s")


def connect_gloo(
    store: Store,
    meeting: str,
    rank: int,
    everyone: Sequence[int],
    seconds: float,
    in_vain: InVain,
) -> dist.ProcessGroupGloo:
    """gloo's connections between all ranks, by global ranks; returns when all are connected.

    A rank that has met the others may yet leave its call: then `in_vain` says so.
    """
    connected = RollCall(store, f"{meeting}/connected", rank, everyone)
    connections: list[dist.ProcessGroupGloo] = []
    polling, place, size = PollingStore(store), everyone.index(rank), len(everyone)

    def connect() -> None:
        try:
            prefix = PrefixStore(f"{meeting}/gloo", polling)
            timeout = datetime.timedelta(seconds=seconds)
            connections.append(dist.ProcessGroupGloo(prefix, place, size, timeout))
            connected.come()
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the store has gone
                connected.give_up(str(error))

    # gloo tries each peer five times, each time for the whole timeout, and cannot be interrupted:
    # a thread that takes too long is abandoned.
    threading.Thread(target=connect, name="ring_attn_connect", daemon=True).start()
    try:
        answered(lambda: connected.wait(seconds, in_vain), seconds)
    except RuntimeError as error:
        if (reason := in_vain()) is not None:
            raise MissingRanksError(reason) from error
        raise unconnected(RollCall(store, f"{meeting}/left", rank, everyone), error) from error
    return connections[0]


def unconnected(asked_again: RollCall, error: Exception) -> MissingRanksError:
    """The error of ranks that came, but did not connect; names those that have gone since."""
    text = "all ranks came, but they could not connect to each other"
    try:
        meet(asked_again, ASKED_AGAIN_S)
    except MissingRanksError as missing:
        return MissingRanksError(f"{text}; when asked again, {missing}")
    return MissingRanksError(f"{text}: {error}")
