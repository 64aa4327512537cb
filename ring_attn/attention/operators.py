"""The operators `ring_attn::attention` and `ring_attn::attention_backward`, and their autograd.

`ring_attention` is one operator of torch.library: torch.compile keeps it whole in a graph,
selective checkpointing can save its results, and autograd knows its backward.

    ring_attn::attention           q, k, v, sinks, Arguments -> out, lse, max_logits, saved
    ring_attn::attention_backward  saved, dout, sinks, sizes, Arguments -> dq, dk, dv, dsinks

Every rank plans a call when the operator runs, from the real sizes. So a graph that was compiled
for any length contains no plan.

`saved` holds the backward's inputs beyond q, k, v, out and lse: first the number of the forward,
then the tensors by heads for Ulysses, or the exchanged queries for q_exchange. Their rows depend on
the shards of other ranks, so the compiler gives them new symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.attention.arguments import (
    Arguments,
    LayoutNumbers,
    Request,
    layouts_and_mask,
    strategy_of,
)
from ring_attn.attention.first_use import proven_backend
from ring_attn.call import Call, Documents, Options, purpose_of
from ring_attn.checks import attention as checks
from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.heads import share_heads
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import check_call, code_of, why_not_same_bits
from ring_attn.torch_private import Context, below_autograd
from ring_attn.transport import capture
from ring_attn.transport.base import Agreement
from ring_attn.transport.p2p import open_p2p, reporting

# The values of `Arguments`, which torch.library passes in the order of the schema, without types.
Fields: TypeAlias = Any

# Device, dtype, shapes of q, k and v, and whether there are sinks.
Sizes: TypeAlias = tuple[
    torch.device, torch.dtype, Sequence[int], Sequence[int], Sequence[int], bool
]

# The schema of `Arguments`; only the numbers of layouts may be symbols.
_ARGUMENTS = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? mask, SymInt[] layout_q, SymInt[] layout_k, "
    "str call"
)
_FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor[])"
)
# `sizes` are batch, rows of q and of kv, heads of q and of kv, headdim, headdim of v.
_BACKWARD = (
    f"(Tensor[] saved, Tensor dout, Tensor? sinks, SymInt[] sizes, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

# Inductor must not capture the call: it does not check whether all ranks capture the same call.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


# -- from the arguments to the call of a strategy


def _prepare(
    arguments: Arguments,
    request: Request,
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    sinks: Tensor | None,
) -> tuple[Call, Agreement]:
    """Return the call, and the values that must be equal on all ranks.

    `shapes` are those of q, k and v.
    """
    documents: Documents = None, None
    given_mask = None
    # A warm call is short: most calls have neither documents nor a mask by value.
    if arguments.cu_seqlens is not None or arguments.cu_seqlens_k is not None:
        documents = arguments.documents()
    if arguments.mask is not None:
        given_mask = arguments.given_mask()
    q_shape, k_shape, v_shape = shapes
    return requested_call(
        arguments.text,
        request.rank,
        request.world_size,
        (device, dtype, q_shape, k_shape, v_shape, sinks is not None),
        documents,
        given_mask,
        arguments.numbers,
    )


# Cached by values that are fast to hash, and passed by position, which is faster than by name.
@lru_cache(maxsize=1024)
def requested_call(
    text: str,
    rank: int,
    world_size: int,
    sizes: Sizes,
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
) -> tuple[Call, Agreement]:
    """Return the call of an operator's arguments, and its facts that must be equal on all ranks."""
    options = Options.from_text(text)
    device, dtype, q_shape, k_shape, v_shape, has_sinks = sizes
    batch, rows, nheads, headdim = q_shape
    _, rows_kv, nheads_kv, _ = k_shape
    headdim_v = v_shape[-1]
    spec = AttentionSpec(
        device_type=device.type,
        dtype=dtype,
        batch=batch,
        nheads=nheads,
        nheads_kv=nheads_kv,
        headdim=headdim,
        headdim_v=headdim_v,
        softcap=options.softcap,
        sinks=has_sinks,
        max_logits=options.max_logits,
    )
    layouts, mask = layouts_and_mask(
        options,
        rows=(rows, rows_kv),
        documents=documents,
        given_mask=given_mask,
        numbers=numbers,
        rank=rank,
        world_size=world_size,
    )
    purpose = purpose_of(options, mask, layouts)
    call = Call(
        options=options,
        spec=spec,
        backend=proven_backend(spec, options.backend, purpose).name,
        layouts=layouts,
        mask=mask,
        rank=rank,
        strategy=strategy_of(text, world_size),
    )
    check_call(call)
    facts = call.facts()
    facts["same_bits"] = why_not_same_bits(call) is None
    return call, Agreement(facts)


