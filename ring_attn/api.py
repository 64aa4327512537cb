"""The public functions: arguments -> `Request`; `ops` and `decode` run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import check, decode, ops
from ring_attn.backends import BackendChoice, Purpose, choose_backend
from ring_attn.call import (
    Arguments,
    AttentionOptions,
    DecodeOptions,
    Group,
    Layout,
    Request,
    describe,
    resolve,
)
from ring_attn.compiling import left_out_of_graphs
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, TransportOptions
from ring_attn.core.strategy import Strategy, checked_strategy
from ring_attn.core.values import check_dim, check_flag, check_type
from ring_attn.planning.agreement import agreed_strategy
from ring_attn.torch_private import is_traced_as_constant
from ring_attn.transport.base import Agreement
from ring_attn.transport.debug import check_agreement, debug_enabled, tell_refusal
from ring_attn.transport.p2p import new_p2p, open_p2p
from ring_attn.transport.ranks.group import refused


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

    Every rank passes its own shard and gets the output of its own queries. Gradients are those of
    dense attention; differentiating them again is refused.

    Args:
        q: (batch, rows, nheads, headdim), or packed (rows, nheads, headdim) with `cu_seqlens`;
            float16, bfloat16, float32 or float64; any strides.
        k: (batch, rows_kv, nheads_kv, headdim); `nheads` is a multiple of `nheads_kv` (GQA, MQA).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q` (bottom-right aligned,
            as in flash-attention), in global positions.
        window_size: `(left, right)` keys seen on either side of that diagonal; -1 is unbounded.
            With `causal` the right is 0 whatever is given.
        softmax_scale: factor of the scores, from 2**-63 to 2**63; `headdim ** -0.5` by default.
        softcap: caps the scores: where it is not 0 they are `softcap * tanh(score / softcap)`,
            before the mask; from 2**-63 to 2**63.
        sinks: (nheads,) of any floating point dtype, used in float32: a logit of each head that
            joins the denominator of the softmax and has no value. The same on every rank; its
            gradient is this rank's share, to be summed over the ranks as that of any replicated
            parameter.
        cu_seqlens: int32 boundaries of documents in the global sequence, from 0; each attends only
            to itself. They need not divide by anything. The same on every rank. Rows behind the
            last boundary are padding, with out 0, lse -inf (or its sink) and zero gradients; over
            several ranks that takes a `layout` by value.
        cu_seqlens_k: those of the keys, where they differ from the queries'.
        mask: any other mask, of `ring_attn.masks`, over the whole sequence; in the place of causal,
            window_size and cu_seqlens. The same on every rank. Make it once for a batch, and give
            all layers the same one.
        group: the ranks: a process group, a mesh with one axis, or None for the default group. A
            mesh with two, such as (nodes, GPUs of a node), gives "hybrid" and "double_ring" their
            degree: the size of the last.
        layout: which positions the ranks hold: "contiguous", "zigzag", "striped", a
            `SequenceLayout`, or a pair for queries and keys. With a name every rank holds as many
            rows, unless `cu_seqlens` tells the length.
        strategy: how the ranks share the work: "ring", "double_ring", "all_gather", "exchange",
            "ulysses", "hybrid", "q_exchange", or a `Strategy` with its degrees. "auto" takes the
            fastest by simulation on this machine's description (`explain` tells why): rank 0
            chooses, and at the first call with new arguments the ranks exchange 1 KiB so that all
            do the same; later calls look it up. A mesh with two axes then tells the size of a node.
        backend: "auto" for the fastest, or the name of one that then runs or raises;
            `select_backend` says which, and why.
        same_bits: whether out, lse, dq, dk and dv have the same bits at every world size. That
            needs a backend that folds in order (triton) and contiguous shards that start at
            multiples of its block, 128; a ring also needs `causal` without window and documents.
            Ulysses has any layout and mask for it, but no KV head may be on two ranks. In a ring KV
            travels in the backward then, and all_gather brings the Q side too, even where another
            way would cost fewer bytes. None is on where it can be had; True is on or refused with
            the reason. False leaves a ring with triton free to add dK and dV up behind whole steps,
            which takes more memory traffic and is for links too slow for the other order.
        return_lse: also return lse.
        return_max_logits: also return the greatest score of each head, as QK-clip needs it (Kimi
            K2, arXiv 2507.20534), of all queries and ranks; one small message more. For backends
            that have it: triton and reference.
        dropout_p: must be 0.
        alibi_slopes: must be None.
        transport: the timeout, and NCCL's share of the device.

    Returns:
        `out` (batch, rows, nheads, headdim_v) like q; with `return_lse` also `lse` (batch, nheads,
        rows), (nheads, rows) if packed, natural logarithm in float32 (float64 for float64), not
        differentiable; the sink is in it. A row that sees nothing has out 0, lse -inf (or its
        sink) and zero gradients. With `return_max_logits` last `max_logits` (nheads,) in the type
        of lse, the same on every rank: scaled, capped, of the keys that are seen, without sinks;
        -inf where nothing is seen; not differentiable.

    Raises:
        ValueError: shapes, layout, window, documents, sinks or degrees that do not fit, or inputs
            that were made in inference mode, of a call that is differentiated.
        TypeError: a dtype or type that is not taken, such as a sparse or nested tensor.
        NotImplementedError: dropout, ALiBi, forward-mode differentiation, transforms of
            `torch.func`, what the named backend does not support,
            `same_bits=True` where it cannot be had, or a call within the capture of a CUDA graph.
        ImportError: the named backend's package is not installed.
        RuntimeError: no process group, a rank that did not come, died, stalled, left its call by an
            error, or is in another call; and every call on a process group after such an error.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(seqlen=1000, world_size=2)
        >>> q, k, v = (layout.shard(torch.randn(1, 1000, 8, 64), rank) for _ in range(3))
        >>> ring_attn.ring_attention(q, k, v, causal=True, layout=layout).shape
        torch.Size([1, 500, 8, 64])
    """
    try:
        check_flag("return_lse", return_lse)
        check_flag("return_max_logits", return_max_logits)
        check.check_unsupported(dropout_p, alibi_slopes)
        check.check_inputs(q, k, v, sinks, cu_seqlens, cu_seqlens_k, mask)
        group_name, mesh_shape = _described(group, q.device.type)
        call = Request(
            causal=causal,
            window_size=check.check_window(window_size, causal),
            softmax_scale=check.check_scale(softmax_scale),
            softcap=check.check_softcap(softcap),
            group=group_name,
            mesh_shape=mesh_shape,
            layout=layout if isinstance(layout, str) else None,
            strategy=strategy if isinstance(strategy, str) else checked_strategy(strategy),
            backend=check.check_name("backend", backend),
            same_bits=check.check_same_bits(same_bits),
            transport=check.check_transport(transport),
            differentiated=check.check_differentiated(q=q, k=k, v=v, sinks=sinks),
            max_logits=return_max_logits,
        )
        pair = () if isinstance(layout, str) else check.check_layouts(layout)
        numbers = (pair[0].numbers, pair[1].numbers) if pair else ((), ())
        if mask is not None:
            check.check_mask_alone(mask, causal, window_size, cu_seqlens, cu_seqlens_k)
        slices = None if mask is None else mask.tensor
        arguments = Arguments(cu_seqlens, cu_seqlens_k, slices, *numbers, call.text)
    except BaseException as error:
        tell_refusal(error, group, transport)
        raise
    try:
        packed = q.ndim == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        # Once here rather than at every step: no operator takes a strided last dim.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if strategy == "auto":
            arguments = _with_strategy(q, k, v, sinks, arguments)
        out, lse, most = ops.attend(q, k, v, sinks, arguments, call.differentiated)
        if packed:
            out, lse = out[0], lse[0]
        results = (out, *((lse,) * return_lse), *((most,) * return_max_logits))
        return results if len(results) > 1 else out
    except BaseException as error:
        refused(call.process_group, error)
        raise


