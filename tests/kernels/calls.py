"""Shared by the kernel tests: attention by chosen launches, and the blocks that it loads.

`attend` is forward and backward by the kernels alone, each step in a launch of its own, over memory
that starts as NaN. `record` counts in the interpreter the blocks that a kernel loads and masks;
`blocks_of` counts from the dense mask the blocks that it must load and mask.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Tile, make_tile
from ring_attn.kernels.configs import Config
from ring_attn.kernels.flash_bwd import delta_launch, dkdv_launch, dq_launch
from ring_attn.kernels.flash_fwd import Carried, forward_launch
from ring_attn.kernels.step_table import Rectangle, StepTable, make_step_table, transposed
from ring_attn.strategies.ring import ring_steps
from ring_attn.testing import Expected, Inputs, poisoned_empty, random_qkv
from tests.bounds import MASKS, whole

# tests/kernels/conftest.py has set it.
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

# In the interpreter bfloat16 arithmetic is silently wrong. On a GPU every case compiles its own
# kernels, a second each, so bfloat16 is the only dtype there; test_gpu.py tries float16, too.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.bfloat16,)

in_interpreter = pytest.mark.skipif(DEVICE != "cpu", reason="looks into the interpreter")

Step = Sequence[Tile]


def blocks(rows: int, cols: int) -> Config:
    """A config with blocks of the given numbers of q rows and kv rows."""
    return Config(rows, cols, 4, 1)


SMALL = blocks(32, 16)
LARGE = blocks(64, 64)


# -- inputs


def inputs_for(mask: Mask, **sizes: object) -> Inputs:
    """Random inputs for a mask: one head of 16, unless said otherwise."""
    usual = {"nheads": 1, "headdim": 16, "device": DEVICE}
    return random_qkv(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k, **(usual | sizes))


# -- steps


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
    parts = (
        make_tile(_common(tile.q, q), _common(tile.kv, kv), *tile.band) for tile in whole(mask)
    )
    return tuple(part for part in parts if part is not None)


def _common(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def rectangles(tiles: Step) -> list[Rectangle]:
    return [(t.q.start, t.q.stop, t.kv.start, t.kv.stop, *t.band) for t in tiles]


def q_table(tiles: Step, config: Config, num_rows: int = 0, device: str = DEVICE) -> StepTable:
    """The table of the forward and of dq."""
    return make_step_table(
        rectangles(tiles), config.BLOCK_M, config.BLOCK_N, torch.device(device),
        descending=True, num_rows=num_rows,
    )  # fmt: skip


def kv_table(tiles: Step, config: Config) -> StepTable:
    return make_step_table(
        transposed(rectangles(tiles)), config.BLOCK_N, config.BLOCK_M, torch.device(DEVICE),
        descending=False,
    )  # fmt: skip


def steps_by_name() -> dict[str, tuple[Step, Tensor]]:
    """(tiles, visible pairs) of steps of every kind."""
    found = {
        name: (whole(MASKS[name]), MASKS[name].dense())
        for name in ("full", "causal", "wide window", "window causal", "documents", "longer kv")
    }
    found["whole blocks"] = whole(Mask(64, 96)), Mask(64, 96).dense()
    mask = Mask(193, 193, causal=True)
    for kind, rank, index in (
        ("contiguous", 2, 1),
        ("zigzag", 1, 0),
        ("zigzag", 0, 1),
        ("zigzag", 1, 1),
        ("striped", 0, 1),
        ("striped", 1, 1),
    ):
        layout = SequenceLayout.from_name(kind, 193, 3 if kind == "contiguous" else 2)
        step = ring_steps(layout, layout, mask, rank)[index]
        keys = layout.position_ids(step.source)[step.rows]
        dense = mask.dense(layout.position_ids(rank), keys)
        found[f"{kind}, rank {rank}, step {index}"] = step.tiles, dense
    return found


STEPS = steps_by_name()


# -- attention


def forward(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, each step in a launch of its own."""
    q, k, v, _ = inputs
    state = empty_state(inputs, sinks, carried=len(steps) > 1)
    for index, tiles in enumerate(steps):
        first, last = index == 0, index == len(steps) - 1
        table = q_table(tiles, config, num_rows=q.size(1) if first or last else 0)
        forward_launch(
            q, k, v, state, table, config, softmax_scale=scale_of(q, scale), softcap=softcap,
            first=first, last=last,
        ).run()  # fmt: skip
    assert state.out is not None and state.lse is not None
    return state.out, state.lse


