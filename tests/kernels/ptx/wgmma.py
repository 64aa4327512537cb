"""`wgmma`: products of a warpgroup; descriptors describe the operands in shared memory.

A product is computed at once, but until a wait for its group it is a fault to touch its registers
(`Machine.is_pending`) or to write the shared memory that it reads (`races`). Products are exact and
added up in float32. Each warp holds 16 of the 64 rows of D, as fragments (see `matrix`).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ring_attn.kernels.interpreter import matmul
from tests.kernels.ptx.access import vector
from tests.kernels.ptx.bulk import CHUNK, swizzle
from tests.kernels.ptx.faults import Fault, Unsupported
from tests.kernels.ptx.machine import Array, Machine, Run, Where, handles
from tests.kernels.ptx.matrix import accumulators, fragments, halves_to_f32, to_accumulators
from tests.kernels.ptx.parse import Instruction, Operand

THREADS = 128
DEPTH = 16
# Bytes of a swizzled row, as bits 62 and 63 of a descriptor state, and elements of the row.
WIDTH, ELEMENTS = 128, 64


@lru_cache(maxsize=4096)
def offsets(descriptor: int, rows: int, transposed: bool) -> tuple[Array, Array]:
    """Addresses of the elements (rows, DEPTH) that a descriptor describes, and of their chunks.

    See the ISA, "Matrix descriptor" and "Strides". Rows are M or N; a group is 8 swizzled rows of
    bytes. If K is contiguous (not transposed), a group has 8 rows of the matrix, and the stride
    offset leads to the next group. Else a group has 8 steps of K, the stride offset leads to the
    next 8 steps, and the leading offset to the next rows of the matrix.
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)[None, :]
    if transposed:
        at = row // ELEMENTS * leading + row % ELEMENTS * 2 + k % 8 * WIDTH + k // 8 * stride
    else:
        at = row // 8 * stride + row % 8 * WIDTH + k * 2
    address = swizzle(start + at)
    return address, np.unique(address // CHUNK * CHUNK)


@handles(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)")
def multiply(machine: Machine, ins: Instruction) -> Run:
    kind = ins.opcode.split(".")[-1]
    d, a, b, scale_d, *numbers = ins.operands
    in_registers = isinstance(a, tuple)
    signs, transposed = numbers[:2], [x == "1" for x in numbers[2:]]
    if signs != ["1", "1"] or len(transposed) != 2 - in_registers:
        raise Unsupported(ins)
    names = vector(d)
    cols = 2 * len(names)
    if f"n{cols}k" not in ins.opcode:
        raise Fault(ins, f"{len(names)} registers")
    targets = [machine.target(ins, x, "f32") for x in names]
    of_a = [machine.source(ins, x, "b32") for x in a] if in_registers else []
    first = None if in_registers else machine.source(ins, a, "u64")
    second = machine.source(ins, b, "u64")
    adds = machine.source(ins, scale_d, "pred")
    _need_fence(machine, ins, {*names, *(a if in_registers else ())})

    def matrix(descriptors: Array, rows: int, transposed: bool, group: int) -> Array:
        threads = slice(group * THREADS, (group + 1) * THREADS)
        known = np.unique(descriptors[threads])
        if known.size != 1 or int(known[0]) >> 62 != 1 or int(known[0]) >> 49 & 7:
            raise Unsupported(ins, f"with descriptors {known}")
        address, chunks = offsets(int(known[0]), rows, transposed)
        at = machine.shared.locate(ins, chunks, CHUNK, np.full(chunks.shape, threads.start))
        machine.shared.multiplied(ins, at, group)
        words = machine.shared.words[2][(address - machine.shared.base) // 2]
        return halves_to_f32(words, kind)

    def run(where: Where) -> None:
        for group in _groups(machine, ins, where):
            threads = slice(group * THREADS, (group + 1) * THREADS)
            mine = np.zeros(machine.num_threads, np.bool_)
            mine[threads] = True
            for name in a if in_registers else ():
                if machine.is_pending(name, mine, changed=False):
                    raise Fault(ins, f"{name} belongs to a wgmma that has not been waited for")
            if first is None:
                left = fragments([x[threads] for x in of_a], kind).reshape(-1, DEPTH)
            else:
                left = matrix(first, 64, transposed[0], group)
            product = matmul(left, matrix(second, cols, transposed[-1], group).T)
            if adds[threads].all():
                product += accumulators([x[threads] for x in targets]).reshape(64, cols)
            elif adds[threads].any():
                raise Fault(ins, "threads differ in scale-d")
            values = to_accumulators(product.reshape(4, DEPTH, cols))
            for target, value in zip(targets, values, strict=True):
                target[threads] = value
            _note(machine, machine.pending, names, group)
            _note(machine, machine.pending_reads, a if in_registers else (), group)

    return run


def _note(
    machine: Machine, pending: dict[str, Array], names: tuple[Operand, ...], group: int
) -> None:
    for name in map(str, names):
        last = pending.setdefault(name, np.zeros(machine.num_warps, np.int32))
        warps = slice(4 * group, 4 * group + 4)
        last[warps] = machine.clocks.product_groups[warps] + 1


def _groups(machine: Machine, ins: Instruction, where: Where) -> list[int]:
    warps = machine.warps(ins, where)
    groups = np.unique(warps // 4)
    if len(warps) != 4 * len(groups):
        raise Fault(ins, "executed by a part of a warpgroup")
    return [int(group) for group in groups]


def _need_fence(machine: Machine, ins: Instruction, names: set[Operand]) -> None:
    """Raises unless, in the same block, a wgmma.fence follows other changes of the registers."""
    for before in reversed(machine.block.instructions[:-1]):
        if before.opcode == "wgmma.fence.sync.aligned":
            return
        changed = set(vector(before.operands[0])) if before.operands else set()
        if not before.opcode.startswith("wgmma") and changed & names:
            raise Fault(ins, f"no wgmma.fence since {before}")
    raise Fault(ins, "no wgmma.fence before it")


@handles(r"wgmma\.fence\.sync\.aligned")
def fence(machine: Machine, ins: Instruction) -> Run:
    """Does nothing: the wgmma after the fence checks for it (`_need_fence`)."""
    return lambda where: None


@handles(r"wgmma\.commit_group\.sync\.aligned")
def commit(machine: Machine, ins: Instruction) -> Run:
    def run(where: Where) -> None:
        machine.clocks.product_groups[machine.warps(ins, where)] += 1

    return run


@handles(r"wgmma\.wait_group\.sync\.aligned")
def wait(machine: Machine, ins: Instruction) -> Run:
    most = int(str(ins.operands[0]), 0)

    def run(where: Where) -> None:
        clocks = machine.clocks
        clocks.wait_products(machine.warps(ins, where), most)
        for pending in (machine.pending, machine.pending_reads):
            for name in [x for x, last in pending.items() if (last <= clocks.products_done).all()]:
                del pending[name]

    return run
