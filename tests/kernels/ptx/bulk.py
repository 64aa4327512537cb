"""mbarriers, and bulk tensor copies, which complete them.

A copy lands at once; that nobody may look before its mbarrier says so is the shadow's affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.ptx.access import address_of
from tests.kernels.ptx.faults import Fault, Unsupported
from tests.kernels.ptx.machine import Array, Machine, Run, Wait, Where, handles
from tests.kernels.ptx.parse import Address, Instruction, Operand

# ISA, "Swizzling modes": the bits of an address from 7 on that are added to those from 4 on.
SWIZZLED_BITS = {0: 0, 32: 1, 64: 3, 128: 7}
# As in CUtensorMapSwizzle.
SWIZZLE_BYTES = (0, 32, 64, 128)
CHUNK = 16


def swizzle(address: Array, num_bytes: int) -> Array:
    """Where the byte at an address stands when rows of so many bytes are swizzled."""
    return address ^ (address >> 7 & SWIZZLED_BITS[num_bytes]) << 4


@dataclass
class Mbarrier:
    """Attributes:
    number: of its agent.
    expected: arrivals of a phase.
    arrivals: those of this phase that are to come.
    num_bytes: those of this phase that are to come.
    phase: phases that are complete.
    coming: what those know that have arrived in this phase or before.
    known: likewise in complete phases.
    """

    number: int
    expected: int
    arrivals: int
    coming: tuple[Array, Array]
    known: tuple[Array, Array]
    num_bytes: int = 0
    phase: int = 0

    def complete(self, machine: Machine) -> None:
        """Begins the next phase if nothing is to come in this one."""
        if self.arrivals or self.num_bytes:
            return
        self.phase += 1
        self.arrivals = self.expected
        agent = machine.clocks.mbarriers + self.number
        for coming, known in zip(self.coming, self.known, strict=True):
            coming[agent] = self.phase
            known[:] = coming


def find(machine: Machine, ins: Instruction, operand: Operand) -> Any:
    """A function from threads to the mbarrier of all of them; they must see that it was made."""
    base, offset = address_of(machine, ins, operand)

    def found(lanes: Array, *, proxy: bool = False) -> Mbarrier:
        address = base[lanes].astype(np.int64) + offset
        at = machine.shared.locate(ins, address, 8, lanes)
        if (at != at[0]).any():
            raise Unsupported(ins, "with several mbarriers")
        if int(at[0]) not in machine.mbarriers:
            raise Fault(ins, f"no mbarrier at {int(at[0])}")
        machine.shared.read(ins, at, 8, machine.warp_of[lanes], proxy=proxy)
        return machine.mbarriers[int(at[0])]

    return found


@handles(r"mbarrier\.init\.shared::cta\.b64")
def initialise(machine: Machine, ins: Instruction) -> Run:
    base, offset = address_of(machine, ins, ins.operands[0])
    count = int(str(ins.operands[1]), 0)

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if lanes.size > 1:
            raise Fault(ins, "an mbarrier is made by several threads")
        for at in machine.shared.locate(ins, base[lanes].astype(np.int64) + offset, 8, lanes):
            machine.shared.written(ins, np.array([at]), 8, machine.warp_of[lanes])
            nothing = np.zeros((4, machine.clocks.seen.shape[1]), np.int32)
            number = len(machine.mbarriers)
            machine.mbarriers[int(at)] = Mbarrier(
                number, count, count, (nothing[0], nothing[1]), (nothing[2], nothing[3])
            )

    return run


@handles(r"mbarrier\.arrive(\.expect_tx)?\.shared::cta\.b64")
def arrive(machine: Machine, ins: Instruction) -> Run:
    """Every thread that executes it arrives once; with expect_tx bytes are to come."""
    mbarrier = find(machine, ins, ins.operands[1])
    expects = "expect_tx" in ins.opcode
    if ins.operands[0] != "_" or len(ins.operands) != 2 + expects:
        raise Unsupported(ins)
    num_bytes = machine.source(ins, ins.operands[2], "u32") if expects else None

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if not lanes.size:
            return
        barrier = mbarrier(lanes)
        if lanes.size > barrier.arrivals:
            raise Fault(ins, f"{lanes.size} arrivals where {barrier.arrivals} are to come")
        known = machine.clocks.release(np.unique(machine.warp_of[lanes]))
        for coming, new in zip(barrier.coming, known, strict=True):
            np.maximum(coming, new, out=coming)
        barrier.num_bytes += int(num_bytes[lanes].sum()) if num_bytes is not None else 0
        barrier.arrivals -= lanes.size
        barrier.complete(machine)

    return run


@handles(r"mbarrier\.try_wait\.parity\.shared::cta\.b64")
def wait(machine: Machine, ins: Instruction) -> Run:
    """Returns when the phase of that parity is complete; the ISA lets it return before, too."""
    done = machine.target(ins, ins.operands[0], "pred")
    mbarrier = find(machine, ins, ins.operands[1])
    parity = machine.source(ins, ins.operands[2], "u32")

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        barrier, wanted = mbarrier(lanes), np.unique(parity[lanes])
        if wanted.size != 1:
            raise Unsupported(ins, "with several parities")

        def finish() -> None:
            machine.clocks.acquire(np.unique(machine.warp_of[lanes]), barrier.known)
            done[lanes] = True

        raise Wait(ins, lambda: barrier.phase & 1 != wanted[0], finish)

    return run


@handles(r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cta\.global\.mbarrier::complete_tx::bytes")
def copy(machine: Machine, ins: Instruction) -> Run:
    """A box of a tensor; what lies outside the tensor is copied as zeros."""
    to, offset = address_of(machine, ins, ins.operands[0])
    source = ins.operands[1]
    if not isinstance(source, Address):
        raise Unsupported(ins)
    descriptor, _ = address_of(machine, ins, source)
    coords = [machine.source(ins, x, "s32") for x in source.coords]
    mbarrier = find(machine, ins, ins.operands[2])

    def run(where: Where) -> None:
        for lane in machine.lanes(where):
            described, box, width = machine.descriptors[int(descriptor[lane])], (), 0
            start = [int(coord[lane]) for coord in reversed(coords)]
            values, box, width = _box(machine, ins, described, start)
            row, mode = box[-1] * width, SWIZZLE_BYTES[described[1]["swizzle"]]
            if mode and row > mode:
                raise Fault(ins, f"rows of {row} bytes swizzled in {mode}")
            address = int(to[lane]) + offset
            if address % 128:
                raise Fault(ins, f"the copy's end {address:#x} is no multiple of 128")
            first = swizzle(address + np.arange(0, values.nbytes, CHUNK), mode)
            at = machine.shared.locate(ins, first, CHUNK, np.full(first.shape, lane))
            lanes = np.array([lane])
            barrier = mbarrier(lanes, proxy=True)
            warp = int(machine.warp_of[lane])
            machine.shared.landed(ins, at, warp, barrier.number, barrier.phase + 1)
            chunks = values.view(np.uint8).reshape(-1, CHUNK)
            machine.shared.bytes[at[:, None] + np.arange(CHUNK)] = chunks
            barrier.num_bytes -= values.nbytes
            barrier.complete(machine)

    return run


def _box(
    machine: Machine, ins: Instruction, described: Any, start: list[int]
) -> tuple[Array, tuple[int, ...], int]:
    """The elements of a box, its size, and the bytes of an element."""
    tensor, meta, address = described
    box, width = tuple(meta["block_size"]), meta["elem_size"]
    at, inside = np.zeros((1,) * len(box), np.int64), np.ones((1,) * len(box), np.bool_)
    for axis, size in enumerate(box):
        shape = [1] * len(box)
        shape[axis] = size
        index = (start[axis] + np.arange(size)).reshape(shape)
        inside = inside & (index >= 0) & (index < tensor.shape[axis])
        at = at + index * tensor.strides[axis]
    found = np.zeros(math.prod(box), f"u{width}")
    some = inside.ravel()
    where = address + at.ravel()[some] * width
    offsets = machine.memory.locate(ins, where, width, where)
    found[some] = machine.memory.words[width][offsets // width]
    return found, box, width


@handles(r"fence\.proxy\.async(\.shared::cta)?")
def fence(machine: Machine, ins: Instruction) -> Run:
    return lambda where: machine.clocks.fence(np.unique(machine.warp_of[machine.lanes(where)]))
