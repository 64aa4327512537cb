"""Caches of the Triton backend: step tables on the device, and launches.

A plan passes the same tuple of tiles at every call. The identity of the tuple is the key of a
step's table and launch. These are made once; later calls run the compiled kernel with new
addresses.
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
from ring_attn.transport import capture
from ring_attn.transport.cached import Cached

if TYPE_CHECKING:
    from ring_attn.kernels.launch import Launch, Repeat

A = TypeVar("A")
T = TypeVar("T")

# Number of cached tables, and of cached launches: more than the steps of a few models.
MAX_KEPT = 1024

# Triton compiles a separate kernel for a tensor whose address is not a multiple of this.
ALIGNMENT = 16


class KeptLaunches:
    """Cached tables and launches of one backend."""

    def __init__(self) -> None:
        # A key contains the id of the tiles. An entry keeps its tiles alive, so that no other tuple
        # can get their id. A table has the type that `make` returns for its key.
        self.tables: OrderedDict[Hashable, tuple[object, Cached[Any]]] = OrderedDict()
        self.repeats: dict[Hashable, tuple[object, Cached[Repeat]]] = {}

    def table(
        self,
        tiles: Sequence[Tile],
        what: tuple[Hashable, ...],
        device: torch.device,
        make: Callable[[], T],
    ) -> T:
        """Return the cached table of the tiles, or the table that `make` returns.

        Args:
            tiles: the tiles, compared by identity.
            what: all other values on which the table depends, without the device.
            device: device of the table.
            make: makes the table, whose attributes may be tensors.
        """
        key = (id(tiles), device, *what)
        if key in self.tables:
            self.tables.move_to_end(key)
            cached: T = self.tables[key][1].get()
            return cached
        capture.refuse("a kernel's table would be copied: make the same call once before")
        table = make()
        tensors = [x for x in vars(table).values() if isinstance(x, Tensor)]
        self.tables[key] = tiles, Cached(table, tensors, device)
        if len(self.tables) > MAX_KEPT:
            self.tables.popitem(last=False)  # the least recently used
        return table

    def run(
        self,
        call: tuple[Hashable, ...],
        inputs: Sequence[Tensor],
        others: Sequence[Tensor | None],
        make: Callable[[], Launch],
    ) -> None:
        """Repeat the cached launch of an equal call, or run the launch that `make` returns.

        Args:
            call: the tiles, compared by identity, and all other values on which the launch depends,
                without tensors.
            inputs: the first arguments of the kernel, tensors with any strides.
            others: its next arguments, contiguous tensors whose shapes follow from the rest.
            make: makes a launch with these tensors.
        """
        tiles, *rest = call
        device = inputs[0].get_device()
        # A list: this runs at every launch, where a generator would cost more.
        forms = [(x.shape, x.stride(), x.dtype) for x in inputs]
        key = (id(tiles), *rest, device, *forms)
        addresses = [0 if x is None else x.data_ptr() for x in (*inputs, *others)]
        aligned = reduce(or_, addresses) % ALIGNMENT == 0
        known = self.repeats.get(key) if aligned else None
        if known is not None:
            enqueue(known[1].get().run, addresses, device)
            return
        capture.refuse(
            "a kernel would be loaded: make a call with the same shapes, strides and addresses, "
            f"multiples of {ALIGNMENT}, once before"
        )
        launch, compiled = enqueue(_first_run, make, device)
        if aligned and compiled is not None:
            from ring_attn.kernels.launch import Repeat

            repeat = Repeat(launch, compiled, len(addresses))
            # The launch has waited for its tables, so a stream that waits for the launch does, too.
            self.repeats[key] = tiles, Cached(repeat, repeat.kept, inputs[0].device)
            if len(self.repeats) > MAX_KEPT:
                # The backward of another device, in another thread, may drop the same entry.
                self.repeats.pop(next(iter(self.repeats)), None)


def enqueue(run: Callable[[A], T], argument: A, device: int) -> T:
    """Call `run(argument)` on a GPU, by its index, or on the CPU if `device` is negative."""
    if device < 0:
        warn_of_interpreter()
        return run(argument)
    if device == torch.cuda.current_device():
        return run(argument)  # a switch takes the host 5 us
    with torch.cuda.device(device):
        return run(argument)


# Triton's compiled kernel has no types; it is None in the interpreter.
def _first_run(make: Callable[[], Launch]) -> tuple[Launch, Any]:
    launch = make()  # may search for a config, for which the GPU must be the current device
    return launch, launch.run()


@cache
def warn_of_interpreter() -> None:
    warnings.warn(
        "backend='triton' on CPU tensors runs in Triton's interpreter, which is for tests and some "
        "thousand times slower than the other backends",
        stacklevel=2,
    )
