"""Parts of the slow tests: CI runs one part at a time, another developer another one."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple


class Part(NamedTuple):
    """A part of the slow tests: the number of it, counted from 1, and how many parts there are."""

    number: int
    count: int

    def has(self, index: int) -> bool:
        """Return whether the test with this index is in this part.

        Neighbours are in different parts: the cases of one test cost about the same.
        """
        return index % self.count == self.number - 1


def part_of(text: str) -> Part:
    """Parse "2/3", the second part of three.

    Raises:
        ArgumentTypeError: The text is no part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        text = f"{text!r} is no part: pass K/N with K from 1 to N, such as 1/2"
        raise argparse.ArgumentTypeError(text)
    return Part(int(match[1]), int(match[2]))
