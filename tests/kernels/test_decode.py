"""Decoding by the Triton backend: keys read in parts, query heads of a kv head as rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import decode, tasks
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.testing import Inputs, poisoned_empty
from tests.bounds import assert_holds, expect, same_bits, whole
from tests.kernels.calls import DTYPES, inputs_for

SHORT = 128  # of parts, in tests


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 columns, so that a few hundred keys are several."""
    monkeypatch.setattr(decode, "LEAST_PART", SHORT)


MASKS = {
    "one query": Mask(1, 700, causal=True, window_size=(500, -1)),
    "few queries": Mask(5, 613, causal=True),
    "few queries, no mask": Mask(3, 257),
    "window": Mask(2, 700, causal=True, window_size=(300, -1)),
    "window of one block": Mask(4, 513, causal=True, window_size=(7, -1)),
    "window on both sides": Mask(9, 300, window_size=(140, 3)),
    "one key": Mask(1, 1, causal=True),
    "queries that see nothing": Mask(7, 3, causal=True),
    "documents": Mask(9, 400, False, (-1, -1), (0, 2, 5, 9), (0, 20, 150, 400)),
}


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
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.sweep(2)
def test_against_float64(name: str, heads: tuple[int, int]) -> None:
    """Takes dtypes, softcap, and keys and values without a stride of 1 in turn."""
    mask, turn = MASKS[name], list(MASKS).index(name) + heads[0] // 2
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


def test_many_queries_are_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "part_rows", None)
    mask = Mask(33, 97, causal=True)
    inputs = inputs_for(mask, nheads=4, nheads_kv=2)  # 66 rows
    check(inputs, mask, *TritonBackend().decode(*inputs[:3], whole(mask), scores=Scores(0.3)))
