"""Runs a parsed kernel: all threads of a CTA that stand at one instruction execute it together.

A virtual register is an array over the threads of the CTA. Threads that part at a branch become
separate groups; groups that meet at the start of a basic block merge. The group whose block comes
first in the text runs next. With a seed, a warp is drawn before every block, whose first group runs
next, and some groups part: warps of a warpgroup run apart until they meet at a barrier or a
`wgmma`, for which all four are needed. A group that waits (barrier, mbarrier) lets other groups
run; if no group can go on, a Deadlock names the waiting warps. CTAs run one after the other, or,
with a seed, a few by turns. Not checked: the code that ptxas makes of the PTX.

Before a block runs first, each of its instructions becomes a function of the mask of its threads,
by RULES (`scalar`), or of their numbers, by HANDLERS, which `access`, `copies` and `matrix` fill.
An unknown instruction is refused then. Later launches, also of a kernel into which a fault is
planted, use the functions of equal blocks again.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.blocks import BRANCH, Text, cut
from tests.kernels.ptx.faults import AssertFailed, Deadlock, Fault, NotFenced, Unsupported
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import Instruction, Kernel, Operand
from tests.kernels.ptx.races import LANES, SHARED_BASE, Clocks, GlobalRaces, SharedMemory
from tests.kernels.ptx.scalar import DTYPES, RULES, RULES_OF_THREE, Rule

Array = NDArray[Any]
# The threads that execute an instruction: True for all threads, or a mask.
Where = Any
Run = Callable[[Where], None]
# A function that executes an instruction for the numbers of one thread or more.
ByLanes = Callable[[Array], None]
Handler = Callable[..., ByLanes]

HANDLERS: list[tuple[re.Pattern[str], Handler]] = []
WARPGROUP = 128
# Below 2**32, since compilers keep addresses of parameters in 32 bits.
PARAM_BASE = 1 << 24
PARAM_SIZE = 1 << 12
TEXT_BASE = 1 << 20


def handles(pattern: str) -> Callable[[Handler], Handler]:
    """Registers the maker of the function for all opcodes that match.

    It gets the machine, the instruction, and the groups of the match.
    """

    def add(handler: Handler) -> Handler:
        HANDLERS.append((re.compile(pattern), handler))
        return handler

    return add


@dataclass(eq=False)
class Wait(Exception):
    """Ends a group's turn until `ready()`; then `done()` runs, and the group goes on.

    If it is `together`, other lanes of its warps wait, too: they meet behind the wait.
    """

    ins: Instruction
    ready: Callable[[], bool]
    done: Callable[[], None]
    missing: Callable[[], str] = str
    together: bool = False


@dataclass(eq=False)
class Group:
    """Threads that stand at the same block."""

    mask: Array
    at: int
    wait: Wait | None = None


class Block(NamedTuple):
    """A basic block: instructions, functions of all but a branch at its end, and the branch."""

    instructions: Text
    ops: list[Run]
    end: Instruction | None


# If a seed is given: CTAs that run by turns, and the share of blocks before which a group parts.
TOGETHER = 3
APART = 0.1
# Blocks that a CTA runs before the next CTA.
TURNS = 40


class Grid(NamedTuple):
    """The values that the CTAs of a launch share.

    Attributes:
        texts: the instructions of each basic block.
        places: for each label, its block.
        collective: blocks that only whole warpgroups can run.
        ctas: number of CTAs along each axis.
        args: bits of each parameter.
        tensor_maps: tensor maps of bulk copies, by parameter.
        acquiring: whether CTAs acquire knowledge from each other.
        random: draws the order of warpgroups; None for the order of the text.
        missing_fences: the first access by each instruction that lacks a proxy fence.
    """

    kernel: Kernel
    texts: list[Text]
    places: Mapping[str, int]
    collective: frozenset[int]
    ctas: tuple[int, ...]
    args: Mapping[str, int]
    memory: GlobalMemory
    races: GlobalRaces
    acquiring: bool
    shared_bytes: int
    tensor_maps: Mapping[str, Any]
    random: random.Random | None
    missing_fences: dict[Instruction, NotFenced]


class Machine:
    """The state of a CTA; it can run all kernels with the same parameters and registers."""

    def __init__(
        self, num_threads: int, params: Sequence[str], declared: Mapping[str, int]
    ) -> None:
        self.num_threads = num_threads
        self.num_warps = num_threads // LANES
        self.declared = declared
        self.threads = np.arange(self.num_threads)
        self.warp_of = self.threads // LANES
        self.registers: dict[str, Array] = {}
        self.param_addresses = {x: PARAM_BASE + i * PARAM_SIZE for i, x in enumerate(params)}
        self.symbols = {"global_smem": SHARED_BASE, **self.param_addresses}
        # For registers of pending products: the last product group of each warp that uses them.
        self.pending_reads: dict[str, Array] = {}
        self.pending: dict[str, Array] = {}
        self.blocks: dict[Text, Block] = {}
        self.by_place: dict[int, Block] = {}

    # -- operands

    def register(self, name: str) -> Array:
        """The bits of a declared register, one element per thread."""
        if name not in self.registers:
            declared = self.declared
            bits = declared[name if name in declared else name.rstrip("0123456789")]
            dtype = np.dtype(np.bool_) if bits == 1 else np.dtype(f"u{bits // 8}")
            self.registers[name] = np.zeros(self.num_threads, dtype)
        return self.registers[name]

    def source(self, ins: Instruction, operand: Operand, kind: str) -> Array:
        """An operand as elements of a type: a view of a register, or a constant."""
        dtype = DTYPES[kind]
        if not isinstance(operand, str):
            raise Unsupported(ins)
        if operand[0] == "%" or "#" in operand:
            found = self.register(operand).view(dtype)
            # The lower part of a wider register.
            return found[:: found.size // self.num_threads]
        value = self.symbols[operand] if operand in self.symbols else _constant(operand)
        if dtype == np.bool_:
            return np.full(self.num_threads, value != 0)
        bits = value & (1 << 8 * dtype.itemsize) - 1
        return np.full(self.num_threads, bits, f"u{dtype.itemsize}").view(dtype)

    def target(self, ins: Instruction, operand: Operand, kind: str) -> Array:
        """A register as elements of a type; "_" discards the result."""
        if operand == "_":
            return np.zeros(self.num_threads, DTYPES[kind])
        if not isinstance(operand, str) or operand[0] != "%" and "#" not in operand:
            raise Unsupported(ins)
        found = self.register(operand)
        if found.itemsize != DTYPES[kind].itemsize:
            raise Unsupported(ins, "width of the destination")
        return found.view(DTYPES[kind])

    def warps(self, ins: Instruction, lanes: Array) -> Array:
        """Numbers of the warps that execute; raises if only a part of a warp does."""
        counts = np.bincount(self.warp_of[lanes])
        if (counts % LANES).any():
            raise Fault(ins, "executed by a part of a warp")
        return np.flatnonzero(counts)

    # -- preparation

    def _block(self, text: Text) -> Block:
        if text not in self.blocks:
            end = text[-1] if text and BRANCH.fullmatch(text[-1].opcode) else None
            ops = list[Run]()
            for i, ins in enumerate(text[: len(text) - (end is not None)]):
                self.before = text[:i]
                ops.append(self._op(ins))
            self.blocks[text] = Block(text, ops, end)
        return self.blocks[text]

    def _op(self, ins: Instruction) -> Run:
        rules = RULES_OF_THREE if len(ins.operands) == 4 and ins.opcode in RULES_OF_THREE else RULES
        rule = rules.get(ins.opcode)
        simple = rule is not None and all(isinstance(x, str) for x in ins.operands)
        try:
            run = self._rule(ins, rule) if rule and simple else self._by_lanes(ins)
        except KeyError as error:
            raise Unsupported(ins, f"with {error}") from error
        guarded = self._guarded(ins)
        return (lambda where: run(guarded(where))) if ins.guard else run

    def _guarded(self, ins: Instruction) -> Callable[[Where], Where]:
        """A function from threads to those whose guard holds."""
        if not ins.guard:
            return lambda where: where
        guard = self.source(ins, ins.guard.removeprefix("!"), "pred")
        return (
            (lambda where: ~guard & where) if ins.guard[0] == "!" else lambda where: guard & where
        )

    def _by_lanes(self, ins: Instruction) -> Run:
        found = _handler(ins.opcode)
        if found is None:
            raise Unsupported(ins)
        handler, parts = found
        made = handler(self, ins, *parts)

        def run(where: Where) -> None:
            lanes = self.threads if where is True else np.flatnonzero(where)
            if lanes.size:
                made(lanes)

        return run

    def _rule(self, ins: Instruction, rule: Rule) -> Run:
        if len(ins.operands) != 1 + len(rule.sources):
            raise Unsupported(ins)
        target = self.target(ins, ins.operands[0], rule.result)
        sources = [
            self.source(ins, x, kind)
            for x, kind in zip(ins.operands[1:], rule.sources, strict=True)
        ]
        function = rule.function
        if isinstance(function, np.ufunc):
            return lambda where: function(*sources, out=target, where=where, casting="unsafe")
        return lambda where: np.copyto(target, function(*sources), where=where, casting="unsafe")

    # -- running

    def start(self, number: tuple[int, ...], grid: Grid) -> None:
        """Begins a CTA of a grid, by its number on each axis."""
        self.grid, self.kernel = grid, grid.kernel
        self.by_place.clear()
        for name in grid.kernel.texts:
            self.symbols.setdefault(name, TEXT_BASE + len(self.symbols))
        self.maps_by_address = {self.param_addresses[x]: y for x, y in grid.tensor_maps.items()}
        self.groups = [Group(np.ones(self.num_threads, np.bool_), 0)]
        cta = number[0] + grid.ctas[0] * (number[1] + grid.ctas[1] * number[2])
        self.clocks = Clocks(self.num_warps, grid.acquiring * math.prod(grid.ctas), cta)
        self.shared = SharedMemory(grid.shared_bytes, self.clocks, grid.missing_fences)
        self.shared.noting = grid.races.noting
        self.barriers: dict[int, list[Array]] = {}
        # For each barrier, the warps of its last use, and their clocks there.
        self.last_use: dict[int, tuple[Array, Array]] = {}
        self.mbarriers: dict[int, Any] = {}
        self.mbarrier_numbers = count()
        # For each polling load and its first thread: its last address, and the value there.
        self.acquired: dict[tuple[Instruction, int], tuple[int, int]] = {}
        # For each warp: registers per thread, and all its requests to change their number.
        self.owned = np.full(self.num_warps, self.kernel.max_registers)
        self.asked: list[list[tuple[bool, int]]] = [[] for _ in range(self.num_warps)]
        self.tensor_memory: Any = None
        self.pending.clear()
        self.pending_reads.clear()
        for register in self.registers.values():
            register.view(np.uint8)[:] = 0xFF if register.dtype != np.bool_ else 1
        self.register("%tid.x")[:] = self.threads
        for axis, at, size in zip("xyz", number, grid.ctas, strict=True):
            self.register(f"%ctaid.{axis}")[:] = at
            self.register(f"%nctaid.{axis}")[:] = size

    def ready(self) -> list[Group]:
        """The groups that can run, after groups that have met have merged."""
        by_place: dict[int, Group] = {}
        for group in list(self.groups):
            if group.wait is not None and group.wait.ready():
                group.wait.done()
                group.wait = None
            if group.wait is None:
                first = by_place.setdefault(group.at, group)
                if first is not group:
                    first.mask = first.mask | group.mask
                    self.groups.remove(group)
        found = list(by_place.values())
        for group in self.groups:
            if group.wait is not None and group.wait.together:
                warps = np.unique(self.warp_of[group.mask])
                found = [x for x in found if not np.isin(self.warp_of[x.mask], warps).any()]
        return found if self.grid.random is None else [x for x in found if self._fit(x).any()]

    def _fit(self, group: Group) -> Array:
        """The threads that can run the block of a group."""
        if group.at not in self.grid.collective:
            return group.mask
        warpgroup_of = self.threads // WARPGROUP
        whole = np.bincount(warpgroup_of, group.mask) == WARPGROUP
        return group.mask & whole[warpgroup_of]

    def run(self) -> bool:
        """Runs some blocks of the CTA; returns whether it has ended."""
        for _ in range(TURNS):
            ready = self.ready()
            if not ready:
                break
            self._turn(self._next(ready))
        if self.groups:
            return False
        for barrier in self.mbarriers.values():
            barrier.check_idle()
        if self.tensor_memory is not None and self.tensor_memory.allocated:
            raise Fault(self.kernel.instructions[-1], "tensor memory is not freed")
        for name in self.pending:
            raise Fault(self.kernel.instructions[-1], f"a wgmma for {name} is not waited for")
        return True

    def _next(self, ready: list[Group]) -> Group:
        """The group that runs next; with a seed, the rest of its threads may stay behind."""
        drawn = self.grid.random
        if drawn is None:
            return min(ready, key=lambda group: group.at)
        fit = [self._fit(group).reshape(-1, LANES).any(1) for group in ready]
        warps = np.flatnonzero(np.any(fit, 0)).tolist()
        warpgroup = drawn.choice(sorted({warp // 4 for warp in warps}))
        warp = drawn.choice([x for x in warps if x // 4 == warpgroup])
        first = min((x for x, at in zip(ready, fit, strict=True) if at[warp]), key=lambda x: x.at)
        goes = self._fit(first)
        if first.at not in self.grid.collective and drawn.random() < APART:
            some = np.array([x == warp or drawn.random() < 0.5 for x in range(self.num_warps)])
            goes = goes & some[self.warp_of]
        if (goes != first.mask).any():
            self.groups.append(Group(first.mask & ~goes, first.at))
            first.mask = goes
        return first

    def deadlock(self) -> Deadlock:
        found = [
            (np.unique(self.warp_of[x.mask]).tolist(), x.wait.ins, x.wait.missing())
            if x.wait
            else (np.unique(self.warp_of[x.mask]).tolist(), self.grid.texts[x.at][0], "")
            for x in self.groups
        ]
        texts = (f"warps {warps} at {ins}{missing}" for warps, ins, missing in found)
        return Deadlock(found[0][1], f"no thread can go on: {'; '.join(texts)}")

    def _turn(self, group: Group) -> None:
        """Runs one block of a group."""
        if group.at == len(self.grid.texts):
            self.groups.remove(group)
            return
        if group.at not in self.by_place:
            self.by_place[group.at] = self._block(self.grid.texts[group.at])
        block = self.by_place[group.at]
        where: Where = True if group.mask.all() else group.mask
        group.at += 1
        try:
            warps: Array | None = None
            for ins, op in zip(block.instructions, block.ops, strict=False):
                if self.pending and not ins.opcode.startswith("wgmma"):
                    warps = np.unique(self.warp_of[group.mask]) if warps is None else warps
                    for i, operand in enumerate(ins.operands):
                        self.check_done(ins, operand, warps, changed=i == 0)
                op(where)
        except Wait as wait:
            group.wait = wait
        if block.end is not None:
            self._branch(group, block.end)

    def check_done(
        self, ins: Instruction, operand: Operand, warps: Array, *, changed: bool = False
    ) -> None:
        """Raises if a pending product writes a register or, if it is `changed`, reads it."""
        for name in operand if isinstance(operand, tuple) else (operand,):
            for pending in (self.pending, self.pending_reads)[: 1 + changed]:
                last = pending.get(name)  # type: ignore[call-overload]
                if last is not None and (last[warps] > self.clocks.products_done[warps]).any():
                    raise Fault(ins, f"{name} belongs to a wgmma that has not been waited for")

    def _branch(self, group: Group, ins: Instruction) -> None:
        mask = self._guarded(ins)(group.mask)
        self.groups.remove(group)
        stays = group.mask & ~mask
        for taken, at in ((stays, group.at), *self._targets(ins, mask, group.at)):
            if taken.any():
                self.groups.append(Group(taken, at))
                if "__assertfail" in self.grid.texts[at][-1].operands:
                    self._turn(self.groups[-1])  # before others of its warp wait for it

    def _targets(self, ins: Instruction, mask: Array, at: int) -> Iterator[tuple[Array, int]]:
        """Yields threads, and the block to which each branch; calls return to the block `at`."""
        if ins.opcode == "brx.idx":
            index = self.source(ins, ins.operands[0], "u32")
            labels = self.kernel.targets[str(ins.operands[1])]
            if (index[mask] >= len(labels)).any():
                raise Fault(ins, f"an index of {index[mask].max()} into {len(labels)} labels")
            yield from ((mask & (index == i), self.grid.places[x]) for i, x in enumerate(labels))
        elif ins.opcode == "call.uni":
            name = str(ins.operands[1])
            if name == "__assertfail":
                reported = int(self.register("%__assertfail:0+0")[mask][0])
                text = next(x for x, address in self.symbols.items() if address == reported)
                raise AssertFailed(ins, self.kernel.texts[text])
            self.register(f"%{name}:return")[mask] = at
            yield mask, self.grid.places[name]
        elif ins.opcode == "ret" and ins.operands:
            back = self.register(str(ins.operands[0]))
            yield from ((mask & (back == x), int(x)) for x in np.unique(back[mask]))
        elif ins.opcode != "ret":
            yield mask, self.grid.places[str(ins.operands[0])]


@lru_cache(maxsize=8)
def _machines(
    num_threads: int, params: tuple[str, ...], declared: tuple[tuple[str, int], ...]
) -> list[Machine]:
    return [Machine(num_threads, params, dict(declared)) for _ in range(TOGETHER)]


@lru_cache
def _handler(opcode: str) -> tuple[Handler, tuple[str, ...]] | None:
    """The handler of an opcode, and the groups of its match."""
    for pattern, handler in HANDLERS:
        if match := pattern.fullmatch(opcode):
            return handler, match.groups()
    return None


def run_grid(
    kernel: Kernel,
    args: Mapping[str, int],
    memory: GlobalMemory,
    shared_bytes: int,
    grid: tuple[int, ...] = (1,),
    *,
    tensor_maps: Mapping[str, Any],
    seed: int | None = None,
    noting: bool = True,
) -> list[NotFenced]:
    """Runs all CTAs of a grid, a few by turns in an order that the seed draws.

    Without `noting`, races are not looked for: a sanitizer in the kernel does.

    Returns:
        The missing proxy fences, one for each instruction.
    """
    ctas = (*grid, 1, 1)[:3]
    numbers = [at[::-1] for at in product(*map(range, ctas[::-1]))]  # along axis x first
    drawn = None if seed is None else random.Random(seed)
    races = GlobalRaces(memory, noting)
    acquiring = any("release" in ins.opcode for ins in kernel.instructions)
    shared = Grid(
        kernel,
        *cut(kernel),
        ctas,
        args,
        memory,
        races,
        acquiring,
        shared_bytes,
        tensor_maps,
        drawn,
        {},
    )
    machines = _machines(kernel.num_threads, tuple(kernel.params), tuple(kernel.registers.items()))
    idle = machines[: 1 if drawn is None else TOGETHER]
    running: list[Machine] = []
    with np.errstate(all="ignore"):
        while numbers or running:
            while numbers and idle:
                running.append(idle.pop())
                running[-1].start(numbers.pop(0), shared)
            ready = [machine for machine in running if machine.ready()]
            if not ready:
                raise running[0].deadlock()
            machine = ready[0] if drawn is None else drawn.choice(ready)
            if machine.run():
                running.remove(machine)
                idle.append(machine)
    return list(shared.missing_fences.values())


def _constant(text: str) -> int:
    """The bits of an immediate."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)
