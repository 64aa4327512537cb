"""Records a device with streams: which operators use which bytes, in which order.

    recorder = Recorder()
    with recorder:
        ...                        # operators, streams, events, exchanges of one rank
    Program([recorder, ...])       # see `program`: races, and runs in any order

An operator runs when it is called, but only to give its results their sizes: the values from an
exchange are missing. The record has what a device would do: operators in the order of their
streams, and memory that is used anew as soon as it is freed. An operator that would make the host
wait for the device is an error: the host never knows how far the device has got.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ring_attn.attention import operators as ops
from ring_attn.sequence import halo as neighbours
from tests.deferred.cuda import HOME, Capture, CaptureError, Cuda, HostSyncError, Queue, Stream

# Operators that only allocate memory, and operators that would make the host wait.
ALLOCATE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
READ_ONE = {"item", "_local_scalar_dense", "is_nonzero"}
SYNCHRONISE = READ_ONE | {"nonzero", "masked_select", "equal", "_unique2"}
READ_BY_HOST = {"tolist", "numpy", "cpu", "__array__"}


class PlantedError(Exception):
    """An error that a test has planted."""


@dataclass(frozen=True)
class Ref:
    """A tensor within a memory of its rank; the offset is in bytes."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memories: Sequence[Tensor]) -> Tensor:
        whole = memories[self.memory][self.offset :]
        whole = whole[: whole.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(eq=False)
class Node:
    what: str
    after: tuple[Node, ...]  # nodes of the rank that must be done before this node starts
    reads: list[Ref]
    writes: list[Ref]
    run: Callable[[Sequence[Tensor]], object] | None = None  # None for a transfer
    stream: Queue | None = None  # None for the next user of a memory

    @property
    def touches(self) -> list[Ref]:
        return self.reads + self.writes


class Part(NamedTuple):
    ref: Ref
    peer: int


@dataclass(eq=False)
class Transfer(Node):
    communicator: str = ""
    member: int = 0  # number of this rank in the communicator
    sends: list[Part] = field(default_factory=list)
    receives: list[Part] = field(default_factory=list)
    sums: list[tuple[Ref, list[Ref]]] = field(default_factory=list)  # targets, and their parts
    aborted: bool = False  # before the host knew the transfer to be over
    cut_after: tuple[Node, ...] = ()  # nodes that the host knew to be over before the abort


@dataclass
class Memory:
    """Memory of a rank: with initial bytes, or allocated on a stream."""

    nbytes: int
    initial: np.ndarray | None
    stream: Queue | None
    on_device: bool = False  # the device's, or an operator used it with such memory
    pinned: bool = False
    lent_to: list[Queue] = field(default_factory=list)  # other streams that use it
    graph: Capture | None = None  # whose memory it is


class Recorder(TorchDispatchMode):
    """Records the work that one rank queues on its device."""

    def __init__(self, fail_at: int = 0) -> None:
        """Starts with an empty record; the operator with that number, from 1, raises."""
        super().__init__()
        self.nodes: list[Node] = []
        self.memories: list[Memory] = []
        self.results: dict[str, tuple[Ref, Node]] = {}
        self.cuda = Cuda(self)
        self.num_ops = 0  # operators on tensors of the device
        self._fail_at = fail_at
        self.ids: dict[int, int] = {}
        self.ended: list[Node] = []  # nodes that the host knows to be over
        self._kept: list[Tensor] = []
        self._active = True

    # -- which tensors are the device's

    def pinned(self, x: Tensor) -> Tensor:
        """Copies a tensor at once, on the host, for use by the device."""
        assert self.cuda.current == HOME, "pinned for another device"
        if self.cuda.capture is not None:
            raise CaptureError("memory is pinned")
        copy = torch.from_numpy(_bytes_of(x).copy()).view(x.dtype).view(x.shape)
        self.given(copy)
        self.memories[self._memory(copy)].pinned = True
        return copy

    def given(self, *tensors: Tensor) -> None:
        """Marks tensors as the device's; all others are the host's, though all are on the CPU."""
        for x in tensors:
            self.memories[self._memory(x)].on_device = True

    def _on_device(self, refs: Iterable[Ref]) -> bool:
        """Whether any of the tensors is the device's; if so, marks all of them as the device's."""
        memories = [self.memories[ref.memory] for ref in refs]
        found = any(memory.on_device for memory in memories)
        for memory in memories:
            memory.on_device = found
        return found

    def _pinned(self, refs: Iterable[Ref]) -> bool:
        return all(self.memories[ref.memory].pinned for ref in refs)

    def stop(self) -> None:
        """Ends the record: drops operators on the host's tensors, ignores memory freed later."""
        self._active = False
        count = -1
        while count != (count := sum(memory.on_device for memory in self.memories)):
            kept = {node: (node,) for node in self.nodes if self._on_device(node.touches)}
        # Successors of a removed node come after its predecessors instead.
        through = dict[Node, tuple[Node, ...]]()
        for node in self.nodes:
            node.after = tuple(dict.fromkeys(x for one in node.after for x in through[one]))
            through[node] = kept.get(node, node.after)
        self.nodes = list(kept)

    # -- entries

    def queue(self, node: Node, stream: Queue | None = None) -> None:
        """Appends a node to a stream, by default the current stream; extends `node.after`."""
        if self._on_device(node.touches):
            self.num_ops += 1
            if self.num_ops == self._fail_at:
                raise PlantedError(f"at operator {self.num_ops}, {node.what}")
        stream = node.stream = stream or self.cuda.home
        if self.cuda.capture is not None and self.cuda.capture_of(stream) is None:
            raise CaptureError(f"{node.what} is queued outside of the graph")
        node.after = tuple(dict.fromkeys((*stream.tail, *node.after, *self.ended)))
        self.nodes.append(node)
        stream.tail = (node,)

    def lend(self, x: Tensor, stream: Stream) -> None:
        """Keeps memory, once it is freed, until a stream's work of that time is over."""
        self.memories[self._memory(x)].lent_to.append(stream.queue)

    def end(self, nodes: Iterable[Node]) -> None:
        """Notes that the host knows these nodes to be over."""
        self.ended.extend(nodes)

    def result(self, name: str, x: Tensor) -> None:
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
        copy.copy_(x)
        self.given(copy)
        self.results[name] = self.ref(copy), self.nodes[-1]
        self._kept.append(copy)

    def ref(self, x: Tensor) -> Ref:
        offset = x.storage_offset() * x.element_size()
        return Ref(self._memory(x), offset, tuple(x.shape), x.stride(), x.dtype)

    def _memory(self, x: Tensor) -> int:
        """The memory of a tensor; if no operator made the tensor, its bytes are initial."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.ids:
            self._adopt(x, None)
        return self.ids[storage.data_ptr()]

    def _adopt(self, x: Tensor, stream: Queue | None) -> None:
        storage = x.untyped_storage()
        initial = _bytes_of(storage) if stream is None else None
        address, number = storage.data_ptr(), len(self.memories)
        self.memories.append(Memory(storage.nbytes(), initial, stream))
        self.memories[-1].graph = None if stream is None else self.cuda.capture
        self.ids[address] = number
        weakref.finalize(storage, self._give_back, address, number)

    def _give_back(self, address: int, number: int) -> None:
        del self.ids[address]
        memory = self.memories[number]
        capture = self.cuda.capture
        # A graph's memory is used anew only within its capture.
        if not self._active or memory.stream is None or memory.graph not in (None, capture):
            return
        # The node stands for the next user of the memory; no other node waits for it.
        node = Node(f"the next user of memory {number}", (), [], [self.whole(number)])
        node.run = _poison(number)
        queues = (memory.stream, *memory.lent_to)
        if capture is memory.graph:
            tails = [queue.tail for queue in queues]
            self.nodes.append(node)
        else:
            tails = [capture.before.get(queue, queue.tail) for queue in queues]
            self.nodes.insert(capture.first, node)
            capture.first += 1
        node.after = tuple(dict.fromkeys((*chain(*tails), *self.ended)))

    def scratch(self, like: Ref) -> Ref:
        """Allocates memory of the device for a tensor like `like`."""
        self.memories.append(Memory(like.nbytes, np.zeros(like.nbytes, np.uint8), None))
        self.memories[-1].on_device = True
        return replace(like, memory=len(self.memories) - 1, offset=0)

    def whole(self, number: int) -> Ref:
        nbytes = self.memories[number].nbytes
        return Ref(number, 0, (nbytes,), (1,), torch.uint8)

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OWN:
            with self, HostReads(self):
                return _OWN[func](*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if _has_bytes(x)]
        refs = [self.ref(x) for x in given]
        if name in SYNCHRONISE and self._on_device(refs) and not self._pinned(refs):
            raise HostSyncError(f"the host would wait for {func}")
        # Record the arguments before the call: an operator may change sizes in place.
        recorded = tree_map(lambda x: self.ref(x) if _has_bytes(x) else x, (args, kwargs))
        out = func(*args, **kwargs)
        outs = tree_leaves(out)
        fresh = [
            x for x in outs if _has_bytes(x) and x.untyped_storage().data_ptr() not in self.ids
        ]
        for x in fresh:
            if x.untyped_storage().data_ptr() not in self.ids:
                self._adopt(x, self.cuda.home)
        changed = [x for x in _written(func, args, kwargs) if _has_bytes(x)]
        writes = [self.ref(x) for x in changed]
        for x, ref in zip(changed, writes, strict=True):
            if self._pinned([ref]):  # the host never knows how far the device has got
                initial = self.memories[ref.memory].initial
                assert initial is not None
                ctypes.memmove(x.untyped_storage().data_ptr(), initial.tobytes(), initial.nbytes)
        if (not fresh and not writes) or name == "detach_":
            return out  # a view
        made = [self.ref(x) for x in fresh]
        whole = [self.whole(ref.memory) for ref in made]
        if name in ALLOCATE:
            self.queue(Node(name, (), [], whole, _poison(made[0].memory)))
            return out
        positions = [i for i, x in enumerate(outs) if any(x is one for one in fresh)]
        run = _replay(func, recorded, dict(zip(positions, made, strict=True)))
        self.queue(Node(str(func), (), refs, [*writes, *whole], run))
        return out


class HostReads(TorchFunctionMode):
    """Raises where Python reads a tensor of the device without an operator; pins memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._recorder.pinned(args[0])
        if name in READ_BY_HOST and _has_bytes(args[0]):
            memory = self._recorder.memories[self._recorder.ref(args[0]).memory]
            if memory.on_device and not memory.pinned:
                raise HostSyncError(f"the host would wait for Tensor.{name}")
        return func(*args, **(kwargs or {}))


_OWN = {
    ops.attention: ops.run_attention,
    ops.attention_backward: ops.run_attention_backward,
    torch.ops.ring_attn.halo.default: neighbours.halo_operator._init_fn,
}


def _bytes_of(x: Tensor | torch.UntypedStorage) -> np.ndarray:
    return np.frombuffer(
        ctypes.string_at(x.data_ptr(), x.nbytes() if callable(x.nbytes) else x.nbytes), np.uint8
    )


def _has_bytes(x: object) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().nbytes() > 0


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    return [
        x
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(value)
        if isinstance(x, Tensor)
    ]


def _poison(number: int) -> Callable[[Sequence[Tensor]], object]:
    return lambda memories: memories[number].fill_(0xFF)


def _replay(func: Any, recorded: Any, made: dict[int, Ref]) -> Callable[[Sequence[Tensor]], object]:
    """A function that executes a recorded operator in other memories."""

    def run(memories: Sequence[Tensor]) -> None:
        args, kwargs = tree_map_only(Ref, lambda ref: ref.of(memories), recorded)
        outs = tree_leaves(func(*args, **kwargs))
        for i, ref in made.items():
            ref.of(memories).copy_(outs[i])

    return run
