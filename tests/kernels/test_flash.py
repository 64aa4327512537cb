"""The portable kernels against float64; their bits over several steps; the blocks they load."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import pair_tiles
from ring_attn.kernels import flash_bwd, flash_fwd
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.step_table import StepTable
from ring_attn.testing import Inputs, random_qkv
from tests.bounds import assert_computes, assert_holds, expect, run, whole
from tests.kernels import toys
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    SMALL,
    Step,
    attend,
    blocks,
    cut_keys,
    cut_rows,
    in_interpreter,
    inputs_for,
    portable,
    same,
)
from tests.masks import TABLE

# -- against float64; test_options.py draws any options over any masks

CAUSAL = Mask(63, 97, causal=True)
LARGE_LOGITS = {"large_logits": True}
SINKS = torch.tensor([-torch.inf, 3.0], device=DEVICE)
# Mask, sizes, scores.
CASES: dict[str, tuple[Mask, dict[str, Any], dict[str, Any]]] = {
    **{name: (mask, {}, {}) for name, mask in TABLE.items()},
    "three dims of a head": (CAUSAL, {"headdim": 24, "headdim_v": 3}, {}),
    "128 and 5 dims": (CAUSAL, {"headdim": 128, "headdim_v": 5}, {}),
    "192 and 128 dims": (CAUSAL, {"headdim": 192, "headdim_v": 128}, {}),
    "192 and 256 dims": (CAUSAL, {"headdim": 192, "headdim_v": 256}, {}),
    "small scale": (CAUSAL, {}, {"scale": 1e-3}),
    "logits of 1e4": (CAUSAL, LARGE_LOGITS, {"scale": 10.0}),
    "logits of 1e4, capped": (CAUSAL, LARGE_LOGITS, {"scale": 10.0, "softcap": 2.0}),
    "rows that see a sink or nothing": (TABLE["keys unseen"], {"nheads": 2}, {"sinks": SINKS}),
    "low cap": (TABLE["empty rows"], {}, {"softcap": 0.05}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(2)
def test_against_float64(name: str) -> None:
    """Takes dtypes in turn; large heads only in small blocks, which fit into a GPU."""
    mask, sizes, scores = CASES[name]
    dtype = DTYPES[list(CASES).index(name) // 2 % len(DTYPES)]
    config = blocks(32, 32) if "headdim" in sizes else blocks(64, 32)
    inputs = inputs_for(mask, dtype=dtype, **sizes)
    references = (replace(x, dsinks=None) for x in expect(inputs, mask, **scores))
    assert_holds(attend(inputs, [whole(mask)], config, **scores), *references)


def test_a_nan_reaches_the_rows_that_see_it() -> None:
    mask = Mask(97, 97, True, (-1, -1), (0, 40, 97), (0, 40, 97))
    clean = inputs_for(mask)
    expected = attend(clean, [whole(mask)], SMALL)
    for name, touched in (("q", [50]), ("k", range(60, 97)), ("v", range(60, 97))):
        inputs = Inputs(*(x.clone() for x in clean))
        getattr(inputs, name)[:, 50 if name == "q" else 60] = torch.nan
        got = attend(inputs, [whole(mask)], SMALL)
        assert bool(got.out[0, list(touched)].isnan().all()), name
        # The other document lies in the same blocks of rows and of columns.
        for result in ("out", "dq", "dk", "dv"):
            one, other = (getattr(x, result)[:, :40] for x in (got, expected))
            assert torch.equal(one, other), (name, result)
        assert torch.equal(got.lse[:, :, :40], expected.lse[:, :, :40]), name


def test_what_a_step_does_not_hold_is_not_read() -> None:
    mask = Mask(97, 97, True, (-1, -1), (0, 40, 70, 97), (0, 40, 70, 97))
    middle = whole(mask)[1:2]
    assert (middle[0].q, middle[0].kv) == (slice(40, 70), slice(40, 70))
    inputs = inputs_for(mask)
    wanted = attend(inputs, [middle], SMALL)
    outside = torch.ones(97, dtype=torch.bool)
    outside[40:70] = False
    poisoned = Inputs(*(x.clone() for x in inputs))
    for x in poisoned:
        x[:, outside] = torch.nan
    got = attend(poisoned, [middle], SMALL)
    assert same(got, wanted)
    for x in (got.out, got.dq, got.dk, got.dv):
        assert bool(x[:, 40:70].any()) and not bool(x[:, outside].any())


@pytest.mark.parametrize(
    ("name", "softcap"),
    [
        *((name, 0.0) for name in ("full", "causal", "keys unseen", "documents unequal", "bands")),
        pytest.param("causal", 2.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sweep(2)
def test_any_number_of_launches_gives_the_same_bits(name: str, softcap: float) -> None:
    mask, config = TABLE[name], blocks(32, 32)
    # The order of a group's heads is part of the bits, but not that of groups (`l2_bytes`): K and V
    # of a head (97 columns, 16 dims, float32) are 12 KB.
    group = {"nheads": 4, "nheads_kv": 2} if name == "causal" else {}
    inputs = inputs_for(mask, dtype=torch.float16 if softcap else torch.float32, **group)
    sinks = torch.full((inputs.q.size(2),), 0.5, device=DEVICE) if softcap else None
    scores: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
    alone = attend(inputs, [whole(mask)], config, **scores)
    for steps, l2_bytes in (
        (cut_keys(mask, 64), 1),
        ([(), *cut_keys(mask, 32, 32, 64, 96), ()], 13_000),
        (cut_rows(mask, 32, 32, 64), 26_000),
    ):
        again = attend(inputs, steps, replace(config, l2_bytes=l2_bytes), **scores)
        assert same(again, alone), l2_bytes


# -- blocks


def steps_by_name() -> dict[str, tuple[Step, Tensor]]:
    """(tiles, visible pairs) of steps of every kind."""
    found = {
        name: (whole(TABLE[name]), TABLE[name].dense())
        for name in ("full", "causal", "wide window", "window causal", "documents", "longer kv")
    }
    found["whole blocks"] = whole(Mask(64, 96)), Mask(64, 96).dense()
    mask = Mask(193, 193, causal=True)
    for kind, rank, index in (
        ("contiguous", 2, 1),
        ("zigzag", 1, 0),
        ("zigzag", 0, 1),
        ("zigzag", 1, 1),
        ("striped", 0, 1),
        ("striped", 1, 1),
    ):
        layout = SequenceLayout.from_name(kind, 193, 3 if kind == "contiguous" else 2)
        source = (rank - index) % layout.world_size
        dense = mask.dense(layout.position_ids(rank), layout.position_ids(source))
        tiles = pair_tiles(layout, layout, mask, rank, source)
        found[f"{kind}, rank {rank}, step {index}"] = tiles, dense
    return found


STEPS = steps_by_name()


@in_interpreter
@pytest.mark.parametrize(("tiles", "dense"), STEPS.values(), ids=STEPS)
def test_only_blocks_with_visible_pairs_are_loaded_and_those_with_a_hidden_one_masked(
    tiles: Step, dense: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is loaded twice: k and v, or q and dout of each of a kv head's two query heads."""
    rows, cols = dense.shape
    inputs = random_qkv(seqlen_q=rows, seqlen_k=cols, nheads=2, nheads_kv=1, headdim=16)
    config, device = blocks(64, 32), torch.device(DEVICE)
    backend, (loaded, masked) = portable(config), record(monkeypatch)
    run(backend, inputs, [tiles])
    for kernel, heads in (("fwd", 2), ("dq", 2), ("dkdv", 1)):
        kv_rows, num_rows = kernel == "dkdv", rows if kernel == "fwd" else 0
        table = backend.step_table(tiles, config, device, kv_rows=kv_rows, num_rows=num_rows)
        size = config.BLOCK_M if kv_rows else config.BLOCK_N
        to_load, to_mask = blocks_of(table, dense.T if kv_rows else dense, size, heads)
        work = [sum(block == at // heads for at, _ in to_load) for block in range(table.num_blocks)]
        assert work == sorted(work, reverse=True), "the longest blocks come first"
        assert loaded[kernel] == dict.fromkeys(to_load, 4 // heads)
        assert masked[kernel] == dict.fromkeys(to_mask, 2 // heads)


def test_a_table_knows_whether_only_the_last_block_has_pairs_above_the_band() -> None:
    found = set[bool]()
    for (tiles, _), (rows, cols) in product(STEPS.values(), ((64, 32), (32, 32), (32, 64))):
        table = TritonBackend().step_table(tiles, blocks(rows, cols), torch.device("cpu"))
        most = 0
        for row, stop, first, last in table.blocks[: table.num_blocks].tolist():
            i = torch.arange(row, stop)[:, None]
            for c0, c1, lo, hi in table.runs[first:last].tolist():
                j = torch.arange(256)
                seen = (j >= c0) & (j < c1) & (j - i >= lo) & (j - i <= hi)
                above = (j - i > hi) | (j >= c1)
                visited = [b for b in range(0, 256, cols) if seen[:, b : b + cols].any()]
                most = max(most, sum(bool(above[:, b : b + cols].any()) for b in visited))
        assert table.one_above == (most <= 1)
        found.add(table.one_above)
    assert found == {False, True}


Counts = defaultdict[str, Counter[tuple[int, int]]]


def record(monkeypatch: pytest.MonkeyPatch) -> tuple[Counts, Counts]:
    """Counts loads and masks of blocks from here on, by kernel, program and first column."""
    loaded, masked = Counts(Counter), Counts(Counter)
    kernel, latest = "", (-1, -1)
    launch, load_block, visible_pairs = Launch.run, flash_fwd.load_block, flash_fwd.visible_pairs

    def start(self: Launch) -> None:
        nonlocal kernel
        kernel = self.kernel.fn.__name__.removeprefix("flash_").removesuffix("_kernel")
        launch(self)

    def load(ptr: Any, start: Any, *args: Any) -> Any:
        nonlocal latest
        latest = operator.index(tl.program_id(0)), operator.index(start)
        loaded[kernel][latest] += 1
        return load_block(ptr, start, *args)

    def mask(*args: Any) -> Any:
        masked[kernel][latest] += 1
        return visible_pairs(*args)

    monkeypatch.setattr(Launch, "run", start)
    for module in (flash_fwd, flash_bwd):
        monkeypatch.setattr(module, "load_block", load)
        monkeypatch.setattr(module, "visible_pairs", mask)
    return loaded, masked


def blocks_of(
    table: StepTable, dense: Tensor, size: int, heads: int
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Blocks (program, first column) with a visible pair, and those with a hidden pair, too.

    Columns beyond the last of `dense` (rows, cols) are hidden; each block of rows has a program for
    each of the heads.
    """
    to_load, to_mask = set[tuple[int, int]](), set[tuple[int, int]]()
    for block, (start, stop, _, _) in enumerate(table.blocks[: table.num_blocks].tolist()):
        for col in range(0, dense.size(1), size):
            pairs = dense[start:stop, col : col + size]
            programs = {(block * heads + head, col) for head in range(heads)}
            to_load |= programs if bool(pairs.any()) else set()
            if 0 < int(pairs.sum()) < (stop - start) * size:
                to_mask |= programs
    return to_load, to_mask


@in_interpreter
def test_products_have_the_bits_of_a_row_and_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits do not depend on its place in a block; with this BLAS they would."""

    def blas(a: np.ndarray, b: np.ndarray, **_: Any) -> np.ndarray:
        half = len(a) // 2
        return np.concatenate([a[:half] @ b, np.einsum("mk,kn->mn", a[half:, ::-1], b[::-1])])

    def product_of(a: Tensor, rows: int) -> Tensor:
        c = torch.empty(rows, 64)
        args = {"a": a, "b": b, "c": c, "size": 64, "stride": 1}
        toys.launch(toys.product, args, (rows, 64, 32), 4, 1).run()
        return c

    monkeypatch.setattr(np, "matmul", blas)
    a, b = torch.randn(2, 64, 64)
    c = product_of(a, 64)
    assert_computes(c, torch.matmul, a, b)
    assert torch.equal(product_of(a[32:], 32), c[32:])
    assert torch.equal(product_of(a.flip(0), 64), c.flip(0))
