"""Backends: every kind of tile, size, dtype and stride against dense attention in float64.

Emulations replace the operators that need CUDA, by their documented behaviour, so that the
arithmetic around them (windows from the bottom right corner, padding, conversions) is checked
without a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends import aten, get_backend
from ring_attn.backends.base import Backend, flash_window, out_from_delta
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.tiles import MaskKind, Tile
from ring_attn.testing import Expected, Inputs, random_qkv, random_sinks
from tests import emulated_cuda
from tests.bounds import MASKS, assert_holds, expect, painted, run, visible_pairs, whole

CPU_BACKENDS = ("reference", "aten")

# -- running a backend, and expected results

Config = tuple[tuple[str, Any], ...]


@cache
def case(
    mask: Mask, config: Config, softcap: float = 0.0, with_sinks: bool = False
) -> tuple[Inputs, Expected, Expected]:
    """Inputs, oracle and plain PyTorch results, without dsinks, which the ring computes."""
    inputs = random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **dict(config))
    sinks = sinks_of(inputs) if with_sinks else None
    oracle, plain = expect(inputs, mask, softcap=softcap, sinks=sinks)
    return inputs, replace(oracle, dsinks=None), replace(plain, dsinks=None)


def sinks_of(inputs: Inputs) -> Tensor:
    double = inputs.q.dtype == torch.float64
    return random_sinks(inputs.q.size(2), dtype=torch.float64 if double else torch.float32)


def config(**sizes: Any) -> Config:
    return tuple(sorted({"nheads": 2, "headdim": 16, **sizes}.items()))


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


def exercise(
    backend: Backend,
    mask: Mask,
    sizes: Config,
    steps: Sequence[Sequence[Tile]],
    softcap: float = 0.0,
    with_sinks: bool = False,
    rebuilds: Sequence[bool] = (False, True),
) -> None:
    """Checks results with `out` saved and `out` rebuilt from delta; memory starts as NaN."""
    inputs, oracle, plain = case(mask, sizes, softcap, with_sinks)
    sinks = sinks_of(inputs) if with_sinks else None
    for rebuild_out in rebuilds:
        got = run(backend, inputs, steps, rebuild_out=rebuild_out, softcap=softcap, sinks=sinks)
        assert_holds(got, oracle, plain)


SIZES = {
    "gqa": config(nheads=4, nheads_kv=2),
    "mqa": config(nheads=3, nheads_kv=1),
    "headdim_v less": config(headdim=24, headdim_v=8),
    "mla": config(headdim=192, headdim_v=128),
    "headdim_v more": config(headdim=8, headdim_v=24),
    "odd headdims": config(headdim=13, headdim_v=5),
    "batch": config(batch=3, nheads=4, nheads_kv=2),
    "noncontiguous": config(batch=2, nheads=4, nheads_kv=2, noncontiguous=True),
    "large logits": config(large_logits=True),
    "float64": config(dtype=torch.float64),
    "bfloat16": config(dtype=torch.bfloat16, nheads=4, nheads_kv=2),
    "float16": config(dtype=torch.float16, headdim_v=8),
    "bfloat16 noncontiguous": config(dtype=torch.bfloat16, noncontiguous=True),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_sizes_and_dtypes(name: str, sizes: Config) -> None:
    backend = get_backend(name)
    for mask in (MASKS["causal"], MASKS["window causal"], MASKS["empty rows"]):
        exercise(backend, mask, sizes, [whole(mask)])
        exercise(backend, mask, sizes, [[tile] for tile in grid(mask, 40, 33)])


@pytest.mark.parametrize(
    "window", [(5, 0), (255, -1), (256, 0), (300, 10), (400, 300), (599, 0)], ids=str
)
def test_aten_windows_about_the_size_of_a_masked_edge(window: tuple[int, int]) -> None:
    assert 2 * aten.EDGE < 600 < 3 * aten.EDGE
    mask = Mask(600, 600, window_size=window)
    exercise(get_backend("aten"), mask, config(nheads=1, headdim=8), [whole(mask)])


# One cap bends some scores; the other flattens nearly all, so that the slope is almost zero.
SOFTCAPS = (2.0, 0.1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.sweep(2)
def test_softcap_and_sinks(name: str, mask: Mask) -> None:
    """aten has no softcap, and its backward no sinks argument: its lse includes the sinks."""
    cuts = ([whole(mask)], [[tile] for tile in grid(mask, 40, 33)])
    caps = (0.0,) if name == "aten" else (0.0, *SOFTCAPS)
    for turn, sizes in enumerate(("gqa", "float16", "float64", "large logits")):
        cap = 0.0 if sizes == "large logits" else caps[turn % len(caps)]
        exercise(get_backend(name), mask, SIZES[sizes], cuts[turn % 2], cap, with_sinks=True)


# -- cutting tiles for aten operators that support fewer masks


def all_tiles() -> Iterator[Tile]:
    """Every tile of small rectangles, away from the origin so that offsets show."""
    bounds = (None, *range(-6, 9))
    for rows, cols in product((1, 2, 5, 7), (1, 3, 6)):
        seen = set()
        for lo, hi in product(bounds, bounds):
            shifted = (None if b is None else b - 2 for b in (lo, hi))
            tile = Tile(5, 5 + rows, 3, 3 + cols, *shifted).touched
            key = None if tile is None else (tile.q.start, tile.q.stop, str(tile))
            if tile is not None and key not in seen:
                seen.add(key)
                yield tile


def assert_partition(tile: Tile, pieces: Sequence[Tile]) -> None:
    assert torch.equal(painted(pieces, 16, 16), painted([tile], 16, 16)), (tile, pieces)


@pytest.mark.parametrize("edge", [1, 2, 3, 4, 16])
def test_pieces_for_torchs_cpu_operator(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes a mask or top-left causal, never both."""
    monkeypatch.setattr(aten, "EDGE", edge)
    backend = aten.AtenBackend()
    for tile in all_tiles():
        pieces = list(backend.pieces(tile, "cpu"))
        assert_partition(tile, pieces)
        if tile.kind is not MaskKind.WINDOW:
            assert len(pieces) <= 2
        for piece in pieces:
            if piece.kind is MaskKind.CAUSAL:
                assert piece.corner_band == (None, 0)
            if piece.kind is MaskKind.WINDOW:
                lo, hi = tile.lo, tile.hi
                assert lo is not None
                width = (tile.kv.stop - tile.q.start if hi is None else hi) - lo + 1
                assert piece.rows <= edge and piece.cols <= 2 * edge + max(0, width - edge)


