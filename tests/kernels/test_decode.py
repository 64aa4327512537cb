"""Decoding by the Triton backend: keys read in parts, query heads of a kv head as rows.

Its parts, and the results of ranks, are merged in one launch, in the order of `merge_tree`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.state import merge_tree
from ring_attn.kernels import configs, decode, tasks
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.testing import Inputs, noisy_runs, poisoned_empty, random_sinks
from tests import caches as cache
from tests.bounds import assert_close, assert_holds, expect, same_bits
from tests.kernels import calls
from tests.kernels.calls import DEVICE, DTYPES, inputs_for
from tests.masks import DECODING

SHORT = 128  # of parts, in tests


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 columns, so that a few hundred keys are several."""
    monkeypatch.setattr(decode, "LEAST_PART", SHORT)


def run(inputs: Inputs, mask: Mask, scale: float = 0.3, softcap: float = 0.0) -> dict[str, Tensor]:
    """out and lse of two equal runs, checked against float64."""
    layout = SequenceLayout.contiguous(mask.seqlen_k, 1)
    tiles, scores = decode_tiles(layout.segments(0), mask), Scores(scale, softcap)
    with poisoned_empty():
        runs = [TritonBackend().decode(*inputs[:3], tiles, scores=scores) for _ in range(2)]
    assert all(map(same_bits, *runs))
    return check(inputs, mask, *runs[0], scale=scale, softcap=softcap)


def check(
    inputs: Inputs, mask: Mask, out: Tensor, lse: Tensor, scale: float = 0.3, **scores: Any
) -> dict[str, Tensor]:
    assert out.dtype == lse.dtype == torch.float32
    results = {"out": out.to(inputs.q.dtype), "lse": lse}
    if not inputs.q.isnan().any():
        assert_holds(results, *expect(inputs, mask, scale, **scores))
    return results


