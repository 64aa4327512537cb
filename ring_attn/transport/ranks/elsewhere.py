"""Ranks that wait in a call of another process group, for the error of a rank that waits for them.

If two ranks use two groups in different orders, each waits for the other. The notes and meetings of
the other groups of this process show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from ring_attn.torch_private import Store, all_groups, group_store
from ring_attn.transport.base import rank_name
from ring_attn.transport.ranks.member import Member
from ring_attn.transport.ranks.notes import Notes
from ring_attn.transport.ranks.rendezvous import Meetings

REMEDY = "Use the process groups in the same order on every rank"


def waits_elsewhere(member: Member, store: Store) -> str | None:
    """Return which ranks of a group wait in a call of another group, and what to do.

    Return None if no rank is known to wait.

    Args:
        member: this rank in its group.
        store: that group's store.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone
        for text in _waits_outside(member, store):
            return f"{text}. {REMEDY}"
    return None


def _waits_outside(member: Member, store: Store) -> Iterator[str]:
    """Yield which ranks of a group wait in which call of which other group."""
    rank = member.global_rank
    for other in all_groups():
        other_ranks = dist.get_process_group_ranks(other)
        if group_store(other) is store or rank not in other_ranks:
            continue
        wanted = [one for one in other_ranks if one in member.global_ranks and one != rank]
        yield from _waits_in(other, wanted, rank)


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
