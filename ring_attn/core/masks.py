r"""Constructors of masks: each function makes the slices of one kind of mask.

    mask = ring_attn.masks.chunked(seqlen, 8192) & ring_attn.masks.documents(cu_seqlens)
    out = ring_attn.ring_attention(q, k, v, mask=mask, layout=layout)

`a & b` keeps the pairs that both masks have, and `by_document` concatenates masks. In the drawings
rows are queries, columns are keys, and `x` is a visible pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from ring_attn.core.dense import BlockMask, of_block_mask, of_blocks, of_dense, of_entry
from ring_attn.core.mask import Mask, Slice, check_number_of_slices
from ring_attn.values.checks import as_int, as_tuple, check_one_of, check_type

Lengths = Sequence[int] | Tensor


def causal(seqlen_q: int, seqlen_k: int | None = None) -> Mask:
    """Return the causal mask, bottom-right aligned as in flash-attention.

    Each query sees the key at its own position and the keys before it.

        x . . .
        x x . .
        x x x .
        x x x x

    Args:
        seqlen_q: number of queries.
        seqlen_k: number of keys; None means `seqlen_q`.

    Raises:
        ValueError: a negative length.
        TypeError: a number is not an int.

    Example:
        >>> causal(4).area
        10
    """
    return Mask(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, causal=True)


def window(seqlen_q: int, left: int, right: int = 0, seqlen_k: int | None = None) -> Mask:
    """Return the mask of a sliding window.

    Each query sees the key on the diagonal, `left` keys before it and `right` keys after it.

        x . . .       left 1, right 0
        x x . .
        . x x .
        . . x x

    Args:
        seqlen_q: number of queries.
        left: number of keys before the diagonal; -1 means all.
        right: number of keys after the diagonal; -1 means all.
        seqlen_k: number of keys; None means `seqlen_q`.

    Raises:
        ValueError: a negative length, or a side below -1.
        TypeError: a number is not an int.

    Example:
        >>> window(4, 1).area
        7
    """
    left = as_int("left", left, least=-1)
    right = as_int("right", right, least=-1)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return Mask(seqlen_q, seqlen_k, window_size=(left, right))


def documents(
    cu_seqlens: Lengths, cu_seqlens_k: Lengths | None = None, *, causal: bool = False
) -> Mask:
    """Return the mask of packed documents, each of which sees only itself.

        x x . . .       cu_seqlens 0, 2, 5
        x x . . .
        . . x x x
        . . x x x
        . . x x x

    Args:
        cu_seqlens: boundaries, from 0.
        cu_seqlens_k: boundaries of the keys; None means `cu_seqlens`.
        causal: whether each document is causal.

    Raises:
        ValueError: boundaries do not start at 0, or decrease; or queries and keys have different
            numbers of documents.
        TypeError: a boundary is not an int.

    Example:
        >>> documents([0, 2, 5]).area
        13
    """
    cu_q = _boundaries("cu_seqlens", cu_seqlens)
    cu_k = cu_q if cu_seqlens_k is None else _boundaries("cu_seqlens_k", cu_seqlens_k)
    return Mask(cu_q[-1], cu_k[-1], causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def chunked(seqlen: int, size: int) -> Mask:
    """Return the mask that is causal within chunks of positions, as in Llama 4.

        x . . . .       size 2
        x x . . .
        . . x . .
        . . x x .
        . . . . x

    Args:
        seqlen: number of queries, and of keys.
        size: number of positions of a chunk; the last chunk may have fewer.

    Raises:
        ValueError: there are more chunks than a mask can have slices (1,048,576).

    Example:
        >>> chunked(5, 2).area
        7
    """
    seqlen = as_int("seqlen", seqlen, least=0)
    size = as_int("size", size, least=1)
    check_number_of_slices(-(-seqlen // size))
    cuts = [*range(0, seqlen, size), seqlen]
    slices = [Slice(start, stop, start, stop, hi=0) for start, stop in pairwise(cuts)]
    return Mask.of_disjoint(seqlen, seqlen, slices, f"causal, chunks of {size}")


def prefix(prefix_lens: Lengths, cu_seqlens: Lengths) -> Mask:
    """Return the causal mask in which all queries of a document see its whole prefix (prefix-LM).

        x x . .       prefix_lens [2], cu_seqlens [0, 4]
        x x . .
        x x x .
        x x x x

    Args:
        prefix_lens: length of each document's prefix.
        cu_seqlens: boundaries of the documents, from 0.

    Raises:
        ValueError: a prefix is longer than its document, or the numbers of prefixes and documents
            differ.

    Example:
        >>> prefix([2], [0, 4]).area
        11
    """
    cuts = _boundaries("cu_seqlens", cu_seqlens)
    lens = _integers("prefix_lens", prefix_lens)
    if len(lens) != len(cuts) - 1:
        raise ValueError(
            f"prefix_lens must have {len(cuts) - 1} lengths, one for each document, got {len(lens)}"
        )
    slices = []
    for (start, stop), length in zip(pairwise(cuts), lens, strict=True):
        if not 0 <= length <= stop - start:
            raise ValueError(
                f"a prefix must be within its document of {stop - start} positions, got {length}"
            )
        middle = start + length
        slices.append(Slice(start, stop, start, middle))
        slices.append(Slice(middle, stop, middle, stop, hi=0))
    return Mask.of_disjoint(cuts[-1], cuts[-1], slices, f"{len(lens)} documents with a prefix")


def spans(seqlen: int, spans: Iterable[Sequence[int]], *, left: int = -1) -> Mask:
    """Return the causal mask in which each span of positions sees all of itself.

    For example, a span is the tokens of an image.

        x . . . .       spans [(1, 3)]
        x x x . .
        x x x . .
        x x x x .
        x x x x x

    Args:
        seqlen: number of queries, and of keys.
        spans: `(start, stop)` of each span, without overlaps.
        left: number of positions before a query that it sees outside its span; -1 means all.

    Raises:
        ValueError: spans overlap, or are not within the sequence.

    Example:
        >>> spans(5, [(1, 3)]).area
        16
    """
    seqlen = as_int("seqlen", seqlen, least=0)
    left = as_int("left", left, least=-1)
    lo = None if left < 0 else -left
    slices = []
    end = 0  # of the span before
    pairs = sorted(_integers("each of spans", span) for span in as_tuple("spans", spans))
    for span in pairs:
        if len(span) != 2 or not end <= span[0] <= span[1] <= seqlen:
            raise ValueError(
                f"spans must be pairs (start, stop) within 0 and {seqlen} that do not overlap, got "
                f"{span} after a span that ends at {end}"
            )
        start, stop = span
        slices.append(Slice(end, start, 0, start, lo, 0))
        if lo is None:
            slices.append(Slice(start, stop, 0, stop))
        else:
            slices.append(Slice(start, stop, 0, start, lo))
            slices.append(Slice(start, stop, start, stop))
        end = stop
    slices.append(Slice(end, seqlen, 0, seqlen, lo, 0))
    return Mask.of_disjoint(seqlen, seqlen, slices, f"causal, {len(pairs)} spans seen whole")


def shared_prefix(prefix: int, lengths: Lengths) -> Mask:
    """Return the mask of a prompt and several answers.

    Each answer sees the prompt and itself, causally.

        x . . . . .       prefix 2, lengths 2, 2
        x x . . . .
        x x x . . .
        x x x x . .
        x x . . x .
        x x . . x x

    Args:
        prefix: number of positions of the prompt, which comes first.
        lengths: number of positions of each answer.

    Raises:
        ValueError: a negative length.
        TypeError: a number is not an int.

    Example:
        >>> shared_prefix(2, [2, 2]).area
        17
    """
    prefix = as_int("prefix", prefix, least=0)
    lens = [as_int("each of lengths", n, least=0) for n in _integers("lengths", lengths)]
    cuts = [prefix, *(prefix + end for end in accumulate(lens))]
    seqlen = cuts[-1]
    slices = [Slice(0, prefix, 0, prefix, hi=0), Slice(prefix, seqlen, 0, prefix)]
    slices += [Slice(start, stop, start, stop, hi=0) for start, stop in pairwise(cuts)]
    return Mask.of_disjoint(seqlen, seqlen, slices, f"causal, {len(lens)} answers to one prompt")


def sink_window(seqlen: int, sinks: int, left: int) -> Mask:
    """Return the mask of a causal window and the first positions (StreamingLLM, arXiv 2309.17453).

        x . . . . .       sinks 2, left 1
        x x . . . .
        x x x . . .
        x x x x . .
        x x . x x .
        x x . . x x

    Args:
        seqlen: number of queries, and of keys.
        sinks: number of first positions that all later queries see.
        left: number of keys of the window before the diagonal.

    Raises:
        ValueError: a negative number.
        TypeError: a number is not an int.

    Example:
        >>> sink_window(6, 2, 1).area
        18
    """
    seqlen = as_int("seqlen", seqlen, least=0)
    sinks = as_int("sinks", sinks, least=0)
    left = as_int("left", left, least=0)
    first = min(sinks, seqlen)
    slices = [
        Slice(0, seqlen, 0, first, hi=0),
        Slice(0, seqlen, first, seqlen, lo=-left, hi=0),
    ]
    return Mask.of_disjoint(seqlen, seqlen, slices, f"causal, window {left} and the first {sinks}")


def blocks(
    mask: Tensor | BlockMask,
    block_size: int | tuple[int, int] = 128,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
) -> Mask:
    """Return the mask of whole blocks of queries and keys: block-sparse attention.

        x x . . . .       block_size 2, mask 1 0 0
        x x . . . .                          1 1 0
        x x x x . .                          0 0 1
        x x x x . .
        . . . . x x
        . . . . x x

    Args:
        mask: (blocks of queries, blocks of keys) booleans; or a `BlockMask` of
            `torch.nn.attention.flex_attention` for one batch entry and head. Its `mask_mod` is
            evaluated in partly visible blocks.
        block_size: rows of a block, or (queries, keys) of a block; ignored for a `BlockMask`.
        seqlen_q: number of queries, which must end in the last block; None means that all blocks
            are full.
        seqlen_k: number of keys, with the same rule.

    Raises:
        ValueError: the shape or the lengths do not fit.
        TypeError: `mask` is neither a tensor nor a `BlockMask`.
        NotImplementedError: the `BlockMask` has several heads or batch entries; see
            `each_of_blocks`.

    Example:
        >>> blocks(torch.tensor([[1, 0], [1, 1]]).bool(), 2).area
        12
    """
    if hasattr(mask, "kv_num_blocks"):
        return of_block_mask(mask)
    check_type("mask", mask, Tensor, "a torch.Tensor or a BlockMask")
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            "mask must be booleans of shape (blocks of queries, blocks of keys), got shape "
            f"{tuple(mask.shape)} and dtype {mask.dtype}"
        )
    pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be a number or (queries, keys), got {pair}")
    rows, cols = (as_int("block_size", size, least=1) for size in pair)
    num_queries = _length_of_blocks("seqlen_q", seqlen_q, count=mask.size(0), size=rows)
    num_keys = _length_of_blocks("seqlen_k", seqlen_k, count=mask.size(1), size=cols)
    slices = list(of_blocks(mask, (rows, cols), (num_queries, num_keys)))
    words = f"{int(mask.sum())} blocks of {rows} x {cols}"
    return Mask.of_disjoint(num_queries, num_keys, slices, words)


def each_of_blocks(mask: BlockMask) -> list[list[Mask]]:
    """Return the masks of a `BlockMask` that differ by batch entry or head, for `ring_attention`.

    Args:
        mask: a `BlockMask` of `torch.nn.attention.flex_attention`, for any number of batch entries
            and heads. Its `mask_mod` is evaluated in partly visible blocks.

    Returns:
        For each batch entry of the `BlockMask`, the mask of each of its heads.

    Raises:
        TypeError: `mask` is not a `BlockMask`.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> of_batch = lambda b, h, i, j: (j <= i) & (j < 4 - b)  # noqa: E731
        >>> block_mask = create_block_mask(of_batch, 2, None, 4, 4, device="cpu")
        >>> [[mask.area for mask in heads] for heads in each_of_blocks(block_mask)]
        [[10], [9]]
    """
    if not hasattr(mask, "kv_num_blocks"):
        raise TypeError(f"mask must be a BlockMask, got {type(mask).__name__}")
    batch, heads = mask.kv_num_blocks.shape[:2]
    return [[of_entry(mask, entry, head) for head in range(heads)] for entry in range(batch)]


def _length_of_blocks(name: str, length: int | None, *, count: int, size: int) -> int:
    """Return the length that `count` blocks cover; `length` None means that all blocks are full."""
    covered = count * size if length is None else as_int(name, length, least=0)
    if not (count - 1) * size < covered <= count * size:
        raise ValueError(f"{name} must end in the last of {count} blocks of {size}, got {length}")
    return covered


def from_dense(seen: Tensor) -> Mask:
    """Return the mask that is given as booleans.

    Only for short sequences, because an irregular mask takes many slices.

    Args:
        seen: (seqlen_q, seqlen_k) booleans, True where a query sees a key.

    Raises:
        ValueError: the tensor is not 2-dimensional, or not boolean.

    Example:
        >>> from_dense(torch.ones(4, 4).tril().bool()) == causal(4)
        True
    """
    check_type("seen", seen, Tensor, "a torch.Tensor")
    if seen.ndim != 2 or seen.dtype != torch.bool:
        raise ValueError(
            f"seen must be booleans of shape (seqlen_q, seqlen_k), got shape {tuple(seen.shape)} "
            f"and dtype {seen.dtype}"
        )
    return Mask.of_disjoint(seen.size(0), seen.size(1), of_dense(seen))


def from_slices(seqlen_q: int, seqlen_k: int, slices: Iterable[Sequence[int | None]]) -> Mask:
    """Return the mask of slices that are given by their numbers.

    Args:
        seqlen_q: number of queries.
        seqlen_k: number of keys.
        slices: (q_start, q_end, k_start, k_end) of each slice, or these numbers and the bounds
            (lo, hi) on `j - i`. Slices may share queries and keys, but not a pair.

    Raises:
        ValueError: a slice is beyond the lengths, or two slices share a pair.

    Example:
        >>> from_slices(4, 4, [(0, 4, 0, 2), (2, 4, 2, 4, None, 0)]).dense().int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    pieces = []
    for fields in as_tuple("slices", slices):
        values = as_tuple("each of slices", fields)
        if not 4 <= len(values) <= 6:
            raise ValueError(f"a slice must be 4 positions and up to 2 bounds, got {values}")
        pieces.append(Slice(*values))
    return Mask.of(seqlen_q, seqlen_k, pieces)