@pytest.mark.parametrize("heads", [(1, 1), (20, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("name", DECODING)
@pytest.mark.sweep(2)
def test_against_float64(name: str, heads: tuple[int, int]) -> None:
    """Takes dtypes, softcap, and keys and values without a stride of 1 in turn."""
    mask, turn = DECODING[name], list(DECODING).index(name) + heads[0] // 2
    inputs = inputs_for(
        mask, nheads=heads[0], nheads_kv=heads[1], headdim=20, dtype=DTYPES[turn % len(DTYPES)]
    )
    if turn % 3:
        k, v = (torch.stack((x.mT, x.mT), -1)[..., 0].mT for x in inputs[1:3])
        assert k.stride(-1) != 1 != v.stride(-1)
        inputs = inputs._replace(k=k, v=v)
    run(inputs, mask, softcap=(0.0, 2.0)[turn // 2 % 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gaps_of_1e4_between_parts(dtype: torch.dtype) -> None:
    mask = Mask(2, 513, causal=True)
    inputs = inputs_for(mask, nheads=2, nheads_kv=1, dtype=dtype, large_logits=True)
    scores = torch.einsum("bihd,bjd->bhij", inputs.q.double(), inputs.k[:, :, 0].double()) * 20.0
    assert float(scores.max()) > 1e4 and float(scores.min()) < -1e4
    run(inputs, mask, scale=20.0)


def test_a_nan_reaches_its_own_row_alone() -> None:
    mask = Mask(3, 513)
    inputs = inputs_for(mask, nheads=2)
    clean = run(inputs, mask)
    inputs.q[0, 1, 0] = torch.nan
    got = run(inputs, mask)
    assert bool(got["out"][0, 1, 0].isnan().all() and got["lse"][0, 0, 1].isnan())
    others = torch.tensor([0, 2])
    assert torch.equal(got["out"][:, others], clean["out"][:, others])
    assert torch.equal(got["lse"][..., others], clean["lse"][..., others])


@pytest.mark.parametrize(
    ("seqlen_k", "sms"),
    [(1, 3), (128, 40), (257, 1), (257, 40), (1000, 3), (1000, 40)],
)
@pytest.mark.sweep(2)
def test_any_number_of_parts(seqlen_k: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "num_sms", lambda device: sms)
    made, merge = list[int](), decode.merge_parts_launch
    monkeypatch.setattr(
        decode, "merge_parts_launch", lambda *args: made.append(args[-1]) or merge(*args)
    )
    mask = Mask(2, seqlen_k, causal=True)
    run(inputs_for(mask, batch=2, nheads=2, headdim_v=24), mask)
    wanted = -(-2 * sms // 4)  # 2 programs for each multiprocessor; batch x kv heads have one each
    blocks = -(-seqlen_k // SHORT)
    # Parts of as many blocks, but the last.
    assert made == [-(-blocks // -(-blocks // wanted))] * 2


# -- sequences of unlike lengths, in test_cache's places

SEQUENCES = {
    "pages of 16": (2, 16, None, {}),
    "pages of 5, a window": (2, 5, None, {"window_size": (20, 0)}),
    "stripes in pages": (3, 16, SequenceLayout.striped(cache.ROOM, 3), {}),
    "a run, not causal": (1, 0, None, {"window_size": (-1, -1)}),
    "runs": (2, 0, SequenceLayout.boundaries([0, 3, cache.ROOM]), {}),
}


@pytest.mark.filterwarnings("ignore:backend='triton' on CPU")
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.sweep(2)
def test_sequences_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of several blocks; heads fill a block of rows, or more than one."""
    monkeypatch.setattr(configs, "INTERPRETER", calls.blocks(16, 16))
    monkeypatch.setattr(decode, "PART_UNIT", 16)
    monkeypatch.setattr(decode, "LEAST_PART", 32)
    turn = [*SEQUENCES].index(name)
    lengths, (*place, window) = (97, 0, 1, 33), SEQUENCES[name]
    whole = inputs_for(
        Mask(1 + turn % 3, cache.ROOM),
        batch=4,
        nheads=(4, 40, 6)[turn % 3],
        nheads_kv=2,
        headdim=20,
        dtype=DTYPES[turn % len(DTYPES)],
    )
    held = cache.Cache(whole, lengths, *place, **window)
    got = cache.decoded(held, whole.q, "triton", softcap=2.0 * (turn == 1))
    seen = window.get("window_size", (-1, 0))
    cache.assert_exact(got, whole, lengths, seen, softcap=2.0 * (turn == 1))


@pytest.mark.filterwarnings("ignore:backend='triton' on CPU")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_mla(shared: bool, dtype: torch.dtype) -> None:
    """Values that are the first dims of the keys are read once, with the same bits."""
    lengths = (40, 3)
    whole = inputs_for(
        Mask(1, cache.ROOM), batch=2, nheads=4, nheads_kv=1, headdim=576, headdim_v=512, dtype=dtype
    )
    whole = whole._replace(v=whole.k[..., :512])
    held = cache.Cache(whole, lengths, 1, 16, None)
    if shared:
        held.ranks = [(k, k[..., :512], *others) for k, _, *others in held.ranks]
        assert decode.shares(*held.ranks[0][:2])
    got = cache.decoded(held, whole.q, "triton")
    cache.assert_exact(got, whole, lengths, (-1, 0))


# -- the merge

SETS = (*range(1, 10), 17, 64)


def results(
    sets: int, *, batch: int = 1, rows: int = 3, nheads: int = 2, headdim_v: int = 20
) -> tuple[Tensor, Tensor]:
    """out and lse of every set, laid out as ranks gather them: side by side, a gap after each."""
    generator = torch.Generator().manual_seed(sets)
    shapes = (batch, rows, nheads, headdim_v), (batch, nheads, rows)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    packets = torch.randn(sets, sum(sizes) + 4, generator=generator).to(DEVICE)
    out, lse, _ = packets.split([*sizes, 4], 1)
    return (
        out.as_strided((sets, *shapes[0]), (packets.size(1), *out[0].view(shapes[0]).stride())),
        lse.as_strided((sets, *shapes[1]), (packets.size(1), *lse[0].view(shapes[1]).stride())),
    )


def hide(out: Tensor, lse: Tensor, hidden: Tensor) -> None:
    """Gives the hidden (sets, rows) results of rows that see nothing."""
    out.masked_fill_(hidden[:, None, :, None, None], 0.0)
    lse.masked_fill_(hidden[:, None, None, :], -torch.inf)


def merged(
    out: Tensor, lse: Tensor, sinks: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    before = out.clone(), lse.clone()
    with poisoned_empty():
        root = TritonBackend().merge(out, lse, sinks, dtype)
    assert all(map(same_bits, (out, lse), before))
    assert root[0].dtype == dtype and root[1].dtype == torch.float32
    return root


def assert_merged(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Compares with `merge_tree` in float64, and in noisy runs."""
    got = merged(out, lse, sinks, dtype)
    exact = merge_tree(out.double(), lse.double(), sinks, torch.float64)
    noisy = noisy_runs(lambda: merge_tree(out, lse, sinks, dtype))
    for name, result, oracle, *runs in zip(("out", "lse"), got, exact, *noisy, strict=True):
        assert_close(name, result, oracle, runs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.sweep(3)
def test_the_merge_against_float64(sets: int, dtype: torch.dtype) -> None:
    """Merges a row that sees nothing, and a row that sees nothing in every other set."""
    batch, rows, headdim_v = ((2, 3, 20), (1, 1, 1), (1, 97, 64), (1, 2, 512))[sets % 4]
    out, lse = results(sets, batch=batch, rows=rows, headdim_v=headdim_v)
    hidden = torch.zeros(sets, rows, dtype=torch.bool, device=DEVICE)
    hidden[:, 0] = rows > 1
    hidden[::2, 1:2] = True
    hide(out, lse, hidden)
    for sinks in (None, random_sinks(2, device=DEVICE)):
        assert_merged(out, lse, sinks, dtype)


@pytest.mark.parametrize("gap", [1e3, 1e4, 1e30])
def test_gaps_between_sets(gap: float) -> None:
    out, lse = results(9)
    lse[4] += gap
    root, _ = merged(out, lse)
    assert torch.equal(root, out[4])
    lse[:] = lse - gap
    assert_merged(out, lse, None, torch.float32)


def test_types_and_strides_of_sinks() -> None:
    """The sinks are bfloat16 values, which no type rounds."""
    out, lse = results(3)
    sinks = random_sinks(2, device=DEVICE)
    wide = merged(out, lse, sinks.float())
    for dtype in (torch.float32, torch.float16, torch.float64):
        got = merged(out, lse, sinks.to(dtype).repeat(2, 1).t()[:, 0])
        assert torch.equal(got[0], wide[0]) and torch.equal(got[1], wide[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.sweep(3)
def test_the_order_is_that_of_merge_tree(sets: int, dtype: torch.dtype) -> None:
    """Weights of the sets are 1 or 0 in float32: only the sums round, so their order shows."""
    out, lse = results(sets, rows=5, headdim_v=64)
    lse[:] = 3.0
    generator = torch.Generator().manual_seed(sets)
    lse[:, :, :, 2] -= 1e4 * torch.randint(2, (sets, 1, 2), generator=generator).to(DEVICE)
    hidden = torch.zeros(sets, 5, dtype=torch.bool, device=DEVICE)
    hidden[:, 3] = True
    hidden[: sets // 2, 4] = True
    hide(out, lse, hidden)
    for sinks in (None, torch.full((2,), 3.0, device=DEVICE)):
        got, _ = merged(out, lse, sinks, dtype)
        assert torch.equal(got, merge_tree(out.clone(), lse.clone(), sinks, dtype)[0])


def test_a_row_has_its_bits_whatever_stands_beside_it() -> None:
    out, lse = results(9, batch=2, rows=5)
    whole = merged(out, lse)
    alone = merged(out[:, 1:, 2:3].contiguous(), lse[:, 1:, :, 2:3].contiguous())
    assert torch.equal(whole[0][1:, 2:3], alone[0]) and torch.equal(whole[1][1:, :, 2:3], alone[1])
    out[3, 0, 1, 0] = torch.nan
    lse[3, 0, 0, 1] = torch.nan
    root, root_lse = merged(out, lse)
    assert bool(root[0, 1, 0].isnan().all() and root_lse[0, 0, 1].isnan())
    root[0, 1, 0], root_lse[0, 0, 1] = whole[0][0, 1, 0], whole[1][0, 0, 1]
    assert torch.equal(root, whole[0]) and torch.equal(root_lse, whole[1])
