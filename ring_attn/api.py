"""The public functions: they check their arguments, and convert them to `Options` and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, overload

import torch.distributed as dist
from torch import Tensor

from ring_attn.attention import decode, joint, operators
from ring_attn.attention.arguments import Arguments, layouts_and_mask
from ring_attn.attention.first_use import proven_backend
from ring_attn.attention.joint import is_joint
from ring_attn.attention.mask_lists import fold_of
from ring_attn.backends import BackendChoice, Purpose
from ring_attn.call import (
    AttentionOptions,
    DecodeOptions,
    Layout,
    Masks,
    Options,
    checked_options,
    facts_of,
    purpose_of,
)
from ring_attn.checks import attention as checks
from ring_attn.checks import decoding as decode_checks
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.transport import capture, groups
from ring_attn.transport.base import Agreement
from ring_attn.transport.groups import Group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.transport.ranks.identity import debug_enabled
from ring_attn.values.checks import check_flag
from ring_attn.values.compiling import left_out_of_graphs

# The public functions are longer than 60 lines: most of these are documentation, and each further
# function would be one more Python call in every call of a layer.


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
    *positional: object,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Masks | None = None,
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
    **unknown: object,
) -> Tensor | tuple[Tensor, ...]:
    """Compute exact attention over a sequence that is sharded across the ranks of a group.

    Every rank passes its own shard, and gets the output of its own queries. Gradients are those of
    dense attention over the whole sequence; second derivatives raise an error.

    CUDA graphs: run the same call once before capturing it. All ranks must capture and replay the
    same calls in the same order, over all process groups, from one thread.

    Args:
        q: (batch, rows, nheads, headdim), or packed (rows, nheads, headdim) with `cu_seqlens`;
            float16, bfloat16, float32 or float64; any strides.
        k: (batch, rows_kv, nheads_kv, headdim), in the dtype of q; `nheads` must be a multiple of
            `nheads_kv` (GQA, MQA).
        v: (batch, rows_kv, nheads_kv, headdim_v), in the dtype of q.
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q` (bottom-right aligned,
            as in flash-attention), in global positions.
        window_size: `(left, right)`, the numbers of keys seen before and after that diagonal; -1 is
            unbounded. `causal` sets right to 0.
        softmax_scale: factor of the scores, from 2**-63 to 2**63. Default: `headdim ** -0.5`.
        softcap: caps scores at `softcap * tanh(score / softcap)` before the mask; from 2**-63 to
            2**63, or 0 for no cap.
        sinks: (nheads,), any floating point dtype, used in float32. For each head, a logit that is
            added to the denominator of the softmax. It must be the same on every rank. Its gradient
            is this rank's share; sum it over the ranks, as for any replicated parameter.
        cu_seqlens: int32 boundaries of documents in the global sequence, from 0. Each document
            attends only to itself. Documents can have any length. It must be the same on every
            rank. Rows after the last boundary are padding: they get out 0, lse -inf (or the sink)
            and zero gradients. On several ranks, padding needs a `layout` passed by value.
        cu_seqlens_k: boundaries of the documents of keys, if they differ from `cu_seqlens`.
        mask: any other mask, from `ring_attn.masks`, over the whole sequence. It replaces causal,
            window_size and cu_seqlens, and must be the same on every rank. Make it once for a
            batch, and pass the same object to all layers. A list has one mask for each batch entry.
            A list of lists has, for each batch entry, one mask for each of some groups of
            consecutive heads; with groups of heads there are no sinks and no `max_logits`. A list
            of one element serves all batch entries.
        group: the ranks: a process group, a mesh with one axis, or None for the default group. In a
            mesh with two axes, such as (nodes, GPUs of a node), the size of the last axis is the
            degree of "hybrid" and "double_ring".
        layout: which positions each rank holds: "contiguous", "zigzag", "striped", a
            `SequenceLayout`, a `JointLayout` of which every rank holds some rows, or a pair of
            layouts for queries and keys. With a name, every rank must have the same number of rows,
            unless `cu_seqlens` gives the length. The gradients of rows that every rank holds are
            shares: their sum over the ranks is the gradient. If every rank holds all keys, nothing
            is sent, whatever the strategy is.
        strategy: how the ranks share the work: "ring", "double_ring", "all_gather", "exchange",
            "ulysses", "hybrid", "q_exchange", a `Strategy` with its degrees, or "auto". With
            "auto", rank 0 simulates the strategies that can be the fastest on this machine, and
            chooses one within 2.5 % of the fastest (`explain` shows why). In the first call with
            new arguments, the ranks exchange a short text to agree on it; later calls use a cache.
            In a mesh with two axes, "auto" assumes that the last axis is a node.
        backend: "auto" for the fastest one, or the name of a backend, which is used or raises an
            error. `select_backend` returns the choice, and the reasons.
        same_bits: whether out, lse, dq, dk and dv have the same bits at every world size. None: if
            possible. True: always, or an error with the reason. False: sums may have any order.
            The same bits need a backend that sums in a fixed order (triton), and contiguous shards
            that start at multiples of its block, 128. A ring also needs `causal` without window
            and documents. Ulysses allows any layout and mask, but every KV head must be on one
            rank. With the same bits, a ring's backward sends KV, and all_gather also gathers the Q
            side, even if another way takes fewer bytes. With False, a ring sums dK and dV on their
            way, and hides this transfer behind a whole step. On NCCL, all_gather then sums
            gradients with NCCL's own reduction, so repeated runs are only as deterministic as NCCL.
        return_lse: whether to return lse, too.
        return_max_logits: whether to return the greatest score of each head over all queries and
            ranks, too, for QK-clip (Kimi K2, arXiv 2507.20534). This takes one more small message,
            and the backend triton or reference.
        dropout_p: must be 0; there is no dropout.
        alibi_slopes: must be None; there is no ALiBi.
        transport: the timeout in seconds, and NCCL's share of the device.

    Returns:
        `out`, (batch, rows, nheads, headdim_v) or packed, in the dtype of q. A row that sees no key
        has out 0, lse -inf (or the sink) and zero gradients.

        With `return_lse` also `lse`, (batch, nheads, rows) or packed (nheads, rows), in float32
        (float64 for float64): natural logarithm of the softmax's denominator, including the sink;
        not differentiable.

        With `return_max_logits` also `max_logits`, last, (nheads,), in the dtype of lse: the
        greatest score over visible keys, scaled and capped, without sinks, and -inf if no key is
        visible. It is the same on every rank; not differentiable.

    Raises:
        ValueError: shapes, layout, window, documents, sinks or degrees do not fit, or the inputs of
            a differentiated call were created in inference mode.
        TypeError: a dtype or type that is not accepted, such as a sparse or nested tensor, or an
            unknown option, such as `is_causal`.
        NotImplementedError: dropout, ALiBi, forward-mode differentiation, transforms of
            `torch.func`, a call that the named backend does not support, `same_bits=True` where it
            is not possible, or a capture in a CUDA graph without the same call before it.
        ImportError: the package of the named backend is not installed.
        RuntimeError: there is no process group, or a rank crashed, hung, raised an error or made a
            different call. Later calls on the same process group raise it again.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(seqlen=1000, world_size=2)
        >>> q, k, v = (layout.shard(torch.randn(1, 1000, 8, 64), rank) for _ in range(3))
        >>> ring_attn.ring_attention(q, k, v, causal=True, layout=layout).shape
        torch.Size([1, 500, 8, 64])
    """
    # Longer than a screen: it names each option where it is declared, checked and handed on.
    # `is_joint` is asked of what may be one: a plain call stays as short as it is.
    several_layouts = isinstance(layout, (JointLayout, tuple, list)) and is_joint(layout)
    if not (positional or unknown) and (several_layouts or isinstance(mask, (list, tuple))):
        options_of_user: dict[str, joint.Option] = {
            "causal": causal,
            "window_size": window_size,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "sinks": sinks,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_k": cu_seqlens_k,
            "group": group,
            "layout": layout,
            "strategy": strategy,
            "backend": backend,
            "same_bits": same_bits,
            "return_lse": return_lse,
            "return_max_logits": return_max_logits,
            "dropout_p": dropout_p,
            "alibi_slopes": alibi_slopes,
            "transport": transport,
        }
        several = _with_joint_layout if several_layouts else _with_masks
        return several(q, k, v, mask, **options_of_user)
    with reporting(group):
        if positional or unknown:
            checks.check_unknown("ring_attention", positional, unknown, AttentionOptions)
        checks.check_results(return_lse, return_max_logits, dropout_p)
        if alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes must be None: ALiBi is not supported")
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
        numbers_q: tuple[int, ...] = ()
        numbers_k: tuple[int, ...] = ()
        if not isinstance(layout, str):
            layout_q, layout_k = checks.check_layouts(layout)
            numbers_q = layout_q.numbers
            numbers_k = numbers_q if layout_k is layout_q else layout_k.numbers
        if mask is not None:
            checks.check_mask_alone(mask, causal, window_size, cu_seqlens, cu_seqlens_k)
        packed = q.ndim == 3
        if packed:  # (rows, nheads, headdim) -> (1, rows, nheads, headdim)
            q, k, v = q[None], k[None], v[None]
        # No operator supports a strided last dim. It is copied once here, not at every step.
        q = q if q.stride(-1) == 1 else q.contiguous()
        k = k if k.stride(-1) == 1 else k.contiguous()
        v = v if v.stride(-1) == 1 else v.contiguous()
        arguments = Arguments(
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            mask=mask.tensor if isinstance(mask, Mask) else None,
            layout_q=numbers_q,
            layout_k=numbers_k,
            text="",
        )
        if strategy == "auto":
            options = _with_strategy(q, k, v, sinks, arguments, options)
        out, lse, max_logits = operators.attend(q, k, v, sinks, arguments, options)
        if packed:
            out, lse = out[0], lse[0]
    if return_max_logits:
        return (out, lse, max_logits) if return_lse else (out, max_logits)
    return (out, lse) if return_lse else out


# The options are those of `ring_attention`, passed on as they are.
@left_out_of_graphs(
    "a JointLayout is not compiled: pass a SequenceLayout, or compile without fullgraph=True"
)
def _with_joint_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Masks | None,
    *,
    group: Group,
    layout: Layout,
    **options: joint.Option,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention where every rank holds some of the rows, see `attention.joint`."""
    with reporting(group):
        checks.check_tensors(q, k, v, packed=True)
        process_group = groups.check_group(group)
        sides = joint.sides_of(layout, process_group)
        joint.check_options(options)
        dim = q.ndim - 3  # of the rows
        rank = process_group.rank()
        q = sides.own_queries(q, rank, dim)
        k, v = sides.own_keys("k", k, rank, dim), sides.own_keys("v", v, rank, dim)
        layouts = sides.owners
        if sides.has_local_keys:
            layouts, mask = sides.local(mask, options)
            if options["strategy"] != "auto":
                shape = groups.mesh_shape(group)
                resolve_strategy(options["strategy"], process_group.size(), shape)
            # A ring has no hops here, in which it would send keys.
            group, options["strategy"] = process_group, "ring"
    results = ring_attention(q, k, v, mask=mask, group=group, layout=layouts, **options)
    others: list[Tensor]
    out, *others = results if isinstance(results, tuple) else (results,)
    with reporting(group):
        out = joint.on_every_rank(out, sides.q, process_group, dim)
        if options["return_lse"]:
            rows_of_lse = others[0].ndim - 1
            others[0] = joint.on_every_rank(others[0], sides.q, process_group, rows_of_lse)
    return (out, *others) if others else out


# The options are those of `ring_attention`, passed on as they are.
@left_out_of_graphs(
    "a list of masks is not compiled: pass one mask, or compile without fullgraph=True"
)
def _with_masks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: object,
    *,
    group: Group,
    layout: Layout,
    **options: joint.Option,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention with a mask for each batch entry, or each batch entry and group of heads.

    The batch entries and groups of heads become one sequence, see `mask_lists`.
    """
    with reporting(group):
        checks.check_tensors(q, k, v, packed=True)
        if q.ndim != 4:
            raise ValueError(
                "mask as a list needs q of shape (batch, rows, nheads, headdim), got shape "
                f"{tuple(q.shape)}: pass one mask over the packed sequence (masks.by_document)"
            )
        fold = fold_of(q, k, given)
        if isinstance(fold, Mask):
            return ring_attention(q, k, v, mask=fold, group=group, layout=layout, **options)
        if fold.groups > 1 and (options["sinks"] is not None or options["return_max_logits"]):
            name = "return_max_logits" if options["sinks"] is None else "sinks"
            raise NotImplementedError(
                f"{name} is not supported together with masks that differ by head: make one call "
                "for each group of heads"
            )
        process_group = groups.check_group(group)
        layouts = fold.layouts(layout, process_group.size())
        num_rows = fold.num_sequences
        for name, x, whole in (("q", q, layouts[0]), ("k", k, layouts[1])):
            expected = whole.shard_len(process_group.rank()) // num_rows
            if x.size(1) != expected:
                raise ValueError(
                    f"{name} of the group's rank {process_group.rank()} must have {expected} rows, "
                    f"as its masks and its layout {layout} say, got {x.size(1)}: pass this rank's "
                    "shard (layout.shard), and masks of the whole sequence"
                )
        results = ring_attention(
            fold.rows(q),
            fold.rows(k),
            fold.rows(v),
            mask=fold.mask,
            group=group,
            layout=layouts,
            **options,
        )
    if isinstance(results, Tensor):
        return fold.unfolded(results)
    out, *others = results
    if options["return_lse"]:
        others[0] = fold.unfolded_lse(others[0])
    return (fold.unfolded(out), *others)


@left_out_of_graphs(
    "strategy='auto' cannot be compiled, because the ranks exchange messages to choose: pass "
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
    """Return the options with the strategy that the ranks agree on."""
    group = groups.group_named(options.group)
    rows = (q.size(1), k.size(1))
    layouts, mask = layouts_and_mask(
        options,
        rows=rows,
        documents=arguments.documents(),
        given_mask=arguments.given_mask(),
        numbers=arguments.numbers,
        rank=group.rank(),
        world_size=group.size(),
    )
    spec = AttentionSpec.of(q, k, v, options.softcap, sinks, options.max_logits)
    backend = proven_backend(spec, options.backend, purpose_of(options, mask, layouts)).name
    transport = open_p2p(group, options.transport)
    if arguments.needs_even_rows:
        transport.check_even(rows, q.device)
    if debug_enabled():
        # The ranks can agree on a strategy only if their arguments are equal.
        facts = facts_of(options, spec, layouts, mask, "auto", backend)
        facts["same_bits"] = options.same_bits
        transport.compare({}, Agreement(facts), q.device)
    strategy = agreed_strategy(
        spec,
        layouts,
        mask,
        transport,
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
    "tree_decode cannot be compiled, because it sends messages from the host: compile without "
    "fullgraph=True, to leave the call out of the graph"
)
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: object,
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
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of the newest tokens to a KV cache that is sharded across the ranks.

    This is for inference. Every rank passes the same queries and its own rows of the cache, and
    gets the whole result, with the same bits on every rank. One exchange gathers the partial out
    and lse of all ranks (Tree Attention, arXiv 2408.04093, has three exchanges). For a prompt, or a
    long part of a prompt, use `ring_attention` with a layout of the new tokens and a layout of the
    cache that includes them.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the last seqlen_q tokens of the sequence: usually 1
            token, or a few for speculative decoding. It must be the same on every rank. float16,
            bfloat16, float32 or float64; any strides.
        k: (batch, rows, nheads_kv, headdim), in the dtype of q: this rank's rows of the cache,
            including those new tokens that this rank stores; rows may be 0.
        v: (batch, rows, nheads_kv, headdim_v), in the dtype of q.
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q`: each new token sees
            itself and the tokens before it.
        window_size: `(left, right)`, the numbers of keys seen before and after that diagonal; -1 is
            unbounded.
        softmax_scale: factor of the scores. Default: `headdim ** -0.5`.
        softcap: caps scores at `softcap * tanh(score / softcap)`; 0 is no cap.
        sinks: (nheads,). For each head, a logit that is added to the denominator once. It must be
            the same on every rank.
        mask: a mask from `ring_attn.masks`, over the new tokens and the whole cache. It replaces
            causal and window_size. `Mask.rows` takes the last queries from a mask of the whole
            sequence.
        cache_seqlens: (batch,) int32, or an int: the length of each sequence over all ranks,
            including its queries. It must be the same on every rank, and is read on the device. k
            and v then have more rows than are used; a rank's first rows are used. Values outside
            the cache raise an error if the host can read them, on CPU and with RING_ATTN_DEBUG=1;
            otherwise results are undefined.
        block_table: (batch, pages) int32: for each sequence the pages of its rows on this rank, in
            order. k and v are then this rank's pool, (num_pages, page_size, nheads_kv, headdim) and
            (num_pages, page_size, nheads_kv, headdim_v).
        group: a process group, a mesh with one axis, or None for the default group.
        layout: which positions each rank holds, the same on every rank. For a growing cache see
            `SequenceLayout.appended` and `next_rank`. With None, each rank holds one run of
            positions, in the order of the ranks. If a window, a mask or several causal queries hide
            positions, the ranks then exchange their numbers of rows, for which the host waits, so
            such a call cannot be captured in a CUDA graph. With `cache_seqlens`, this is the layout
            of the longest possible sequence, with one segment on each rank; with None, page p of a
            sequence (`page_size` positions) is on rank p % world_size.
        backend: as in `ring_attention`.
        return_lse: whether to return lse, too.
        transport: as in `ring_attention`.

    Returns:
        `out`, (batch, seqlen_q, nheads, headdim_v), in the dtype of q. A query that sees no key has
        out 0 and lse -inf (or the sink).

        With `return_lse` also `lse`, (batch, nheads, seqlen_q), in float32 (float64 for float64):
        natural logarithm of the softmax's denominator, including the sink.

    Raises:
        ValueError: shapes, layout, mask, window or sinks do not fit, there is no query, or
            `cache_seqlens` lacks a layout.
        TypeError: a dtype or type that is not accepted.
        NotImplementedError: inputs that require a gradient (use `ring_attention`), a call that the
            named backend does not support, or a capture in a CUDA graph without the same call
            before it.
        ImportError: the package of the named backend is not installed.
        RuntimeError: as in `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> q = torch.randn(1, 1, 8, 64)  # the same on both ranks
        >>> rows = (700, 300)[rank]
        >>> k, v = torch.randn(2, 1, rows, 2, 64)
        >>> ring_attn.tree_decode(q, k, v).shape
        torch.Size([1, 1, 8, 64])
    """
    with reporting(group):
        if positional or unknown:
            checks.check_unknown("tree_decode", positional, unknown, DecodeOptions)
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
    decoding: bool = False,
) -> BackendChoice:
    """Return the backend that `ring_attention` or `tree_decode` would use, and the reasons.

    "auto" chooses the fastest backend for ring steps, by published or estimated speeds of its
    kernels on the GPU's architecture: forward only, or with the backward if the call has one. On
    other GPUs and on CPUs, it chooses the first backend in an order of preference. "auto" excludes
    these backends if another one can run the call:

    - with `same_bits`, backends that do not sum in a fixed order;
    - for masks of several slices, such as documents, backends that run slice by slice;
    - for a differentiated call on CUDA, unless `same_bits` is False, backends whose gradients
      differ from run to run: torch's cuDNN and flash.

    On a GPU, the first use of a backend's kernels runs a small case, whose results are compared
    with attention in float64. This is done once for each model of GPU, driver and versions. A
    backend whose kernels fail is rejected, with the error or the measured difference.
    RING_ATTN_FIRST_USE=off runs no cases.

    Args:
        q: (batch, rows, nheads, headdim) or (rows, nheads, headdim). Only its shape, dtype, device
            and `requires_grad` are used.
        k, v: as in `ring_attention`; only the same properties are used.
        backend: "auto", or the name of a backend.
        softcap, sinks, window_size, cu_seqlens, mask, same_bits: as in `ring_attention`.
        decoding: choose for `tree_decode`, which has no gradients, and only `softcap` and `sinks`
            of these options.

    Returns:
        A `BackendChoice`: `name` of the backend; `why` it was chosen; `reasons`, for each backend
        why it cannot run the call, or None if it can; and `tflops`, the speeds in TFLOP/s by which
        backends were compared, if they were.

    Raises:
        ValueError: an unknown backend, shapes that do not fit, or an invalid softcap, window,
            documents or mask.
        TypeError: a dtype or type that is not accepted.
        NotImplementedError: the named backend does not support the call.
        ImportError: the package of the named backend is not installed.

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
    left, right = checks.check_window(window_size, causal=False)
    boundaries = checks.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
    window, several, causal = left >= 0, len(boundaries) > 2, right >= 0
    if mask is not None:
        checks.check_mask_alone(mask, False, window_size, cu_seqlens)
        window, several, causal = mask.has_windows, len(mask.slices) > 1, mask.has_upper_bounds
    check_flag("decoding", decoding)
    if decoding:
        if window or several or causal or mask is not None or same_bits is not None:
            raise ValueError(
                "decoding=True chooses for tree_decode, which has no window_size, cu_seqlens, mask "
                "or same_bits here: leave them out"
            )
        purpose = Purpose(decoding=True)
    else:
        purpose = Purpose(
            backward=checks.check_differentiated(q=q, k=k, v=v, sinks=sinks),
            same_bits=checks.check_same_bits(same_bits),
            window=window,
            several=several,
            causal=causal,
        )
    return proven_backend(AttentionSpec.of(q, k, v, softcap, sinks), backend, purpose)
