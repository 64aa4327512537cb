"""Backends: every kind of tile and cut against dense attention in float64.

Emulations replace the operators that need CUDA, by their documented behaviour, so that the
arithmetic around them (windows from the bottom right corner, padding, conversions) is checked
without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from dev.fuzz import DTYPES
from ring_attn import select_backend
from ring_attn.backends import PREFERENCE, Purpose, aten, choose_backend, get_backend
from ring_attn.backends.base import flash_pieces, flash_window, out_from_delta
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import MaskKind, Tile
from ring_attn.testing import Expected, Inputs, random_qkv, random_sinks
from tests import emulated_cuda
from tests.bounds import assert_holds, expect, painted, run, visible_pairs, whole
from tests.masks import TABLE
from tests.refusals import refused

PACKAGES = {
    "flash_attn": emulated_cuda.FlashAttn2,
    "flash_attn_3": emulated_cuda.FlashAttn3,
    "flash_attn_4": emulated_cuda.FlashAttn4,
}
BACKENDS = ("aten, short edges", "aten, cuda", "cudnn, cuda", *PACKAGES)
# Others run as they are: `dev/fuzz.py` draws their calls, with any sizes, dtypes and strides.
TESTED = {name.split(",")[0] for name in BACKENDS} | {*DTYPES}
assert {*PREFERENCE} == TESTED, "a backend without tests"

# Caps of the scores: 0 is none, and a small cap flattens nearly all, so that slopes are about 0.
CAPS = {"aten": (0.0,), "cudnn": (0.0,)}
SOFTCAPS = (0.0, 2.0, 0.1)

# Tiles of one rank, of equal shards, and the wide and high tiles of unequal shards: FlashAttention
# 2 ignores a bound of at least seqlen_k, though a tile with more rows than columns may need that
# bound, and cannot leave just one side unbounded there.
CUTS = ((97, 225), (32, 32), (15, 50), (90, 20))

SIZES: dict[str, dict[str, Any]] = {
    "gqa": {"nheads": 4, "nheads_kv": 2},
    "odd headdims": {"headdim": 13, "headdim_v": 21},
    "mqa": {"nheads": 3, "nheads_kv": 1},
}


@cache
def case(
    mask: Mask, name: str, softcap: float, with_sinks: bool
) -> tuple[Inputs, torch.Tensor | None, Expected, Expected]:
    """Inputs, sinks, oracle and plain PyTorch's results, without the ring's dsinks."""
    sizes = {"nheads": 2, "headdim": 16, **SIZES[name]}
    inputs = random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **sizes)
    accum = torch.promote_types(inputs.q.dtype, torch.float32)
    sinks = random_sinks(sizes["nheads"], dtype=accum) if with_sinks else None
    oracle, plain = expect(inputs, mask, softcap=softcap, sinks=sinks)
    return inputs, sinks, replace(oracle, dsinks=None), replace(plain, dsinks=None)


def grid(mask: Mask, rows: int, cols: int) -> tuple[Tile, ...]:
    """Cuts a mask into tiles of at most `rows` x `cols`, as many ranks would."""
    tiles = []
    for tile in whole(mask):
        for q in range(0, mask.seqlen_q, rows):
            for kv in reversed(range(0, mask.seqlen_k, cols)):
                part = tile & Tile(q, q + rows, kv, kv + cols)
                if part is not None:
                    tiles.append(part)
    return tuple(tiles)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch, name: str) -> emulated_cuda.TorchOnCuda | None:
    """Replaces the operators of a backend that needs CUDA; torch's note their calls."""
    if name in PACKAGES:
        monkeypatch.setattr(get_backend(name), "operators", lambda: PACKAGES[name])
    if name == "aten, short edges":
        monkeypatch.setattr(aten, "EDGE", 16)
    if not name.endswith("cuda"):
        return None
    operators = emulated_cuda.TorchOnCuda()
    monkeypatch.setattr(aten, "aten", operators)
    return operators


