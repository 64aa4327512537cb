"""PTX as data: `parse` gives a kernel's parameters, registers, instructions and labels.

Functions follow the kernel in the same text. No function calls itself, so their registers,
parameters and results are registers of the thread like all others: "%3r1" is %r1 of the third
function, and `st.param` and `ld.param` become moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from dev import ptx

# Strings; operands of a call: result, function, and arguments; and moves of parameters.
TEXT = re.compile(r"\.global \.align 1 \.b8 (\w+)\[\d+\] = \{([\d, ]+)\};")
CALL = re.compile(r"(?:\(([\w#]+)\), )?(\w+)(?:, \(([\w#, ]*)\))?")
PARAM = re.compile(r"(st|ld)\.param(?:\.v\d)?\.([bs])(\d+)")

DIGITS = "0123456789"

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
        texts: strings in constant memory, by name.
    """

    params: list[str]
    num_threads: int
    max_registers: int
    registers: dict[str, int]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


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
    kernel.texts.update(
        (name, bytes(map(int, x.split(","))).decode()) for name, x in TEXT.findall(text)
    )
    _add(kernel, code)
    functions = ptx.parse_functions(text)
    for number, (name, (_, code)) in enumerate(functions.items(), 1):
        kernel.labels[name] = len(kernel.instructions)
        kernel.registers[f"%{name}:return"] = 32
        _add(kernel, code, str(number), f"%{name}:return")
    if functions:
        _pass_parameters(kernel, functions)
    return kernel


def _add(kernel: Kernel, code: ptx.Code, function: str = "", back: str = "") -> None:
    """Adds the instructions of the kernel or of a function.

    Args:
        function: number of the function, for the names of its registers.
        back: the register that says where it returns to.
    """

    def own(operands: str) -> str:
        return re.sub(r"%(?=[a-z]+\d)", f"%{function}", operands) if function else operands

    places = list[int]()  # of statements among the instructions
    for ins in code.statements:
        places.append(len(kernel.instructions))
        if ins.opcode == ".reg":
            kind, names = ins.operands.split(" ", 1)
            bits = 1 if kind == ".pred" else int(kind[2:])
            for name in names.split(", "):
                kernel.registers[name.split("<")[0].replace("%", f"%{function}")] = bits
        elif function and ins.opcode == "ret":
            one = Instruction("ret", (back,), own(ins.guard), ins.line, "")
            kernel.instructions.append(one)
        elif ins.opcode not in (".branchtargets", ".param"):
            text = own(ins.operands)
            called = CALL.fullmatch(text) if ins.opcode == "call.uni" else None
            operands = called.groups("") if called else _operands(text)
            one = Instruction(ins.opcode, operands, own(ins.guard), ins.line, text)
            kernel.instructions.append(one)
    places.append(len(kernel.instructions))
    for label, at in code.labels.items():
        kernel.labels[label] = places[at]
        if at < len(code.statements) and code.statements[at].opcode == ".branchtargets":
            kernel.targets[label] = tuple(code.statements[at].operands.split(", "))


def _pass_parameters(kernel: Kernel, functions: Mapping[str, tuple[str, ptx.Code]]) -> None:
    """Makes moves of `st.param` and `ld.param`: a caller writes the registers of what it calls."""
    numbers = {name: number for number, name in enumerate(functions, 1)}
    names = dict[str, str]()  # of parameters and results, each within its function
    for name, (result, code) in functions.items():
        found = [x.split("[")[0].split()[-1] for x in code.params.split(",") if x.strip()]
        names |= {x: f"{name}:{i}" for i, x in enumerate(found)}
        if result:
            names[f"{result.split('[')[0].split()[-1]}@{numbers[name]}"] = f"{name}:result"
    for ins in kernel.instructions:
        if ins.opcode == "call.uni":
            results, name, args = map(str, ins.operands)
            names |= {x: f"{name}:{i}" for i, x in enumerate(args.split(", "))}
            names[results] = f"{name}:result"
    added = [0]
    made = list[Instruction]()
    function = 0
    starts = {kernel.labels[name]: number for name, number in numbers.items()}
    for place, ins in enumerate(kernel.instructions):
        function = starts.get(place, function)
        if match := PARAM.fullmatch(ins.opcode):
            memory, values = ins.operands if match[1] == "st" else ins.operands[::-1]
            assert isinstance(memory, Address)
            name = names.get(memory.base) or names.get(f"{memory.base}@{function}")
            if name is None:  # a parameter of the kernel
                made.append(ins)
            else:
                several = values if isinstance(values, tuple) else (values,)
                for i, value in enumerate(several):
                    bits = int(match[3])
                    register = f"%{name}+{memory.offset + i * bits // 8}"
                    wide = kernel.registers.setdefault(register, bits)
                    to, source = (register, value) if match[1] == "st" else (value, register)
                    size = kernel.registers.get(str(to)) or kernel.registers[str(to).rstrip(DIGITS)]
                    kind = match[2].replace("b", "u")
                    opcode = f"mov.b{bits}" if size == bits else f"cvt.{kind}{size}.{kind}{bits}"
                    if wide < bits:  # stored as a whole, and loaded in halves
                        upper = f"%{name}+{memory.offset + (i + 1) * bits // 8 - wide // 8}"
                        kernel.registers.setdefault(upper, wide)
                        opcode, to = f"mov.b{bits}", (register, upper)
                    made.append(Instruction(opcode, (to, source), ins.guard, ins.line, ins.text))
        else:
            made.append(ins)
        added.append(len(made))
    kernel.instructions[:] = made
    for label, place in kernel.labels.items():
        kernel.labels[label] = added[place]


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
