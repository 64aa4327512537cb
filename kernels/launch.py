"""A kernel launch as data: it can be run, or compiled without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs

from .interpreter import keep_order


@dataclass(frozen=True)
class Launch:
    """One launch of a @triton.jit kernel.

    Attributes:
        kernel: the jit function (the interpreter's where TRITON_INTERPRET=1).
        grid: number of programs per axis.
        args: run-time arguments by name, as in the signature: tensors, descriptors, ints, floats,
            None.
        constants: the constexpr arguments by name.
        options: num_warps, num_stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def run(self) -> Any:
        """Enqueues it on the current stream; nothing is launched for an empty grid.

        Returns:
            The compiled kernel; None where nothing was launched, or by the interpreter.
        """
        if not all(self.grid):
            return None
        if knobs.runtime.interpret:
            keep_order()
        return self.kernel[self.grid](**self.args, **self.constants, **self.options)


class Repeat:
    """A launch that has been run, to be run again with other tensors of the same kind.

    Triton looks at every argument of every launch to find out which compiled kernel it takes: 40 us
    for kernels with 50 arguments, more than a ring's step has. Whoever knows that nothing has
    changed but addresses goes straight to the compiled kernel.
    """

    def __init__(self, launch: Launch, compiled: Any, num_tensors: int) -> None:
        """
        Args:
            launch: as it was run; of its tensors only those are kept that are not replaced.
            compiled: what it returned.
            num_tensors: the kernel's first arguments, which are tensors, descriptors of tensors or
                None, and replaced.
        """
        given = {**launch.args, **launch.constants}
        values = [given[name] for name in launch.kernel.arg_names]
        kept = values[num_tensors:]
        self._kept = [x for x in kept if isinstance(x, Tensor)]
        self._rest = [x.data_ptr() if isinstance(x, Tensor) else x for x in kept]
        self._descriptors = [
            (index, _moved(x, _Address(0)))
            for index, x in enumerate(values[:num_tensors])
            if x is not None and not isinstance(x, Tensor)
        ]
        self._enqueue = compiled[(*launch.grid, 1, 1)[:3]]

    def run(self, addresses: Sequence[int]) -> None:
        """Enqueues it on the current stream.

        Args:
            addresses: of the tensors that are replaced, multiples of 16 where theirs were (triton
                compiles another kernel for others); 0 for None.
        """
        args: list[Any] = [*addresses, *self._rest]
        for index, descriptor in self._descriptors:
            args[index] = _moved(descriptor, _Address(args[index]))
        self._enqueue(*args)


class _Address(NamedTuple):
    """Stands for a tensor where triton asks for its address alone."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _moved(descriptor: Any, base: _Address) -> Any:
    """A copy of a descriptor that describes another tensor."""
    moved = copy.copy(descriptor)
    moved.base = base
    return moved
