"""tcgen05: products of one thread in tensor memory, and moves between it and a warp's registers.

See the ISA, "Tensor Memory", "Instruction descriptor" and "tcgen05 memory consistency model".
Tensor memory has 128 lanes of 512 columns of 32 bits. Warp w of a warpgroup reaches lanes 32 w to
32 w + 31; a product of 128 rows has a row in each lane.

Everything is computed at once, but a move or a product counts as done only when its wait says so: a
`wait::ld` delivers loaded registers, which are NaN until then; a `wait::st` tells the warp of its
stores; a `commit` arrives at an mbarrier with the products before it. Products of one thread are
executed in order, so they need not wait for each other. Not modelled: `tcgen05.fence`, which triton
does not emit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ring_attn.kernels.interpreter import matmul
from tests.kernels.ptx.access import located, vector
from tests.kernels.ptx.copies import CHUNK, find
from tests.kernels.ptx.faults import Fault, NotWaited, OutOfBounds, Unsupported
from tests.kernels.ptx.machine import LANES, Array, ByLanes, Machine, handles
from tests.kernels.ptx.matrix import DEPTH, halves_to_f32, operand_addresses
from tests.kernels.ptx.parse import Address, Instruction
from tests.kernels.ptx.races import Clocks

ROWS, COLUMNS = 128, 512
PARTS = ROWS // LANES
SOME = slice(None)


@dataclass
class TensorMemory:
    """Tensor memory of a CTA, and notes by part of 32 lanes and column.

    Attributes:
        allocated: number of columns, from 0 on.
        closed: no more may be allocated.
        writer, written: agent and clock of the last write.
        reads: for each agent, the clock of its last read.
        loaded: registers, and the values that the next `wait::ld` of a warp delivers.
    """

    clocks: Clocks
    allocated: int = 0
    closed: bool = False
    words: Array = field(default_factory=lambda: np.full((ROWS, COLUMNS), 0xFFFFFFFF, np.uint32))
    writer: Array = field(default_factory=lambda: np.zeros((PARTS, COLUMNS), np.int64))
    written: Array = field(default_factory=lambda: np.zeros((PARTS, COLUMNS), np.int64))
    loaded: dict[int, list[tuple[list[Array], Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads = np.zeros((self.clocks.mbarriers, PARTS, COLUMNS), np.int64)

    def columns(self, ins: Instruction, address: int, count: int) -> slice:
        first = address & 0xFFFF
        if first + count > self.allocated:
            raise OutOfBounds(ins, f"columns {first} to {first + count} of {self.allocated}")
        return slice(first, first + count)

    def note(
        self, ins: Instruction, strand: int, agent: int, parts: slice, at: slice, *, writes: bool
    ) -> None:
        """Notes an access that a strand starts; it must know all that its agent does not order."""
        clocks, place = self.clocks, (parts, at)
        ordered = agent in range(clocks.products, clocks.products + clocks.num_warps)
        known = clocks.seen[strand]
        last, by = self.written[place], self.writer[place]
        self._check(ins, (last > known[by]) & ~(ordered & (by == agent)), "written")
        if writes:
            unknown = self.reads[:, *place] > known[: clocks.mbarriers, None, None]
            unknown[agent] &= not ordered
            self._check(ins, unknown, "read")
            self.writer[place], self.written[place] = agent, clocks.group(agent)
        else:
            self.reads[agent][place] = clocks.group(agent)

    def _check(self, ins: Instruction, wrong: Array, before: str) -> None:
        if wrong.any():
            raise NotWaited(ins, f"tensor memory {before} by what has not been waited for")


def memory_of(machine: Machine) -> TensorMemory:
    if machine.tensor_memory is None:
        machine.tensor_memory = TensorMemory(machine.clocks)
    return machine.tensor_memory


@handles(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32")
def allocate(machine: Machine, ins: Instruction) -> ByLanes:
    """Writes the first column to shared memory; here one allocation is enough."""
    offsets = located(machine, ins, ins.operands[0], 4)
    count = int(str(ins.operands[1]), 0)

    def run(lanes: Array) -> None:
        machine.warps(ins, lanes)
        memory = memory_of(machine)
        if memory.closed or count not in (32, 64, 128, 256, 512):
            raise Fault(ins, f"{count} columns, or after the permit was given up")
        if memory.allocated or lanes.size != LANES:
            raise Unsupported(ins, "of several warps, or a second time")
        memory.allocated = count
        at = offsets(lanes)[:1]
        machine.shared.written_by(ins, at, 4, lanes[:1])
        machine.shared.words[4][at // 4] = 0

    return run


@handles(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
def give_up(machine: Machine, ins: Instruction) -> ByLanes:
    def run(lanes: Array) -> None:
        memory_of(machine).closed = True

    return run


@handles(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
def free(machine: Machine, ins: Instruction) -> ByLanes:
    """All accesses must be known to be done."""
    address = machine.source(ins, ins.operands[0], "u32")
    count = int(str(ins.operands[1]), 0)

    def run(lanes: Array) -> None:
        [warp], memory = machine.warps(ins, lanes), memory_of(machine)
        if (int(address[lanes][0]), count) != (0, memory.allocated) or not count:
            raise Fault(ins, f"{memory.allocated} columns are allocated")
        agent = machine.clocks.tensor_writes + warp
        memory.note(ins, warp, agent, SOME, SOME, writes=True)
        memory.allocated = 0

    return run


@handles(r"tcgen05\.(ld|st)\.sync\.aligned\.32x32b\.x(\d+)\.b32")
def move(machine: Machine, ins: Instruction, kind: str, count: str) -> ByLanes:
    """Each lane has a row, and each register a column."""
    loads, cols = kind == "ld", int(count)
    registers, operand = ins.operands if loads else ins.operands[::-1]
    names = [str(x) for x in vector(registers)]
    if len(names) != cols or not isinstance(operand, Address):
        raise Unsupported(ins)
    address, shift = machine.source(ins, operand.base, "u32"), operand.offset
    held = [
        machine.target(ins, x, "b32") if loads else machine.source(ins, x, "b32") for x in names
    ]

    def run(lanes: Array) -> None:
        memory, clocks = memory_of(machine), machine.clocks
        for warp in machine.warps(ins, lanes).tolist():
            threads = slice(warp * LANES, (warp + 1) * LANES)
            [start, *others] = np.unique(address[threads]).tolist()
            part = warp % PARTS
            if others or start >> 16 != part * LANES:
                raise Fault(ins, f"warp {warp} reaches for lanes from {start >> 16} on")
            at = memory.columns(ins, start + shift, cols)
            rows = slice(part * LANES, (part + 1) * LANES)
            agent = (clocks.tensor_reads if loads else clocks.tensor_writes) + warp
            memory.note(ins, warp, agent, slice(part, part + 1), at, writes=not loads)
            if loads:
                parts = [x[threads] for x in held]
                for x in parts:
                    x[:] = 0xFFFFFFFF
                memory.loaded.setdefault(warp, []).append((parts, memory.words[rows, at].T.copy()))
            else:
                memory.words[rows, at] = np.stack([x[threads] for x in held], 1)

    return run


@handles(r"tcgen05\.wait::(ld|st)\.sync\.aligned")
def wait(machine: Machine, ins: Instruction, kind: str) -> ByLanes:
    def run(lanes: Array) -> None:
        memory, clocks = memory_of(machine), machine.clocks
        for warp in machine.warps(ins, lanes).tolist():
            clocks.wait_moves(warp, clocks.tensor_reads if kind == "ld" else clocks.tensor_writes)
            if kind == "ld":
                for registers, values in memory.loaded.pop(warp, []):
                    for register, value in zip(registers, values, strict=True):
                        register[:] = value

    return run


def issuer(ins: Instruction, lanes: Array) -> Array:
    if lanes.size > 1:
        raise Unsupported(ins, "by several threads")
    return lanes


@handles(r"tcgen05\.mma\.cta_group::1\.kind::f16")
def multiply(machine: Machine, ins: Instruction) -> ByLanes:
    """D = A B or D += A B, of 128 rows and 16 columns of A, which may be in tensor memory."""
    d, a, b, described, added = ins.operands
    if not isinstance(d, Address) or d.offset:
        raise Unsupported(ins)
    into, second = machine.source(ins, d.base, "u32"), machine.source(ins, b, "u64")
    in_tensor = isinstance(a, Address)
    first = machine.source(ins, a.base, "u32") if in_tensor else machine.source(ins, a, "u64")
    shapes, adds = machine.source(ins, described, "u32"), machine.source(ins, added, "pred")

    def matrix(thread: Array, descriptor: int, rows: int, transposed: bool, kind: str) -> Array:
        if descriptor >> 61 != 2 or descriptor >> 46 & 0x7FFF != 1:
            raise Unsupported(ins, f"with descriptor {descriptor:#x}")
        address, chunks = operand_addresses(descriptor, rows, transposed)
        at = machine.shared.locate(ins, chunks, CHUNK, np.full(chunks.shape, thread[0]))
        machine.shared.multiplied_by(ins, at, thread)
        return halves_to_f32(machine.shared.words[2][(address - machine.shared.base) // 2], kind)

    def run(lanes: Array) -> None:
        thread = issuer(ins, lanes)
        lane, shape = int(thread[0]), int(shapes[thread][0])
        kinds = {0: "f16", 1: "bf16"}
        kind = kinds.get(shape >> 7 & 7, "")
        cols = (shape >> 17 & 0x3F) << 3
        # Dense, float32, no negation, one type, A not transposed in tensor memory, 128 rows.
        if shape & 0x6F or shape >> 4 & 3 != 1 or shape >> 10 & 7 != shape >> 7 & 7 or not kind:
            raise Unsupported(ins, f"with instruction descriptor {shape:#x}")
        transposed = bool(shape >> 15 & 1)
        if shape >> 13 & 3 or transposed and in_tensor or shape >> 23 != ROWS >> 4 << 1 or not cols:
            raise Unsupported(ins, f"with instruction descriptor {shape:#x}")
        memory, warp = memory_of(machine), lane // LANES
        [strand] = machine.clocks.strands(thread)
        agent = machine.clocks.products + warp
        if in_tensor:
            at = memory.columns(ins, int(first[lane]) + a.offset, DEPTH // 2)
            memory.note(ins, strand, agent, SOME, at, writes=False)
            left = halves_to_f32(memory.words[:, at], kind)
        else:
            left = matrix(thread, int(first[lane]), ROWS, transposed, kind)
        right = matrix(thread, int(second[lane]), cols, bool(shape >> 16 & 1), kind)
        at = memory.columns(ins, int(into[lane]), cols)
        if (int(into[lane]) | int(first[lane]) * in_tensor) >> 16:
            raise Fault(ins, "a product begins at a lane above 0")
        memory.note(ins, strand, agent, SOME, at, writes=True)
        product = matmul(left, right.T)
        if adds[lane]:
            product += memory.words[:, at].view(np.float32)
        memory.words[:, at] = product.view(np.uint32)

    return run


@handles(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64")
def commit(machine: Machine, ins: Instruction) -> ByLanes:
    """Arrives when all products of the thread are done, and knows what they waited for."""
    mbarrier = find(machine, ins, ins.operands[0], proxy=True)

    def run(lanes: Array) -> None:
        thread, clocks = issuer(ins, lanes), machine.clocks
        barrier = mbarrier(thread)
        if not barrier.arrivals:
            raise Fault(ins, "an arrival where none is to come")
        np.maximum(barrier.coming, clocks.commit_products(thread), out=barrier.coming)
        barrier.arrivals -= 1
        barrier.complete(machine)

    return run
