"""Recurrences over split sequences, against the whole, step by step in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from ring_attn import SequenceLayout, stats, unshard
from ring_attn.core.runs import plan_states
from ring_attn.profiling import collect
from ring_attn.recurrence import Part, causal_conv, linear_attention, recurrence
from ring_attn.sequence import states
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close
from tests.distributed.pool import on_ranks
from tests.distributed.test_neighbours import layouts
from tests.hf_models import all_in_float64
from tests.recurrences import (
    KINDS,
    Inputs,
    always,
    compare,
    compare_start_states,
    delta_rule,
    inputs,
    step_by_step,
)
from tests.refusals import refused

SEQLENS = (1, 17, 40)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (3, "scan"),
        pytest.param(1, "gather", marks=pytest.mark.slow),
        pytest.param(2, "gather", marks=pytest.mark.slow),
        pytest.param(4, "scan", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_whole(
    ranks: Any, kind: str, world_size: int, way: str
) -> None:
    ranks(world_size).run(values_and_gradients, kind, way)


def values_and_gradients(kind: str, way: str) -> None:
    with always(way):
        for seqlen in SEQLENS:
            several = [0, 1, 1, 6, 13, seqlen]
            for layout in layouts(seqlen, dist.get_world_size()):
                compare(kind, layout, [0, seqlen], 0, silent=seqlen // 2)
                if seqlen > 13:
                    compare(kind, layout, several, 0)


@pytest.mark.parametrize("way", ["gather", "scan"])
@on_ranks(3)
def test_start_states_alone_and_the_gradients_of_decays(way: str) -> None:
    with always(way):
        for layout in layouts(40, dist.get_world_size()):
            for cuts in ([0, 40], [0, 1, 1, 6, 13, 40]):
                compare_start_states(layout, cuts)


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2)
def test_16_bits(autocast: bool) -> None:
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
        noisy = noisy_runs(lambda: whole(None))
        out, _ = linear_attention(
            torch_chunk_gated_delta_rule,
            *tensors,
            rows=rows,
            layout=layout,
            use_qk_l2norm_in_kernel=True,
        )
        got = gradients(out, own, layout.shard(dout, rank))
    with all_in_float64():
        oracle = whole(torch.float64)
    for name, result, exact, *runs in zip(("out", *x), got, oracle, *noisy, strict=True):
        assert_close(name, unshard(result.detach(), layout), exact, runs)


@pytest.mark.parametrize("way", ["gather", "scan"])
@on_ranks(3)
def test_bytes_do_not_depend_on_the_length_and_nan_stays_in_its_document(way: str) -> None:
    rank, sent = dist.get_rank(), set()
    for seqlen, cuts in ((13, (0, 13)), (130, (0, 130)), (130, (0, 3, 7, 130))):
        layout = SequenceLayout.zigzag(seqlen, 3)
        x = inputs(seqlen)
        x["v"][:, 4:6] = torch.nan
        own = {name: layout.shard(t, rank).requires_grad_() for name, t in x.items()}
        with collect(), always(way):
            out, _ = delta_rule(own, {"layout": layout, "cu_seqlens": torch.tensor(cuts)})
            dx = torch.autograd.grad(out[~out.isnan()].sum(), list(own.values()))
            # Of each run the decay (3, 3) and the state (3, 5) for 2 x 2 heads, in float32.
            size = 2 * 2 * (9 + 15) * 4
            for direction in ("forward", "backward"):
                plan = plan_states(layout, cuts, size, backward=direction == "backward")
                assert plan.algorithm == way
                assert getattr(stats(), direction).bytes_sent == plan.sent(rank) * size
        if len(cuts) == 2:
            sent.add((stats().forward.bytes_sent, stats().backward.bytes_sent))
            continue
        positions = layout.position_ids(rank)
        inside = (positions >= 4) & (positions < 7)
        assert bool(out[:, inside].isnan().all()) and not bool(out[:, ~inside].isnan().any())
        assert not any(bool(d[:, ~inside].isnan().any()) for d in dx)
    assert len(sent) == 1


@pytest.mark.gloo
@pytest.mark.parametrize("width", [1, 3])
@on_ranks(2)
def test_a_convolution_on_a_rank_without_rows(width: int) -> None:
    """One row on two ranks: torch's convolution refuses an input without rows."""
    layout, rank = SequenceLayout.contiguous(1, 2), dist.get_rank()
    torch.manual_seed(0)
    whole, weight = torch.randn(2, 1, 4), torch.randn(4, 1, width)
    own = layout.shard(whole, rank).requires_grad_()

    def conv(rows: Tensor) -> Tensor:
        return functional.conv1d(functional.pad(rows.mT, (width - 1, 0)), weight, groups=4).mT

    out = causal_conv(conv, own, width, layout=layout)
    (gradient,) = torch.autograd.grad(out.sum(), own)
    assert torch.equal(unshard(out.detach(), layout), conv(whole))
    assert torch.equal(unshard(gradient, layout), weight[:, 0, -1].expand(2, 1, 4))


