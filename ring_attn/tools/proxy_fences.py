"""Proxy fences in PTX: `missing_fences` finds the products that may read before a fence.

Products of sm_90 and sm_100 (wgmma, tcgen05.mma) read shared memory by the asynchronous proxy. What
`cp.async` or `st.shared` has written, by the generic proxy, they see after a fence.proxy.async
alone: no wait and no barrier stands for it. Bulk copies write by the asynchronous proxy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

COMMENT = re.compile(r"//.*|^[ \t]*\.(?:loc|file)\b.*", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+\w+\s*\([^)]*\)[^{]*\{")
# A label, a brace that opens or closes a scope, or a statement, whose braces hold operands.
TOKEN = re.compile(r"([$\w]+):(?!:)|([{}])|([^\s{};][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);")
STATEMENT = re.compile(r"(?P<guard>@\S+\s+)?(?P<opcode>\S+)\s*(?P<operands>.*)", re.DOTALL)

COPY = re.compile(r"cp\.async\.c[ag]\.")
COMMIT, WAIT, BULK = "cp.async.commit_group", "cp.async.wait_group", "cp.async.bulk"
STORE = re.compile(r"(st\.|stmatrix\.).*shared")
# Specialised warps are given their next task by it: what they stored before is no tile of theirs.
NEXT_TASK = "barrier.sync"
BARRIER = "bar.sync"
LOAD = re.compile(r"(ld\.|ldmatrix\.).*shared")
FENCE = re.compile(r"fence\.proxy\.async(\.shared::cta)?$")
WIDE = re.compile(r"\], (0x10|16)\b")  # a copy of 16 bytes
# A value that all threads store to one address is for specialised warps, and no tile.
ONE_ADDRESS = re.compile(r"^\[ ?global_smem\b")
# More than any kernel has under way, so that the groups of a loop without a wait have an end.
MOST_GROUPS = 32
REGISTER = re.compile(r"%\w+")
PRODUCT = re.compile(r"wgmma\.mma_async|tcgen05\.mma\.")


@dataclass(frozen=True)
class Statement:
    """An instruction; `scopes` are the braces that it stands in, outermost first.

    Of a store, `results` are the registers of the kernel that products write.
    """

    opcode: str
    operands: str
    guarded: bool
    line: int
    scopes: tuple[int, ...]
    results: frozenset[str] = frozenset()


class State(NamedTuple):
    """Facts that may hold before an instruction.

    Attributes:
        copies: of rows of a tile, since the last commit.
        groups: whether each group of copies under way has rows of a tile, the newest first.
        unfenced: lines of the stores, and of the waits for copies, since a fence.
        stored: lines of the stores since the last barrier.
        exchanged: lines of the stores between the two last barriers. If a load follows, they were
            for other threads, and no product reads them.
    """

    copies: bool = False
    groups: tuple[bool, ...] = ()
    unfenced: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    exchanged: frozenset[int] = frozenset()

    def joined(self, other: State) -> State:
        groups = zip_longest(self.groups, other.groups, fillvalue=False)
        return State(
            self.copies or other.copies,
            tuple(one or another for one, another in groups),
            self.unfenced | other.unfenced,
            self.stored & other.stored,
            self.exchanged & other.exchanged,
        )

    def after(self, ins: Statement) -> State:
        if COPY.match(ins.opcode):
            # No product reads a vector, such as lse, for which a part of the threads is enough.
            vector = ins.guarded and not WIDE.search(ins.operands)
            return self._replace(copies=self.copies or not vector)
        if ins.opcode == COMMIT:
            groups = (self.copies, *self.groups)[:MOST_GROUPS]
            return self._replace(copies=False, groups=groups)
        if ins.opcode == WAIT:
            left = int(ins.operands, 0)
            seen = {ins.line} if any(self.groups[left:]) else set()
            return self._replace(groups=self.groups[:left], unfenced=self.unfenced | seen)
        if ins.opcode.startswith("cp.async.") and not ins.opcode.startswith(BULK):
            raise ValueError(f"line {ins.line}: {ins.opcode} is not known")
        if STORE.match(ins.opcode) and not ONE_ADDRESS.search(ins.operands):
            # Sums of 32 bits as a product has left them: a product reads 16 bits.
            if {*REGISTER.findall(ins.operands.partition("]")[2])} <= ins.results:
                return self
            lines = {ins.line}
            return self._replace(unfenced=self.unfenced | lines, stored=self.stored | lines)
        if ins.opcode == NEXT_TASK:
            return State()
        if ins.opcode == BARRIER:
            return self._replace(stored=frozenset(), exchanged=self.stored)
        if LOAD.match(ins.opcode):
            return self._replace(unfenced=self.unfenced - self.exchanged)
        if FENCE.match(ins.opcode) and not ins.guarded:
            return self._replace(unfenced=frozenset())
        return self


def missing_fences(ptx: str) -> tuple[str, ...]:
    """The products that some path, loops included, reaches without a fence, in words.

    A path is that of a warp within a task: a store for another warp's product is not seen. Nor is a
    tile that is stored between the same barriers as values for other threads.
    """
    statements, successors = _parse(ptx)
    states: dict[int, State] = {0: State()}
    changed = [0]
    while changed:
        at = changed.pop()
        after = states[at].after(statements[at])
        for following in successors[at]:
            known = states.get(following)
            joined = after if known is None else known.joined(after)
            if joined != known:
                states[following] = joined
                changed.append(following)
    return tuple(
        f"line {ins.line}: {ins.opcode} without fence.proxy.async after line {max(unfenced)}"
        for at, ins in enumerate(statements)
        if PRODUCT.match(ins.opcode) and (unfenced := states.get(at, State()).unfenced)
    )


def _parse(ptx: str) -> tuple[list[Statement], list[tuple[int, ...]]]:
    """The statements of the module's one kernel, and for each those that may follow it."""
    text = COMMENT.sub("", ptx)
    entry = ENTRY.search(text)
    if entry is None:
        raise ValueError("no .entry in the PTX")
    statements = list[Statement]()
    labels: dict[tuple[int, str], int] = {}  # of a scope
    scopes, num_scopes = [0], 0
    line, counted = 1, 0
    for token in TOKEN.finditer(text, entry.end()):
        line, counted = line + text.count("\n", counted, token.start()), token.start()
        label, brace, statement = token.groups()
        if label:
            labels[scopes[-1], label] = len(statements)
        elif brace == "{":
            num_scopes += 1
            scopes.append(num_scopes)
        elif brace:
            scopes.pop()
            if not scopes:
                break
        elif found := STATEMENT.match(statement):
            operands = " ".join(found["operands"].split())
            guarded = found["guard"] is not None
            statements.append(Statement(found["opcode"], operands, guarded, line, tuple(scopes)))
    written = frozenset(
        register
        for ins in statements
        if ins.opcode.startswith("wgmma.mma_async")
        for register in REGISTER.findall(ins.operands.partition("}")[0])
    )
    statements = [
        replace(ins, results=written) if STORE.match(ins.opcode) else ins for ins in statements
    ]
    return statements, [_successors(at, statements, labels) for at in range(len(statements))]


def _successors(
    at: int, statements: list[Statement], labels: dict[tuple[int, str], int]
) -> tuple[int, ...]:
    ins = statements[at]

    def target(name: str) -> int:
        return next(labels[s, name] for s in reversed(ins.scopes) if (s, name) in labels)

    found = list[int]()
    if ins.opcode.startswith("bra"):
        found.append(target(ins.operands))
    elif ins.opcode.startswith("brx"):
        listed = statements[target(ins.operands.split(", ")[-1])]
        found += (target(name) for name in listed.operands.split(", "))
    ends = ins.opcode.startswith(("bra", "brx", "ret", "exit", "trap"))
    if ins.guarded or not ends:
        found.append(at + 1)
    return tuple(x for x in found if x < len(statements))
