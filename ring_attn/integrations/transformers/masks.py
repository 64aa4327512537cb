"""Masks of Hugging Face models beyond causality, windows and documents.

    padding at the end of rows    attention_mask, (batch, seqlen)     a row sees only its tokens
    images, seen whole            token_type_ids, (batch, seqlen)     `masks.spans`
    chunked attention             attention_chunk_size of a config    documents of one chunk each

Both tensors cover the whole sequence, on every rank. The model passes them to the mask function,
which returns a `BatchMask` instead of a mask. The attention, which knows the layout, makes slices
of the `BatchMask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ring_attn.checks import attention as checks
from ring_attn.core import masks
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask

# Parts of masks that causal, window_size, cu_seqlens and chunks express. transformers takes
# positions that jump, as in zigzag, for packed sequences; the attention checks positions itself.
MASK_PATTERNS = (
    "and_mask",
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
IGNORED = -100

UNION, BLOCKS, CHUNKS = "or_masks", "blockwise_overlay", "chunked_overlay"

KeyRange = tuple[int, int]
MaskRow = tuple[int, tuple[KeyRange, ...]]


@dataclass(frozen=True)
class BatchMask:
    """Spans and padding of a batch, read from the arguments of a mask function.

    Attributes:
        seqlen: length of the whole sequence.
        rows: for each row of the batch the number of tokens before its padding, and the spans, such
            as images, whose tokens all see each other.
        beyond_windows: whether a span longer than a window is still seen whole.
    """

    seqlen: int
    rows: tuple[MaskRow, ...]
    beyond_windows: bool = False


class Rule(NamedTuple):
    """Causality and window of a layer, as in `ring_attention`, and the size of its chunks."""

    causal: bool
    window: tuple[int, int]
    chunk: int | None


# -- reading a mask function's arguments


def read_mask(
    *args: Any,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    q_length: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> BatchMask | None:
    """Reads padding and spans from the arguments of a mask function; refuses other masks.

    `mask_function` computes visibility from indices, `use_vmap` marks it as the user's own;
    `attention_mask` is (batch, seqlen), False for padding; `q_length` counts this rank's rows.
    """
    parts = [] if mask_function is None else list(_parts(mask_function))
    known = [*MASK_PATTERNS]  # a list, as torch 2.11 cannot trace a copied set
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        known.append(CHUNKS)
    union = _union_with_blocks(parts)
    if union is not None:
        known += [UNION, BLOCKS]
    unknown = sorted({name for name, _ in parts if name not in known})
    if unknown or (kwargs.get("use_vmap") and union is None):
        raise NotImplementedError(
            f"the model asks for a mask made of {', '.join(unknown) or 'functions of its own'}: "
            "attention over a split sequence has causal masks, sliding windows, chunks, documents "
            "(cu_seq_lens_q), images (token_type_ids) and padding at the end"
        )
    lengths = _lengths(attention_mask)
    blocks = None if union is None else union.blocks
    if blocks is None or not bool((blocks >= 0).any()):
        if attention_mask is None or lengths is None:
            return None
        return BatchMask(attention_mask.size(1), tuple((length, ()) for length in lengths))
    if attention_mask is not None and (lengths or attention_mask.size(1) != q_length):
        # A model pads block ids to the length of this mask, which hides whether they covered the
        # whole sequence.
        raise NotImplementedError(
            "attention_mask beside token_type_ids that mark images: leave attention_mask out, and "
            f"set labels of padding at the end to {IGNORED}, as no token before padding sees it"
        )
    seqlen = blocks.size(1)
    rows = tuple((seqlen, spans) for spans in _spans(blocks))
    return BatchMask(seqlen, rows, beyond_windows=union is not None and union.has_window)


class _Union(NamedTuple):
    """A causal mask, perhaps with a window, and blocks that are seen whole."""

    blocks: Tensor  # (batch, seqlen) ids; negative outside of blocks
    has_window: bool


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The functions that a mask is made of, with names, each before its own parts.

    Under torch.compile only the outermost function, which is enough to find unions; chunks also
    follow from the types of the layers.
    """
    if torch.compiler.is_compiling():
        yield mask_function.__name__, mask_function
        return
    name, module = mask_function.__qualname__.split(".")[0], mask_function.__module__
    yield name if module == "transformers.masking_utils" else f"{module}.{name}", mask_function
    for contents in _contents(mask_function):
        for part in contents if isinstance(contents, tuple) else (contents,):
            if isinstance(part, FunctionType):
                yield from _parts(part)


