"""Ranks with a network between them that delays, limits, loses and cuts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dev.network import RANKS, STRATEGIES, Net, Network, Waits, are_as_predicted, why_not
from ring_attn import TransportOptions, ring_attention
from ring_attn.testing import Case, run_all_ranks
from tests.distributed.pool import FAR, Ended, ended


@pytest.fixture
def net() -> Iterator[Net]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Net() as net:
        yield net


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [Network(loss=0.05), Network(delay=50e-3, rate=6.25e6, loss=0.01)], ids=str
)
def test_results_are_exact_though_packets_are_lost(net: Net, network: Network) -> None:
    net.change(network)
    for strategy in STRATEGIES:
        ran = run_all_ranks(Case("causal", strategy=strategy), RANKS, net.run)
        assert not ran.failures, ran.failures


@pytest.mark.parametrize(
    ("ring", "exchange", "right"),
    [
        ((2.0, 2.2), (1.0, 1.1), True),
        ((2.0, 2.6), (1.0, 1.1), False),  # too long
        ((2.0, 1.5), (1.0, 1.1), False),  # too short
        ((1.1, 1.0), (1.0, 1.1), False),  # in another order
    ],
)
def test_waits_are_judged(
    ring: tuple[float, float], exchange: tuple[float, float], right: bool
) -> None:
    """`python -m dev network` measures them, on a quiet machine."""
    assert are_as_predicted({"ring": Waits(*ring), "exchange": Waits(*exchange)}) == right


def attend(timeout: float) -> Ended:
    q = torch.full((1, 5, 2, 8), 1.0 + dist.get_rank())
    transport = TransportOptions(timeout=timeout)
    return ended(lambda: ring_attention(q, q, q, transport=transport))


@pytest.mark.parametrize("lost", [(2,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str)
def test_a_short_cut_is_waited_for_and_a_lasting_one_is_named(
    net: Net, lost: tuple[int, ...]
) -> None:
    net.change(Network())
    net.run(attend, FAR)
    net.change(Network(cut=lost))
    net.start(attend, FAR)
    time.sleep(1.5)
    assert net.answered == [], "a rank has gone on without the lost ones"
    net.change(Network())
    ends = net.results()
    assert all(end.error is None for end in ends), ends
    net.change(Network(cut=lost))
    ends = net.run(attend, 2.5)
    assert all(end.error is RuntimeError for end in ends), ends
    for rank, end in enumerate(ends):
        beyond = [r for r in range(RANKS) if (r in lost) != (rank in lost)]
        assert any(f"global rank {r}" in end.text for r in beyond), ends
