"""ring-flash-attn's functions (0.1.8), computed by ring_attention. Only the import changes:

    from ring_flash_attn import zigzag_ring_flash_attn_func                          # before
    from ring_attn.integrations.ring_flash_attn import zigzag_ring_flash_attn_func   # after

Names, parameters, their order and defaults, shapes and results are as in ring-flash-attn. Rank r of
P holds these rows:

    ring_flash_attn_{func, kvpacked_func, qkvpacked_func}     the r-th run
    zigzag_ring_flash_attn_{...}                              chunks r and 2P-1-r of 2P
    stripe_flash_attn_{...}                                   positions r, r+P, ...
    ring_flash_attn_varlen_{...}                              the r-th run of each document
    zigzag_ring_flash_attn_varlen_{...}                       chunks r and 2P-1-r of each document
    llama3_flash_attn_varlen_{...}                            the r-th run of all documents together

`llama3_flash_attn_prepare_cu_seqlens` makes the arguments of the last one.

`substitute_hf_flash_attn` and `update_ring_flash_attn_params` run transformers' models: see
`adapters`. `utils` has the building blocks for a custom ring.

Differences: `window_size` counts global positions, not positions within a shard. Gradients have the
dtypes of their inputs. Every dtype, headdim and backend of `ring_attention` works, CPUs included.
The zigzag and stripe functions accept `causal=False`. `dropout_p` and `alibi_slopes` are refused.

torch.compile includes the nine functions without documents in a graph. The functions with documents
break the graph, because their plans depend on the values of `cu_seqlens`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment
from ring_attn.core.strategy import Strategy
from ring_attn.integrations.flash_attn import (
    Documents,
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
from ring_attn.integrations.ring_flash_attn.prepared import all_documents, remember
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import as_int, check_type
from ring_attn.values.compiling import left_out_of_graphs

# Error of torch.compile with fullgraph=True for functions that are left out of the graph.
_READS_DOCUMENTS = (
    "the plans of all ranks depend on the values of cu_seqlens, which a graph does not know: "
    "compile without fullgraph=True, or call ring_attn.ring_attention with the global cu_seqlens "
    "and a layout, which compiles to one graph"
)


class _Placement(TypedDict, total=False):
    """Arguments of `attend` that say which rows this rank's shards are."""

    layout: str | SequenceLayout
    strategy: Strategy
    cu_seqlens: Tensor


# Computes the placement for a family of functions: (qkv, causal, group, *documents) -> placement.
# The families have different documents, so the parameters are not typed.
_Place = Callable[..., _Placement]


