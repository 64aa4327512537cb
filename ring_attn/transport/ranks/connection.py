"""The connections of one rank to the other ranks of its group, and its pools of buffers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ring_attn.torch_private import Untyped, nccl_class
from ring_attn.transport import capture, streams
from ring_attn.transport.base import as_facts
from ring_attn.transport.buffers import HEADER_BYTES, Pool
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE, hash_of_configs
from ring_attn.transport.ranks.links import GlooLink, Link, NcclLink
from ring_attn.transport.ranks.member import Member
from ring_attn.transport.ranks.notes import Notes
from ring_attn.transport.ranks.rendezvous import CannotSucceed, Meetings, Rendezvous, answered
from ring_attn.transport.ranks.store import LimitedStore
from ring_attn.transport.streams import Stream


class Connection:
    """The connections of one rank to the other ranks of its group.

    The ranks meet once, in the group's store. Then they connect a link for each type of device, at
    their first call with tensors of that type.

    Attributes:
        links: the open links, by type of device.
        notes: the notes of the meeting that this rank attends; None before its first call.
        has_met: whether all ranks have arrived at one meeting.
        devices: the device of all this rank's calls, by type, to which its communicators belong.
        elsewhere: ranks that were found waiting in a call of another group, while this rank waited
            for the meeting; None if not searched.
    """

    def __init__(
        self,
        member: Member,
        store: LimitedStore,
        group: dist.ProcessGroup,
        search_elsewhere: Callable[[], str | None],
    ) -> None:
        self.elsewhere: str | None = None
        self._search_elsewhere = search_elsewhere
        self.links: dict[str, Link] = {}
        self.notes: Notes | None = None
        self.has_met = False
        self.devices: dict[str, torch.device] = {}
        self._member, self._store = member, store
        self._group = weakref.ref(group)
        self._nccl: Untyped = None
        self._lock = threading.Lock()
        self._meetings = Meetings(store.store, member.global_rank, member.global_ranks)
        self._meeting = ""
        self._num_rendezvous = 0
        # One pool for each compute stream, whose operators run in order.
        self._pools: dict[Stream, Pool] = {}
        self._side: Stream | None = None

    def check_nccl(self, device: torch.device) -> None:
        """Find torch's class of NCCL's communicators; refuse one that is not supported."""
        group = self._group()
        if group is not None and streams.are_used(device):
            self._nccl = nccl_class(group)

    def check_device(self, device: torch.device) -> None:
        """Refuse tensors on another device than the rank's first call had."""
        known = self.devices.setdefault(device.type, device)
        if device != known:
            raise ValueError(
                f"{self._member.name} has tensors on {device}, got {known} in the "
                "group's first call, to which its connections belong: pass tensors on "
                f"{known}, or another process group"
            )

    def connect(
        self,
        device: torch.device,
        seconds: float,
        on_arrival: Callable[[Notes], CannotSucceed],
    ) -> None:
        """Connect the link for tensors of a device, together with all other ranks.

        Calls `on_arrival` when this rank arrives at a meeting, with the meeting's notes; its result
        is asked during the wait for the other ranks.

        Raises:
            MissingRanksError: some rank did not arrive within `seconds`.
            DifferentError: the ranks have different files of configs.
        """
        self._store.seconds = seconds
        if not self.has_met:
            self._meet(seconds, on_arrival)
        assert self.notes is not None, "the ranks have met"
        member, store = self._member, self._store.store
        link: Link
        if streams.are_used(device):
            nccl, meeting = self._nccl, self._meeting
            link = NcclLink(nccl, store, meeting, member.rank, member.global_ranks)
        else:
            link = GlooLink(
                store,
                self._meeting,
                member.rank,
                member.global_ranks,
                seconds,
                cannot_succeed=self.notes.failure,
            )
        self.links[device.type] = link

    def _meet(self, seconds: float, on_arrival: Callable[[Notes], CannotSucceed]) -> None:
        half = time.monotonic() + seconds / 2

        def search_after_half() -> None:
            """Look once for ranks in other groups: after the timeout they may have left."""
            if self.elsewhere is None and time.monotonic() > half:
                self.elsewhere = self._search_elsewhere() or ""

        def arrive(meeting: str) -> CannotSucceed:
            self._meeting = meeting
            self.notes = Notes(self._store.store, meeting, self._member.global_rank)
            cannot_succeed = on_arrival(self.notes)

            def search_and_ask() -> str | None:
                search_after_half()
                return cannot_succeed()

            return search_and_ask

        configs = as_facts({CONFIGS_VARIABLE: hash_of_configs()})
        attend = partial(self._meetings.attend, seconds, configs, arrive, search_after_half)
        answered(attend, seconds)
        self.has_met = True

    def open_notes(self) -> Notes | None:
        """Return the notes at the place where the ranks meet by now; None if no meeting is open."""
        meeting = self._meeting if self.has_met else self._meetings.find()
        if meeting is None:
            return None
        return Notes(self._store.store, meeting, self._member.global_rank)

    def notes_of_last_meeting(self) -> Notes | None:
        """Return the notes of the last meeting at which some rank was missing; None if none was.

        This rank did not attend it, if the others had left by then.
        """
        meeting = self._meetings.last_incomplete()
        if meeting is None:
            return None
        return Notes(self._store.store, meeting, self._member.global_rank)

    def next_rendezvous(self) -> Rendezvous:
        """Return the next rendezvous of all ranks, which are connected already."""
        self._num_rendezvous += 1
        return Rendezvous(
            self._store.store,
            f"{self._meeting}/rendezvous/{self._num_rendezvous}",
            self._member.global_rank,
            self._member.global_ranks,
        )

    def pool(self, device: torch.device) -> Pool:
        if capture.is_on():
            return Pool(device, HEADER_BYTES)  # of the graph's own memory
        stream = streams.current(device)
        if stream not in self._pools:
            self._pools[stream] = Pool(device, HEADER_BYTES)
        return self._pools[stream]

    def side(self, device: torch.device) -> Stream | None:
        """Return the group's one stream for work next to the current stream's, if there is one."""
        if self._side is None and streams.are_used(device):
            self._side = streams.new(device)
        return self._side

    def close(self) -> None:
        """Close all links at once; pending waits raise."""
        for link in self._take_links():
            link.close()
        self._pools.clear()

    def finish(self) -> None:
        """Close all links after their last exchange."""
        for link in self._take_links():
            link.finish(self._store.seconds)

    def abort_nccl(self) -> None:
        """Abort NCCL's communicators, and leave gloo's connections to the end of the process."""
        for link in self._take_links():
            if isinstance(link, NcclLink):
                link.close()

    def _take_links(self) -> list[Link]:
        """Return all links, to the first caller only."""
        with self._lock:
            links, self.links = list(self.links.values()), {}
        return links
