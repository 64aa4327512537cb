"""The table of faults: a share of it, and all of it; and that it finds what is planted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import pytest

from dev.faults import (
    FAULTS,
    LOST,
    RANKS,
    STRATEGIES,
    Cell,
    StepEnd,
    cells,
    judged,
    on_rank,
    run_cell,
    run_cells,
)
from ring_attn.transport import p2p
from ring_attn.transport.p2p import P2PTransport
from ring_attn.transport.ranks.identity import message_tag
from ring_attn.transport.ranks.notes import Notes
from tests.distributed.pool import Ended


@pytest.mark.slow
@pytest.mark.parametrize("every", [17, 1])
def test_no_fault_is_wrong_late_or_unnamed(every: int) -> None:
    chosen = cells()[::every]
    assert {cell.fault for cell in chosen} == {*FAULTS}
    assert {cell.strategy for cell in chosen} == {*STRATEGIES}
    bad = [result for result in run_cells(chosen) if not result.good]
    # On a busy machine a call may end before its fault comes: that shows nothing of the call.
    late = [one for one in bad if one.outcome == "NOT HIT"]
    bad = [one for one in bad if one not in late]
    assert not bad, "\n".join(f"{one.cell}: {one.outcome}\n{one.output}" for one in bad)
    assert len(late) <= len(chosen) // 4, [one.cell for one in late]


def takes_any(cell: Cell, victims: tuple[int, ...]) -> Any:
    """Takes messages of other calls for its own."""
    with (
        mock.patch.object(p2p, "message_tag", lambda _, *place: message_tag(0, *place)),
        mock.patch.object(Notes, "difference", return_value=None),
    ):
        return on_rank(cell, victims)


def exits(*_: object) -> NoReturn:
    os._exit(3)


def crashes(cell: Cell, victims: tuple[int, ...]) -> Any:
    with mock.patch.object(P2PTransport, "error_of", exits):
        return on_rank(cell, victims)


@pytest.mark.parametrize(
    ("fault", "planted", "outcome"),
    [("disagreeing", takes_any, "WRONG"), ("killed", crashes, "CRASH")],
)
def test_a_planted_defect_is_found(fault: str, planted: Callable[..., Any], outcome: str) -> None:
    assert run_cell(Cell(fault, "ring", "forward"), planted).outcome == outcome


KILLED = Cell("killed", "ring", "forward")
RIGHT = StepEnd(Ended(None, "it ran", 0.1), right=True, usual_s=0.1)


def reported(
    text: str = "global rank {} died",
    *,
    right: bool = True,
    took_s: float = 1.0,
    usual_s: float = 0.1,
) -> StepEnd:
    return StepEnd(Ended(RuntimeError, text.format(*KILLED.victims), took_s), right, usual_s)


@pytest.mark.parametrize(
    ("fault", "end", "outcome"),
    [
        ("killed", reported(), "reported"),
        ("killed", reported(right=False), "WRONG"),
        ("killed", reported(took_s=17.1), "HANG"),
        ("killed", reported(took_s=17.1, usual_s=0.2), "reported"),  # on a busy machine
        ("killed", reported("global rank 3 left"), "UNNAMED"),
        ("killed", RIGHT, "NOT REPORTED"),
        ("memory", RIGHT, "NOT HIT"),
        ("restarted", RIGHT, "right"),
        ("restarted", reported(), "NOT REPORTED"),
    ],
)
def test_ends_are_judged(fault: str, end: StepEnd, outcome: str) -> None:
    cell = Cell(fault, "ring", "forward")
    ends = [None if fault in LOST and rank in cell.victims else [end] for rank in range(RANKS)]
    assert judged(cell, ends, [0] * RANKS).outcome == outcome
