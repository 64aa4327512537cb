"""The table of cases: masks, layouts, heads and scores by name, and `cases`, which combines them.

A `Case` is one call as data. It has names of the table, or a mask, layouts, heads and a strategy as
values. `ring-attn verify` and the tests of the strategies use the same table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.api import select_backend
from ring_attn.core import masks as masks_of
from ring_attn.core.dtypes import BY_NAME
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.names import TESTED_LAYOUTS, TESTED_STRATEGIES
from ring_attn.core.oracle import Inputs
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.testing.inputs import random_qkv, random_sinks

STRATEGIES, LAYOUTS = TESTED_STRATEGIES, TESTED_LAYOUTS


class Heads(NamedTuple):
    """Numbers of heads, and head dims, of a call."""

    nheads: int
    nheads_kv: int
    headdim: int
    headdim_v: int


HEADS = {
    "mha": Heads(2, 2, 32, 32),
    "gqa": Heads(4, 2, 16, 16),
    "mqa": Heads(3, 1, 24, 24),
    "headdim_v": Heads(2, 1, 32, 16),
}

# (softcap, whether there are sinks), and the masks with which they are combined. The cap is of the
# size of the scores, so that it changes most of them.
SCORES = ((2.0, False), (0.0, True), (2.0, True))
SCORES_MASKS = ("causal", "window causal", "documents", "longer kv", "empty rows")

# The dtypes that cases take one after another.
DTYPES = ("float32", "bfloat16", "float16")

DEFAULT_SEQLEN = 113
OTHER_SEQLENS = (1, 2, 63, 257)


def _documents(seqlen: int) -> tuple[int, ...]:
    """Return boundaries of documents of different lengths, with an empty one and one of a row."""
    return (0, seqlen // 5, seqlen // 5, seqlen // 2, max(seqlen // 2, seqlen - 1), seqlen)


def _longer_documents(seqlen: int) -> tuple[int, ...]:
    """Return boundaries of keys of `_documents`; documents that are not empty have 3 more keys."""
    lengths = (stop - start for start, stop in pairwise(_documents(seqlen)))
    return tuple(accumulate((n + 3 if n else 0 for n in lengths), initial=0))


def _padding(seqlen: int) -> Mask:
    """Return documents followed by padding, with different numbers of queries and keys."""
    queries = _documents(seqlen * 5 // 6)
    keys = _longer_documents(seqlen * 5 // 6)
    return Mask(seqlen, keys[-1] + 7, causal=True, cu_seqlens_q=queries, cu_seqlens_k=keys)


def _documents_window(seqlen: int) -> Mask:
    boundaries = _documents(seqlen)
    return Mask(
        seqlen,
        seqlen,
        causal=True,
        window_size=(7, -1),
        cu_seqlens_q=boundaries,
        cu_seqlens_k=boundaries,
    )


def _documents_unequal(seqlen: int) -> Mask:
    queries, keys = _documents(seqlen), _longer_documents(seqlen)
    return Mask(seqlen, keys[-1], causal=True, cu_seqlens_q=queries, cu_seqlens_k=keys)


def _spans(seqlen: int) -> list[tuple[int, int]]:
    """Return spans, with two adjacent ones and an empty one."""
    a, b = seqlen // 4, seqlen // 2
    return [(a // 2, a), (a, b), (b, b), (seqlen - seqlen // 8, seqlen)]


def _some_blocks(seqlen: int) -> Tensor:
    """Return a block mask with about half of all blocks of 8; some rows of blocks see no key."""
    num_blocks = -(-seqlen // 8)
    index = torch.arange(num_blocks)
    return (index[:, None] * 5 + index * 3) % 4 < 2  # (num_blocks, num_blocks)


def _bands(seqlen: int) -> Mask:
    """Return several bands in one rectangle: each query sees several runs of keys, with gaps."""
    bands = [(-(1 << 20), -17), (-9, -5), (0, 0), (4, 30)]
    return masks_of.from_slices(
        seqlen, seqlen, [(0, seqlen, 0, seqlen, lo, hi) for lo, hi in bands]
    )


def _keys_unseen(seqlen: int) -> Mask:
    """Return documents of which one has no keys, and one has no queries."""
    keys = (0, 0, seqlen // 7, seqlen // 3, seqlen // 2, seqlen // 2 + 3)
    return Mask(
        seqlen,
        keys[-1],
        window_size=(9, -1),
        cu_seqlens_q=_documents(seqlen),
        cu_seqlens_k=keys,
    )


def _prefixes(seqlen: int) -> Mask:
    """Return documents whose first halves are prefixes."""
    boundaries = _documents(seqlen)
    halves = [(stop - start + 1) // 2 for start, stop in pairwise(boundaries)]
    return masks_of.prefix(halves, boundaries)


# Name -> function from a number of rows to a mask.
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask(n, n),
    "causal": lambda n: Mask(n, n, causal=True),
    "window causal": lambda n: Mask(n, n, causal=True, window_size=(13, -1)),
    "window": lambda n: Mask(n, n, window_size=(9, 5)),
    "documents": lambda n: Mask(n, n, cu_seqlens_q=_documents(n), cu_seqlens_k=_documents(n)),
    "documents window": _documents_window,
    "documents unequal": _documents_unequal,
    "longer kv": lambda n: Mask(n, 2 * n + 31, causal=True),
    "empty rows": lambda n: Mask(n, (n + 1) // 2, causal=True),
    "padding": _padding,
    "spans": lambda n: masks_of.spans(n, _spans(n), left=n // 3),
    "sink window": lambda n: masks_of.sink_window(n, 3, n // 5),
    "blocks": lambda n: masks_of.blocks(_some_blocks(n), 8, n, n),
}

# Extreme masks, for the tests.
EDGE_MASKS: dict[str, Callable[[int], Mask]] = {
    "diagonal": lambda n: Mask(n, n, window_size=(0, 0)),
    "right window": lambda n: Mask(n, n, window_size=(-1, n // 9)),
    "few visible": lambda n: Mask(n, n // 5, window_size=(3, 2)),
    "keys unseen": _keys_unseen,
    "three rows": lambda n: Mask(3, 3, causal=True),
    "only padding": lambda n: Mask(n, n, causal=True, cu_seqlens_q=(0, 0), cu_seqlens_k=(0, 0)),
    "chunked": lambda n: masks_of.chunked(n, max(1, n // 4)),
    "prefixes": _prefixes,
    "shared prefix": lambda n: masks_of.shared_prefix(n // 3, [n // 4, 0, n - n // 3 - n // 4]),
    "bands": _bands,
    "documents of their own": lambda n: masks_of.by_document(
        [masks_of.causal(n // 3, n // 2), masks_of.window(n - n // 3, 5, 2)]
    ),
    "no keys": lambda n: Mask(n, 0),
    "no queries": lambda n: Mask(0, n, causal=True),
}


def masks(seqlen: int) -> dict[str, Mask]:
    """Return all masks of the table by name, for a number of rows.

    Example:
        >>> masks(5)["causal"].area
        15
    """
    return {name: make(seqlen) for name, make in (MASKS | EDGE_MASKS).items()}


def layouts_of(layout: str | tuple[str, str] | Layouts, mask: Mask, world_size: int) -> Layouts:
    """Return the layouts of queries and keys.

    Args:
        layout: a name of `LAYOUTS`, a pair of names, or a pair of layouts.
        mask: mask over the positions of the layouts.
        world_size: number of ranks.

    Example:
        >>> [x.shard_lens for x in layouts_of("boundaries", Mask(6, 12), 3)]
        [(4, 0, 2), (3, 0, 9)]
    """
    of_q, of_kv = (layout, layout) if isinstance(layout, str) else layout
    if isinstance(of_q, SequenceLayout) and isinstance(of_kv, SequenceLayout):
        return of_q, of_kv
    return (
        _layout_of(str(of_q), mask.seqlen_q, world_size, backwards=False),
        _layout_of(str(of_kv), mask.seqlen_k, world_size, backwards=True),
    )


def _layout_of(name: str, seqlen: int, world_size: int, *, backwards: bool) -> SequenceLayout:
    """Return the layout of a name.

    For "boundaries", shard lengths have the proportions 3 : 0 : 1 : 2 : 3 : 0 ... `backwards` means
    that they start at the last rank.
    """
    if name != "boundaries":
        return SequenceLayout.from_name(name, seqlen, world_size)
    weights = [(3, 0, 1, 2)[rank % 4] for rank in range(world_size)]
    if backwards:
        weights.reverse()
    ends = [sum(weights[: rank + 1]) for rank in range(world_size)]
    return SequenceLayout.boundaries([0, *(seqlen * end // ends[-1] for end in ends)])


def strategy_of(name: str, world_size: int) -> str | Strategy:
    """Return a strategy of `STRATEGIES` as an argument of `ring_attention`.

    Its degree is the smallest divisor of the world size above 1.

    Raises:
        NotImplementedError: the strategy needs a degree, and the world size is prime or 1.

    Example:
        >>> strategy_of("ring", 4), strategy_of("hybrid ring", 4)
        ('ring', Strategy(ulysses_degree=2))
    """
    needs_degree = name not in NAMES or NAMES[name].needed
    if name == "auto" or not needs_degree:
        return name
    divisors = [n for n in range(2, world_size) if world_size % n == 0]
    if not divisors:
        raise NotImplementedError(f"a {name} needs ranks in two factors, got {world_size}")
    return Strategy.from_name(name.removeprefix("hybrid "), world_size, divisors[0])


@dataclass(frozen=True)
class Case:
    """One call, as data: the same on every rank and at every world size.

    Attributes:
        mask: a name of `MASKS` or `EDGE_MASKS`, or a mask.
        layout: as in `layouts_of`.
        strategy: a name of `STRATEGIES`, or a strategy.
        backend: as in `ring_attention`.
        dtype: name of the dtype of q, k and v.
        heads: a name of `HEADS`, or sizes.
        seqlen: number of rows, for a mask given by name.
        batch: batch size; None means one packed sequence if there are documents, else 2.
        softmax_scale: as in `ring_attention`.
        softcap: as in `ring_attention`.
        sinks: whether there are sinks, or a logit for each head.
        noncontiguous: whether shards have strides that differ from those of a contiguous tensor.
        large_logits: whether logits differ by hundreds.
        same_bits: as in `ring_attention`.
        seed: seed of the inputs.
    """

    mask: str | Mask
    layout: str | tuple[str, str] | Layouts = "contiguous"
    strategy: str | Strategy = "ring"
    backend: str = "auto"
    dtype: str = "float32"
    heads: str | Heads = "gqa"
    seqlen: int = DEFAULT_SEQLEN
    batch: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool | tuple[float, ...] = False
    noncontiguous: bool = False
    large_logits: bool = False
    same_bits: bool | None = None
    seed: int = 0

    def build_mask(self) -> Mask:
        """Return the mask over the whole sequence."""
        if isinstance(self.mask, Mask):
            return self.mask
        return (MASKS | EDGE_MASKS)[self.mask](self.seqlen)

    def build_layouts(self, world_size: int) -> Layouts:
        """Return the layouts of queries and keys."""
        return layouts_of(self.layout, self.build_mask(), world_size)

    def build_strategy(self, world_size: int) -> str | Strategy:
        """Return the argument `strategy=` of `ring_attention`."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        return strategy_of(self.strategy, world_size)

    def build_inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """Return whole q, k, v and dout; see `random_qkv`."""
        mask, heads = self.build_mask(), self.build_heads()
        default_batch = 1 if self.packed else 2
        return random_qkv(
            batch=self.batch or default_batch,
            seqlen_q=mask.seqlen_q,
            seqlen_k=mask.seqlen_k,
            **heads._asdict(),
            dtype=BY_NAME[self.dtype],
            device=device,
            seed=self.seed,
            noncontiguous=self.noncontiguous,
            large_logits=self.large_logits,
        )

    def build_heads(self) -> Heads:
        """Return the numbers of heads and the head dims."""
        return self.heads if isinstance(self.heads, Heads) else HEADS[self.heads]

    def build_sinks(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the sinks, (nheads,) float32, or None if there are none."""
        if not self.sinks:
            return None
        if isinstance(self.sinks, tuple):
            return torch.tensor(self.sinks, device=device)
        return random_sinks(self.build_heads().nheads, device=device, seed=self.seed)

    @property
    def packed(self) -> bool:
        """Whether q, k, v are packed: (rows, nheads, headdim)."""
        arguments = self.build_mask().arguments
        return self.batch is None and arguments is not None and arguments.cu_seqlens_q is not None

    @property
    def options(self) -> list[str]:
        """Names of the case's unusual properties."""
        options = {
            "strided": self.noncontiguous,
            "large logits": self.large_logits,
            "sinks": bool(self.sinks),
            f"softcap={self.softcap:g}": self.softcap > 0.0,
        }
        return [name for name, there in options.items() if there]

    def __str__(self) -> str:
        mask = self.build_mask()
        names = (self.strategy, self.backend, self.layout, self.mask, self.dtype, self.heads)
        return " ".join([*map(str, names), f"{mask.seqlen_q}x{mask.seqlen_k}", *self.options])


def cases(
    *,
    backends: Sequence[str] | None = None,
    layouts: Sequence[str] = LAYOUTS,
    strategies: Sequence[str] = STRATEGIES,
) -> list[Case]:
    """Return the cases of the table, for some backends, layouts and strategies.

    For each strategy, there is every mask in every layout with every backend and dtype. Heads take
    turns. Further cases have other lengths, large logits, softcap and sinks.

    Args:
        backends: names of backends; None means all that run on this machine's CPU.
        layouts: some of `LAYOUTS`.
        strategies: some of `STRATEGIES`.

    Example:
        >>> of_ring = cases(backends=["reference"], layouts=["zigzag"], strategies=["ring"])
        >>> {case.strategy for case in of_ring}
        {'ring'}
    """
    if backends is None:
        backends = usable_backends("cpu")
    return [case for name in strategies for case in _cases(tuple(backends), tuple(layouts), name)]


def sample(every: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Return at most `count` of the cases, in their order, the same for one seed.

    Cases with the most values that no chosen case has are chosen first. The values are strategy,
    layout, mask, backend, dtype, heads, length and options. If all values are covered, cases with
    the most new pairs are chosen: pairs of a strategy with a layout, a mask, or a dtype of a
    backend, and pairs of a layout with a mask.
    """
    left = list(range(len(every)))
    random.Random(seed).shuffle(left)
    chosen: list[int] = []
    for values_of in (_values, _pairs):
        covered = {value for i in chosen for value in values_of(every[i])}
        # A heap of (-number of new values, position in the random order, index of the case). The
        # number of a case can only decrease: if it is the same as before, no other is greater.
        waiting = [(-len(values_of(every[i])), at, i) for at, i in enumerate(left)]
        heapify(waiting)
        while waiting and len(chosen) < count:
            before, at, i = heappop(waiting)
            new = values_of(every[i]) - covered
            if -len(new) == before:
                chosen.append(i)
                covered |= new
            elif new:
                heappush(waiting, (-len(new), at, i))
        left = [i for i in left if i not in chosen]
    return [every[i] for i in sorted([*chosen, *left][:count])]


def _values(case: Case) -> set[object]:
    fields = ("strategy", "layout", "mask", "backend", "dtype", "heads", "seqlen")
    return {(name, getattr(case, name)) for name in fields} | set(case.options)


def _pairs(case: Case) -> set[object]:
    return {
        (case.strategy, case.layout),
        (case.strategy, case.mask),
        (case.strategy, (case.backend, case.dtype)),
        (case.layout, case.mask),
    }


def usable_backends(device: str) -> tuple[str, ...]:
    """Return the backends that support at least one dtype on this type of device.

    Example:
        >>> "reference" in usable_backends("cpu")
        True
    """
    prefix = f"{device} "
    usable = []
    for backend, reasons in backend_reasons().items():
        of_device = [reason for where, reason in reasons.items() if where.startswith(prefix)]
        if None in of_device:
            usable.append(backend)
    return tuple(usable)


def _cases(backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str) -> Iterator[Case]:
    yield from _cases_of_masks(backends, layouts, strategy)
    yield from _cases_of_lengths(backends, layouts, strategy)
    yield from _cases_of_scores(backends, layouts, strategy)


# Heads, dtypes and seeds take turns: the sum of a case's numbers in its lists chooses them.


def _cases_of_masks(
    backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str
) -> Iterator[Case]:
    heads = list(HEADS)
    for (b, backend), (d, dtype), (i, layout), (j, mask) in product(
        enumerate(backends), enumerate(BY_NAME), enumerate(layouts), enumerate(MASKS)
    ):
        if dtype == "float64" and backend != "reference":
            continue
        turn = b + d + i + j
        yield Case(
            mask,
            layout,
            strategy,
            backend,
            dtype,
            heads=heads[turn % len(heads)],
            noncontiguous=(i + j) % 2 == 1,
            seed=turn,
        )


def _cases_of_lengths(
    backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str
) -> Iterator[Case]:
    for backend, layout in product(backends, layouts):
        for seqlen, mask in product(OTHER_SEQLENS, ("full", "causal", "documents")):
            yield Case(mask, layout, strategy, backend, seqlen=seqlen)
        for dtype in ("float32", "bfloat16"):
            yield Case("causal", layout, strategy, backend, dtype, large_logits=True)


def _cases_of_scores(
    backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str
) -> Iterator[Case]:
    heads = list(HEADS)
    for (b, backend), (i, layout), (j, mask), (s, (softcap, sinks)) in product(
        enumerate(backends), enumerate(layouts), enumerate(SCORES_MASKS), enumerate(SCORES)
    ):
        turn = b + i + j + s
        yield Case(
            mask,
            layout,
            strategy,
            backend,
            DTYPES[turn % len(DTYPES)],
            heads=heads[(turn + j) % len(heads)],
            softcap=softcap,
            sinks=sinks,
            seed=turn,
        )


# Sizes of the tensors for which backends are checked; every backend supports them.
EXAMPLE_HEADS, EXAMPLE_HEADDIM = 4, 64


def backend_reasons() -> dict[str, dict[str, str | None]]:
    """Return why backends cannot run here, by backend and "device dtype"; None if they can."""
    by_backend: dict[str, dict[str, str | None]] = {}
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for device in devices:
        for name, dtype in BY_NAME.items():
            x = torch.empty(1, 1, EXAMPLE_HEADS, EXAMPLE_HEADDIM, dtype=dtype, device=device)
            reasons = select_backend(x, x, x).reasons
            for backend, reason in reasons.items():
                by_backend.setdefault(backend, {})[f"{device} {name}"] = reason
    return by_backend
