"""ring-flash-attn's functions (0.1.8) over ring_attention: only the import changes.

    from ring_flash_attn import zigzag_ring_flash_attn_func                          # before
    from ring_attn.integrations.ring_flash_attn import zigzag_ring_flash_attn_func   # after

Names, parameters, their order and defaults, shapes and results are ring-flash-attn's:

    ring_flash_attn_{func, kvpacked_func, qkvpacked_func}            rank r holds the r-th run
    zigzag_ring_flash_attn_{...}                                     chunks r and 2P-1-r
    stripe_flash_attn_{...}                                          positions r, r+P, ...
    ring_flash_attn_varlen_{...}, zigzag_ring_flash_attn_varlen_{...}    each document split so
    llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_{...} the sequence of all
                                                                     documents split in runs

`substitute_hf_flash_attn` and `update_ring_flash_attn_params` run transformers' models: see
`adapters`.

Differences: `window_size` counts global positions, not positions within a shard; gradients have the
dtypes of their inputs; every dtype, headdim and backend of `ring_attention` works, on CPUs too; the
zigzag and stripe functions take `causal=False`. `dropout_p` and `alibi_slopes` are refused.

torch.compile includes the nine functions without documents in a graph. The functions over documents
break the graph, because their plans depend on the values of `cu_seqlens`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.core.strategy import Strategy
from ring_attn.integrations.flash_attn import (
    Options,
    Qkv,
    Result,
    attend,
    check_deterministic,
    check_documents,
    named_function,
    on_host,
    unpacked,
)
from ring_attn.integrations.ring_flash_attn import adapters
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type
from ring_attn.values.compiling import left_out_of_graphs

# Error of torch.compile with fullgraph=True for functions that are left out of the graph.
_READS_DOCUMENTS = (
    "the plans of all ranks depend on the values of cu_seqlens, unknown in a graph: compile "
    "without fullgraph=True, or call ring_attn.ring_attention with the global cu_seqlens and a "
    "layout, which compiles whole"
)


# Arguments of `attend` for this rank's shards: the meaning of a family of functions.
Meaning = Callable[..., dict[str, Any]]


class Local(NamedTuple):
    """Arguments of one rank for a sequence in equal runs: its documents' boundaries, by value."""

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    keys: tuple[int, int]
    causal: bool
    rank: int
    world_size: int


@left_out_of_graphs(_READS_DOCUMENTS)
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """The documents of one rank's run of a packed sequence, for `llama3_flash_attn_varlen_func`.

    `cu_seqlens` has the boundaries in the whole sequence, whose length is a multiple of
    `world_size`; `causal` must be the same in the later call.

    Returns:
        `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)`: boundaries of the
        documents within the rank's rows; boundaries of their visible keys, counted from the first
        key; the longest document of each; and the slice of these keys in the sequence.

    Example:
        >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
        (tensor([0, 4]), tensor([0, 5]), 4, 5, slice(3, 8, None))
    """
    *_, total = boundaries = on_host("cu_seqlens", cu_seqlens)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    if total == 0 or total % world_size:
        raise ValueError(
            f"cu_seqlens must end at a multiple of world_size, got {total} and {world_size}: pad "
            "the sequence, or call ring_attn.ring_attention, which takes any length"
        )
    cu_q, cu_k, keys = _local_documents(boundaries, causal, rank, world_size)
    local_q, local_k = (cu_seqlens.new_tensor(cuts) for cuts in (cu_q, cu_k))
    ends = keys.start, keys.stop
    made = Local(tuple(cu_q), tuple(cu_k), ends, causal, rank, world_size)
    _prepared[local_q] = made, boundaries
    return local_q, local_k, _longest(cu_q), _longest(cu_k), keys


substitute_hf_flash_attn = adapters.substitute_hf_flash_attn
update_ring_flash_attn_params = adapters.update_ring_flash_attn_params


def _longest(boundaries: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(boundaries))


def _split(
    qkv: Qkv, causal: bool, group: Group, cu_seqlens: Tensor, max_seqlen: int, *, chunks: int
) -> dict[str, Any]:
    """Packed documents that are each split over all ranks."""
    check_documents("", cu_seqlens, max_seqlen)
    boundaries = on_host("cu_seqlens", cu_seqlens)
    for name, x in zip("qkv", qkv, strict=True):
        if len(x) != boundaries[-1]:
            raise ValueError(
                f"{name} must have cu_seqlens[-1] rows, {boundaries[-1]}, got {len(x)}: cu_seqlens "
                "has the global boundaries divided by the ranks, which is this rank's rows"
            )
    world_size = dist.get_world_size(groups.check_group(group))
    layout, documents = _split_documents(boundaries, world_size, chunks)
    return {"layout": layout, "cu_seqlens": documents}