def neighborhood(shape: Sequence[int], reach: Sequence[int]) -> Mask:
    """Return the mask in which each position of a video, or an image, sees its neighbourhood.

    A position (t, h, w) sees (t', h', w') if the coordinates differ by at most `reach`. Positions
    are in the order of `torch.cartesian_prod`, the last coordinate first.

        x x . x x .       shape (2, 3), reach (1, 1)
        x x x x x x
        . x x . x x
        x x . x x .
        x x x x x x
        . x x . x x

    Args:
        shape: sizes of the axes, such as (frames, height, width).
        reach: for each axis the greatest difference; -1 is unbounded.

    Raises:
        ValueError: a size is negative, `reach` has another number of axes or a number below -1, or
            the mask has more than 1,048,576 slices.
        TypeError: a number is not an int.

    Example:
        >>> neighborhood((2, 3), (1, 1)).area
        28
    """
    sizes = _integers("shape", shape)
    reaches = _integers("reach", reach)
    if len(reaches) != len(sizes) or not sizes:
        raise ValueError(
            f"reach must have a number for each of the {len(sizes)} axes of shape={sizes}, at "
            f"least one, got {reaches}"
        )
    if min(sizes) < 0 or min(reaches) < -1:
        raise ValueError(
            f"sizes must not be negative and reach must be at least -1, got {sizes} and {reaches}"
        )
    seqlen = math.prod(sizes)
    return Mask.of_disjoint(
        seqlen, seqlen, _near(sizes, reaches), f"neighbourhoods of {reaches} in {sizes}"
    )


