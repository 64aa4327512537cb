"""flash-attn's functions (2.8) over ring_attention: only the import changes.

    from flash_attn import flash_attn_func                             # before
    from ring_attn.integrations.flash_attn import flash_attn_func      # after

Names, parameters, their order and defaults, and shapes are flash-attn's. Tensors are this
rank's shards; `cu_seqlens` and `max_seqlen` describe the whole sequence, the same on all ranks.
Each function also takes `group`, `layout`, and the strategy, backend, same_bits and transport of
`ring_attention` by keyword.

Differences: `dropout_p`, `alibi_slopes` and `block_table` are refused. `deterministic` is refused
if the backend cannot promise it. With `return_attn_probs` the third result is None, as there is no
dropout, and a row that sees nothing has lse -inf instead of +inf. Rows after the last document have
out 0 and zero gradients; flash-attn does not write them. All dtypes, headdims and devices of
`ring_attention` work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Unpack

import torch
from torch import Tensor

from ring_attn.api import ring_attention, select_backend
from ring_attn.backends import PREFERENCE, get_backend
from ring_attn.call import DistributedOptions, ExecutionOptions, Layout
from ring_attn.checks import attention as checks
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_tensor
from ring_attn.values.compiling import left_out_of_graphs

_ASKS_BACKEND = (
    "deterministic=True checks which backend would run, and a graph cannot: compile without "
    "fullgraph=True, or call torch.use_deterministic_algorithms(True) before"
)

# Backends whose backward is deterministic on CUDA by itself; on CPUs all are.
_DETERMINISTIC = [name for name in PREFERENCE if get_backend(name).deterministic]

Result = Tensor | tuple[Tensor, Tensor, None]
Qkv = tuple[Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """The parameters that all functions have, in their order."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    **execution: Unpack[ExecutionOptions],
) -> Result:
    """Attention of this rank's queries to all visible keys.

    Args:
        q: (batch, rows, nheads, headdim); float16, bfloat16, float32 or float64.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        dropout_p: must be 0.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        causal: bottom-right aligned, in global positions.
        window_size: (left, right) in global positions; `causal` makes right 0.
        softcap: caps the scores; 0 does not.
        alibi_slopes: must be None.
        deterministic: refused if the backend cannot promise it.
        return_attn_probs: also return lse, and None.
        group: as for `ring_attention`.
        layout: as for `ring_attention`.
        **execution: strategy, backend, same_bits and transport, as for `ring_attention`.

    Returns:
        `out` (batch, rows, nheads, headdim_v); with `return_attn_probs` `(out, lse, None)`, lse
        (batch, nheads, rows) in float32 (float64 for float64), natural logarithm.

    Raises:
        Exception: as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> q, k, v = torch.randn(3, 1, 500, 8, 64)
        >>> flash_attn_func(q, k, v, causal=True, layout="zigzag").shape
        torch.Size([1, 500, 8, 64])
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
    return _call("", (q, k, v), (), options, group=group, layout=layout, **execution)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    **execution: Unpack[ExecutionOptions],
) -> Result:
    """`flash_attn_func` within packed documents.

    Args:
        q: (rows, nheads, headdim), this rank's rows of the packed sequence.
        k: (rows_kv, nheads_kv, headdim).
        v: (rows_kv, nheads_kv, headdim_v).
        cu_seqlens_q: int32 boundaries of the queries' documents in the whole sequence, from 0. Rows
            after the last boundary are padding; on several ranks padding needs a `SequenceLayout`.
        cu_seqlens_k: boundaries of the keys' documents, as many.
        max_seqlen_q: rows of the longest document in the whole sequence, or more; checked, except
            under torch.compile, which does not see boundaries.
        max_seqlen_k: the same for the keys.
        dropout_p, softmax_scale, causal, window_size: as for `flash_attn_func`.
        softcap, alibi_slopes, deterministic, return_attn_probs: as for `flash_attn_func`.
        block_table: must be None.
        group: as for `ring_attention`.
        layout: as for `ring_attention`.
        **execution: as for `flash_attn_func`.

    Returns:
        `out` (rows, nheads, headdim_v); with `return_attn_probs` `(out, lse, None)`, lse (nheads,
        rows).

    Raises:
        NotImplementedError: `block_table` is not None.
        Exception: as `ring_attention`.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
    if block_table is not None:
        with reporting(group):
            raise NotImplementedError(
                "block_table must be None: a prompt against a paged cache is not built; "
                "ring_attn.tree_decode takes the newest tokens against one that is split over the "
                "ranks"
            )
    sides = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call("", (q, k, v), sides, options, group=group, layout=layout, **execution)


