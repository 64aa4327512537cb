"""Step tables on the device, and launches, that the Triton backend keeps from call to call.

A plan's tiles are one tuple from call to call. By its identity a step's table is made once, and so
is a launch: the next call of that step goes to the compiled kernel with other addresses.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ring_attn.core.tiles import Tile

if TYPE_CHECKING:
    from ring_attn.kernels.launch import Launch, Repeat

A = TypeVar("A")
T = TypeVar("T")

# Number of tables, and of launches, that are kept: more than the steps of a few models.
MOST_KEPT = 1024

# Triton compiles another kernel for a tensor whose address is not a multiple of this.
ALIGNMENT = 16


class KeptLaunches:
    """Tables and launches of one backend.

    Attributes:
        tables: by the identity of the tiles and what else they are made for; kept beside the tiles,
            so that no other tuple can take over their id.
        repeats: launches, likewise.
    """

    def __init__(self) -> None:
        self.tables: OrderedDict[tuple[Any, ...], tuple[Any, Any]] = OrderedDict()
        self.repeats: dict[tuple[Any, ...], tuple[Any, Repeat]] = {}

    def table(self, tiles: Sequence[Tile], what: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """A table of the tiles, from the cache where it has one; the least used are dropped."""
        key = (id(tiles), *what)
        if key in self.tables:
            self.tables.move_to_end(key)
            found: T = self.tables[key][1]
            return found
        table = make()
        self.tables[key] = tiles, table
        if len(self.tables) > MOST_KEPT:
            self.tables.popitem(last=False)
        return table

    def run(
        self,
        call: tuple[Hashable, ...],
        inputs: Sequence[Tensor],
        others: Sequence[Tensor | None],
        make: Callable[[], Launch],
    ) -> None:
        """Runs the launch that `make` makes, or repeats the one of an equal call.

        Args:
            call: the tiles, by their identity, and what else makes a difference to the launch
                beside tensors.
            inputs: (batch, rows, heads, dim) tensors of any strides, the kernel's first arguments.
            others: its next ones; contiguous, of sizes and types that follow from the rest.
            make: a launch with those arguments.
        """
        tiles, *rest = call
        device = inputs[0].get_device()
        key = (id(tiles), *rest, device, *[(x.shape, x.stride(), x.dtype) for x in inputs])
        addresses = [0 if x is None else x.data_ptr() for x in (*inputs, *others)]
        aligned = not reduce(or_, addresses) % ALIGNMENT
        known = self.repeats.get(key) if aligned else None
        if known is not None:
            enqueue(known[1].run, addresses, device)
            return
        launch, compiled = enqueue(_first_run, make, device)
        if aligned and compiled is not None:
            from ring_attn.kernels.launch import Repeat

            self.repeats[key] = tiles, Repeat(launch, compiled, len(addresses))
            if len(self.repeats) > MOST_KEPT:
                # The thread of another device's backward may be doing the same.
                self.repeats.pop(next(iter(self.repeats)), None)


def enqueue(run: Callable[[A], T], argument: A, device: int) -> T:
    """Runs a launch on a GPU by its number; below 0 that is the CPU."""
    if device < 0:
        _warn_of_interpreter()
        return run(argument)
    if device == torch.cuda.current_device():
        return run(argument)  # a switch to where one is already takes 5 us
    with torch.cuda.device(device):
        return run(argument)


def _first_run(make: Callable[[], Launch]) -> tuple[Launch, Any]:
    """The launch, and what it returns; a search for a config needs the launch's GPU, too."""
    launch = make()
    return launch, launch.run()


@cache
def _warn_of_interpreter() -> None:
    warnings.warn(
        "backend='triton' on CPU tensors runs in Triton's interpreter: for tests, some thousand "
        "times slower than the other backends",
        stacklevel=2,
    )
