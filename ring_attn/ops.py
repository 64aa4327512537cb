"""The operators `ring_attn::attention` and `ring_attn::attention_backward`, and what calls them.

`ring_attention` is one operator of torch.library, so torch.compile takes it into a graph whole,
selective checkpointing can save what it returns, and autograd knows its backward:

    ring_attn::attention           q, k, v, sinks, the call -> out, lse, saved
    ring_attn::attention_backward  saved, dout, sinks, the call -> dq, dk, dv, dsinks

A call crosses the boundary as numbers and names, from which every rank works out the same plan:
with the real sizes, when it runs. A graph that was compiled for any length so has no plan in it.

`saved` is what the backward wants beyond q, k, v, out and lse: nothing for a ring or all_gather;
the tensors by heads for Ulysses; the exchanged queries for q_exchange. Their rows depend on other
ranks' shards, so to the compiler they have sizes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import check
from ring_attn.backends import choose_backend
from ring_attn.core.heads import share_heads
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.machines import run
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import make_call, why_not_same_bits
from ring_attn.torch_private import group_by_name
from ring_attn.transport.base import Agreement
from ring_attn.transport.debug import check_agreement, debug_enabled, tell_refusal, values_of
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.group import refused

# `layout` is a name, unless there are the numbers of two layouts, `strategy` one, unless there are
# those of a Strategy. `group` is torch's name of the process group.
_CALL = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, bool causal, int[] window_size, "
    "float? softmax_scale, float softcap, str group, int[] mesh_shape, str layout, "
    "SymInt[] layout_q, SymInt[] layout_k, str strategy, int[] degrees, str backend, "
    "bool? same_bits, float? timeout, int? nccl_max_ctas, bool differentiated"
)
_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_CALL}) -> (Tensor, Tensor, Tensor[])"
# `sizes` are batch, rows of q and of kv, heads of q and of kv, headdim, headdim of v.
_BACKWARD = (
    f"(Tensor[] saved, Tensor dout, Tensor? sinks, SymInt[] sizes, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

# CUDA graphs replay kernels, not the host's part of a ring: Inductor leaves the operators out.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


class CallArguments(NamedTuple):
    """How a call is described to the operators, in the order of their schema."""

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    causal: bool
    window_size: Sequence[int]
    softmax_scale: float | None
    softcap: float
    group: str
    mesh_shape: Sequence[int]
    layout: str
    layout_q: Sequence[int]
    layout_k: Sequence[int]
    strategy: str
    degrees: Sequence[int]
    backend: str
    same_bits: bool | None
    timeout: float | None
    nccl_max_ctas: int | None
    differentiated: bool

    @property
    def process_group(self) -> dist.ProcessGroup:
        """All ranks of the call."""
        return group_by_name(self.group)

    @property
    def transport(self) -> TransportOptions:
        """Options of the transport."""
        return TransportOptions(self.timeout, self.nccl_max_ctas)

    @property
    def place(self) -> tuple[int, int]:
        """This rank among all ranks of the call, and how many they are."""
        group = self.process_group
        return dist.get_rank(group), dist.get_world_size(group)

    def plain(self) -> CallArguments:
        """Without tensors, and hashable."""
        values: Any = (tuple(x) if isinstance(x, list) else x for x in self[2:])
        return CallArguments(None, None, *values)

    def given_strategy(self, world_size: int) -> Strategy:
        """The strategy, checked against the number of ranks."""
        given = Strategy.from_numbers(self.degrees) if self.degrees else self.strategy
        return resolve_strategy(given, world_size, tuple(self.mesh_shape))


class Resolved(NamedTuple):
    """What a call is over: who holds what, and who sees whom."""

    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask


Documents = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


def resolve(rows: tuple[int, int], arguments: CallArguments) -> Resolved:
    """Layouts and mask, checked against each other and this rank's rows of q and of kv.

    Raises:
        ValueError: layout or documents that do not fit.
    """
    return _resolve(rows, _documents(arguments), arguments.plain(), *arguments.place)


def _documents(arguments: CallArguments) -> Documents:
    """Boundaries of the queries' documents and of the keys', on the host."""
    cu_q = check.check_cu_seqlens("cu_seqlens", arguments.cu_seqlens)
    cu_k = check.check_cu_seqlens("cu_seqlens_k", arguments.cu_seqlens_k)
    check.check_documents(cu_q, cu_k)
    return cu_q, cu_q if cu_k is None else cu_k


def _resolve(
    rows: tuple[int, int], documents: Documents, plain: CallArguments, rank: int, world_size: int
) -> Resolved:
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    given: object = plain.layout
    if plain.layout_q:
        sides = (plain.layout_q, plain.layout_k)
        given = tuple(SequenceLayout.from_numbers(numbers) for numbers in sides)
    layouts = check.resolve_layouts(given, rows, totals, rank, world_size)
    left, right = plain.window_size
    mask = Mask(layouts[0].seqlen, layouts[1].seqlen, plain.causal, (left, right), cu_q, cu_k)
    return Resolved(layouts, check.check_mask(mask))


def describe(
    spec: AttentionSpec, resolved: Resolved, arguments: CallArguments
) -> dict[str, object]:
    """What is given and must be the same on all ranks, by the names of the arguments."""
    mask = resolved.mask
    return {
        "batch": spec.batch,
        "nheads": spec.nheads,
        "nheads_kv": spec.nheads_kv,
        "headdim": spec.headdim,
        "headdim_v": spec.headdim_v,
        "dtype": spec.dtype,
        "device": spec.device_type,
        "seqlen_q": mask.seqlen_q,
        "seqlen_k": mask.seqlen_k,
        "causal": mask.causal,
        "window_size": mask.window_size,
        "cu_seqlens": mask.cu_seqlens_q,
        "cu_seqlens_k": mask.cu_seqlens_k,
        "softcap": spec.softcap,
        "sinks": spec.sinks,
        "layout": tuple(str(layout) for layout in resolved.layouts),
        "transport": arguments.transport,
        "requires_grad": arguments.differentiated,
    }


def _prepare(
    spec: AttentionSpec, rows: tuple[int, int], arguments: CallArguments
) -> tuple[Call, Agreement]:
    """The call for this rank, and what of it must be the same on all ranks."""
    check.check_max_ctas(arguments.transport, arguments.process_group)
    documents, plain = _documents(arguments), arguments.plain()
    backend = choose_backend(spec, arguments.backend).name
    return _make_call(spec, rows, documents, plain, *arguments.place, backend)


# Plans are cached behind this; looking a call up by what it was given spares hashing all of those.
@lru_cache(maxsize=1024)
def _make_call(
    spec: AttentionSpec,
    rows: tuple[int, int],
    documents: Documents,
    plain: CallArguments,
    rank: int,
    world_size: int,
    backend: str,
) -> tuple[Call, Agreement]:
    resolved = _resolve(rows, documents, plain, rank, world_size)
    strategy = plain.given_strategy(world_size)
    call = make_call(
        strategy,
        spec,
        *resolved,
        rank,
        softmax_scale=plain.softmax_scale,
        backend=backend,
        same_bits=plain.same_bits,
    )
    decided = {
        "softmax_scale": call.softmax_scale,
        "strategy": str(strategy),
        "backend": call.backend,
        "same_bits": why_not_same_bits(call) is None,
    }
    return call, Agreement(describe(spec, resolved, plain) | decided)


# -- forward


torch.library.define("ring_attn::attention", _FORWARD, tags=_TAGS)


@torch.library.impl("ring_attn::attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of this rank's queries to all keys.

    Args:
        q: (batch, rows, nheads, headdim), this rank's shard.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        sinks: (nheads,), the same on every rank.
        *given: `CallArguments`.

    Returns:
        `out` (batch, rows, nheads, headdim_v), `lse` (batch, nheads, rows), and what the backward
        wants beyond the inputs and these, if the call is to be differentiated.

    Raises:
        NotImplementedError: within the capture of a CUDA graph; others as `ring_attention`.
    """
    arguments = CallArguments(*given)
    _refuse_capture(q)
    group = arguments.process_group
    try:
        call, agreement = _agreed(q, k, v, sinks, arguments)
        transport = open_p2p(group, arguments.transport)
        values = () if sinks is None else (sinks,)
        with transport.call("forward", agreement, q.device, values=values) as number:
            out, lse, saved = run.forward(call, q, k, v, transport, sinks)
    except BaseException as error:
        refused(group, error)
        raise
    if not arguments.differentiated:
        return out.contiguous(), lse.contiguous(), []
    known = (q, k, v, out, lse)
    extra = [x.contiguous() for x in saved if not any(x is one for one in known)]
    return out.contiguous(), lse.contiguous(), [_as_tensor(number), *extra]


