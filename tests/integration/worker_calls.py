"""What `test_workers` has processes do, in a module that they import quickly."""

import os
import time


def call(item: tuple[str, int]) -> tuple[tuple[str, int, int], bool]:
    """Does what the item says; (words, number, process), and whether the process can go on."""
    what, number = item
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ArithmeticError("made to fail")
    if what == "hang":
        time.sleep(60)
    return (what, number, os.getpid()), what != "last"
