"""The merge of decoding in one launch: against float64, and in the order of `merge_tree`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.state import merge_tree
from ring_attn.testing import poisoned_empty, random_sinks
from tests.bounds import assert_close, same_bits
from tests.kernels.calls import DEVICE, DTYPES

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


def merge(
    out: Tensor, lse: Tensor, sinks: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    before = out.clone(), lse.clone()
    with poisoned_empty():
        root = TritonBackend().merge(out, lse, sinks, dtype)
    assert all(map(same_bits, (out, lse), before))
    assert root[0].dtype == dtype and root[1].dtype == torch.float32
    return root


def assert_holds(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Compares with `merge_tree` in float64; plain PyTorch's is that of the sets in reverse."""
    got = merge(out, lse, sinks, dtype)
    exact = merge_tree(out.double(), lse.double(), sinks, torch.float64)
    plain = merge_tree(out.flip(0), lse.flip(0), sinks, dtype)
    for name, *three in zip(("out", "lse"), got, exact, plain, strict=True):
        assert_close(name, *three)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.sweep(3)
def test_against_float64(sets: int, dtype: torch.dtype) -> None:
    """One row sees nothing, another sees nothing in every other set; with and without sinks."""
    out, lse = results(sets, batch=2)
    hidden = torch.zeros(sets, 3, dtype=torch.bool, device=DEVICE)
    hidden[:, 0] = True
    hidden[::2, 1] = True
    hide(out, lse, hidden)
    for sinks in (None, random_sinks(2, device=DEVICE)):
        assert_holds(out, lse, sinks, dtype)


@pytest.mark.parametrize("rows", [1, 97])
@pytest.mark.parametrize("headdim_v", [1, 64, 512])
def test_sizes(rows: int, headdim_v: int) -> None:
    assert_holds(*results(5, rows=rows, headdim_v=headdim_v), None, torch.float32)


@pytest.mark.parametrize("gap", [1e3, 1e4, 1e30])
def test_gaps_between_sets(gap: float) -> None:
    out, lse = results(9)
    lse[4] += gap
    root, _ = merge(out, lse)
    assert torch.equal(root, out[4])
    lse[:] = lse - gap
    assert_holds(out, lse, None, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_types_of_sinks(dtype: torch.dtype) -> None:
    """The sinks are bfloat16 values, which no type rounds."""
    out, lse = results(3)
    given = random_sinks(2, dtype=dtype, device=DEVICE)
    wide, got = merge(out, lse, given.float()), merge(out, lse, given.repeat(2, 1).t()[:, 0])
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
        got, _ = merge(out, lse, sinks, dtype)
        assert torch.equal(got, merge_tree(out.clone(), lse.clone(), sinks, dtype)[0])


def test_a_row_has_its_bits_whatever_stands_beside_it() -> None:
    out, lse = results(9, batch=2, rows=5)
    whole = merge(out, lse)
    alone = merge(out[:, 1:, 2:3].contiguous(), lse[:, 1:, :, 2:3].contiguous())
    assert torch.equal(whole[0][1:, 2:3], alone[0]) and torch.equal(whole[1][1:, :, 2:3], alone[1])
    out[3, 0, 1, 0] = torch.nan
    lse[3, 0, 0, 1] = torch.nan
    root, root_lse = merge(out, lse)
    assert bool(root[0, 1, 0].isnan().all() and root_lse[0, 0, 1].isnan())
    root[0, 1, 0], root_lse[0, 0, 1] = whole[0][0, 1, 0], whole[1][0, 0, 1]
    assert torch.equal(root, whole[0]) and torch.equal(root_lse, whole[1])