@pytest.mark.gloo
@on_ranks(2)
def test_outputs_can_be_changed_in_place() -> None:
    layout = SequenceLayout.zigzag(40, 2)
    own = {name: layout.shard(t, dist.get_rank()) for name, t in inputs(40).items()}
    for kind in ("decayed sum", "delta rule"):
        leaves = {name: t.clone().requires_grad_() for name, t in own.items()}
        out, _ = KINDS[kind][0](leaves, {"layout": layout})
        out.mul_(2.0).sum().backward()
        assert leaves["q"].grad is not None


@pytest.mark.gloo
@on_ranks(2)
def test_compiled_code_runs_recurrences_as_they_are() -> None:
    layout = SequenceLayout.zigzag(40, 2)
    own = {name: layout.shard(t, dist.get_rank()) for name, t in inputs(40).items()}
    for kind in ("decayed sum", "delta rule"):
        split, place = KINDS[kind][0], {"layout": layout}
        compiled = torch.compile(lambda x: split(x, place)[0] + 1.0, backend="eager")  # noqa: B023
        assert torch.equal(compiled(own), split(own, place)[0] + 1.0)
    torch.compiler.reset()


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

    def transposed(*x: Tensor, **rows: Any) -> tuple[Tensor, Tensor]:
        out, end = step_by_step(*x, **rows)
        return out, end.mT

    with refused(ValueError, "state must have the last dims"):
        linear_attention(
            transposed,
            *(own[name] for name in "qkv"),
            layout=layout,
            group=group,
            rows={name: own[name] for name in ("decay", "beta")},
        )
    with refused(ValueError, "width|at least 1"):
        causal_conv(lambda x: x, own["q"], 0, layout=layout, group=group)
    with refused(TypeError, "decay"):
        given: Any = (own["q"], own["v"][:, 0], None, lambda out, start: out)
        recurrence(lambda piece: Part(*given), layout, group=group)


@pytest.mark.parametrize("shape", [(5,), (1, 2, 2, 3)])
@on_ranks(2)
def test_a_decay_that_does_not_fit_is_refused_before_anything_is_sent(
    shape: tuple[int, ...],
) -> None:
    layout, group, end = SequenceLayout.zigzag(8, 2), dist.new_group(), torch.zeros(2, 2, 3)
    part = Part(torch.zeros(2, 2, 3), end, torch.ones(shape), lambda out, start: out)
    with (
        mock.patch.object(states, "open_p2p", side_effect=AssertionError("it would send")),
        refused(ValueError, "decay must broadcast to the shape"),
    ):
        recurrence(lambda piece: part, layout, group=group)


@pytest.mark.gloo
@on_ranks(2)
def test_ranks_whose_states_differ_in_shape_are_reported() -> None:
    layout, group = SequenceLayout.zigzag(8, 2), dist.new_group()
    own = {name: layout.shard(t, dist.get_rank()) for name, t in inputs(8).items()}
    with refused(RuntimeError, "shapes of decay and state"):
        heads = slice(0, 2 - dist.get_rank())
        odd = {name: t[:, :, heads] for name, t in own.items()}
        delta_rule(odd, {"layout": layout, "group": group})
