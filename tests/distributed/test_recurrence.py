"""Recurrences over split sequences, against the whole, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from ring_attn import SequenceLayout, stats, unshard
from ring_attn.profiling import collect
from ring_attn.recurrence import Part, Piece, causal_conv, linear_attention, recurrence
from tests.bounds import assert_close
from tests.distributed.pool import on_ranks
from tests.distributed.test_neighbours import layouts
from tests.hf_models import all_in_float64
from tests.refusals import refused

Inputs = dict[str, Tensor]
SEQLENS = (1, 17, 40)
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_whole(
    ranks: Any, kind: str, world_size: int
) -> None:
    ranks(world_size).run(values_and_gradients, kind)


def values_and_gradients(kind: str) -> None:
    for seqlen in SEQLENS:
        several = [1, 0, 5, 7, seqlen - 13]
        for layout in layouts(seqlen, dist.get_world_size()):
            for documents in ([seqlen], several) if seqlen > 13 else ([seqlen],):
                compare(kind, layout, documents)


def compare(kind: str, layout: SequenceLayout, documents: list[int]) -> None:
    split, whole = KINDS[kind]
    rank, x = dist.get_rank(), inputs(layout.seqlen)
    shared = {}
    if kind != "delta rule":
        x.pop("beta")
    if kind == "convolution":
        shared["weight"] = torch.randn(6, 1, WIDTH, dtype=torch.float64)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    expected = by_document(lambda part: whole(part | shared), leaves, documents)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(x.values()), dout, allow_unused=True)

    cu_seqlens = torch.tensor([0, *accumulate(documents)]) if len(documents) > 1 else None
    own = {name: layout.shard(t.detach(), rank).requires_grad_() for name, t in x.items()}
    out = split(own | shared, {"layout": layout, "cu_seqlens": cu_seqlens})
    # Sums of at most 40 terms of about 1, in another order.
    bound = 1e3 * torch.finfo(torch.float64).eps
    close = partial(torch.testing.assert_close, rtol=bound, atol=bound)
    close(out, layout.shard(expected, rank))
    dx = layout.shard(dout, rank)
    got = torch.autograd.grad(out, list(own.values()), dx, allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            close(a, layout.shard(b, rank))


def in_16_bits(autocast: bool) -> None:
    """Inputs in bfloat16, states and decays in float32: errors as of the kernel on the whole."""
    rank, layout = dist.get_rank(), SequenceLayout.zigzag(150, dist.get_world_size())
    torch.manual_seed(1)
    shape = 1, layout.seqlen, 4
    x = {name: torch.randn(*shape, 16).bfloat16() for name in ("query", "key", "value")}
    x |= {"g": -0.1 * torch.rand(shape), "beta": torch.rand(shape).bfloat16()}
    dout = torch.randn(*shape, 16).bfloat16()

    def gradients(out: Tensor, leaves: Inputs, dout: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))]

    def whole(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = {name: t.to(dtype or t.dtype, copy=True).requires_grad_() for name, t in x.items()}
        out, _ = torch_chunk_gated_delta_rule(**leaves, use_qk_l2norm_in_kernel=True)
        return gradients(out, leaves, dout)

    own = {name: layout.shard(t, rank).requires_grad_() for name, t in x.items()}
    rows = {name: own[name] for name in ("g", "beta")}
    tensors = [own[name] for name in ("query", "key", "value")]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = whole(None)
        out = linear_attention(
            torch_chunk_gated_delta_rule, *tensors, rows=rows, layout=layout,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        got = gradients(out, own, layout.shard(dout, rank))
    with all_in_float64():
        oracle = whole(torch.float64)
    for name, *results in zip(("out", *x), got, oracle, plain, strict=True):
        assert_close(name, unshard(results[0].detach(), layout), *results[1:])


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2)
def test_16_bits(autocast: bool) -> None:
    in_16_bits(autocast)


@on_ranks(3)
def test_bytes_do_not_depend_on_the_length_and_nan_stays_in_its_document() -> None:
    rank, sent = dist.get_rank(), set()
    for seqlen in (13, 130):
        layout = SequenceLayout.zigzag(seqlen, 3)
        x = inputs(seqlen)
        x["v"][:, 4:6] = torch.nan
        own = {name: layout.shard(t, rank).requires_grad_() for name, t in x.items()}
        place = {"layout": layout, "cu_seqlens": torch.tensor([0, 3, 7, seqlen])}
        with collect():
            out = delta_rule(own, place)
        positions = layout.position_ids(rank)
        inside = (positions >= 4) & (positions < 7)
        assert bool(out[:, inside].isnan().all()) and not bool(out[:, ~inside].isnan().any())
        sent.add(stats().forward.bytes_sent)
    # Two runs a rank, of each the decay (3, 3) and the state (3, 5) for 2 x 2 heads, in float64.
    assert sent == {2 * 2 * 4 * (9 + 15) * 8}


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    layout, group = SequenceLayout.zigzag(8, 2), dist.new_group()
    own = {name: layout.shard(t, dist.get_rank()) for name, t in inputs(8).items()}
    with refused(ValueError, "at least 9"):
        delta_rule(own, {"layout": layout, "cu_seqlens": torch.tensor([0, 9]), "group": group})
    with refused(TypeError, "layout"):
        delta_rule(own, {"layout": "zigzag", "group": group})
    with refused(ValueError, "must have 4 rows|got 5"):
        longer = {
            name: functional.pad(t, (*(0, 0) * (t.ndim - 2), 0, 1)) for name, t in own.items()
        }
        delta_rule(longer, {"layout": layout, "group": group})
    with refused(ValueError, "width|at least 1"):
        causal_conv(lambda x: x, own["q"], 0, layout=layout, group=group)
    with refused(TypeError, "decay"):
        recurrence(
            lambda piece: Part(piece.of(own["q"]), own["v"][:, 0], None, lambda out, start: out),
            layout, group=group,
        )  # fmt: skip


@pytest.mark.gloo
@on_ranks(2)
def test_ranks_whose_states_differ_in_shape_are_told() -> None:
    layout, group = SequenceLayout.zigzag(8, 2), dist.new_group()
    own = {name: layout.shard(t, dist.get_rank()) for name, t in inputs(8).items()}
    with refused(RuntimeError, "shapes of decay and state"):
        heads = slice(0, 2 - dist.get_rank())
        odd = {name: t[:, :, heads] for name, t in own.items()}
        delta_rule(odd, {"layout": layout, "group": group})
