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
from typing import Any

import torch
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.attention.arguments import (
    Arguments,
    Asked,
    Documents,
    LayoutNumbers,
    layouts_and_mask,
    strategy_of,
)
from ring_attn.attention.first_use import proven_backend
from ring_attn.call import Call, Options, purpose_of
from ring_attn.checks import attention as checks
from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.heads import share_heads
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import check_call, code_of, why_not_same_bits
from ring_attn.torch_private import below_autograd
from ring_attn.transport import capture
from ring_attn.transport.base import Agreement
from ring_attn.transport.p2p import open_p2p, reporting

# `Arguments`; only the numbers of layouts may be symbols.
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

# Inductor must not capture the call: it does not ask whether all ranks capture the same one.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


# -- from the arguments to the call of a strategy


def _prepare(
    arguments: Arguments,
    asked: Asked,
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[Sequence[int], ...],
    sinks: Tensor | None,
) -> tuple[Call, Agreement]:
    """Return the call, and the values that must be equal on all ranks.

    `shapes`: of q, k and v.
    """
    documents: Documents = None, None
    given_mask = None
    # A warm call is short: most calls have neither documents nor a mask by value.
    if arguments.cu_seqlens is not None or arguments.cu_seqlens_k is not None:
        documents = arguments.documents()
    if arguments.mask is not None:
        given_mask = arguments.given_mask()
    return _make_call(
        arguments.text,
        asked.rank,
        asked.world_size,
        (device, dtype, *shapes, sinks is not None),
        documents,
        given_mask,
        arguments.numbers,
    )


# Cached by values that are fast to hash.
@lru_cache(maxsize=1024)
def _make_call(
    text: str,
    rank: int,
    world_size: int,
    tensors: tuple[Any, ...],
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
) -> tuple[Call, Agreement]:
    options = Options.from_text(text)
    device, dtype, q_shape, k_shape, v_shape, has_sinks = tensors
    spec = AttentionSpec(
        device_type=device.type,
        dtype=dtype,
        batch=q_shape[0],
        nheads=q_shape[2],
        nheads_kv=k_shape[2],
        headdim=q_shape[3],
        headdim_v=v_shape[3],
        softcap=options.softcap,
        sinks=has_sinks,
        max_logits=options.max_logits,
    )
    rows = q_shape[1], k_shape[1]
    layouts, mask = layouts_and_mask(
        options, rows, documents, given_mask, numbers, rank, world_size
    )
    call = Call(
        options=options,
        spec=spec,
        backend=proven_backend(spec, options.backend, purpose_of(options, mask, layouts)).name,
        layouts=layouts,
        mask=mask,
        rank=rank,
        strategy=strategy_of(text, world_size),
    )
    check_call(call)
    return call, Agreement(call.facts() | {"same_bits": why_not_same_bits(call) is None})


# -- forward


torch.library.define("ring_attn::attention", _FORWARD, tags=_TAGS)