def _near(sizes: tuple[int, ...], reaches: tuple[int, ...]) -> Iterator[Slice]:
    """Yield the slices of the neighbourhoods of the positions of some axes."""
    size, *inner_sizes = sizes
    reach = size if reaches[0] == -1 else reaches[0]
    inner = math.prod(inner_sizes)
    if size == 0 or inner == 0:
        return
    if all(r == -1 or r >= n - 1 for n, r in zip(inner_sizes, reaches[1:], strict=True)):
        # All inner positions are seen: one slice for each position of this axis, or one band.
        if inner == 1:
            yield Slice(0, size, 0, size, -reach, reach)
            return
        for at in range(size):
            first, stop = max(0, at - reach), min(size, at + reach + 1)
            yield Slice(at * inner, (at + 1) * inner, first * inner, stop * inner)
        return
    within = list(_near(tuple(inner_sizes), reaches[1:]))
    for at in range(size):
        for other in range(max(0, at - reach), min(size, at + reach + 1)):
            for piece in within:
                yield piece.moved(q=at * inner, k=other * inner)


def with_text(video: Mask, text: int, where: Literal["first", "last"] = "first") -> Mask:
    """Return the mask of text and a video, in which text sees and is seen by everything.

        x x x x       1 position of text, first, and a causal mask of 3
        x x . .
        x x x .
        x x x x

    Args:
        video: the mask of the video by itself.
        text: number of positions of text.
        where: whether the text is "first" or "last" in the sequence.

    Raises:
        ValueError: a negative number, another word, or a video with different numbers of queries
            and keys.
        TypeError: an argument has another type.

    Example:
        >>> with_text(causal(3), 1).area
        13
    """
    check_type("video", video, Mask)
    text = as_int("text", text, least=0)
    check_one_of("where", where, ("first", "last"))
    if video.seqlen_q != video.seqlen_k:
        raise ValueError(
            f"video must have as many queries as keys, got {video.seqlen_q} and {video.seqlen_k}"
        )
    seqlen = video.seqlen_q + text
    start = text if where == "first" else 0  # of the video
    stop = start + video.seqlen_q
    text_start, text_stop = (0, text) if where == "first" else (stop, seqlen)
    slices = [s.moved(start, start) for s in video.slices]
    if text:
        slices.append(Slice(text_start, text_stop, 0, seqlen))
        if start < stop:
            slices.append(Slice(start, stop, text_start, text_stop))
    return Mask.of_disjoint(seqlen, seqlen, slices, f"{video.words}, and {text} of text")


def by_document(masks: Sequence[Mask]) -> Mask:
    """Concatenate the masks of documents, each over its own positions.

        x . . .       two causal masks of 2
        x x . .
        . . x .
        . . x x

    Raises:
        TypeError: an element is not a mask.

    Example:
        >>> by_document([causal(2), window(3, 0)]).area
        6
    """
    q, k = 0, 0  # first position of the document
    slices: list[Slice] = []
    for mask in as_tuple("masks", masks):
        check_type("each of masks", mask, Mask)
        slices += [s.moved(q, k) for s in mask.slices]
        q += mask.seqlen_q
        k += mask.seqlen_k
    return Mask.of_disjoint(q, k, slices, f"{len(masks)} documents with their own masks")


# -- checks


def _integers(name: str, values: Lengths) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        values = values.tolist()
    return tuple(as_int(name, value) for value in as_tuple(name, values))


def _boundaries(name: str, values: Lengths) -> tuple[int, ...]:
    cuts = _integers(name, values)
    if not cuts or cuts[0] != 0 or any(stop < start for start, stop in pairwise(cuts)):
        raise ValueError(f"{name} must start at 0 and not decrease, got {cuts}")
    return cuts