class Local(NamedTuple):
    """Arguments of one rank for a sequence in equal runs, with boundaries as numbers."""

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
    """Return the documents of one rank's run, the arguments of `llama3_flash_attn_varlen_func`.

    Args:
        cu_seqlens: boundaries of the documents in the whole sequence, whose length is a multiple of
            `world_size`.
        causal: the same value as in the later call.
        rank: the rank whose run it is.
        world_size: number of ranks.

    Returns:
        `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)`: boundaries of the
        documents within the rank's rows; boundaries of their visible keys, counted from the first
        visible key; the length of the longest document of queries and of keys; and the slice of
        these keys in the sequence.

    Raises:
        ValueError: boundaries are wrong, the length is not a multiple of `world_size`, or the rank
            does not exist.

    Example:
        >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
        (tensor([0, 4]), tensor([0, 5]), 4, 5, slice(3, 8, None))
    """
    boundaries = on_host("cu_seqlens", cu_seqlens)
    total = boundaries[-1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    if total == 0 or total % world_size:
        raise ValueError(
            f"cu_seqlens must end at a multiple of world_size, got {total} and {world_size}: pad "
            "the sequence, or call ring_attn.ring_attention, which accepts any length"
        )
    cu_q, cu_k, keys = _local_documents(boundaries, causal, rank, world_size)
    local_q, local_k = (cu_seqlens.new_tensor(cuts) for cuts in (cu_q, cu_k))
    prepared = Local(
        cu_seqlens_q=tuple(cu_q),
        cu_seqlens_k=tuple(cu_k),
        keys=(keys.start, keys.stop),
        causal=causal,
        rank=rank,
        world_size=world_size,
    )
    remember(local_q, prepared, boundaries)
    return local_q, local_k, _longest(cu_q), _longest(cu_k), keys


substitute_hf_flash_attn = adapters.substitute_hf_flash_attn
update_ring_flash_attn_params = adapters.update_ring_flash_attn_params


def _longest(boundaries: Sequence[int]) -> int:
    """Return the length of the longest document."""
    return max(end - start for start, end in pairwise(boundaries))


def _split(
    qkv: Qkv, causal: bool, group: Group, cu_seqlens: Tensor, max_seqlen: int, *, chunks: int
) -> _Placement:
    """_Place packed documents, each of which is sharded over all ranks."""
    check_documents("", cu_seqlens, max_seqlen)
    boundaries = on_host("cu_seqlens", cu_seqlens)
    for name, x in zip("qkv", qkv, strict=True):
        if len(x) != boundaries[-1]:
            raise ValueError(
                f"{name} must have cu_seqlens[-1] rows, {boundaries[-1]}, got {len(x)}: pass the "
                "global boundaries divided by the number of ranks, so that cu_seqlens ends at this "
                "rank's number of rows"
            )
    world_size = dist.get_world_size(groups.check_group(group))
    layout, documents = _split_documents(boundaries, world_size, chunks)
    return {"layout": layout, "cu_seqlens": documents}


@lru_cache(maxsize=128)
def _split_documents(
    boundaries: tuple[int, ...], world_size: int, chunks: int
) -> tuple[SequenceLayout, Tensor]:
    """Return the layout in which a rank has `chunks` chunks of each document, 1 or 2 (zigzag).

    `boundaries` count the rows of one rank; the global boundaries are returned, too.
    """
    shards: list[list[Segment]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(boundaries):
        size, remainder = divmod(stop - start, chunks)
        if remainder:
            raise ValueError(
                f"zigzag needs documents whose length is a multiple of {chunks * world_size}, an "
                f"even number of rows on each of {world_size} ranks, got cu_seqlens "
                f"{list(boundaries)} with {stop - start} rows of one document; pad it, or call "
                "ring_attn.ring_attention with a layout, which accepts any length"
            )
        document_start = start * world_size
        for rank, segments in enumerate(shards):
            for chunk in (rank, 2 * world_size - 1 - rank)[:chunks]:
                segments.append(Segment(document_start + chunk * size, size))
    return SequenceLayout.from_segments(shards), torch.tensor(boundaries) * world_size


def _local_documents(
    boundaries: Sequence[int], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], slice]:
    """Return boundaries of a rank's queries and of their visible keys, and these keys' slice."""
    rows = boundaries[-1] // world_size
    first_row, end_row = rank * rows, (rank + 1) * rows
    # The rank's documents are boundaries[left] to boundaries[right].
    left, right = bisect_left(boundaries, first_row), bisect_left(boundaries, end_row)
    if boundaries[left] != first_row:
        left -= 1  # the document began on an earlier rank
    first_key = boundaries[left]
    end_key = end_row if causal else boundaries[right]
    cu_q = [0, *(cut - first_row for cut in boundaries[left + 1 : right]), rows]
    cu_k = [*(cut - first_key for cut in boundaries[left:right]), end_key - first_key]
    return cu_q, cu_k, slice(first_key, end_key)


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
) -> _Placement:
    """_Place a sequence in equal runs, with all-gather; each rank passes its documents."""
    checks.check_tensors(*qkv, packed=True)
    rows, nheads_kv, _ = qkv[1].shape
    heads_k_stride = as_int("heads_k_stride", heads_k_stride, least=1)
    if nheads_kv % heads_k_stride:
        raise ValueError(
            f"heads_k_stride must be a divisor of nheads_kv={nheads_kv}, got {heads_k_stride}"
        )
    check_documents("_q", cu_q, max_seqlen_q)
    check_documents("_k", cu_k, max_seqlen_k)
    check_type("local_k_slice", keys, slice)
    process_group = groups.check_group(group)
    world_size = dist.get_world_size(process_group)
    given = Local(
        cu_seqlens_q=on_host("cu_seqlens_q", cu_q),
        cu_seqlens_k=on_host("cu_seqlens_k", cu_k),
        keys=(keys.start, keys.stop),
        causal=causal,
        rank=dist.get_rank(process_group),
        world_size=world_size,
    )
    return {
        "layout": SequenceLayout.contiguous(rows * world_size, world_size),
        "strategy": Strategy("all_gather", heads_per_chunk=heads_k_stride),
        "cu_seqlens": all_documents(given, cu_q),
    }


