"""Products in Triton's interpreter, whose bits are those of a row and a column wherever they lie.

The interpreter multiplies by numpy, and numpy by a BLAS. With OpenBLAS's kernels for AVX2 an
element's bits depend on where in the block the element lies and on the block's shape: so a sequence
that is cut elsewhere got other bits, on a laptop or an AMD processor, and on AVX-512 it did not.
Here every element is summed over k in order, which takes 40 us for 64 x 64 x 64 instead of 5.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
    """a (..., m, k) times b (..., k, n), each product rounded and added in the order of k.

    Args:
        a: an array of numpy, with as many dims as b.
        b: with two columns or more; of one, einsum would sum by parts.
        dtype: of the sums and products; None is that of a.
    """
    from triton.runtime.interpreter import np

    # Contiguous and of one type: only then einsum goes through k in order.
    left = np.ascontiguousarray(a, dtype)
    return np.einsum("...mk,...kn->...mn", left, np.ascontiguousarray(b, left.dtype))


@cache
def keep_order() -> None:
    """Puts such products into the interpreter, for all kernels of this process."""
    from triton.runtime.interpreter import InterpreterBuilder

    by_blas = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.itemsize == 1 or b.data.dtype.itemsize == 1:  # 8 bits need conversions
            return by_blas(self, a, b, d, *precision)
        return type(d)(matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
