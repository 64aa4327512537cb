"""Masks of Hugging Face models other than causality, windows and documents.

    padding at both ends of rows  attention_mask, (batch, seqlen)     a row sees only its tokens
    images                        token_type_ids, (batch, seqlen)     `masks.spans`
    chunked attention             attention_chunk_size of a config    documents of one chunk each

Both tensors cover the whole sequence, on every rank. The model passes them to the mask function,
which returns a `BatchMask` instead of a mask. The attention, which knows the layout, converts the
`BatchMask` to slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from types import FunctionType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ring_attn.checks import attention as checks
from ring_attn.core import masks
from ring_attn.core.mask import Mask
from ring_attn.integrations.transformers.untyped import Config, Keywords

# Functions of which transformers composes masks, and which causal, window_size, cu_seqlens and
# chunks express. transformers considers positions that jump, as in zigzag, a packed sequence; the
# attention checks positions itself.
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
# The label of tokens that do not count in the loss.
IGNORED = -100

UNION, BLOCKS, CHUNKS = "or_masks", "blockwise_overlay", "chunked_overlay"

# [first, end) of a run of keys.
KeyRange = tuple[int, int]

# A row of the batch: the positions [first, end) of its tokens, and its spans.
MaskRow = tuple[KeyRange, tuple[KeyRange, ...]]


@dataclass(frozen=True)
class BatchMask:
    """Spans and padding of a batch, read from the arguments of a mask function.

    Attributes:
        seqlen: length of the whole sequence.
        rows: for each row of the batch the positions [first, end) of its tokens, without padding at
            both ends, and the spans, such as images, whose tokens all see each other.
        beyond_windows: whether the tokens of a span see each other beyond a window, too.
    """

    seqlen: int
    rows: tuple[MaskRow, ...]
    beyond_windows: bool = False


class Rule(NamedTuple):
    """Causality and window of a layer, as in `ring_attention`, and the size of its chunks."""

    causal: bool
    window: tuple[int, int]
    chunk: int | None


# -- the arguments of a mask function


def read_mask(
    *_: object,
    mask_function: FunctionType | None = None,
    attention_mask: Tensor | None = None,
    q_length: int | None = None,
    config: Config = None,
    use_vmap: bool = False,
    **__: object,
) -> BatchMask | None:
    """Read padding and spans from the arguments of a mask function; refuse other masks.

    `mask_function` computes visibility from indices, and `use_vmap` marks it as a custom function.
    `attention_mask` is (batch, seqlen), False for padding. `q_length` is this rank's number of
    rows.
    """
    parts = [] if mask_function is None else list(_parts(mask_function))
    known = [*MASK_PATTERNS]  # a list, because torch 2.11 cannot trace a copied set
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        known.append(CHUNKS)
    union = _union_with_blocks(parts)
    if union is not None:
        known += [UNION, BLOCKS]
    unknown = sorted({name for name, _ in parts if name not in known})
    if unknown or (use_vmap and union is None):
        raise NotImplementedError(
            f"the mask of the model is made of {', '.join(unknown) or 'custom functions'}, which "
            "are not supported: attention over a sharded sequence has causal masks, sliding "
            "windows, chunks, documents (cu_seq_lens_q), images (token_type_ids) and padding at "
            "the end"
        )
    tokens = _token_ranges(attention_mask)
    blocks = None if union is None else union.blocks
    if blocks is None or not bool((blocks >= 0).any()):
        if attention_mask is None or tokens is None:
            return None
        return BatchMask(attention_mask.size(1), tuple((of_row, ()) for of_row in tokens))
    if attention_mask is not None and (tokens or attention_mask.size(1) != q_length):
        # A model pads block ids to the length of this mask, which hides whether they covered the
        # whole sequence.
        raise NotImplementedError(
            "attention_mask is not supported together with token_type_ids that mark images: leave "
            f"attention_mask out, and set labels of padding at the end to {IGNORED}, because no "
            "token before the padding sees it"
        )
    seqlen = blocks.size(1)
    rows = tuple(((0, seqlen), spans) for spans in _spans(blocks))
    return BatchMask(seqlen, rows, beyond_windows=union is not None and union.has_window)


class _Union(NamedTuple):
    """A causal mask, which may have a window, and blocks whose tokens all see each other."""

    blocks: Tensor  # (batch, seqlen) ids; negative outside of blocks
    has_window: bool


def _parts(mask_function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of which a mask is made, with names, each before its own parts.

    Under torch.compile, yield only the outermost function. That is enough to find unions, and
    chunks also follow from the types of the layers.
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


def _contents(function: FunctionType) -> list[object]:
    """Return the values in a function's closure."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _union_with_blocks(parts: list[tuple[str, FunctionType]]) -> _Union | None:
    """Return the only union among the parts, if it joins a causal mask and blocks."""
    unions = [function for name, function in parts if name == UNION]
    if len(unions) != 1:
        return None
    members = cast(tuple[FunctionType, ...], _contents(unions[0])[0])
    names = [[name for name, _ in _parts(member)] for member in members]
    if len(names) != 2:
        return None
    first, second = names
    if second != [BLOCKS] or "causal_mask_function" not in first or CHUNKS in first:
        return None
    if [name for name, _ in parts].count(BLOCKS) != 1:
        return None
    blocks = cast(Tensor, _contents(members[1])[0])
    return _Union(blocks, has_window="sliding_window_overlay" in first)


