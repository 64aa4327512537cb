"""Runs a few lines of PTX, for the tests of single instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.ptx import copies, wgmma  # noqa: F401  (they add their instructions)
from tests.kernels.ptx.bulk import TensorMap
from tests.kernels.ptx.machine import Machine
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import parse

Array = NDArray[Any]


@dataclass(frozen=True)
class Ran:
    """Results of a run: uint32 of (threads, words), and the number of missing fences."""

    words: Array
    missing_fences: int


def run(
    body: str,
    *,
    threads: int = 32,
    words: int = 1,
    inputs: Tensor | None = None,
    shared_bytes: int = 1 << 16,
    head: str = "",
    tensor: Tensor | None = None,
) -> Ran:
    """Runs PTX; %rd1 is the address of `words` output words of the thread, %rd2 of `inputs`.

    %r0 is the thread, and [tensor_map] describes `tensor`, which one copy takes as a whole.
    """
    out = torch.zeros(threads, words, dtype=torch.int32)
    inputs = torch.zeros(4, dtype=torch.int32) if inputs is None else inputs
    tensor = torch.zeros(16, dtype=torch.int16) if tensor is None else tensor
    text = f"""
    .visible .entry test(.param .u64 out, .param .u64 inputs, .param .u32 minus_five,
        .param .b8 tensor_map[128])
    .reqntid {threads} {head}
    {{
        .reg .pred %p<9>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b32 %f<99>;
        ld.param.b64 %rd1, [out];
        ld.param.b64 %rd2, [inputs];
        mov.u32 %r0, %tid.x;
        mad.wide.u32 %rd1, %r0, {4 * words}, %rd1;
        {body}
        ret;
    }}"""
    memory = GlobalMemory([out, inputs, tensor])
    args = {"out": memory.address(out), "inputs": memory.address(inputs), "minus_five": 2**32 - 5}
    shape, width = tensor.shape, tensor.element_size()
    tensor_map = TensorMap(memory.address(tensor), shape, tensor.stride(), width, shape, 128)
    machine = Machine(parse(text), args, memory, shared_bytes, {"tensor_map": tensor_map})
    machine.run((1,))
    memory.write_back()
    return Ran(out.numpy().view(np.uint32), len(machine.missing_fences))
