"""Cuts the text of a kernel into basic blocks."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

from tests.kernels.ptx.parse import Instruction, Kernel

Text = tuple[Instruction, ...]

# Instructions that end a block: branches, and instructions that may wait.
BRANCH = re.compile(r"bra(\.uni)?|brx\.idx|ret|call\.uni")
ENDING = re.compile(
    rf"{BRANCH.pattern}|(bar|barrier)\.sync|mbarrier\.try_wait\..*|setmaxnreg\.inc\..*"
    r"|ld\.global\.gpu\.acquire\..*|atom\.global\.acquire\.gpu\.cas\..*"
)


@lru_cache(maxsize=8)
def cut(kernel: Kernel) -> tuple[list[Text], dict[str, int], frozenset[int]]:
    """Cuts the text at labels, branches and waits.

    Returns:
        The blocks, each label's block, and the blocks with `wgmma`.
    """
    code, labels = kernel.instructions, kernel.labels
    used = {x for ins in code if ins.opcode[:3] in ("bra", "cal") for x in ins.operands}
    used = labels.keys() & used.union(*kernel.targets.values())
    ends = [i for i, ins in enumerate(code) if ENDING.fullmatch(ins.opcode)]
    starts = sorted({0, len(code), *(labels[x] for x in used), *(i + 1 for i in ends)})
    places = {label: starts.index(labels[label]) for label in used}
    texts = [tuple(code[start:stop]) for start, stop in pairwise(starts)]
    collective = (i for i, text in enumerate(texts) if any(x.opcode[:5] == "wgmma" for x in text))
    return texts, places, frozenset(collective)
