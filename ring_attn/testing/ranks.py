"""Runs of all ranks of a case, in this process or in one process per rank, and whole results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.api import ring_attention
from ring_attn.attention import drivers
from ring_attn.call import AttentionOptions, Call
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.oracle import (
    RESULTS,
    Expected,
    Inputs,
    Verdict,
    check_all,
    dense_gradients,
    plain_gradients,
)
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import resolve_strategy
from ring_attn.testing.cases import Case
from ring_attn.testing.inputs import poisoned_empty, strided
from ring_attn.transport.local import LocalTransport, run_local
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p

# A rank waits this many seconds for another rank.
TRANSPORT = TransportOptions(timeout=60.0)

# Calls `run_rank` with the same arguments on every rank of a process group; results by rank.
# It may be a function that launches any other function, such as `run_ranks` with its options.
Launcher = Callable[..., Sequence[Any]]


class Sent(NamedTuple):
    """Bytes and messages that a rank sends in one direction (forward or backward) of a call."""

    nbytes: int
    messages: int


@dataclass(frozen=True)
class RankResult:
    """The results of one rank.

    Attributes:
        tensors: out, lse, dq, dk, dv with a batch dim, and dsinks if there are sinks; on CPU.
        sent: bytes and messages that the rank sent in forward and backward.
    """

    tensors: tuple[Tensor, ...]
    sent: tuple[Sent, Sent]


@dataclass(frozen=True)
class AllRanks:
    """The results of all ranks of a case.

    Attributes:
        case: the case.
        whole: results of the whole sequence, see `whole_of`.
        sent: for each rank, bytes and messages that it sent in forward and backward.
        device: where the oracle is computed; the results are on the CPU.
    """

    case: Case
    whole: Expected
    sent: tuple[tuple[Sent, Sent], ...]
    device: str = "cpu"

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The error and the bound of each result."""
        return check_all(self.whole, *expected(self.case, self.device))

    @property
    def failures(self) -> list[str]:
        """Texts of the results that exceed their bounds."""
        return [f"{self.case}: {verdict}" for verdict in self.verdicts if not verdict.ok]

    def differing(self, other: AllRanks) -> list[str]:
        """Return names of the results whose bits differ from those in another run.

        dsinks is not compared, since the caller sums it over the ranks in any order.
        """
        return [
            name
            for name in RESULTS
            if not torch.equal(getattr(self.whole, name), getattr(other.whole, name))
        ]


def run_all_ranks(
    case: Case,
    world_size: int,
    transport: Launcher | None = None,
    *,
    device: torch.device | str = "cpu",
) -> AllRanks:
    """Run forward and backward of all ranks, with new memory filled with NaN.

    Args:
        case: the call.
        world_size: number of ranks.
        transport: None runs the ranks in this process over the local transport. A function
            `transport(fn, *args)` must call `fn(*args)` on every rank of a default process group,
            and return the results in rank order; the ranks then call `ring_attention`.
        device: device of the shards.

    Returns:
        The results of the whole sequence, their verdicts, and the bytes that each rank sent.

    Raises:
        ValueError: arguments that `ring_attention` does not accept, the strategy "auto" without
            processes, or a `transport` that runs a different number of ranks.
        NotImplementedError: a strategy or backend does not support the case.

    Example:
        >>> run_all_ranks(Case("causal", layout="zigzag"), world_size=2).failures
        []
    """
    if transport is None:
        ranks = run_calls(
            calls_of(case, world_size, device),
            case.build_inputs(device),
            case.build_layouts(world_size),
            case.build_sinks(device),
            noncontiguous=case.noncontiguous,
        )
        return put_together(case, ranks, device)
    results = transport(run_rank, case, device)
    if len(results) != world_size:
        raise ValueError(
            f"transport must run world_size={world_size} ranks, got {len(results)} results"
        )
    return put_together(case, results, device)