def _agreed(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: CallArguments
) -> tuple[Call, Agreement]:
    """The call for this rank; under RING_ATTN_DEBUG compared with those of the other ranks."""
    try:
        spec = AttentionSpec.of(q, k, v, arguments.softcap, sinks)
        call, agreement = _prepare(spec, (q.size(1), k.size(1)), arguments)
    except Exception as error:
        tell_refusal(error, arguments.process_group, arguments.transport)
        raise
    if debug_enabled():
        described = agreement.values | values_of(sinks=sinks)
        check_agreement(described, arguments.process_group, arguments.transport)
    return call, agreement


# Checks that compare an operator's results with those of a second call allow for a difference of
# 1e-7, and the number of a call is one more in the second.
_NUMBER_UNIT = 2.0**-60


def _as_tensor(number: int) -> Tensor:
    """The number of a forward, for its backward: a graph can carry nothing but tensors."""
    return torch.tensor(number * _NUMBER_UNIT, dtype=torch.float64)


def _as_number(x: Tensor) -> int:
    return int(x.item() / _NUMBER_UNIT)


def _refuse_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "ring_attention cannot be captured in a CUDA graph: its messages are posted by the "
            "host, step by step; capture what lies around it, or compile without "
            "mode='reduce-overhead'"
        )


attention = torch.ops.ring_attn.attention.default


