"""Changes of Triton's interpreter, for our kernels only.

Matrix products: their bits depend only on a row and a column. The interpreter multiplies by numpy,
and numpy by a BLAS. With OpenBLAS's kernels for AVX2 the bits of an element also depend on its
place in the block and on the block's shape. So cutting a sequence elsewhere changed bits on a
laptop and on an AMD processor, but not with AVX-512. Here every element is summed over k in order,
which takes 40 us for 64 x 64 x 64 instead of 5 us.

Scalars: triton 3.6 converts them in a way that numpy refuses from version 2.4 on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .triton_release import RELEASE

# One launch at a time changes the interpreter, which has one state for all threads anyway.
_CHANGING = threading.Lock()


def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
    """a (..., m, k) times b (..., k, n); rounds each product and adds it in the order of k.

    b has two columns or more: for one column einsum would sum in parts.
    """
    from triton.runtime.interpreter import np

    # Only for contiguous arrays of one dtype does einsum add in the order of k.
    left = np.ascontiguousarray(a, dtype)
    return np.einsum("...mk,...kn->...mn", left, np.ascontiguousarray(b, left.dtype))


@contextmanager
def adapted_interpreter() -> Iterator[None]:
    """Change the interpreter within the context, and so for no kernel of the user."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.itemsize == 1 or b.data.dtype.itemsize == 1:  # 8 bits need conversions
            return by_blas(self, a, b, d, *precision)
        return type(d)(matmul(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with _CHANGING:
        by_blas = InterpreterBuilder.create_dot
        InterpreterBuilder.create_dot = create_dot
        patch = interpreter._patch_lang_tensor
        if RELEASE < (3, 7):
            # A scalar is an array of one dim and one element, which `int` no longer takes.
            interpreter._patch_lang_tensor = patch_tensor
        try:
            yield
        finally:
            InterpreterBuilder.create_dot = by_blas
            interpreter._patch_lang_tensor = patch
