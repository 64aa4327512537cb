"""PTX text as data: `parse` gives a kernel's parameters, registers, instructions and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Address(NamedTuple):
    """An address [base + offset]; in a tensor copy, also its coordinates."""

    base: str
    offset: int
    coords: tuple[Operand, ...] = ()


# A name or an immediate; a tuple for {a, b} or a|b; or an address.
Operand = str | tuple["Operand", ...] | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction, of which `str` is the text.

    Attributes:
        opcode: with all modifiers, such as "add.s32".
        operands: destinations first.
        guard: the predicate after @; `negated` if there is a "!" between.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    line: int
    text: str

    def __str__(self) -> str:
        text = self.text if len(self.text) < 120 else f"{self.text[:120]} ..."
        return f"line {self.line}: {text}"


@dataclass
class Kernel:
    """A parsed entry.

    Attributes:
        max_registers: `.maxnreg`, the most registers of a thread; 0 where it is missing.
        registers: bits by name, 1 for predicates; "%r" stands for all of `%r<n>`.
        labels: for each label, the index of the next instruction.
        targets: lists of labels for `brx.idx`, by the label of the list.
    """

    params: list[str] = field(default_factory=list)
    num_threads: int = 0
    max_registers: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)


COMMENT = re.compile(r"//.*")
DIRECTIVE = re.compile(r"^[ \t]*\.(loc|file|pragma)\b.*", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)\s*([^{]*)\{")
PARAM = re.compile(r"(\w+)(?:\[\d+\])?\s*$")
LABEL = re.compile(r"([$\w]+):(?!:)")
REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", re.DOTALL)


def bits_of(kind: str) -> int:
    """Bits of a type such as "b32"."""
    return 1 if kind == "pred" else int(kind[1:])


def parse(text: str) -> Kernel:
    """Parses the only kernel of a module; ValueError for unknown syntax."""
    text = DIRECTIVE.sub("", COMMENT.sub("", text))
    head = ENTRY.search(text)
    if head is None:
        raise ValueError("no .entry")
    kernel = Kernel()
    kernel.params = [PARAM.search(x)[1] for x in head[1].split(",") if x.strip()]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head[2])
    kernel.num_threads = int(threads[1]) if threads else 32
    registers = re.search(r"\.maxnreg\s+(\d+)", head[2])
    kernel.max_registers = int(registers[1]) if registers else 0
    _parse_body(kernel, text, head.end())
    return kernel


def _parse_body(kernel: Kernel, text: str, at: int) -> None:
    """Reads statements up to the brace that closes the kernel.

    A name that is declared in inner braces gets the number of the braces, to be unique.
    """
    scopes, num_scopes = [0], 0
    line, counted = 1, 0
    local: dict[int, set[str]] = {0: set()}
    inner = re.compile(r"[A-Za-z_]\w*")

    def renamed(word: str) -> str:
        for scope in reversed(scopes):
            if scope and word in local[scope]:
                return f"{word}#{scope}"
        return word

    while True:
        while text[at].isspace() or text[at] == ";":
            at += 1
        if text[at] == "{":
            num_scopes += 1
            scopes.append(num_scopes)
            closing = text.index("}", at)  # labels may be used before their line
            local[num_scopes] = set(re.findall(r"^\s*(\w+):", text[at + 1 : closing], re.MULTILINE))
            at += 1
        elif text[at] == "}":
            scopes.pop()
            if not scopes:
                return
            at += 1
        elif label := LABEL.match(text, at):
            at = label.end()
            targets = re.match(r"\s*\.branchtargets\s+([^;]*);", text[at:])
            if targets:
                kernel.targets[label[1]] = tuple(x.strip() for x in targets[1].split(","))
                at += targets.end()
            else:
                kernel.labels[renamed(label[1])] = len(kernel.instructions)
        else:
            end = text.index(";", at)
            statement = text[at:end].strip()
            line, counted = line + text.count("\n", counted, at), at
            at = end + 1
            if register := REGISTER.match(statement):
                for name in register[2].split(","):
                    name = name.strip().split("<")[0]
                    if scopes[-1]:
                        local[scopes[-1]].add(name)
                    kernel.registers[renamed(name)] = bits_of(register[1])
            else:
                scoped = inner.sub(lambda m: renamed(m[0]), statement) if scopes[-1] else statement
                kernel.instructions.append(_instruction(scoped, line))


def _instruction(statement: str, line: int) -> Instruction:
    found = STATEMENT.match(statement)
    if found is None:
        raise ValueError(f"line {line}: {statement}")
    operands = tuple(map(_operand, _split(found[4])))
    text = " ".join(statement.split())
    return Instruction(found[3], operands, found[2], found[1] == "!", line, text)


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
        return tuple(map(_operand, _split(text[1:-1])))
    if text[0] == "[":
        base, *coords = _split(text[1:-1])
        name, _, offset = base.partition("+")
        inner = _operand(coords[0]) if coords else ()
        if not isinstance(inner, tuple):
            raise ValueError(f"not coordinates: {text}")
        return Address(name.strip(), int(offset or "0", 0), inner)
    return tuple(text.split("|")) if "|" in text else text
