"""`cp.async`: copies of 4 to 16 bytes per thread, in groups that a warp commits and awaits.

A copy writes at once; the shadow (`races`) reports accesses to its bytes before the wait.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.access import address_of
from tests.kernels.ptx.faults import Unsupported
from tests.kernels.ptx.machine import Machine, Run, Where, handles
from tests.kernels.ptx.parse import Instruction


@handles(r"cp\.async\.(cg|ca)\.shared\.global")
def copy(machine: Machine, ins: Instruction) -> Run:
    """Writes `cp-size` bytes: the first `src-size` from the source, then zeros, as in the ISA."""
    to, to_offset = address_of(machine, ins, ins.operands[0])
    source, offset = address_of(machine, ins, ins.operands[1])
    size = int(str(ins.operands[2]), 0)
    if size not in (4, 8, 16) or (".cg." in ins.opcode and size != 16):
        raise Unsupported(ins)
    length = machine.source(ins, ins.operands[3] if len(ins.operands) == 4 else str(size), "u32")

    def run(where: Where) -> None:
        lanes = machine.lanes(where)
        taken = length[lanes]
        if not np.isin(taken, (0, size)).all():
            raise Unsupported(ins, "with a part of the bytes")
        at = machine.shared.locate(ins, to[lanes].astype(np.int64) + to_offset, size, lanes)
        machine.shared.copied(ins, at, size, machine.warp_of[lanes])
        steps = np.arange(size)
        machine.shared.bytes[at[:, None] + steps] = 0
        some = taken > 0
        read = lanes[some]
        found = machine.memory.locate(ins, source[read].astype(np.int64) + offset, size, read)
        machine.shared.bytes[at[some, None] + steps] = machine.memory.bytes[found[:, None] + steps]

    return run


@handles(r"cp\.async\.commit_group")
def commit(machine: Machine, ins: Instruction) -> Run:
    def run(where: Where) -> None:
        machine.clocks.copy_groups[machine.warps(ins, where)] += 1

    return run


@handles(r"cp\.async\.wait_group")
def wait(machine: Machine, ins: Instruction) -> Run:
    most = int(str(ins.operands[0]), 0)
    return lambda where: machine.clocks.wait_copies(machine.warps(ins, where), most)
