"""Loads and stores, barriers of a CTA, and exchanges between lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.faults import Fault, Race, Unsupported
from tests.kernels.ptx.machine import LANES, Array, ByLanes, Machine, Wait, handles
from tests.kernels.ptx.parse import Address, Instruction, Operand
from tests.kernels.ptx.scalar import DTYPES, flush


def address_of(machine: Machine, ins: Instruction, operand: Operand) -> Callable[[Array], Array]:
    """A function from threads to their addresses."""
    if not isinstance(operand, Address):
        raise Unsupported(ins)
    bits = machine.declared.get(operand.base.rstrip("0123456789"), 64)
    base = machine.source(ins, operand.base, f"u{bits}")
    return lambda lanes: base[lanes].astype(np.int64) + operand.offset


def located(
    machine: Machine, ins: Instruction, operand: Operand, size: int, space: str = "shared"
) -> Callable[[Array], Array]:
    """A function from threads to the offsets in memory of `size` bytes at their addresses."""
    address = address_of(machine, ins, operand)

    def offsets(lanes: Array) -> Array:
        memory = machine.shared if space == "shared" else machine.grid.memory
        return memory.locate(ins, address(lanes), size, lanes)

    return offsets


def vector(operand: Operand) -> tuple[Operand, ...]:
    several = isinstance(operand, tuple) and not isinstance(operand, Address)
    return operand if several else (operand,)


@handles(r"ld\.param\.(b32|b64|s32)")
def load_param(machine: Machine, ins: Instruction, kind: str) -> ByLanes:
    target, operand = ins.operands
    if not isinstance(operand, Address) or operand.offset:
        raise Unsupported(ins)
    register, dtype = machine.register(str(target)), DTYPES[kind]
    param = operand.base

    def run(lanes: Array) -> None:
        value = np.array([machine.grid.args[param]], np.uint64).view(dtype)[:1]
        wide = value.astype(f"{dtype.kind}{register.itemsize}")  # signed values are sign-extended
        register[lanes] = wide.view(register.dtype)[0]

    return run


@handles(r"(ld|st)\.(global|shared)(?:::cta)?(?:\.v([24]))?\.b(\d+)")
def access(
    machine: Machine, ins: Instruction, kind: str, space: str, count: str | None, bits: str
) -> ByLanes:
    loads, width = kind == "ld", int(bits) // 8
    registers, address = ins.operands if loads else ins.operands[::-1]
    names = vector(registers)
    if len(names) != int(count or 1):
        raise Unsupported(ins)
    size = width * len(names)
    offsets = located(machine, ins, address, size, space)
    targets = [machine.register(str(x)) for x in names] if loads else []
    sources = [] if loads else [machine.source(ins, x, f"u{bits}") for x in names]

    def run(lanes: Array) -> None:
        at = offsets(lanes)
        words = (machine.shared if space == "shared" else machine.grid.memory).words[width]
        values = [source[lanes] for source in sources]

        def silent() -> Array:
            return np.all([words[at // width + i] == x for i, x in enumerate(values)], 0)

        if space == "global":
            races = machine.grid.races
            (races.read if loads else races.written_by)(ins, machine.clocks, at, size, lanes)
        elif loads:
            machine.shared.read(ins, at, size, lanes)
        else:
            machine.shared.written_by(ins, at, size, lanes, silent=silent)
        for i, target in enumerate(targets):
            target[lanes] = words[at // width + i]
        for i, value in enumerate(values):
            words[at // width + i] = value
        for i, value in enumerate(values):
            if (words[at // width + i] != value).any():
                raise Race(ins, "two threads write different values to one address")

    return run


@handles(r"mov\.(b32|b64)")
def pack(machine: Machine, ins: Instruction, kind: str) -> ByLanes:
    """Splits a register into the parts in braces, lowest first; or joins such parts."""
    target, source = ins.operands
    if isinstance(target, tuple):
        parts = [machine.target(ins, x, f"u{int(kind[1:]) // len(target)}") for x in target]
        whole = machine.source(ins, source, kind)

        def split(lanes: Array) -> None:
            pieces = whole.view(parts[0].dtype).reshape(machine.num_threads, -1)
            for i, part in enumerate(parts):
                part[lanes] = pieces[lanes, i]

        return split
    register = machine.register(str(target))
    narrow = f"u{8 * register.itemsize // len(vector(source))}"
    sources = [machine.source(ins, x, narrow) for x in vector(source)]

    def join(lanes: Array) -> None:
        register[lanes] = np.stack(sources, 1).view(register.dtype)[lanes, 0]

    return join


# -- global memory that CTAs pass to each other


@handles(r"ld\.global\.gpu\.acquire\.b32")
def acquire(machine: Machine, ins: Instruction) -> ByLanes:
    """A load that would give the same value as its last run waits until the value changes."""
    target = machine.target(ins, ins.operands[0], "b32")
    offsets = located(machine, ins, ins.operands[1], 4, "global")

    def run(lanes: Array) -> None:
        words = machine.grid.memory.words[4]
        at, *others = {int(x) // 4 for x in offsets(lanes)}
        if others:
            raise Unsupported(ins, "at several addresses")
        found = int(words[at])

        def load() -> None:
            target[lanes] = words[at]
            machine.acquired[ins, int(lanes[0])] = at, int(words[at])
            if at in machine.grid.races.released:
                machine.clocks.acquire_from_ctas(lanes, machine.grid.races.released[at])

        if machine.acquired.get((ins, int(lanes[0]))) == (at, found):
            raise Wait(ins, lambda: int(words[at]) != found, load)
        load()

    return run


@handles(r"atom\.global\.acquire\.gpu\.cas\.b32")
def compare_and_swap(machine: Machine, ins: Instruction) -> ByLanes:
    """Waits until memory has the expected value: our kernels' sanitizer takes a lock so."""
    target = machine.target(ins, ins.operands[0], "b32")
    offsets = located(machine, ins, ins.operands[1], 4, "global")
    expected, new = (machine.source(ins, x, "b32") for x in ins.operands[2:])

    def run(lanes: Array) -> None:
        words, [at, *others] = machine.grid.memory.words[4], offsets(lanes) // 4
        if others:
            raise Unsupported(ins, "by several threads")

        def swap() -> None:
            target[lanes] = words[at]
            words[at] = new[lanes][0]

        raise Wait(ins, lambda: words[at] == expected[lanes][0], swap, together=True)

    return run


