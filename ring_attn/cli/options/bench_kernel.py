"""Time of our attention kernels on one device, compared with torch's and flash-attn's.

All implementations alternate within every repetition, so that clock drift affects all alike; each
is checked against float64 before the timing. As in FlashAttention's papers, the batch is --tokens
(16k) / length, at least 1. Times are the device's, between events, with a cold L2 and the host
ahead; medians, p20 and p80 are over the repetitions. Unless --mode fwd, a forward saves tensors for
its backward. FLOPs are 4 x visible pairs x head_dim per head forward, 2.5 times that backward.

    ours           triton (on a CPU auto), deterministic, as a ring of one rank
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN
    flash-attn     flash_attn, if installed; so flash-attn-3, flash-attn-4

The exit status is 1 if a result of ours is wrong or a call of ours failed.
"""

from __future__ import annotations

import argparse

from ring_attn.cli.arguments import format_size, names_of, parse_size, parse_sizes
from ring_attn.cli.options.bench import (
    FLASH_PACKAGES,
    MODES,
    SDPA_BACKENDS,
    add_device_arguments,
)

IMPLEMENTATIONS = ("ours", *SDPA_BACKENDS, *FLASH_PACKAGES)

# On a GPU.
SEQLENS, HEADS, ITERS = tuple(1024 << n for n in range(8)), ((32, 8), (64, 8)), 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    both = argparse.BooleanOptionalAction
    add("--causal", dest="one_mask", action=both, help="only one of them; default: both")
    add("--tokens", type=parse_size, help="tokens of a batch of shorter sequences (default: 16k)")
    mode = "forward alone, or backward too (default: fwd_bwd)"
    add("--mode", choices=MODES, default="fwd_bwd", help=mode)
    names = f"comma-separated, some of {', '.join(IMPLEMENTATIONS)} (default: all)"
    add("--implementations", type=names_of(IMPLEMENTATIONS, least=1), help=names)
    lens = ",".join(map(format_size, SEQLENS))
    add("--seqlen", dest="seqlens", type=parse_sizes, help=f"lengths, as 1k,8k (default: {lens})")
    add("--iters", type=parse_size, help=f"most repetitions of a cell (default: {ITERS})")
    add_device_arguments(parser, ",".join(f"{q}/{kv}" for q, kv in HEADS))