# -- forward


torch.library.define("ring_attn::attention", _FORWARD, tags=_TAGS)


@capture.a_call
def run_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *fields: Fields
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute attention of this rank's queries to all keys.

    Returns `out` (batch, rows, nheads, headdim_v); `lse` (batch, nheads, rows); `max_logits`
    (nheads,), empty unless requested; and `saved`, empty unless the call is differentiated.
    """
    arguments = Arguments(*fields)
    request = arguments.read()
    with reporting(request.group):
        shapes = q.shape, k.shape, v.shape
        call, agreement = _prepare(arguments, request, q.device, q.dtype, shapes, sinks)
        transport = open_p2p(request.group, request.options.transport)
        if arguments.needs_even_rows:
            transport.check_even((q.size(1), k.size(1)), q.device)
        if arguments.cu_seqlens is not None and call.documents_like_of_one_rank is not None:
            transport.check_documents(*call.documents_like_of_one_rank, q.device)
        with transport.call("forward", agreement, q.device, sinks=sinks) as number:
            out, lse, saved, max_logits = drivers.forward(call, q, k, v, transport, sinks)
    if not request.options.differentiated:
        return out.contiguous(), lse.contiguous(), max_logits, []
    kept = _kept(request.strategy, request.rank, request.world_size)
    # The number is in a tensor, since a graph can pass only tensors to the backward.
    extra = [torch.tensor(number * _NUMBER_UNIT, dtype=torch.float64)]
    for name, x in zip(call.programs[False].saved, saved, strict=True):
        if name not in kept:
            extra.append(x.contiguous())
    return out.contiguous(), lse.contiguous(), max_logits, extra


# Scales the numbers of calls down: torch's checks require that the results of two calls differ by
# less than 1e-7, and the numbers of these calls differ by 1.
_NUMBER_UNIT = 2.0**-60


torch.library.impl("ring_attn::attention", "CompositeExplicitAutograd", run_attention)
attention = torch.ops.ring_attn.attention.default


@torch.library.register_fake("ring_attn::attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *fields: Fields
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    request = Arguments(*fields).read()
    batch, rows, nheads = q.shape[:3]
    out = q.new_empty(batch, rows, nheads, v.size(-1))
    lse = q.new_empty(batch, nheads, rows, dtype=accum_dtype(q.dtype))
    max_logits = lse.new_empty(nheads if request.options.max_logits else 0)
    if not request.options.differentiated:
        return out, lse, max_logits, []
    number = torch.empty((), dtype=torch.float64)
    return out, lse, max_logits, [number, *_fake_extra(q, k, v, request)]


def _fake_extra(q: Tensor, k: Tensor, v: Tensor, request: Request) -> list[Tensor]:
    """Return tensors of the shapes that the forward saves; the compiler does not know the rows."""
    kept = _kept(request.strategy, request.rank, request.world_size)
    if kept == _KNOWN:
        return []
    context = torch.library.get_ctx()
    rows = context.new_dynamic_size()
    rows_kv = k.size(1) if "k" in kept else context.new_dynamic_size()
    batch, headdim, headdim_v = q.size(0), q.size(-1), v.size(-1)
    if kept:
        heads = [(q.size(2), k.size(2))]
    else:
        degree = request.strategy.ulysses_degree
        # int: a graph is compiled for one share of the heads, even if sizes are symbols.
        nheads, nheads_kv = int(q.size(2)), int(k.size(2))
        whole_groups = request.options.same_bits is True
        shares = share_heads(nheads, nheads_kv, degree, whole_groups=whole_groups)
        share = shares[request.rank % degree]
        heads = [(run.num, run.num_kv) for run in share.runs]
    extra = []
    for nheads, nheads_kv in heads:
        tensors = {
            "q": q.new_empty(batch, rows, nheads, headdim),
            "k": q.new_empty(batch, rows_kv, nheads_kv, headdim),
            "v": q.new_empty(batch, rows_kv, nheads_kv, headdim_v),
            "out": q.new_empty(batch, rows, nheads, headdim_v),
            "lse": q.new_empty(batch, nheads, rows, dtype=accum_dtype(q.dtype)),
        }
        extra += [x for name, x in tensors.items() if name not in kept]
    return extra


# -- saved for the backward

_KNOWN = ("q", "k", "v", "out", "lse")


@lru_cache(maxsize=1024)
def _kept(strategy: Strategy, rank: int, world_size: int) -> tuple[str, ...]:
    """Return names of the operator's inputs and results that the strategy's backward reads."""
    return code_of(strategy).kept(rank, world_size)


def _save(
    ctx: Context,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    arguments: Arguments,
    output: tuple[Tensor, Tensor, Tensor, list[Tensor]],
) -> None:
    """Save everything that the backward reads on autograd's context."""
    q, k, v = inputs
    out, lse, max_logits, extra = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, max_logits)
    request = arguments.read()
    ctx.arguments = arguments
    ctx.differentiated = request.options.differentiated
    if not request.options.differentiated:
        return
    known = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    kept = map(known.__getitem__, _kept(request.strategy, request.rank, request.world_size))
    cu_seqlens, cu_seqlens_k, mask, *_ = arguments
    ctx.save_for_backward(sinks, cu_seqlens, cu_seqlens_k, mask, *kept, *extra)
    batch, rows, nheads, headdim = q.shape
    _, rows_kv, nheads_kv, headdim_v = v.shape
    ctx.sizes = [batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v]
    # Tensors are in `save_for_backward` only, so that autograd checks and frees them.
    ctx.arguments = arguments._replace(cu_seqlens=None, cu_seqlens_k=None, mask=None)


