"""How ranks come together: a roll-call through the store, which says who is missing; connections.

torch's own groups are not made here. Nothing is split off another communicator, no name is taken
from torch's counters, and nothing is registered with torch: a connection is closed when the last
reference to it goes.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ring_attn.torch_private import PrefixStore, Store

T = TypeVar("T")

# Seconds in which ranks that could not connect say that they are still there.
ASKED_AGAIN_S = 1.0

# Seconds that the store may take to answer beyond the time that is waited for ranks.
STORE_S = 1.0


class MissingRanksError(RuntimeError):
    """Ranks that did not come in time; the message names them."""


def bounded(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, done in a thread of its own.

    A store whose host is gone, and gloo while it connects, cannot be interrupted: the thread is
    left behind then, and ends by itself.

    Raises:
        TimeoutError: `work` took longer.
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


def roll_call(store: Store, name: str, rank: int, members: Sequence[int], seconds: float) -> str:
    """Waits until all members have come; returns a name in the store that only this meeting has.

    Args:
        store: of the group.
        name: what the members form together.
        rank: this one of the members.
        members: ranks of the group.
        seconds: how long to wait for the others.

    Raises:
        MissingRanksError: naming the ranks that did not come, or who gave up before this one came.
    """
    # A process that meets the same ranks over the same store again must not read the old notes.
    meeting = f"{name}/{store.add(f'{name}/arrivals/{rank}', 1)}"
    deadline = time.monotonic() + seconds
    store.set(f"{meeting}/here/{rank}", "")
    store.add(f"{meeting}/count", 1)
    pause = 0.001
    while store.add(f"{meeting}/count", 0) < len(members):
        if time.monotonic() > deadline:
            missing = [m for m in members if not store.check([f"{meeting}/here/{m}"])]
            store.set(f"{meeting}/gave_up", str(rank))
            raise MissingRanksError(f"ranks {missing} did not come within {seconds:g} s")
        if store.check([f"{meeting}/gave_up"]):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    if store.check([f"{meeting}/gave_up"]):
        first = store.get(f"{meeting}/gave_up").decode()
        missing = [m for m in members if not store.check([f"{meeting}/here/{m}"])]
        raise MissingRanksError(
            f"rank {first} has given up waiting"
            + (f"; ranks {missing} did not come" if missing else ", before this rank came")
        )
    return meeting


def meet(store: Store, name: str, rank: int, members: Sequence[int], seconds: float) -> str:
    """A `roll_call` that ends in time also where the store's host is gone; errors are the same."""
    try:
        return bounded(lambda: roll_call(store, name, rank, members, seconds), seconds + STORE_S)
    except TimeoutError as error:
        raise MissingRanksError(f"the group's store does not answer: {error}") from error


def connect_gloo(
    store: Store, meeting: str, rank: int, world_size: int, seconds: float
) -> dist.ProcessGroupGloo:
    """gloo's connections between all ranks, which have all been at the roll-call.

    Raises:
        MissingRanksError: naming the ranks that went away while connecting.
    """
    # gloo tries each peer five times, each for all of the timeout: it is not waited for that long.
    timeout = datetime.timedelta(seconds=seconds)
    prefix = PrefixStore(f"{meeting}/gloo", store)
    try:
        gloo = bounded(lambda: dist.ProcessGroupGloo(prefix, rank, world_size, timeout), seconds)
    except (RuntimeError, TimeoutError) as error:
        text = "all ranks came, but they could not connect to each other"
        try:
            meet(store, f"{meeting}/left", rank, range(world_size), ASKED_AGAIN_S)
        except MissingRanksError as missing:
            # Those that have gone, and those that are still trying.
            raise MissingRanksError(f"{text}; when asked again, {missing}") from error
        raise MissingRanksError(f"{text}: {error}") from error
    return gloo
