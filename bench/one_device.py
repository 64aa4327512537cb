"""Options that the benchmarks on one device share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from ring_attn.bench.implementations import Problem
from ring_attn.bench.outputs import add_outputs
from ring_attn.core.dtypes import dtype_name
from ring_attn.tools.arguments import parse_dtype, parse_size
from ring_attn.tools.launch import DEVICES


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """Device, heads and time limit of a benchmark."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    budget: float | None = None

    def problem(self, seqlen: int, *, causal: bool) -> Problem:
        return Problem(
            1, seqlen, self.heads, self.kv_heads, self.head_dim, causal, self.dtype, self.device
        )

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{heads}, {dtype_name(self.dtype)}"


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `one_device`, and those of every command."""
    add = parser.add_argument
    add("--heads", type=parse_heads, help="query heads / kv heads (32/8; on a CPU 4/2)")
    add("--head-dim", type=parse_size, help="default: 128; on a CPU 16")
    add("--dtype", type=parse_dtype, help="default: bfloat16; on a CPU float32")
    add("--budget", type=float, metavar="SECONDS", help="start no measurement after this time")
    add("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    add_outputs(parser)


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Query and kv heads: "32/8,16" is ((32, 8), (16, 16)).

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    pairs = []
    for part in text.split(","):
        q, _, kv = part.partition("/")
        heads, kv_heads = parse_size(q), parse_size(kv or q)
        if heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{part!r}: kv heads must divide the query heads")
        pairs.append((heads, kv_heads))
    return tuple(pairs)


def parse_device(name: str | None) -> torch.device:
    """The device of that name; None is the GPU if there is one, else the CPU.

    Raises:
        ValueError: "cuda" is requested, but torch can use no GPU.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    return device


def one_device(args: argparse.Namespace) -> OneDevice:
    """The setting from the options; a CPU gets small sizes, only to test the benchmark.

    Raises:
        ValueError: the device does not exist, or there are several pairs of heads.
    """
    device = parse_device(args.device)
    gpu = device.type == "cuda"
    heads, *more = args.heads or (((32, 8),) if gpu else ((4, 2),))
    if more:
        raise ValueError(f"--heads must be one pair, got {args.heads}")
    return OneDevice(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=args.head_dim or (128 if gpu else 16),
        dtype=args.dtype or (torch.bfloat16 if gpu else torch.float32),
        device=device,
        budget=args.budget,
    )
