"""Finds unordered accesses to shared memory by clocks of agents, as in FastTrack (PLDI 2009).

Agents access shared memory, each at its own time:

    warps            of the CTA; lanes of a warp are taken as ordered among themselves
    copies           one agent for the `cp.async` of each warp, counted in groups
    products         one for the part of each warp in its warpgroup's `wgmma`, counted in groups
    bulk copies      one for each mbarrier, counted in phases

Each agent has a clock. `seen[w, a]` is the last clock of agent a that warp w knows: a barrier
shares the knowledge of its warps, a wait adds the awaited clock. `fenced` is the same for accesses
before a proxy fence. Shared memory has, for every two bytes, the agent and clock of the last write,
and the clock of each agent's last read. An access by a warp that does not know these clocks is a
fault, in whatever order this machine has run them. A missing proxy fence is only noted, and the
kernel runs on to show other faults: compilers forget such fences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.faults import NotFenced, NotWaited, Race
from tests.kernels.ptx.parse import Instruction

Array = NDArray[Any]

GRANULE = 2
MOST_MBARRIERS = 64


class Clocks:
    """For each warp, the clock of each agent that the warp knows."""

    def __init__(self, num_warps: int) -> None:
        self.num_warps = num_warps
        self.products = 2 * num_warps
        self.mbarriers = 3 * num_warps
        num_agents = self.mbarriers + MOST_MBARRIERS
        self.seen = np.zeros((num_warps, num_agents), np.int32)
        self.warps = np.arange(num_warps)
        self.seen[self.warps, self.warps] = 1
        self.fenced = self.seen.copy()
        self.fenced[:] = 0
        # Committed groups of copies, committed groups of products, and groups of products done.
        self.copy_groups = np.zeros(num_warps, np.int32)
        self.product_groups = np.zeros(num_warps, np.int32)
        self.products_done = np.zeros(num_warps, np.int32)

    def copies_of(self, warps: Array) -> Array:
        return self.num_warps + warps

    def barrier(self, warps: Array) -> None:
        """Shares the knowledge of each of the warps with all of them."""
        for clocks in (self.seen, self.fenced):
            clocks[warps] = clocks[warps].max(0)
        self.seen[warps, warps] += 1

    def fence(self, warps: Array) -> None:
        """Puts the accesses that the warps know, but no later access, before a proxy fence."""
        self.fenced[warps] = self.seen[warps]
        self.seen[warps, warps] += 1

    def release(self, warps: Array) -> tuple[Array, Array]:
        """The common knowledge of the warps, without their later accesses."""
        known = self.seen[warps].max(0), self.fenced[warps].max(0)
        self.seen[warps, warps] += 1
        return known

    def acquire(self, warps: Array, known: tuple[Array, Array]) -> None:
        for clocks, other in zip((self.seen, self.fenced), known, strict=True):
            clocks[warps] = np.maximum(clocks[warps], other)

    def wait_copies(self, warps: Array, most: int) -> None:
        """Notes that all but the last `most` groups of copies of each warp are done."""
        agents = self.copies_of(warps)
        done = self.copy_groups[warps] - most
        self.seen[warps, agents] = np.maximum(self.seen[warps, agents], done)

    def wait_products(self, warps: Array, most: int) -> None:
        done = np.maximum(self.products_done[warps], self.product_groups[warps] - most)
        self.products_done[warps] = done
        self.seen[warps, self.products + warps] = done


class Shadow:
    """Agents and clocks of the last reads and the last write of each granule."""

    def __init__(
        self, num_bytes: int, clocks: Clocks, missing_fences: dict[Instruction, NotFenced]
    ) -> None:
        self.clocks = clocks
        self.missing_fences = missing_fences
        granules = -(-num_bytes // GRANULE)
        self.writer = np.zeros(granules, np.int32)
        self.written = np.zeros(granules, np.int32)
        # Agents that read: warps, and their products.
        self.read = np.zeros((2 * clocks.num_warps, granules), np.int32)
        self.readers = np.r_[: clocks.num_warps, clocks.products : clocks.mbarriers]

    def on_read(
        self, ins: Instruction, at: Array, warps: Array, *, reader: Array, clock: Array, proxy: bool
    ) -> None:
        """Notes reads of granules; raises if a warp does not know the last write.

        Args:
            ins: instruction that reads.
            at: granules.
            warps: for each granule, the warp that must know its last write.
            reader: row of `read`.
            clock: clock of the reader.
            proxy: the asynchronous proxy reads.
        """
        self._know_writer(ins, at, warps, "read", proxy)
        self.read[reader, at] = clock

    def on_write(
        self, ins: Instruction, at: Array, warps: Array, *, writer: Array, clock: Array, proxy: bool
    ) -> None:
        """Notes writes of granules; arguments as for `on_read`."""
        self._know_writer(ins, at, warps, "written", proxy)
        readers = np.repeat(self.readers, at.size)
        at_of, warps_of = (np.tile(x, len(self.readers)) for x in (at, warps))
        self._know(
            ins, at_of, warps_of, readers, self.read[:, at].ravel(), "written", "read", proxy
        )
        self.writer[at] = writer
        self.written[at] = clock

    def _know_writer(
        self, ins: Instruction, at: Array, warps: Array, done: str, proxy: bool
    ) -> None:
        self._know(ins, at, warps, self.writer[at], self.written[at], done, "written", proxy)

    def _know(
        self,
        ins: Instruction,
        at: Array,
        warps: Array,
        agents: Array,
        clock: Array,
        done: str,
        before: str,
        proxy: bool,
    ) -> None:
        """Raises if a warp does not know the clock of its agent, which `before` read or wrote."""
        unknown = clock > self.clocks.seen[warps, agents]
        if unknown.any():
            i = int(np.argmax(unknown))
            self._report(ins, at, warps, i, int(agents[i]), done, before)
        if proxy:
            generic = agents < self.clocks.products
            unknown = generic & (clock > self.clocks.fenced[warps, agents])
            if unknown.any():
                i = int(np.argmax(unknown))
                where = f"byte {int(at[i]) * GRANULE} of shared memory is {done}"
                other = f"{self._name(int(agents[i]))}, by which it is {before}"
                fault = NotFenced(ins, f"{where} without fence.proxy.async since {other}")
                self.missing_fences.setdefault(ins, fault)

    def _report(
        self, ins: Instruction, at: Array, warps: Array, i: int, agent: int, done: str, before: str
    ) -> None:
        where = f"byte {int(at[i]) * GRANULE} of shared memory is {done} by warp {int(warps[i])}"
        reason = f"{where}, and {before} by {self._name(agent)}"
        if agent < self.clocks.num_warps:
            raise Race(ins, f"{reason} with no barrier between")
        raise NotWaited(ins, f"{reason} which has not been waited for")

    def _name(self, agent: int) -> str:
        clocks = self.clocks
        if agent < clocks.num_warps:
            return f"warp {agent}"
        if agent < clocks.products:
            return f"a cp.async of warp {agent - clocks.num_warps}"
        if agent < clocks.mbarriers:
            return f"a wgmma of warp {agent - clocks.products}"
        return f"a bulk copy of mbarrier {agent - clocks.mbarriers}"