@torch.library.register_fake("ring_attn::attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    arguments = CallArguments(*given)
    batch, rows, nheads = q.shape[:3]
    out = q.new_empty(batch, rows, nheads, v.size(-1))
    lse = q.new_empty(batch, nheads, rows, dtype=_accum_dtype(q))
    if not arguments.differentiated:
        return out, lse, []
    number = torch.empty((), dtype=torch.float64)
    return out, lse, [number, *_fake_extra(q, k, v, arguments)]


def _accum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_extra(q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments) -> list[Tensor]:
    """Tensors like those that a forward saves; how many rows is unknown to the compiler."""
    kept = _kept(arguments)
    if len(kept) == len(_KNOWN):
        return []
    context = torch.library.get_ctx()
    rows = context.new_dynamic_size()
    rows_kv = k.size(1) if "k" in kept else context.new_dynamic_size()
    batch, headdim, headdim_v = q.size(0), q.size(-1), v.size(-1)
    if kept:
        heads = [(q.size(2), k.size(2))]
    else:
        rank, world_size = arguments.place
        degree = arguments.given_strategy(world_size).ulysses_degree
        # int: who has which heads is decided when a graph is made, also where sizes are symbols.
        shares = share_heads(int(q.size(2)), int(k.size(2)), degree)
        share = shares[rank % degree]
        heads = [(run.num, run.num_kv) for run in share.runs]
    extra = []
    for nheads, nheads_kv in heads:
        like = {
            "q": q.new_empty(batch, rows, nheads, headdim),
            "k": q.new_empty(batch, rows_kv, nheads_kv, headdim),
            "v": q.new_empty(batch, rows_kv, nheads_kv, headdim_v),
            "out": q.new_empty(batch, rows, nheads, headdim_v),
            "lse": q.new_empty(batch, nheads, rows, dtype=_accum_dtype(q)),
        }
        extra += [x for name, x in like.items() if name not in kept]
    return extra


# -- what is kept for the backward

_KNOWN = ("q", "k", "v", "out", "lse")


def _kept(arguments: CallArguments) -> tuple[str, ...]:
    """Which inputs and results of the operator the backward wants, by name."""
    if arguments.strategy in ("ring", "double_ring", "all_gather"):
        return _KNOWN
    rank, world_size = arguments.place
    strategy = arguments.given_strategy(world_size)
    if strategy.ulysses_degree > 1:
        return ()
    if strategy.exchange_q and 2 * rank + 1 != world_size:
        return ("k", "v")
    return _KNOWN


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    """Saves for the backward what it wants."""
    q, k, v, sinks, *given = inputs
    arguments = CallArguments(*given)
    # torch takes an empty list for one of tensors, whose gradients are a list.
    ctx.others = tuple([] if x == [] else None for x in given)
    _save(ctx, (q, k, v), sinks, arguments, output)


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    arguments: CallArguments,
    output: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    (q, k, v), (out, lse, extra) = inputs, output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.arguments = arguments
    if not arguments.differentiated:
        return
    known = dict(zip(_KNOWN, (q, k, v, out, lse), strict=True))
    kept = [known[name] for name in _kept(arguments)]
    ctx.save_for_backward(sinks, *arguments[:2], *kept, *extra)
    ctx.sizes = [*q.shape[:2], k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)]
    ctx.arguments = arguments._replace(cu_seqlens=None, cu_seqlens_k=None)


