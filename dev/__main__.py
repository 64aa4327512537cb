"""`python -m dev aot`: commands that only makers of the package need."""

import sys

from ring_attn.cli.main import Command, main

PROG = "python -m dev"
COMMANDS = (
    Command("aot", "dev.aot", "dev.aot", "compile and check every kernel without a GPU"),
    Command("fuzz", "dev.fuzz", "dev.fuzz", "random calls against float64, until one fails"),
    Command("release", "dev.release", "dev.release", "try a release in a fresh environment"),
)

if __name__ == "__main__":
    sys.exit(main(prog=PROG, commands=COMMANDS))
