"""The public functions: they check their arguments, and make `Options` and tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, overload

import torch.distributed as dist
from torch import Tensor

from ring_attn.attention import operators
from ring_attn.attention.arguments import Arguments, LayoutNumbers, layouts_and_mask
from ring_attn.attention.first_use import proven_backend
from ring_attn.backends import BackendChoice, Purpose
from ring_attn.call import (
    AttentionOptions,
    DecodeOptions,
    Layout,
    Options,
    checked_options,
    facts_of,
    purpose_of,
)
from ring_attn.checks import attention as checks
from ring_attn.checks import decoding as decode_checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.decoding import call as decode
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.torch_private import group_by_name
from ring_attn.transport import capture, groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.transport.ranks.identity import debug_enabled
from ring_attn.values.checks import check_flag
from ring_attn.values.compiling import left_out_of_graphs


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_max_logits: Literal[True],
    return_lse: bool = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, ...]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Mask | None = None,
    group: Group = None,
    layout: Layout = "contiguous",
    strategy: str | Strategy = "ring",
    backend: str = "auto",
    same_bits: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    transport: TransportOptions = TransportOptions(),  # noqa: B008 - frozen
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention over a sequence that is split across the ranks of a group.

    Every rank passes its own shard and gets the output for its own queries. Gradients equal those
    of dense attention; second derivatives are refused. `torch.cuda.graph` captures a call after an
    equal one: capture and replay alike on all ranks, for all groups in one order from one thread.

    Args:
        q: (batch, rows, nheads, headdim), or packed (rows, nheads, headdim) with `cu_seqlens`;
            float16, bfloat16, float32 or float64; any strides.
        k: (batch, rows_kv, nheads_kv, headdim); `nheads` is a multiple of `nheads_kv` (GQA, MQA).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q` (bottom-right aligned,
            as in flash-attention), in global positions.
        window_size: `(left, right)` keys seen on either side of that diagonal; -1 is unbounded.
            `causal` sets right to 0.
        softmax_scale: factor of the scores, from 2**-63 to 2**63; `headdim ** -0.5` by default.
        softcap: from 2**-63 to 2**63, caps the scores at `softcap * tanh(score / softcap)` before
            the mask; 0 is no cap.
        sinks: (nheads,) of any floating point dtype, used in float32: a logit for each head that is
            added to the denominator of the softmax. The same on every rank; its gradient is this
            rank's share, to be summed over the ranks as for any replicated parameter.
        cu_seqlens: int32 boundaries of documents in the global sequence, from 0; each document
            attends only to itself. Any lengths; the same on every rank. Rows after the last
            boundary are padding, with out 0, lse -inf (or the sink) and zero gradients; over
            several ranks, padding needs a `layout` passed by value.
        cu_seqlens_k: boundaries of the keys' documents, if they differ from the queries'.
        mask: any other mask, from `ring_attn.masks`, over the whole sequence; replaces causal,
            window_size and cu_seqlens. The same on every rank. Make it once for a batch, and pass
            the same mask to all layers.
        group: the ranks: a process group, a mesh with one axis, or None for the default group. In a
            mesh with two axes, such as (nodes, GPUs of a node), the size of the last axis is the
            degree of "hybrid" and "double_ring".
        layout: which positions the ranks hold: "contiguous", "zigzag", "striped", a
            `SequenceLayout`, or a pair for queries and keys. With a name, every rank holds equally
            many rows, unless `cu_seqlens` gives the length.
        strategy: how the ranks share the work: "ring", "double_ring", "all_gather", "exchange",
            "ulysses", "hybrid", "q_exchange", or a `Strategy` with its degrees. "auto" takes the
            fastest in a simulation of this machine (`explain` tells why). Rank 0 chooses; at the
            first call with new arguments the ranks exchange a short text to agree, later calls look
            the choice up. In a mesh with two axes, the last axis is then a node.
        backend: "auto" for the fastest, or the name of a backend, which runs or raises;
            `select_backend` tells which, and why.
        same_bits: whether out, lse, dq, dk and dv have the same bits at every world size. That
            needs a backend that folds in order (triton) and contiguous shards that start at
            multiples of its block, 128; a ring also needs `causal` without window and documents.
            Ulysses allows any layout and mask, but no KV head may be on two ranks. KV then travels
            in a ring's backward, and all_gather also gathers the Q side, even if another way costs
            fewer bytes. None: the same bits if possible. True: the same bits, or an error with the
            reason. False: any order; a ring adds dK and dV up, a transfer that a whole step hides.
            On NCCL two runs of all_gather with gradients added up are as equal as NCCL's sums.
        return_lse: also return lse.
        return_max_logits: also return the greatest score of each head over all queries and ranks,
            for QK-clip (Kimi K2, arXiv 2507.20534); takes one more small message. For the backends
            triton and reference.
        dropout_p: must be 0.
        alibi_slopes: must be None.
        transport: the timeout, and NCCL's share of the device.

    Returns:
        `out` (batch, rows, nheads, headdim_v) like q; with `return_lse` also `lse` (batch, nheads,
        rows), (nheads, rows) if packed, natural logarithm in float32 (float64 for float64),
        including the sink, not differentiable. A row that sees nothing has out 0, lse -inf (or the
        sink) and zero gradients. With `return_max_logits`, last, `max_logits` (nheads,) in the type
        of lse, the same on every rank: greatest score over visible keys, scaled and capped, without
        sinks; -inf if nothing is visible; not differentiable.

    Raises:
        ValueError: shapes, layout, window, documents, sinks or degrees do not fit, or a call that
            is differentiated has inputs made in inference mode.
        TypeError: a dtype or type that is not accepted, such as a sparse or nested tensor, or an
            option of another name, such as `is_causal`.
        NotImplementedError: dropout, ALiBi, forward-mode differentiation, transforms of
            `torch.func`, a call that the named backend does not support, `same_bits=True` where it
            is impossible, or a capture in a CUDA graph before an equal call without one.
        ImportError: the named backend's package is not installed.
        RuntimeError: no process group; a rank is missing, died, stalled, left its call by an error,
            or is in another call; and every call on a process group after such an error.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(seqlen=1000, world_size=2)
        >>> q, k, v = (layout.shard(torch.randn(1, 1000, 8, 64), rank) for _ in range(3))
        >>> ring_attn.ring_attention(q, k, v, causal=True, layout=layout).shape
        torch.Size([1, 500, 8, 64])
    """
    with reporting(group):
        checks.check_results(return_lse, return_max_logits, dropout_p)
        if alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes must be None: ALiBi is not built")
        checks.check_tensors(q, k, v, packed=cu_seqlens is not None or mask is not None)
        if sinks is not None:
            checks.check_sinks(sinks, q)
        if cu_seqlens is not None or cu_seqlens_k is not None:
            checks.check_boundaries("cu_seqlens", cu_seqlens, q.device)
            checks.check_boundaries("cu_seqlens_k", cu_seqlens_k, q.device)
        group_name, mesh_shape = groups.described(group, q.device.type)
        differentiated = checks.check_differentiated(q=q, k=k, v=v, sinks=sinks)
        left, right = checks.check_pair(window_size)
        options = checked_options(
            causal=causal,
            left=left,
            right=right,
            softmax_scale=softmax_scale,
            softcap=softcap,
            max_logits=return_max_logits,
            differentiated=differentiated,
            strategy=strategy,
            backend=backend,
            same_bits=same_bits,
            transport=transport,
            layout=layout if isinstance(layout, str) else None,
            group=group_name,
            mesh_shape=mesh_shape,
        )
        numbers: LayoutNumbers = ((), ())
        if not isinstance(layout, str):
            of_q, of_k = checks.check_layouts(layout)
            known = of_q.numbers
            numbers = known, known if of_k is of_q else of_k.numbers
        if mask is not None:
            checks.check_mask_alone(mask, causal, window_size, cu_seqlens, cu_seqlens_k)
        slices = None if mask is None else mask.tensor
        packed = q.ndim == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        # No operator takes a strided last dim: copies once here, not at every step.
        q = q if q.stride(-1) == 1 else q.contiguous()
        k = k if k.stride(-1) == 1 else k.contiguous()
        v = v if v.stride(-1) == 1 else v.contiguous()
        arguments = Arguments(cu_seqlens, cu_seqlens_k, slices, *numbers, text="")
        if strategy == "auto":
            options = _with_strategy(q, k, v, sinks, arguments, options)
        out, lse, max_logits = operators.attend(q, k, v, sinks, arguments, options)
        if packed:
            out, lse = out[0], lse[0]
    if return_max_logits:
        return (out, lse, max_logits) if return_lse else (out, max_logits)
    return (out, lse) if return_lse else out