def real_tokens(attention_mask: Tensor) -> Tensor | None:
    """Return (batch, seqlen), False for padding at both ends of rows; None without padding."""
    real = attention_mask != 0
    if bool(real.all()):
        return None
    num_runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    if bool((num_runs > 1).any()):
        raise NotImplementedError(
            f"attention_mask hides {int((~real).sum())} of {real.numel()} tokens, some of them "
            "between tokens that it does not hide: padding must be at the beginning or at the end "
            "of a row"
        )
    return real


def token_ranges(real: Tensor) -> tuple[KeyRange, ...]:
    """Return the positions [first, end) of the tokens of each row, for `real_tokens`."""
    firsts = real.int().argmax(1)
    ends = firsts + real.sum(1)
    return tuple(zip(firsts.tolist(), ends.tolist(), strict=True))


def tokens_of_rows(mask: object) -> tuple[KeyRange, ...] | None:
    """Return the positions of the tokens of each row of a batch, from its mask; None if unknown.

    `mask` is the `attention_mask` of a model, or the `BatchMask` made of it.
    """
    if isinstance(mask, BatchMask):
        return tuple(tokens for tokens, _ in mask.rows)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = real_tokens(mask)
        return None if real is None else token_ranges(real)
    return None


def tokens_of(batch: Keywords) -> Tensor:
    """Return the ids or embeddings of a batch, (batch, rows, ...)."""
    for name in ("input_ids", "inputs_embeds"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor):
            return tokens
    raise ValueError(f"a batch needs input_ids or inputs_embeds, got {sorted(batch)}")


def _token_ranges(attention_mask: Tensor | None) -> tuple[KeyRange, ...] | None:
    """Return the positions of the tokens of each row; None without padding."""
    if attention_mask is None:
        return None
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "attention_mask cannot be read under torch.compile: leave it out, and if a causal "
            f"model has padding at the end, set the labels there to {IGNORED}"
        )
    real = real_tokens(attention_mask)
    return None if real is None else token_ranges(real)


def _spans(blocks: Tensor) -> Iterator[tuple[KeyRange, ...]]:
    """Yield the runs of each row that are blocks; refuse a block of several runs."""
    for ids in blocks.cpu():  # (seqlen,)
        changes = (torch.nonzero(ids.diff()).flatten() + 1).tolist()
        edges = [0, *changes, len(ids)]
        spans = [(start, end) for start, end in pairwise(edges) if start < end and ids[start] >= 0]
        distinct_ids = {int(ids[start]) for start, _ in spans}
        if len(distinct_ids) < len(spans):
            raise NotImplementedError(
                "the mask of the model has blocks of tokens that are not consecutive: only "
                "consecutive tokens, such as the tokens of an image, can see each other"
            )
        yield tuple(spans)


# -- chunks and query scales of a layer


