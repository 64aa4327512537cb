r"""Masks, which queries see which keys: a few slices, rectangles of positions cut by a band.

    slice    = queries [q_start, q_end), keys [k_start, k_end), and lo <= j - i <= hi
    query i sees key j  iff  one slice holds the pair

Slices may share queries and keys, but no pair. flash-attention's arguments map to slices: each
document is a slice, and causality and windows are bounds on `j - i` (bottom-right aligned).

    seqlen_q = 2, seqlen_k = 5, causal        window_size = (1, 0), 4 x 4

        k 0 1 2 3 4                               k 0 1 2 3
      q 0 x x x x .                             q 0 x . . .
      q 1 x x x x x                             q 1 x x . .
                                                q 2 . x x .
                                                q 3 . . x x

`core.masks` makes all other masks. In a slice each query sees one run of keys. Slices that share
queries lie in different *layers*, so that in a layer, too, each query sees one run of keys:

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

# Stands for an unbounded side of a band; small enough not to overflow when added to positions.
UNBOUNDED = 1 << 50

# A mask has at most this many slices: they take about 400 bytes each, and plans look at all.
MAX_SLICES = 1 << 20


class Slice(NamedTuple):
    """Queries `[q_start, q_end)`, keys `[k_start, k_end)`, and the band `lo <= j - i <= hi`.

    Positions are global (in `tiles.Tile` local rows); a bound None is unbounded.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int | None = None
    hi: int | None = None

    @property
    def touched(self) -> Self | None:
        """The slice without empty rows and columns; None if no pair is left.

        A bound that cuts nothing off becomes None.
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
        """The fields, with `UNBOUNDED` numbers in place of None."""
        lo = -UNBOUNDED if self.lo is None else self.lo
        hi = UNBOUNDED if self.hi is None else self.hi
        return (*self[:4], lo, hi)

    @property
    def transposed(self) -> Slice:
        q0, q1, k0, k1, lo, hi = self
        return Slice(k0, k1, q0, q1, None if hi is None else -hi, None if lo is None else -lo)

    def moved(self, q: int, k: int) -> Self:
        q0, q1, k0, k1, lo, hi = self
        shift = k - q
        lo, hi = (None if bound is None else bound + shift for bound in (lo, hi))
        return type(self)(q0 + q, q1 + q, k0 + k, k1 + k, lo, hi)

    def __and__(self, other: Slice) -> Self | None:
        """The pairs of both slices; None if there are none."""
        lows = [bound for bound in (self.lo, other.lo) if bound is not None]
        highs = [bound for bound in (self.hi, other.hi) if bound is not None]
        return type(self)(
            max(self.q_start, other.q_start), min(self.q_end, other.q_end),
            max(self.k_start, other.k_start), min(self.k_end, other.k_end),
            max(lows, default=None), min(highs, default=None),
        ).touched  # fmt: skip

    def __str__(self) -> str:
        band = "" if self.lo is self.hi is None else f", {self.lo} <= j - i <= {self.hi}"
        return f"(q {self.q_start}:{self.q_end}, k {self.k_start}:{self.k_end}{band})"


class FlashArguments(NamedTuple):
    """flash-attention's arguments for a mask; boundaries are None for a single document."""

    causal: bool
    window_size: tuple[int, int]
    cu_seqlens_q: tuple[int, ...] | None
    cu_seqlens_k: tuple[int, ...] | None


Layer = tuple[Slice, ...]