# -- operators of CUDA, emulated


BACKENDS = {"aten": aten.AtenBackend(), "cudnn": aten.CudnnBackend()}


@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_for_flash_are_windows_that_it_can_state(name: str) -> None:
    wrong = []
    for tile in all_tiles():
        pieces = list(BACKENDS[name].pieces(tile, "cuda"))
        assert_partition(tile, pieces)
        for piece in pieces:
            if name == "cudnn" and piece.kind is not MaskKind.WINDOW:  # cuDNN takes this piece
                assert piece.kind is MaskKind.FULL or piece.corner_band == (None, 0)
                assert piece.kind is MaskKind.FULL or piece.rows == piece.cols
                continue
            seen = emulated_cuda.flash_2_visible(piece.rows, piece.cols, *flash_window(piece))
            if not torch.equal(seen, visible_pairs(piece)):
                wrong.append(piece)
    assert not wrong


PACKAGES = {
    "flash_attn": emulated_cuda.FlashAttn2,
    "flash_attn_3": emulated_cuda.FlashAttn3,
    "flash_attn_4": emulated_cuda.FlashAttn4,
}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend of flash-attn over its emulated package."""
    backend = get_backend(request.param)
    monkeypatch.setattr(backend, "operators", lambda: PACKAGES[request.param])
    return backend


GQA, ODD = config(nheads=4, nheads_kv=2), config(headdim=13, headdim_v=21)


def exercise_emulated(backend: Backend, mask: Mask) -> None:
    """Runs tiles of one rank and of equal shards, and the wide and high tiles of unequal shards.

    FlashAttention 2 ignores a bound of at least seqlen_k, though a tile with more rows than columns
    may need that bound, and cannot leave just one side unbounded there.
    """
    exercise(backend, mask, GQA, [whole(mask)])
    exercise(backend, mask, ODD, [[tile] for tile in grid(mask, 32, 32)], rebuilds=[True])
    exercise(backend, mask, GQA, [grid(mask, 15, 50)], rebuilds=[False])
    exercise(backend, mask, GQA, [grid(mask, 90, 20)], rebuilds=[True])


# The newer packages differ only in their arguments and in their rules for windows.
NEWER, HARD = ("flash_attn_3", "flash_attn_4"), ("causal", "wide window", "empty rows")


@pytest.mark.parametrize(
    ("package", "name"),
    [*product(["flash_attn"], MASKS), *product(NEWER, HARD)],
    indirect=["package"],
)
def test_flash_attn_on_an_emulated_package(name: str, package: Backend) -> None:
    exercise_emulated(package, MASKS[name])


@pytest.mark.parametrize(
    ("package", "softcap", "with_sinks"),
    [
        *product(["flash_attn"], [0.0, *SOFTCAPS], [False, True]),
        *product(NEWER, SOFTCAPS[:1], [False]),
    ],
    indirect=["package"],
)
def test_flash_attn_with_softcap_and_sinks(
    softcap: float, with_sinks: bool, package: Backend
) -> None:
    for name in ("causal", "wide window", "empty rows", "documents"):
        steps = [[tile] for tile in grid(MASKS[name], 32, 32)]
        exercise(package, MASKS[name], GQA, steps, softcap, with_sinks)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.sweep(3)
def test_torchs_operators_on_emulated_cuda(
    name: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = emulated_cuda.TorchOnCuda()
    monkeypatch.setattr(aten, "aten", operators)
    for sizes in (GQA, ODD):
        case(mask, sizes)  # the oracle is not for CUDA
    with emulated_cuda.PretendCuda():
        exercise_emulated(BACKENDS[name], mask)
    used = {call.removesuffix(" backward") for call in operators.called}
    assert len(operators.called) == 2 * len(used), "backwards for all forwards"
    tiles = [tile for cut in ((97, 225), (32, 32), (15, 50), (90, 20)) for tile in grid(mask, *cut)]
    windows = [tile.kind is MaskKind.WINDOW for tile in tiles]
    if name == "aten":
        assert used == ({"flash"} if tiles else set())
    else:  # cuDNN takes every tile but windows
        assert ("flash" in used) == any(windows)
        assert "cudnn" in used or all(windows)


def test_flash_attns_inf_becomes_minus_inf(package: Backend) -> None:
    q, k, v, _ = random_qkv(seqlen_q=6, seqlen_k=4, headdim=8)
    # No plan makes such a tile: its first two rows see nothing.
    tile = Tile(0, 6, 0, 4, None, -2)
    operator = emulated_cuda.FlashAttn2._flash_attn_forward(
        q, k, v, 0.0, 1.0, False, -1, 0, 0.0, None, False
    )
    assert bool((operator[1][:, :, :2] == torch.inf).all())  # v4 gives -inf
    state = package.new_state(q, 8)
    package.forward(q, k, v, [tile], state, scores=Scores(1.0))
    out, lse = package.finalize(state, q.dtype)
    assert bool((lse[:, :, :2] == -torch.inf).all())
    assert bool(lse[:, :, 2:].isfinite().all())
    assert bool((out[:, :2] == 0.0).all())


# -- `out` rebuilt where only delta travels


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