def _contents(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _union_with_blocks(parts: list[tuple[str, Any]]) -> _Union | None:
    """The only union among the parts, if it joins a causal mask and blocks."""
    unions = [function for name, function in parts if name == UNION]
    if len(unions) != 1:
        return None
    members = next(iter(_contents(unions[0])))
    inside = [[name for name, _ in _parts(member)] for member in members]
    if len(inside) != 2 or inside[1] != [BLOCKS] or "causal_mask_function" not in inside[0]:
        return None
    if CHUNKS in inside[0] or [name for name, _ in parts].count(BLOCKS) != 1:
        return None
    return _Union(_contents(members[1])[0], "sliding_window_overlay" in inside[0])


def real_tokens(attention_mask: Tensor) -> Tensor | None:
    """(batch, seqlen), False for padding at the end of rows; None without padding."""
    real = attention_mask != 0
    if bool(real.all()):
        return None
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise NotImplementedError(
            f"attention_mask hides {int((~real).sum())} of {real.numel()} tokens, some of them "
            "before others that it does not hide: padding must stand at the end, as "
            "tokenizer.padding_side='right' makes it"
        )
    return real


def tokens_of(batch: Mapping[str, Any]) -> Tensor:
    """Ids or embeddings, (batch, rows, ...)."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), Tensor):
            return batch[name]
    raise ValueError(f"a batch needs input_ids or inputs_embeds, got {sorted(batch)}")


def _lengths(attention_mask: Tensor | None) -> tuple[int, ...] | None:
    """Number of tokens of each row before its padding; None without padding."""
    if attention_mask is None:
        return None
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "attention_mask cannot be read under torch.compile: leave it out, and if a causal "
            f"model has padding at the end, set the labels there to {IGNORED}"
        )
    real = real_tokens(attention_mask)
    return None if real is None else tuple(real.sum(1).tolist())


def _spans(blocks: Tensor) -> Iterator[tuple[KeyRange, ...]]:
    """The runs of each row that are blocks; refuses a block of several runs."""
    for ids in blocks.cpu():
        edges = [0, *(torch.nonzero(ids.diff()).flatten() + 1).tolist(), len(ids)]
        spans = [(a, b) for a, b in pairwise(edges) if a < b and ids[a] >= 0]
        if len({int(ids[a]) for a, _ in spans}) < len(spans):
            raise NotImplementedError(
                "the model asks for blocks of tokens that do not stand together: only runs of "
                "tokens, such as those of an image, see all of themselves"
            )
        yield tuple(spans)


# -- chunks and query scales of a layer


def chunk_of(module: nn.Module) -> int | None:
    """Size of the chunks that limit a layer's attention; None without chunks."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or layer is None or types[layer] != "chunked_attention":
        return None
    size: int = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def scales_by_row_index(module: nn.Module) -> bool:
    """Tells whether a layer scales its queries by their index: Llama 4's layers without RoPE do."""
    tuned = getattr(module, "attn_temperature_tuning", False)
    return (
        bool(tuned)
        and not getattr(module, "use_rope", True)
        and "position_ids" not in signature(type(module).forward).parameters
    )


def scaled_again(module: Any, q: Tensor, counted: Tensor, positions: Tensor) -> Tensor:
    """Scales q (batch, rows, nheads, headdim) by positions, not by those `counted` by a layer."""
    before, after = (
        torch.log1p(torch.floor((x.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for x in (counted, positions)
    )
    return (q * (after / before).to(q.device)[:, None, None]).to(q.dtype)


# -- masks of all rows


@lru_cache(maxsize=64)
def repeated(layout: SequenceLayout, batch: int) -> SequenceLayout:
    """The layout of a batch whose rows are concatenated to one sequence."""
    whole = layout
    for _ in range(batch - 1):
        whole = whole.followed_by(layout)
    return whole


@lru_cache(maxsize=256)
def mask_of(seqlen: int, rows: tuple[MaskRow, ...], rule: Rule, cuts: tuple[int, ...] | None,
            beyond_windows: bool) -> Mask:  # fmt: skip
    """The mask of a batch whose rows, of `seqlen` and documents `cuts` each, are concatenated."""
    each = [_mask_of_row(seqlen, row, rule, cuts, beyond_windows) for row in rows]
    return each[0] if len(each) == 1 else masks.by_document(each)


def _mask_of_row(
    seqlen: int, row: MaskRow, rule: Rule, cuts: tuple[int, ...] | None, beyond_windows: bool
) -> Mask:
    length, spans = row
    cuts = cuts or (0, length)
    if rule.chunk:
        cuts = (*(at for a, b in pairwise(cuts) for at in range(a, b, rule.chunk)), cuts[-1])
    if not spans:
        return Mask(seqlen, seqlen, rule.causal, rule.window, cuts, cuts)
    left = rule.window[0]
    inner, outer = (left, -1) if beyond_windows else (-1, left)
    of_spans = masks.spans(seqlen, spans, left=inner)
    return of_spans & Mask(seqlen, seqlen, False, (outer, -1), cuts, cuts)


def check_batch_mask(
    batch_mask: BatchMask | None,
    cuts: tuple[int, ...] | None,
    documents: tuple[Tensor | None, Tensor | None],
    shape: tuple[int, int],
) -> None:
    """Refuses padding and images beside documents, or for a part of the sequence."""
    if cuts != checks.check_cu_seqlens("cu_seq_lens_k", documents[1]):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be the same documents")
    if batch_mask is None:
        return
    if (len(batch_mask.rows), batch_mask.seqlen) != shape:
        raise ValueError(
            f"attention_mask and token_type_ids must be those of the whole sequence, {shape}, got "
            f"{(len(batch_mask.rows), batch_mask.seqlen)}: give every rank all of them, as "
            "ring_attn.shard_batch does with attention_mask"
        )
    if cuts and any(length < batch_mask.seqlen for length, _ in batch_mask.rows):
        raise ValueError(
            "cu_seq_lens_q says where documents end: leave attention_mask out, as rows after the "
            "last boundary are padding"
        )