@is_traced_as_constant
def _described(group: Group, device_type: str) -> tuple[str, tuple[int, ...]]:
    """Torch's name of the group and the shape of the mesh; a compiled graph is for one group."""
    process_group = check.check_group(group)
    check.check_group_device(process_group, torch.device(device_type))
    return process_group.group_name, check.mesh_shape(group)


@left_out_of_graphs(
    "strategy='auto' cannot be compiled, the ranks talk to each other to choose: pass "
    "ring_attn.explain(...).strategy, or compile without fullgraph=True"
)
def _with_strategy(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: Arguments
) -> Arguments:
    """The same call with the strategy that "auto" is here."""
    check.check_capture("ring_attention", q)
    call = arguments.call
    group, shape = call.process_group, call.mesh_shape
    try:
        spec = AttentionSpec.of(q, k, v, call.softcap, sinks, call.max_logits)
        rows = (q.size(1), k.size(1))
        masked = arguments.documents(), arguments.given_mask()
        resolved = resolve(call, rows, *masked, arguments.numbers, *call.place)
        purpose = Purpose.of(resolved.mask, backward=call.differentiated, same_bits=call.same_bits)
        backend = choose_backend(spec, call.backend, purpose).name
    except Exception as error:
        tell_refusal(error, group, call.transport)
        raise
    if debug_enabled():
        # Before the ranks choose together, which only equal arguments allow.
        asked = {"strategy": "auto", "backend": backend, "same_bits": call.same_bits}
        check_agreement({**describe(spec, resolved, call), **asked}, group, call.transport)
    strategy = agreed_strategy(
        spec,
        *resolved,
        open_p2p(group, call.transport),
        backend=backend,
        same_bits=call.same_bits,
        backward=call.differentiated,
        node_size=shape[1] if len(shape) == 2 else None,
        global_ranks=dist.get_process_group_ranks(group),
    )
    return arguments._replace(text=call._replace(strategy=strategy, mesh_shape=()).text)


