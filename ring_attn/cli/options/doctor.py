"""`ring-attn doctor`: whether this machine is ready, on one screen, and what mends what is not.

    ring-attn doctor
    torchrun --nproc-per-node 8 -m ring_attn doctor    names ranks that differ

It runs a ring of two ranks here and compares it with attention in float64, says which backend takes
each kind of call and why, and looks at packages, links of GPUs, settings of NCCL and noted first
uses. Under torchrun its ranks are the ring; --quick leaves the ring out. The exit status is 1 if
something is wrong; what is only missing, such as an optional package, leaves it 0.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import add_common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
