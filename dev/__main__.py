"""`python -m dev aot`: commands that only makers of the package need."""

import sys
from importlib.util import find_spec, module_from_spec

if "ring_attn" not in sys.modules:
    # As in `ring_attn_cli`: a command's help, and `gpu` at all, do not wait for torch.
    spec = find_spec("ring_attn")
    assert spec is not None, "run this in a checkout"
    sys.modules["ring_attn"] = module_from_spec(spec)

from ring_attn.cli.main import Command, main

PROG = "python -m dev"
COMMANDS = (
    Command("aot", "dev.aot", "dev.aot", "compile and check every kernel without a GPU"),
    Command("fuzz", "dev.fuzz", "dev.fuzz", "random calls against float64, until one fails"),
    Command("faults", "dev.faults", "dev.faults", "what the other ranks do if one fails: a table"),
    Command("network", "dev.network", "dev.network", "waits on slow networks, as planned or not"),
    Command("gpu", "dev.gpu.options", "dev.gpu.command", "all that a GPU must answer", loads=False),
    Command("release", "dev.release", "dev.release", "try a release in a fresh environment"),
    Command("soak", "dev.soak", "dev.soak", "thousands of calls: nothing grows or slows down"),
)

if __name__ == "__main__":
    sys.exit(main(prog=PROG, commands=COMMANDS))
