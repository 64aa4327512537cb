r"""Masks: which queries see which keys, as a few slices, rectangles of positions cut by a band.

    slice    = queries [q_start, q_end), keys [k_start, k_end), and lo <= j - i <= hi
    query i sees key j  iff  one slice contains the pair

Slices may share queries and keys, but not a pair. flash-attention's arguments map to slices: each
document is a slice, and causality and windows are bounds on `j - i` (bottom-right aligned).

    seqlen_q = 2, seqlen_k = 5, causal        window_size = (1, 0), 4 x 4

        k 0 1 2 3 4                               k 0 1 2 3
      q 0 x x x x .                             q 0 x . . .
      q 1 x x x x x                             q 1 x x . .
                                                q 2 . x x .
                                                q 3 . . x x

`core.masks` has constructors for all other masks. In a slice each query sees one run of keys.
Slices that share queries are put into different *layers*, so that each query sees one run of keys
in each layer:

        k 0 1 2 3 4 5
      q 0 x . . . . .      layer 0: the first two keys, causal      layer 1: a window of one key
      q 1 x x . . . .               q [0, 6) k [0, 2) hi 0                   q [2, 6) k [2, 6) -1..0
      q 2 x x x . . .
      q 3 x x x x . .
      q 4 x x . x x .
      q 5 x x . . x x
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ring_attn.core.segments import pairs_up_to
from ring_attn.values.checks import as_int, as_ints, check_flag, check_type

# Represents an unbounded side of a band; small enough not to overflow when added to positions.
UNBOUNDED = 1 << 50

# The largest number of slices of a mask. Each takes about 400 bytes, and a plan visits all of them.
MAX_SLICES = 1 << 20


class Slice(NamedTuple):
    """Queries `[q_start, q_end)`, keys `[k_start, k_end)`, and the band `lo <= j - i <= hi`.

    Positions are global (local rows in `tiles.Tile`). A bound of None is unbounded.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int | None = None
    hi: int | None = None

    @property
    def trimmed(self) -> Self | None:
        """The slice without empty rows and columns; None if no pair is left.

        A bound that hides no pair becomes None.
        """
        q0, q1, k0, k1, lo, hi = self
        if q0 >= q1 or k0 >= k1 or (lo is not None and hi is not None and lo > hi):
            return None
        if hi is not None:
            q0 = max(q0, k0 - hi)
        if lo is not None:
            q1 = min(q1, k1 - lo)
        if hi is not None:
            k1 = min(k1, q1 + hi)
        if lo is not None:
            k0 = max(k0, q0 + lo)
        if q0 >= q1 or k0 >= k1:
            return None
        if lo is not None and lo <= k0 - (q1 - 1):
            lo = None
        if hi is not None and hi >= (k1 - 1) - q0:
            hi = None
        return type(self)(q0, q1, k0, k1, lo, hi)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields, with `UNBOUNDED` instead of None."""
        lo = -UNBOUNDED if self.lo is None else self.lo
        hi = UNBOUNDED if self.hi is None else self.hi
        return (*self[:4], lo, hi)

    @property
    def transposed(self) -> Slice:
        """The slice with queries and keys exchanged."""
        return Slice(
            q_start=self.k_start,
            q_end=self.k_end,
            k_start=self.q_start,
            k_end=self.q_end,
            lo=None if self.hi is None else -self.hi,
            hi=None if self.lo is None else -self.lo,
        )

    def moved(self, q: int, k: int) -> Self:
        """Return the slice moved by `q` queries and `k` keys."""
        shift = k - q
        return type(self)(
            q_start=self.q_start + q,
            q_end=self.q_end + q,
            k_start=self.k_start + k,
            k_end=self.k_end + k,
            lo=None if self.lo is None else self.lo + shift,
            hi=None if self.hi is None else self.hi + shift,
        )

    def __and__(self, other: Slice) -> Self | None:
        """Return the pairs of both slices; None if there are none."""
        lows = [bound for bound in (self.lo, other.lo) if bound is not None]
        highs = [bound for bound in (self.hi, other.hi) if bound is not None]
        return type(self)(
            q_start=max(self.q_start, other.q_start),
            q_end=min(self.q_end, other.q_end),
            k_start=max(self.k_start, other.k_start),
            k_end=min(self.k_end, other.k_end),
            lo=max(lows, default=None),
            hi=min(highs, default=None),
        ).trimmed

    def __str__(self) -> str:
        band = "" if self.lo is self.hi is None else f", {self.lo} <= j - i <= {self.hi}"
        return f"(q {self.q_start}:{self.q_end}, k {self.k_start}:{self.k_end}{band})"


class FlashArguments(NamedTuple):
    """flash-attention's arguments of a mask; the boundaries of a single document are None."""

    causal: bool
    window_size: tuple[int, int]
    cu_seqlens_q: tuple[int, ...] | None
    cu_seqlens_k: tuple[int, ...] | None


