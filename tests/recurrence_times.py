"""Time of recurrent layers on split rows, against the layer's own time at as many rows.

    python -m tests.recurrence_times FILE SEQLEN ITERS

Each of 2 ranks times the layer's own function (alone: its rows as a whole sequence) and the split
one in turn, in one run; a time is the slowest rank's. The functions are transformers' torch code.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from ring_attn.bench.timing import turned
from ring_attn.cli.env import machine
from ring_attn.core.layout import SequenceLayout
from ring_attn.models.recurrent import SPLITS, Place
from ring_attn.testing.launch import run_ranks, timed_on_ranks
from ring_attn.transport.groups import check_group

HEADS, HEADDIM = 4, 64
LAYOUTS, MODES = ("contiguous", "zigzag"), ("fwd", "fwd_bwd")

# Kinds of layers: the function, and the model of transformers that has it.
KINDS = {
    "gated delta rule": ("torch_chunk_gated_delta_rule", "qwen3_next"),
    "mamba2": ("mamba2_chunk_scan", "mamba2"),
}


def measure(seqlen: int, iters: int) -> list[dict[str, Any]]:
    """On each rank: samples of every case, and the ratio of their medians."""
    rows = []
    for kind, layout_name, mode in product(KINDS, LAYOUTS, MODES):
        name, model = KINDS[kind]
        function = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
        layout = SequenceLayout.from_name(layout_name, seqlen, dist.get_world_size())
        place = Place(layout, None, check_group(None))
        given = inputs(kind, layout.shard_len(dist.get_rank()))
        calls = {"alone": function, "split": partial(SPLITS[name], function, place)}
        ms: dict[str, list[float]] = {impl: [] for impl in calls}
        for turn in range(-1, iters):
            for impl in turned([*calls], turn):
                seconds = timed_on_ranks(partial(step, calls[impl], given, mode == "fwd_bwd"))
                ms[impl] += [1e3 * seconds] * (turn >= 0)
        ratio = median(ms["split"]) / median(ms["alone"])
        rows.append({"kind": kind, "layout": layout_name, "mode": mode, "ms": ms, "ratio": ratio})
    return rows


def step(call: Any, given: dict[str, Any], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        result = call(**given)
    out = result[0] if isinstance(result, tuple) else result
    if backward:
        out.sum().backward()


def inputs(kind: str, rows: int) -> dict[str, Any]:
    """A layer's arguments for so many rows, in float32."""
    torch.manual_seed(dist.get_rank())

    def normal(*dims: int) -> Tensor:
        return torch.randn(1, rows, HEADS, *dims)

    x, y, z = (normal(HEADDIM) for _ in range(3))
    if kind == "mamba2":
        given = {"hidden_states": x, "dt": normal(), "B": y, "C": z}
        options: dict[str, Any] = {"A": -torch.rand(HEADS), "chunk_size": 64, "dt_softplus": True}
    else:
        given = {"query": x, "key": y, "value": z, "beta": normal().sigmoid()}
        given |= {"g": logsigmoid(normal() + 3)}
        options = {"use_qk_l2norm_in_kernel": True}
    return {name: x.requires_grad_() for name, x in given.items()} | options


if __name__ == "__main__":
    found = run_ranks(measure, 2, *map(int, sys.argv[2:]), threads=1, device="cpu")[0]
    Path(sys.argv[1]).write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))
    for row in found:
        print(*(row[key] for key in ("kind", "layout", "mode")), f"{row['ratio']:.2f} x", sep=", ")
