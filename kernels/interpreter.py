"""Matrix products in Triton's interpreter whose bits depend only on a row and a column.

The interpreter multiplies by numpy, and numpy by a BLAS. With OpenBLAS's kernels for AVX2 the bits
of an element also depend on its place in the block and on the block's shape. So cutting a sequence
elsewhere changed bits on a laptop and on an AMD processor, but not with AVX-512. Here every element
is summed over k in order, which takes 40 us for 64 x 64 x 64 instead of 5 us.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
    """a (..., m, k) times b (..., k, n); rounds each product and adds it in the order of k.

    b has two columns or more: for one column einsum would sum in parts.
    """
    from triton.runtime.interpreter import np

    # Only for contiguous arrays of one dtype does einsum add in the order of k.
    left = np.ascontiguousarray(a, dtype)
    return np.einsum("...mk,...kn->...mn", left, np.ascontiguousarray(b, left.dtype))


@cache
def keep_order() -> None:
    """Makes the interpreter use `matmul`, for all kernels of this process."""
    from triton.runtime.interpreter import InterpreterBuilder

    by_blas = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.itemsize == 1 or b.data.dtype.itemsize == 1:  # 8 bits need conversions
            return by_blas(self, a, b, d, *precision)
        return type(d)(matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