def _in_layout(qkv: Qkv, causal: bool, group: Group, *, name: str) -> _Placement:
    """_Place one sequence in a layout, which is given by name."""
    return {"layout": name}


# The types of the parameters for documents.
_SPLIT = {"cu_seqlens": Tensor, "max_seqlen": int}
_GATHERED = {
    "cu_seqlens_q": Tensor,
    "cu_seqlens_k": Tensor,
    "max_seqlen_q": int,
    "max_seqlen_k": int,
    "heads_k_stride": int,
    "local_k_slice": slice,
}


class _Family(NamedTuple):
    """A family of functions: how its sequences are placed, and its parameters for documents."""

    place: _Place
    documents: Mapping[str, object]


_FAMILIES = {
    "ring_flash_attn": _Family(partial(_in_layout, name="contiguous"), {}),
    "zigzag_ring_flash_attn": _Family(partial(_in_layout, name="zigzag"), {}),
    "stripe_flash_attn": _Family(partial(_in_layout, name="striped"), {}),
    "ring_flash_attn_varlen": _Family(partial(_split, chunks=1), _SPLIT),
    "zigzag_ring_flash_attn_varlen": _Family(partial(_split, chunks=2), _SPLIT),
    "llama3_flash_attn_varlen": _Family(_gathered, _GATHERED),
}

_DOCSTRING = """Compute attention of this rank's queries to all visible keys.

Args, as far as the signature has them:
    q, k, v, kv, qkv: ({rows}, nheads, headdim); kv has a dim of 2 before the heads, qkv of 3.
    cu_seqlens: global boundaries of the documents, divided by the number of ranks; for zigzag, each
        document must have an even number of rows on each rank.
    max_seqlen: number of rows of the longest document on this rank, or more.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: results of
        `llama3_flash_attn_prepare_cu_seqlens` for the same `causal`.
    heads_k_stride: number of KV heads to gather at a time; must be a divisor of nheads_kv.
    others: as in `ring_attn.integrations.flash_attn`.

Returns:
    As the functions of `ring_attn.integrations.flash_attn`.
"""


def _function(family: str, form: str = "") -> Callable[..., Result]:
    """Make the function of a family for q, k, v (form ""), for q, kv ("kv"), or for qkv ("qkv")."""
    documents = _FAMILIES[family].documents
    name = f"{family}_{form}packed_func" if form else f"{family}_func"
    call = partial(_call_left_out if documents else _call, family)
    doc = _DOCSTRING.format(rows="rows" if documents else "batch, rows")
    return named_function(name, form, documents, call, doc, without="softcap")


def _call(
    family: str,
    form: str,
    tensors: tuple[Tensor, ...],
    documents: Documents,
    options: Options,
    group: Group = None,
) -> Result:
    """Compute attention for a function of a family; see `named_function`."""
    with reporting(group):
        qkv = unpacked(form, tensors, packed=len(documents) > 0)
        check_deterministic(qkv, options)
        placement = _FAMILIES[family].place(qkv, options.causal, group, *documents)
    return attend(qkv, options, group=group, **placement)


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
