"""Products in Triton's interpreter, whose bits are those of a row and a column wherever they lie.

The interpreter multiplies by numpy, and numpy by a BLAS. With OpenBLAS's kernels for AVX2 an
element's bits depend on where in the block the element lies and on the block's shape: so a sequence
that is cut elsewhere got other bits, on a laptop or an AMD processor, and on AVX-512 it did not.
Here every element is summed over k in order, which takes 40 us for 64 x 64 x 64 instead of 5.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def keep_order() -> None:
    """Puts such products into the interpreter, for all kernels of this process."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    by_blas = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.ndim != 2 or a.data.dtype.itemsize == 1 or b.data.dtype.itemsize == 1:
            return by_blas(self, a, b, d, *precision)
        # Contiguous, and of the accumulator's type: only then einsum goes through k in order.
        left, right = (np.ascontiguousarray(x.data, d.data.dtype) for x in (a, b))
        return type(d)(np.einsum("mk,kn->mn", left, right) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
