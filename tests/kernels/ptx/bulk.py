"""mbarriers, and bulk tensor copies, which complete mbarriers.

A copy writes at once; the shadow (`races`) reports accesses that did not wait for its mbarrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.ptx.access import address_of
from tests.kernels.ptx.faults import Fault, Unsupported
from tests.kernels.ptx.machine import Array, Machine, Run, Wait, Where, handles
from tests.kernels.ptx.parse import Address, Instruction, Operand

CHUNK = 16


def swizzle(address: Array) -> Array:
    """The address of a byte after swizzling of 128-byte rows."""
    return address ^ (address >> 7 & 7) << 4


@dataclass(frozen=True)
class TensorMap:
    """A tensor, contiguous in its last dimension, as bulk copies see it.

    Attributes:
        strides: in elements of `width` bytes.
        box: shape of the part that one copy copies.
        swizzle: bytes of a swizzled row.
    """

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    width: int
    box: Sequence[int]
    swizzle: int

    def read(self, machine: Machine, ins: Instruction, start: Sequence[int], lane: int) -> Array:
        """The elements of the box at `start`, zeros outside the tensor."""
        at, inside = np.zeros((), np.int64), np.ones((), np.bool_)
        for axis, size in enumerate(self.box):
            index = start[axis] + np.arange(size)
            there = (index >= 0) & (index < self.shape[axis])
            at = at[..., None] + index * self.strides[axis]
            inside = inside[..., None] & there
        found = np.zeros(at.size, f"u{self.width}")
        address = self.address + at[inside] * self.width
        lanes = np.full(address.shape, lane)
        offsets = machine.memory.locate(ins, address, self.width, lanes)
        found[inside.ravel()] = machine.memory.words[self.width][offsets // self.width]
        return found


@dataclass
class Mbarrier:
    """An mbarrier, whose number gives its agent in `races`.

    Attributes:
        expected: arrivals of a phase.
        arrivals: arrivals that this phase still lacks, as `num_bytes`.
        coming: clocks known to the warps that have arrived so far.
        known: the same clocks at the end of the last complete phase.
        made: instruction that made the mbarrier.
        phase: number of complete phases.
    """

    number: int
    expected: int
    arrivals: int
    coming: tuple[Array, Array]
    known: tuple[Array, Array]
    made: Instruction
    num_bytes: int = 0
    phase: int = 0

    @property
    def missing(self) -> str:
        """Text of the arrivals and bytes that the phase still lacks."""
        return f"mbarrier {self.number} lacks {self.arrivals} arrivals and {self.num_bytes} bytes"

    def check_idle(self) -> None:
        """Raises if a phase has begun and is not complete."""
        if self.arrivals != self.expected or self.num_bytes:
            raise Fault(self.made, f"at the end {self.missing}")

    def complete(self, machine: Machine) -> None:
        """Begins the next phase if this phase lacks nothing."""
        if self.arrivals or self.num_bytes:
            return
        self.phase += 1
        self.arrivals = self.expected
        agent = machine.clocks.mbarriers + self.number
        for coming, known in zip(self.coming, self.known, strict=True):
            coming[agent] = self.phase
            known[:] = coming


def find(machine: Machine, ins: Instruction, operand: Operand) -> Any:
    """A function from threads to their common mbarrier; its making must be ordered before."""
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
            machine.shared.written_by(ins, np.array([at]), 8, machine.warp_of[lanes])
            nothing = np.zeros((4, machine.clocks.seen.shape[1]), np.int32)
            number = len(machine.mbarriers)
            machine.mbarriers[int(at)] = Mbarrier(
                number, count, count, (nothing[0], nothing[1]), (nothing[2], nothing[3]), ins
            )

    return run


@handles(r"mbarrier\.arrive(\.expect_tx)?\.shared::cta\.b64")
def arrive(machine: Machine, ins: Instruction) -> Run:
    """Each thread arrives once; expect_tx adds to the bytes that the phase lacks."""
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
    """Waits until the phase of that parity is complete; the ISA allows an earlier return."""
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

        def missing() -> str:
            return f" for parity {wanted[0]}: {barrier.missing}"

        raise Wait(ins, lambda: barrier.phase & 1 != wanted[0], finish, missing)

    return run


@handles(r"cp\.async\.bulk\.tensor\.[24]d\.shared::cta\.global\.mbarrier::complete_tx::bytes")
def copy(machine: Machine, ins: Instruction) -> Run:
    """Copies a box of a tensor; elements outside the tensor are zeros."""
    to, offset = address_of(machine, ins, ins.operands[0])
    source = ins.operands[1]
    if not isinstance(source, Address):
        raise Unsupported(ins)
    descriptor, _ = address_of(machine, ins, source)
    coords = [machine.source(ins, x, "s32") for x in source.coords]
    mbarrier = find(machine, ins, ins.operands[2])

    def run(where: Where) -> None:
        for lane in machine.lanes(where):
            tensor = machine.maps_by_address[int(descriptor[lane])]
            start = [int(x[lane]) for x in reversed(coords)]
            values = tensor.read(machine, ins, start, lane)
            if tensor.swizzle != 128 or tensor.box[-1] * tensor.width > 128:
                raise Unsupported(ins, f"of {tensor.box} swizzled in {tensor.swizzle} bytes")
            address = int(to[lane]) + offset
            if address % 128:
                raise Fault(ins, f"the copy's end {address:#x} is no multiple of 128")
            first = swizzle(address + np.arange(0, values.nbytes, CHUNK))
            at = machine.shared.locate(ins, first, CHUNK, np.full(first.shape, lane))
            barrier, warp = mbarrier(np.array([lane]), proxy=True), int(machine.warp_of[lane])
            machine.shared.landed(ins, at, warp, barrier.number, barrier.phase + 1)
            chunks = values.view(np.uint8).reshape(-1, CHUNK)
            machine.shared.bytes[at[:, None] + np.arange(CHUNK)] = chunks
            barrier.num_bytes -= values.nbytes
            barrier.complete(machine)

    return run


@handles(r"fence\.proxy\.async\.shared::cta")
def fence(machine: Machine, ins: Instruction) -> Run:
    return lambda where: machine.clocks.fence(np.unique(machine.warp_of[machine.lanes(where)]))
