"""Ranks that wait in a call of another process group, for the error of a rank that waits for them.

If two ranks use two groups in different orders, each waits for the other. The notes and meetings of
the other groups of this process show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.distributed as dist

from ring_attn.torch_private import all_groups, group_store
from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks.notes import Notes
from ring_attn.transport.ranks.rendezvous import Meetings

REMEDY = "Use the process groups in the same order on every rank"


def waits_elsewhere(own_ranks: Collection[int], rank: int, store: object) -> str | None:
    """Return which ranks of a group wait in a call of another group, and what to do; or None.

    Args:
        own_ranks: global ranks of the group.
        rank: this global rank.
        store: the group's store.
    """
    for other in all_groups():
        other_store = group_store(other)
        members = dist.get_process_group_ranks(other)
        if other_store is store or rank not in members:
            continue
        wanted = [member for member in members if member in own_ranks and member != rank]
        for text in _waits_in(other, wanted, rank):
            return f"{text}. {REMEDY}"
    return None


def _waits_in(group: dist.ProcessGroup, wanted: list[int], rank: int) -> Iterator[str]:
    """Yield which of the `wanted` ranks wait in a call of the group, as far as is known."""
    store, members = group_store(group), dist.get_process_group_ranks(group)
    name, arrived, is_answered = Meetings(store, rank, members).last()
    if not name:
        return
    of_group = f"the group of {rank_name(members)}"
    if rank not in arrived:
        if is_answered:  # they have given up
            return
        waiting = [member for member in wanted if member in arrived]
        if waiting:
            yield (
                f"{rank_name(waiting if len(waiting) > 1 else waiting[0])} waits for "
                f"{rank_name(rank)} in the first call of another group, {of_group}"
            )
        return
    notes = Notes(store, name, rank)
    if notes.has_failed():
        return
    for member in wanted:
        found = notes.wait_of(member)
        if found is not None:
            call, waits_for = found
            yield (
                f"{rank_name(member)} waits for {rank_name(waits_for)} in {call} of another group, "
                f"{of_group}"
            )