@overload
def tree_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def tree_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@left_out_of_graphs(
    "tree_decode sends its messages from the host, and a graph holds none: compile without "
    "fullgraph=True, which leaves it out"
)
def tree_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Mask | None = None,
    group: Group = None,
    layout: SequenceLayout | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    transport: TransportOptions = TransportOptions(),  # noqa: B008 - frozen
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a KV cache that is split over the ranks; for inference.

    Every rank passes the same queries and its own rows of the cache, and gets the whole result,
    the same bits as every other rank. One message of a call carries all ranks' partial out and lse
    (Tree Attention, arXiv 2408.04093, in one exchange instead of three). For a prompt, or a long
    part of one, use `ring_attention` with layouts of the new tokens and of the cache with them.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the last seqlen_q tokens of the sequence, the same on
            every rank: usually 1, or the few of speculative decoding; float16, bfloat16, float32 or
            float64; any strides. The sequences of a batch have one length: there is no
            `cache_seqlens`. Where lengths differ, call it once for each sequence, `q[i : i + 1]`.
        k: (batch, rows, nheads_kv, headdim), this rank's rows of the cache, those of the queries'
            own tokens among them on the rank that holds them; it may have 0 rows. None, and None
            for v, where `layout` gives this rank no rows: at their first call with such a layout
            the ranks then tell each other nheads_kv and headdim_v, in one message of 16 bytes.
        v: (batch, rows, nheads_kv, headdim_v), or None.
        causal: query i sees key j only if `j <= i + seqlen_k - seqlen_q`: of the newest tokens each
            sees those before it and itself.
        window_size: `(left, right)` keys seen on either side of that diagonal; -1 is unbounded.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        softcap: where it is not 0, scores are `softcap * tanh(score / softcap)`.
        sinks: (nheads,), a logit of each head that joins the denominator once; the same on every
            rank.
        mask: of `ring_attn.masks`, in the place of causal and window_size: over the new tokens and
            the whole cache. `Mask.rows` takes the last queries of a mask of the whole sequence.
        group: a process group, a mesh with one axis, or None for the default group.
        layout: which positions the ranks hold, the same on every rank; see
            `SequenceLayout.appended` and `next_rank` for one that grows. None says that every rank
            holds one run, in the order of the ranks. Of how many rows is then asked in one more
            message of 16 bytes, on CUDA with a wait of the host, where the mask depends on it: with
            a window, or where several queries are causal.
        backend: as for `ring_attention`.
        return_lse: also return lse.
        transport: as for `ring_attention`.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) like q; with `return_lse` also `lse` (batch,
        nheads, seqlen_q), natural logarithm in float32 (float64 for float64), the sink in it. A
        query that sees nothing has out 0 and lse -inf (or its sink).

    Raises:
        ValueError: shapes, layout, window or sinks that do not fit, or no query.
        TypeError: a dtype or type that is not taken.
        NotImplementedError: inputs that require a gradient, which only `ring_attention` has, what
            the named backend does not support, or a call within the capture of a CUDA graph.
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
    told = not (k is None and v is None)
    try:
        k, v = check.check_rows_told(q, k, v, layout)
        check.check_tensors(q, k, v, packed=False)
        check.check_decode(q, k, v, sinks, layout)
        process_group = check.check_group(group)
        check_flag("return_lse", return_lse)
        check.check_sinks(sinks, q)
        check.check_group_device(process_group, q.device)
        call = Request(
            causal=causal,
            window_size=check.check_window(window_size, causal),
            softmax_scale=check.check_scale(softmax_scale),
            softcap=check.check_softcap(softcap),
            group=process_group.group_name,
            backend=check.check_name("backend", backend),
            transport=check.check_transport(transport),
        )
        if mask is not None:
            check.check_mask_alone(mask, not causal, window_size)
        decoding = decode.prepare(q, k, v, sinks, layout, mask, call)
    except BaseException as error:
        tell_refusal(error, group, transport)
        raise
    try:
        out, lse = decode.attend(q, k, v, sinks, decoding, told)
        return (out, lse) if return_lse else out
    except BaseException as error:
        refused(process_group, error)
        raise


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
    """Which backend `ring_attention` would use for such a call, and why not the others.

    "auto" takes the fastest in steps of a ring, by what is published or estimated of kernels on the
    GPU's architecture, in the directions that the call has; on others, and on CPUs, the first in an
    order of preference. It leaves out, as long as another one can run the call, with `same_bits`
    those that fold in no one order; for masks of several slices, such as documents, those that take
    them one by one; and, unless `same_bits` is False, for a call that is differentiated on CUDA
    those no two runs of whose backward are equal: torch's cuDNN and flash.

    Args:
        q: (batch, rows, nheads, headdim) or (rows, nheads, headdim); only shape, dtype, device and
            whether it requires a gradient are looked at.
        k: likewise.
        v: likewise.
        backend: "auto" or a name.
        softcap: as for `ring_attention`.
        sinks: likewise; so are those that follow.
        window_size: see there.
        cu_seqlens: see there.
        mask: see there.
        same_bits: see there.

    Returns:
        `name`; `why`; `reasons`: for every backend None where it could run, else the reason why
        not; `tflops`: at which speed those that could were compared, where that was done.

    Raises:
        ValueError: no backend of that name, shapes that do not fit, or a bad softcap, window,
            documents or mask.
        TypeError: a dtype or type that is not taken.
        NotImplementedError: the named backend does not support the call.
        ImportError: the named backend's package is not installed.

    Example:
        >>> q = torch.randn(1, 128, 8, 64)
        >>> choice = select_backend(q, q, q)
        >>> choice.name, choice.why
        ('aten', 'the only one on cpu')
    """
    check.check_tensors(q, k, v, packed=True)
    check.check_softcap(softcap)
    check.check_sinks(sinks, q)
    check.check_name("backend", backend)
    left, _ = check.check_window(window_size, False)
    documents = check.check_cu_seqlens("cu_seqlens", cu_seqlens) or ()
    if mask is not None:
        check.check_mask_alone(mask, False, window_size, cu_seqlens)
    purpose = Purpose(
        backward=check.check_differentiated(q=q, k=k, v=v, sinks=sinks),
        same_bits=check.check_same_bits(same_bits),
        window=left >= 0 if mask is None else mask.has_windows,
        several=len(documents) > 2 if mask is None else len(mask.slices) > 1,
    )
    return choose_backend(AttentionSpec.of(q, k, v, softcap, sinks), backend, purpose)


