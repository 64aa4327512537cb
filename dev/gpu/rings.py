"""Rings whose ranks are in one process: every strategy, and the bits of one rank."""

from __future__ import annotations

from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from ring_attn.backends.rates import ONE_PASS_KV_HEADS
from ring_attn.core.mask import Mask
from ring_attn.testing import Case, Heads, run_all_ranks

WORLD_SIZE, ROWS_OF_RANK = 4, 512

# Rows of a rank, heads and head dim of the calls of `rank_program`.
CALL_ROWS, CALL_HEADS, CALL_DIM = 1024, 8, 64

# With fewer kv heads at a time the backward has another kernel, whose bits differ.
HEADS = Heads(8, 4, 128, 128)
MANY_HEADS = Heads(4 * ONE_PASS_KV_HEADS, 4 * ONE_PASS_KV_HEADS, 128, 128)
TRIAL_HEADS = Heads(4, 4, 16, 16)


def case_of(strategy: str, layout: str, rows: int, *, same_bits: bool = False) -> Case:
    """A causal case on the device, small in a trial."""
    if device.is_trial():
        mask = Mask(128, 128, causal=True)
        return Case(
            mask,
            layout,
            strategy,
            "reference",
            "float32",
            TRIAL_HEADS,
            batch=1,
            same_bits=same_bits,
        )
    heads = MANY_HEADS if strategy == "ulysses" else HEADS
    mask = Mask(rows, rows, causal=True)
    return Case(mask, layout, strategy, "triton", "bfloat16", heads, batch=1, same_bits=same_bits)


def holds(strategy: str, layout: str, world_size: int = WORLD_SIZE) -> Figures:
    """Compare all results with the oracle, and those of a second run bit by bit."""
    case = case_of(strategy, layout, ROWS_OF_RANK * world_size)
    got, again = (run_all_ranks(case, world_size, device=device.where()) for _ in range(2))
    if got.failures:
        raise AssertionError(str(got.failures))
    if got.differing(again):
        raise AssertionError(f"other bits in a second run: {got.differing(again)}")
    return {"ratio": max(round(float(verdict.ratio), 3) for verdict in got.verdicts)}


def calls_of_ranks() -> None:
    """Run, with all ranks in this process, calls of `rank_program` and of tests over NCCL."""
    heads = Heads(CALL_HEADS, CALL_HEADS, CALL_DIM, CALL_DIM), Heads(8, 2, 128, 128)
    for sizes, seqlen, strategy, world_size in (
        (heads[0], 2 * CALL_ROWS, "ring", 2),
        (heads[1], 2048, "ring", 2),
        (heads[1], 2048, "double_ring", 4),
    ):
        mask = Mask(seqlen, seqlen, causal=True)
        case = Case(mask, "zigzag", strategy, "triton", "bfloat16", sizes, batch=1)
        run_all_ranks(case, world_size, device=device.where())


def same_bits(strategy: str) -> Figures:
    """Compare the bits of 2 and 4 ranks with those of one."""
    if device.is_trial():
        raise NotHere("needs a GPU: only triton's kernels have the same bits on all ranks")
    case = case_of(strategy, "contiguous", 2048, same_bits=True)
    alone, *others = (run_all_ranks(case, size, device=device.where()) for size in (1, 2, 4))
    found = [other.differing(alone) for other in others]
    if any(found):
        raise AssertionError(f"other bits than one rank, on 2 and 4 ranks: {found}")
    return {}
