"""How ranks come together: a roll-call through the store, connections, and a second roll-call.

The first roll-call names missing ranks. The second keeps every rank from its first message until
all ranks are connected: a rank that went on, raised and closed its connections would break the
connections that a slower rank is still making.

Makes no groups of torch: splits no communicator, takes no name from torch's counters, and registers
nothing with torch. A connection closes when the last reference to it goes.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ring_attn.torch_private import PrefixStore, Store
from ring_attn.transport.base import rank_name

T = TypeVar("T")

# Seconds of the roll-call that finds, after connecting has failed, which ranks are still alive.
ASKED_AGAIN_S = 1.0

# Seconds that the store may take to answer, beyond the ranks' own time limit.
STORE_S = 1.0

NO_LIMIT = datetime.timedelta.max


class MissingRanksError(RuntimeError):
    """Some ranks did not come in time; the message names the missing ranks."""


class DifferentError(RuntimeError):
    """Ranks told different texts; `told` has the texts with the ranks."""

    def __init__(self, rule: str, told: str) -> None:
        """Makes the error of ranks that must all keep a rule."""
        super().__init__(f"all ranks must {rule}, got {told}")
        self.told = told


def bounded(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, which runs in a new thread; a TimeoutError if it takes longer.

    A request to a store whose host is gone cannot be interrupted: its thread is left behind, and
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


def poll(ask: Callable[[], T], seconds: float) -> T:
    """The first true answer, or the last one in time; asks again after growing pauses."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not (answer := ask()) and time.monotonic() <= deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return answer


class RollCall:
    """Ranks that wait for each other: each rank comes, or gives up for all and says why."""

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[int], verb: str = "come"
    ) -> None:
        """Prepares a roll-call of global ranks, by a key `name` never used before.

        `verb` is for messages.
        """
        self._store, self._name, self._rank = store, name, rank
        self._members, self._verb = members, verb

    def come(self, told: str = "") -> None:
        self._store.set(f"{self._name}/here/{self._rank}", told)
        self._store.add(f"{self._name}/told/{told}", 1)
        self._store.add(f"{self._name}/count", 1)

    def check_alike(self, told: str, rule: str) -> None:
        """Refuses members, all of which must have come, that reported different texts."""
        if self._store.add(f"{self._name}/told/{told}", 0) < len(self._members):
            ranks: dict[str, list[int]] = {}
            for member in self._members:
                text = self._store.get(f"{self._name}/here/{member}").decode()
                ranks.setdefault(text, []).append(member)
            shown = "; ".join(f"{rank_name(some)}: {text}" for text, some in ranks.items())
            raise DifferentError(rule, shown)

    def give_up(self, why: str) -> None:
        """Ends the roll-call on all ranks that have not seen everyone come."""
        self._store.set(f"{self._name}/gave_up", f"{rank_name(self._rank)} has given up: {why}")

    def wait(self, seconds: float, in_vain: Callable[[], str | None] | None = None) -> None:
        """Waits until all members have come; else names the missing ranks, or who gave up.

        `in_vain` says why some member will not come, if that is known; it is asked again and again.
        """
        gave_up = f"{self._name}/gave_up"

        def complete() -> bool:
            count = self._store.add(f"{self._name}/count", 0)
            if self._store.check([gave_up]):
                raise MissingRanksError(self._store.get(gave_up).decode())
            if count >= len(self._members):
                return True
            if in_vain is not None and (reason := in_vain()) is not None:
                raise MissingRanksError(reason)
            return False

        if not poll(complete, seconds):
            here = [self._store.check([f"{self._name}/here/{m}"]) for m in self._members]
            missing = [m for m, came in zip(self._members, here, strict=True) if not came]
            why = f"{rank_name(missing)} did not {self._verb} within {seconds:g} s"
            self.give_up(why)
            raise MissingRanksError(why)


def next_meeting(store: Store, name: str, rank: int, seconds: float) -> str:
    """A name in the store for this rank's next meeting with the same ranks, never used before."""
    return _answer(lambda: f"{name}/{store.add(f'{name}/arrivals/{rank}', 1)}", seconds)


def meet(
    store: Store,
    meeting: str,
    rank: int,
    members: Sequence[int],
    seconds: float,
    told: str = "",
    rule: str = "",
    in_vain: Callable[[], str | None] | None = None,
) -> None:
    """Waits until all members have come, as `RollCall.wait`.

    All members must tell the same text, by a rule for the message.
    """

    def come_and_wait() -> None:
        roll_call = RollCall(store, meeting, rank, members)
        roll_call.come(told)
        roll_call.wait(seconds, in_vain)
        roll_call.check_alike(told, rule)

    _answer(come_and_wait, seconds)


def _answer(work: Callable[[], T], seconds: float) -> T:
    try:
        return bounded(work, seconds + STORE_S)
    except TimeoutError as error:
        raise MissingRanksError(f"the group's store does not answer: {error}") from error


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
    store: Store, meeting: str, rank: int, everyone: Sequence[int], seconds: float
) -> dist.ProcessGroupGloo:
    """gloo's connections between all ranks, by global ranks; returns when all are connected."""
    connected = RollCall(store, f"{meeting}/connected", rank, everyone, "connect")
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
    # a thread that takes too long is left behind.
    threading.Thread(target=connect, name="ring_attn_connect", daemon=True).start()
    try:
        bounded(lambda: connected.wait(seconds), seconds + STORE_S)
    except (RuntimeError, TimeoutError) as error:
        text = "all ranks came, but they could not connect to each other"
        try:
            meet(store, f"{meeting}/left", rank, everyone, ASKED_AGAIN_S)
        except MissingRanksError as missing:
            # These ranks have gone.
            raise MissingRanksError(f"{text}; when asked again, {missing}") from error
        raise MissingRanksError(f"{text}: {error}") from error
    return connections[0]
