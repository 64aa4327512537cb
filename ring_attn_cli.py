"""The command `ring-attn`: its help does not wait for `ring_attn/__init__`, which imports torch."""

import sys
from importlib.util import find_spec, module_from_spec


def main() -> int:
    """Runs the command; `ring_attn.cli.main.load` runs the `__init__` that is left out here."""
    spec = find_spec("ring_attn")
    assert spec is not None, "this file is installed with the package"
    sys.modules["ring_attn"] = module_from_spec(spec)
    from ring_attn.cli.main import main

    return main()