def unshard(x: Tensor, layout: SequenceLayout, *, group: Group = None, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from each rank's shard; for evaluation, without gradient.

    Args:
        x: this rank's shard, `layout.shard_len(rank)` rows in `dim`.
        layout: how the sequence is split.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        `x` with `layout.seqlen` rows in `dim`.

    Raises:
        ValueError: a shard with a wrong number of rows, or a dim that it has not.
        TypeError: a type that is not taken, such as a layout by name.
        RuntimeError: no process group.
    """
    process_group = check.check_group(group)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    try:
        check_dim("x", x, dim)
        check.check_plain("x", x)
        check.check_capture("unshard", x)
        check_type("layout", layout, SequenceLayout)
        check.check_group_device(process_group, x.device)
        check.check_layout("x", layout, x.size(dim), None, rank, world_size)
    except Exception as error:
        tell_refusal(error, process_group)
        raise
    # Gathering wants equal sizes: short shards are sent with rows that are cut off again.
    longest = max(layout.shard_lens)
    rows = torch.zeros(longest, *x.movedim(dim, 0).shape[1:], dtype=x.dtype, device=x.device)
    rows[: x.size(dim)] = x.detach().movedim(dim, 0)
    gathered = rows.new_empty(world_size, *rows.shape)
    described = {"dtype": x.dtype, "shape": rows.shape, "dim": dim, "layout": str(layout)}
    if debug_enabled():
        check_agreement(described, process_group, TransportOptions())
    transport = new_p2p(process_group, TransportOptions())
    with transport.call("unshard", Agreement(described), x.device):
        flat = (y.view(-1).view(torch.uint8) for y in (rows, gathered))
        transport.all_gather("shards", 0, *flat)
        transport.wait("shards")
    shards = zip(gathered, layout.shard_lens, strict=True)
    return layout.unshard([part[:n].movedim(0, dim) for part, n in shards], dim)