Layer = tuple[Slice, ...]


@dataclass(frozen=True, init=False, repr=False)
class Mask:
    """The mask of a whole sequence, a hashable value.

    `a & b` keeps the pairs that both masks have. `core.masks` has more constructors. Plans are
    cached by mask, which is why it is hashable.

    Attributes:
        seqlen_q: global number of queries.
        seqlen_k: global number of keys.
        slices: in the order of their queries; every slice has at least one pair.
        words: a short description for messages.
        arguments: the arguments of flash-attention from which the mask was made, or None.

    Example:
        >>> Mask(4, 4, causal=True, window_size=(1, -1)).dense().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    seqlen_q: int
    seqlen_k: int
    slices: tuple[Slice, ...]
    words: str = field(compare=False)
    arguments: FlashArguments | None = field(compare=False)

    def __init__(
        self,
        seqlen_q: int,
        seqlen_k: int,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        cu_seqlens_q: tuple[int, ...] | None = None,
        cu_seqlens_k: tuple[int, ...] | None = None,
    ) -> None:
        """Make the mask from flash-attention's arguments.

        Args:
            seqlen_q: global number of queries.
            seqlen_k: global number of keys.
            causal: whether keys after the diagonal (bottom-right aligned) are hidden.
            window_size: `(left, right)` keys on either side of the diagonal; -1 is unbounded.
            cu_seqlens_q: document boundaries of the queries, from 0. Queries after the last
                boundary are padding and see no key. None means a single document.
            cu_seqlens_k: document boundaries of the keys, for the same number of documents.

        Raises:
            ValueError: a length is negative, boundaries decrease or end after the length, queries
                and keys have different numbers of documents, or there are more than MAX_SLICES
                documents.
            TypeError: a number is not an int.
        """
        seqlen_q, seqlen_k = checked_lengths(seqlen_q, seqlen_k)
        check_flag("causal", causal)
        window = as_ints("window_size", window_size)
        if len(window) != 2 or min(window) < -1:
            raise ValueError(f"window_size must be (left, right), each at least -1, got {window}")
        left, right = window
        cu_q = _checked_boundaries("cu_seqlens", cu_seqlens_q, seqlen_q) or (0, seqlen_q)
        cu_k = _checked_boundaries("cu_seqlens_k", cu_seqlens_k, seqlen_k) or (0, seqlen_k)
        check_number_of_slices(len(cu_q) - 1)
        if len(cu_q) != len(cu_k):
            raise ValueError(
                "queries and keys must have the same number of documents, got "
                f"{len(cu_q) - 1} and {len(cu_k) - 1}"
            )
        most_after = 0 if causal else right
        slices = []
        for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
            diagonal = k_end - q_end
            lo = None if left < 0 else diagonal - left
            hi = None if most_after < 0 else diagonal + most_after
            slices.append(Slice(q_start, q_end, k_start, k_end, lo, hi))
        arguments = FlashArguments(
            causal=causal,
            window_size=(left, right),
            cu_seqlens_q=cu_q if cu_seqlens_q else None,
            cu_seqlens_k=cu_k if cu_seqlens_k else None,
        )
        self._set(seqlen_q, seqlen_k, slices, _words(arguments, seqlen_q), arguments)

    @classmethod
    def of(
        cls, seqlen_q: int, seqlen_k: int, slices: Iterable[Slice], words: str | None = None
    ) -> Mask:
        """Return the mask of slices, which may share queries and keys, but not a pair.

        Raises:
            ValueError: a slice is beyond the lengths, two slices share a pair, or there are more
                than MAX_SLICES slices.
            TypeError: a number is not an int.

        Example:
            >>> Mask.of(4, 4, [Slice(0, 4, 0, 2), Slice(2, 4, 2, 4, None, 0)]).area
            11
        """
        seqlen_q, seqlen_k = checked_lengths(seqlen_q, seqlen_k)
        checked = (_checked_slice(s, seqlen_q, seqlen_k) for s in slices)
        mask = cls.of_disjoint(seqlen_q, seqlen_k, checked, words)
        _check_disjoint(mask.slices)
        return mask

    @classmethod
    def of_disjoint(
        cls, seqlen_q: int, seqlen_k: int, slices: Iterable[Slice], words: str | None = None
    ) -> Mask:
        """Return the mask of slices that share no pair, without checking that they do not."""
        mask = cls.__new__(cls)
        slices = list(islice(slices, MAX_SLICES + 1))
        check_number_of_slices(len(slices))
        mask._set(seqlen_q, seqlen_k, slices, words or f"{len(slices)} slices", None)
        # Made eagerly, so that torch.compile treats the tensor as an input, and one graph serves
        # all of these masks.
        vars(mask)["_tensor"] = mask._as_tensor()
        return mask

    def _set(
        self,
        seqlen_q: int,
        seqlen_k: int,
        slices: Sequence[Slice],
        words: str,
        arguments: FlashArguments | None,
    ) -> None:
        trimmed = (piece.trimmed for piece in slices)
        with_pairs = (piece for piece in trimmed if piece is not None)
        ordered = sorted(with_pairs, key=lambda piece: piece[:4])  # bounds may be None
        vars(self).update(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            slices=tuple(ordered),
            words=words,
            arguments=arguments,
            _tensor=None,
        )

    def __repr__(self) -> str:
        return f"Mask({self.seqlen_q}, {self.seqlen_k}, {self.words})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.seqlen_q, self.seqlen_k, self.slices))

    def __hash__(self) -> int:
        # Cached, because each look-up of a plan would otherwise hash thousands of slices.
        return self._hash

    def __and__(self, other: Mask) -> Mask:
        """Return the pairs that both masks have.

        Raises:
            ValueError: the lengths of the masks differ, or there are more than MAX_SLICES slices.
            TypeError: the other value is not a mask.
        """
        check_type("the other side of &", other, Mask)
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            raise ValueError(f"masks must have the same lengths, got {self!r} and {other!r}")
        both = (a & b for a in self.slices for b in other.overlapping(a.q_start, a.q_end))
        slices = (pairs for pairs in both if pairs is not None)
        words = f"{self.words} and {other.words}"
        return Mask.of_disjoint(self.seqlen_q, self.seqlen_k, slices, words)

    def rows(self, start: int, stop: int) -> Mask:
        """Return the mask of only the queries `[start, stop)`, renumbered from 0, and of all keys.

        Raises:
            ValueError: the mask does not have these queries.

        Example:
            >>> Mask(4, 4, causal=True).rows(2, 4).dense().int().tolist()
            [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        if not 0 <= start <= stop <= self.seqlen_q:
            raise ValueError(
                f"rows must be within the mask's {self.seqlen_q} queries, got [{start}, {stop})"
            )
        kept = Slice(start, stop, 0, self.seqlen_k)
        slices = [s & kept for s in self.overlapping(start, stop)]
        return Mask.of_disjoint(
            stop - start,
            self.seqlen_k,
            (s.moved(-start, 0) for s in slices if s is not None),
            f"{self.words}, queries {start}:{stop}",
        )

    # -- properties

    @property
    def is_causal(self) -> bool:
        """Whether this is exactly the causal mask (bottom-right aligned) of its lengths."""
        return self == Mask(self.seqlen_q, self.seqlen_k, causal=True)

    @property
    def has_windows(self) -> bool:
        """Whether a slice hides keys that are too far before a query."""
        return any(s.lo is not None for s in self.slices)

    @property
    def has_upper_bounds(self) -> bool:
        """Whether a slice hides keys that are too far after a query."""
        return any(s.hi is not None for s in self.slices)

    @cached_property
    def transposed(self) -> Mask:
        """The mask with queries and keys exchanged."""
        return Mask.of_disjoint(self.seqlen_k, self.seqlen_q, (s.transposed for s in self.slices))

    # -- layers

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The slices in as few layers as possible, sorted; the slices of a layer share no query."""
        layers: list[list[Slice]] = []
        for piece in self.slices:
            for layer in layers:
                if layer[-1].q_end <= piece.q_start:
                    layer.append(piece)
                    break
            else:
                layers.append([piece])
        return tuple(map(tuple, layers))

    def overlapping(self, start: int, stop: int) -> Iterator[Slice]:
        """Yield the slices that have a query in `[start, stop)`, layer by layer."""
        for layer, ends in zip(self.layers, self._q_ends, strict=True):
            for piece in layer[bisect_right(ends, start) :]:
                if piece.q_start >= stop:
                    break
                yield piece

    @cached_property
    def _q_ends(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s.q_end for s in layer) for layer in self.layers)

    def visible_runs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the run of keys that each query sees in each layer.

        Args:
            positions: (n,) int64 global query positions.

        Returns:
            `(start, stop)`, (layers, n) int64 each; `start == stop` where a query sees nothing.

        Example:
            >>> starts, stops = Mask(4, 4, causal=True).visible_runs(torch.tensor([0, 3]))
            >>> starts.tolist(), stops.tolist()
            ([[0, 0]], [[1, 4]])
        """
        shape = (2, len(self.layers), len(positions))
        starts, stops = torch.zeros(shape, dtype=torch.int64, device="cpu")
        for row, table in enumerate(self.tables):
            # The first slice that ends after the query, or the last slice.
            index = torch.searchsorted(table[1], positions, right=True).clamp(max=table.size(1) - 1)
            q_start, q_end, k_start, k_end, lo, hi = table[:, index]
            start = torch.maximum(k_start, positions + lo)
            stop = torch.minimum(k_end, positions + hi + 1)
            visible = (q_start <= positions) & (positions < q_end) & (start < stop)
            starts[row] = start.where(visible, 0)
            stops[row] = stop.where(visible, 0)
        return starts, stops

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """The `Slice.numbers` of each layer's slices, (6, n) int64."""
        return tuple(
            torch.tensor([s.numbers for s in layer], device="cpu").t().contiguous()
            for layer in self.layers
        )

    def dense(self, q_positions: Tensor | None = None, k_positions: Tensor | None = None) -> Tensor:
        """Return the mask as booleans, True where a query sees a key.

        This is the reference for all other code.

        Args:
            q_positions: (n_q,) global positions of queries; None means all queries.
            k_positions: (n_k,) global positions of keys; None means all keys.

        Returns:
            (n_q, n_k) booleans on the CPU.
        """
        if q_positions is None:
            q_positions = torch.arange(self.seqlen_q, device="cpu")
        if k_positions is None:
            k_positions = torch.arange(self.seqlen_k, device="cpu")
        shape = len(q_positions), len(k_positions)
        seen = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for start, stop in zip(*self.visible_runs(q_positions), strict=True):
            seen |= (k_positions >= start[:, None]) & (k_positions < stop[:, None])
        return seen

    @cached_property
    def area(self) -> int:
        """The number of visible pairs."""
        total = 0
        for q_start, q_end, k_start, k_end, lo, hi in self.tables:  # no pair is in two slices
            rows = q_end - q_start
            cols = k_end - k_start
            # Bounds on `j - i`, counted from the first row and column of each slice.
            shift = q_start - k_start
            upper = torch.minimum(hi + shift, cols - 1)
            beyond = torch.maximum(lo + shift, 1 - rows) - 1
            pairs = pairs_up_to(rows, cols, upper) - pairs_up_to(rows, cols, beyond)
            total += int(pairs.sum())
        return total

    # -- through operators

    @property
    def tensor(self) -> Tensor:
        """The mask as an input of operators, (1 + slices, 6) int64: lengths, then slices."""
        tensor: Tensor | None = vars(self)["_tensor"]
        if tensor is None:
            tensor = self._as_tensor()
            if not torch.compiler.is_compiling():
                vars(self)["_tensor"] = tensor
        return tensor

    def _as_tensor(self) -> Tensor:
        lengths = (self.seqlen_q, self.seqlen_k, 0, 0, 0, 0)
        return torch.tensor([lengths, *(s.numbers for s in self.slices)], device="cpu")

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Mask:
        """Return the mask of `tensor`, which is a mask's `tensor`."""
        (seqlen_q, seqlen_k, *_), *rows = tensor.tolist()
        slices = []
        for q_start, q_end, k_start, k_end, low, high in rows:
            lo = None if low <= -UNBOUNDED else low
            hi = None if high >= UNBOUNDED else high
            slices.append(Slice(q_start, q_end, k_start, k_end, lo, hi))
        return cls.of_disjoint(seqlen_q, seqlen_k, slices)


# -- checks


def check_number_of_slices(number: int) -> None:
    """Refuse a number of slices that would take too much memory."""
    if number > MAX_SLICES:
        raise ValueError(
            f"a mask must have at most {MAX_SLICES:,} slices, got {number:,}: use longer "
            "documents, chunks or blocks, or a separate mask for each batch"
        )


def checked_lengths(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Return both lengths as ints; refuse other types and negative lengths."""
    return as_int("seqlen_q", seqlen_q, least=0), as_int("seqlen_k", seqlen_k, least=0)


def _checked_boundaries(
    name: str, boundaries: Sequence[int] | None, seqlen: int
) -> tuple[int, ...] | None:
    if boundaries is None:
        return None
    cuts = as_ints(name, boundaries)
    if len(cuts) < 2 or cuts[0] != 0 or any(b < a for a, b in pairwise(cuts)):
        raise ValueError(f"{name} must be boundaries from 0 that do not decrease, got {cuts}")
    if cuts[-1] > seqlen:
        raise ValueError(f"{name} must end at most at the global length {seqlen}, got {cuts[-1]}")
    return cuts


def _checked_slice(given: Slice, seqlen_q: int, seqlen_k: int) -> Slice:
    check_type("each of slices", given, Slice)
    piece = Slice(
        q_start=as_int("each of a slice", given.q_start),
        q_end=as_int("each of a slice", given.q_end),
        k_start=as_int("each of a slice", given.k_start),
        k_end=as_int("each of a slice", given.k_end),
        lo=None if given.lo is None else as_int("each of a band", given.lo),
        hi=None if given.hi is None else as_int("each of a band", given.hi),
    )
    queries_fit = 0 <= piece.q_start <= piece.q_end <= seqlen_q
    keys_fit = 0 <= piece.k_start <= piece.k_end <= seqlen_k
    if not (queries_fit and keys_fit):
        raise ValueError(f"slices must be within {seqlen_q} x {seqlen_k} positions, got {piece}")
    return piece


def _check_disjoint(slices: Iterable[Slice]) -> None:
    """Refuse slices of which two share a pair; the slices are in the order of their queries."""
    open_slices: list[Slice] = []
    for piece in slices:
        open_slices = [other for other in open_slices if other.q_end > piece.q_start]
        for other in open_slices:
            both = other & piece
            if both is not None:
                query = both.q_start
                key = both.k_start if both.lo is None else max(both.k_start, query + both.lo)
                raise ValueError(
                    f"slices must not share a pair, got {other} and {piece}, which both have query "
                    f"{query} with key {key}"
                )
        open_slices.append(piece)


def _words(arguments: FlashArguments, seqlen_q: int) -> str:
    words = ["causal" if arguments.causal else "full"]
    if arguments.window_size != (-1, -1):
        left, right = arguments.window_size
        words.append(f"window {left},{right}")
    if arguments.cu_seqlens_q is not None:
        documents = len(arguments.cu_seqlens_q) - 1
        padding = seqlen_q - arguments.cu_seqlens_q[-1]
        if documents > 1:
            words.append(f"{documents} documents")
        if padding > 0:
            words.append(f"{padding} rows of padding")
    return ", ".join(words)
