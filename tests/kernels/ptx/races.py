"""Finds unordered accesses to memory by clocks of agents, as in FastTrack (PLDI 2009).

Agents access shared memory, each at its own time:

    strands          two for each warp of the CTA: what several of its lanes do, and what one does
    copies           one agent for the `cp.async` of each warp, counted in groups
    products         one for the part of each warp in its warpgroup's `wgmma`, counted in groups;
                     or one for each warp's `tcgen05.mma`, whose groups end at commits
    tensor moves     two for each warp: its `tcgen05.ld` and its `tcgen05.st`, counted by waits
    bulk copies      one for each mbarrier, counted in phases

Each agent has a clock. `seen[s, a]` is the last clock of agent a that strand s knows: a barrier
shares the knowledge of its warps, a wait adds the awaited clock. `fenced` is the same for accesses
before a proxy fence. Lanes of a warp are ordered by barriers only, of the warp or of the CTA: so
what one lane releases, as an arrival, is what that lane has done, and what the warp had done at its
last barrier. (Several lanes that release or acquire count as all.)

Memory has, for every two bytes, agent, clock and thread of the last write, and clock and thread of
each agent's last read. An access by a strand that does not know these clocks is a fault, in
whatever order this machine has run them, unless the same thread made the other one. A missing proxy
fence is only noted, and the kernel runs on to show other faults: compilers forget such fences.

In global memory, agents are the strands of all CTAs, and accesses of one warp count as ordered. A
strand knows of other CTAs what it has acquired. Of several readers at a time the last counts.
Floats that are added atomically must be added in order, since their sum depends on it; other
atomic accesses are not noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.faults import NotFenced, NotWaited, Race
from tests.kernels.ptx.memory import ALIGNMENT, GlobalMemory, Memory
from tests.kernels.ptx.parse import Instruction

Array = NDArray[Any]

LANES = 32
# The first KiB is reserved for the system.
SHARED_BASE = 1 << 10
GRANULE = 2
MAX_MBARRIERS = 64
# Parts of the note of an access: the thread's number plus 1, or 0 for no single thread; agent; and
# clock. Notes of reads leave the agent out.
TAG_BITS, CLOCK_BIT = 11, 32


class Clocks:
    """For each strand, the clock of each agent that the strand knows.

    Strand w is what several lanes of warp w do; strand num_warps + w is what one lane does, the
    warp's `lead`. Own accesses are made at the clock `now`; `seen` has the clock of the last
    barrier.

    Args:
        num_ctas: CTAs of which strands can know, by acquiring; 0 if nothing is acquired.
        cta: number of this CTA.
    """

    def __init__(self, num_warps: int, num_ctas: int = 0, cta: int = 0) -> None:
        self.num_warps, self.num_strands, self.cta = num_warps, 2 * num_warps, cta
        self.copies, self.products = 2 * num_warps, 3 * num_warps
        self.tensor_reads, self.tensor_writes = 4 * num_warps, 5 * num_warps
        self.mbarriers = 6 * num_warps
        self.elsewhere = self.mbarriers + MAX_MBARRIERS
        self.num_agents = self.elsewhere + num_ctas * self.num_strands
        self.seen = np.zeros((self.num_strands, self.num_agents), np.int32)
        self.fenced = np.zeros_like(self.seen)
        self.now = np.ones(self.num_strands, np.int32)
        # Each warp's last lane that was alone; for each strand, whether it was another lane before,
        # since the last barrier: then accesses since that barrier cannot be told apart.
        self.lead = np.full(num_warps, -1)
        self.changed = np.zeros(self.num_strands, np.bool_)
        # Committed groups of copies, and those waited for; committed groups of products, and those
        # done.
        self.copy_groups = np.zeros(num_warps, np.int32)
        self.copies_done = np.zeros(num_warps, np.int32)
        self.product_groups = np.zeros(num_warps, np.int32)
        self.moves = np.zeros(2 * num_warps, np.int32)
        self.products_done = np.zeros(num_warps, np.int32)

    def strands(self, threads: Array) -> Array:
        """The strand of each thread that executes an instruction."""
        warps = threads // LANES
        alone = np.bincount(warps, minlength=self.num_warps) == 1
        if not alone.any():
            return warps
        for thread in threads[alone[warps]].tolist():
            warp = thread // LANES
            if self.lead[warp] != thread:
                self.changed[self.num_warps + warp] = self.lead[warp] >= 0
                self.lead[warp] = thread
                for clocks in (self.seen, self.fenced):
                    clocks[self.num_warps + warp] = clocks[warp]
        return np.where(alone[warps], warps + self.num_warps, warps)

    def _lanes(self, strands: Array) -> Array:
        """The strands, and for each strand of several lanes the warp's other one."""
        strands = np.unique(strands)
        return np.union1d(strands, strands[strands < self.num_warps] + self.num_warps)

    def barrier(self, warps: Array) -> None:
        """Shares the knowledge of each of the warps with all of them."""
        both = np.r_[warps, warps + self.num_warps]
        known = self.seen[both].max(0)
        known[both] = self.now[both]
        known[self.copies + warps] = self.copies_done[warps]
        self.seen[both] = known
        self.fenced[both] = self.fenced[both].max(0)
        self.now[both] += 1
        self.lead[warps], self.changed[both] = -1, False

    def warp_barrier(self, warps: Array) -> None:
        """Shares the knowledge of the lanes of each warp."""
        for warp in warps[:, None]:
            self.barrier(warp)

    def fence(self, threads: Array) -> None:
        """Puts the accesses that the threads know, but no later access, before a proxy fence."""
        rows = self._lanes(self.strands(threads))
        self.fenced[rows] = self.seen[rows]
        self.fenced[rows, rows] = self.now[rows]
        self.now[rows] += 1

    def release(self, threads: Array) -> Array:
        """The common knowledge of threads, without their later accesses: seen, and fenced."""
        rows = self._lanes(self.strands(threads))
        known = np.stack([clocks[rows].max(0) for clocks in (self.seen, self.fenced)])
        mine = rows[~self.changed[rows]]
        known[0][mine] = self.now[mine]
        self.now[rows] += 1
        return known

    def acquire(self, threads: Array, known: Array) -> None:
        rows = self._lanes(self.strands(threads))
        for clocks, other in zip((self.seen, self.fenced), known, strict=True):
            clocks[rows] = np.maximum(clocks[rows], other)

    def release_to_ctas(self, threads: Array) -> Array:
        """The clocks of all strands of all CTAs that the threads know."""
        [known, _] = self.release(threads)
        everywhere = known[self.elsewhere :].copy()
        mine = slice(self.cta * self.num_strands, (self.cta + 1) * self.num_strands)
        everywhere[mine] = known[: self.num_strands]
        return everywhere

    def acquire_from_ctas(self, threads: Array, everywhere: Array) -> None:
        known = np.zeros((2, self.num_agents), np.int32)
        known[0, self.elsewhere :] = everywhere
        self.acquire(threads, known)

    def wait_copies(self, warps: Array, most: int) -> None:
        """Notes that all but the last `most` groups of copies of each warp are done.

        Each lane waits for its own copies: the warp knows of them after its next barrier.
        """
        self.copies_done[warps] = np.maximum(
            self.copies_done[warps], self.copy_groups[warps] - most
        )

    def wait_products(self, warps: Array, most: int) -> None:
        done = np.maximum(self.products_done[warps], self.product_groups[warps] - most)
        self.products_done[warps] = done
        for rows in (warps, warps + self.num_warps):
            self.seen[rows, self.products + warps] = done

    def group(self, agent: int) -> int:
        """The open group of a warp's products, of its loads or stores of tensor memory."""
        if agent < self.tensor_reads:
            return int(self.product_groups[agent - self.products]) + 1
        return int(self.moves[agent - self.tensor_reads]) + 1

    def wait_moves(self, warp: int, agents: int) -> None:
        """Notes that a warp's loads, or stores, of tensor memory are done."""
        self.moves[agents - self.tensor_reads + warp] += 1
        for row in (warp, warp + self.num_warps):
            self.seen[row, agents + warp] = self.moves[agents - self.tensor_reads + warp]

    def commit_products(self, thread: Array) -> Array:
        """Ends a group of one thread's products; what is known when they are done.

        That is what the thread knows of others, and the products, but not what it has done itself.
        """
        [warp], [strand] = thread // LANES, self.strands(thread)
        self.product_groups[warp] += 1
        known = np.stack((self.seen[strand], self.fenced[strand]))
        known[0, self.products + warp] = self.product_groups[warp]
        return known

    def knows(self, strands: Array, agents: Array) -> Array:
        """The clocks that strands know of strands of all CTAs, which are numbered through."""
        here = agents // self.num_strands == self.cta
        there = self.elsewhere + agents if self.num_agents > self.elsewhere else 0
        known = self.seen[strands, np.where(here, agents % self.num_strands, there)]
        return known if self.num_agents > self.elsewhere else np.where(here, known, 0)


