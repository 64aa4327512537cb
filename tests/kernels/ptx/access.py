"""Loads and stores, barriers of a CTA, and exchanges between lanes of a warp."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.kernels.ptx.faults import Fault, Race, Unsupported
from tests.kernels.ptx.machine import LANES, Array, Machine, Run, Wait, Where, handles
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.parse import Address, Instruction, Operand
from tests.kernels.ptx.scalar import DTYPES, flush

ACCESS = re.compile(r"(?:ld|st)\.(?P<space>global|shared)(?:\.v(?P<count>[24]))?\.b(?P<bits>\d+)")


def address_of(machine: Machine, ins: Instruction, operand: Operand) -> tuple[Array, int]:
    """The register of an address, read anew at every use, and the offset."""
    if not isinstance(operand, Address):
        raise Unsupported(ins)
    bits = machine.kernel.registers.get(operand.base.rstrip("0123456789"), 64)
    return machine.source(ins, operand.base, f"u{bits}"), operand.offset


def vector(operand: Operand) -> tuple[Operand, ...]:
    several = isinstance(operand, tuple) and not isinstance(operand, Address)
    return operand if several else (operand,)


@handles(r"ld\.param\.(b32|b64|s32)")
def load_param(machine: Machine, ins: Instruction) -> Run:
    target, operand = ins.operands
    if not isinstance(operand, Address) or operand.offset or operand.base not in machine.args:
        raise Unsupported(ins)
    kind = DTYPES[ins.opcode.split(".")[2]]
    value = np.array([machine.args[operand.base]], np.uint64).view(kind)[:1]
    register = machine.register(str(target))
    # A signed value is sign-extended.
    wide = value.astype(f"{'i' if kind.kind == 'i' else 'u'}{register.itemsize}")
    bits = value.view(register.dtype) if value.itemsize == register.itemsize else wide
    return lambda where: np.copyto(register, bits.view(register.dtype), where=where)


@handles(r"cvta\.param\.u64")
def convert_param(machine: Machine, ins: Instruction) -> Run:
    target, source = (machine.register(str(x)) for x in ins.operands)
    return lambda where: np.copyto(target, source, where=where)


@handles(r"ld\.(global|shared)\.(?!gpu).*")
def load(machine: Machine, ins: Instruction) -> Run:
    memory, count, width = _access(machine, ins)
    targets = [machine.register(str(x)) for x in vector(ins.operands[0])]
    base, offset = address_of(machine, ins, ins.operands[1])
    shared = memory().name == "shared"

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if not lanes.size:
            return
        at = memory().locate(ins, base[lanes].astype(np.int64) + offset, width * count, lanes)
        if shared:
            machine.shared.read(ins, at, width * count, machine.warp_of[lanes])
        index, found = at // width, memory().words[width]
        for i, target in enumerate(targets):
            target[lanes] = found[index + i]

    return run


@handles(r"st\.(global|shared)\..*")
def store(machine: Machine, ins: Instruction) -> Run:
    memory, count, width = _access(machine, ins)
    base, offset = address_of(machine, ins, ins.operands[0])
    sources = [machine.source(ins, x, f"u{8 * width}") for x in vector(ins.operands[1])]
    shared = memory().name == "shared"

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if not lanes.size:
            return
        at = memory().locate(ins, base[lanes].astype(np.int64) + offset, width * count, lanes)
        if shared:
            machine.shared.written_by(ins, at, width * count, machine.warp_of[lanes])
        index, words = at // width, memory().words[width]
        values = [source[lanes] for source in sources]
        for i, value in enumerate(values):
            words[index + i] = value
        for i, value in enumerate(values):
            if (words[index + i] != value).any():
                raise Race(ins, "two threads write different values to one address")

    return run


def _access(machine: Machine, ins: Instruction) -> tuple[Any, int, int]:
    """The memory of an access, the number of elements per thread, and their bytes."""
    found = ACCESS.fullmatch(ins.opcode)
    if found is None:
        raise Unsupported(ins)
    data = vector(ins.operands[ins.opcode.startswith("st")])
    if len(data) != int(found["count"] or 1):
        raise Unsupported(ins)

    def memory() -> Memory:
        return machine.shared if found["space"] == "shared" else machine.memory

    return memory, len(data), int(found["bits"]) // 8


@handles(r"mov\.b(32|64)")
def pack(machine: Machine, ins: Instruction) -> Run:
    """Splits a register into the parts in braces, lowest first; or joins such parts."""
    target, source = ins.operands
    if isinstance(target, tuple):
        parts = [machine.register(str(x)) for x in target]
        whole = machine.source(ins, source, ins.opcode[4:])

        def split(where: Where) -> None:
            pieces = whole.view(parts[0].dtype).reshape(machine.num_threads, -1)
            for i, part in enumerate(parts):
                np.copyto(part, pieces[:, i], where=where)

        return split
    register = machine.register(str(target))
    kind = f"u{8 * register.itemsize // len(vector(source))}"
    sources = [machine.source(ins, x, kind) for x in vector(source)]
    return lambda where: np.copyto(
        register, np.stack(sources, 1).view(register.dtype)[:, 0], where=where
    )


# -- global memory that CTAs pass to each other


@handles(r"ld\.global\.gpu\.acquire\.b32")
def acquire(machine: Machine, ins: Instruction) -> Run:
    """A load that would give the same value as its last run waits until the value changes."""
    target = machine.target(ins, ins.operands[0], "b32")
    base, offset = address_of(machine, ins, ins.operands[1])
    words = machine.memory.words[4]

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if not lanes.size:
            return
        if len(lanes) > 1:
            raise Unsupported(ins, "by several threads")
        at = machine.memory.locate(ins, base[lanes].astype(np.int64) + offset, 4, lanes) // 4
        found = int(words[at[0]])

        def load() -> None:
            target[lanes] = words[at]
            machine.acquired[ins] = int(at[0]), int(words[at[0]])

        if machine.acquired.get(ins) == (int(at[0]), found):
            raise Wait(ins, lambda: int(words[at[0]]) != found, load)
        load()

    return run


@handles(r"atom\.global\.gpu\.(relaxed\.add(\.v4\.f32|\.u32)|release\.exch\.b32)")
def atomic(machine: Machine, ins: Instruction) -> Run:
    """Updates memory at one address per thread; subnormal floats become zeros."""
    kind, adds = ins.opcode.split(".")[-1], ".add" in ins.opcode
    results, address, values = ins.operands
    targets = [machine.target(ins, x, kind) for x in vector(results)]
    base, offset = address_of(machine, ins, address)
    sources = [machine.source(ins, x, kind) for x in vector(values)]
    words = machine.memory.words[4].view(DTYPES[kind])

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        if not lanes.size:
            return
        addresses = base[lanes].astype(np.int64) + offset
        size = 4 * len(sources)
        index = machine.memory.locate(ins, addresses, size, lanes) // 4
        if np.unique(index).size < index.size:
            raise Unsupported(ins, "by several threads at one address")
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            at = index + i
            old, new = words[at], source[lanes]
            if adds:
                new = flush(flush(old) + flush(new)) if kind == "f32" else old + new
            words[at] = new
            target[lanes] = old

    return run


# -- lanes of a warp


@handles(r"shfl\.sync\.(bfly|idx)\.b32")
def shuffle(machine: Machine, ins: Instruction) -> Run:
    """Reads a lane of the segment that the upper bits of operand c select, as in the ISA."""
    target = machine.target(ins, ins.operands[0], "b32")
    value, b, c = (machine.source(ins, x, "u32") for x in ins.operands[1:4])
    _need_all_lanes(machine, ins, ins.operands[4])
    butterfly, lane = ".bfly." in ins.opcode, machine.threads % LANES

    def run(where: Where) -> None:
        machine.warps(ins, where)
        segment, clamp, by = c >> 8 & 31, c & 31, b & 31
        most = lane & segment | clamp & ~segment
        at = lane ^ by if butterfly else lane & segment | by & ~segment
        taken = value[machine.threads - lane + np.where(at <= most, at, lane).astype(np.int64)]
        np.copyto(target, taken, where=where)

    return run


@handles(r"elect\.sync")
def elect(machine: Machine, ins: Instruction) -> Run:
    """Elects the first lane; the ISA allows any lane."""
    pair, members = ins.operands
    _need_all_lanes(machine, ins, members)
    leader = machine.target(ins, vector(pair)[0], "b32")
    elected = machine.target(ins, vector(pair)[1], "pred")
    first = machine.threads % LANES == 0

    def run(where: Where) -> None:
        machine.warps(ins, where)
        np.copyto(leader, 0, where=where)
        np.copyto(elected, first, where=where)

    return run


@handles(r"bar\.warp\.sync")
def warp_barrier(machine: Machine, ins: Instruction) -> Run:
    """Does nothing: lanes of a warp always count as ordered here."""
    _need_all_lanes(machine, ins, ins.operands[0])
    return lambda where: None


def _need_all_lanes(machine: Machine, ins: Instruction, members: Operand) -> None:
    if members not in ("-1", "0xffffffff", "0xFFFFFFFF"):
        raise Unsupported(ins, "with a part of the lanes")


@handles(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def set_registers(machine: Machine, ins: Instruction) -> Run:
    """Returns registers to the CTA's pool, or takes registers, and waits until enough are free.

    Warps of a warpgroup must make the same requests in the same order.
    """
    grows, count = ".inc." in ins.opcode, int(str(ins.operands[0]), 0)

    def run(where: Where) -> None:
        warps, owned = machine.warps(ins, where), machine.owned
        for warp in warps:
            machine.asked[warp].append((grows, count))
            for other in range(warp // 4 * 4, min(warp // 4 * 4 + 4, machine.num_warps)):
                pairs = zip(machine.asked[warp], machine.asked[other], strict=False)
                if any(mine != its for mine, its in pairs):
                    raise Fault(ins, f"warps {warp} and {other} ask for other numbers of registers")
        if (owned[warps] > count if grows else owned[warps] < count).any():
            raise Fault(ins, f"warps have {owned[warps]} registers")

        def change() -> None:
            owned[warps] = count

        def fits() -> bool:
            others = owned.sum() - owned[warps].sum()
            return int(others) + count * len(warps) <= machine.kernel.max_registers * len(owned)

        if not grows:
            change()
        else:
            raise Wait(ins, fits, change)

    return run


# -- barriers of a CTA


@handles(r"(bar|barrier)\.sync")
def barrier(machine: Machine, ins: Instruction) -> Run:
    """Waits until enough threads have come: all of the CTA, or the count in the second operand."""
    number = int(str(ins.operands[0]), 0)
    count = int(str(ins.operands[1]), 0) if len(ins.operands) == 2 else machine.num_threads

    def run(where: Where) -> None:
        here = machine.barriers.setdefault(number, [])
        here.append(machine.warps(ins, where))
        come = np.concatenate(here)
        if len(come) * LANES > count:
            raise Fault(ins, f"{len(come) * LANES} threads come to a barrier of {count}")
        if len(come) * LANES == count:
            machine.clocks.barrier(come)
            # A new list tells the waiting warps that the barrier is open.
            machine.barriers[number] = []
        raise Wait(ins, lambda: machine.barriers[number] is not here, lambda: None)

    return run