@pytest.mark.parametrize("mask", TABLE.values(), ids=TABLE)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.sweep(5)
def test_every_mask(name: str, mask: Mask, operators: emulated_cuda.TorchOnCuda | None) -> None:
    """Sizes, scores and cuts in turn, in one step or many; `out` saved or rebuilt from delta."""
    kind = name.split(",")[0]
    names, caps = [*SIZES], CAPS.get(kind, SOFTCAPS)
    used: list[Tile] = []
    for turn, cut in enumerate(2 * CUTS, 5 * list(TABLE.values()).index(mask)):
        sizes, cap = names[turn % len(names)], caps[turn % len(caps)]
        inputs, sinks, oracle, plain = case(mask, sizes, cap, turn % 3 == 1)
        tiles = grid(mask, *cut)
        used += tiles
        steps: Sequence[Sequence[Tile]] = [tiles] if turn % 2 else [[tile] for tile in tiles]
        with emulated_cuda.PretendCuda() if operators else nullcontext():
            got = run(
                get_backend(kind), inputs, steps, rebuild_out=turn % 4 > 1, softcap=cap, sinks=sinks
            )
        assert_holds(got, oracle, plain, (sizes, cut, cap))
    if operators is not None:
        called = {call.removesuffix(" backward") for call in operators.called}
        assert len(operators.called) == 2 * len(called), "backwards for all forwards"
        windows = [tile.kind is MaskKind.WINDOW for tile in used]
        # cuDNN takes every tile but windows.
        assert ("flash" in called) == (any(windows) if kind == "cudnn" else bool(used))
        assert ("cudnn" in called) == (kind == "cudnn" and not all(windows))


def test_pieces_for_flash_are_windows_that_it_can_state() -> None:
    bounds = (None, *range(-8, 9))
    for rows, cols, lo, hi in product((1, 2, 5, 7), (1, 3, 6), bounds, bounds):
        tile = Tile(5, 5 + rows, 3, 3 + cols, lo, hi).trimmed
        if tile is None:
            continue
        pieces = list(flash_pieces(tile))
        assert torch.equal(painted(pieces, 16, 16), painted([tile], 16, 16)), (tile, pieces)
        for piece in pieces:
            seen = emulated_cuda.flash_2_visible(piece.rows, piece.cols, *flash_window(piece))
            assert torch.equal(seen, visible_pairs(piece)), piece


@pytest.mark.parametrize("name", PACKAGES)
def test_flash_attns_inf_becomes_minus_inf(
    name: str, operators: emulated_cuda.TorchOnCuda | None
) -> None:
    q, k, v, _ = random_qkv(seqlen_q=6, seqlen_k=4, headdim=8)
    # No plan makes such a tile: its first two rows see nothing.
    tile = Tile(0, 6, 0, 4, None, -2)
    _, lse = get_backend(name).forward_piece(q, k, v, tile, Scores(1.0))
    assert bool((lse[:, :, :2] == -torch.inf).all())
    assert bool(lse[:, :, 2:].isfinite().all())


def test_out_from_delta_is_exact_where_nothing_rounds() -> None:
    # Powers of two and one non-zero element, from the smallest rows to the largest; a row of zeros.
    for exponent in (-120, -66, -1, 0, 1, 66, 120):
        dout = torch.zeros(1, 5, 1, 8)
        for row in range(4):
            dout[0, row, 0, row] = math.ldexp(-1.0 if row == 2 else 1.0, exponent)
        delta = torch.tensor([[[1.0, -2.0, 0.5, 0.0, 0.0]]])
        stand_in = out_from_delta(dout, delta, torch.float32)
        assert torch.equal((dout * stand_in).sum(-1).transpose(1, 2), delta), exponent
        assert bool((stand_in[0, 4] == 0.0).all())


def test_the_backend_of_decoding_is_that_of_tree_decode() -> None:
    q = torch.zeros(1, 1, 8, 16, requires_grad=True)
    expected = choose_backend(AttentionSpec.of(q, q, q), "auto", Purpose(decoding=True))
    assert select_backend(q, q, q, decoding=True) == expected
    with refused(ValueError, "decoding=True|leave them out"):
        select_backend(q, q, q, decoding=True, window_size=(3, -1))
    with refused(TypeError, "decoding|bool"):
        select_backend(q, q, q, decoding=1)  # type: ignore[arg-type]
