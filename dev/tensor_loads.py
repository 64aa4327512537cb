"""Finds loads from tensor memory whose registers are read before the wait for them, in PTX."""

from __future__ import annotations

import re

_LOAD = re.compile(r"tcgen05\.ld\.[^{;]*\{([^}]*)\}")
_WAIT = "tcgen05.wait::ld"
_REGISTER = re.compile(r"%\w+")


def early_reads(ptx: str) -> tuple[str, ...]:
    """Lines that name a register which `tcgen05.ld` has yet to write.

    `tcgen05.wait::ld` has no operands, so a compiler may move instructions before it.
    """
    found, coming = list[str](), set[str]()
    for number, line in enumerate(ptx.splitlines(), 1):
        if _WAIT in line:
            coming.clear()
        elif coming & set(_REGISTER.findall(line)):
            found.append(f"line {number}: {line.strip()}")
        elif load := _LOAD.search(line):
            coming.update(_REGISTER.findall(load[1]))
    return tuple(found)
