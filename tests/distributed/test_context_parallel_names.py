"""The names of torch's context parallelism over gloo: its shards and rules, dense attention's rows.

Sharding and unsharding are compared with torch's own functions, which run on a CPU; torch's
attention does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from ring_attn import SequenceLayout
from ring_attn.integrations.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from ring_attn.models.sdpa import route_sdpa, sdpa_attention
from ring_attn.testing import Case, Heads, expected, noisy_runs
from tests.bounds import assert_close, assert_holds
from tests.cold import compile_cold
from tests.distributed.pool import mesh_of, on_ranks

pytestmark = pytest.mark.gloo  # code around calls; others run calls on streams


@contextmanager
def torch_options(**values: Any) -> Iterator[Any]:
    """Sets torch's own switches, and restores them at the end: torch's functions change them."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    mode = mock.patch.object(_attention, "_dispatch_mode", _attention._dispatch_mode)
    balance = values.get("enable_load_balance", True)
    with mode, mock.patch.object(options, "enable_load_balance", balance):
        yield _attention


class Use(NamedTuple):
    """One call inside of the context."""

    seqlen: int
    world_size: int = 2
    nheads_kv: int = 4
    rotate: str = "allgather"
    mask: str = "causal"
    scale: float | None = None

    @property
    def case(self) -> Case:
        heads = Heads(4, self.nheads_kv, 16, 16)
        return Case(self.mask, seqlen=self.seqlen, heads=heads, softmax_scale=self.scale)


USES = [
    Use(52, nheads_kv=2, scale=0.5),
    # Not a multiple of 2 x ranks: contiguous runs, of the lengths that torch makes.
    Use(50, rotate="alltoall", nheads_kv=2),
    Use(51, mask="full"),
    Use(8, world_size=3, nheads_kv=1),
    Use(66, world_size=3, rotate="alltoall"),
]


def run_use(use: Use) -> tuple[Tensor, ...]:
    """This rank's positions, and the rows of out, dq, dk, dv at these positions.

    A backward outside of the context has the bits of a backward inside.
    """
    set_rotate_method(use.rotate)
    causal, gqa = use.mask == "causal", use.nheads_kv != 4
    try:
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in use.case.build_inputs())
        positions = torch.arange(use.seqlen)
        buffers = [q, k, v, dout, positions]
        with context_parallel(mesh_of(), buffers=buffers, buffer_seq_dims=[2, -2, 2, 2, 0]):
            mine, dmine = positions.clone(), dout.clone()
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(
                *leaves, is_causal=causal, scale=use.scale, enable_gqa=gqa
            )
            inside = torch.autograd.grad(out, leaves, dmine, retain_graph=True)
        grads = torch.autograd.grad(out, leaves, dmine)
        assert all(map(torch.equal, grads, inside))
        return mine, *(x.detach().transpose(1, 2) for x in (out, *grads))
    finally:
        set_rotate_method("allgather")


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.seqlen}-{use.world_size}")
def test_attention_inside_is_dense_attention(ranks: Any, one_thread: None, use: Use) -> None:
    ran = zip(*ranks(use.world_size).run(run_use, use), strict=True)
    positions, *whole = (torch.cat(parts, min(1, parts[0].ndim - 1)) for parts in ran)
    assert positions.sort().values.equal(torch.arange(use.seqlen))
    named = zip(("out", "dq", "dk", "dv"), whole, strict=True)
    got = {name: x.index_select(1, positions.argsort()) for name, x in named}
    assert_holds(got, *expected(use.case))


@on_ranks(2)
def test_shards_are_those_of_torch() -> None:
    """Shards have the order and lengths of torch's own functions; unshard restores the whole."""
    mesh = mesh_of()
    for seqlen in (52, 50, 51):
        for enabled in (True, False):
            whole = torch.randn(2, seqlen, 3, generator=torch.Generator().manual_seed(0))
            try:
                with torch_options(enable_load_balance=enabled) as attention:
                    balancer = attention._create_default_load_balancer(seqlen, 2, "cpu")
                    (theirs,) = attention._context_parallel_buffers(mesh, [whole], [1], balancer)
            except AssertionError:
                # Some versions of torch refuse lengths that they would not balance.
                assert enabled and seqlen % 4, (seqlen, enabled)
                continue
            with torch_options(enable_load_balance=enabled):
                buffer = whole.clone()
                with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                    assert buffer.equal(theirs), (seqlen, enabled)
                    (again,) = context_parallel_unshard(mesh, [buffer.clone()], [1])
                assert again.equal(whole) and buffer.equal(whole), (seqlen, enabled)