@left_out_of_graphs(
    "strategy='auto' cannot be compiled, as the ranks exchange messages to choose: pass "
    "ring_attn.explain(...).strategy, or compile without fullgraph=True"
)
@capture.a_call
def _with_strategy(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    arguments: Arguments,
    options: Options,
) -> Options:
    """Return the options with the strategy that the ranks choose together."""
    group = group_by_name(options.group)
    rows = (q.size(1), k.size(1))
    layouts, mask = layouts_and_mask(
        options,
        rows,
        arguments.documents(),
        arguments.given_mask(),
        arguments.numbers,
        group.rank(),
        group.size(),
    )
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks, options.max_logits)
    backend = proven_backend(spec, options.backend, purpose_of(options, mask, layouts)).name
    ends = open_p2p(group, options.transport)
    if arguments.needs_even_rows:
        ends.check_even(rows, q.device)
    if debug_enabled():
        # Before the ranks choose together, which needs equal arguments.
        facts = facts_of(options, spec, layouts, mask, "auto", backend)
        facts["same_bits"] = options.same_bits
        ends.compare(Agreement(facts).report, q.device)
    strategy = agreed_strategy(
        spec,
        layouts,
        mask,
        ends,
        backend=backend,
        same_bits=options.same_bits,
        backward=options.differentiated,
        node_size=options.mesh_shape[1] if len(options.mesh_shape) == 2 else None,
        global_ranks=dist.get_process_group_ranks(group),
    )
    return replace(options, strategy=strategy, mesh_shape=())


