"""Runs a Gluon kernel's own Python over numpy, so that what it may not do raises.

Triton has no interpreter for Gluon. `emulate` calls the function under @gluon.jit with names of its
own for `gl`, `tl`, `mbarrier` and the like. Partitions are threads of which one runs at a time;
which one is drawn at every operation on a barrier, from a seed. What it holds a kernel to:

    mbarriers    count arrivals and bytes, have phases; when nobody can go on, a Deadlock names who
                 waits for what; arrivals that are too many, or left over at the end, raise
    copies       leave NaN until the barrier that they complete is waited for
    products     have no value before the wait that covers them; left over at the end they raise
    ordering     every event has a vector clock, which arrivals hand on and waits take over. Reading
                 a buffer whose copy the reader has not waited for, and overwriting one while a
                 reader may still be at it, raise whether or not the threads met so in this run
    two proxies  stores that copies and products must see are fenced before the next arrival

Layouts are ignored, and so is the speed of anything. Products are of rounded operands, summed in
float32. Buffers are numbered in their order of allocation; barriers are, too, or have names.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as real_tl
from torch import Tensor

from ring_attn.kernels.launch import Launch

Clock = dict[str, int]
Edit = tuple[str, str, str]


class Hazard(AssertionError):
    """The kernel did what is not allowed on the device, or not in every order of events."""


class Deadlock(AssertionError):
    """No partition can go on."""


# -- values


class _Layout:
    """Stands for every layout."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.parent = self


class Block(np.ndarray):
    @property
    def type(self) -> Any:
        """Its layout is asked for, and not used."""
        return SimpleNamespace(layout=_Layout())

    def to(self, dtype: Any) -> Block:
        return self.astype(dtype)


def _block(x: Any) -> Any:
    return np.asarray(x).view(Block) if np.ndim(x) else x


@dataclass(frozen=True)
class Pointer:
    """Addresses in one tensor: offsets in elements, a number or a block of them."""

    memory: np.ndarray
    offsets: Any = 0

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offsets)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[index])

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def inside(self, mask: Any) -> tuple[Any, Any]:
        """Offsets, 0 where masked, and the mask; IndexError beyond the tensor."""
        mask = np.broadcast_to(True if mask is None else mask, np.shape(self.offsets))
        offsets = np.where(mask, self.offsets, 0)
        if np.any((offsets < 0) | (offsets >= self.memory.size)):
            raise IndexError(f"offsets to {offsets.max()} in a tensor of {self.memory.size}")
        return offsets, mask


def _load(ptr: Pointer, mask: Any = None, other: Any = None) -> Any:
    offsets, mask = ptr.inside(mask)
    if not np.ndim(offsets):
        return ptr.memory[offsets].item()
    return _block(np.where(mask, ptr.memory[offsets], other).astype(ptr.memory.dtype))


def _store(ptr: Pointer, x: Any, mask: Any = None) -> None:
    offsets, mask = ptr.inside(mask)
    x = np.broadcast_to(x, np.shape(offsets))
    if x.dtype != ptr.memory.dtype:
        raise TypeError(f"a store of {x.dtype} to {ptr.memory.dtype}")
    ptr.memory[offsets[mask]] = x[mask]


def _fma(a: Any, b: Any, c: Any) -> Any:
    wide = np.float64
    return _block((np.asarray(a, wide) * np.asarray(b, wide) + np.asarray(c, wide)).astype("f4"))


def _where(condition: Any, a: Any, b: Any) -> Any:
    return _block(np.where(condition, a, b))


