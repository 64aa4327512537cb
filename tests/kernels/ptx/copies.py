"""Asynchronous copies: `cp.async`, which a warp awaits in groups, and bulk copies with mbarriers.

A copy writes at once; the shadow (`races`) reports accesses to its bytes before the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx.access import address_of, located
from tests.kernels.ptx.faults import Fault, Unsupported
from tests.kernels.ptx.machine import Array, ByLanes, Machine, Wait, handles
from tests.kernels.ptx.parse import Address, Instruction, Operand

CHUNK = 16

# Without a sub-qualifier, `.shared` is the program's own memory, as triton 3.6 writes it.
OWN = r"shared(?:::cta)?"
# Our programs have no clusters of several: a cluster's memory is their own. Triton 3.6 names it.
OWN_OR_CLUSTER = r"shared::(?:cta|cluster)"


@handles(r"cp\.async\.(cg|ca)\.shared\.global")
def copy(machine: Machine, ins: Instruction, cache: str) -> ByLanes:
    """Writes `cp-size` bytes: the first `src-size` from the source, then zeros, as in the ISA."""
    size = int(str(ins.operands[2]), 0)
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        raise Unsupported(ins)
    to = located(machine, ins, ins.operands[0], size)
    source = located(machine, ins, ins.operands[1], size, "global")
    length = machine.source(ins, ins.operands[3] if len(ins.operands) == 4 else str(size), "u32")

    def run(lanes: Array) -> None:
        taken = length[lanes]
        if not np.isin(taken, (0, size)).all():
            raise Unsupported(ins, "with a part of the bytes")
        at, steps, some = to(lanes), np.arange(size), taken > 0
        machine.shared.copied(ins, at, size, lanes)
        machine.shared.bytes[at[:, None] + steps] = 0
        start = source(lanes[some])
        machine.grid.races.read(ins, machine.clocks, start, size, lanes[some])
        found = machine.grid.memory.bytes[start[:, None] + steps]
        machine.shared.bytes[at[some, None] + steps] = found

    return run


@handles(r"cp\.async\.commit_group")
def commit(machine: Machine, ins: Instruction) -> ByLanes:
    def run(lanes: Array) -> None:
        machine.clocks.copy_groups[machine.warps(ins, lanes)] += 1

    return run


@handles(r"cp\.async\.wait_group")
def wait_copies(machine: Machine, ins: Instruction) -> ByLanes:
    most = int(str(ins.operands[0]), 0)
    return lambda lanes: machine.clocks.wait_copies(machine.warps(ins, lanes), most)


# -- mbarriers


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
    coming: Array
    known: Array
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
        if not self.arrivals and not self.num_bytes:
            self.phase += 1
            self.arrivals = self.expected
            self.coming[:, machine.clocks.mbarriers + self.number] = self.phase
            self.known[:] = self.coming


def find(
    machine: Machine, ins: Instruction, operand: Operand, *, proxy: bool = False
) -> Callable[[Array], Mbarrier]:
    """A function from threads to their common mbarrier; its making must be ordered before."""
    offsets = located(machine, ins, operand, 8)

    def found(lanes: Array) -> Mbarrier:
        at = offsets(lanes)
        if (at != at[0]).any():
            raise Unsupported(ins, "with several mbarriers")
        if int(at[0]) not in machine.mbarriers:
            raise Fault(ins, f"no mbarrier at {int(at[0])}")
        machine.shared.read(ins, at, 8, lanes, proxy=proxy)
        return machine.mbarriers[int(at[0])]

    return found


@handles(rf"mbarrier\.init\.{OWN}\.b64")
def initialise(machine: Machine, ins: Instruction) -> ByLanes:
    offsets = located(machine, ins, ins.operands[0], 8)
    count = int(str(ins.operands[1]), 0)

    def run(lanes: Array) -> None:
        at = offsets(lanes)
        if lanes.size > 1:
            raise Fault(ins, "an mbarrier is made by several threads")
        machine.shared.written_by(ins, at, 8, lanes)
        coming, known = np.zeros((2, 2, machine.clocks.seen.shape[1]), np.int32)
        number = next(machine.mbarrier_numbers)
        machine.mbarriers[int(at[0])] = Mbarrier(number, count, count, coming, known, ins)

    return run


@handles(rf"mbarrier\.inval\.{OWN}\.b64")
def invalidate(machine: Machine, ins: Instruction) -> ByLanes:
    """Ends an mbarrier's life; its memory may be used again."""
    offsets = located(machine, ins, ins.operands[0], 8)

    def run(lanes: Array) -> None:
        at = offsets(lanes)
        if lanes.size > 1 or int(at[0]) not in machine.mbarriers:
            raise Fault(ins, f"no mbarrier at {int(at[0])}, or invalidated by several threads")
        machine.shared.written_by(ins, at, 8, lanes)
        machine.mbarriers.pop(int(at[0])).check_idle()

    return run


