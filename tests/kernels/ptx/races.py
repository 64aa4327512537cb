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
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.parse import Instruction

Array = NDArray[Any]

# The first KiB is reserved for the system.
SHARED_BASE = 1 << 10
GRANULE = 2
MOST_MBARRIERS = 64


class Clocks:
    """For each warp, the clock of each agent that the warp knows."""

    def __init__(self, num_warps: int) -> None:
        self.num_warps = num_warps
        self.copies, self.products = num_warps, 2 * num_warps
        self.mbarriers = 3 * num_warps
        num_agents = self.mbarriers + MOST_MBARRIERS
        self.seen = np.zeros((num_warps, num_agents), np.int32)
        self.warps = np.arange(num_warps)
        self.seen[self.warps, self.warps] = 1
        self.fenced = np.zeros_like(self.seen)
        # Committed groups of copies, committed groups of products, and groups of products done.
        self.copy_groups = np.zeros(num_warps, np.int32)
        self.product_groups = np.zeros(num_warps, np.int32)
        self.products_done = np.zeros(num_warps, np.int32)

    def barrier(self, warps: Array) -> None:
        """Shares the knowledge of each of the warps with all of them."""
        for clocks in (self.seen, self.fenced):
            clocks[warps] = clocks[warps].max(0)
        self.seen[warps, warps] += 1

    def fence(self, warps: Array) -> None:
        """Puts the accesses that the warps know, but no later access, before a proxy fence."""
        self.fenced[warps] = self.seen[warps]
        self.seen[warps, warps] += 1

    def release(self, warps: Array) -> Array:
        """The common knowledge of the warps, without their later accesses: seen, and fenced."""
        known = np.stack([clocks[warps].max(0) for clocks in (self.seen, self.fenced)])
        self.seen[warps, warps] += 1
        return known

    def acquire(self, warps: Array, known: Array) -> None:
        for clocks, other in zip((self.seen, self.fenced), known, strict=True):
            clocks[warps] = np.maximum(clocks[warps], other)

    def wait_copies(self, warps: Array, most: int) -> None:
        """Notes that all but the last `most` groups of copies of each warp are done."""
        agents, done = self.copies + warps, self.copy_groups[warps] - most
        self.seen[warps, agents] = np.maximum(self.seen[warps, agents], done)

    def wait_products(self, warps: Array, most: int) -> None:
        done = np.maximum(self.products_done[warps], self.product_groups[warps] - most)
        self.products_done[warps] = done
        self.seen[warps, self.products + warps] = done


