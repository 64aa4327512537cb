"""Closed-form sizes of the all-reduces of a tensor-parallel model."""

from __future__ import annotations

from ring_attn.values.checks import check_number


def all_reduce_bytes(seqlen: int, hidden_size: int, num_blocks: int, itemsize: int) -> int:
    """Return the bytes that a tensor-parallel model all-reduces in a forward, counted once.

    Each block has two all-reduces of (seqlen, hidden_size), after the output projection and the
    down projection (Megatron-LM, arXiv 1909.08053).
    `seqlen` counts the rows of a rank, over all sequences.
    """
    return 2 * num_blocks * seqlen * hidden_size * itemsize


def transfer_seconds(nbytes: int, gbit_per_s: float) -> float:
    """Return the seconds for `nbytes` on a link of `gbit_per_s`, without latency."""
    check_number("gbit_per_s", gbit_per_s)
    if not gbit_per_s > 0.0:
        raise ValueError(f"gbit_per_s must be positive, got {gbit_per_s}")
    return nbytes / (gbit_per_s * 1e9 / 8.0)