@on_ranks(2)
def test_buffers_are_restored() -> None:
    """Buffers get back values, memory and strides, except buffers that shall stay shards."""
    mesh = mesh_of()
    base = torch.randn(5, 8, 3)
    strided, kept, left = base.transpose(0, 1), torch.randn(8), torch.randn(8)
    before = [x.clone() for x in (base, kept)]
    pointers, strides = [strided.data_ptr(), kept.data_ptr()], strided.stride()
    arguments: dict[str, Any] = {
        "buffers": [strided, kept, left],
        "buffer_seq_dims": [0, 0, -1],
        "no_restore_buffers": {left},
    }
    with pytest.raises(KeyError), context_parallel(mesh, **arguments):
        assert [len(x) for x in (strided, kept, left)] == [4, 4, 4]
        kept.zero_()  # a shard's own memory
        raise KeyError("in the body")
    assert base.equal(before[0]) and strided.equal(base.transpose(0, 1))
    assert kept.equal(before[1]) and [strided.data_ptr(), kept.data_ptr()] == pointers
    assert strided.stride() == strides and len(left) == 4


@on_ranks(2)
def test_only_inside_and_only_this_function() -> None:
    """The function object stays the same, and other threads get plain attention."""
    q = torch.randn(1, 2, 6, 8)
    function, plain = F.scaled_dot_product_attention, F.scaled_dot_product_attention(q, q, q)
    with context_parallel(mesh_of()):
        assert F.scaled_dot_product_attention is function
        routed = function(q, q, q * dist.get_rank())
        with ThreadPoolExecutor(1) as other_thread:
            assert other_thread.submit(function, q, q, q).result().equal(plain)
    assert not routed.equal(function(q, q, q * dist.get_rank()))
    assert F.scaled_dot_product_attention(q, q, q).equal(plain)


@on_ranks(2)
def test_runs_of_any_lengths_are_joined_and_balancers_refused() -> None:
    mesh = mesh_of()
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotImplementedError, match="load_balancer must be None"):
        context_parallel_unshard(mesh, [x], [2], object())
    with pytest.raises(ValueError, match="one dim for each buffer, got 0 for 1"):
        context_parallel_unshard(mesh, [x], [])
    parts = x[..., :11] if dist.get_rank() == 0 else x[..., 11:]
    assert context_parallel_unshard(mesh, [parts], [2])[0].equal(x)


@on_ranks(2)
def test_autocast_rounds_as_torch_does() -> None:
    """Autocast rounds inputs to its dtype, but leaves float64."""
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0)).unbind()
    with context_parallel(mesh_of()):
        expected = F.scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v)))
        with torch.autocast("cpu", torch.bfloat16):
            got = F.scaled_dot_product_attention(q.bfloat16(), k, v)
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert got.dtype == torch.bfloat16 and got.equal(expected)
    assert exact.dtype == torch.float64


@on_ranks(2)
def test_layers_of_torch_are_taken_along() -> None:
    """nn.MultiheadAttention and a transformer layer, also where torch has a fused path."""
    mesh, rank = mesh_of(), dist.get_rank()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 12, 16)
    layout = SequenceLayout.zigzag(12, 2)
    mine = layout.shard(x, rank)

    def shards(runs: list[Tensor]) -> list[Tensor]:
        return [layout.shard(run, rank) for run in runs]

    causal = nn.Transformer.generate_square_subsequent_mask
    for training, grad in ((True, True), (False, False)):  # the second has a fused path
        layer.train(training)
        with torch.set_grad_enabled(grad):
            expected = layer.double()(x.double())
            noisy = noisy_runs(lambda: layer.float()(x))
            with context_parallel(mesh):
                got = layer(mine)
            assert_close("layer", got, layout.shard(expected, rank), shards(noisy))

    def whole(x: Tensor) -> Tensor:
        mask = causal(12, dtype=x.dtype)
        layer = copy.deepcopy(attention).to(x.dtype)
        out, _ = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        return out

    exact, noisy = whole(x.double()), noisy_runs(lambda: whole(x))
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        got, _ = attention(x, x, x, attn_mask=causal(6), is_causal=True, need_weights=False)
        with pytest.raises(NotImplementedError, match="need_weights must be False"):
            attention(x, x, x)
        with pytest.raises(NotImplementedError, match="attn_mask must be None, got"):
            attention(x, x, x, attn_mask=causal(6), need_weights=False)
    assert_close("attention", got, layout.shard(exact, rank), shards(noisy))


