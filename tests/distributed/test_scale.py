"""What forming a ring asks of the store does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from ring_attn.transport.ranks import rendezvous
from tests.distributed.scale import simulate

# For a rank that waits 5 s; the lead of a meeting asks most. One server of torch's store takes
# some 25,000 requests a second.
MAX_REQUESTS = 200
LONGEST_KEY = 64


@pytest.mark.parametrize("lead", ["first", "last"])
@pytest.mark.parametrize("world_size", [8, 257, pytest.param(1024, marks=pytest.mark.slow)])
def test_requests_and_keys_are_constant(world_size: int, lead: str) -> None:
    def comes_at(rank: int) -> float:
        return 5.0 * (rank if lead == "first" else world_size - 1 - rank) / world_size

    formed = simulate(world_size, 60.0, comes_at)
    assert {one.why for one in formed} == {""}
    assert max(one.requests for one in formed) <= MAX_REQUESTS
    assert max(one.longest for one in formed) <= LONGEST_KEY


@pytest.mark.parametrize("missing", [(0,), (3, 64)], ids=str)
def test_one_rank_names_the_missing_ones_for_all(missing: tuple[int, ...]) -> None:
    ended = simulate(65, 5.0, lambda rank: rank / 65, missing)
    assert all(f"global ranks {[*missing]} did not arrive within 5 s" in one.why for one in ended)
    # The lead names the missing ranks after its longest pause; for a missing lead, another rank.
    waited_s = rendezvous.LONGEST_PAUSE_S + 2 * rendezvous.ANSWER_S
    assert all(one.took_s <= 5.0 + waited_s for one in ended), "simulated time"


def test_a_late_rank_states_the_whole_time_limit() -> None:
    """A rank that waits for the lead to open a meeting has less of its time left for the others."""
    ended = simulate(3, 5.0, lambda rank: (2.0, 0.0, 0.0)[rank], missing=(2,))
    reported = [one.why for one in ended]
    assert all("global ranks [2] did not arrive within 5 s" in why for why in reported), reported
    assert max(one.requests for one in ended) <= MAX_REQUESTS
    assert max(one.longest for one in ended) <= LONGEST_KEY