@lru_cache(maxsize=128)
def _split_documents(
    boundaries: tuple[int, ...], world_size: int, chunks: int
) -> tuple[SequenceLayout, Tensor]:
    """The layout in which a rank holds `chunks` chunks of each document, and global boundaries."""
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(boundaries):
        size, left = divmod(stop - start, chunks)
        if left:
            raise ValueError(
                f"zigzag needs documents whose length is a multiple of {chunks * world_size}, an "
                f"even number of rows on each of {world_size} ranks, got cu_seqlens "
                f"{list(boundaries)} with one of {stop - start} rows; pad it, or call "
                "ring_attn.ring_attention with a layout, which takes any length"
            )
        for rank, segments in enumerate(parts):
            of_rank = (rank, 2 * world_size - 1 - rank)[:chunks]
            segments += [Segment(start * world_size + chunk * size, size) for chunk in of_rank]
    return SequenceLayout.from_segments(parts), torch.tensor(boundaries) * world_size


def _local_documents(
    boundaries: Sequence[int], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], slice]:
    """Boundaries of one rank's queries and of their visible keys, and the slice of these keys."""
    rows = boundaries[-1] // world_size
    first, end = rank * rows, (rank + 1) * rows
    left, right = bisect_left(boundaries, first), bisect_left(boundaries, end)
    if boundaries[left] != first:
        left -= 1  # the document began on an earlier rank
    start, stop = boundaries[left], end if causal else boundaries[right]
    cu_q = [0, *(cut - first for cut in boundaries[left + 1 : right]), rows]
    cu_k = [*(cut - start for cut in boundaries[left:right]), stop - start]
    return cu_q, cu_k, slice(start, stop)


def _gathered(
    qkv: Qkv,
    causal: bool,
    group: Group,
    cu_q: Tensor,
    cu_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    keys: slice,
) -> dict[str, Any]:
    """A sequence in equal runs by all-gather; each rank passes its documents."""
    checks.check_tensors(*qkv, packed=True)
    rows, nheads_kv, _ = qkv[1].shape
    heads_k_stride = as_int("heads_k_stride", heads_k_stride, least=1)
    if nheads_kv % heads_k_stride:
        raise ValueError(f"heads_k_stride must divide nheads_kv {nheads_kv}, got {heads_k_stride}")
    check_documents("_q", cu_q, max_seqlen_q)
    check_documents("_k", cu_k, max_seqlen_k)
    check_type("local_k_slice", keys, slice)
    process_group = groups.check_group(group)
    world_size = dist.get_world_size(process_group)
    made = Local(
        tuple(on_host("cu_seqlens_q", cu_q)), tuple(on_host("cu_seqlens_k", cu_k)),
        (keys.start, keys.stop), causal, dist.get_rank(process_group), world_size,
    )  # fmt: skip
    return {
        "layout": SequenceLayout.contiguous(rows * world_size, world_size),
        "strategy": Strategy("all_gather", heads_per_chunk=heads_k_stride),
        "cu_seqlens": _all_documents(made, cu_q),
    }


# Arguments that `llama3_flash_attn_prepare_cu_seqlens` has made, with the documents of all ranks,
# by the tensor of the queries' documents: other sequences can have the same values on this rank.
_prepared: Any = WeakTensorKeyDictionary()


def _all_documents(made: Local, cu_q: Tensor) -> Tensor:
    """Global boundaries of all non-empty documents, from this rank's arguments alone.

    Nothing is sent: ranks that exchanged them for new arguments only would wait for ranks that
    know theirs. The call itself compares the boundaries of all ranks.
    """
    same, boundaries = _prepared.get(cu_q, (None, ()))
    if same != made:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice must be the results of ring_attn's "
            "llama3_flash_attn_prepare_cu_seqlens for this rank, world size and causal="
            f"{made.causal}, got values that are not its results: {made}; pass the tensors that it "
            "returned, not copies"
        )
    return torch.tensor(sorted({*boundaries}))


def _in_layout(qkv: Qkv, causal: bool, group: Group, *, name: str) -> dict[str, Any]:
    return {"layout": name}


