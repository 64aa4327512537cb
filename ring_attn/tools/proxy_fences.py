"""`missing_fences`: finds products in PTX that may read shared memory before a proxy fence.

Products of sm_90 and sm_100 (wgmma, tcgen05.mma) read shared memory through the asynchronous proxy.
`cp.async` and `st.shared` write through the generic proxy, and products see these writes only after
a fence.proxy.async; waits and barriers are not enough. Bulk copies use the asynchronous proxy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

COMMENT = re.compile(r"//.*|^[ \t]*\.(?:loc|file)\b.*", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+\w+\s*\([^)]*\)[^{]*\{")
# A label, a brace of a scope, or a statement, in which braces hold operands.
TOKEN = re.compile(r"([$\w]+):(?!:)|([{}])|([^\s{};][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);")
STATEMENT = re.compile(r"(?P<guard>@\S+\s+)?(?P<opcode>\S+)\s*(?P<operands>.*)", re.DOTALL)

COPY = re.compile(r"cp\.async\.c[ag]\.")
COMMIT, WAIT, BULK = "cp.async.commit_group", "cp.async.wait_group", "cp.async.bulk"
STORE = re.compile(r"(st\.|stmatrix\.).*shared")
# It gives specialised warps their next task, which reads no tile that they stored before.
NEXT_TASK = "barrier.sync"
BARRIER = "bar.sync"
LOAD = re.compile(r"(ld\.|ldmatrix\.).*shared")
FENCE = re.compile(r"fence\.proxy\.async(\.shared::cta)?$")
WIDE = re.compile(r"\], (0x10|16)\b")  # a copy of 16 bytes
# A value that all threads store to one address is a message to specialised warps, not a tile.
ONE_ADDRESS = re.compile(r"^\[ ?global_smem\b")
# More groups than any kernel has in flight: bounds them in a loop without a wait.
MOST_GROUPS = 32
REGISTER = re.compile(r"%\w+")
PRODUCT = re.compile(r"wgmma\.mma_async|tcgen05\.mma\.")


@dataclass(frozen=True)
class Statement:
    """An instruction; `scopes` are the braces around it, outermost first.

    `results`, set for stores only, are all registers that products of the kernel write.
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
        copies: whether rows of a tile were copied since the last commit.
        groups: for each group of copies in flight, newest first, whether it has rows of a tile.
        unfenced: lines of the stores, and of the waits for copies, since the last fence.
        stored: lines of the stores since the last barrier.
        exchanged: lines of the stores between the last two barriers. If a load follows, these
            stores were for other threads, and no product reads them.
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
            tuple(ours or theirs for ours, theirs in groups),
            self.unfenced | other.unfenced,
            self.stored & other.stored,
            self.exchanged & other.exchanged,
        )

    def after(self, ins: Statement) -> State:
        if COPY.match(ins.opcode):
            # A guarded narrow copy is of a vector such as lse, which no product reads.
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
            # 32-bit results of a product, stored unchanged; products read only 16-bit tiles.
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
    """Messages about products that some path, loops included, reaches without a fence.

    A path is that of one warp within a task. So stores for another warp's product go unseen, and
    tiles that are stored between the same barriers as values for other threads.
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
    """The statements of the module's one kernel, and the possible successors of each."""
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
        elif match := STATEMENT.match(statement):
            operands = " ".join(match["operands"].split())
            guarded = match["guard"] is not None
            statements.append(Statement(match["opcode"], operands, guarded, line, tuple(scopes)))
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

    following = list[int]()
    if ins.opcode.startswith("bra"):
        following.append(target(ins.operands))
    elif ins.opcode.startswith("brx"):
        listed = statements[target(ins.operands.split(", ")[-1])]
        following += (target(name) for name in listed.operands.split(", "))
    ends = ins.opcode.startswith(("bra", "brx", "ret", "exit", "trap"))
    if ins.guarded or not ends:
        following.append(at + 1)
    return tuple(x for x in following if x < len(statements))
