"""What results are held against, and the masks that backends and kernels are tried with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends.base import Backend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.tiles import Tile, pair_tiles
from ring_attn.testing import (
    Expected,
    Inputs,
    check,
    check_all,
    dense_gradients,
    masks,
    plain_gradients,
    poisoned_empty,
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


def run(
    backend: Backend,
    inputs: Inputs,
    steps: Sequence[Sequence[Tile]],
    *,
    rebuild_out: bool = False,
    say_last: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """Forward and backward of one rank, the tiles dealt over some steps; inputs are unchanged.

    With `rebuild_out` the backward has delta in place of `out`; with `say_last` the last step of
    the forward is told that it is. Memory starts as NaN.
    """
    q, k, v, dout = inputs
    before = [x.clone() for x in inputs]
    scores = Scores(q.size(-1) ** -0.5 if scale is None else scale, softcap)
    accum = torch.float64 if q.dtype == torch.float64 else torch.float32
    grads = [torch.zeros(x.shape, dtype=accum, device=q.device) for x in (q, k, v)]
    with poisoned_empty():
        state = backend.new_state(q, v.size(-1), sinks)
        for tiles in steps:
            last = say_last and tiles is steps[-1]
            state = backend.forward(q, k, v, tiles, state, scores=scores, last=last)
        out, lse = backend.finalize(state, q.dtype)
        delta = backend.delta(out, dout)
        for tiles in steps:
            backend.backward(
                *(q, k, v, dout, lse, delta, tiles, *grads),
                scores=scores,
                out=None if rebuild_out else out,
            )
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    factor = backend.gradient_factor(scores)
    dq, dk, dv = grads
    return Expected(out, lse, *(x.to(q.dtype) for x in (dq * factor, dk * factor, dv)))


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
