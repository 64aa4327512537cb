"""A rank as a member of a process group."""

from __future__ import annotations

from collections.abc import Sequence

from ring_attn.transport.base import Ranks, rank_name


class Member:
    """This rank in a process group.

    Attributes:
        rank: this rank's number in the group.
        global_ranks: the global ranks of all members, by their numbers in the group.
        global_rank: this rank's global rank.
        world_size: number of members.
        name: this rank in errors.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self.rank = rank
        self.global_ranks: Ranks = tuple(global_ranks)
        self.global_rank = self.global_ranks[rank]
        self.world_size = len(self.global_ranks)
        self.name = rank_name(self.global_rank)
