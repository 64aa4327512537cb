"""`python -m dev aot`: commands for developers of the package."""

import sys
from importlib.util import find_spec, module_from_spec

if "ring_attn" not in sys.modules:
    # As in `ring_attn_cli`: `--help`, and the command `gpu`, do not import torch.
    spec = find_spec("ring_attn")
    assert spec is not None, "run this in a checkout"
    sys.modules["ring_attn"] = module_from_spec(spec)

from ring_attn.cli.main import Command, main

PROG = "python -m dev"
COMMANDS = (
    Command("aot", "dev.aot", "dev.aot", "compile and check every kernel without a GPU"),
    Command("fuzz", "dev.fuzz", "dev.fuzz", "compare random calls with float64 until one fails"),
    Command("faults", "dev.faults", "dev.faults", "show what other ranks do if a rank fails"),
    Command("network", "dev.network", "dev.network", "compare waits on slow networks with plans"),
    Command("gpu", "dev.gpu.options", "dev.gpu.command", "run all stages on a GPU", loads=False),
    Command("release", "dev.release", "dev.release", "try a release in a fresh environment"),
    Command("soak", "dev.soak", "dev.soak", "make thousands of calls and look for leaks"),
)

if __name__ == "__main__":
    sys.exit(main(prog=PROG, commands=COMMANDS))
