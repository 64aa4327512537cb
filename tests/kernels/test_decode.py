"""Decoding by the Triton backend: keys read in parts, query heads of a kv head as rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels import decode, tasks
from ring_attn.kernels.decode import Parts, choose_parts, part_rectangles
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.testing import Inputs, poisoned_empty
from tests.bounds import assert_holds, expect, whole
from tests.kernels.calls import DTYPES, inputs_for

SHORT = 128  # of parts, in tests


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 columns, so that a few hundred keys are several."""
    monkeypatch.setattr(decode, "LEAST_PART", SHORT)


# -- visible pairs


def bounds() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-40, 40)


@given(
    rows=st.integers(1, 9), cols=st.integers(1, 60), group=st.integers(1, 3), lo=bounds(),
    hi=bounds(), start=st.integers(0, 9), length=st.integers(1, 30),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_rows_of_parts_see_what_the_queries_see(
    rows: int, cols: int, group: int, lo: int | None, hi: int | None, start: int, length: int
) -> None:
    parts = Parts(start, length, -(-cols // length))
    rectangle = (0, rows, start, start + cols, lo, hi)
    seen = torch.zeros(parts.num_parts, rows, group, start + cols, dtype=torch.int32)
    for r0, r1, c0, c1, none_lo, none_hi in part_rectangles([rectangle], rows, group, parts):
        assert (none_lo, none_hi) == (None, None) and r0 < r1 and c0 < c1
        seen.view(-1, start + cols)[r0:r1, c0:c1] += 1
        part = r0 // (rows * group)
        assert part == (r1 - 1) // (rows * group)
        assert start + part * length <= c0 and c1 <= start + (part + 1) * length
    i, j = torch.arange(rows)[:, None], torch.arange(start + cols)[None, :]
    expected = (j >= start) & (lo is None or j - i >= lo) & (hi is None or j - i <= hi)
    assert torch.equal(seen.sum(0), expected.int()[:, None].expand(rows, group, -1))


@pytest.mark.parametrize(
    ("first", "last", "programs", "sms", "expected"),
    [
        (0, 1, 1, 132, Parts(0, 256, 1)),
        (0, 131072, 8, 132, Parts(0, 4096, 32)),  # not 33: 131072 / 33 is no multiple of 128
        (0, 131072, 512, 132, Parts(0, 131072, 1)),
        (1000, 1300, 1, 132, Parts(896, 256, 2)),
    ],
)
def test_parts_fill_the_gpu(
    first: int, last: int, programs: int, sms: int, expected: Parts
) -> None:
    parts = choose_parts(first, last, programs, sms)
    assert parts == expected
    assert parts.start <= first and last <= parts.start + parts.num_parts * parts.length


# The interpreter makes the backend warn; numpy warns of NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:backend='triton' on CPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]


# -- results


def tiles_of(mask: Mask) -> tuple[Tile, ...]:
    layout = SequenceLayout.contiguous(mask.seqlen_k, 1)
    return decode_tiles(layout.segments(0), mask)


MASKS = {
    "one query": Mask(1, 700, causal=True, window_size=(500, -1)),
    "few queries": Mask(5, 613, causal=True),
    "few queries, no mask": Mask(3, 257),
    "window": Mask(2, 700, causal=True, window_size=(300, -1)),
    "window of one block": Mask(4, 513, causal=True, window_size=(7, -1)),
    "one key": Mask(1, 1, causal=True),
    "queries that see nothing": Mask(7, 3, causal=True),
}


@pytest.mark.parametrize("heads", [(1, 1), (20, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.sweep(2)
def test_against_float64(name: str, heads: tuple[int, int], short_parts: None) -> None:
    """Takes dtypes, softcap, and keys and values without a stride of 1 in turn; runs twice."""
    mask, turn = MASKS[name], list(MASKS).index(name) + heads[0] // 2
    dtype, softcap = DTYPES[turn % len(DTYPES)], (0.0, 2.0)[turn // 2 % 2]
    inputs = inputs_for(mask, nheads=heads[0], nheads_kv=heads[1], headdim=20, dtype=dtype)
    given = list(inputs[:3])
    if turn % 3:
        given[1:] = (torch.stack((x.mT, x.mT), -1)[..., 0].mT for x in given[1:])
        assert not any(x.stride(-1) == 1 for x in given[1:])
    with poisoned_empty():
        runs = [
            TritonBackend().decode(*given, tiles_of(mask), scores=Scores(0.3, softcap))
            for _ in range(2)
        ]
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(*runs, strict=True))
    check(inputs, mask, *runs[0], softcap=softcap)


def check(
    inputs: Inputs, mask: Mask, out: Tensor, lse: Tensor, scale: float = 0.3, **scores: Any
) -> None:
    results = {"out": out.to(inputs.q.dtype), "lse": lse}
    assert_holds(results, *expect(inputs, mask, scale, **scores))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gaps_of_1e4_between_parts(dtype: torch.dtype, short_parts: None) -> None:
    mask = Mask(2, 513, causal=True)
    inputs = inputs_for(mask, nheads=2, nheads_kv=1, dtype=dtype, large_logits=True)
    scores = torch.einsum("bihd,bjd->bhij", inputs.q.double(), inputs.k[:, :, 0].double()) * 20.0
    assert float(scores.max()) > 1e4 and float(scores.min()) < -1e4
    got = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(20.0))
    check(inputs, mask, *got, scale=20.0)


def test_a_nan_reaches_its_own_row_alone(short_parts: None) -> None:
    mask = Mask(3, 513)
    inputs = inputs_for(mask, nheads=2)
    clean = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(0.3))
    inputs.q[0, 1, 0] = torch.nan
    out, lse = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(0.3))
    assert bool(out[0, 1, 0].isnan().all() and lse[0, 0, 1].isnan())
    others = torch.tensor([0, 2])
    assert torch.equal(out[:, others], clean[0][:, others])
    assert torch.equal(lse[..., others], clean[1][..., others])


@pytest.mark.parametrize(
    ("seqlen_k", "sms"),
    [(1, 3), (63, 1), (128, 40), (257, 1), (257, 40), (1000, 1), (1000, 3), (1000, 40)],
)
@pytest.mark.sweep(2)
def test_any_number_of_parts(
    seqlen_k: int, sms: int, short_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "num_sms", lambda device: sms)
    mask = Mask(2, seqlen_k, causal=True)
    inputs = inputs_for(mask, batch=2, nheads=2, headdim_v=24)
    made = list[int]()
    merge = decode.merge_parts_launch
    monkeypatch.setattr(
        decode, "merge_parts_launch", lambda *args: made.append(args[-1]) or merge(*args)
    )
    with poisoned_empty():
        out, lse = TritonBackend().decode(*inputs[:3], tiles_of(mask), scores=Scores(0.3))
    wanted = -(-2 * sms // 4)  # 2 programs for each multiprocessor; batch x kv heads have one each
    blocks = -(-seqlen_k // SHORT)
    assert made == [-(-blocks // -(-blocks // wanted))]  # parts of as many blocks, but the last
    check(inputs, mask, out, lse)


def test_many_queries_are_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "part_rows", None)
    mask = Mask(33, 97, causal=True)
    inputs = inputs_for(mask, nheads=4, nheads_kv=2)  # 66 rows
    out, lse = TritonBackend().decode(*inputs[:3], whole(mask), scores=Scores(0.3))
    check(inputs, mask, out, lse)