@on_ranks(2)
def test_activations_computed_again_need_the_context() -> None:
    """Recomputed inside the context they are routed again; outside torch raises CheckpointError."""
    # As many rows as heads: so shapes alone do not show the difference.
    x = torch.randn(1, 6, 6, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).sin()

    for reentrant in (False, True):
        with context_parallel(mesh_of()):
            (kept,) = torch.autograd.grad(layer(x).sum(), x)
            again = checkpoint(layer, x, use_reentrant=reentrant).sum()
            again.backward()
        assert x.grad is not None and x.grad.equal(kept)
        x.grad = None
    with context_parallel(mesh_of()):
        again = checkpoint(layer, x, use_reentrant=False).sum()
        other = checkpoint(layer, x, use_reentrant=False).sum()
        assert torch.autograd.grad(other, x)[0].equal(kept)
    with pytest.raises(CheckpointError):
        again.backward()


@on_ranks(2)
def test_compiled_code_is_routed_too() -> None:
    """Code compiled outside is recompiled inside, as one graph; outside the first graph is used."""

    def layer(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sin()

    # Head-tail on two ranks, and contiguous runs of which the second is shorter.
    for seqlen in (44, 43):
        generator = torch.Generator().manual_seed(seqlen)
        x = torch.randn(1, 2, seqlen, 8, generator=generator)
        q = x.clone()
        compiled, num_graphs = compile_cold(layer, fullgraph=True)
        whole = compiled(q)
        with context_parallel(mesh_of(), buffers=[q], buffer_seq_dims=[2]):
            routed = compiled(q)
            assert q.size(2) in (21, 22) and routed.equal(layer(q))
        assert num_graphs() == 2
        assert compiled(q).equal(whole) and whole.equal(layer(x))
        assert num_graphs() == 2

    layout = SequenceLayout.boundaries([0, 17, 43])
    q = layout.shard(x, dist.get_rank(), dim=2)
    compiled, _ = compile_cold(layer, fullgraph=True)
    with route_sdpa(layout=layout):
        routed = compiled(q), layer(q)
    whole = sdpa_attention(q, q, q, is_causal=True, layout=layout).sin()
    assert all(out.equal(whole) for out in routed)


@on_ranks(2)
def test_refusals() -> None:
    """Each refusal names the argument, and comes before any buffer is changed."""
    mesh, x = mesh_of(), torch.randn(2, 8)
    one: dict[str, Any] = {"buffers": [x], "buffer_seq_dims": [1]}
    unequal: dict[str, Any] = {"buffers": [x, x.clone()], "buffer_seq_dims": [1, 0]}
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (x, {}, TypeError, "mesh must be a DeviceMesh, got Tensor"),
        (mesh_of(2, 1), one, ValueError, r"mesh must have one axis, got \('co', 'ds'\)"),
        (mesh, {"buffers": [x]}, ValueError, "one dim for each buffer, got 0 for 1"),
        (
            mesh,
            one | {"no_restore_buffers": {x.clone()}},
            ValueError,
            "a subset of buffers",
        ),
        (mesh, one | {"buffer_seq_dims": [2]}, ValueError, r"buffer 0"),
        (mesh, one | {"buffers": [nn.Parameter(x)]}, ValueError, "must not require a gradient"),
        (mesh, one | {"buffers": [3]}, TypeError, "got buffer 0: int"),
        (mesh, unequal, ValueError, r"one length in their seq dims, got \[8, 2\]"),
    ]
    for given, arguments, kind, text in cases:
        with pytest.raises(kind, match=text), context_parallel(given, **arguments):
            raise AssertionError("not refused")
        assert x.shape == (2, 8)
    with context_parallel(mesh):
        q = torch.randn(1, 2, 6, 8)
        # Without a mask every length is allowed.
        out = F.scaled_dot_product_attention(q, q[:, :, 1:], q[:, :, 1:])
        assert out.shape == q.shape