def flash_attn_with_kvcache(*_: object, **__: object) -> NoReturn:
    """Raises NotImplementedError: flash-attn's function updates a cache of one process."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not built, as it updates a cache of one process; append to "
        "this rank's rows of the cache and call ring_attn.tree_decode, which takes cache_seqlens "
        "and block_table"
    )


def _call(
    form: str,
    tensors: tuple[Tensor, ...],
    sides: tuple[Any, ...],
    options: Options,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    **execution: Unpack[ExecutionOptions],
) -> Result:
    """Attention of one sequence or, with `sides`, within documents.

    `sides` are boundaries of documents, then their max_seqlens: one each if queries and keys share
    them, else two each.
    """
    name = "flash_attn_varlen_func" if sides else "flash_attn_func"
    with reporting(group):
        checks.check_options(name, execution, ExecutionOptions)
        qkv = unpacked(form, tensors, packed=len(sides) > 0)
        check_deterministic(qkv, options)
        documents, longest = sides[: len(sides) // 2], sides[len(sides) // 2 :]
        suffixes = ("",) if len(documents) == 1 else ("_q", "_k")
        for suffix, cuts, most in zip(suffixes, documents, longest, strict=False):
            check_documents(suffix, cuts, most)
    return attend(qkv, options, *documents, group=group, layout=layout, **execution)


# Tensors of each form.
TENSORS = {"": ("q", "k", "v"), "kv": ("q", "kv"), "qkv": ("qkv",)}


def named_function(
    name: str,
    form: str,
    documents: Mapping[str, object],
    call: Callable[..., Result],
    doc: str,
    *,
    without: str = "",
) -> Callable[..., Result]:
    """Makes a function of the tensors of a form, `documents` (types by name) and `Options`.

    The function calls `call(form, tensors, documents, options, ...)`, and has the further
    parameters of `call` after its own.
    """
    types = {**dict.fromkeys(TENSORS[form], Tensor), **documents}
    required = [Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, annotation=types[x]) for x in types]
    options = [x for x in signature(Options).parameters.values() if x.name != without]
    names = [parameter.name for parameter in (*required, *options)]

    # Signature.bind does the same, but takes 20 us longer at every call.
    def function(*args: Any, **kwargs: Any) -> Result:
        given = dict(zip(names, args, strict=False))
        given |= {x: kwargs.pop(x) for x in names[len(args) :] if x in kwargs}
        missing = [x for x in types if x not in given]
        if missing:
            raise TypeError(f"{name}() is missing arguments: {', '.join(missing)}")
        tensors, sides = (
            tuple(given.pop(x) for x in group) for group in (TENSORS[form], documents)
        )
        return call(form, tensors, sides, Options(**given), *args[len(names) :], **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = getattr(call, "func", call).__module__, doc
    ours = [*signature(call).parameters.values()][4:]
    vars(function)["__signature__"] = Signature(
        [*required, *options, *ours], return_annotation=Result
    )
    return function


def _packed(form: str, sides: Mapping[str, object], doc: str) -> Callable[..., Result]:
    name = f"flash_attn_{'varlen_' if sides else ''}{form}packed_func"
    return named_function(name, form, sides, _call, doc)


flash_attn_kvpacked_func = _packed(
    "kv", {}, "`flash_attn_func` with k and v in one, `kv` (batch, rows_kv, 2, nheads_kv, headdim)."
)
flash_attn_qkvpacked_func = _packed(
    "qkv", {}, "`flash_attn_func` with all in one tensor, `qkv` (batch, rows, 3, nheads, headdim)."
)
flash_attn_varlen_kvpacked_func = _packed(
    "kv",
    {"cu_seqlens_q": Tensor, "cu_seqlens_k": Tensor, "max_seqlen_q": int, "max_seqlen_k": int},
    "`flash_attn_varlen_func` with k and v in one, `kv` (rows_kv, 2, nheads_kv, headdim).",
)
flash_attn_varlen_qkvpacked_func = _packed(
    "qkv",
    {"cu_seqlens": Tensor, "max_seqlen": int},
    "`flash_attn_varlen_func` with all in one tensor, `qkv` (rows, 3, nheads, headdim).",
)


def attend(
    qkv: Qkv,
    options: Options,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **distributed: Unpack[DistributedOptions],
) -> Result:
    """Calls ring_attention with flash-attn's options; returns results as flash-attn does."""
    out, lse = ring_attention(
        *qkv,
        causal=options.causal,
        window_size=options.window_size,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        return_lse=True,
        dropout_p=options.dropout_p,
        alibi_slopes=options.alibi_slopes,
        **distributed,
    )
    return (out, lse, None) if options.return_attn_probs else out


