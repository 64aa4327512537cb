"""Shared by the kernel tests: configs, inputs, cut steps, and calls of the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import triton

from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.backends.triton_support import TRITON_OF_SM_100
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels import configs
from ring_attn.kernels.configs import Config
from ring_attn.kernels.triton_release import RELEASE
from ring_attn.testing import (
    RESULTS,
    Expected,
    Inputs,
    random_qkv,
)
from tests.bounds import run, whole

# tests/conftest.py has set it.
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

# In the interpreter bfloat16 arithmetic is silently wrong. On a GPU every case compiles its own
# kernels, a second each, so bfloat16 is the only dtype there; test_gpu.py tries float16, too.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.bfloat16,)

in_interpreter = pytest.mark.skipif(DEVICE != "cpu", reason="looks into the interpreter")

needs_sm_100 = pytest.mark.skipif(
    RELEASE < TRITON_OF_SM_100,
    reason=f"the backend refuses sm_100 with triton {triton.__version__}",
)

Step = Sequence[Tile]

PORTABLE = tuple(
    f"{kernel}{steps}" for kernel in ("fwd", "dq", "dkdv") for steps in ("", "_whole", "_softcap")
)


def blocks(rows: int, cols: int) -> Config:
    """A config with blocks of the given numbers of q rows and kv rows."""
    return Config(rows, cols, 4, 1)


SMALL = blocks(32, 16)


def inputs_for(mask: Mask, **sizes: object) -> Inputs:
    """Random inputs for a mask: one head of 16, unless said otherwise."""
    usual = {"nheads": 1, "headdim": 16, "device": DEVICE}
    return random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **(usual | sizes))


def grouped(mask: Mask, headdim: int = 64, **sizes: object) -> Inputs:
    """Random float16 inputs: two heads over one of keys, unless said otherwise."""
    usual = {"nheads": 2, "nheads_kv": 1, "headdim": headdim, "dtype": torch.float16}
    return inputs_for(mask, **(usual | sizes))


def frozen(arch: str, headdim: int) -> dict[str, Config]:
    """Configs of the portable kernels; named, they rule out kernels in Gluon."""
    return {kind: configs.frozen(kind, arch, headdim, torch.bfloat16) for kind in PORTABLE}


def cut_rows(mask: Mask, *cuts: int) -> list[tuple[Tile, ...]]:
    """Steps of q rows between the cuts, the first rows first: the folding order of dk and dv."""
    bounds = (0, *cuts, mask.seqlen_q)
    keys = slice(0, mask.seqlen_k)
    return [_part(mask, slice(a, b), keys) for a, b in zip(bounds, bounds[1:], strict=False)]


def cut_keys(mask: Mask, *cuts: int) -> list[tuple[Tile, ...]]:
    """Steps of kv rows between the cuts, the last rows first: the folding order of out and dq."""
    bounds = (0, *cuts, mask.seqlen_k)
    rows = slice(0, mask.seqlen_q)
    return [_part(mask, rows, slice(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)][::-1]


def _part(mask: Mask, q: slice, kv: slice) -> tuple[Tile, ...]:
    parts = (tile & Tile(q.start, q.stop, kv.start, kv.stop) for tile in whole(mask))
    return tuple(part for part in parts if part is not None)


def portable(config: Config) -> TritonBackend:
    """A backend whose kernels all use one config, which rules out kernels in Gluon."""
    return TritonBackend(dict.fromkeys(PORTABLE, config))


def attend(inputs: Inputs, steps: Sequence[Step], config: Config, **scores: object) -> Expected:
    """Forward and backward of one rank by the portable kernels; all memory starts as NaN."""
    return run(portable(config), inputs, steps, **scores)


def patched_select(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Makes every kernel use this config."""
    select: Callable[..., Config] = lambda *args, **kwargs: config  # noqa: E731
    monkeypatch.setattr("ring_attn.kernels.configs.select", select)


def same(a: Expected, b: Expected) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in RESULTS)


def assert_halves_are_equal(
    backend: TritonBackend, inputs: Inputs, mask: Mask, alone: Expected
) -> None:
    """Asserts that dq alone, and dk and dv alone, have the bits of all gradients in one launch."""
    dq, dk, dv = (torch.zeros(x.shape) for x in inputs[:3])
    scale = inputs.q.size(3) ** -0.5
    stats = backend.row_statistics(alone.out, inputs.dout, alone.lse)
    given = BackwardInputs(*inputs, *stats)
    for grads in ((dq, None, None), (None, dk, dv)):
        backend.backward(given, whole(mask), grads, scores=Scores(scale))
    for x, y in ((dq * scale, alone.dq), (dk * scale, alone.dk), (dv, alone.dv)):
        assert torch.equal(x.to(y.dtype), y)
