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
        self.products = 2 * num_warps
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


class SharedMemory(Memory):
    """Shared memory of one CTA, which starts as NaN, and notes of its accesses by granules.

    Attributes:
        writer: agent of a granule's last write.
        written: clock of this write.
        reads: for each reading agent, warps and their products, the clock of its last read.
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
        self.reads = np.zeros((2 * clocks.num_warps, granules), np.int32)
        self.readers = np.r_[: clocks.num_warps, clocks.products : clocks.mbarriers]

    def read(
        self, ins: Instruction, offset: Array, size: int, warps: Array, *, proxy: bool = False
    ) -> None:
        """Notes reads of `size` bytes by lanes of the warps."""
        at, of = _granules(offset, size, warps)
        self._on_read(ins, at, of, self.clocks.seen[of, of], reader=of, proxy=proxy)

    def written_by(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        """Notes writes of `size` bytes by lanes of the warps."""
        at, of = _granules(offset, size, warps)
        self._on_write(ins, at, of, self.clocks.seen[of, of], writer=of)

    def copied(self, ins: Instruction, offset: Array, size: int, warps: Array) -> None:
        """Notes writes by `cp.async`, in the open group of the warp."""
        at, of = _granules(offset, size, warps)
        clock = self.clocks.copy_groups[of] + 1
        self._on_write(ins, at, of, clock, writer=self.clocks.copies_of(of))

    def multiplied(self, ins: Instruction, offset: Array, group: int) -> None:
        """Notes reads of 16 bytes by `wgmma`; all four warps must know the last writes."""
        at, _ = _granules(offset, 16, offset)
        for warp in range(4 * group, 4 * group + 4):
            warps = np.full(at.shape, warp)
            clock = self.clocks.product_groups[warps] + 1
            self._on_read(ins, at, warps, clock, reader=self.clocks.num_warps + warps, proxy=True)

    def landed(self, ins: Instruction, offset: Array, warp: int, mbarrier: int, phase: int) -> None:
        """Notes writes of 16 bytes by a bulk copy that `warp` has started."""
        at, _ = _granules(offset, 16, offset)
        warps, clock = np.full(at.shape, warp), np.full(at.shape, phase)
        writer = np.full(at.shape, self.clocks.mbarriers + mbarrier)
        self._on_write(ins, at, warps, clock, writer=writer, proxy=True)

    def _on_read(
        self, ins: Instruction, at: Array, warps: Array, clock: Array, *, reader: Array, proxy: bool
    ) -> None:
        self._know(ins, at, warps, self.writer[at], self.written[at], "read", "written", proxy)
        self.reads[reader, at] = clock

    def _on_write(
        self,
        ins: Instruction,
        at: Array,
        warps: Array,
        clock: Array,
        *,
        writer: Array,
        proxy: bool = False,
    ) -> None:
        self._know(ins, at, warps, self.writer[at], self.written[at], "written", "written", proxy)
        readers = np.repeat(self.readers, at.size)
        at_of, warps_of = (np.tile(x, len(self.readers)) for x in (at, warps))
        clocks = self.reads[:, at].ravel()
        self._know(ins, at_of, warps_of, readers, clocks, "written", "read", proxy)
        self.writer[at] = writer
        self.written[at] = clock

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
        """Raises unless each warp knows that its agent has done what it did before to a granule.

        Args:
            ins: instruction that accesses the granules.
            at: granules.
            warps: for each granule, the warp that accesses it.
            agents: for each granule, the agent that accessed it before.
            clock: the clocks of these agents then.
            done: "read" or "written" by the instruction.
            before: "read" or "written" by the agents.
            proxy: the asynchronous proxy accesses the granules.
        """
        unknown = clock > self.clocks.seen[warps, agents]
        if unknown.any():
            i = int(np.argmax(unknown))
            where = f"byte {int(at[i]) * GRANULE} of shared memory is {done} by warp {warps[i]}"
            reason = f"{where}, and {before} by {self._name(int(agents[i]))}"
            if agents[i] < self.clocks.num_warps:
                raise Race(ins, f"{reason} with no barrier between")
            raise NotWaited(ins, f"{reason} which has not been waited for")
        generic = agents < self.clocks.products
        unknown = generic & (clock > self.clocks.fenced[warps, agents])
        if proxy and unknown.any():
            i = int(np.argmax(unknown))
            where = f"byte {int(at[i]) * GRANULE} of shared memory is {done}"
            other = f"{self._name(int(agents[i]))}, by which it is {before}"
            fault = NotFenced(ins, f"{where} without fence.proxy.async since {other}")
            self.missing_fences.setdefault(ins, fault)

    def _name(self, agent: int) -> str:
        clocks = self.clocks
        if agent < clocks.num_warps:
            return f"warp {agent}"
        if agent < clocks.products:
            return f"a cp.async of warp {agent - clocks.num_warps}"
        if agent < clocks.mbarriers:
            return f"a wgmma of warp {agent - clocks.products}"
        return f"a bulk copy of mbarrier {agent - clocks.mbarriers}"


def _granules(offset: Array, size: int, owners: Array) -> tuple[Array, Array]:
    """The granules of `size` bytes at each offset, and the owner of each."""
    first = offset // GRANULE
    if size <= GRANULE:
        return first, owners
    steps = np.arange(size // GRANULE)
    return (first[:, None] + steps).ravel(), np.repeat(owners, size // GRANULE)
