"""`ring-attn env`: installed versions, hardware, and the backends that can run.

A JSON text; null is said of a backend that can run, of a package that is not installed, and of a
variable that is not set. It names no host, user or path, except in variables.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
