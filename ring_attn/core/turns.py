"""Turns of a direct exchange: in a turn each rank sends to one rank and receives from one.

A table says which rank needs rows of which. Its pairs are sorted into turns, so that in a turn no
rank sends twice or receives twice:

    rank needs rows of owner   turn 0          turn 1          turn 2
      owner  0 1 2 3           0 -> 1          0 -> 2          0 -> 3
    0        . x . .           1 -> 0          2 -> 3
    1        x . . .
    2        x . . .
    3        x . x .

The simple plan has one turn for each distance in the ring: every rank sends to the rank at that
distance. If a greedy plan needs fewer turns, it is taken: pairs with most rows first, each in the
first turn in which both ranks are free. For documents on some of the ranks, the greedy plan has
about as many turns as any rank has partners; the distances may be twice as many. All ranks compute
the same turns.
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

# With more pairs than this, only the simple plan is made: a greedy plan takes a second by then.
MAX_PAIRS = 1 << 18


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
    most = max((int((rows > 0).sum(dim).max()) for dim in (0, 1)), default=0)
    number = torch.searchsorted(distances, distance)
    turns = len(distances)
    if most < turns and len(sender) <= MAX_PAIRS:
        order = rows[sender, receiver].argsort(descending=True, stable=True)
        sender, receiver = sender[order], receiver[order]
        greedy = torch.tensor(_first_free(sender.tolist(), receiver.tolist(), world_size))
        if int(greedy.max()) + 1 < turns:
            number, turns = greedy, int(greedy.max()) + 1
        else:
            number = number[order]
    table = torch.full((turns, world_size), -1)
    table[number, sender] = receiver
    return tuple(_completed(line) for line in table)


def _first_free(senders: list[int], receivers: list[int], world_size: int) -> list[int]:
    """The first turn of each pair, in order, in which its sender and its receiver are free."""
    sends, receives = [0] * world_size, [0] * world_size  # bits of the turns that are taken
    turns = []
    for sender, receiver in zip(senders, receivers, strict=True):
        taken = sends[sender] | receives[receiver]
        free = ~taken & (taken + 1)
        sends[sender] |= free
        receives[receiver] |= free
        turns.append(free.bit_length() - 1)
    return turns


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