def _in_order(kept: tuple[str, ...], saved: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward's number, and what `_keep` has saved as the call's forward gave it."""
    number, *rest = saved[len(kept) :]
    if not kept:
        return number, tuple(rest)
    known, extra = iter(saved[: len(kept)]), iter(rest)
    return number, tuple(next(known if name in kept else extra) for name in _KNOWN)


# -- backward


torch.library.define("ring_attn::attention_backward", _BACKWARD, tags=_TAGS)


@torch.library.impl("ring_attn::attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of this rank's shards.

    Args:
        saved: the inputs and results that the strategy keeps, then the forward's third result,
            which begins with the forward's number.
        dout: (batch, rows, nheads, headdim_v).
        sinks: as in the forward.
        sizes: batch, rows of q and of kv, heads of q and of kv, headdim, headdim of v.
        *given: `CallArguments`.

    Returns:
        dq, dk, dv, and this rank's share of that of the sinks, empty without them.
    """
    arguments = CallArguments(*given)
    _refuse_capture(dout)
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    spec = AttentionSpec(
        dout.device.type,
        dout.dtype,
        batch,
        nheads,
        nheads_kv,
        headdim,
        headdim_v,
        arguments.softcap,
        sinks is not None,
    )
    group = arguments.process_group
    try:
        call, agreement = _prepare(spec, (rows, rows_kv), arguments)
        transport = open_p2p(group, arguments.transport)
        number, in_order = _in_order(_kept(arguments), saved)
        values = () if sinks is None else (sinks,)
        with transport.call(
            "backward", agreement, dout.device, values=values, number=_as_number(number)
        ):
            grads = run.backward(call, in_order, dout.contiguous(), transport, sinks)
    except BaseException as error:
        refused(group, error)
        raise
    dsinks = dout.new_empty(0) if grads.dsinks is None else grads.dsinks
    return grads.dq.contiguous(), grads.dk.contiguous(), grads.dv.contiguous(), dsinks


attention_backward = torch.ops.ring_attn.attention_backward.default


@torch.library.register_fake("ring_attn::attention_backward")
def _(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    return (
        dout.new_empty(batch, rows, nheads, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim_v),
        dout.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


def _gradients(ctx: Any, dout: Tensor | None, *_: object) -> tuple[Any, ...]:
    """Of q, k, v and sinks; of nothing else."""
    return (*_gradients_of_tensors(ctx, dout), *ctx.others)


def _gradients_of_tensors(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.arguments.differentiated:
        raise RuntimeError("ring_attn::attention was called without differentiated=True")
    if dout is None:
        return (None, None, None, None)
    check.check_plain("the gradient of out", dout)
    sinks, *documents_and_saved = ctx.saved_tensors
    documents, saved = documents_and_saved[:2], documents_and_saved[2:]
    grads = attention_backward(saved, dout, sinks, ctx.sizes, *documents, *ctx.arguments[2:])
    return (*grads[:3], None if sinks is None else grads[3])


def _refuse_second(ctx: Any, *grads: object) -> None:
    raise NotImplementedError(
        "ring_attention is differentiable once: the gradient of its gradient is not built"
    )


class _Attention(torch.autograd.Function):
    """The operator under autograd, as torch.library registers it, for calls that nobody compiles.

    torch.library's own way, through lists of tensors, takes 0.6 ms more of host time a call.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: CallArguments
    ) -> tuple[Tensor, ...]:
        """out, lse and what is saved, one by one."""
        out, lse, extra = attention(q, k, v, sinks, *arguments)
        if arguments.cu_seqlens is not None:
            # As they are now: the next batch may be written over them before the backward.
            cu_q, cu_k = (None if x is None else torch.tensor(x) for x in _documents(arguments))
            arguments = arguments._replace(cu_seqlens=cu_q, cu_seqlens_k=cu_k)
        _save(ctx, (q, k, v), sinks, arguments, (out, lse, extra))
        return (out, lse, *extra)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dsinks."""
        return (*_gradients_of_tensors(ctx, dout), None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: CallArguments
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call, with gradients to q, k, v and sinks; lse takes none."""
    if arguments.differentiated and not torch.compiler.is_compiling():
        out, lse, *_ = _Attention.apply(q, k, v, sinks, arguments)
    else:
        out, lse, _ = attention(q, k, v, sinks, *arguments)
    return out, lse


torch.library.register_autograd("ring_attn::attention", _gradients, setup_context=_keep)
torch.library.register_autograd("ring_attn::attention_backward", _refuse_second)