UPDATE = r"(relaxed\.add|release\.add|release\.exch|acq_rel\.exch)"


@handles(rf"(?:atom|red)\.global\.gpu\.{UPDATE}(?:\.v4)?\.(f32|u32|b32)")
def atomic(machine: Machine, ins: Instruction, operation: str, kind: str) -> ByLanes:
    """Updates memory at one address per thread; subnormal floats become zeros.

    `red` does not return what was there.
    """
    *results, address, values = ins.operands
    targets = [machine.target(ins, x, kind) for result in results for x in vector(result)]
    sources = [machine.source(ins, x, kind) for x in vector(values)]
    offsets = located(machine, ins, address, 4 * len(sources), "global")

    def run(lanes: Array) -> None:
        words = machine.grid.memory.words[4].view(DTYPES[kind])
        at, races = offsets(lanes), machine.grid.races
        index = at // 4
        if np.unique(index).size < index.size:
            if kind == "f32":
                raise Unsupported(ins, "by several threads at one address")
            for lane in lanes[:, None]:
                run(lane)
            return
        if kind == "f32":
            races.written_by(ins, machine.clocks, at, 4 * len(sources), lanes)
        if operation.startswith("release"):
            for lane, place in zip(lanes[:, None], index.tolist(), strict=True):
                known = machine.clocks.release_to_ctas(lane)
                races.released[place] = np.maximum(races.released.get(place, 0), known)
        for i, source in enumerate(sources):
            old, new = words[index + i], source[lanes]
            if operation.endswith("add"):
                new = flush(flush(old) + flush(new)) if kind == "f32" else old + new
            words[index + i] = new
            if targets:
                targets[i][lanes] = old

    return run


@handles(r"trap")
def trap(machine: Machine, ins: Instruction) -> ByLanes:
    def run(lanes: Array) -> None:
        raise Fault(ins, "executed")

    return run


# -- lanes of a warp


def _need_all_lanes(ins: Instruction, members: Operand) -> None:
    if members not in ("-1", "0xffffffff", "0xFFFFFFFF"):
        raise Unsupported(ins, "with a part of the lanes")


