"""The forward kernel: its state between launches, and its blocks. Results: test_flash_bwd.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.kernels import flash_fwd
from ring_attn.kernels.flash_fwd import forward_launch
from ring_attn.testing import Inputs, random_qkv
from tests.bounds import MASKS, whole
from tests.kernels.calls import (
    DEVICE,
    DTYPES,
    SMALL,
    STEPS,
    Step,
    blocks,
    blocks_of,
    cut_keys,
    empty_state,
    forward,
    in_interpreter,
    inputs_for,
    q_table,
    record,
    times,
)

# Of numpy, in the interpreter: tanh of large scores, in the branch that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


# -- against float64


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


# -- the state between launches


@pytest.mark.parametrize("name", ["full", "causal", "wide window", "longer kv", "documents"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_launches_gives_the_same_bits(dtype: torch.dtype, name: str) -> None:
    mask = MASKS[name]
    inputs, config = inputs_for(mask, dtype=dtype), blocks(64, 32)
    capped = {"softcap": 2.0, "sinks": torch.tensor([0.5], device=DEVICE)}
    options = capped if dtype == torch.float16 else {}
    out, lse = forward(inputs, [whole(mask)], config, **options)
    for cuts in ((64,), (32, 32, 64, 96)):
        again = forward(inputs, cut_keys(mask, *cuts), config, **options)
        assert torch.equal(again[0], out), cuts
        assert torch.equal(again[1], lse), cuts


def test_steps_without_tiles_change_nothing() -> None:
    mask = MASKS["causal"]
    inputs = inputs_for(mask)
    out, lse = forward(inputs, [whole(mask)], SMALL)
    for steps in ([(), whole(mask), ()], [(), (), whole(mask)], [whole(mask), (), ()]):
        again = forward(inputs, steps, SMALL)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_no_step_with_tiles_is_no_attention(with_sinks: bool) -> None:
    inputs = inputs_for(MASKS["full"], nheads=2)
    sinks = torch.tensor([-1.0, 2.0], device=DEVICE)
    for steps in ([()], [(), ()]):
        out, lse = forward(inputs, steps, SMALL, sinks=sinks if with_sinks else None)
        assert bool((out == 0.0).all())
        wanted = sinks if with_sinks else torch.full_like(sinks, -torch.inf)
        assert torch.equal(lse, wanted[None, :, None].expand_as(lse))


def launch(inputs: Inputs, state: flash_fwd.Carried, tiles: Step, first: bool, last: bool) -> None:
    q, k, v, _ = inputs
    table = q_table(tiles, SMALL, num_rows=q.size(1) if first or last else 0)
    forward_launch(q, k, v, state, table, SMALL, softmax_scale=0.25, first=first, last=last).run()


def test_who_writes_what() -> None:
    """acc, m, l by all launches but the last; out and lse by the last alone."""
    mask = MASKS["longer kv"]
    inputs = inputs_for(mask)
    steps = cut_keys(mask, 48, 96)
    state = empty_state(inputs)
    carried, results = (state.acc, state.m, state.l), (state.out, state.lse)
    for step in range(2):
        launch(inputs, state, steps[step], first=step == 0, last=False)
        # The rows that have seen nothing so far are as good as written.
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
    updates = 0
    update = flash_fwd.online_softmax_update

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal updates
        updates += 1
        return update(*args, **kwargs)

    monkeypatch.setattr(flash_fwd, "online_softmax_update", counted)
    forward(inputs, [tiles], config)
    table = q_table(tiles, config, num_rows=dense.size(0))
    wanted = blocks_of(table, dense, config.BLOCK_N, heads=2)
    assert seen.loaded == times(wanted.loaded, 2)  # k and v
    assert seen.masked == wanted.masked
    assert updates == wanted.loaded.total() == 2 * table.visits


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