def unpacked(form: str, tensors: tuple[Tensor, ...], *, packed: bool) -> Qkv:
    """q, k and v from the tensors of a form; refuses other numbers of dims."""
    rows = "rows" if packed else "batch, rows"
    num_dims = 3 if packed else 4
    if form:
        whole = tensors[-1]
        checks.check_floating(form, whole)
        if whole.ndim != num_dims + 1 or whole.size(-3) != len(form):
            raise ValueError(
                f"{form} must be ({rows}, {len(form)}, nheads, headdim), got {tuple(whole.shape)}"
            )
        tensors = (*tensors[:-1], *whole.unbind(-3))
    q, k, v = tensors
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != num_dims:
            raise ValueError(f"{name} must be ({rows}, nheads, headdim), got {tuple(x.shape)}")
    return q, k, v


def check_documents(suffix: str, cu_seqlens: Tensor, most: int) -> None:
    """Refuses boundaries with a document of more than `most` rows; names end in `suffix`."""
    name, most_name = f"cu_seqlens{suffix}", f"max_seqlen{suffix}"
    if torch.compiler.is_compiling():
        checks.check_boundaries(name, cu_seqlens)
        return
    longest = max(b - a for a, b in pairwise(on_host(name, cu_seqlens)))
    if as_int(most_name, most) < longest:
        raise ValueError(
            f"{most_name} must be at least the longest document of {name}, {longest}, got {most}"
        )


def on_host(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    """Boundaries of documents as ints; refuses None."""
    boundaries = checks.check_cu_seqlens(name, cu_seqlens)
    if boundaries is None:
        raise TypeError(f"{name} must be an int32 tensor, got None")
    return boundaries


def check_deterministic(qkv: Qkv, options: Options) -> None:
    """Refuses `deterministic=True` if neither the backend nor torch promises it."""
    if not options.deterministic or qkv[0].device.type != "cuda":
        return
    if not any(x.requires_grad for x in qkv):
        return  # forwards are deterministic
    if not torch.are_deterministic_algorithms_enabled():
        _check_backend_is_deterministic(*qkv)


@left_out_of_graphs(_ASKS_BACKEND)
def _check_backend_is_deterministic(q: Tensor, k: Tensor, v: Tensor) -> None:
    name = select_backend(q, k, v).name
    if name not in _DETERMINISTIC:
        raise NotImplementedError(
            f"deterministic=True cannot be promised by backend {name!r}, which would run; call "
            f"torch.use_deterministic_algorithms(True), or install one of {_DETERMINISTIC}"
        )
