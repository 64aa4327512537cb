"""A kernel launch as data: what launchers make, what runs, what is compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One launch of a @triton.jit kernel.

    Attributes:
        kernel: the jit function (the interpreter's where TRITON_INTERPRET=1).
        grid: number of programs per axis.
        args: run-time arguments by name, as in the signature: tensors, ints, floats, None.
        constants: the constexpr arguments by name.
        options: num_warps, num_stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def run(self) -> None:
        """Enqueues it on the current stream; nothing is launched for an empty grid."""
        if all(self.grid):
            self.kernel[self.grid](**self.args, **self.constants, **self.options)