class SharedMemory(Memory):
    """Shared memory of one CTA, which starts as NaN, and notes of its accesses by granules.

    Attributes:
        writes: note of a granule's last write.
        reads: for each strand, and each warp's products, the note of the last read.
        readers: whether each of these has read.
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
        self.writes = np.zeros(granules, np.int64)
        self.reads = np.zeros((clocks.mbarriers, granules), np.int32)
        self.readers = np.zeros(clocks.mbarriers, np.bool_)
        self.noting = True

    def read(
        self,
        ins: Instruction,
        offset: Array,
        size: int,
        threads: Array,
        *,
        proxy: bool = False,
        together: bool = False,
    ) -> None:
        """Notes reads of `size` bytes by threads; `together`, each for all lanes of its warp."""
        strands = self.clocks.strands(threads)
        tags = np.zeros_like(threads) if together else threads + 1
        self._note(
            ins, "read", offset, size, strands, strands, self.clocks.now[strands], tags, proxy
        )

    def written_by(
        self,
        ins: Instruction,
        offset: Array,
        size: int,
        threads: Array,
        *,
        together: bool = False,
        silent: Callable[[], Array] | None = None,
    ) -> None:
        """Notes writes of `size` bytes by threads.

        `silent` says which threads write the values that are there, as compilers let all warps do.
        """
        strands = self.clocks.strands(threads)
        tags = np.zeros_like(threads) if together else threads + 1
        clock = self.clocks.now[strands]
        self._note(ins, "written", offset, size, strands, strands, clock, tags, silent=silent)

    def copied(self, ins: Instruction, offset: Array, size: int, threads: Array) -> None:
        """Notes writes by `cp.async`, in the open group of the warp."""
        warps = threads // LANES
        clock = self.clocks.copy_groups[warps] + 1
        strands, agents = self.clocks.strands(threads), self.clocks.copies + warps
        self._note(ins, "written", offset, size, strands, agents, clock, np.zeros_like(threads))

    def multiplied(self, ins: Instruction, offset: Array, group: int) -> None:
        """Notes reads of 16 bytes by `wgmma`; all four warps must know the last writes."""
        warps = np.arange(4 * group, 4 * group + 4)[:, None]
        agents, clock = self.clocks.products + warps, self.clocks.product_groups[warps] + 1
        self._note(ins, "read", offset, 16, warps, agents, clock, np.zeros_like(warps), True)

    def multiplied_by(self, ins: Instruction, offset: Array, thread: Array) -> None:
        """Notes reads of 16 bytes by products that one thread issues."""
        warp, strands = thread // LANES, self.clocks.strands(thread)
        agents, clock = self.clocks.products + warp, self.clocks.product_groups[warp] + 1
        by = (x[:, None] for x in (strands, agents, clock, np.zeros_like(thread)))
        self._note(ins, "read", offset, 16, *by, True)

    def landed(
        self, ins: Instruction, offset: Array, thread: Array, mbarrier: int, phase: int
    ) -> None:
        """Notes writes of 16 bytes by a bulk copy that a thread has started."""
        strand, agent = self.clocks.strands(thread), self.clocks.mbarriers + mbarrier
        by, agents, phases, tag = np.array([[strand[0]], [agent], [phase], [0]])
        self._note(ins, "written", offset, 16, by, agents, phases, tag, True)

    def _note(
        self,
        ins: Instruction,
        done: str,
        offset: Array,
        size: int,
        strands: Array,
        agents: Array,
        clocks: Array,
        tags: Array,
        proxy: bool = False,
        silent: Callable[[], Array] | None = None,
    ) -> None:
        """Notes that at each offset an agent reads or writes, started by a strand, at a clock.

        `strands`, `agents`, `clocks` and `tags` have an element for each offset, or rows of one for
        all.
        """
        if not self.noting:
            return
        steps = np.arange(-(-size // GRANULE))
        at = (offset[:, None] // GRANULE + steps).ravel()
        read = clocks << TAG_BITS | tags
        if strands.shape == offset.shape:
            strands, agents, clocks, tags, read = (
                np.repeat(x, steps.size) for x in (strands, agents, clocks, tags, read)
            )
        last = self.writes[at][None]
        by = last >> TAG_BITS & (1 << CLOCK_BIT - TAG_BITS) - 1
        clock = last >> CLOCK_BIT
        if silent is not None and (clock > self.clocks.seen[strands, by]).any():
            clock = clock * ~np.repeat(silent(), steps.size)
        self._check(ins, done, "written", at, strands, by, clock, last, tags, proxy)
        if done == "read":
            self.reads[agents, at] = read
            # Where several threads have read, none of them may write without a barrier.
            several = self.reads[agents, at] != read
            if several.any():
                rows, cols = (np.broadcast_to(x, several.shape)[several] for x in (agents, at))
                self.reads[rows, cols] &= -1 << TAG_BITS
            self.readers[agents] = True
        else:
            readers = np.flatnonzero(self.readers)[:, None]
            last = self.reads[readers, at]
            self._check(
                ins, done, "read", at, strands, readers, last >> TAG_BITS, last, tags, proxy
            )
            self.writes[at] = clocks.astype(np.int64) << CLOCK_BIT | agents << TAG_BITS | tags

    def _check(
        self,
        ins: Instruction,
        done: str,
        before: str,
        at: Array,
        strands: Array,
        agents: Array,
        clocks: Array,
        notes: Array,
        tags: Array,
        proxy: bool,
    ) -> None:
        """Raises unless each strand knows the clocks at which agents read or wrote its granule.

        Args:
            done, before: "read" or "written": by the instruction, and by the agents.
            at, strands: granules, and the strands that access each, or rows of one for all.
            agents, clocks, notes: rows of agents, of their clocks at the granules, and notes.
            tags: of the threads that access.
            proxy: the asynchronous proxy accesses the granules.
        """

        def first(wrong: Array) -> tuple[str, str, int]:
            row, i = np.argwhere(wrong)[0]
            agent, strand = (
                int(np.broadcast_to(x, wrong.shape)[row, i]) for x in (agents, strands)
            )
            by = f"{done} by {self._name(strand)}"
            where = f"byte {int(at[i]) * GRANULE} of shared memory is {by}"
            return where, self._name(agent), agent

        unknown = clocks > self.clocks.seen[strands, agents]
        if unknown.any():
            unknown &= (notes & (1 << TAG_BITS) - 1 != tags) | (tags == 0)
        if unknown.any():
            where, other, agent = first(unknown)
            reason = f"{where}, and {before} by {other}"
            if agent < self.clocks.num_strands:
                raise Race(ins, f"{reason} with no barrier between")
            raise NotWaited(ins, f"{reason} which has not been waited for")
        if not proxy:
            return
        generic = agents < self.clocks.products
        unfenced = generic & (clocks > self.clocks.fenced[strands, agents])
        if unfenced.any():
            where, other, _ = first(unfenced)
            reason = f"{where} without fence.proxy.async since it was {before} by {other}"
            self.missing_fences.setdefault(ins, NotFenced(ins, reason))

    def _name(self, agent: int) -> str:
        clocks = self.clocks
        if agent >= clocks.mbarriers:
            return f"a bulk copy of mbarrier {agent - clocks.mbarriers}"
        kind, warp = divmod(agent, clocks.num_warps)
        return f"{('', 'a lane of ', 'a cp.async of ', 'a product of ')[kind]}warp {warp}"


class GlobalRaces:
    """Notes of accesses to global memory by granules; tensors that are only read need none.

    Attributes:
        released: for each address that CTAs pass knowledge by, the clocks of all strands.
    """

    def __init__(self, memory: GlobalMemory, noting: bool) -> None:
        self.noting = noting
        granules = -(-memory.bytes.size // GRANULE)
        self.writes, self.reads = np.zeros((2, granules), np.int64)
        self.tensor_at = memory.tensor_at
        self.released: dict[int, Array] = {}
        # For each tensor that nothing has written so far, its reads.
        self._unwritten: dict[int, list[tuple[Array, Array]]] = {
            x: [] for x in range(int(memory.tensor_at.max()) + 1)
        }

    def read(
        self, ins: Instruction, clocks: Clocks, offset: Array, size: int, threads: Array
    ) -> None:
        if not offset.size or not self.noting:
            return
        at, strands, notes = self._noted(clocks, offset, size, threads)
        first, last = self._tensors(offset)
        if first == last and first in self._unwritten:
            self._unwritten[first].append((at, notes))
            return
        self._check(ins, "read", "written", clocks, at, strands, self.writes)
        self.reads[at] = notes

    def written_by(
        self, ins: Instruction, clocks: Clocks, offset: Array, size: int, threads: Array
    ) -> None:
        if not offset.size or not self.noting:
            return
        at, strands, notes = self._noted(clocks, offset, size, threads)
        first, last = self._tensors(offset)
        for tensor in range(first, last + 1):
            for before, by in self._unwritten.pop(tensor, ()):
                self.reads[before] = by
        self._check(ins, "written", "written", clocks, at, strands, self.writes)
        self._check(ins, "written", "read", clocks, at, strands, self.reads)
        self.writes[at] = notes

    def _tensors(self, offset: Array) -> tuple[int, int]:
        return tuple(int(self.tensor_at[int(x) // ALIGNMENT]) for x in (offset.min(), offset.max()))

    def _noted(
        self, clocks: Clocks, offset: Array, size: int, threads: Array
    ) -> tuple[Array, Array, Array]:
        """Granules, strands, and the notes of accesses."""
        steps = np.arange(-(-size // GRANULE))
        strands = clocks.strands(threads)
        agents = clocks.cta * clocks.num_strands + strands
        notes = clocks.now[strands].astype(np.int64) << CLOCK_BIT | agents
        at = (offset[:, None] // GRANULE + steps).ravel()
        return at, np.repeat(strands, steps.size), np.repeat(notes, steps.size)

    def _check(
        self,
        ins: Instruction,
        done: str,
        before: str,
        clocks: Clocks,
        at: Array,
        strands: Array,
        notes: Array,
    ) -> None:
        found = notes[at]
        agents, when = found & (1 << CLOCK_BIT) - 1, found >> CLOCK_BIT
        own = clocks.cta * clocks.num_strands + strands % clocks.num_warps
        same_warp = (agents == own) | (agents == own + clocks.num_warps)
        unknown = (when > clocks.knows(strands, agents)) & ~same_warp
        if unknown.any():
            i = int(np.argmax(unknown))
            cta, strand = divmod(int(agents[i]), clocks.num_strands)
            other = f"warp {strand % clocks.num_warps} of CTA {cta}"
            by = f"warp {int(strands[i]) % clocks.num_warps} of CTA {clocks.cta}"
            where = f"byte {int(at[i]) * GRANULE:#x} of global memory is {done} by {by}"
            raise Race(ins, f"{where}, and {before} by {other}, in no order")