def chunk_of(module: nn.Module) -> int | None:
    """Return the size of the chunks that limit a layer's attention; None without chunks."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or layer is None or types[layer] != "chunked_attention":
        return None
    return cast(Config, config).attention_chunk_size


def scales_by_row_index(module: nn.Module) -> bool:
    """Return whether a layer scales queries by row index, as Llama 4's layers without RoPE."""
    tuned = getattr(module, "attn_temperature_tuning", False)
    return (
        bool(tuned)
        and not getattr(module, "use_rope", True)
        and "position_ids" not in signature(type(module).forward).parameters
    )


def scaled_again(module: nn.Module, q: Tensor, row_indices: Tensor, positions: Tensor) -> Tensor:
    """Correct the scale of q (batch, rows, nheads, headdim) for the rows' true positions.

    The layer has scaled q by the functions of `row_indices`, (rows,), instead of `positions`.
    """
    layer = cast(Config, module)

    def scale_at(positions: Tensor) -> Tensor:
        """Compute Llama 4's scale of queries, (rows,)."""
        steps = torch.floor((positions.float() + 1) / layer.floor_scale)
        return torch.log1p(steps) * layer.attn_scale + 1

    correction = scale_at(positions) / scale_at(row_indices)
    return (q * correction.to(q.device)[:, None, None]).to(q.dtype)


# -- the mask of a row


@lru_cache(maxsize=256)
def mask_of(
    seqlen: int, row: MaskRow, rule: Rule, cuts: tuple[int, ...] | None, beyond_windows: bool
) -> Mask:
    """Return the mask of one row of a batch.

    The row has `seqlen` positions, and the boundaries `cuts` of documents.
    """
    (first, end), spans = row
    if first:
        # The tokens of a row with padding before them are a sequence of their own.
        without_padding = mask_of(seqlen - first, ((0, end - first), spans), rule, cuts, False)
        moved = [each.moved(first, first) for each in without_padding.slices]
        return Mask.of_disjoint(seqlen, seqlen, moved, f"{first} rows of padding, then tokens")
    cuts = cuts or (0, end)
    if rule.chunk:
        cuts = _chunk_starts(cuts, rule.chunk)
    if not spans:
        return Mask(
            seqlen,
            seqlen,
            causal=rule.causal,
            window_size=rule.window,
            cu_seqlens_q=cuts,
            cu_seqlens_k=cuts,
        )
    # With `beyond_windows` only the causal part has the window, otherwise the spans have it, too.
    left = rule.window[0]
    left_of_causal, left_of_all = (left, -1) if beyond_windows else (-1, left)
    causal_or_spans = masks.spans(seqlen, spans, left=left_of_causal)
    within_documents = Mask(
        seqlen,
        seqlen,
        causal=False,
        window_size=(left_of_all, -1),
        cu_seqlens_q=cuts,
        cu_seqlens_k=cuts,
    )
    return causal_or_spans & within_documents


def _chunk_starts(cuts: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """Return the boundaries of the chunks of each document."""
    starts = [start for first, end in pairwise(cuts) for start in range(first, end, chunk)]
    return (*starts, cuts[-1])


def check_batch_mask(
    batch_mask: BatchMask | None,
    cuts: tuple[int, ...] | None,
    documents: tuple[Tensor | None, Tensor | None],
    shape: tuple[int, int],
) -> None:
    """Refuse padding together with documents, and masks of a part of the sequence.

    `shape` is (batch, seqlen) of the whole sequence; `cuts` are the values of `documents[0]`.
    """
    cuts_k = checks.check_cu_seqlens("cu_seq_lens_k", documents[1])
    if cuts != cuts_k:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must be equal, got {cuts} and {cuts_k}: pass the "
            "same tensor as both"
        )
    if batch_mask is None:
        return
    got = (len(batch_mask.rows), batch_mask.seqlen)
    if got != shape:
        raise ValueError(
            "attention_mask and token_type_ids must have the shape of the whole sequence, "
            f"{shape}, got {got}: pass the whole tensors on every rank, as ring_attn.shard_batch "
            "does with attention_mask"
        )
    whole = (0, batch_mask.seqlen)
    if cuts and any(tokens != whole for tokens, _ in batch_mask.rows):
        raise ValueError(
            "attention_mask must not be given together with cu_seq_lens_q, which marks the ends of "
            "documents: leave attention_mask out, because rows after the last boundary are padding"
        )
