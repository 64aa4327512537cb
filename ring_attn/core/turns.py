"""Turns of a direct exchange: in a turn each rank sends to one rank and receives from one.

A table says which rank needs rows of which. Its pairs are sorted into turns, so that in a turn no
rank sends twice or receives twice:

    rank needs rows of owner   turn 0          turn 1          turn 2
      owner  0 1 2 3           0 -> 1          0 -> 2          0 -> 3
    0        . x . .           2 -> 3                          1 -> 0
    1        x . . .
    2        x . . .
    3        x . x .

There is one turn for each distance in the ring at which any rank needs rows, whose senders are that
far from their receivers. For documents on some of the ranks these may be twice as many turns as any
rank has partners. All ranks compute the same turns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Traveller
from ring_attn.core.work import needed_rows


class TurnPairs(NamedTuple):
    """Senders and receivers of a turn.

    Attributes:
        to, source: receiver and sender of each rank; a rank that takes no part has itself.
        full: whether each rank sends rows. A rank that only receives rows sends an empty message,
            of 16 bytes, to a rank that only sends rows.
    """

    to: list[int]
    source: list[int]
    full: list[bool]


@lru_cache(maxsize=64)
def turns_of(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, travels: Traveller
) -> tuple[TurnPairs, ...]:
    """The turns in which every rank gets the rows that it needs."""
    rows = needed_rows(layout_q, layout_kv, mask, travels)
    # One line for each sender.
    rows = rows.t() if travels == "kv" else rows
    world_size = len(rows)
    sender, receiver = rows.nonzero().unbind(1)
    distance = (receiver - sender) % world_size
    distances = distance.unique()
    table = torch.full((len(distances), world_size), -1)
    table[torch.searchsorted(distances, distance), sender] = receiver
    return tuple(_completed(line) for line in table)


def _completed(line: Tensor) -> TurnPairs:
    """A permutation: ranks that only receive send empty messages to ranks that only send."""
    ranks = torch.arange(len(line))
    full = sends = line >= 0
    receives = torch.zeros_like(sends)
    receives[line[sends]] = True
    line = line.where(sends, ranks)
    line[receives & ~sends] = ranks[sends & ~receives]
    source = torch.empty_like(line).scatter_(0, line, ranks)
    return TurnPairs(line.tolist(), source.tolist(), full.tolist())
