"""The float64 oracle, the table of cases, and functions that run all ranks.

    error <= 2 * (error of plain PyTorch in the same dtype) + rounding floor

The oracle is dense attention in float64. The bound follows from the data of the case; no tolerance
is set by hand. Tests, `ring-attn verify` and the benchmarks use these functions. Your tests can use
them, too, without pytest.

    inputs = random_qkv(seqlen_q=113, dtype=torch.bfloat16)
    mask = Mask(113, 113, causal=True)
    oracle = dense_gradients(*inputs, mask)
    plain = plain_gradients(*inputs, mask)
    verdict = check("dq", got_dq, oracle.dq, plain.dq, oracle.terms["dq"])

Run a whole call on all ranks, in this process or in one process per rank:

    results = run_all_ranks(Case("documents", layout="zigzag", strategy="all_gather"), world_size=4)
    assert not results.failures
"""

from ring_attn.core.layout import Layouts
from ring_attn.core.oracle import (
    PERTURBATION,
    RESULTS,
    RESULTS_WITH_SINKS,
    Expected,
    Inputs,
    Verdict,
    check,
    check_all,
    dense_attention,
    dense_gradients,
    plain_attention,
    plain_gradients,
)
from ring_attn.testing.cases import (
    DEFAULT_SEQLEN,
    EDGE_MASKS,
    HEADS,
    LAYOUTS,
    MASKS,
    OTHER_SEQLENS,
    SCORES,
    STRATEGIES,
    Case,
    Heads,
    cases,
    layouts_of,
    masks,
    strategy_of,
    usable_backends,
)
from ring_attn.testing.inputs import LARGE_LOGITS, poisoned_empty, random_qkv, random_sinks
from ring_attn.testing.one_gpu import share_gpu
from ring_attn.testing.ranks import (
    AllRanks,
    RankResult,
    Sent,
    expected,
    put_together,
    run_all_ranks,
    run_calls,
    run_rank,
    whole_of,
)
from ring_attn.testing.rounding import RandomRounding, check_rounded, margin, noisy_runs

__all__ = [
    "DEFAULT_SEQLEN",
    "EDGE_MASKS",
    "HEADS",
    "LARGE_LOGITS",
    "LAYOUTS",
    "MASKS",
    "OTHER_SEQLENS",
    "PERTURBATION",
    "RESULTS",
    "RESULTS_WITH_SINKS",
    "SCORES",
    "STRATEGIES",
    "AllRanks",
    "Case",
    "Expected",
    "Heads",
    "Inputs",
    "Layouts",
    "RandomRounding",
    "RankResult",
    "Sent",
    "Verdict",
    "cases",
    "check",
    "check_all",
    "check_rounded",
    "dense_attention",
    "dense_gradients",
    "expected",
    "layouts_of",
    "margin",
    "masks",
    "noisy_runs",
    "plain_attention",
    "plain_gradients",
    "poisoned_empty",
    "put_together",
    "random_qkv",
    "random_sinks",
    "run_all_ranks",
    "run_calls",
    "run_rank",
    "share_gpu",
    "strategy_of",
    "usable_backends",
    "whole_of",
]