def run_rank(case: Case, device: torch.device | str = "cpu") -> RankResult:
    """Run `ring_attention` with this rank's shards of a case, over the default process group.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> case = ring_attn.testing.Case("causal", seqlen=16)
        >>> result = ring_attn.testing.run_rank(case)
        >>> result.tensors[0].shape[1]  # rows of out
        8
    """
    group = dist.group.WORLD
    assert group is not None
    (q, k, v, dout), options = arguments_of(case, dist.get_world_size(), dist.get_rank(), device)
    leaves = [x.requires_grad_() for x in (q, k, v, options["sinks"]) if x is not None]
    stats = open_p2p(group, TRANSPORT).stats
    stats.reset()
    with poisoned_empty():
        out, lse = ring_attention(q, k, v, return_lse=True, **options)
        forward = Sent(stats.bytes_sent, stats.messages)
        stats.reset()
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, dout)
    backward = Sent(stats.bytes_sent, stats.messages)
    results = [out.detach(), lse.detach(), dq, dk, dv]
    if case.packed:
        results = [x[None] for x in results]
    return RankResult(
        tensors=tuple(x.cpu() for x in (*results, *dsinks)),
        sent=(forward, backward),
    )


def arguments_of(
    case: Case, world_size: int, rank: int, device: torch.device | str = "cpu"
) -> tuple[list[Tensor], AttentionOptions]:
    """Return a rank's shards of q, k, v and dout, and the options of its call."""
    layouts = case.build_layouts(world_size)
    shards = _shards(case.build_inputs(device), layouts, rank, case.noncontiguous)
    options: AttentionOptions = {
        "softmax_scale": case.softmax_scale,
        "softcap": case.softcap,
        "sinks": case.build_sinks(device),
        "layout": layouts,
        "strategy": case.build_strategy(world_size),
        "backend": case.backend,
        "same_bits": case.same_bits,
        "transport": TRANSPORT,
        **_mask_arguments(case.build_mask()),
    }
    if case.packed:  # (1, rows, nheads, headdim) -> (rows, nheads, headdim)
        shards = [x.squeeze(0) for x in shards]
    return shards, options


def put_together(
    case: Case, ranks: Sequence[RankResult], device: torch.device | str = "cpu"
) -> AllRanks:
    """Combine the results of all ranks, given in rank order; `device` computes the oracle.

    Example:
        >>> case = Case("causal", seqlen=16)
        >>> ranks = run_calls(calls_of(case, 2), case.build_inputs(), case.build_layouts(2))
        >>> put_together(case, ranks).failures
        []
    """
    whole = whole_of(ranks, case.build_layouts(len(ranks)))
    return AllRanks(case, whole, tuple(rank.sent for rank in ranks), str(device))


def whole_of(ranks: Sequence[RankResult], layouts: Layouts) -> Expected:
    """Return the results of the whole sequence; dsinks is the sum over the ranks.

    Example:
        >>> case = Case("causal", seqlen=16)
        >>> layouts = case.build_layouts(2)
        >>> ranks = run_calls(calls_of(case, 2), case.build_inputs(), layouts)
        >>> whole_of(ranks, layouts).out.shape[1]
        16
    """
    layout_q, layout_kv = layouts
    out, lse, dq, dk, dv, *dsinks = zip(*(rank.tensors for rank in ranks), strict=True)
    return Expected(
        out=layout_q.unshard(out),
        lse=layout_q.unshard(lse, 2),  # (batch, nheads, rows)
        dq=layout_q.unshard(dq),
        dk=layout_kv.unshard(dk),
        dv=layout_kv.unshard(dv),
        dsinks=torch.stack(dsinks[0]).sum(0) if dsinks else None,
    )


def expected(case: Case, device: str = "cpu") -> tuple[Expected, Expected]:
    """Return the results of the oracle and of plain PyTorch for a case; cached.

    They are computed on `device`, and are on the CPU.

    Example:
        >>> oracle, plain = expected(Case("causal", seqlen=16, dtype="bfloat16"))
        >>> oracle.out.dtype, plain.out.dtype
        (torch.float64, torch.bfloat16)
    """
    # Cases that differ only in these fields share the results.
    key = replace(case, strategy="", backend="", layout="", noncontiguous=False, same_bits=None)
    return _expected(key, device)