@handles(r"shfl\.sync\.(bfly|idx)\.b32")
def shuffle(machine: Machine, ins: Instruction, mode: str) -> ByLanes:
    """Reads a lane of the segment that the upper bits of operand c select, as in the ISA."""
    target = machine.target(ins, ins.operands[0], "b32")
    value, b, c = (machine.source(ins, x, "u32") for x in ins.operands[1:4])
    _need_all_lanes(ins, ins.operands[4])
    lane = machine.threads % LANES

    def run(lanes: Array) -> None:
        machine.warps(ins, lanes)
        segment, clamp, by = c >> 8 & 31, c & 31, b & 31
        most = lane & segment | clamp & ~segment
        at = lane ^ by if mode == "bfly" else lane & segment | by & ~segment
        taken = value[machine.threads - lane + np.where(at <= most, at, lane).astype(np.int64)]
        target[lanes] = taken[lanes]

    return run


LANES_TO_ONE = {"add": np.add, "min": np.minimum, "max": np.maximum}


@handles(r"redux\.sync\.(add|min|max)\.(s32|u32)")
def reduce_lanes(machine: Machine, ins: Instruction, operation: str, kind: str) -> ByLanes:
    """Gives all lanes of a warp the sum, the least, or the greatest of their values."""
    target = machine.target(ins, ins.operands[0], kind)
    value, members = (machine.source(ins, ins.operands[i], x) for i, x in ((1, kind), (2, "u32")))

    def run(lanes: Array) -> None:
        machine.warps(ins, lanes)
        if (members[lanes] != 0xFFFFFFFF).any():
            raise Unsupported(ins, "with a part of the lanes")
        values = value[lanes].reshape(-1, LANES)
        target[lanes] = np.repeat(LANES_TO_ONE[operation].reduce(values, 1), LANES)

    return run


@handles(r"elect\.sync")
def elect(machine: Machine, ins: Instruction) -> ByLanes:
    """Elects the first lane; the ISA allows any lane."""
    pair, members = ins.operands
    _need_all_lanes(ins, members)
    leader = machine.target(ins, vector(pair)[0], "b32")
    elected = machine.target(ins, vector(pair)[1], "pred")

    def run(lanes: Array) -> None:
        machine.warps(ins, lanes)
        leader[lanes] = 0
        elected[lanes] = lanes % LANES == 0

    return run


@handles(r"bar\.warp\.sync")
def warp_barrier(machine: Machine, ins: Instruction) -> ByLanes:
    _need_all_lanes(ins, ins.operands[0])
    return lambda lanes: machine.clocks.warp_barrier(machine.warps(ins, lanes))


# -- barriers of a CTA, and its registers


@handles(r"(?:bar|barrier)\.sync")
def barrier(machine: Machine, ins: Instruction) -> ByLanes:
    """Waits until enough threads have come: all of the CTA, or the count in the second operand.

    A warp that comes must know that the barrier's last use is over: else it may come to that one.
    """
    number = int(str(ins.operands[0]), 0)
    count = int(str(ins.operands[1]), 0) if len(ins.operands) == 2 else machine.num_threads

    def run(lanes: Array) -> None:
        here, warps = machine.barriers.setdefault(number, []), machine.warps(ins, lanes)
        last, when = machine.last_use.get(number, ((), ()))
        unknown = machine.clocks.seen[warps][:, last] < when
        if unknown.any():
            row, i = np.argwhere(unknown)[0]
            reported = (
                f"warp {warps[row]} may come to barrier {number} before warp {last[i]} has left"
            )
            raise Race(ins, reported)
        here.append(warps)
        arrived = np.concatenate(here)
        if len(arrived) * LANES > count:
            raise Fault(ins, f"{len(arrived) * LANES} threads come to a barrier of {count}")
        if len(arrived) * LANES == count:
            machine.clocks.barrier(arrived)
            machine.last_use[number] = arrived, machine.clocks.seen[arrived, arrived]
            # A new list tells the waiting warps that the barrier is open.
            machine.barriers[number] = []
        raise Wait(ins, lambda: machine.barriers[number] is not here, lambda: None)

    return run


@handles(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def set_registers(machine: Machine, ins: Instruction, direction: str) -> ByLanes:
    """Returns registers to the CTA's pool, or takes registers, and waits until enough are free.

    Warps of a warpgroup must make the same requests in the same order.
    """
    grows, count = direction == "inc", int(str(ins.operands[0]), 0)

    def run(lanes: Array) -> None:
        warps, owned = machine.warps(ins, lanes), machine.owned
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

        if grows:
            raise Wait(ins, fits, change)
        change()

    return run
