"""`early_reads`: loads from tensor memory whose registers are read before the wait, in PTX."""

from __future__ import annotations

import re

_LOAD = re.compile(r"tcgen05\.ld\.[^{;]*\{([^}]*)\}")
_WAIT = "tcgen05.wait::ld"
_REGISTER = re.compile(r"%\w+")


def early_reads(ptx: str) -> tuple[str, ...]:
    """Return the lines that name a register that `tcgen05.ld` has not written yet.

    `tcgen05.wait::ld` has no operands, so a compiler may move instructions before it.
    """
    found: list[str] = []
    pending: set[str] = set()  # registers that loads will write
    for number, line in enumerate(ptx.splitlines(), 1):
        if _WAIT in line:
            pending.clear()
        elif pending & set(_REGISTER.findall(line)):
            found.append(f"line {number}: {line.strip()}")
        elif load := _LOAD.search(line):
            pending.update(_REGISTER.findall(load[1]))
    return tuple(found)