@capture.a_call
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Attention of this rank's queries to all keys; `fields` as in `Arguments`.

    Returns `out` (batch, rows, nheads, headdim_v); `lse` (batch, nheads, rows); `max_logits`
    (nheads,), empty unless requested; and `saved`, empty unless the call is differentiated.
    """
    arguments = Arguments(*fields)
    asked = arguments.read()
    with reporting(asked.group):
        shapes = q.shape, k.shape, v.shape
        call, agreement = _prepare(arguments, asked, q.device, q.dtype, shapes, sinks)
        transport = open_p2p(asked.group, asked.options.transport)
        if arguments.needs_even_rows:
            transport.check_even((q.size(1), k.size(1)), q.device)
        with transport.call("forward", agreement, q.device, sinks=sinks) as number:
            out, lse, saved, max_logits = drivers.forward(call, q, k, v, transport, sinks)
    if not asked.options.differentiated:
        return out.contiguous(), lse.contiguous(), max_logits, []
    kept = _kept(asked.strategy, asked.rank, asked.world_size)
    # A tensor, since a graph can pass only tensors to the backward.
    extra = [torch.tensor(number * _NUMBER_UNIT, dtype=torch.float64)]
    for name, x in zip(call.programs[False].saved, saved, strict=True):
        if name not in kept:
            extra.append(x.contiguous())
    return out.contiguous(), lse.contiguous(), max_logits, extra


# Scales the numbers of calls down: torch's checks compare the results of two calls within 1e-7,
# and the numbers of these calls differ by 1.
_NUMBER_UNIT = 2.0**-60


torch.library.impl("ring_attn::attention", "CompositeExplicitAutograd", _attention)
attention = torch.ops.ring_attn.attention.default


@torch.library.register_fake("ring_attn::attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    asked = Arguments(*fields).read()
    batch, rows, nheads = q.shape[:3]
    out = q.new_empty(batch, rows, nheads, v.size(-1))
    lse = q.new_empty(batch, nheads, rows, dtype=accum_dtype(q.dtype))
    max_logits = lse.new_empty(nheads if asked.options.max_logits else 0)
    if not asked.options.differentiated:
        return out, lse, max_logits, []
    number = torch.empty((), dtype=torch.float64)
    return out, lse, max_logits, [number, *_fake_extra(q, k, v, asked)]


def _fake_extra(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> list[Tensor]:
    """Tensors shaped like the forward's saved ones; the compiler does not know their rows."""
    kept = _kept(asked.strategy, asked.rank, asked.world_size)
    if kept == _KNOWN:
        return []
    context = torch.library.get_ctx()
    rows = context.new_dynamic_size()
    rows_kv = k.size(1) if "k" in kept else context.new_dynamic_size()
    batch, headdim, headdim_v = q.size(0), q.size(-1), v.size(-1)
    if kept:
        heads = [(q.size(2), k.size(2))]
    else:
        degree = asked.strategy.ulysses_degree
        # int: a graph is compiled for one share of the heads, even if sizes are symbols.
        shares = share_heads(
            int(q.size(2)), int(k.size(2)), degree, whole_groups=asked.options.same_bits is True
        )
        share = shares[asked.rank % degree]
        heads = [(run.num, run.num_kv) for run in share.runs]
    extra = []
    for nheads, nheads_kv in heads:
        like = {
            "q": q.new_empty(batch, rows, nheads, headdim),
            "k": q.new_empty(batch, rows_kv, nheads_kv, headdim),
            "v": q.new_empty(batch, rows_kv, nheads_kv, headdim_v),
            "out": q.new_empty(batch, rows, nheads, headdim_v),
            "lse": q.new_empty(batch, nheads, rows, dtype=accum_dtype(q.dtype)),
        }
        extra += [x for name, x in like.items() if name not in kept]
    return extra


# -- saved for the backward

_KNOWN = ("q", "k", "v", "out", "lse")


@lru_cache(maxsize=1024)
def _kept(strategy: Strategy, rank: int, world_size: int) -> tuple[str, ...]:
    """Names of the operator's inputs and results that the strategy's backward reads."""
    return code_of(strategy).kept(rank, world_size)


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    arguments: Arguments,
    output: tuple[Tensor, Tensor, Tensor, list[Tensor]],
) -> None:
    (q, k, v), (out, lse, max_logits, extra) = inputs, output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, max_logits)
    asked = arguments.read()
    ctx.arguments, ctx.differentiated = arguments, asked.options.differentiated
    if not asked.options.differentiated:
        return
    known = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    kept = map(known.__getitem__, _kept(asked.strategy, asked.rank, asked.world_size))
    ctx.save_for_backward(sinks, *arguments[:3], *kept, *extra)
    ctx.sizes = [*q.shape[:2], k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)]
    ctx.arguments = arguments._replace(cu_seqlens=None, cu_seqlens_k=None, mask=None)


