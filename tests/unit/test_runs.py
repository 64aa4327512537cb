"""How the maps of a recurrence travel, in both ways, on ranks of one process."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn import SequenceLayout
from ring_attn.core import runs
from ring_attn.core.runs import StatesPlan, plan_states
from ring_attn.core.segments import Segment
from ring_attn.sequence.states import composed
from ring_attn.testing import poisoned_empty
from ring_attn.transport.local import LocalTransport, run_local
from tests.recurrences import always

DIM, DIM_V = 3, 2
WAYS = ("gather", "scan")


@st.composite
def placed(draw: st.DrawFn) -> tuple[SequenceLayout, tuple[int, ...]]:
    """A layout over 1 to 5 ranks, some without rows, and the starts of documents."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    world_size = draw(st.integers(1, 5))
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    for stop, length, owner in zip(accumulate(lengths), lengths, owners, strict=True):
        parts[owner % world_size].insert(0, Segment(stop - length, length))
    layout = SequenceLayout.from_segments(parts)
    return layout, tuple(sorted({0, layout.seqlen, *draw(st.sets(st.integers(0, layout.seqlen)))}))


def by_way(
    way: str, layout: SequenceLayout, cuts: tuple[int, ...], *, backward: bool = False
) -> StatesPlan:
    with always(way):
        return plan_states(layout, cuts, 1, backward=backward)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(placed(), st.sampled_from(WAYS), st.booleans(), st.booleans())
def test_every_run_gets_what_the_runs_before_it_make_of_zeros(
    place: tuple[SequenceLayout, tuple[int, ...]], name: str, backward: bool, matrix: bool
) -> None:
    layout, cuts = place
    way = by_way(name, layout, cuts, backward=backward)
    torch.manual_seed(0)
    # Small whole numbers, so that sums and products are exact in any order.
    decays = torch.randint(-1, 2, (len(way.runs), DIM, DIM if matrix else 1)).double()
    ends = torch.randint(-3, 4, (len(way.runs), DIM, DIM_V)).double()
    state, expected = torch.zeros(DIM, DIM_V).double(), []
    for i, (run, decay, end) in enumerate(zip(way.runs, decays, ends, strict=True)):
        # Of two neighbours the later one must not start a document.
        linked = i and way.runs[i - 1 if backward else i].enters
        state = state if linked else torch.zeros_like(state)
        expected.append(state)
        state = end + ((decay @ state if matrix else decay * state) if run.passes else 0)
        if not run.passes:
            decay.fill_(torch.nan)  # counts for nothing

    def on_rank(rank: int, transport: LocalTransport) -> tuple[Tensor, int]:
        own = sorted((run.number, i) for i, run in enumerate(way.runs) if run.rank == rank)
        index = torch.tensor([i for _, i in own], dtype=torch.long)
        with poisoned_empty():
            got = composed(way, decays[index], ends[index], matrix, transport)
        assert torch.equal(got, torch.stack(expected)[index])
        return transport.stats.bytes_sent, transport.stats.messages

    size = 8 * (decays[0].numel() + ends[0].numel())
    for rank, (sent, messages) in enumerate(run_local(layout.world_size, on_rank)):
        assert sent == way.sent(rank) * size
        assert messages == sum(bool(step.parcels) for step in way.rounds)


@pytest.mark.parametrize("backward", [False, True])
def test_rounds_and_bytes_of_both_ways(backward: bool) -> None:
    layout = SequenceLayout.contiguous(80, 8)
    gather, scan = (by_way(way, layout, (0, 80), backward=backward) for way in WAYS)
    assert (len(gather.rounds), len(scan.rounds)) == (1, 4)
    ranks = range(8)[::-1] if backward else range(8)
    # All maps to all later ranks.
    assert [gather.sent(r) for r in ranks] == [7, 6, 5, 4, 3, 2, 1, 0]
    # Windows of 1, 1, 2 and 4 runs, to the ranks so far ahead; the first run is all that is before.
    assert [scan.sent(r) for r in ranks] == [1, 4, 4, 4, 3, 3, 2, 0]


def test_the_scan_is_taken_for_many_ranks_and_large_states() -> None:
    cases = {(8, 1 << 19): "gather", (64, 1 << 10): "gather", (64, 1 << 22): "scan"}
    cases[9, int(runs.LATENCY_BYTES)] = "scan"  # 4 maps less, 3 rounds more
    for (world_size, nbytes), way in cases.items():
        layout = SequenceLayout.contiguous(world_size * 4, world_size)
        assert plan_states(layout, (0, layout.seqlen), nbytes).algorithm == way
