"""PTX as data: `parse` gives a kernel's parameters, registers, instructions and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from dev import ptx

# Registers that hold the place of a thread, and the size of its grid.
SPECIAL = ("%tid.x", *(f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"))


class Address(NamedTuple):
    """An address [base + offset]; in a tensor copy, also its coordinates."""

    base: str
    offset: int
    coords: tuple[Operand, ...] = ()


# A name or an immediate; a tuple for {a, b} or a|b; or an address.
Operand = str | tuple["Operand", ...] | Address


@dataclass(frozen=True)
class Instruction:
    """An instruction: the opcode with all modifiers, and operands, destinations first."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {self.text}"[:120]


@dataclass(eq=False)
class Kernel:
    """A parsed entry.

    Attributes:
        max_registers: `.maxnreg`, the most registers of a thread; 0 where it is missing.
        registers: bits by name, 1 for predicates; "%r" stands for all of `%r<n>`.
        labels: for each label, the index of the next instruction.
        targets: lists of labels for `brx.idx`, by the label of the list.
    """

    params: list[str]
    num_threads: int
    max_registers: int
    registers: dict[str, int]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)


@lru_cache(maxsize=8)
def parse(text: str) -> Kernel:
    code = ptx.parse(text)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", code.directives)
    registers = re.search(r"\.maxnreg\s+(\d+)", code.directives)
    kernel = Kernel(
        re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", code.params),
        int(threads[1]) if threads else 32,
        int(registers[1]) if registers else 0,
        dict.fromkeys(SPECIAL, 32),
    )
    places = list[int]()  # of statements among the instructions
    for ins in code.statements:
        places.append(len(kernel.instructions))
        if ins.opcode == ".reg":
            kind, names = ins.operands.split(" ", 1)
            bits = 1 if kind == ".pred" else int(kind[2:])
            kernel.registers |= {name.split("<")[0]: bits for name in names.split(", ")}
        elif ins.opcode != ".branchtargets":
            operands = _operands(ins.operands)
            one = Instruction(ins.opcode, operands, ins.guard, ins.line, ins.operands)
            kernel.instructions.append(one)
    places.append(len(kernel.instructions))
    for label, at in code.labels.items():
        kernel.labels[label] = places[at]
        if at < len(code.statements) and code.statements[at].opcode == ".branchtargets":
            kernel.targets[label] = tuple(code.statements[at].operands.split(", "))
    return kernel


@lru_cache(maxsize=1 << 16)
def _operands(text: str) -> tuple[Operand, ...]:
    return tuple(map(_operand, _split(text)))


def _split(text: str) -> Iterator[str]:
    """Splits text at the commas outside brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    if last := text[start:].strip():
        yield last


def _operand(text: str) -> Operand:
    if text[0] == "{":
        return _operands(text[1:-1])
    if text[0] == "[":
        base, *coords = _split(text[1:-1])
        name, _, offset = base.partition("+")
        inner = _operand(coords[0]) if coords else ()
        assert isinstance(inner, tuple), text
        return Address(name.strip(), int(offset or "0", 0), inner)
    return tuple(text.split("|")) if "|" in text else text
