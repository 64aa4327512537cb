"""`missing_fences`: products in PTX that may read shared memory before a proxy fence.

Products of sm_90 and sm_100 (wgmma, tcgen05.mma) read shared memory through the asynchronous proxy.
`cp.async` and `st.shared` write through the generic proxy, and products see these writes only after
a fence.proxy.async; waits and barriers are not enough. Bulk copies use the asynchronous proxy.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import NamedTuple

from dev.ptx import Code, Statement, parse

COPY = re.compile(r"cp\.async\.c[ag]\.")
COMMIT, WAIT, BULK = "cp.async.commit_group", "cp.async.wait_group", "cp.async.bulk"
STORE = re.compile(r"(st\.|stmatrix\.).*shared")
# It starts the next task of specialised warps, which does not read tiles that they stored before.
NEXT_TASK = "barrier.sync"
BARRIER = "bar.sync"
LOAD = re.compile(r"(ld\.|ldmatrix\.).*shared")
FENCE = re.compile(r"fence\.proxy\.async(\.shared::cta)?$")
WIDE = re.compile(r"\], (0x10|16)\b")  # a copy of 16 bytes
# A value that all threads store to one address is a message to specialised warps, not a tile.
ONE_ADDRESS = re.compile(r"^\[ ?global_smem\b")
# More groups than any kernel has in flight. It limits the groups in a loop without a wait.
MAX_GROUPS = 32
REGISTER = re.compile(r"%\w+")
PRODUCT = re.compile(r"wgmma\.mma_async|tcgen05\.mma\.")


class Pending(NamedTuple):
    """Facts that may hold before an instruction.

    Attributes:
        copies: whether rows of a tile were copied since the last commit.
        groups: for each group of copies in flight, newest first, whether it has rows of a tile.
        unfenced: lines of the stores, and of the waits for copies, since the last fence.
        stored: lines of the stores since the last barrier.
        exchanged: lines of the stores between the last two barriers. If a load follows, these
            stores were for other threads, and are not read by products.
    """

    copies: bool = False
    groups: tuple[bool, ...] = ()
    unfenced: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    exchanged: frozenset[int] = frozenset()

    def joined(self, other: Pending) -> Pending:
        """Return the facts that may hold after one or the other path."""
        groups = zip_longest(self.groups, other.groups, fillvalue=False)
        return Pending(
            self.copies or other.copies,
            tuple(ours or theirs for ours, theirs in groups),
            self.unfenced | other.unfenced,
            self.stored & other.stored,
            self.exchanged & other.exchanged,
        )

    def after(self, ins: Statement, results: frozenset[str]) -> Pending:
        """Return the facts after an instruction; `results` are registers that products write."""
        if COPY.match(ins.opcode):
            # A guarded narrow copy is of a vector such as lse, which no product reads.
            vector = bool(ins.guard) and not WIDE.search(ins.operands)
            return self._replace(copies=self.copies or not vector)
        if ins.opcode == COMMIT:
            groups = (self.copies, *self.groups)[:MAX_GROUPS]
            return self._replace(copies=False, groups=groups)
        if ins.opcode == WAIT:
            left = int(ins.operands, 0)
            seen = {ins.line} if any(self.groups[left:]) else set()
            return self._replace(groups=self.groups[:left], unfenced=self.unfenced | seen)
        if ins.opcode.startswith("cp.async.") and not ins.opcode.startswith(BULK):
            raise ValueError(f"line {ins.line}: {ins.opcode} is not known")
        if STORE.match(ins.opcode) and not ONE_ADDRESS.search(ins.operands):
            # 32-bit results of a product, stored unchanged; products read only 16-bit tiles.
            if {*REGISTER.findall(ins.operands.partition("]")[2])} <= results:
                return self
            lines = {ins.line}
            return self._replace(unfenced=self.unfenced | lines, stored=self.stored | lines)
        if ins.opcode == NEXT_TASK:
            return Pending()
        if ins.opcode == BARRIER:
            return self._replace(stored=frozenset(), exchanged=self.stored)
        if LOAD.match(ins.opcode):
            return self._replace(unfenced=self.unfenced - self.exchanged)
        if FENCE.match(ins.opcode) and not ins.guard:
            return self._replace(unfenced=frozenset())
        return self


def missing_fences(ptx: str) -> tuple[str, ...]:
    """Return messages about products that some path, with loops, reaches without a fence.

    A path is that of one warp within a task. Therefore two kinds of stores are not found: for a
    product of another warp, and of a tile between the same barriers as values for other threads.
    """
    code = parse(ptx)
    results = frozenset(
        register
        for ins in code.statements
        if ins.opcode.startswith("wgmma.mma_async")
        for register in REGISTER.findall(ins.operands.partition("}")[0])
    )
    states: dict[int, Pending] = {0: Pending()}
    changed = [0]
    while changed:
        at = changed.pop()
        after = states[at].after(code.statements[at], results)
        for following in _successors(at, code):
            known = states.get(following)
            joined = after if known is None else known.joined(after)
            if joined != known:
                states[following] = joined
                changed.append(following)
    return tuple(
        f"line {ins.line}: {ins.opcode} without fence.proxy.async after line {max(unfenced)}"
        for at, ins in enumerate(code.statements)
        if PRODUCT.match(ins.opcode) and (unfenced := states.get(at, Pending()).unfenced)
    )


def _successors(at: int, code: Code) -> tuple[int, ...]:
    ins = code.statements[at]
    following: list[int] = []
    if ins.opcode.startswith("bra"):
        following.append(code.labels[ins.operands])
    elif ins.opcode.startswith("brx"):
        listed = code.statements[code.labels[ins.operands.split(", ")[-1]]]
        following += (code.labels[name] for name in listed.operands.split(", "))
    ends = ins.opcode.startswith(("bra", "brx", "ret", "exit", "trap"))
    if ins.guard or not ends:
        following.append(at + 1)
    return tuple(x for x in following if x < len(code.statements))
