"""flash-attn's functions (2.8), computed by ring_attention. Only the import changes:

    from flash_attn import flash_attn_func                             # before
    from ring_attn.integrations.flash_attn import flash_attn_func      # after

Names, parameters, their order and defaults, and shapes are as in flash-attn. Tensors are this
rank's shards; `cu_seqlens` and `max_seqlen` describe the whole sequence, the same on all ranks.
Each function also accepts `group`, `layout`, and the strategy, backend, same_bits and transport of
`ring_attention` by keyword.

Differences: `dropout_p`, `alibi_slopes` and `block_table` are refused. `deterministic` is refused
if the backend cannot promise it. With `return_attn_probs` the third result is None, because there
is no dropout. A row that sees no key has lse -inf instead of +inf. Rows after the last document
have output 0 and zero gradients; flash-attn does not write them. All dtypes, headdims and devices
of `ring_attention` work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Unpack, cast

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
    "deterministic=True checks which backend would run, which a graph cannot do: compile without "
    "fullgraph=True, or call torch.use_deterministic_algorithms(True) before"
)

# Backends whose backward is always deterministic on CUDA; on CPUs all backends are.
_DETERMINISTIC = [name for name in PREFERENCE if get_backend(name).deterministic]

Result = Tensor | tuple[Tensor, Tensor, None]
Qkv = tuple[Tensor, Tensor, Tensor]

# The arguments for documents: boundaries (one tensor, or two for queries and keys), and then as
# many lengths of the longest document. Empty for functions without documents.
Documents = tuple[Tensor | int | slice, ...]


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


# More than 60 lines, most of them documentation.
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
    """Compute attention of this rank's queries to all visible keys.

    Args:
        q: (batch, rows, nheads, headdim); float16, bfloat16, float32 or float64.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        dropout_p: must be 0.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        causal: whether a query sees no later keys, bottom-right aligned, in global positions.
        window_size: (left, right) in global positions; `causal` makes right 0.
        softcap: limit of the scores' absolute values; 0 means no limit.
        alibi_slopes: must be None.
        deterministic: whether the backward must be deterministic; refused if the backend cannot
            promise it.
        return_attn_probs: whether to return lse as well, and None.
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
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )
    no_documents = ()
    return _call("", (q, k, v), no_documents, options, group=group, layout=layout, **execution)


# More than 60 lines: the parameters of flash-attn, each with its documentation.
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
    """Compute attention within packed documents, like `flash_attn_func`.

    Args:
        q: (rows, nheads, headdim), this rank's rows of the packed sequence.
        k: (rows_kv, nheads_kv, headdim).
        v: (rows_kv, nheads_kv, headdim_v).
        cu_seqlens_q: int32 boundaries of the queries' documents in the whole sequence, from 0. Rows
            after the last boundary are padding; on several ranks padding needs a `SequenceLayout`.
        cu_seqlens_k: boundaries of the keys' documents, equally many.
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
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )
    if block_table is not None:
        with reporting(group):
            raise NotImplementedError(
                f"block_table must be None, got {type(block_table).__name__}: attention of a "
                "prompt to a paged cache is not supported; ring_attn.tree_decode computes "
                "attention of the newest tokens to a paged cache that is sharded over the ranks"
            )
    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call("", (q, k, v), documents, options, group=group, layout=layout, **execution)


def flash_attn_with_kvcache(*_: object, **__: object) -> NoReturn:
    """Raise NotImplementedError: flash-attn's function updates the cache of one process."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not supported, because it updates the cache of one process: "
        "append to this rank's rows of the cache, and call ring_attn.tree_decode, which takes "
        "cache_seqlens and block_table"
    )


