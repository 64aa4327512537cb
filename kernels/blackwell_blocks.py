"""Parts of the Gluon kernels for sm_100: tiles in tensor memory and their rows in memory."""

from __future__ import annotations

from inspect import signature
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_commit

from .launch import Traced

if "pred" not in signature(tcgen05_commit).parameters:
    raise ImportError("tcgen05_commit has no pred")
if not hasattr(blackwell.tensor_memory_descriptor_type, "get_reg_layout"):
    # Until triton 3.8 a function gives it.
    from triton.experimental.gluon.language.nvidia.blackwell import get_tmem_reg_layout

# Its name has had an underscore until triton 3.8.
_tile = blackwell.tensor_memory_descriptor
reinterpret_tile = getattr(_tile, "reinterpret", None) or _tile._reinterpret

# Rows of a tile, one in each lane of tensor memory.
ROWS = gl.constexpr(128)
# Columns of a sum that a warpgroup holds in registers at a time: with 32 the forward spills.
PART = gl.constexpr(16)


class Place(NamedTuple):
    """Rows of a tile of a head, and the sizes of the tensors."""

    batch: Traced
    head: Traced
    row: Traced
    row_stop: Traced
    num_rows: Traced
    num_heads: Traced


@gluon.constexpr_function
def row_layout(columns: int) -> gl.DistributedLayout:
    """The layout of (ROWS, columns) of tensor memory in registers: a row in each thread."""
    shape = [ROWS, columns]
    layout = TensorMemoryLayout(shape, col_stride=1)
    described = blackwell.tensor_memory_descriptor_type
    if not hasattr(described, "get_reg_layout"):
        return get_tmem_reg_layout(gl.float32, shape, layout, 4)
    return described(gl.float32, shape, layout, alloc_shape=shape).get_reg_layout(num_warps=4)


@gluon.jit
def as_operand(tile, start: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr):
    """A 16-bit operand (ROWS, columns) that begins at a column of a float32 tile.

    The whole tile is viewed as 16 bits, then sliced: triton 3.8 refuses to view a slice.
    """
    WIDTH: gl.constexpr = 2 * tile.shape[1]
    LAYOUT: gl.constexpr = TensorMemoryLayout([ROWS, WIDTH], col_stride=1)
    return reinterpret_tile(tile, dtype, [ROWS, WIDTH], LAYOUT).slice(2 * start, columns)


@gluon.jit
def load_tile(tile, L: gl.constexpr):
    """A float32 tile of tensor memory, in registers that nothing reads before the wait for them.

    The wait has no registers, so the compiler may move what only reads registers before it: triton
    3.7.1 packs pairs of dP' there. Instructions with effects keep their order.
    """
    x = tile.load(L)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def part_ptrs(ptr, place, FROM: gl.constexpr, HEAD_DIM: gl.constexpr, L: gl.constexpr):
    """Pointers (ROWS, PART) to the dims from FROM on of a place in (batch, rows, heads, dims)."""
    first = (place.batch * place.num_rows + place.row) * place.num_heads + place.head
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L)) * (place.num_heads * HEAD_DIM)
    dims = FROM + gl.arange(0, PART, gl.SliceLayout(0, L))
    return (ptr + gl.cast(first, gl.int64) * HEAD_DIM + rows)[:, None] + dims[None, :]