def _in_order_of_forward(
    kept: tuple[str, ...], saved: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the forward's number, and the saved tensors in the order of the strategy's forward.

    `saved` has the tensors that are named in `kept`, the number, and the tensors that only the
    strategy knows.
    """
    known = saved[: len(kept)]
    number, *extra = saved[len(kept) :]
    if not kept:
        return number, tuple(extra)
    if not extra:
        return number, tuple(known)
    next_known, next_extra = iter(known), iter(extra)
    return number, tuple(next(next_known if name in kept else next_extra) for name in _KNOWN)


# -- backward


torch.library.define("ring_attn::attention_backward", _BACKWARD, tags=_TAGS)


@capture.a_call
def run_attention_backward(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *fields: Fields
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv, and this rank's share of dsinks, which is empty without sinks.

    `saved` has the inputs and results that the strategy's backward reads, then `saved` of the
    forward.
    """
    arguments = Arguments(*fields)
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    request = arguments.read()
    with reporting(request.group):
        q_shape = (batch, rows, nheads, headdim)
        k_shape = (batch, rows_kv, nheads_kv, headdim)
        v_shape = (batch, rows_kv, nheads_kv, headdim_v)
        shapes = q_shape, k_shape, v_shape
        call, agreement = _prepare(arguments, request, dout.device, dout.dtype, shapes, sinks)
        transport = open_p2p(request.group, request.options.transport)
        kept = _kept(request.strategy, request.rank, request.world_size)
        scaled_number, tensors = _in_order_of_forward(kept, saved)
        number = int(scaled_number.item() / _NUMBER_UNIT)
        with transport.call("backward", agreement, dout.device, sinks=sinks, number=number):
            grads = drivers.backward(call, tensors, dout.contiguous(), transport, sinks)
    dsinks = dout.new_empty(0) if grads.dsinks is None else grads.dsinks
    return grads.dq.contiguous(), grads.dk.contiguous(), grads.dv.contiguous(), dsinks


torch.library.impl(
    "ring_attn::attention_backward", "CompositeExplicitAutograd", run_attention_backward
)
attention_backward = torch.ops.ring_attn.attention_backward.default


@torch.library.register_fake("ring_attn::attention_backward")
def _(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *fields: Fields
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    return (
        dout.new_empty(batch, rows, nheads, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim_v),
        dout.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


# -- autograd


def _gradients(ctx: Context, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and sinks."""
    if not ctx.differentiated:
        raise RuntimeError("ring_attn::attention was called without differentiated=True")
    if dout is None:
        return (None, None, None, None)
    checks.check_plain("the gradient of out", dout)
    sinks, cu_seqlens, cu_seqlens_k, mask, *saved = ctx.saved_tensors
    arguments = ctx.arguments._replace(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, mask=mask)
    # Autograd of the backward only refuses second derivatives, so it is skipped if there are none.
    with nullcontext() if torch.is_grad_enabled() else below_autograd():
        dq, dk, dv, dsinks = attention_backward(saved, dout, sinks, ctx.sizes, *arguments)
    return dq, dk, dv, None if sinks is None else dsinks


def _setup_context(
    ctx: Context, inputs: tuple[Fields, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]
) -> None:
    q, k, v, sinks, *arguments = inputs
    # torch treats `[]` as a list of tensors and expects `[]` as its gradient.
    ctx.no_gradients = tuple([] if x == [] else None for x in arguments)
    _save(ctx, (q, k, v), sinks, Arguments(*arguments), output)


def _backward(ctx: Context, dout: Tensor | None, *_: object) -> tuple[object, ...]:
    return (*_gradients(ctx, dout), *ctx.no_gradients)


def _refuse_second(ctx: Context, *grads: object) -> None:
    raise NotImplementedError(
        "ring_attention is differentiable once: second derivatives are not supported"
    )


torch.library.register_autograd("ring_attn::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("ring_attn::attention_backward", _refuse_second)


class AttentionFunction(torch.autograd.Function):
    """Autograd of the operator for calls outside of a compiler.

    The autograd that torch.library registers uses lists of tensors, and takes 0.6 ms more host time
    for each call.
    """

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Arguments
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            out, lse, max_logits, extra = attention(q, k, v, sinks, *arguments)
        if arguments.cu_seqlens is not None:
            # Copied: the next batch may overwrite the boundaries before the backward.
            cu_q, cu_k = arguments.documents()
            arguments = arguments._replace(
                cu_seqlens=None if cu_q is None else torch.tensor(cu_q),
                cu_seqlens_k=None if cu_k is None else torch.tensor(cu_k),
            )
        _save(ctx, (q, k, v), sinks, arguments, (out, lse, max_logits, extra))
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Context, dout: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dsinks = _gradients(ctx, dout)
        return dq, dk, dv, dsinks, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    arguments: Arguments,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `out`, `lse` and `max_logits` of a call; only `out` is differentiable.

    `arguments` do not have the text of the options yet.
    """
    arguments = arguments._replace(text=options.text)
    if options.differentiated and not torch.compiler.is_compiling():
        out, lse, max_logits = AttentionFunction.apply(q, k, v, sinks, arguments)
    else:
        out, lse, max_logits, _ = attention(q, k, v, sinks, *arguments)
    return out, lse, max_logits
