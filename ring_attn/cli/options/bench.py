"""Options that several benchmarks share."""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import (
    add_common,
    parse_dtype,
    parse_seconds,
    parse_size,
    parse_sizes,
)
from ring_attn.core.names import DEVICES

# Implementations in other packages, and torch's backends, by their names in `bench kernel`.
FLASH_PACKAGES = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
}
SDPA_BACKENDS = {"torch-flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}

# The figures of each mode.
MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}


def add_device_arguments(parser: argparse.ArgumentParser, heads: str = "32/8") -> None:
    """Adds the options of every benchmark on one device; `heads` are those on a GPU."""
    add = parser.add_argument
    pairs = f"query heads / kv heads, as 32/8 (default: {heads}; on a CPU 4/2)"
    add("--heads", type=parse_heads, help=pairs)
    add("--head-dim", dest="head_dims", type=parse_sizes, help="default: 128; on a CPU 16 or 64")
    add("--dtype", type=parse_dtype, help="default: bfloat16; on a CPU float32")
    budget = "start no measurement after this time (default: no limit)"
    add("--budget", type=parse_seconds, metavar="SECONDS", help=budget)
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    add_common(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Query and kv heads: "32/8,16" is ((32, 8), (16, 16))."""
    pairs = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{part!r}: kv heads must divide the query heads")
        pairs.append((heads, kv_heads))
    return tuple(pairs)