def _in_order(kept: tuple[str, ...], saved: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward's number, and the tensors of `_save` in the order of the strategy's forward."""
    number, *rest = saved[len(kept) :]
    if not kept or not rest:
        return number, tuple(rest or saved[: len(kept)])
    known, extra = iter(saved[: len(kept)]), iter(rest)
    return number, tuple(next(known if name in kept else extra) for name in _KNOWN)


# -- backward


torch.library.define("ring_attn::attention_backward", _BACKWARD, tags=_TAGS)


@capture.a_call
def _attention_backward(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and this rank's share of dsinks, which is empty without sinks.

    `saved` are the inputs and results that the strategy keeps, then `saved` of the forward;
    `fields` as in `Arguments`.
    """
    arguments = Arguments(*fields)
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    asked = arguments.read()
    with reporting(asked.group):
        kv = batch, rows_kv, nheads_kv
        shapes = (batch, rows, nheads, headdim), (*kv, headdim), (*kv, headdim_v)
        call, agreement = _prepare(arguments, asked, dout.device, dout.dtype, shapes, sinks)
        transport = open_p2p(asked.group, asked.options.transport)
        kept = _kept(asked.strategy, asked.rank, asked.world_size)
        number, tensors = _in_order(kept, saved)
        forward = int(number.item() / _NUMBER_UNIT)
        with transport.call("backward", agreement, dout.device, sinks=sinks, number=forward):
            grads = drivers.backward(call, tensors, dout.contiguous(), transport, sinks)
    dsinks = dout.new_empty(0) if grads.dsinks is None else grads.dsinks
    return grads.dq.contiguous(), grads.dk.contiguous(), grads.dv.contiguous(), dsinks


torch.library.impl(
    "ring_attn::attention_backward", "CompositeExplicitAutograd", _attention_backward
)
attention_backward = torch.ops.ring_attn.attention_backward.default


@torch.library.register_fake("ring_attn::attention_backward")
def _(
    saved: list[Tensor], dout: Tensor, sinks: Tensor | None, sizes: Sequence[int], *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, rows_kv, nheads, nheads_kv, headdim, headdim_v = sizes
    return (
        dout.new_empty(batch, rows, nheads, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim),
        dout.new_empty(batch, rows_kv, nheads_kv, headdim_v),
        dout.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


# -- autograd


def _gradients(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.differentiated:
        raise RuntimeError("ring_attn::attention was called without differentiated=True")
    if dout is None:
        return (None, None, None, None)
    checks.check_plain("the gradient of out", dout)
    sinks, cu_seqlens, cu_seqlens_k, mask, *saved = ctx.saved_tensors
    arguments = ctx.arguments._replace(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, mask=mask)
    # Autograd's part only refuses second derivatives.
    with nullcontext() if torch.is_grad_enabled() else below_autograd():
        grads = attention_backward(saved, dout, sinks, ctx.sizes, *arguments)
    return (*grads[:3], None if sinks is None else grads[3])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]
) -> None:
    q, k, v, sinks, *arguments = inputs
    # torch treats `[]` as a list of tensors and expects `[]` as its gradient.
    ctx.no_gradients = tuple([] if x == [] else None for x in arguments)
    _save(ctx, (q, k, v), sinks, Arguments(*arguments), output)


def _backward(ctx: Any, dout: Tensor | None, *_: object) -> tuple[Any, ...]:
    return (*_gradients(ctx, dout), *ctx.no_gradients)


def _refuse_second(ctx: Any, *grads: object) -> None:
    raise NotImplementedError(
        "ring_attention is differentiable once: second derivatives are not built"
    )


torch.library.register_autograd("ring_attn::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("ring_attn::attention_backward", _refuse_second)


class _Attention(torch.autograd.Function):
    """Autograd of the operator for calls outside of a compiler.

    torch.library's registered autograd uses lists of tensors, and takes 0.6 ms more host time a
    call.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Arguments
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            out, lse, max_logits, extra = attention(q, k, v, sinks, *arguments)
        if arguments.cu_seqlens is not None:
            # Copied: the next batch may overwrite the boundaries before the backward.
            cu_q, cu_k = (None if x is None else torch.tensor(x) for x in arguments.documents())
            arguments = arguments._replace(cu_seqlens=cu_q, cu_seqlens_k=cu_k)
        _save(ctx, (q, k, v), sinks, arguments, (out, lse, max_logits, extra))
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, dout), None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    arguments: Arguments,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `out`, `lse` and `max_logits` of a call; only `out` is differentiable.

    `arguments` are without the text of the options.
    """
    arguments = arguments._replace(text=options.text)
    if options.differentiated and not torch.compiler.is_compiling():
        out, lse, max_logits = _Attention.apply(q, k, v, sinks, arguments)
    else:
        out, lse, max_logits, _ = attention(q, k, v, sinks, *arguments)
    return out, lse, max_logits