# The types of the parameters for documents.
_SPLIT = {"cu_seqlens": Tensor, "max_seqlen": int}
_GATHERED = {
    "cu_seqlens_q": Tensor, "cu_seqlens_k": Tensor, "max_seqlen_q": int, "max_seqlen_k": int,
    "heads_k_stride": int, "local_k_slice": slice,
}  # fmt: skip

# The meaning of each family, and its parameters for documents.
_FAMILIES: dict[str, tuple[Meaning, Mapping[str, object]]] = {
    "ring_flash_attn": (partial(_in_layout, name="contiguous"), {}),
    "zigzag_ring_flash_attn": (partial(_in_layout, name="zigzag"), {}),
    "stripe_flash_attn": (partial(_in_layout, name="striped"), {}),
    "ring_flash_attn_varlen": (partial(_split, chunks=1), _SPLIT),
    "zigzag_ring_flash_attn_varlen": (partial(_split, chunks=2), _SPLIT),
    "llama3_flash_attn_varlen": (_gathered, _GATHERED),
}

_DOCSTRING = """Attention of this rank's queries to all visible keys.

Args, as far as the signature has them:
    q, k, v, kv, qkv: ({rows}, nheads, headdim); kv has a dim of 2 before the heads, qkv of 3.
    cu_seqlens: global boundaries of the documents, divided by the number of ranks; zigzag needs an
        even number of a document's rows on each rank.
    max_seqlen: rows of the longest document on this rank, or more.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: results of
        `llama3_flash_attn_prepare_cu_seqlens` for the same `causal`.
    heads_k_stride: number of KV heads to gather at a time; must divide nheads_kv.
    others: as in `ring_attn.integrations.flash_attn`.

Returns:
    As functions of `ring_attn.integrations.flash_attn`.
"""


def _function(family: str, form: str = "") -> Callable[..., Result]:
    """Makes the function of a family for q, k, v; for q, kv; or for qkv."""
    _, documents = _FAMILIES[family]
    name = f"{family}_{form}packed_func" if form else f"{family}_func"
    call = partial(_call_left_out if documents else _call, family)
    doc = _DOCSTRING.format(rows="rows" if documents else "batch, rows")
    return named_function(name, form, documents, call, doc, without="softcap")


def _call(
    family: str,
    form: str,
    tensors: tuple[Tensor, ...],
    documents: tuple[Any, ...],
    options: Options,
    group: Group = None,
) -> Result:
    with reporting(group):
        qkv = unpacked(form, tensors, packed=len(documents) > 0)
        check_deterministic(qkv, options)
        meaning = _FAMILIES[family][0](qkv, options.causal, group, *documents)
    return attend(qkv, options, group=group, **meaning)


_call_left_out = left_out_of_graphs(_READS_DOCUMENTS)(_call)


ring_flash_attn_func = _function("ring_flash_attn")
ring_flash_attn_kvpacked_func = _function("ring_flash_attn", "kv")
ring_flash_attn_qkvpacked_func = _function("ring_flash_attn", "qkv")
zigzag_ring_flash_attn_func = _function("zigzag_ring_flash_attn")
zigzag_ring_flash_attn_kvpacked_func = _function("zigzag_ring_flash_attn", "kv")
zigzag_ring_flash_attn_qkvpacked_func = _function("zigzag_ring_flash_attn", "qkv")
stripe_flash_attn_func = _function("stripe_flash_attn")
stripe_flash_attn_kvpacked_func = _function("stripe_flash_attn", "kv")
stripe_flash_attn_qkvpacked_func = _function("stripe_flash_attn", "qkv")
ring_flash_attn_varlen_func = _function("ring_flash_attn_varlen")
ring_flash_attn_varlen_kvpacked_func = _function("ring_flash_attn_varlen", "kv")
ring_flash_attn_varlen_qkvpacked_func = _function("ring_flash_attn_varlen", "qkv")
zigzag_ring_flash_attn_varlen_func = _function("zigzag_ring_flash_attn_varlen")
zigzag_ring_flash_attn_varlen_kvpacked_func = _function("zigzag_ring_flash_attn_varlen", "kv")
zigzag_ring_flash_attn_varlen_qkvpacked_func = _function("zigzag_ring_flash_attn_varlen", "qkv")
llama3_flash_attn_varlen_func = _function("llama3_flash_attn_varlen")
llama3_flash_attn_varlen_kvpacked_func = _function("llama3_flash_attn_varlen", "kv")
llama3_flash_attn_varlen_qkvpacked_func = _function("llama3_flash_attn_varlen", "qkv")
