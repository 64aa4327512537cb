"""The functions of the package ring-flash-attn (0.1.8), as ring_attention: change the import.

    from ring_flash_attn import zigzag_ring_flash_attn_func                          # before
    from ring_attn.integrations.ring_flash_attn import zigzag_ring_flash_attn_func   # after

Names, parameters, their order and defaults, shapes and what is returned are those of that package:

    ring_flash_attn_{func, kvpacked_func, qkvpacked_func}            rank r holds the r-th run
    zigzag_ring_flash_attn_{...}                                     chunks r and 2P-1-r
    stripe_flash_attn_{...}                                          positions r, r+P, ...
    ring_flash_attn_varlen_{...}, zigzag_ring_flash_attn_varlen_{...}    each document split so
    llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_{...} the sequence of all
                                                                     documents split in runs

These are 19 of its 21 functions. The other two, `substitute_hf_flash_attn` and
`update_ring_flash_attn_params`, patch transformers and are refused with what to call instead.

What is different, where the other's result is not what its parameters say: `window_size` counts
global positions, not those within a shard; gradients have the dtypes of their inputs; every dtype,
headdim and backend of `ring_attention` works, on CPUs too; the zigzag and stripe functions take
`causal=False`. `dropout_p` and `alibi_slopes` are refused.

torch.compile takes the nine functions without documents into a graph. Those over documents break
the graph, because their plans follow from the values of `cu_seqlens`: with `fullgraph=True` they
are refused with what to call instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn import validation as check
from ring_attn.api import Group, Layout, ring_attention, select_backend
from ring_attn.compiling import left_out_of_graphs
from ring_attn.layout import Segment, SequenceLayout
from ring_attn.strategy import Strategy

Result = Tensor | tuple[Tensor, Tensor, None]

# What torch.compile says with fullgraph=True of a function that is left out of the graph.
_READS_DOCUMENTS = (
    "the plans of all ranks follow from the values of cu_seqlens, and a graph knows none: compile "
    "without fullgraph=True, or call ring_attn.ring_attention with the global cu_seqlens and a "
    "layout, which compiles whole"
)
_ASKS_BACKEND = (
    "deterministic=True asks which backend would run, and a graph cannot: compile without "
    "fullgraph=True, or call torch.use_deterministic_algorithms(True) before"
)

# Backends whose backward is deterministic on CUDA whatever torch is told.
_DETERMINISTIC = ("triton", "flash_attn")


class _Options(NamedTuple):
    """The parameters that all of the functions end with, in their order."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    group: Group


