"""Ranks meet in a store that holds what dead ranks left there.

Each rank is a thread, and time is simulated: a busy machine changes nothing.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ring_attn.core.facts import Facts
from ring_attn.transport.ranks import rendezvous
from ring_attn.transport.ranks.rendezvous import (
    DifferentError,
    Meeting,
    Meetings,
    MissingRanksError,
)
from tests.distributed.scale import REQUESTS, Clock

MEMBERS = (4, 0, 7)
LEAD = MEMBERS[0]
SECONDS = 20.0


class SlowRequests:
    """A rank's view of a store whose requests take any time: those of ranks come in any order."""

    def __init__(self, store: dist.Store, clock: Clock, draw: random.Random) -> None:
        self._clock, self._draw = clock, draw
        for name in REQUESTS:
            setattr(self, name, self._slow(getattr(store, name)))

    def _slow(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any) -> Any:
            self._clock.sleep(self._draw.uniform(0.0, 0.002))
            return request(*given)

        return slow


class Met:
    """Where a rank met the others, or why it did not."""

    def __init__(self) -> None:
        self.at, self.why = "", ""


def meet(
    store: dist.Store,
    order: Sequence[int],
    members: Sequence[int] = MEMBERS,
    seconds: float = SECONDS,
    reported: Callable[[int], Facts | None] = lambda rank: None,
    gap: float = 0.01,
) -> dict[int, Met]:
    """Lets ranks come in this order, each a little after the one before."""
    return meet_in_groups(store, [(order, members)], seconds, reported, gap)[0]


def meet_in_groups(
    store: dist.Store,
    groups: Sequence[tuple[Sequence[int], Sequence[int]]],
    seconds: float = SECONDS,
    reported: Callable[[int], Facts | None] = lambda rank: None,
    gap: float = 0.0,
) -> list[dict[int, Met]]:
    """As `meet`, for groups of ranks that meet at the same time: each an order, and members."""
    found = [{rank: Met() for rank in order} for order, _ in groups]
    clock, draw = Clock(), random.Random(0)

    def run(number: int, rank: int, woken: threading.Event) -> None:
        met = found[number][rank]

        def on_arrival(name: str) -> Callable[[], None]:
            met.at = name
            return lambda: None

        woken.wait()
        try:
            view: Any = SlowRequests(store, clock, draw)
            Meetings(view, rank, groups[number][1]).attend(
                seconds, reported(rank) or {}, on_arrival
            )
        except (MissingRanksError, DifferentError) as error:
            met.why = str(error)
        finally:
            clock.next()

    everyone = [(n, i, rank) for n, (order, _) in enumerate(groups) for i, rank in enumerate(order)]
    with ThreadPoolExecutor(len(everyone)) as threads, mock.patch.object(rendezvous, "time", clock):
        runs = [threads.submit(run, n, rank, clock.alarm(gap * i)) for n, i, rank in everyone]
        clock.next()
        for one in runs:
            one.result()
    return found


def leave_behind(store: dist.Store, arrived: Collection[int]) -> None:
    """Ranks come to a meeting, and die there before anyone answers."""
    for rank in sorted(arrived, key=lambda rank: rank != LEAD):
        name = Meetings(store, rank, MEMBERS).find()
        if name is not None:
            Meeting(store, name, rank, MEMBERS).arrive()


def assert_met(met: dict[int, Met]) -> None:
    assert {one.why for one in met.values()} == {""}, {r: one.why for r, one in met.items()}
    assert len({one.at for one in met.values()}) == 1


@pytest.mark.parametrize("arrived", [(LEAD,), (LEAD, 0), (LEAD, 7), (0, 7)], ids=str)
def test_ranks_that_died_before_their_first_call(arrived: tuple[int, ...]) -> None:
    """In the first start, in the second one after they had met, in each order of arrival."""
    for order in permutations(MEMBERS):
        for again in (False, True):
            store = dist.HashStore()
            if again:
                assert_met(meet(store, MEMBERS, gap=0.0))
            leave_behind(store, arrived)
            assert_met(meet(store, order))


def test_any_row_of_restarts() -> None:
    draw = random.Random(0)
    store = dist.HashStore()
    for _ in range(25):
        for _ in range(draw.randrange(3)):
            leave_behind(store, draw.sample(MEMBERS, draw.randrange(1, 3)))
        assert_met(meet(store, draw.sample(MEMBERS, 3), gap=draw.choice([0.0, 0.005])))


def test_a_rank_that_leaves_and_comes_again_counts_once() -> None:
    store = dist.HashStore()
    leave_behind(store, (LEAD,))
    (name,) = {Meetings(store, rank, MEMBERS).find() for rank in MEMBERS[1:]}
    assert name is not None
    meeting = [Meeting(store, name, rank, MEMBERS) for rank in MEMBERS]
    for _ in MEMBERS:
        meeting[1].arrive()
    assert meeting[0].poll() is None
    meeting[2].arrive()
    assert meeting[0].poll() == meeting[1].poll() == ("equal", "")


@pytest.mark.parametrize("missing", [(LEAD,), (0,), (LEAD, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("before", [(), (LEAD,), (LEAD, *MEMBERS)], ids=str)
def test_missing_ranks_are_named(missing: tuple[int, ...], before: tuple[int, ...]) -> None:
    """By all ranks that are here, the lead too, whatever stands in the store."""
    store = dist.HashStore()
    leave_behind(store, before)
    here = [rank for rank in MEMBERS if rank not in missing]
    for one in meet(store, here, seconds=0.3).values():
        # Without the lead, the store does not tell who else is missing.
        named = re.escape(str(list(missing))) if LEAD not in missing else rf"\[{LEAD}(, 7)?\]"
        assert re.search(f"global ranks {named} did not arrive within 0.3 s", one.why), one.why
    assert_met(meet(store, MEMBERS))


def test_ranks_that_report_different_texts() -> None:
    met = meet(dist.HashStore(), MEMBERS, reported=lambda rank: {"x": 2 * ("ab"[rank == 7],)})
    text = (
        "ranks disagree on the call; x: global rank 7 has b, the other 2 have a. "
        "Pass the same x on every rank"
    )
    assert {one.why for one in met.values()} == {text}


def test_groups_with_one_store_stay_apart() -> None:
    """Groups of other ranks, or of the same ranks in another order, whose stores are one."""
    store = dist.HashStore()
    groups = [(0, 1), (2, 3), (1, 0), (3, 2)]
    found = meet_in_groups(store, [(group, group) for group in groups])
    for met in found:
        assert_met(met)
    assert len({one.at for met in found for one in met.values()}) == len(groups)
