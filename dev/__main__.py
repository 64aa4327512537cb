"""`python -m dev aot`: commands that only makers of the package need."""

import sys

from ring_attn.cli.main import Command, main

PROG = "python -m dev"
COMMANDS = (
    Command("aot", "dev.aot", "dev.aot", "compile and check every kernel without a GPU"),
    Command("fuzz", "dev.fuzz", "dev.fuzz", "random calls against float64, until one fails"),
    Command("faults", "dev.faults", "dev.faults", "what the other ranks do if one fails: a table"),
    Command("network", "dev.network", "dev.network", "waits on slow networks, as planned or not"),
    Command("release", "dev.release", "dev.release", "try a release in a fresh environment"),
    Command("soak", "dev.soak", "dev.soak", "thousands of calls: nothing grows or slows down"),
)

if __name__ == "__main__":
    sys.exit(main(prog=PROG, commands=COMMANDS))