class SharedMemory(Memory):
    """Shared memory of one CTA, which starts as NaN, and notes of its accesses by granules.

    Attributes:
        writer: agent of a granule's last write.
        written: clock of this write.
        reads: for each agent, the clock of its last read.
    """

    def __init__(
        self, num_bytes: int, clocks: Clocks, missing_fences: dict[Instruction, NotFenced]
    ) -> None:
        super().__init__("shared", SHARED_BASE, num_bytes)
        self.bytes[:] = 0xFF
        self.stop[:num_bytes] = num_bytes
        self.clocks = clocks
        self.missing_fences = missing_fences
        granules = -(-self.bytes.size // GRANULE)
        self.writer, self.written = np.zeros((2, granules), np.int32)
        self.reads = np.zeros((clocks.mbarriers, granules), np.int32)
        self.readers = np.r_[: clocks.num_warps, clocks.products : clocks.mbarriers][:, None]

    def read(
        self, ins: Instruction, offset: Array, size: int, warps: Array, *, proxy: bool = False
    ) -> None:
        """Notes reads of `size` bytes by lanes of the warps."""
        clock = self.clocks.seen[warps, warps]
        self._note(ins, "read", offset, size, warps, warps, clock, proxy=proxy)

    def written_by(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        """Notes writes of `size` bytes by lanes of the warps."""
        self._note(ins, "written", offset, size, warps, warps, self.clocks.seen[warps, warps])

    def copied(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        """Notes writes by `cp.async`, in the open group of the warp."""
        agents, clock = self.clocks.copies + warps, self.clocks.copy_groups[warps] + 1
        self._note(ins, "written", offset, size, warps, agents, clock)

    def multiplied(self, ins: Instruction, offset: Array, group: int) -> None:
        """Notes reads of 16 bytes by `wgmma`; all four warps must know the last writes."""
        warps = np.arange(4 * group, 4 * group + 4)[:, None]
        agents, clocks = self.clocks.products + warps, self.clocks.product_groups[warps] + 1
        self._note(ins, "read", offset, 16, warps, agents, clocks, proxy=True)

    def landed(self, ins: Instruction, offset: Array, warp: int, mbarrier: int, phase: int) -> None:
        """Notes writes of 16 bytes by a bulk copy that `warp` has started."""
        agent = self.clocks.mbarriers + mbarrier
        by, agents, phases = np.array([[warp], [agent], [phase]])
        self._note(ins, "written", offset, 16, by, agents, phases, proxy=True)

    def _note(
        self,
        ins: Instruction,
        done: str,
        offset: Array,
        size: int,
        warps: Array,
        agents: Array,
        clocks: Array,
        *,
        proxy: bool = False,
    ) -> None:
        """Notes that at each offset an agent reads or writes, started by a warp, at a clock.

        `warps`, `agents` and `clocks` have an element for each offset, or rows of one for all.
        """
        steps = np.arange(-(-size // GRANULE))
        at = (offset[:, None] // GRANULE + steps).ravel()
        if warps.shape == offset.shape:
            warps, agents, clocks = (np.repeat(x, steps.size) for x in (warps, agents, clocks))
        by, when = self.writer[at][None], self.written[at][None]
        self._check(ins, done, "written", at, warps, by, when, proxy)
        if done == "read":
            self.reads[agents, at] = clocks
        else:
            when = self.reads[self.readers, at]
            self._check(ins, done, "read", at, warps, self.readers, when, proxy)
            self.writer[at] = agents
            self.written[at] = clocks

    def _check(
        self,
        ins: Instruction,
        done: str,
        before: str,
        at: Array,
        warps: Array,
        agents: Array,
        clocks: Array,
        proxy: bool,
    ) -> None:
        """Raises unless each warp knows the clocks at which agents read or wrote its granule.

        Args:
            done, before: "read" or "written": by the instruction, and by the agents.
            at, warps: granules, and the warps that access each, or rows of one warp for all.
            agents, clocks: rows of agents, and of their clocks at the granules.
            proxy: the asynchronous proxy accesses the granules.
        """

        def first(wrong: Array) -> tuple[str, str, int]:
            row, i = np.argwhere(wrong)[0]
            agent, warp = (int(np.broadcast_to(x, wrong.shape)[row, i]) for x in (agents, warps))
            by = f"{done} by warp {warp}"
            where = f"byte {int(at[i]) * GRANULE} of shared memory is {by}"
            return where, self._name(agent), agent

        unknown = clocks > self.clocks.seen[warps, agents]
        if unknown.any():
            where, other, agent = first(unknown)
            reason = f"{where}, and {before} by {other}"
            if agent < self.clocks.num_warps:
                raise Race(ins, f"{reason} with no barrier between")
            raise NotWaited(ins, f"{reason} which has not been waited for")
        if not proxy:
            return
        generic = agents < self.clocks.products
        unfenced = generic & (clocks > self.clocks.fenced[warps, agents])
        if unfenced.any():
            where, other, _ = first(unfenced)
            reason = f"{where} without fence.proxy.async since it was {before} by {other}"
            self.missing_fences.setdefault(ins, NotFenced(ins, reason))

    def _name(self, agent: int) -> str:
        clocks = self.clocks
        if agent >= clocks.mbarriers:
            return f"a bulk copy of mbarrier {agent - clocks.mbarriers}"
        kind, warp = divmod(agent, clocks.num_warps)
        return f"{('', 'a cp.async of ', 'a wgmma of ')[kind]}warp {warp}"