@dataclass(frozen=True, init=False, repr=False)
class Mask:
    """The mask of a whole sequence: a hashable value, so that plans can be cached by mask.

    `a & b` keeps the pairs that both masks have. `core.masks` has more constructors.

    Attributes:
        seqlen_q: global number of queries.
        seqlen_k: global number of keys.
        slices: in the order of their queries; every slice has a pair.
        words: a short description for people.
        arguments: flash-attention's arguments from which the mask was made, if any.

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
        """Makes the mask from flash-attention's arguments.

        Args:
            seqlen_q: global number of queries.
            seqlen_k: global number of keys.
            causal: a query sees nothing after its own (bottom-right aligned) position.
            window_size: `(left, right)` keys on either side of the diagonal; -1 is unbounded.
            cu_seqlens_q: document boundaries of the queries, from 0; queries after the last
                boundary are padding and see nothing; None is one document.
            cu_seqlens_k: document boundaries of the keys, of as many documents.

        Raises:
            ValueError: a negative length, boundaries that decrease or end after the length, other
                numbers of documents of queries than of keys, or more than MAX_SLICES documents.
            TypeError: a number is not an int.
        """
        seqlen_q, seqlen_k = checked_lengths(seqlen_q, seqlen_k)
        check_flag("causal", causal)
        window = as_ints("window_size", window_size)
        if len(window) != 2 or min(window) < -1:
            raise ValueError(f"window_size must be (left, right), each at least -1, got {window}")
        cu_q = _checked_boundaries("cu_seqlens", cu_seqlens_q, seqlen_q) or (0, seqlen_q)
        cu_k = _checked_boundaries("cu_seqlens_k", cu_seqlens_k, seqlen_k) or (0, seqlen_k)
        check_number_of_slices(len(cu_q) - 1)
        if len(cu_q) != len(cu_k):
            raise ValueError(
                f"queries and keys must have as many documents, got {len(cu_q) - 1} and "
                f"{len(cu_k) - 1}"
            )
        left, right = window[0], 0 if causal else window[1]
        slices = []
        for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            diagonal = k1 - q1
            lo = None if left < 0 else diagonal - left
            hi = None if right < 0 else diagonal + right
            slices.append(Slice(q0, q1, k0, k1, lo, hi))
        given = cu_q if cu_seqlens_q else None, cu_k if cu_seqlens_k else None
        arguments = FlashArguments(causal, (window[0], window[1]), *given)
        self._set(seqlen_q, seqlen_k, slices, _words(arguments, seqlen_q), arguments)

    @classmethod
    def of(
        cls, seqlen_q: int, seqlen_k: int, slices: Iterable[Slice], words: str | None = None
    ) -> Mask:
        """The mask of slices, which may share queries and keys, but no pair.

        Raises:
            ValueError: a slice beyond the lengths, two slices with a common pair, or more than
                MAX_SLICES slices.
            TypeError: a number is not an int.

        Example:
            >>> Mask.of(4, 4, [Slice(0, 4, 0, 2), Slice(2, 4, 2, 4, None, 0)]).area
            11
        """
        lengths = checked_lengths(seqlen_q, seqlen_k)
        mask = cls.of_disjoint(*lengths, (_checked_slice(s, *lengths) for s in slices), words)
        _check_disjoint(mask.slices)
        return mask

    @classmethod
    def of_disjoint(
        cls, seqlen_q: int, seqlen_k: int, slices: Iterable[Slice], words: str | None = None
    ) -> Mask:
        """As `of`, unchecked: the caller has made slices that share no pair."""
        mask = cls.__new__(cls)
        slices = list(islice(slices, MAX_SLICES + 1))
        check_number_of_slices(len(slices))
        mask._set(seqlen_q, seqlen_k, slices, words or f"{len(slices)} slices", None)
        # Made eagerly: torch.compile then treats the tensor as an input, and one graph serves all
        # such masks.
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
        touched = sorted(
            (s for s in (each.touched for each in slices) if s is not None), key=lambda s: s[:4]
        )
        values = {
            "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "slices": tuple(touched), "words": words,
            "arguments": arguments, "_tensor": None,
        }  # fmt: skip
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"Mask({self.seqlen_q}, {self.seqlen_k}, {self.words})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.seqlen_q, self.seqlen_k, self.slices))

    def __hash__(self) -> int:
        # Cached: hashing thousands of slices at every look-up of a plan would be slow.
        return self._hash

    def __and__(self, other: Mask) -> Mask:
        """The pairs that both masks have.

        Raises:
            ValueError: the lengths of the masks differ, or more than MAX_SLICES slices.
            TypeError: the other value is no mask.
        """
        check_type("the other side of &", other, Mask)
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            raise ValueError(f"masks must be over the same lengths, got {self!r} and {other!r}")
        both = (a & b for a in self.slices for b in other.overlapping(a.q_start, a.q_end))
        slices = (pairs for pairs in both if pairs is not None)
        words = f"{self.words} and {other.words}"
        return Mask.of_disjoint(self.seqlen_q, self.seqlen_k, slices, words)

    def rows(self, start: int, stop: int) -> Mask:
        """The mask of the queries `[start, stop)` alone, renumbered from 0; all keys stay.

        Raises:
            ValueError: queries beyond the mask.

        Example:
            >>> Mask(4, 4, causal=True).rows(2, 4).dense().int().tolist()
            [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        if not 0 <= start <= stop <= self.seqlen_q:
            raise ValueError(f"rows must be within {self.seqlen_q} queries, got {start}, {stop}")
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
        """Says whether this is exactly the causal mask (bottom-right aligned) of its lengths."""
        return self == Mask(self.seqlen_q, self.seqlen_k, causal=True)

    @property
    def has_windows(self) -> bool:
        """Says whether a slice hides keys that are too far before a query."""
        return any(s.lo is not None for s in self.slices)

    @property
    def has_upper_bounds(self) -> bool:
        """Says whether a slice hides keys that are too far before a query."""
        return any(s.hi is not None for s in self.slices)

    @cached_property
    def transposed(self) -> Mask:
        return Mask.of_disjoint(self.seqlen_k, self.seqlen_q, (s.transposed for s in self.slices))

    # -- layers

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The slices in as few layers as possible, sorted; slices of a layer share no query."""
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
        """Yields the slices that have a query in `[start, stop)`, layer by layer."""
        for layer, ends in zip(self.layers, self._q_ends, strict=True):
            for piece in layer[bisect_right(ends, start) :]:
                if piece.q_start >= stop:
                    break
                yield piece

    @cached_property
    def _q_ends(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s.q_end for s in layer) for layer in self.layers)

    def visible_runs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The run of keys that each query sees in each layer.

        Args:
            positions: (n,) int64 global query positions.

        Returns:
            `(start, stop)`, (layers, n) int64 each; `start == stop` where a query sees nothing.
        """
        shape = len(self.layers), len(positions)
        starts, stops = torch.zeros(2, *shape, dtype=torch.int64, device="cpu")
        for row, table in enumerate(self.tables):
            index = torch.searchsorted(table[1], positions, right=True).clamp(max=table.size(1) - 1)
            q_start, q_end, k_start, k_end, lo, hi = table[:, index]
            start = torch.maximum(k_start, positions + lo)
            stop = torch.minimum(k_end, positions + hi + 1)
            visible = (q_start <= positions) & (positions < q_end) & (start < stop)
            starts[row], stops[row] = start * visible, stop * visible
        return starts, stops

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """The `Slice.numbers` of each layer's slices, (6, n) int64."""
        return tuple(
            torch.tensor([s.numbers for s in layer], device="cpu").t().contiguous()
            for layer in self.layers
        )

    def dense(self, q_positions: Tensor | None = None, k_positions: Tensor | None = None) -> Tensor:
        """The mask as (n_q, n_k) booleans, True where visible: the reference for all other code.

        Without global positions, all queries or keys.
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
        """Visible pairs: no pair is in two slices."""
        total = 0
        for q_start, q_end, k_start, k_end, lo, hi in self.tables:
            rows, cols, shift = q_end - q_start, k_end - k_start, q_start - k_start
            upper = torch.minimum(hi + shift, cols - 1)
            beyond = torch.maximum(lo + shift, 1 - rows) - 1
            pairs = pairs_up_to(rows, cols, upper) - pairs_up_to(rows, cols, beyond)
            total += int(pairs.sum())
        return total

    # -- through operators

    @property
    def tensor(self) -> Tensor:
        """The mask as an operator's input: (1 + slices, 6) int64, the lengths, then the slices."""
        tensor: Tensor | None = vars(self)["_tensor"]
        if tensor is None:
            tensor = self._as_tensor()
            if not torch.compiler.is_compiling():
                vars(self)["_tensor"] = tensor
        return tensor

    def _as_tensor(self) -> Tensor:
        first = (self.seqlen_q, self.seqlen_k, 0, 0, 0, 0)
        return torch.tensor([first, *(s.numbers for s in self.slices)], device="cpu")

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Mask:
        first, *rows = tensor.tolist()
        slices = []
        for q0, q1, k0, k1, lo, hi in rows:
            band = None if lo <= -UNBOUNDED else lo, None if hi >= UNBOUNDED else hi
            slices.append(Slice(q0, q1, k0, k1, *band))
        return cls.of_disjoint(first[0], first[1], slices)


# -- checks


def check_number_of_slices(number: int) -> None:
    """Refuses masks too large for memory, by the number of slices that they would need."""
    if number > MAX_SLICES:
        raise ValueError(
            f"a mask has at most {MAX_SLICES:,} slices, got {number:,}: use longer documents, "
            "chunks or blocks, or give each batch a mask of its own"
        )


def checked_lengths(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
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
    bounds = (None if x is None else as_int("each of a band", x) for x in given[4:])
    piece = Slice(*(as_int("each of a slice", x) for x in given[:4]), *bounds)
    if not (0 <= piece.q_start <= piece.q_end <= seqlen_q) or not (
        0 <= piece.k_start <= piece.k_end <= seqlen_k
    ):
        raise ValueError(f"slices must be within {seqlen_q} x {seqlen_k} positions, got {piece}")
    return piece


def _check_disjoint(slices: Iterable[Slice]) -> None:
    """Refuses slices, in the order of their queries, of which two share a pair."""
    open_slices: list[Slice] = []
    for piece in slices:
        open_slices = [other for other in open_slices if other.q_end > piece.q_start]
        for other in open_slices:
            both = other & piece
            if both is not None:
                i = both.q_start
                j = max(both.k_start, i + both.lo) if both.lo is not None else both.k_start
                raise ValueError(
                    f"slices must share no pair, {other} and {piece} both have query {i} with key "
                    f"{j}"
                )
        open_slices.append(piece)


def _words(arguments: FlashArguments, seqlen_q: int) -> str:
    words = ["causal" if arguments.causal else "full"]
    if arguments.window_size != (-1, -1):
        words.append(f"window {arguments.window_size[0]},{arguments.window_size[1]}")
    if arguments.cu_seqlens_q is not None:
        documents, padding = len(arguments.cu_seqlens_q) - 1, seqlen_q - arguments.cu_seqlens_q[-1]
        words += [f"{documents} documents"] * (documents > 1)
        words += [f"{padding} rows of padding"] * (padding > 0)
    return ", ".join(words)