def empty_state(inputs: Inputs, sinks: Tensor | None = None, *, carried: bool = True) -> Carried:
    """A state and results filled with NaN; without acc, m, l unless `carried`."""
    batch, rows, nheads, _ = inputs.q.shape
    device = inputs.q.device
    with poisoned_empty():
        out = inputs.q.new_empty(batch, rows, nheads, inputs.v.size(3))
        m, l, lse = torch.empty(3, batch, nheads, rows, device=device)
        acc = torch.empty(out.shape, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    if not carried:
        return Carried(out=out, lse=lse, sinks=sinks, counter=counter)
    return Carried(acc, m, l, out, lse, sinks, counter)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The softmax_scale; for None, the default."""
    return q.size(3) ** -0.5 if scale is None else scale


def statistics_of(
    out: Tensor, dout: Tensor, lse: Tensor, config: Config = LARGE
) -> tuple[Tensor, Tensor]:
    """-lse in base 2, and delta."""
    with poisoned_empty():
        minus_lse, delta = torch.empty(2, *lse.shape, device=DEVICE)
    delta_launch(out, dout, lse, minus_lse, delta, config).run()
    return minus_lse, delta


def grad_q(
    inputs: Inputs,
    lse: Tensor,
    delta: Tensor,
    steps: Sequence[Step],
    config: Config,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """dq in float32, without softmax_scale."""
    q, k, v, dout = inputs
    dq = torch.zeros(q.shape, device=DEVICE)
    options = {"softmax_scale": scale_of(q, scale), "softcap": softcap}
    for tiles in steps:
        table = q_table(tiles, config)
        dq_launch(q, k, v, dout, lse, delta, dq, table, config, **options).run()
    return dq


def grad_kv(
    inputs: Inputs,
    lse: Tensor,
    delta: Tensor,
    steps: Sequence[Step],
    config: Config,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """dk without softmax_scale and dv, in float32."""
    q, k, v, dout = inputs
    dk, dv = (torch.zeros(x.shape, device=DEVICE) for x in (k, v))
    options = {"softmax_scale": scale_of(q, scale), "softcap": softcap}
    for tiles in steps:
        table = kv_table(tiles, config)
        dkdv_launch(q, k, v, dout, lse, delta, dk, dv, table, config, **options).run()
    return dk, dv


def attend(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """Runs forward and backward, without the gradient of the sinks: no kernel computes it."""
    scores = {"scale": scale, "softcap": softcap}
    out, lse = forward(inputs, steps, config, sinks=sinks, **scores)
    statistics = statistics_of(out, inputs.dout, lse)
    dq = grad_q(inputs, *statistics, steps, config, **scores)
    dk, dv = grad_kv(inputs, *statistics, steps, config, **scores)
    factor = scale_of(inputs.q, scale)
    grads = (x.to(inputs.q.dtype) for x in (dq * factor, dk * factor, dv))
    return Expected(out, lse, *grads)


def without_sinks(expected: Expected) -> Expected:
    """Drops the gradient of the sinks, which the ring computes and no kernel does."""
    return replace(expected, dsinks=None)


# -- blocks


@dataclass
class Seen:
    """Counts, by (program, first column) of a block, how often it is loaded and masked."""

    loaded: Counter[tuple[int, int]]
    masked: Counter[tuple[int, int]]


def record(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Seen:
    """Records from here on the blocks that a module's kernels load and mask (interpreter only)."""
    seen = Seen(Counter(), Counter())
    load_block, visible_pairs = module.load_block, module.visible_pairs
    latest = (-1, -1)

    def load(ptr: Any, start: Any, *args: Any) -> Any:
        nonlocal latest
        latest = operator.index(tl.program_id(0)), operator.index(start)
        seen.loaded[latest] += 1
        return load_block(ptr, start, *args)

    def mask(*args: Any) -> Any:
        seen.masked[latest] += 1
        return visible_pairs(*args)

    monkeypatch.setattr(module, "load_block", load)
    monkeypatch.setattr(module, "visible_pairs", mask)
    return seen


def blocks_of(table: StepTable, dense: Tensor, block_cols: int, heads: int) -> Seen:
    """The blocks to load (with a visible pair) and to mask (with a masked pair, too), by the mask.

    Args:
        table: only its blocks of rows are read.
        dense: (rows, cols) booleans of the step.
        block_cols: columns of a block; those beyond the last are masked.
        heads: programs for each block of rows.
    """
    seen = Seen(Counter(), Counter())
    for block, (start, stop, _, _) in enumerate(table.blocks[: table.num_blocks].tolist()):
        for col in range(0, dense.size(1), block_cols):
            pairs = dense[start:stop, col : col + block_cols]
            for head in range(heads if bool(pairs.any()) else 0):
                program = block * heads + head
                seen.loaded[program, col] += 1
                if int(pairs.sum()) < (stop - start) * block_cols:
                    seen.masked[program, col] += 1
    return seen


def times(counts: Counter[tuple[int, int]], factor: int) -> Counter[tuple[int, int]]:
    return Counter({key: factor * count for key, count in counts.items()})


def patched_select(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Makes every kernel use this config."""
    select: Callable[..., Config] = lambda *args, **kwargs: config  # noqa: E731
    monkeypatch.setattr("ring_attn.kernels.configs.select", select)
