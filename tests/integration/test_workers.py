"""Processes that die, hang and end cost their own items."""

import os
import time

import pytest

from ring_attn.tools.workers import Workers
from tests.integration.worker_calls import call

LIMIT = 30.0


def lost(item: tuple[str, int], why: str) -> tuple[str, int, int]:
    return f"{item[0]}: {why}", item[1], 0


@pytest.mark.slow
def test_items_are_lost_one_by_one() -> None:
    workers = Workers(call, lost, 1)
    items = [("work", 0), ("die", 1), ("work", 2), ("work", 3), ("last", 4), ("work", 5)]
    found = workers.map(items, LIMIT)
    assert [(what, number) for what, number, _ in found] == [
        ("work", 0), ("die: the process died", 1), ("work", 2), ("work", 3), ("last", 4),
        ("work", 5),
    ]  # fmt: skip
    first, _, second, kept, last, third = (process for _, _, process in found)
    assert second == kept == last and len({first, second, third, os.getpid()}) == 4
    # Kept from call to call; what raises what it was not told to catch dies of it.
    (still,) = workers.map([("work", 6)], LIMIT)
    assert still == ("work", 6, third)
    start = time.monotonic()
    assert workers.map([("hang", 7)], 0.5) == [("hang: it took more than 0.5 s", 7, 0)]
    assert time.monotonic() - start < 10
    workers.close()


def test_what_has_not_begun_in_time_is_lost() -> None:
    workers = Workers(call, lost, 1)
    found = workers.map([("work", 0), ("work", 1)], LIMIT, time.monotonic() - 1)
    assert found == [("work: there was no time left", 0, 0), ("work: there was no time left", 1, 0)]
    workers.close()


def test_an_error_ends_its_process(capfd: object) -> None:
    workers = Workers(call, lost, 2)
    found = workers.map([("raise", 0), ("work", 1)], LIMIT)
    workers.close()
    assert found[0] == ("raise: the process died", 0, 0) and found[1][:2] == ("work", 1)
