"""Recurrent layers in float64, split and whole, and what of one is wrong on drawn layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ring_attn import SequenceLayout
from ring_attn.recurrence import Part, Piece, causal_conv, linear_attention, recurrence

Inputs = dict[str, Tensor]
WIDTH = 4


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A delta rule with a decay of each channel of the keys: Kimi's, and others as its cases."""
    batch, _, heads, headdim = k.shape
    state = initial_state
    if state is None:
        state = v.new_zeros(batch, heads, headdim, v.size(-1))
    outs = []
    for q_, k_, v_, d_, b_ in zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True):
        state = state * d_[..., None]
        seen = torch.einsum("bhk,bhkv->bhv", k_, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k_, b_[..., None] * (v_ - seen))
        outs.append(torch.einsum("bhk,bhkv->bhv", q_, state))
    return torch.stack(outs, 1), state


def delta_rule(x: Inputs, place: dict[str, Any]) -> Tensor:
    rows = {"decay": x["decay"], "beta": x["beta"]}
    return linear_attention(step_by_step, x["q"], x["k"], x["v"], rows=rows, **place)


def whole_delta_rule(x: Inputs) -> Tensor:
    return step_by_step(**x)[0]


def running(x: Inputs) -> tuple[Tensor, Tensor]:
    """A decayed sum of k v, read by q, and the state after it: the decays are those of heads."""
    state = x["v"].new_zeros(*x["k"].shape[::2][:1], *x["k"].shape[2:], x["v"].size(-1))
    outs = []
    steps = (x[name].unbind(1) for name in ("q", "k", "v", "decay"))
    for q, k, v, decay in zip(*steps, strict=True):
        state = state * decay[..., :1, None] + k[..., None] * v[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q, state))
    return torch.stack(outs, 1), state


def decayed_sum(x: Inputs, place: dict[str, Any]) -> Tensor:
    def run(piece: Piece) -> Part:
        rows = {name: piece.of(tensor) for name, tensor in x.items()}
        out, end = running(rows)
        factors = rows["decay"][..., :1].cumprod(1)

        def add(out: Tensor, start: Tensor) -> Tensor:
            return out + torch.einsum("blhk,bhkv->blhv", rows["q"] * factors, start)

        return Part(out, end, factors[:, -1][..., None], add)

    return recurrence(run, **place)


def convolved(x: Inputs, place: dict[str, Any]) -> Tensor:
    return causal_conv(partial(conv, weight=x["weight"]), x["q"].flatten(2), WIDTH, **place)


def conv(rows: Tensor, weight: Tensor) -> Tensor:
    padded = functional.pad(rows.mT, (WIDTH - 1, 0))
    return functional.conv1d(padded, weight, groups=weight.size(0)).mT


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Inputs], Tensor]]] = {
    "delta rule": (delta_rule, whole_delta_rule),
    "decayed sum": (decayed_sum, lambda x: running(x)[0]),
    "convolution": (convolved, lambda x: conv(x["q"].flatten(2), x["weight"])),
}


def inputs(seqlen: int) -> Inputs:
    torch.manual_seed(0)
    shape = 2, seqlen, 2
    sizes = {"q": 3, "k": 3, "v": 5}
    x = {name: torch.randn(*shape, n, dtype=torch.float64) for name, n in sizes.items()}
    x["k"] = functional.normalize(x["k"], dim=-1)
    x["decay"] = 0.5 + 0.5 * torch.rand(*shape, 3, dtype=torch.float64)
    x["beta"] = torch.rand(shape, dtype=torch.float64)
    return x


def by_document(whole: Callable[[Inputs], Tensor], x: Inputs, cuts: list[int]) -> Tensor:
    """The layer applied to one document after another."""
    split = [t.split_with_sizes(cuts, 1) for t in x.values()]
    cut = [dict(zip(x, rows, strict=True)) for rows in zip(*split, strict=True)]
    return torch.cat([whole(part) for part in cut if part["q"].size(1)], 1)


def compare(kind: str, layout: SequenceLayout, cuts: Sequence[int], spoilt: int) -> None:
    """Asserts values and gradients on this rank; then with NaN in document `spoilt`, of the others.

    `cuts` are the boundaries of documents. All ranks make all exchanges before one of them asserts.
    """
    split, whole = KINDS[kind]
    rank, x = dist.get_rank(), inputs(layout.seqlen)
    documents = [b - a for a, b in pairwise(cuts)]
    place = {"layout": layout, "cu_seqlens": torch.tensor(cuts) if len(cuts) > 2 else None}
    if kind != "delta rule":
        x.pop("beta")
    shared = {}
    if kind == "convolution":
        shared["weight"] = torch.randn(6, 1, WIDTH, dtype=torch.float64)
    names = ["q"] if kind == "convolution" else list(x)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    expected = by_document(lambda part: whole(part | shared), leaves, documents)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x[name] for name in names], dout)
    inside = slice(*cuts[spoilt : spoilt + 2])
    positions = layout.position_ids(rank)
    others = (positions < inside.start) | (positions >= inside.stop)
    results = []
    for rows in (slice(None), others):
        own = {name: t.detach().clone() for name, t in x.items()}
        if rows is others:
            own["q"][:, inside] = own["v"][:, inside] = own["k"][:, inside] = torch.nan
        own = {name: layout.shard(t, rank).requires_grad_() for name, t in own.items()}
        out = split(own | shared, place)
        leaf = [own[name] for name in names]
        got = (out, *torch.autograd.grad(out, leaf, layout.shard(dout, rank)))
        results.append([(x[:, rows], layout.shard(y, rank)[:, rows])
                        for x, y in zip(got, (expected, *wanted), strict=True)])  # fmt: skip
    # Sums of at most 40 terms of about 1, in another order.
    bound = 1e3 * torch.finfo(torch.float64).eps
    for spoiled, pairs in zip((False, True), results, strict=True):
        for name, (a, b) in zip(("out", *names), pairs, strict=True):
            assert torch.allclose(a, b, rtol=bound, atol=bound), (name, rank, spoiled)
