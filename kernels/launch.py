"""A kernel launch as data: it can be run, or compiled without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from triton import knobs

from .cache_keys import fix_cache_key
from .interpreter import adapted_interpreter

# A value in a kernel while triton traces it: a tensor, a pointer, a buffer in shared memory, a
# barrier or a constant. triton has no types for them.
Traced: TypeAlias = Any


@dataclass(frozen=True)
class Launch:
    kernel: Any  # the jit function (the interpreter's where TRITON_INTERPRET=1)
    grid: tuple[int, ...]
    args: Mapping[str, Any]  # in the signature's order: tensors, descriptors, ints, floats, None
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def run(self) -> Any:
        """Enqueues the launch on the current stream; returns the compiled kernel.

        None for an empty grid, which is not launched, and in the interpreter.
        """
        if not all(self.grid):
            return None
        if knobs.runtime.interpret:
            with adapted_interpreter():
                return self._launch()
        fix_cache_key(self.kernel)
        return self._launch()

    def warmup(self) -> Any:
        """Compile the kernel for the active driver, or load it from triton's cache; return it."""
        fix_cache_key(self.kernel)
        return self.kernel.warmup(grid=self.grid, **self.args, **self.constants, **self.options)

    def _launch(self) -> Any:
        return self.kernel[self.grid](**self.args, **self.constants, **self.options)


class Repeat:
    """Repeats a launch with other tensors of the same shapes, strides and dtypes.

    At every launch triton inspects every argument to choose a compiled kernel: 40 us of the host
    for kernels with 50 arguments, more than a ring's step can spare. A repeat, in which only
    addresses change, calls the compiled kernel directly.
    """

    def __init__(self, launch: Launch, compiled: Any, num_tensors: int) -> None:
        """Repeats replace the first `num_tensors` arguments, and do not keep them alive.

        These are tensors, descriptors of tensors, or None; `compiled` is from `launch.run()`.
        """
        by_name = {**launch.args, **launch.constants}
        values = [by_name[name] for name in launch.kernel.arg_names]
        kept = values[num_tensors:]
        self.kept = [x for x in kept if isinstance(x, Tensor)]
        self._rest = [x.data_ptr() if isinstance(x, Tensor) else x for x in kept]
        self._descriptors = [
            (index, moved(x, _Address(0)))
            for index, x in enumerate(values[:num_tensors])
            if x is not None and not isinstance(x, Tensor)
        ]
        self.enqueue = compiled[(*launch.grid, 1, 1)[:3]]

    def run(self, addresses: Sequence[int]) -> None:
        """Enqueues the kernel on the current stream, for the addresses of the new tensors.

        0 stands for None. Addresses are multiples of 16 where the old ones were, since triton
        compiles another kernel for other addresses.
        """
        args: list[Any] = [*addresses, *self._rest]
        for index, descriptor in self._descriptors:
            args[index] = moved(descriptor, _Address(args[index]))
        self.enqueue(*args)


class _Address(NamedTuple):
    """Stands for a tensor of which triton needs only the address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def moved(descriptor: Any, base: _Address) -> Any:
    """A copy of a descriptor, for a tensor at another address."""
    moved = copy.copy(descriptor)
    moved.base = base
    return moved
