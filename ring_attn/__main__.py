"""`python -m ring_attn` is the `ring-attn` command."""

import sys

from ring_attn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
