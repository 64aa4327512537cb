"""`ring-attn env`: installed versions, hardware, and the backends that can run.

Every JSON report includes `machine()`, which tells the figures of different machines apart. It
names no host, user or path.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
