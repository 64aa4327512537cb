"""What results are held against, and the masks that backends and kernels are tried with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Tile, pair_tiles
from ring_attn.testing import (
    Expected,
    Inputs,
    check,
    check_all,
    dense_gradients,
    masks,
    plain_gradients,
)

# Those of the table, and a window in which whole blocks are visible.
MASKS = masks(97) | {"wide window": Mask(97, 97, window_size=(60, 40))}


def whole(mask: Mask) -> tuple[Tile, ...]:
    """The tiles of one rank that holds everything."""
    layouts = (SequenceLayout.contiguous(n, 1) for n in (mask.seqlen_q, mask.seqlen_k))
    return pair_tiles(*layouts, mask, 0, 0)


def expect(
    inputs: Inputs, mask: Mask, scale: float | None = None, **scores: Any
) -> tuple[Expected, Expected]:
    oracle, plain = (f(*inputs, mask, scale, **scores) for f in (dense_gradients, plain_gradients))
    return oracle, plain


def assert_holds(
    got: Expected | Mapping[str, Tensor], oracle: Expected, plain: Expected, where: object = ""
) -> None:
    """Every result within its bound; a mapping has some of them by name."""
    if isinstance(got, Expected):
        verdicts = check_all(got, oracle, plain)
    else:
        verdicts = tuple(
            check(name, x, getattr(oracle, name), getattr(plain, name), oracle.terms[name])
            for name, x in got.items()
        )
    assert verdicts and all(verdict.ok for verdict in verdicts), (where, *map(str, verdicts))


def assert_close(name: str, got: Tensor, oracle: Tensor, plain: Tensor) -> None:
    """A result that is no attention's, within the bound of `check`."""
    verdict = check(name, got, oracle, plain)
    assert verdict.ok, str(verdict)
