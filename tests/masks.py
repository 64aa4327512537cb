"""The masks of the tests, each list of them in one place.

TABLE       the table of `ring_attn.testing`, and a window in which whole blocks are visible
ON_A_GRID   for kernels: cuts on and off a grid of 32 columns, one block or several
DECODING    for few queries and many keys, which kernels read in parts
REDUCED     for reductions over all rows: one mask shows nothing
EXECUTED    few rows, for kernels whose PTX a CPU executes
LAUNCHED    ragged lengths, whole blocks, and windows and documents within them, for a GPU
LONG        2,000 rows, for strategies on a GPU
"""

from __future__ import annotations

from ring_attn.core import masks as masks_of
from ring_attn.core.mask import Mask
from ring_attn.testing import MASKS, masks


def documents(*boundaries: int) -> Mask:
    """Causal documents with these boundaries, of queries and of keys."""
    seqlen = boundaries[-1]
    return Mask(seqlen, seqlen, causal=True, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries)


def unequal_documents(
    queries: tuple[int, ...], keys: tuple[int, ...], *, causal: bool, left: int = -1
) -> Mask:
    """Documents with other boundaries of keys than of queries."""
    return Mask(
        queries[-1],
        keys[-1],
        causal=causal,
        window_size=(left, -1),
        cu_seqlens_q=queries,
        cu_seqlens_k=keys,
    )


TABLE = masks(97) | {"wide window": Mask(97, 97, window_size=(60, 40))}

ON_A_GRID = {
    "full": MASKS["full"](257),
    "whole blocks": Mask(128, 96),
    "causal": MASKS["causal"](257),
    "causal, whole blocks": MASKS["causal"](256),
    "one row": MASKS["causal"](1),
    "one row, many keys": Mask(1, 113),
    "half a block": MASKS["causal"](63),
    "less than a block": MASKS["causal"](97),
    "a bit more than half": MASKS["full"](113),
    "longer kv": Mask(63, 113, causal=True),
    "rows that see nothing": Mask(257, 63, causal=True),
    "window": Mask(257, 257, window_size=(40, 30)),
    "causal window": Mask(257, 257, causal=True, window_size=(70, -1)),
    "two documents": documents(0, 128, 256),
    "documents": documents(0, 40, 160, 257),
    "spans": masks_of.spans(257, [(30, 140), (200, 211)], left=150),
    "sink window": masks_of.sink_window(257, 5, 70),
    "bands": masks_of.from_slices(
        257, 257, [(0, 257, 0, 257, lo, hi) for lo, hi in ((-200, -40), (-9, -5), (0, 130))]
    ),
    "documents of other lengths": unequal_documents(
        (0, 20, 130, 257), (0, 33, 33, 150), causal=True, left=30
    ),
}

DECODING = {
    "one query": Mask(1, 700, causal=True, window_size=(500, -1)),
    "few queries": Mask(5, 613, causal=True),
    "few queries, no mask": Mask(3, 257),
    "window": Mask(2, 700, causal=True, window_size=(300, -1)),
    "window of one block": Mask(4, 513, causal=True, window_size=(7, -1)),
    "window on both sides": Mask(9, 300, window_size=(140, 3)),
    "one key": MASKS["causal"](1),
    "queries that see nothing": Mask(7, 3, causal=True),
    "documents": unequal_documents((0, 2, 5, 9), (0, 20, 150, 400), causal=False),
}

REDUCED = {
    "causal": masks_of.causal(45),
    "window": masks_of.window(45, 5, 0),
    "spans": masks_of.spans(45, [(3, 9), (20, 33)]),
    "nothing": masks_of.from_slices(45, 45, []),
}

# Whole blocks, blocks of all kinds, and scores that are capped, with sinks.
EXECUTED = {
    "full": Mask(192, 256),
    "documents": documents(0, 40, 170, 193),
    "causal, capped": MASKS["causal"](193),
}

LAUNCHED = {
    "causal": MASKS["causal"](1000),
    "full": MASKS["full"](1024),
    "window": Mask(900, 1024, window_size=(100, 50)),
    "documents": documents(0, 100, 600, 1000),
}

LONG = {
    "causal": MASKS["causal"](1999),
    "full": MASKS["full"](2048),
    "window": Mask(1999, 1999, causal=True, window_size=(300, -1)),
    "documents": documents(0, 300, 300, 1100, 1999),
}
