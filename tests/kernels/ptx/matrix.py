"""Matrix instructions: `ldmatrix`, `stmatrix` and `mma.sync` of a warp, `wgmma` of a warpgroup.

Layouts follow the ISA, "Matrix Fragments for mma.m16n8k16". Lane 4 g + t of a warp holds, of A,
rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; of B, half of that, with rows and
columns exchanged: column g alone; of C and D, rows g and g + 8, columns 2 t and 2 t + 1.

Products are exact; numpy adds them up in float32 in its own order, since the ISA gives none. A
`wgmma` is computed at once, but until a wait for its group it is a fault to touch its registers
(`Machine.check_done`) or to write the shared memory that it reads (`races`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ring_attn.kernels.interpreter import matmul
from tests.kernels.ptx.access import located, vector
from tests.kernels.ptx.copies import CHUNK, swizzle
from tests.kernels.ptx.faults import Fault, Unsupported
from tests.kernels.ptx.machine import LANES, WARPGROUP, Array, ByLanes, Machine, handles
from tests.kernels.ptx.parse import Instruction, Operand
from tests.kernels.ptx.scalar import bf16_to_f32

DEPTH = 16  # columns of A that a product takes
# Bytes of a swizzled row, by bits 62 and 63 of a descriptor.
WIDTHS = {1: 128, 2: 64, 3: 32}


def halves_to_f32(bits: Array, kind: str) -> Array:
    """Widens the 16-bit elements of packed registers; the last axis becomes twice as long."""
    halves = np.ascontiguousarray(bits).view(np.uint16)
    return bf16_to_f32(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def fragments(registers: Sequence[Array], kind: str) -> Array:
    """A as (warps, 16, 16), from four registers per lane; B as (warps, 8, 16), from two."""
    # Axes: (upper or lower 8 columns, 8 rows), warp, g, t, element.
    x = halves_to_f32(np.stack(registers), kind).reshape(2, len(registers) // 2, -1, 8, 4, 2)
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(x.shape[2], -1, DEPTH)


def accumulators(registers: Sequence[Array]) -> Array:
    """C as (warps, 16, columns), from four float32 per lane for every 8 columns."""
    x = np.stack(registers).reshape(-1, 2, 2, registers[0].size // LANES, 8, 4)
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(x.shape[3], 16, -1)


def to_accumulators(x: Array) -> Array:
    """The inverse of `accumulators`: (registers, threads)."""
    warps, _, cols = x.shape
    parts = x.reshape(warps, 2, 8, cols // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return parts.reshape(cols // 2, warps * LANES)


@handles(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?:bf16|f16)\.(bf16|f16)\.f32")
def multiply(machine: Machine, ins: Instruction, kind: str) -> ByLanes:
    d, a, b, c = map(vector, ins.operands)
    targets = [machine.target(ins, x, "f32") for x in d]
    of_a, of_b = ([machine.source(ins, x, "b32") for x in part] for part in (a, b))
    of_c = [machine.source(ins, x, "f32") for x in c]

    def run(lanes: Array) -> None:
        machine.warps(ins, lanes)
        product = matmul(fragments(of_a, kind), fragments(of_b, kind).mT)
        values = to_accumulators(product + accumulators(of_c))
        for target, value in zip(targets, values, strict=True):
            target[lanes] = value[lanes]

    return run


@handles(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def move_matrices(
    machine: Machine, ins: Instruction, kind: str, count: str, transposed: str | None
) -> ByLanes:
    """Loads or stores matrices; lanes 8 i to 8 i + 7 have the row addresses of matrix i.

    Lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4 of each matrix, or of column
    l // 4 if transposed.
    """
    loads, num = kind == "ld", int(count)
    registers, address = ins.operands if loads else ins.operands[::-1]
    if len(vector(registers)) != num or (transposed and not loads):
        raise Unsupported(ins)
    columns = [machine.target(ins, x, "b32") for x in vector(registers)]
    offsets = located(machine, ins, address, CHUNK)

    def run(lanes: Array) -> None:
        rows = (machine.warps(ins, lanes)[:, None] * LANES + np.arange(8 * num)).ravel()
        at = offsets(rows)
        note = machine.shared.read if loads else machine.shared.written_by
        note(ins, at, CHUNK, rows, together=True)
        words, place = machine.shared.words[2], at[:, None] // 2 + np.arange(8)
        if loads:
            found = words[place].reshape(-1, num, 8, 8)
            found = np.ascontiguousarray(found.mT if transposed else found)
            packed = found.view(np.uint32).reshape(-1, num, LANES)
            for i, column in enumerate(columns):
                column[lanes] = packed[:, i].ravel()
        else:
            packed = np.stack([x[lanes].reshape(-1, LANES) for x in columns], 1)
            words[place] = packed.view(np.uint16).reshape(-1, 8)

    return run


# -- products of a warpgroup, whose operands in shared memory descriptors describe


@lru_cache(maxsize=4096)
def operand_addresses(descriptor: int, rows: int, transposed: bool) -> tuple[Array, Array]:
    """Addresses of the elements (rows, DEPTH) that a descriptor describes, and of their chunks.

    See the ISA, "Matrix descriptor" and "Strides". Rows are M or N; a group is 8 swizzled rows of
    bytes. If K is contiguous (not transposed), a group has 8 rows of the matrix, and the stride
    offset leads to the next group. Else a group has 8 steps of K, the stride offset leads to the
    next 8 steps, and the leading offset to the next rows of the matrix.
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    width = WIDTHS[descriptor >> 62]
    elements = width // 2
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)[None, :]
    if transposed:
        at = row // elements * leading + row % elements * 2 + k % 8 * width + k // 8 * stride
    else:
        at = row // 8 * stride + row % 8 * width + k * 2
    address = swizzle(start + at, width)
    return address, np.unique(address // CHUNK * CHUNK)


@handles(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(?:bf16|f16)\.(bf16|f16)")
def multiply_async(machine: Machine, ins: Instruction, columns: str, kind: str) -> ByLanes:
    d, a, b, scale_d, *numbers = ins.operands
    names, cols = vector(d), int(columns)
    in_registers = vector(a) if isinstance(a, tuple) else ()
    signs, transposed = numbers[:2], [x == "1" for x in numbers[2:]]
    if signs != ["1", "1"] or len(transposed) != 2 - bool(in_registers):
        raise Unsupported(ins)
    if 2 * len(names) != cols:
        raise Fault(ins, f"{len(names)} registers")
    targets = [machine.target(ins, x, "f32") for x in names]
    of_a = [machine.source(ins, x, "b32") for x in in_registers]
    first = None if in_registers else machine.source(ins, a, "u64")
    second = machine.source(ins, b, "u64")
    adds = machine.source(ins, scale_d, "pred")
    _need_fence(machine, ins, {*names, *in_registers})

    def matrix(descriptors: Array, rows: int, transposed: bool, group: int) -> Array:
        known = np.unique(descriptors)
        if known.size != 1 or int(known[0]) >> 62 not in WIDTHS or int(known[0]) >> 49 & 7:
            raise Unsupported(ins, f"with descriptors {known}")
        address, chunks = operand_addresses(int(known[0]), rows, transposed)
        at = machine.shared.locate(ins, chunks, CHUNK, np.full(chunks.shape, group * WARPGROUP))
        machine.shared.multiplied(ins, at, group)
        return halves_to_f32(machine.shared.words[2][(address - machine.shared.base) // 2], kind)

    def run(lanes: Array) -> None:
        warps = machine.warps(ins, lanes)
        if (np.bincount(warps // 4) % 4).any():
            raise Fault(ins, "executed by a part of a warpgroup")
        machine.check_done(ins, in_registers, warps)
        for group in np.unique(warps // 4).tolist():
            threads = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
            if first is None:
                left = fragments([x[threads] for x in of_a], kind).reshape(-1, DEPTH)
            else:
                left = matrix(first[threads], 64, transposed[0], group)
            product = matmul(left, matrix(second[threads], cols, transposed[-1], group).T)
            if adds[threads].all():
                product += accumulators([x[threads] for x in targets]).reshape(64, cols)
            elif adds[threads].any():
                raise Fault(ins, "threads differ in scale-d")
            values = to_accumulators(product.reshape(4, DEPTH, cols))
            for target, value in zip(targets, values, strict=True):
                target[threads] = value
        for pending, used in ((machine.pending, names), (machine.pending_reads, in_registers)):
            for name in used:
                last = pending.setdefault(str(name), np.zeros(machine.num_warps, np.int32))
                last[warps] = machine.clocks.product_groups[warps] + 1

    return run


def _need_fence(machine: Machine, ins: Instruction, names: set[Operand]) -> None:
    """Raises unless, in the same block, a wgmma.fence follows other changes of the registers."""
    for before in reversed(machine.before):
        if before.opcode == "wgmma.fence.sync.aligned":
            return
        changed = set(vector(before.operands[0])) if before.operands else set()
        if not before.opcode.startswith("wgmma") and changed & names:
            raise Fault(ins, f"no wgmma.fence since {before}")
    raise Fault(ins, "no wgmma.fence before it")


@handles(r"wgmma\.fence\.sync\.aligned")
def fence(machine: Machine, ins: Instruction) -> ByLanes:
    """Does nothing: the wgmma after the fence checks for it (`_need_fence`)."""
    return lambda lanes: None


@handles(r"wgmma\.commit_group\.sync\.aligned")
def commit(machine: Machine, ins: Instruction) -> ByLanes:
    def run(lanes: Array) -> None:
        machine.clocks.product_groups[machine.warps(ins, lanes)] += 1

    return run


@handles(r"wgmma\.wait_group\.sync\.aligned")
def wait(machine: Machine, ins: Instruction) -> ByLanes:
    most = int(str(ins.operands[0]), 0)

    def run(lanes: Array) -> None:
        clocks = machine.clocks
        clocks.wait_products(machine.warps(ins, lanes), most)
        for pending in (machine.pending, machine.pending_reads):
            for name in [x for x, last in pending.items() if (last <= clocks.products_done).all()]:
                del pending[name]

    return run