@handles(rf"mbarrier\.arrive(\.expect_tx)?\.{OWN}\.b64")
def arrive(machine: Machine, ins: Instruction, expects: str | None) -> ByLanes:
    """Each thread arrives once; expect_tx adds to the bytes that the phase lacks."""
    if ins.operands[0] != "_" or len(ins.operands) != 2 + bool(expects):
        raise Unsupported(ins)
    mbarrier = find(machine, ins, ins.operands[1])
    num_bytes = machine.source(ins, ins.operands[2] if expects else "0", "u32")

    def run(lanes: Array) -> None:
        barrier = mbarrier(lanes)
        if lanes.size > barrier.arrivals:
            raise Fault(ins, f"{lanes.size} arrivals where {barrier.arrivals} are to come")
        known = machine.clocks.release(lanes)
        np.maximum(barrier.coming, known, out=barrier.coming)
        barrier.num_bytes += int(num_bytes[lanes].sum())
        barrier.arrivals -= lanes.size
        barrier.complete(machine)

    return run


@handles(rf"mbarrier\.try_wait\.parity\.{OWN}\.b64")
def wait(machine: Machine, ins: Instruction) -> ByLanes:
    """Waits until the phase of that parity is complete; the ISA allows an earlier return."""
    done = machine.target(ins, ins.operands[0], "pred")
    mbarrier = find(machine, ins, ins.operands[1])
    parity = machine.source(ins, ins.operands[2], "u32")

    def run(lanes: Array) -> None:
        barrier, wanted = mbarrier(lanes), np.unique(parity[lanes])
        if wanted.size != 1:
            raise Unsupported(ins, "with several parities")

        def finish() -> None:
            machine.clocks.acquire(lanes, barrier.known)
            done[lanes] = True

        def missing() -> str:
            return f" for parity {wanted[0]}: {barrier.missing}"

        raise Wait(ins, lambda: barrier.phase & 1 != wanted[0], finish, missing)

    return run


# -- bulk copies


def swizzle(address: Array, width: int) -> Array:
    """The address of a byte after swizzling of rows of `width` bytes: 32, 64 or 128."""
    return address ^ (address >> 7 & width // CHUNK - 1) << 4


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
        offsets = machine.grid.memory.locate(ins, address, self.width, lanes)
        machine.grid.races.read(ins, machine.clocks, offsets, self.width, lanes)
        found[inside.ravel()] = machine.grid.memory.words[self.width][offsets // self.width]
        return found


@handles(rf"cp\.async\.bulk\.tensor\.[24]d\.{OWN_OR_CLUSTER}\.global\.mbarrier::complete_tx::bytes")
def bulk_copy(machine: Machine, ins: Instruction) -> ByLanes:
    """Copies a box of a tensor; elements outside the tensor are zeros."""
    source = ins.operands[1]
    if not isinstance(source, Address):
        raise Unsupported(ins)
    to, descriptor = (address_of(machine, ins, x) for x in ins.operands[:2])
    coords = [machine.source(ins, x, "s32") for x in source.coords]
    mbarrier = find(machine, ins, ins.operands[2], proxy=True)

    def run(lanes: Array) -> None:
        for lane in lanes[:, None]:
            tensor = machine.maps_by_address[int(descriptor(lane)[0])]
            values = tensor.read(machine, ins, [int(x[lane[0]]) for x in coords[::-1]], lane[0])
            if tensor.swizzle != tensor.box[-1] * tensor.width:
                raise Unsupported(ins, f"of {tensor.box} swizzled in {tensor.swizzle} bytes")
            address = int(to(lane)[0])
            if address % 128:
                raise Fault(ins, f"the copy's end {address:#x} is no multiple of 128")
            first = swizzle(address + np.arange(0, values.nbytes, CHUNK), tensor.swizzle)
            at = machine.shared.locate(ins, first, CHUNK, np.full(first.shape, lane[0]))
            barrier = mbarrier(lane)
            machine.shared.landed(ins, at, lane, barrier.number, barrier.phase + 1)
            chunks = values.view(np.uint8).reshape(-1, CHUNK)
            machine.shared.bytes[at[:, None] + np.arange(CHUNK)] = chunks
            barrier.num_bytes -= values.nbytes
            barrier.complete(machine)

    return run


@handles(r"fence\.proxy\.async\.shared::cta")
def fence(machine: Machine, ins: Instruction) -> ByLanes:
    return lambda lanes: machine.clocks.fence(lanes)
