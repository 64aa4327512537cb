"""Random calls of `make fuzz`, and faults that they find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dev.fuzz import fuzz
from ring_attn.backends import base, reference
from ring_attn.core import state
from ring_attn.core.tiles import Tile
from ring_attn.machines import run as machine


def test_random_calls_are_right() -> None:
    counts: Counter[str] = Counter()
    failure = fuzz(0, 200, counts)
    assert failure is None, failure
    assert counts["right"] >= 100, counts


def wider_band(tile: Tile, device: torch.device) -> torch.Tensor:
    return base.band_mask(tile if tile.hi is None else tile._replace(hi=tile.hi + 1), device)


right_weights = state._weights


def no_rescale(m: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    m_new, keep, add = right_weights(m, other)
    return m_new, torch.ones_like(keep), add


def mean_over_rows(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return state.sinks_gradient(sinks, lse, delta) / max(1, lse.size(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (reference, "band_mask", wider_band),
        (state, "_weights", no_rescale),
        (machine, "sinks_gradient", mean_over_rows),
    ],
)
def test_a_planted_fault_is_found_and_repeated(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    failure = fuzz(0, 500, Counter())
    assert failure is not None
    case = re.search(r"--case '(\S+)'", failure)
    assert case is not None, failure
    assert fuzz(0, 1, Counter(), case[1]) is not None
    monkeypatch.undo()
    assert fuzz(0, 1, Counter(), case[1]) is None