def _call(
    form: str,
    tensors: tuple[Tensor, ...],
    documents: Documents,
    options: Options,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    **execution: Unpack[ExecutionOptions],
) -> Result:
    """Compute attention of one sequence, or within documents if `documents` is not empty."""
    name = "flash_attn_varlen_func" if documents else "flash_attn_func"
    middle = len(documents) // 2
    all_cu_seqlens = cast("tuple[Tensor, ...]", documents[:middle])
    all_max_seqlens = cast("tuple[int, ...]", documents[middle:])
    # The ends of the arguments' names: queries and keys may share the documents.
    suffixes = {0: (), 1: ("",), 2: ("_q", "_k")}[len(all_cu_seqlens)]
    with reporting(group):
        checks.check_options(name, execution, ExecutionOptions)
        qkv = unpacked(form, tensors, packed=len(documents) > 0)
        check_deterministic(qkv, options)
        for suffix, cu_seqlens, max_seqlen in zip(
            suffixes, all_cu_seqlens, all_max_seqlens, strict=True
        ):
            check_documents(suffix, cu_seqlens, max_seqlen)
    return attend(qkv, options, *all_cu_seqlens, group=group, layout=layout, **execution)


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
    """Make a function with the tensors of a form, `documents` (types by name) and `Options`.

    The function calls `call(form, tensors, documents, options, ...)`. Its last parameters are the
    further parameters of `call`. `without` is an option that the function does not have.
    """
    types = {**dict.fromkeys(TENSORS[form], Tensor), **documents}
    required = [
        Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=types[each]) for each in types
    ]
    options = [each for each in signature(Options).parameters.values() if each.name != without]
    names = [parameter.name for parameter in (*required, *options)]

    # Signature.bind does the same, but takes the host 20 us longer at every call. The arguments
    # have the types of the signature below, which a type checker does not see.
    def function(*args: Any, **kwargs: Any) -> Result:
        given = dict(zip(names, args, strict=False))
        for each in names[len(args) :]:
            if each in kwargs:
                given[each] = kwargs.pop(each)
        missing = [each for each in types if each not in given]
        if missing:
            raise TypeError(f"{name}() is missing arguments: {', '.join(missing)}")
        tensors = tuple(given.pop(each) for each in TENSORS[form])
        values = tuple(given.pop(each) for each in documents)
        return call(form, tensors, values, Options(**given), *args[len(names) :], **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = getattr(call, "func", call).__module__, doc
    further = [*signature(call).parameters.values()][4:]
    vars(function)["__signature__"] = Signature(
        [*required, *options, *further], return_annotation=Result
    )
    return function


def _packed(form: str, documents: Mapping[str, object], doc: str) -> Callable[..., Result]:
    """Make flash-attn's function with the tensors of a form."""
    varlen = "varlen_" if documents else ""
    return named_function(f"flash_attn_{varlen}{form}packed_func", form, documents, _call, doc)


flash_attn_kvpacked_func = _packed(
    "kv",
    {},
    "Compute `flash_attn_func` of `kv` (batch, rows_kv, 2, nheads_kv, headdim), which is k and v.",
)
flash_attn_qkvpacked_func = _packed(
    "qkv",
    {},
    "Compute `flash_attn_func` of `qkv` (batch, rows, 3, nheads, headdim), which is q, k and v.",
)
flash_attn_varlen_kvpacked_func = _packed(
    "kv",
    {"cu_seqlens_q": Tensor, "cu_seqlens_k": Tensor, "max_seqlen_q": int, "max_seqlen_k": int},
    "Compute `flash_attn_varlen_func` of `kv` (rows_kv, 2, nheads_kv, headdim), which is k and v.",
)
flash_attn_varlen_qkvpacked_func = _packed(
    "qkv",
    {"cu_seqlens": Tensor, "max_seqlen": int},
    "Compute `flash_attn_varlen_func` of `qkv` (rows, 3, nheads, headdim), which is q, k and v.",
)


def attend(
    qkv: Qkv,
    options: Options,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **distributed: Unpack[DistributedOptions],
) -> Result:
    """Call ring_attention with flash-attn's options, and return results in flash-attn's form."""
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
    """Return q, k and v from the tensors of a form; refuse other numbers of dims.

    With `packed`, tensors have no dim for the batch.
    """
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
    """Refuse boundaries with a document of more than `most` rows, the argument max_seqlen.

    `suffix` is the end of the arguments' names: "", "_q" or "_k".
    """
    name, max_name = f"cu_seqlens{suffix}", f"max_seqlen{suffix}"
    if torch.compiler.is_compiling():
        checks.check_boundaries(name, cu_seqlens)
        return
    longest = max(end - start for start, end in pairwise(on_host(name, cu_seqlens)))
    if as_int(max_name, most) < longest:
        raise ValueError(
            f"{max_name} must be at least {longest}, the length of the longest document of {name}, "
            f"got {most}"
        )


def on_host(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return the boundaries of documents as ints; refuse None."""
    boundaries = checks.check_cu_seqlens(name, cu_seqlens)
    if boundaries is None:
        raise TypeError(f"{name} must be an int32 tensor, got None")
    return boundaries


def check_deterministic(qkv: Qkv, options: Options) -> None:
    """Refuse `deterministic=True` if neither the backend nor torch promises it."""
    if not options.deterministic or qkv[0].device.type != "cuda":
        return
    if not any(x.requires_grad for x in qkv):
        return  # forwards are deterministic
    if not torch.are_deterministic_algorithms_enabled():
        _check_backend_is_deterministic(*qkv)


@left_out_of_graphs(_ASKS_BACKEND)
def _check_backend_is_deterministic(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors for which a backend would run that cannot promise determinism."""
    name = select_backend(q, k, v).name
    if name not in _DETERMINISTIC:
        raise NotImplementedError(
            f"deterministic=True needs a deterministic backend, got backend {name!r}: call "
            f"torch.use_deterministic_algorithms(True), or install one of {_DETERMINISTIC}"
        )
