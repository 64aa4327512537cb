"""Calls in which one rank differs from the others, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, masks, ring_attention, tree_decode
from ring_attn.transport.ranks.group import rank_group
from tests.distributed.pool import backend, device

WORLD_SIZE = 4
ROWS = 6
SEQLEN = WORLD_SIZE * ROWS
TIMEOUT = 4.0
ODD = 1
Arguments = dict[str, Any]
Group = dist.ProcessGroup | None

STRATEGIES = ("ring", "double_ring", "all_gather", "ulysses", "hybrid", "q_exchange", "auto")
SIZES: Arguments = {
    "batch": 1,
    "rows": ROWS,
    "nheads": 4,
    "nheads_kv": 4,
    "headdim": 8,
    "headdim_v": 8,
    "dtype": torch.float32,
}
USUAL: Arguments = {"causal": True, "softmax_scale": 0.25, "layout": "contiguous"}
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])
WITH_GRADIENT = torch.zeros(4, requires_grad=True)
SPANS, OTHER_SPANS = (masks.spans(SEQLEN, [(3, end)]) for end in (9, 10))
SHORTER = SequenceLayout.boundaries([0, 5, 11, 17, SEQLEN - 1])


def documents(*boundaries: int) -> Tensor:
    return torch.tensor([0, *boundaries, SEQLEN], dtype=torch.int32)


# Name -> arguments of most ranks, arguments of the odd rank, and words of the error in debug mode
# if the odd rank is rank 1.
DIFFERENT: dict[str, tuple[Arguments, Arguments, str]] = {
    **{
        name: (
            {name: usual},
            {name: odd},
            f"{name}: global rank 1 has {odd!r}, the other 3 have {usual}",
        )
        for name, usual, odd in (
            ("dtype", torch.float16, torch.bfloat16),  # of one size
            ("batch", 1, 2),
            ("nheads", 4, 8),
            ("nheads_kv", 4, 2),
            ("headdim", 8, 16),
            ("headdim_v", 8, 16),
            ("softmax_scale", 0.25, 0.5),
            ("softcap", 5.0, 6.0),
            ("causal", True, False),
            ("window_size", (9, 0), (7, 0)),
            ("requires_grad", True, False),
        )
    },
    "rows": (
        {},
        {"rows": ROWS + 2},
        "seqlen_q: global rank 1 has 32, the other 3 have 24|seqlen_k:",
    ),
    # A message longer than its buffer.
    "more rows": ({}, {"rows": 5 * ROWS}, "seqlen_q:|seqlen_k: global rank 1 has 120"),
    "heads of one size": (
        {},
        {"nheads": 8, "nheads_kv": 8, "headdim": 4},
        "nheads:|nheads_kv:|headdim: global rank 1 has 4, the other 3 have 8",
    ),
    "sinks": ({}, {"sinks": SINKS}, "sinks: global rank 1 has True, the other 3 have False"),
    "values of sinks": (
        {"sinks": SINKS},
        {"sinks": SINKS.flip(0)},
        "values of sinks: global rank 1 has",
    ),
    "gradient of the sinks": (
        {"requires_grad": False},
        {"requires_grad": False, "sinks": WITH_GRADIENT},
        "requires_grad: global rank 1 has True, the other 3 have False",
    ),
    "documents": (
        {"cu_seqlens": documents(9)},
        {"cu_seqlens": documents(10)},
        "cu_seqlens: global rank 1 has (0, 10, 24), the other 3 have (0, 9, 24)|whole sequence",
    ),
    "documents of keys": (
        {},
        {"cu_seqlens": documents(), "cu_seqlens_k": documents()},
        "cu_seqlens:|cu_seqlens_k: global rank 1 has (0, 24), the other 3 have None",
    ),
    "mask": ({"causal": False, "mask": SPANS}, {"causal": False, "mask": OTHER_SPANS}, "mask:"),
    "layout": (
        {},
        {"layout": SHORTER},
        "layout: global rank 1 has ('boundaries([0, 5, 11, 17, 23])'",
    ),
    "strategy": ({}, {"strategy": "exchange"}, "strategy: global rank 1 has"),
    "backend": ({}, {"backend": "reference"}, "backend: global rank 1 has 'reference', the other"),
    "timeout": ({}, {"transport": TransportOptions(timeout=20)}, "transport: global rank 1 has"),
}
# Differences that change more arguments than those named here.
MORE = (
    "rows",
    "more rows",
    "layout",
    "documents",
    "documents of keys",
    "softcap",
    "sinks",
    "gradient of the sinks",
    "strategy",
    "heads of one size",
)


def call(group: Group, *, backward: bool = True, **arguments: Any) -> Tensor:
    given = {"transport": TransportOptions(timeout=TIMEOUT), "group": group, "backend": backend()}
    options = USUAL | given | arguments
    if isinstance(sinks := options.get("sinks"), Tensor):
        options["sinks"] = sinks.to(device())
    sizes = {name: options.pop(name, usual) for name, usual in SIZES.items()}
    layout = options["layout"]
    if isinstance(layout, SequenceLayout):
        sizes["rows"] = layout.shard_len(dist.get_rank(group))
    requires_grad = options.pop("requires_grad", True)
    q, k, v = (
        torch.ones(
            sizes["batch"],
            sizes["rows"],
            sizes[heads],
            sizes[dim],
            dtype=sizes["dtype"],
            requires_grad=requires_grad,
            device=device(),
        )
        for heads, dim in (
            ("nheads", "headdim"),
            ("nheads_kv", "headdim"),
            ("nheads_kv", "headdim_v"),
        )
    )
    if "cu_seqlens" in options:
        q, k, v = (x[0] for x in (q, k, v))
    out = ring_attention(q, k, v, **options)
    if backward and out.requires_grad:
        out.sum().backward()
    return out


# Name -> what most ranks do, in order, and what the odd rank does, see `do`.
HAPPENED = {
    "skipped": ("call other", "other"),
    "skipped forward": ("infer infer infer call", "infer infer call"),
    "refused": ("call call", "bad call"),
    "late": ("call short", "call sleep short"),
    "backwards swapped": ("forward forward back-1 back-2", "forward forward back-2 back-1"),
    "backward left out": ("forward back-1 call", "forward call"),
}


def wait_for_a_failure(group: Group) -> None:
    """Wait until another rank has written down its error."""
    assert group is not None
    notes = rank_group(group).connection.notes
    assert notes is not None
    while notes.failure() is None:
        time.sleep(0.05)


def do(group: Group, order: str, **arguments: Any) -> None:
    outs: list[Tensor] = []
    for name in order.split():
        if name == "sleep":
            wait_for_a_failure(group)
        elif name == "bad":
            with pytest.raises(ValueError):
                call(group, **arguments, softcap=-1.0)
        elif name == "forward":
            outs.append(call(group, **arguments, backward=False))
        elif name.startswith("back"):
            outs[int(name[-2:])].sum().backward()
        else:
            changes: Arguments = {
                "call": {},
                "other": {"softmax_scale": 0.75},
                "infer": {"requires_grad": False},
                "short": {"transport": TransportOptions(timeout=1.0)},
            }
            call(group, **arguments, **changes[name])


ROOM = {"layout": SequenceLayout.contiguous(4 * ROWS, WORLD_SIZE)}
DECODES: dict[str, tuple[Arguments, Arguments]] = {
    "scale": ({}, {"softmax_scale": 0.5}),
    "softcap": ({"softcap": 5.0}, {"softcap": 6.0}),
    "values of sinks": ({"sinks": SINKS}, {"sinks": SINKS.flip(0)}),
    "queries": ({}, {"queries": 3}),
    "dtype of one size": ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    "window": ({"window_size": (9, 0)}, {"window_size": (7, 0)}),
    "causal": ({"queries": 2}, {"queries": 2, "causal": False}),
    "cache_seqlens": ({"cache_seqlens": 20}, {"cache_seqlens": 21}),
    "one length": ({}, {"cache_seqlens": 4 * ROWS}),
}


def decode(
    group: Group, queries: int = 2, dtype: torch.dtype = torch.float32, **arguments: Any
) -> Tensor:
    rows, cache = (torch.ones(1, n, 4, 8, dtype=dtype, device=device()) for n in (queries, ROWS))
    transport = TransportOptions(timeout=TIMEOUT)
    given = {"group": group, "transport": transport, "backend": backend()}
    options = {**given, **ROOM, **arguments}
    return tree_decode(rows, cache, cache, **options)
