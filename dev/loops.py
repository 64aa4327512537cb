"""The loops of machine code (SASS), and the instructions of each of them without inner loops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?P<guard>@!?U?P\w+ +)?(?P<opcode>\w+)")
TARGET = re.compile(r"\.L_x_\d+")

# A jump whose condition, the same in all lanes, is an operand.
UNIFORM = re.compile(r"\bBRA\.U !?UP\d")

# After these no instruction follows, unless they have a guard or a condition.
JUMPS = {"BRA", "BRX", "JMP", "EXIT", "RET"}

SPILL = re.compile(r"\b(?:LDL|STL)\b")
PRODUCT = re.compile(r"\b(?:HGMMA|HMMA|UTC\w*MMA)\b")
EXPONENTIAL = re.compile(r"\bMUFU\.EX2\b")

# Code while a Hopper product runs: between a wait that leaves some products in flight and the next
# wait. Exponentials of the softmax in it overlap with the product.
OVERLAPPING = re.compile(
    r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9a-f].*?(?=WARPGROUP\.DEPBAR\.LE)", re.DOTALL
)


@dataclass(frozen=True)
class Loop:
    """A loop of machine code.

    Attributes:
        spills: number of loads and stores of spilled registers in a pass, without inner loops.
        products: number of instructions of the tensor cores, without inner loops.
        around: whether an inner loop has such instructions.
        exponentials: number of exponentials, without inner loops.
        exposed: number of these exponentials that do not overlap with a Hopper product.
    """

    spills: int
    products: int
    around: bool
    exponentials: int = 0
    exposed: int = 0


@dataclass(frozen=True)
class _Code:
    """Blocks of lines, each of which has one entry, and the blocks that may follow each block."""

    blocks: tuple[str, ...]
    following: Mapping[int, frozenset[int]]


def loops_of(code: str) -> tuple[Loop, ...]:
    """Return every loop of the code, outer loops before those within them."""
    parsed = _parsed(code)
    return tuple(_loops(parsed, frozenset(parsed.following)))


def _parsed(code: str) -> _Code:
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in code.splitlines():
        label = LABEL.match(line)
        if label:
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        else:
            blocks[-1].append(line)
            instruction = INSTRUCTION.search(line)
            if instruction and instruction["opcode"] in JUMPS:
                blocks.append([])
    following = {
        index: _following(index, lines, labels, len(blocks)) for index, lines in enumerate(blocks)
    }
    return _Code(tuple("\n".join(lines) for lines in blocks), following)


def _following(
    index: int, lines: list[str], labels: Mapping[str, int], num_blocks: int
) -> frozenset[int]:
    """Return the blocks to which control may go from the end of a block."""
    next_block = frozenset({index + 1} - {num_blocks})  # empty after the last block
    last = INSTRUCTION.search(lines[-1]) if lines else None
    if last is None or last["opcode"] not in JUMPS:
        return next_block
    targets = frozenset(labels[name] for name in TARGET.findall(lines[-1]))
    conditional = last["guard"] or UNIFORM.search(lines[-1])
    return targets | next_block if conditional else targets


def _loops(code: _Code, within: frozenset[int]) -> Iterator[Loop]:
    """Return the loops among some blocks, each before those within it."""
    for body in _cycles(code, within):
        # Without its entries, a loop consists of the loops within it.
        entries = {index for before in within - body for index in code.following[before] & body}
        rest = body - (entries or {min(body)})
        inner = tuple(_loops(code, rest))
        own = body.difference(*_cycles(code, rest))
        text = "\n".join(code.blocks[index] for index in sorted(own))
        yield Loop(
            spills=len(SPILL.findall(text)),
            products=len(PRODUCT.findall(text)),
            around=any(loop.products > 0 or loop.around for loop in inner),
            exponentials=len(EXPONENTIAL.findall(text)),
            exposed=len(EXPONENTIAL.findall(OVERLAPPING.sub("", text))),
        )
        yield from inner


def _cycles(code: _Code, within: frozenset[int]) -> list[frozenset[int]]:
    """Return the largest sets of blocks each of which can be reached from all others of its set."""
    reached = {index: _reached(code, index, within) for index in within}
    sets = {
        frozenset(other for other in reached[index] if index in reached[other])
        for index in within
        if index in reached[index]
    }
    return sorted(sets, key=min)


def _reached(code: _Code, index: int, within: frozenset[int]) -> set[int]:
    """Return the blocks that control may reach from the end of a block, staying within some."""
    found: set[int] = set()
    ahead = [index]
    while ahead:
        new = (code.following[ahead.pop()] & within) - found
        found |= new
        ahead += new
    return found