class _Batched:
    """The three functions over (batch, rows, nheads, headdim) of one layout.

    Args of each, by the names that are in its signature:
        q: (batch, rows, nheads, headdim), this rank's shard.
        k: (batch, rows, nheads_kv, headdim).
        v: likewise.
        kv: (batch, rows, 2, nheads_kv, headdim).
        qkv: (batch, rows, 3, nheads, headdim).
        dropout_p: must be 0.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        causal: a query sees nothing after its own global position.
        window_size: `(left, right)` global positions; -1 is unbounded, and with `causal` the right
            is 0 whatever is given.
        alibi_slopes: must be None.
        deterministic: refused where the backend that would run is not.
        return_attn_probs: return `(out, lse, None)`.
        group: a process group, or one axis of a mesh; the default group by default.

    Each returns `out` (batch, rows, nheads, headdim), or `(out, lse, None)` with lse (batch,
    nheads, rows) float32, natural logarithm.

    Raises:
        NotImplementedError: dropout, ALiBi, or `deterministic` where it cannot be promised.
        Exception: what `ring_attention` raises.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout

    def func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """Attention of this rank's queries, q (batch, rows, nheads, headdim), to all keys."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        return _attend(q, k, v, options, self._layout)

    def kvpacked_func(
        self,
        q: Tensor,
        kv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """The same with kv (batch, rows, 2, nheads_kv, headdim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        k, v = _unpacked("kv", kv, "batch, rows, 2")
        return _attend(q, k, v, options, self._layout)

    def qkvpacked_func(
        self,
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """The same with qkv (batch, rows, 3, nheads, headdim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        q, k, v = _unpacked("qkv", qkv, "batch, rows, 3")
        return _attend(q, k, v, options, self._layout)


class _Varlen:
    """The three functions over packed documents, each of which is split over all ranks.

    Args of each, beyond those of `_Batched`:
        q: (rows, nheads, headdim), this rank's part of every document, one after another.
        k, v, kv, qkv: likewise.
        cu_seqlens: boundaries of those parts, from 0 to `rows`: the documents' global boundaries
            divided by the ranks. The same on every rank. Every document is as long on each rank, an
            even number of rows where it is two chunks.
        max_seqlen: of the longest part, or more.

    Each returns `out` (rows, nheads, headdim), or `(out, lse, None)` with lse (nheads, rows), as
    with recent versions of flash-attn.

    Raises:
        ValueError: boundaries that do not fit, a document of an odd part in two chunks, or a
            `max_seqlen` below the longest.
        Exception: as `_Batched`.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    def func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """Attention of this rank's queries, q (rows, nheads, headdim), within their documents."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        return _attend_split(q, k, v, cu_seqlens, max_seqlen, self._chunks, options)

    def kvpacked_func(
        self,
        q: Tensor,
        kv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """The same with kv (rows, 2, nheads_kv, headdim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        k, v = _unpacked("kv", kv, "rows, 2")
        return _attend_split(q, k, v, cu_seqlens, max_seqlen, self._chunks, options)

    def qkvpacked_func(
        self,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Result:
        """The same with qkv (rows, 3, nheads, headdim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs, group,
        )  # fmt: skip
        q, k, v = _unpacked("qkv", qkv, "rows, 3")
        return _attend_split(q, k, v, cu_seqlens, max_seqlen, self._chunks, options)


_ring, _zigzag, _stripe = _Batched("contiguous"), _Batched("zigzag"), _Batched("striped")
_ring_varlen, _zigzag_varlen = _Varlen(chunks=1), _Varlen(chunks=2)

ring_flash_attn_func = _ring.func
ring_flash_attn_kvpacked_func = _ring.kvpacked_func
ring_flash_attn_qkvpacked_func = _ring.qkvpacked_func
ring_flash_attn_varlen_func = _ring_varlen.func
ring_flash_attn_varlen_kvpacked_func = _ring_varlen.kvpacked_func
ring_flash_attn_varlen_qkvpacked_func = _ring_varlen.qkvpacked_func
zigzag_ring_flash_attn_func = _zigzag.func
zigzag_ring_flash_attn_kvpacked_func = _zigzag.kvpacked_func
zigzag_ring_flash_attn_qkvpacked_func = _zigzag.qkvpacked_func
zigzag_ring_flash_attn_varlen_func = _zigzag_varlen.func
zigzag_ring_flash_attn_varlen_kvpacked_func = _zigzag_varlen.kvpacked_func
zigzag_ring_flash_attn_varlen_qkvpacked_func = _zigzag_varlen.qkvpacked_func
stripe_flash_attn_func = _stripe.func
stripe_flash_attn_kvpacked_func = _stripe.kvpacked_func
stripe_flash_attn_qkvpacked_func = _stripe.qkvpacked_func


@left_out_of_graphs(_READS_DOCUMENTS)
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """The documents of one rank's run of a packed sequence, for `llama3_flash_attn_varlen_func`.

    Args:
        cu_seqlens: boundaries of the documents in the global sequence, whose length is a multiple
            of `world_size`.
        causal: as in the call that follows.
        rank: whose run.
        world_size: in how many equal runs the sequence is split.

    Returns:
        `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)`: the boundaries of
        the documents within the rank's rows, those of the keys that they see, counted from the
        first, the longest of each, and where those keys are in the sequence. Tensors as
        `cu_seqlens`.

    Raises:
        ValueError: boundaries that do not fit, or a length that the ranks do not divide.
        TypeError: cu_seqlens of another type.

    Example:
        >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
        (tensor([0, 4]), tensor([0, 5]), 4, 5, slice(3, 8, None))
    """
    boundaries = _on_host("cu_seqlens", cu_seqlens)
    total = boundaries[-1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    if total == 0 or total % world_size:
        raise ValueError(
            f"cu_seqlens must end at a multiple of world_size, got {total} and {world_size}: pad "
            "the sequence, or call ring_attn.ring_attention, which takes any length"
        )
    cu_q, cu_k, keys = _local_documents(boundaries, causal, rank, world_size)
    local = (
        torch.tensor(x, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for x in (cu_q, cu_k)
    )
    return *local, _longest(cu_q), _longest(cu_k), keys  # type: ignore[return-value]


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Result:
    """Attention within packed documents whose sequence is split in equal runs, by all-gather.

    The ranks' plans follow from all documents, and a rank's arguments tell only its own. So the
    ranks exchange them, a few integers each, at the first call with tensors that were not seen
    before (by identity, not by value: every rank must then have new ones); later calls, such as
    those of other layers, look the documents up.

    Args:
        q: (rows, nheads, headdim), this rank's run of the packed sequence.
        k: (rows, nheads_kv, headdim).
        v: likewise.
        cu_seqlens_q: with the next three and `local_k_slice` what
            `llama3_flash_attn_prepare_cu_seqlens` gave, for the same `causal`.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        heads_k_stride: KV heads that are gathered at a time; must divide nheads_kv.
        local_k_slice: likewise.
        dropout_p: must be 0.
        softmax_scale: factor of the scores; `headdim ** -0.5` by default.
        causal: a query sees nothing after its own position.
        window_size: `(left, right)` global positions; -1 is unbounded.
        alibi_slopes: must be None.
        deterministic: refused where the backend that would run is not.
        return_attn_probs: return `(out, lse, None)`.
        group: a process group, or one axis of a mesh; the default group by default.

    Returns:
        `out` (rows, nheads, headdim), or `(out, lse, None)` with lse (nheads, rows) float32.

    Raises:
        ValueError: arguments that `llama3_flash_attn_prepare_cu_seqlens` would not give for one
            sequence and this `causal`; on every rank.
        NotImplementedError: dropout, ALiBi, or `deterministic` where it cannot be promised.
        Exception: what `ring_attention` raises.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip
    local = _Local(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)
    return _attend_gathered(q, k, v, local, heads_k_stride, options)


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Result:
    """`llama3_flash_attn_varlen_func` with kv (rows, 2, nheads_kv, headdim)."""
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip
    local = _Local(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)
    k, v = _unpacked("kv", kv, "rows, 2")
    return _attend_gathered(q, k, v, local, heads_k_stride, options)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Result:
    """`llama3_flash_attn_varlen_func` with qkv (rows, 3, nheads, headdim)."""
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip
    local = _Local(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)
    q, k, v = _unpacked("qkv", qkv, "rows, 3")
    return _attend_gathered(q, k, v, local, heads_k_stride, options)


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> NoReturn:
    """Refused: it would replace a function inside transformers for the whole process.

    Raises:
        NotImplementedError: always, with what to call instead.
    """
    raise NotImplementedError(
        "substitute_hf_flash_attn is not built, as it patches transformers for good; call "
        "ring_attn.integrations.transformers.register(group) and load the model with "
        "attn_implementation='ring_attn'"
    )


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> NoReturn:
    """Refused, like `substitute_hf_flash_attn`, whose documents it sets.

    Raises:
        NotImplementedError: always, with what to call instead.
    """
    raise NotImplementedError(
        "update_ring_flash_attn_params is not built: it belongs to substitute_hf_flash_attn; see "
        "ring_attn.integrations.transformers.register"
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: _Options,
    layout: Layout,
    documents: Tensor | None = None,
    strategy: str | Strategy = "ring",
) -> Result:
    """ring_attention with what the functions have in common."""
    if options.deterministic:
        _check_deterministic(q, k, v)
    window: Any = options.window_size
    if options.causal and isinstance(window, (tuple, list)) and len(window) == 2:
        window = (window[0], min(window[1], 0))  # what flash-attention makes of it
    out, lse = ring_attention(
        q,
        k,
        v,
        causal=options.causal,
        window_size=window,
        softmax_scale=options.softmax_scale,
        cu_seqlens=documents,
        group=options.group,
        layout=layout,
        strategy=strategy,
        return_lse=True,
        dropout_p=options.dropout_p,
        alibi_slopes=options.alibi_slopes,
    )
    return (out, lse, None) if options.return_attn_probs else out


def _check_deterministic(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Two runs have the same bits: always on CPUs, and with backends that add up in order."""
    if q.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        _check_backend_is_deterministic(q, k, v)


@left_out_of_graphs(_ASKS_BACKEND)
def _check_backend_is_deterministic(q: Tensor, k: Tensor, v: Tensor) -> None:
    name = select_backend(q, k, v).name
    if name not in _DETERMINISTIC:
        raise NotImplementedError(
            f"deterministic=True cannot be promised by backend {name!r}, which would run; call "
            f"torch.use_deterministic_algorithms(True), or install one of {_DETERMINISTIC}"
        )


def _unpacked(name: str, x: Tensor, dims: str) -> tuple[Tensor, ...]:
    """The tensors of a packed one, which stand in the dim before the heads."""
    leading = dims.split(", ")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != len(leading) + 2 or x.size(-3) != int(leading[-1]):
        raise ValueError(f"{name} must be ({dims}, nheads, headdim), got {tuple(x.shape)}")
    return x.unbind(-3)


def _boundaries(name: str, cu_seqlens: Tensor, most_name: str, most: int) -> tuple[int, ...]:
    """Boundaries on the host, and that no document is longer than what is said of the longest."""
    boundaries = _on_host(name, cu_seqlens)
    if int(most) < _longest(boundaries):
        raise ValueError(
            f"{most_name} must be at least the longest document of {name}, "
            f"{_longest(boundaries)}, got {int(most)}"
        )
    return boundaries


def _on_host(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    boundaries = check.check_cu_seqlens(name, cu_seqlens)
    if boundaries is None:
        raise TypeError(f"{name} must be an int32 tensor, got None")
    return boundaries


def _longest(boundaries: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(boundaries))


@left_out_of_graphs(_READS_DOCUMENTS)
def _attend_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    chunks: int,
    options: _Options,
) -> Result:
    """Attention within packed documents, each of which is split over all ranks."""
    boundaries = _boundaries("cu_seqlens", cu_seqlens, "max_seqlen", max_seqlen)
    world_size = dist.get_world_size(check.check_group(options.group))
    layout, documents = _split_documents(boundaries, world_size, chunks)
    return _attend(q, k, v, options, layout, documents)


@lru_cache(maxsize=128)
def _split_documents(
    boundaries: tuple[int, ...], world_size: int, chunks: int
) -> tuple[SequenceLayout, Tensor]:
    """The layout of documents of which every rank holds one run, or the zigzag's two.

    Args:
        boundaries: of the documents' parts on one rank.
        world_size: on how many ranks they lie.
        chunks: that each rank holds of each document.

    Returns:
        The layout, and the documents' global boundaries.
    """
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
        for rank, held in enumerate(parts):
            mine = (rank, 2 * world_size - 1 - rank)[:chunks]
            held += [Segment(start * world_size + chunk * size, size) for chunk in mine]
    whole = torch.tensor([cut * world_size for cut in boundaries], dtype=torch.int64)
    return SequenceLayout.from_segments(parts), whole


class _Local(NamedTuple):
    """What `llama3_flash_attn_prepare_cu_seqlens` gave one rank."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: slice


def _local_documents(
    boundaries: Sequence[int], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], slice]:
    """Boundaries of one rank's queries and of the keys that they see, and where those keys are."""
    rows = boundaries[-1] // world_size
    first, end = rank * rows, (rank + 1) * rows
    left, right = bisect_left(boundaries, first), bisect_left(boundaries, end)
    if boundaries[left] != first:
        left -= 1  # the document began on a rank before
    start, stop = boundaries[left], end if causal else boundaries[right]
    cu_q = [0, *(cut - first for cut in boundaries[left + 1 : right]), rows]
    cu_k = [*(cut - start for cut in boundaries[left:right]), stop - start]
    return cu_q, cu_k, slice(start, stop)


@left_out_of_graphs(_READS_DOCUMENTS)
def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, local: _Local, heads_k_stride: int, options: _Options
) -> Result:
    """Attention by all-gather over a sequence in equal runs, from one rank's own documents."""
    check.check_tensors(q, k, v, packed=True)
    if q.ndim != 3:
        raise ValueError(f"q, k, v must be (rows, nheads, headdim), got q {tuple(q.shape)}")
    nheads_kv = k.size(-2)
    if heads_k_stride < 1 or nheads_kv % heads_k_stride:
        raise ValueError(f"heads_k_stride must divide nheads_kv {nheads_kv}, got {heads_k_stride}")
    documents = _all_documents(local, k.size(0), options)
    world_size = dist.get_world_size(check.check_group(options.group))
    layout = SequenceLayout.contiguous(k.size(0) * world_size, world_size)
    strategy = Strategy("all_gather", heads_per_chunk=heads_k_stride)
    return _attend(q, k, v, options, layout, documents, strategy)


# cu_seqlens_q -> what else was asked -> the documents, and cu_seqlens_k, so that its id stays its.
_documents: Any = WeakTensorKeyDictionary()


def _all_documents(local: _Local, rows: int, options: _Options) -> Tensor:
    """Global boundaries of all documents but empty ones, which the ranks tell one another once."""
    cu_q = _boundaries("cu_seqlens_q", local.cu_seqlens_q, "max_seqlen_q", local.max_seqlen_q)
    cu_k = _boundaries("cu_seqlens_k", local.cu_seqlens_k, "max_seqlen_k", local.max_seqlen_k)
    keys, group = local.keys, check.check_group(options.group)
    if not isinstance(keys, slice):
        raise TypeError(f"local_k_slice must be a slice, got {type(keys).__name__}")
    versions = [0 if x.is_inference() else x._version for x in local[:2]]
    asked = (*versions, id(local.cu_seqlens_k), keys.start, keys.stop, rows, options.causal, group)
    known = _documents.setdefault(local.cu_seqlens_q, {})
    if asked not in known:
        told: list[Any] = [None] * dist.get_world_size(group)
        mine = {"rows": rows, "q": cu_q, "k": cu_k, "keys": (keys.start, keys.stop)}
        dist.all_gather_object(told, mine, group=group)
        whole = torch.tensor(_joined_documents(told, options.causal), dtype=torch.int64)
        known[asked] = (whole, local.cu_seqlens_k)
    documents: Tensor = known[asked][0]
    return documents


def _joined_documents(told: Sequence[dict[str, Any]], causal: bool) -> list[int]:
    """Boundaries of the whole sequence from those of every rank, which must fit one another."""
    rows, world_size = told[0]["rows"], len(told)
    # The last of a rank may be only where its keys end; the next begins there, or is the end.
    starts = {one["keys"][0] + cut for one in told for cut in one["k"][:-1]}
    boundaries = sorted(starts | {rows * world_size})
    odd = [
        rank
        for rank, one in enumerate(told)
        if boundaries[0] != 0
        or one["rows"] != rows
        or not _fits(one, boundaries, causal, rank, world_size)
    ]
    if odd:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice must be what "
            "llama3_flash_attn_prepare_cu_seqlens gives every rank for one cu_seqlens of "
            f"{world_size} x {rows} positions and causal={causal}; those of ranks {odd} are not: "
            + "; ".join(f"rank {rank} has {told[rank]}" for rank in odd[:2])
        )
    return boundaries


def _fits(
    one: dict[str, Any], boundaries: Sequence[int], causal: bool, rank: int, world_size: int
) -> bool:
    """Whether a rank has what the boundaries of all give it; empty documents do not count."""
    cu_q, cu_k, keys = _local_documents(boundaries, causal, rank, world_size)
    given = (sorted(set(one["q"])), sorted(set(one["k"])), one["keys"])
    return given == (cu_q, cu_k, (keys.start, keys.stop))
