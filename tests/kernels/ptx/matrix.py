"""Matrix instructions of a warp: `ldmatrix`, `stmatrix` and `mma.sync`.

Layouts follow the ISA, "Matrix Fragments for mma.m16n8k16". Lane 4 g + t of a warp holds, of A,
rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; of B, half of that, with rows and
columns exchanged: column g alone; of C and D, rows g and g + 8, columns 2 t and 2 t + 1.

Products are exact; numpy adds them up in float32 in its own order, since the ISA gives none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ring_attn.kernels.interpreter import matmul
from tests.kernels.ptx.access import address_of, vector
from tests.kernels.ptx.faults import Unsupported
from tests.kernels.ptx.machine import LANES, Array, Machine, Run, Where, handles
from tests.kernels.ptx.parse import Instruction, Operand
from tests.kernels.ptx.scalar import bf16_to_f32

ROW_BYTES = 16
LANE = np.arange(LANES)


def halves_to_f32(bits: Array, kind: str) -> Array:
    """Widens the 16-bit elements of packed registers; the last axis becomes twice as long."""
    halves = np.ascontiguousarray(bits).view(np.uint16)
    return bf16_to_f32(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def fragments(registers: Sequence[Array], kind: str) -> Array:
    """A as (warps, 16, 16), from four registers per lane."""
    # Axes: (upper or lower 8 columns, rows), warp, g, t, element.
    x = halves_to_f32(np.stack(registers), kind).reshape(2, 2, -1, 8, 4, 2)
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)


def fragments_b(registers: Sequence[Array], kind: str) -> Array:
    """B as (warps, 16, 8), from two registers per lane."""
    x = halves_to_f32(np.stack(registers), kind).reshape(2, -1, 8, 4, 2)
    return x.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)


def accumulators(registers: Sequence[Array]) -> Array:
    """C as (warps, 16, columns), from four float32 per lane for every 8 columns."""
    x = np.stack(registers).reshape(-1, 2, 2, registers[0].size // LANES, 8, 4)
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(x.shape[3], 16, -1)


def to_accumulators(x: Array) -> Array:
    """The inverse of `accumulators`: (registers, threads)."""
    warps, _, cols = x.shape
    parts = x.reshape(warps, 2, 8, cols // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return parts.reshape(cols // 2, warps * LANES)


@handles(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32")
def multiply(machine: Machine, ins: Instruction) -> Run:
    kind = ins.opcode.split(".")[-2]
    d, a, b, c = map(vector, ins.operands)
    targets = [machine.target(ins, x, "f32") for x in d]
    of_a, of_b = ([machine.source(ins, x, "b32") for x in part] for part in (a, b))
    of_c = [machine.source(ins, x, "f32") for x in c]

    def run(where: Where) -> None:
        machine.warps(ins, where)
        product = matmul(fragments(of_a, kind), fragments_b(of_b, kind))
        for target, value in zip(
            targets, to_accumulators(product + accumulators(of_c)), strict=True
        ):
            np.copyto(target, value, where=where)

    return run


MATRICES = re.compile(
    r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x(?P<num>[124])(?P<trans>\.trans)?\.shared\.b16"
)


@handles(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")
def load_matrices(machine: Machine, ins: Instruction) -> Run:
    """Loads matrices; lanes 8 i to 8 i + 7 have the row addresses of matrix i. Lane l gets elements
    2 (l % 4) and 2 (l % 4) + 1 of row l // 4 of each matrix, or of column l // 4 if transposed."""
    num, transposed = _matrices(ins, ins.operands[0])
    targets = [machine.target(ins, x, "b32") for x in vector(ins.operands[0])]
    base, offset = address_of(machine, ins, ins.operands[1])

    def run(where: Where) -> None:
        warps = machine.warps(ins, where)
        rows, lanes = _rows(warps, num)
        at = machine.shared.locate(ins, base[rows].astype(np.int64) + offset, ROW_BYTES, rows)
        machine.shared.read(ins, at, ROW_BYTES, machine.warp_of[rows])
        words = machine.shared.words[2][at[:, None] // 2 + np.arange(8)]
        found = words.reshape(-1, num, 8, 8)
        if transposed:
            found = found.swapaxes(2, 3)
        packed = np.ascontiguousarray(found).view(np.uint32).reshape(-1, num, LANES)
        for i, target in enumerate(targets):
            target[lanes] = packed[:, i].ravel()

    return run


@handles(r"stmatrix\.sync\.aligned\.m8n8\.x[24]\.shared\.b16")
def store_matrices(machine: Machine, ins: Instruction) -> Run:
    num, _ = _matrices(ins, ins.operands[1])
    base, offset = address_of(machine, ins, ins.operands[0])
    sources = [machine.source(ins, x, "b32") for x in vector(ins.operands[1])]

    def run(where: Where) -> None:
        warps = machine.warps(ins, where)
        rows, lanes = _rows(warps, num)
        at = machine.shared.locate(ins, base[rows].astype(np.int64) + offset, ROW_BYTES, rows)
        machine.shared.written_by(ins, at, ROW_BYTES, machine.warp_of[rows])
        packed = np.stack([x[lanes].reshape(-1, LANES) for x in sources], 1)
        found = np.ascontiguousarray(packed).view(np.uint16).reshape(-1, 8)
        machine.shared.words[2][at[:, None] // 2 + np.arange(8)] = found

    return run


def _matrices(ins: Instruction, data: Operand) -> tuple[int, bool]:
    found = MATRICES.fullmatch(ins.opcode)
    if found is None or len(vector(data)) != int(found["num"]):
        raise Unsupported(ins)
    return int(found["num"]), found["trans"] is not None


def _rows(warps: Array, num: int) -> tuple[Array, Any]:
    """Threads of the warps that give row addresses, and all threads of the warps."""
    first = warps[:, None] * LANES
    return (first + np.arange(8 * num)).ravel(), (first + LANE).ravel()
