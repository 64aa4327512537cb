"""The kernels against float64; their state between launches; and the blocks that they load."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Tile
from ring_attn.kernels import flash_bwd, flash_fwd
from ring_attn.kernels.configs import Config
from ring_attn.kernels.flash_fwd import forward_launch
from ring_attn.testing import RESULTS, Inputs, random_qkv, random_sinks
from tests.bounds import MASKS, assert_holds, expect, whole
from tests.kernels import toys
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    LARGE,
    SMALL,
    STEPS,
    Step,
    attend,
    blocks,
    blocks_of,
    cut_keys,
    cut_rows,
    empty_state,
    forward,
    grad_kv,
    grad_q,
    in_interpreter,
    inputs_for,
    kv_table,
    q_table,
    record,
    statistics_of,
    times,
    without_sinks,
)

# numpy warns in the interpreter: for tanh of large scores, in the branch not taken, and for
# exponentials of pairs that are masked later.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


def exercise(
    mask: Mask, config: Config, sizes: dict[str, object], *cuts: int, **scores: object
) -> None:
    """Runs forward and backward, with one launch for each part of the keys."""
    inputs = inputs_for(mask, **sizes)
    got = attend(inputs, cut_keys(mask, *cuts), config, **scores)
    assert_holds(got, *map(without_sinks, expect(inputs, mask, **scores)))


# -- against float64


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.sweep(2)
def test_masks(name: str) -> None:
    """Takes the dtypes in turn; test_options.py draws options with any dtype."""
    mask, dtype = MASKS[name], DTYPES[list(MASKS).index(name) % len(DTYPES)]
    config = blocks(64, 32) if dtype == torch.float32 else blocks(64, 64)
    exercise(mask, config, {"dtype": dtype})


@pytest.mark.parametrize("rows", [1, 63, 97, 113, 257])
def test_odd_lengths(rows: int) -> None:
    for turn, mask in enumerate((Mask(rows, rows, True), Mask(rows, 63, True), Mask(63, rows))):
        exercise(mask, LARGE, {"dtype": DTYPES[(rows // 2 + turn) % len(DTYPES)]})


@pytest.mark.parametrize(
    "dims", [(16, 40), (24, 16), (80, 80), (128, 5), (192, 128), (192, 256)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    sizes = {"dtype": dtype, "headdim": dims[0], "headdim_v": dims[1]}
    exercise(Mask(63, 63, causal=True), blocks(32, 32), sizes)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads_and_batches(heads: tuple[int, int], dtype: torch.dtype) -> None:
    sizes = {"dtype": dtype, "batch": 2, "nheads": heads[0], "nheads_kv": heads[1]}
    exercise(Mask(63, 80, causal=True), LARGE, sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 25.0])
def test_any_scale(scale: float, dtype: torch.dtype) -> None:
    exercise(Mask(63, 97, causal=True), LARGE, {"dtype": dtype}, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_1e4_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    mask, sizes = Mask(63, 97, causal=True), {"dtype": dtype, "large_logits": True}
    exercise(mask, SMALL, sizes, scale=10.0)
    exercise(mask, SMALL, sizes, 30, 40, scale=10.0, softcap=2.0)


@pytest.mark.parametrize("softcap", [0.05, 2.0, 50.0])
def test_softcap(softcap: float) -> None:
    for turn, name in enumerate(("causal", "window", "empty rows"), int(softcap)):
        sizes = {"dtype": DTYPES[turn % len(DTYPES)]}
        exercise(MASKS[name], blocks(64, 32), sizes, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype: torch.dtype) -> None:
    """Sinks join the denominators once; the backward needs only the lse that includes them."""
    sizes, sinks = {"dtype": dtype, "nheads": 2}, random_sinks(2, device=DEVICE)
    for name, cuts in (("causal", (16, 32)), ("empty rows", ()), ("no keys", ())):
        exercise(MASKS[name], LARGE, sizes, *cuts, sinks=sinks)


def test_rows_that_see_nothing() -> None:
    mask = MASKS["empty rows"]
    inputs = inputs_for(mask, nheads=2)
    alone = ~mask.dense().any(1)
    sinks = torch.tensor([-torch.inf, 3.0], device=DEVICE)
    for steps in ([whole(mask)], cut_keys(mask, 16, 48)):
        for given, of_none in ((None, [-torch.inf, -torch.inf]), (sinks, [-torch.inf, 3.0])):
            out, lse = forward(inputs, steps, SMALL, sinks=given)
            assert bool((out[:, alone] == 0.0).all())
            assert torch.equal(lse[0, :, alone].cpu(), torch.tensor(of_none)[:, None].expand(2, 48))
            assert bool(lse[:, :, ~alone].isfinite().all())


def test_a_nan_reaches_the_rows_that_see_it() -> None:
    mask = Mask(97, 97, True, (-1, -1), (0, 40, 97), (0, 40, 97))
    clean = inputs_for(mask)
    expected = forward(clean, [whole(mask)], SMALL)
    for name, touched in (("q", [50]), ("k", range(60, 97)), ("v", range(60, 97))):
        inputs = Inputs(*(x.clone() for x in clean))
        getattr(inputs, name)[:, 50 if name == "q" else 60] = torch.nan
        out, lse = forward(inputs, [whole(mask)], SMALL)
        assert bool(out[0, list(touched)].isnan().all()), name
        # The other document lies in the same blocks of rows and of columns.
        assert torch.equal(out[:, :40], expected[0][:, :40]), name
        assert torch.equal(lse[:, :, :40], expected[1][:, :, :40]), name


def test_rows_and_keys_without_a_pair_have_no_gradient() -> None:
    # The second document has queries and no keys, the fourth keys and no queries.
    mask = Mask(97, 97, False, (-1, -1), (0, 20, 40, 70, 70, 97), (0, 20, 20, 60, 75, 97))
    inputs = inputs_for(mask)
    got = attend(inputs, [whole(mask)], SMALL)
    assert_holds(got, *expect(inputs, mask))
    assert not got.dq[:, 20:40].any()
    assert not got.dk[:, 60:75].any() and not got.dv[:, 60:75].any()
    for grad in (got.dq[:, 40:], got.dk[:, 75:], got.dv[:, 75:]):
        assert bool((grad != 0.0).any())


def test_what_a_step_does_not_hold_is_not_read() -> None:
    """Puts NaN into every row of q, k, v, dout, lse and delta that lies in no rectangle."""
    mask = Mask(97, 97, True, (-1, -1), (0, 40, 70, 97), (0, 40, 70, 97))
    middle = whole(mask)[1:2]
    assert (middle[0].q, middle[0].kv) == (slice(40, 70), slice(40, 70))
    inputs = inputs_for(mask)
    out, lse = forward(inputs, [middle], SMALL)
    lse, delta = statistics_of(out, inputs.dout, lse)
    wanted = [grad_q(inputs, lse, delta, [middle], SMALL)]
    wanted += grad_kv(inputs, lse, delta, [middle], SMALL)
    outside = torch.ones(97, dtype=torch.bool)
    outside[40:70] = False
    poisoned = Inputs(*(x.clone() for x in inputs))
    for x in poisoned:
        x[:, outside] = torch.nan
    lse, delta = lse.clone(), delta.clone()
    lse[:, :, outside] = delta[:, :, outside] = torch.nan
    got = [grad_q(poisoned, lse, delta, [middle], SMALL)]
    got += grad_kv(poisoned, lse, delta, [middle], SMALL)
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)
        assert bool(x[:, 40:70].any()) and not bool(x[:, outside].any())


def test_any_strides() -> None:
    mask = MASKS["causal"]
    plain = inputs_for(mask, batch=2, nheads=2, headdim=24, headdim_v=40)
    expected = attend(plain, [whole(mask)], LARGE)
    heads_first = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain))
    cache = Inputs(*(torch.cat((x, x), 1)[:, : x.size(1)] for x in plain))
    for inputs in (heads_first, cache):
        assert not any(x.is_contiguous() for x in inputs)
        got = attend(inputs, [whole(mask)], LARGE)
        for name in RESULTS:
            assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 97])
def test_row_statistics(rows: int, dtype: torch.dtype) -> None:
    inputs = random_qkv(batch=2, seqlen_q=rows, nheads=3, headdim_v=40, dtype=dtype, device=DEVICE)
    out = inputs.dout.flip(1).transpose(1, 2).contiguous().transpose(1, 2)
    natural = torch.randn(2, 3, rows, device=DEVICE)
    natural[:, :, -1] = -torch.inf
    lse, delta = statistics_of(out, inputs.dout, natural, SMALL)
    products = (out.double() * inputs.dout.double()).transpose(1, 2)
    assert torch.equal(lse, natural * (-1.0 / math.log(2.0)))
    assert delta.shape == (2, 3, rows) and delta.dtype == torch.float32
    # The products of two float16 are exact in float32; each of 40 sums rounds once.
    bound = 41 * torch.finfo(torch.float32).eps * products.abs().sum(-1)
    assert bool(((delta - products.sum(-1)).abs() <= bound).all())


# -- continued over launches


@pytest.mark.parametrize("softcap", [0.0, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["full", "causal", "wide window", "documents unequal"])
@pytest.mark.sweep(2)
def test_any_number_of_launches_gives_the_same_bits(name: str, softcap: float) -> None:
    mask, config = MASKS[name], blocks(32, 32)
    # The order of a group's heads is part of the bits.
    group = {"nheads": 2, "nheads_kv": 1} if name == "causal" else {}
    inputs = inputs_for(mask, dtype=torch.float16 if softcap else torch.float32, **group)
    scores = {"softcap": softcap}
    sinks = torch.full((inputs.q.size(2),), 0.5, device=DEVICE) if softcap else None
    out, lse = forward(inputs, [whole(mask)], config, sinks=sinks, **scores)
    args = (inputs, *statistics_of(out, inputs.dout, lse))
    dq = grad_q(*args, [whole(mask)], config, **scores)
    dk, dv = grad_kv(*args, [whole(mask)], config, **scores)
    for cuts in ((64,), (32, 32, 64, 96)):
        again = forward(inputs, cut_keys(mask, *cuts), config, sinks=sinks, **scores)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    cuts = (32, 32, 64)
    assert torch.equal(grad_q(*args, cut_keys(mask, *cuts), config, **scores), dq)
    again = grad_kv(*args, cut_rows(mask, *cuts), config, **scores)
    assert torch.equal(again[0], dk) and torch.equal(again[1], dv)


def test_cuts_within_blocks_and_another_order_hold_too() -> None:
    mask = MASKS["wide window"]
    inputs = inputs_for(mask, dtype=torch.float16)
    oracle, plain = expect(inputs, mask)
    for steps in (cut_keys(mask, 30, 31), cut_rows(mask, 7, 90)[::-1]):
        assert_holds(attend(inputs, steps, LARGE), oracle, plain)


def test_gradients_are_added() -> None:
    mask = MASKS["documents"]
    inputs = inputs_for(mask)
    out, lse = forward(inputs, [whole(mask)], LARGE)
    args = (inputs, *statistics_of(out, inputs.dout, lse))
    steps = [whole(mask)] * 2
    twice = (grad_q(*args, steps, LARGE), *grad_kv(*args, steps, LARGE))
    once = (grad_q(*args, steps[:1], LARGE), *grad_kv(*args, steps[:1], LARGE))
    for x, y in zip(twice, once, strict=True):
        assert bool(y.any())
        torch.testing.assert_close(x, 2.0 * y, rtol=1e-5, atol=1e-5)


# -- the forward's state between launches


def test_steps_without_tiles_change_nothing() -> None:
    mask = MASKS["causal"]
    inputs = inputs_for(mask)
    out, lse = forward(inputs, [whole(mask)], SMALL)
    for steps in ([(), whole(mask), ()], [(), (), whole(mask)], [whole(mask), (), ()]):
        again = forward(inputs, steps, SMALL)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def launch(inputs: Inputs, state: flash_fwd.Carried, tiles: Step, first: bool, last: bool) -> None:
    q, k, v, _ = inputs
    table = q_table(tiles, SMALL, num_rows=q.size(1) if first or last else 0)
    forward_launch(q, k, v, state, table, SMALL, softmax_scale=0.25, first=first, last=last).run()


def test_who_writes_what() -> None:
    """The last launch writes only out and lse; every other launch writes only acc, m and l."""
    mask = MASKS["longer kv"]
    inputs = inputs_for(mask)
    steps = cut_keys(mask, 48, 96)
    state = empty_state(inputs)
    carried, results = (state.acc, state.m, state.l), (state.out, state.lse)
    for step in range(2):
        launch(inputs, state, steps[step], first=step == 0, last=False)
        # Rows that have seen nothing so far are written, too.
        assert not any(bool(x.isnan().any()) for x in carried)
        assert all(bool(x.isnan().all()) for x in results)
    before = [x.clone() for x in carried]
    launch(inputs, state, steps[2], first=False, last=True)
    assert all(torch.equal(x, y) for x, y in zip(carried, before, strict=True))
    assert not any(bool(x.isnan().any()) for x in results)


def test_rows_of_no_tile_are_left_alone_between_the_first_launch_and_the_last() -> None:
    mask = MASKS["full"]
    inputs = inputs_for(mask)
    state = empty_state(inputs)
    launch(inputs, state, (), first=True, last=False)
    assert bool((state.acc == 0.0).all() and (state.l == 0.0).all())
    assert bool((state.m == -torch.inf).all())
    for x in (state.acc, state.m, state.l):
        x.fill_(7.0)
    part = whole(Mask(97, 97, True, (-1, -1), (0, 40, 97), (0, 40, 97)))[1:]
    assert part[0].q == slice(40, 97)
    launch(inputs, state, part, first=False, last=False)
    assert bool((state.acc[:, :40] == 7.0).all())
    assert bool((state.m[:, :, :40] == 7.0).all() and (state.l[:, :, :40] == 7.0).all())
    assert bool((state.l[:, :, 40:] != 7.0).any())


# -- blocks


@in_interpreter
@pytest.mark.parametrize(("tiles", "dense"), STEPS.values(), ids=STEPS)
def test_only_blocks_with_visible_pairs_and_masks_where_one_is_hidden(
    tiles: Step, dense: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_qkv(seqlen_q=dense.size(0), seqlen_k=dense.size(1), nheads=2, headdim=16)
    config = blocks(64, 32)
    seen = record(monkeypatch, flash_fwd)
    updates = count(monkeypatch, flash_fwd, "online_softmax_update")
    forward(inputs, [tiles], config)
    table = q_table(tiles, config, num_rows=dense.size(0))
    wanted = blocks_of(table, dense, config.BLOCK_N, heads=2)
    assert seen.loaded == times(wanted.loaded, 2)  # k and v
    assert seen.masked == wanted.masked
    assert updates == [wanted.loaded.total()] == [2 * table.visits]


@in_interpreter
def test_without_bands_and_ragged_ends_there_is_no_masking_code() -> None:
    inputs = random_qkv(seqlen_q=97, seqlen_k=96, nheads=1, headdim=16)
    tiles = whole(Mask(97, 96))
    assert not any(constants(inputs, tiles)[flag] for flag in ("HAS_LO", "HAS_HI", "RAGGED"))
    assert constants(inputs, whole(Mask(97, 96, True)))["HAS_HI"]
    assert constants(inputs, whole(Mask(97, 96, window_size=(3, -1))))["HAS_LO"]
    assert constants(inputs, whole(Mask(97, 95)))["RAGGED"]


def constants(inputs: Inputs, tiles: Step) -> dict[str, object]:
    q, k, v, _ = inputs
    state, table = empty_state(inputs), q_table(tiles, SMALL)
    made = forward_launch(q, k, v, state, table, SMALL, softmax_scale=1.0, first=False, last=False)
    return dict(made.constants)


@in_interpreter
@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
@pytest.mark.parametrize(("tiles", "dense"), STEPS.values(), ids=STEPS)
def test_gradients_take_blocks_with_visible_pairs_and_mask_where_one_is_hidden(
    tiles: tuple[Tile, ...], dense: Tensor, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, statistics = inputs_of(dense)
    seen = record(monkeypatch, flash_bwd)
    products = count(monkeypatch, flash_bwd, "_probabilities")
    if kernel == "dq":
        config, heads = blocks(64, 32), 1
        grad_q(inputs, *statistics, [tiles], config)
        table = q_table(tiles, config)
        wanted = blocks_of(table, dense, config.BLOCK_N, heads=2)
    else:
        # A program takes q and dout of both heads of the group.
        config, heads = blocks(32, 64), 2
        grad_kv(inputs, *statistics, [tiles], config)
        table = kv_table(tiles, config)
        wanted = blocks_of(table, dense.T, config.BLOCK_M, heads=1)
    assert seen.loaded == times(wanted.loaded, 2 * heads)
    assert seen.masked == times(wanted.masked, heads)
    assert products == [heads * wanted.loaded.total()] == [2 * table.visits]


def count(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[int]:
    """Counts calls of a function from here on: one call for each block of scores."""
    counted, function = [0], getattr(module, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        counted[0] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return counted


def inputs_of(dense: Tensor) -> tuple[Inputs, tuple[Tensor, Tensor]]:
    """One kv head of two query heads, and some lse and delta."""
    rows, cols = dense.shape
    inputs = random_qkv(seqlen_q=rows, seqlen_k=cols, nheads=2, nheads_kv=1, headdim=16)
    return inputs, (torch.full((1, 2, rows), 9.0), torch.zeros(1, 2, rows))


@in_interpreter
def test_products_have_the_bits_of_a_row_and_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits do not depend on its place in a block; with this BLAS they would."""

    def blas(a: np.ndarray, b: np.ndarray, **_: Any) -> np.ndarray:
        half = len(a) // 2
        return np.concatenate([a[:half] @ b, np.einsum("mk,kn->mn", a[half:, ::-1], b[::-1])])

    def product_of(a: Tensor, rows: int) -> Tensor:
        c = torch.empty(rows, 64)
        toys.launch(
            toys.product, {"a": a, "b": b, "c": c, "size": 64, "stride": 1}, (rows, 64, 32), 4, 1
        ).run()
        return c

    monkeypatch.setattr(np, "matmul", blas)
    a, b = torch.randn(2, 64, 64)
    c = product_of(a, 64)
    torch.testing.assert_close(c, a @ b)
    assert torch.equal(product_of(a[32:], 32), c[32:])
    assert torch.equal(product_of(a.flip(0), 64), c.flip(0))