@lru_cache(maxsize=1024)
def _expected(case: Case, device: str) -> tuple[Expected, Expected]:
    q, k, v, dout = case.build_inputs(device)
    mask, sinks = case.build_mask(), case.build_sinks(device)
    scale, softcap = case.softmax_scale, case.softcap
    oracle = dense_gradients(q, k, v, dout, mask, scale, softcap=softcap, sinks=sinks)
    plain = plain_gradients(q, k, v, dout, mask, scale, softcap=softcap, sinks=sinks)
    return _on_cpu(oracle), _on_cpu(plain)


def _on_cpu(results: Expected) -> Expected:
    return Expected(
        out=results.out.cpu(),
        lse=results.lse.cpu(),
        dq=results.dq.cpu(),
        dk=results.dk.cpu(),
        dv=results.dv.cpu(),
        dsinks=None if results.dsinks is None else results.dsinks.cpu(),
        terms={name: x.cpu() for name, x in results.terms.items()},
    )


def run_calls(
    calls: Sequence[Call],
    inputs: Inputs,
    layouts: Layouts,
    sinks: Tensor | None = None,
    *,
    noncontiguous: bool = False,
) -> list[RankResult]:
    """Run forward and backward of all ranks in this process, over the local transport.

    This also runs calls that no `Case` describes.

    Args:
        calls: one call for each rank.
        inputs: whole q, k, v and dout.
        layouts: layouts of queries and keys.
        sinks: (nheads,).
        noncontiguous: as in `Case`.

    Returns:
        The results in rank order.

    Example:
        >>> case = Case("causal", seqlen=16)
        >>> layouts = case.build_layouts(2)
        >>> ranks = run_calls(calls_of(case, 2), case.build_inputs(), layouts)
        >>> [rank.tensors[0].shape[1] for rank in ranks]  # rows of out
        [8, 8]
    """

    def work(rank: int, transport: LocalTransport) -> RankResult:
        stats = transport.stats
        q, k, v, dout = _shards(inputs, layouts, rank, noncontiguous)
        out, lse, saved, _ = drivers.forward(calls[rank], q, k, v, transport, sinks)
        forward = Sent(stats.bytes_sent, stats.messages)
        stats.reset()
        dq, dk, dv, dsinks = drivers.backward(calls[rank], saved, dout, transport, sinks)
        backward = Sent(stats.bytes_sent, stats.messages)
        results = [out, lse, dq, dk, dv]
        if dsinks is not None:
            results.append(dsinks)
        return RankResult(tensors=tuple(x.cpu() for x in results), sent=(forward, backward))

    with poisoned_empty():
        return run_local(len(calls), work)


def calls_of(case: Case, world_size: int, device: torch.device | str = "cpu") -> list[Call]:
    """Return the calls of all ranks of a case."""
    q, k, v, _ = case.build_inputs(device)
    spec = AttentionSpec.of(q, k, v, case.softcap, case.build_sinks(device))
    strategy = resolve_strategy(case.build_strategy(world_size), world_size)
    layouts, mask = case.build_layouts(world_size), case.build_mask()
    return drivers.calls_of_ranks(
        strategy,
        spec,
        layouts,
        mask,
        softmax_scale=case.softmax_scale,
        backend=case.backend,
        same_bits=case.same_bits,
    )


def _shards(inputs: Inputs, layouts: Layouts, rank: int, noncontiguous: bool) -> list[Tensor]:
    """Return this rank's q, k, v and dout."""
    layout_q, layout_kv = layouts
    shards = [
        layout_q.shard(inputs.q, rank),
        layout_kv.shard(inputs.k, rank),
        layout_kv.shard(inputs.v, rank),
        layout_q.shard(inputs.dout, rank),
    ]
    return [strided(x) for x in shards] if noncontiguous else shards


def _mask_arguments(mask: Mask) -> AttentionOptions:
    """Return flash-attention's arguments if they can express the mask, else the mask itself."""
    if mask.arguments is None:
        return {"mask": mask}
    causal, window_size, cu_q, cu_k = mask.arguments
    return {
        "causal": causal,
        "window_size": window_size,
        "cu_seqlens": None if cu_q is None else torch.tensor(cu_q, dtype=torch.int32),
        "cu_seqlens_k": None if cu_k is None else torch.tensor(cu_k, dtype=torch.int32),
    }
