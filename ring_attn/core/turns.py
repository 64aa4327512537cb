"""Turns of a direct exchange: in a turn each rank sends to one rank and receives from one rank.

A table says which rank needs rows of which other rank. Its pairs are distributed over turns, so
that no rank sends twice or receives twice in a turn:

    rank needs rows of owner   turn 0          turn 1          turn 2
      owner  0 1 2 3           0 -> 1          0 -> 2          0 -> 3
    0        . x . .           1 -> 0          2 -> 3
    1        x . . .
    2        x . . .
    3        x . x .

The simple plan has one turn for each distance in the ring: every rank sends to the rank at that
distance. The greedy plan assigns the pairs in the order of their rows, most rows first, each to the
first turn in which both ranks are free. It is used if it needs fewer turns. For documents on some
of the ranks, the greedy plan has about as many turns as a rank has partners, and the simple plan
may have twice as many. All ranks compute the same turns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Side
from ring_attn.core.work import needed_rows

# With more pairs than this, only the simple plan is made, because a greedy plan takes a second.
MAX_PAIRS = 1 << 18


class TurnPairs(NamedTuple):
    """Senders and receivers of a turn.

    Attributes:
        to, source: receiver and sender of each rank; a rank without a partner has itself.
        full: whether each rank sends rows. A rank that only receives rows sends an empty message,
            of 16 bytes, to a rank that only sends rows.
    """

    to: list[int]
    source: list[int]
    full: list[bool]


@lru_cache(maxsize=64)
def turns_of(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, sent_side: Side
) -> tuple[TurnPairs, ...]:
    """Return the turns in which every rank gets the rows that it needs."""
    rows = needed_rows(layout_q, layout_kv, mask, sent_side)
    rows = rows.t() if sent_side == "kv" else rows  # (senders, receivers)
    world_size = len(rows)
    sender, receiver = rows.nonzero().unbind(1)  # of each pair
    # The simple plan: the turn of a pair is the place of its distance among all distances.
    distance = (receiver - sender) % world_size
    distances = distance.unique()
    turn = torch.searchsorted(distances, distance)
    num_turns = len(distances)
    # No plan has fewer turns than a rank has partners.
    partners = max(int((rows > 0).sum(dim).max()) for dim in (0, 1))
    if partners < num_turns and len(sender) <= MAX_PAIRS:
        order = rows[sender, receiver].argsort(descending=True, stable=True)
        sender, receiver, turn = sender[order], receiver[order], turn[order]
        greedy = torch.tensor(_first_free(sender.tolist(), receiver.tolist(), world_size))
        num_greedy = int(greedy.max()) + 1
        if num_greedy < num_turns:
            turn, num_turns = greedy, num_greedy
    receivers = torch.full((num_turns, world_size), -1)  # of each sender in each turn; -1 is none
    receivers[turn, sender] = receiver
    return tuple(_completed(line) for line in receivers)


def _first_free(senders: list[int], receivers: list[int], world_size: int) -> list[int]:
    """Assign each pair, in order, to the first turn in which its sender and receiver are free."""
    # One bit for each turn, 1 if the rank sends (or receives) in it.
    sends = [0] * world_size
    receives = [0] * world_size
    turns = []
    for sender, receiver in zip(senders, receivers, strict=True):
        taken = sends[sender] | receives[receiver]
        free = ~taken & (taken + 1)  # the lowest bit that is 0
        sends[sender] |= free
        receives[receiver] |= free
        turns.append(free.bit_length() - 1)
    return turns


def _completed(line: Tensor) -> TurnPairs:
    """Complete the receivers of a turn to a permutation.

    Ranks that only receive send empty messages to ranks that only send.
    """
    ranks = torch.arange(len(line))
    sends = line >= 0
    receives = torch.zeros_like(sends)
    receives[line[sends]] = True
    line = line.where(sends, ranks)
    line[receives & ~sends] = ranks[sends & ~receives]
    source = torch.empty_like(line).scatter_(0, line, ranks)
    return TurnPairs(to=line.tolist(), source=source.tolist(), full=sends.tolist())