def _either(scalar: Callable[..., Any], block: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(a: Any, b: Any) -> Any:
        return _block(block(a, b)) if np.ndim(a) or np.ndim(b) else scalar(a, b)

    return chosen


# -- events


@dataclass
class _Partition:
    """A thread, what it knows to have happened, and what it has under way."""

    name: str
    clock: Clock = field(default_factory=dict)
    blocked: Callable[[], bool] | None = None
    waits_for: str = ""
    products: list[Product] = field(default_factory=list)
    unfenced: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    finished: bool = False

    def tick(self) -> tuple[str, int]:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def knows(self, event: tuple[str, int]) -> bool:
        """Whether an event lies before all that this partition does from here on."""
        return self.clock.get(event[0], 0) >= event[1]

    def learn(self, clock: Clock) -> None:
        _join(self.clock, clock)


def _join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class _Memory:
    """A buffer: who wrote it last, and who reads it since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: tuple[str, int] | None = None
        self.reads: list[Read] = []

    def read(self, reader: _Partition) -> Read:
        """Starts a read; its end is set later."""
        if self.written is None or not reader.knows(self.written):
            raise Hazard(f"{reader.name} reads {self.name} without having waited for what it holds")
        self.reads.append(Read(reader.name))
        return self.reads[-1]

    def overwrite(self, writer: _Partition, event: tuple[str, int]) -> None:
        if self.written is not None and not writer.knows(self.written):
            raise Hazard(f"{writer.name} overwrites {self.name}, which is still being written")
        for read in self.reads:
            if read.end is None or not writer.knows(read.end):
                raise Hazard(f"{writer.name} overwrites {self.name}, which {read.reader} may read")
        self.written, self.reads = event, []


@dataclass
class Read:
    """A read, and the event that ended it."""

    reader: str
    end: tuple[str, int] | None = None


@dataclass
class Buffer:
    machine: Machine
    memory: _Memory
    data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def _view(self, data: np.ndarray) -> Buffer:
        if not np.shares_memory(data, self.data):
            raise Hazard(f"{self.memory.name} cannot be viewed so")
        return Buffer(self.machine, self.memory, data)

    def reshape(self, shape: Sequence[int]) -> Buffer:
        """Another shape of the same elements."""
        return self._view(self.data.reshape(shape))

    def permute(self, order: Sequence[int]) -> Buffer:
        return self._view(self.data.transpose(order))

    def index(self, index: int) -> Buffer:
        return self._view(self.data[index])

    def load(self, layout: object) -> Block:
        partition = self.machine.current
        self.memory.read(partition).end = partition.tick()
        return _block(self.data.copy())

    def store(self, x: Block) -> None:
        """Overwrites it, by the partition itself."""
        partition = self.machine.current
        self.memory.overwrite(partition, partition.tick())
        partition.unfenced = True
        self.data[...] = x


class Pieces:
    """A block (1, rows, 1, dims) as it lies in shared memory: pieces of 8 rows x 64 dims."""

    def __init__(self, buffer: Buffer, shape: Sequence[int]) -> None:
        _, rows, _, dims = buffer.shape
        if list(shape) != [rows * dims // 512, 8, 64]:
            raise Hazard(f"{buffer.memory.name} {buffer.shape} seen as {tuple(shape)}")
        self.buffer = buffer
        self.grid = buffer.data.reshape(rows // 8, 8, dims // 64, 64).transpose(2, 0, 1, 3)

    def index(self, index: int) -> Buffer:
        """One piece; those of the first 64 dims come first."""
        return self.buffer._view(self.grid[divmod(index, self.grid.shape[1])])


class Buffers:
    def __init__(self, machine: Machine, name: str, dtype: Any, shape: Sequence[int]) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._buffers = [
            Buffer(machine, _Memory(f"{name}[{i}]"), np.full(shape[1:], np.nan, dtype))
            for i in range(shape[0])
        ]

    def index(self, index: int) -> Buffer:
        return self._buffers[index]


@dataclass
class _Copy:
    name: str
    buffer: Buffer
    source: np.ndarray


class Barrier:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[_Copy] = []
        self.clock: Clock = {}
        self.completed: Clock = {}

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, more_bytes: int = 0) -> None:
        """An arrival, which hands on what the partition knows."""
        partition = self.machine.current
        if partition.unfenced:
            raise Hazard(f"{partition.name} arrives at {self.name} with stores not fenced")
        if count > self.pending:
            raise Hazard(f"{partition.name} arrives at {self.name}, which waits for {self.pending}")
        partition.tick()
        _join(self.clock, partition.clock)
        self.pending -= count
        self.bytes += more_bytes
        self._complete()
        self.machine.pause()

    def wait(self, parity: int) -> None:
        """Until the phase of a parity is complete; takes over what those who arrived knew."""
        partition = self.machine.current
        partition.waits_for = f"{self.name} (parity {int(parity)}, {self.pending} arrivals missing)"
        self.machine.pause(lambda: self._passes(parity))
        partition.learn(self.completed)

    def _passes(self, parity: int) -> bool:
        # As late as possible: what does not wait for a copy must not see it.
        while self.phase & 1 == parity and self.copies:
            self._land(self.copies.pop(0))
        return self.phase & 1 != parity

    def _land(self, copy: _Copy) -> None:
        copy.buffer.data[...] = copy.source
        self.bytes -= copy.buffer.data.nbytes
        self.clock[copy.name] = 1
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            _join(self.completed, self.clock)
            self.clock = {}

    def check_idle(self) -> None:
        """Raises where a phase was begun and not completed."""
        if self.copies or self.pending != self.count or self.bytes:
            missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes missing"
            raise Hazard(f"{self.name} is left with {missing}")


class Barriers:
    def __init__(self, machine: Machine, name: str, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.barriers = [Barrier(machine, f"{name}[{i}]") for i in range(shape[0])]

    def index(self, index: int) -> Barrier:
        return self.barriers[index]


class Product:
    """An asynchronous product: nothing but a wait makes a block of it."""

    def __init__(self, machine: Machine, a: Any, b: Buffer, acc: Any, use_acc: bool) -> None:
        self.partition = machine.current
        self.operands = a, b, acc, use_acc
        self.reads = [x.memory.read(self.partition) for x in (a, b) if isinstance(x, Buffer)]
        self.value: Block | None = None
        self.partition.products.append(self)

    def finish(self) -> None:
        """Reads the operands, and is done with them."""
        a, b, acc, use_acc = self.operands
        if isinstance(acc, Product):
            acc = acc.value
        left = a.data if isinstance(a, Buffer) else a
        with np.errstate(all="ignore"):
            x = np.asarray(left, np.float32) @ np.asarray(b.data, np.float32)
            self.value = _block(x + acc if use_acc else x)
        for read in self.reads:
            read.end = self.partition.tick()

    def __getattr__(self, name: str) -> Any:
        raise Hazard(f"the result of a product is used ({name}) before a wait for it")

    def _use(self, *args: object) -> Any:
        raise Hazard("the result of a product is used before a wait for it")

    __add__ = __mul__ = __sub__ = __getitem__ = __neg__ = __lt__ = __gt__ = _use
    __array__ = _use


@dataclass
class _Descriptor:
    """A tensor in global memory that copies read."""

    array: np.ndarray
    block: list[int]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def layout(self) -> object:
        return _Layout()

    @property
    def block_type(self) -> Any:
        nbytes = int(np.prod(self.block)) * self.array.itemsize
        return SimpleNamespace(shape=self.block, nbytes=nbytes)

    def read(self, coord: Sequence[int]) -> np.ndarray:
        """A block, zero beyond the tensor."""
        block = np.zeros(self.block, self.array.dtype)
        ends = [min(c + b, n) for c, b, n in zip(coord, self.block, self.shape, strict=True)]
        if all(c < end for c, end in zip(coord, ends, strict=True)):
            part = self.array[tuple(slice(c, end) for c, end in zip(coord, ends, strict=True))]
            block[tuple(slice(0, n) for n in part.shape)] = part
        return block


# -- the machine


class _Stop(BaseException):
    """Ends a partition after another one has failed."""


class Machine:
    """One program: its shared memory, its partitions, and who runs."""

    def __init__(self, program: int, seed: int, names: Sequence[str]) -> None:
        self.program = program
        self.names = names
        self.random = random.Random(seed)
        self.current = _Partition("kernel")
        self.partitions: list[_Partition] = []
        self.allocations: list[Barriers] = []
        self.num_buffers = self.num_copies = 0
        self.failure: BaseException | None = None
        self.switch = threading.Semaphore(0)

    def pause(self, ready: Callable[[], bool] | None = None) -> None:
        """Lets another partition run; returns when this one is drawn again, and ready."""
        partition = self.current
        if partition not in self.partitions:
            if ready is not None and not ready():
                raise Deadlock(f"{partition.name} waits for {partition.waits_for}, alone")
            return
        partition.blocked = ready
        self.switch.release()
        partition.go.acquire()
        if self.failure is not None:
            raise _Stop
        partition.blocked = None

    def specialize(self, work: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
        if not len(work) == len(warps) + 1 == len(registers) + 1:
            raise Hazard("warp_specialize wants warps and registers for every partition but one")
        names = [f"{function.__name__} {index}" for index, (function, _) in enumerate(work)]
        self.partitions = [_Partition(name, dict(self.current.clock)) for name in names]
        threads = [
            threading.Thread(target=self._run, args=(partition, *one), daemon=True)
            for partition, one in zip(self.partitions, work, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            for partition in self.partitions:
                partition.go.release()
            for thread in threads:
                thread.join()
        for barriers in self.allocations:
            for barrier in barriers.barriers:
                barrier.check_idle()

    def _run(self, partition: _Partition, function: Callable[..., None], args: Any) -> None:
        partition.go.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    function(*args)
                if partition.products:
                    raise Hazard(f"{partition.name} ends with a product not waited for")
        except _Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        partition.finished = True
        self.switch.release()

    def _schedule(self) -> None:
        while not all(partition.finished for partition in self.partitions):
            waiting = [partition for partition in self.partitions if not partition.finished]
            ready = [one for one in waiting if one.blocked is None or one.blocked()]
            if not ready:
                texts = "; ".join(f"{one.name} waits for {one.waits_for}" for one in waiting)
                self.failure = Deadlock(texts)
                raise self.failure
            self.current = self.random.choice(ready)
            self.current.go.release()
            self.switch.acquire()
            if self.failure is not None:
                raise self.failure

    # What the kernel calls.

    def allocate(self, dtype: Any, shape: Sequence[int], layout: object) -> Any:
        """Shared memory; 64-bit integers are barriers."""
        if dtype is np.int64:
            number = len(self.allocations)
            name = self.names[number] if number < len(self.names) else f"barriers {number}"
            self.allocations.append(Barriers(self, name, shape))
            return self.allocations[-1]
        self.num_buffers += 1
        return Buffers(self, f"buffers {self.num_buffers - 1}", dtype, shape)

    def copy(self, desc: _Descriptor, coord: Sequence[int], barrier: Barrier, buffer: Any) -> None:
        self.num_copies += 1
        name = f"copy {self.num_copies}"
        buffer.memory.overwrite(self.current, (name, 1))
        buffer.data[...] = np.nan
        barrier.copies.append(_Copy(name, buffer, desc.read(coord)))
        self.pause()

    def product(
        self, a: Any, b: Buffer, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        """Starts a product; one that is not asynchronous is also waited for."""
        product = Product(self, a, b, acc, use_acc)
        return product if is_async else self.wait_for_products(0, [product])

    def wait_for_products(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        """Products come to their ends in order; those that have become blocks."""
        products = self.current.products
        while len(products) > num_outstanding:
            products.pop(0).finish()
        done = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
        return done[0] if len(done) == 1 else done

    def fence(self) -> None:
        """Orders this partition's stores before what copies and products do later."""
        self.current.unfenced = False

    def assembly(self, text: str, *args: object, **kwargs: object) -> int:
        """The one instruction that is known."""
        if text != "mov.u32 $0, %ctaid.x;":
            raise NotImplementedError(text)
        return self.program


# -- names of a kernel's module


def _language(machine: Machine) -> Any:
    """What stands for `gl` and `tl`."""
    layouts = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout")
    return SimpleNamespace(
        **dict.fromkeys((*layouts, "NVMMASharedLayout"), _Layout),
        float16=np.float16,
        float32=np.float32,
        int32=np.int32,
        int64=np.int64,
        static_range=range,
        program_id=lambda axis: machine.program,
        inline_asm_elementwise=machine.assembly,
        allocate_shared_memory=machine.allocate,
        warp_specialize=machine.specialize,
        load=_load,
        store=_store,
        arange=lambda start, stop, layout=None: _block(np.arange(start, stop)),
        full=lambda shape, value, dtype, layout=None: _block(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype, layout=None: _block(np.zeros(shape, dtype)),
        zeros_like=lambda x: _block(np.zeros_like(x)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        cast=lambda x, dtype: x,
        minimum=_either(min, np.minimum),
        maximum=_either(max, np.maximum),
        max=lambda x, axis: _block(np.max(x, axis)),
        sum=lambda x, axis: _block(np.sum(x, axis, dtype=x.dtype)),
        cdiv=lambda x, y: -(-x // y),
        where=_where,
        exp2=lambda x: _block(np.exp2(np.asarray(x, np.float32))),
        log2=lambda x: _block(np.log2(x)),
        fma=_fma,
    )


class _Namespace:
    """The globals of the functions that are emulated, each made once."""

    def __init__(self, machine: Machine, edits: Iterable[Edit]) -> None:
        language = _language(machine)
        self.edits = list(edits)
        self.made: dict[int, Any] = {}
        barriers = SimpleNamespace(
            MBarrierLayout=_Layout,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
            arrive=lambda barrier, count=1: barrier.arrive(count),
            wait=lambda barrier, parity: barrier.wait(parity),
        )
        self.names = {
            "gl": language,
            "tl": language,
            "mbarrier": barriers,
            "start_copy": machine.copy,
            "reinterpret": lambda buffer, dtype, shape, layout: Pieces(buffer, shape),
            "fence_async_shared": machine.fence,
            "warpgroup_mma": machine.product,
            "warpgroup_mma_wait": machine.wait_for_products,
        }

    def function(self, jit: Any) -> Callable[..., Any]:
        """The Python function of a jit function, over these names."""
        if id(jit) not in self.made:
            fn = jit.fn
            names: dict[str, Any] = {"__builtins__": __builtins__}
            edits = [edit[1:] for edit in self.edits if edit[0] == fn.__name__]
            code = _edited(fn, edits) if edits else fn.__code__
            self.made[id(jit)] = FunctionType(code, names, fn.__name__, fn.__defaults__)
            for name in _names_in(code):
                if name in self.names:
                    names[name] = self.names[name]
                elif name in fn.__globals__:
                    names[name] = self._value(fn.__globals__[name])
        return self.made[id(jit)]

    def _value(self, x: Any) -> Any:
        if isinstance(x, real_tl.constexpr):
            return x.value
        return self.function(x) if hasattr(x, "fn") else x


def _names_in(code: Any) -> set[str]:
    inner = (c for c in code.co_consts if hasattr(c, "co_names"))
    return set(code.co_names).union(*map(_names_in, inner))


def _edited(fn: Any, edits: Sequence[tuple[str, str]]) -> CodeType:
    """The code of a function in whose source texts stand for others."""
    source = textwrap.dedent(inspect.getsource(fn))
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} stands {source.count(old)} times in {fn.__name__}")
        source = source.replace(old, new)
    # Only the function's code is taken out: decorators and annotations are not evaluated.
    module = compile(source, fn.__code__.co_filename, "exec", annotations.compiler_flag)
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == fn.__name__)


def emulate(
    launch: Launch, *, seed: int = 0, edits: Iterable[Edit] = (), names: Sequence[str] = ()
) -> None:
    """Runs a launch over the CPU tensors of its arguments.

    Args:
        launch: of a Gluon kernel.
        seed: of the order in which partitions run.
        edits: (function, text, other text): faults that are planted into the kernel's source.
        names: of the kernel's barriers, in their order of allocation.

    Raises:
        Hazard, Deadlock: as the module says.
    """
    edits = list(edits)
    args = {name: _argument(x) for name, x in launch.args.items()}
    for program in range(launch.grid[0]):
        machine = Machine(program, seed + program, names)
        kernel = _Namespace(machine, edits).function(launch.kernel)
        kernel(**args, **launch.constants)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(_flat(x))
    if hasattr(x, "block_shape"):
        array = torch.as_strided(x.base.detach(), x.shape, x.strides).numpy()
        return _Descriptor(array, list(x.block_shape))
    return x


def _flat(x: Tensor) -> np.ndarray:
    if not x.is_contiguous():
        raise ValueError("pointers are emulated for contiguous tensors")
    return x.detach().view(-1).numpy()