@overload
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@left_out_of_graphs(
    "tree_decode sends messages from the host, which a graph cannot hold: compile without "
    "fullgraph=True, to leave the call out of the graph"
)
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Mask | None = None,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    transport: TransportOptions = TransportOptions(),  # noqa: B008 - frozen
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a KV cache that is split over the ranks; for inference.

    Every rank passes the same queries and its own rows of the cache, and gets the whole result,
    with the same bits as on every other rank. One exchange gathers all ranks' partial out and lse
    (Tree Attention, arXiv 2408.04093, has three). For a prompt, or a long part of one, use
    `ring_attention` with a layout of the new tokens and a layout of the cache that includes them.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the last seqlen_q tokens of the sequence, the same on
            every rank: usually 1, or a few for speculative decoding; float16, bfloat16, float32 or
            float64; any strides.
        k: (batch, rows, nheads_kv, headdim), this rank's rows of the cache, including the queries'
            tokens that this rank holds; rows may be 0.
        v: (batch, rows, nheads_kv, headdim_v).
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q`: each new token sees
            itself and the tokens before it.
        window_size: `(left, right)` keys seen on either side of that diagonal; -1 is unbounded.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        softcap: caps the scores at `softcap * tanh(score / softcap)`; 0 is no cap.
        sinks: (nheads,), a logit for each head that is added to the denominator once; the same on
            every rank.
        mask: from `ring_attn.masks`, over the new tokens and the whole cache; replaces causal and
            window_size. `Mask.rows` takes the last queries from a mask of the whole sequence.
        cache_seqlens: (batch,) int32, or an int: the length of each sequence over all ranks, its
            queries included; the same on every rank, read on the device. k and v have room for more
            rows, of which a rank's first ones count. Values outside the cache are refused where the
            host can read them, on CPU and with RING_ATTN_DEBUG=1; else results are undefined.
        block_table: (batch, pages) int32, for each sequence the pages of its rows on this rank, in
            order; k and v are then this rank's pool, (num_pages, page_size, nheads_kv, headdim).
        group: a process group, a mesh with one axis, or None for the default group.
        layout: which positions the ranks hold, the same on every rank; for a growing cache see
            `SequenceLayout.appended` and `next_rank`. None: every rank holds one run, in the order
            of the ranks, and each query sees all of them: a window, a mask and several causal
            queries need a layout. With `cache_seqlens` it is the layout of a sequence's room, one
            segment a rank; None: page p of a sequence (`page_size` positions) is on rank
            p % world_size.
        backend: as for `ring_attention`.
        return_lse: also return lse.
        transport: as for `ring_attention`.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) like q; with `return_lse` also `lse` (batch,
        nheads, seqlen_q), natural logarithm in float32 (float64 for float64), including the sink. A
        query that sees nothing has out 0 and lse -inf (or the sink).

    Raises:
        ValueError: shapes, layout, window or sinks do not fit, there is no query, or the layout is
            missing.
        TypeError: a dtype or type that is not accepted.
        NotImplementedError: inputs that require a gradient (use `ring_attention`), a call that the
            named backend does not support, or a capture in a CUDA graph before an equal call.
        ImportError: the named backend's package is not installed.
        RuntimeError: as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> q = torch.randn(1, 1, 8, 64)  # the same on both ranks
        >>> rows = (700, 300)[rank]
        >>> k, v = torch.randn(2, 1, rows, 2, 64)
        >>> ring_attn.tree_decode(q, k, v).shape
        torch.Size([1, 1, 8, 64])
    """
    with reporting(group):
        several = cache_seqlens is not None or block_table is not None
        checks.check_tensors(q, k, v, packed=False, paged=block_table is not None)
        decode_checks.check_decode(q, k, v, sinks, layout)
        if several:
            decode_checks.check_tables(q, cache_seqlens, block_table, mask)
        process_group = groups.check_group(group)
        check_flag("return_lse", return_lse)
        checks.check_sinks(sinks, q)
        groups.check_group_device(process_group, q.device)
        left, right = checks.check_pair(window_size)
        options = checked_options(
            causal=causal,
            left=left,
            right=right,
            softmax_scale=softmax_scale,
            softcap=softcap,
            backend=backend,
            transport=transport,
            group=process_group.group_name,
        )
        if mask is not None:
            checks.check_mask_alone(mask, not causal, window_size)
        if cache_seqlens is not None:
            out, lse = decode.attend_sequences(
                q, k, v, sinks, cache_seqlens, block_table, layout, options, process_group
            )
        else:
            out, lse = decode.attend(q, k, v, sinks, layout, mask, options, process_group)
    return (out, lse) if return_lse else out


@capture.a_call
def select_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    mask: Mask | None = None,
    same_bits: bool | None = None,
) -> BackendChoice:
    """Return the backend that `ring_attention` would use for a call, and why not the others.

    "auto" takes the fastest backend for ring steps, by published or estimated speeds of its kernels
    on the GPU's architecture, for the directions that the call has. On other GPUs and on CPUs it
    takes the first in an order of preference. If another backend can run the call, "auto" excludes:
    with `same_bits`, backends that do not fold in one order; for masks of several slices, such as
    documents, backends that run slice by slice; and for a differentiated call on CUDA, unless
    `same_bits` is False, backends whose backward differs from run to run: torch's cuDNN and flash.

    On a GPU, the first use of a backend's kernels runs a small case against attention in float64,
    once for each model of GPU, driver and versions. A backend whose kernels fail it is refused,
    with the error or the figures. RING_ATTN_FIRST_USE=off runs no cases.

    Args:
        q: (batch, rows, nheads, headdim) or (rows, nheads, headdim); only its shape, dtype, device
            and `requires_grad` matter.
        k, v: likewise.
        backend: "auto" or a name.
        softcap, sinks, window_size, cu_seqlens, mask, same_bits: as for `ring_attention`.

    Returns:
        `name`; `why`; `reasons`: for every backend None if it can run the call, else the reason why
        not; `tflops`: speeds by which backends were compared, if they were.

    Raises:
        ValueError: no backend of that name, shapes do not fit, or a bad softcap, window, documents
            or mask.
        TypeError: a dtype or type that is not accepted.
        NotImplementedError: the named backend does not support the call.
        ImportError: the named backend's package is not installed.

    Example:
        >>> q = torch.randn(1, 128, 8, 64)
        >>> choice = select_backend(q, q, q)
        >>> choice.name, choice.why
        ('aten', 'the only one on cpu')
    """
    checks.check_tensors(q, k, v, packed=True)
    checks.check_softcap(softcap)
    checks.check_sinks(sinks, q)
    checks.check_name("backend", backend)
    left, right = checks.check_window(window_size, False)
    documents = checks.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
    if mask is not None:
        checks.check_mask_alone(mask, False, window_size, cu_seqlens)
    purpose = Purpose(
        backward=checks.check_differentiated(q=q, k=k, v=v, sinks=sinks),
        same_bits=checks.check_same_bits(same_bits),
        window=left >= 0 if mask is None else mask.has_windows,
        several=len(documents) > 2 if mask is None else len(mask.slices) > 1,
        causal=right >= 0 if mask is None else mask.has_upper_bounds,
    )
    return proven_backend(AttentionSpec.of(q, k, v, softcap, sinks), backend, purpose)
