"""ring_attention as an operator: compiled whole, checkpointed without a second ring, checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ring_attn import SequenceLayout, Strategy, TransportOptions, masks, ring_attention, tree_decode
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.transport.p2p import open_p2p
from tests.bounds import same
from tests.cold import assert_compiles, bits_of, compile_cold
from tests.distributed.pool import on_ranks

# Compiled code is the same on every device: no second run as on a device with streams.
pytestmark = pytest.mark.gloo


def inputs(rows: int) -> list[Tensor]:
    torch.manual_seed(1000 * rows + dist.get_rank())
    return [torch.randn(1, rows, n, 8, requires_grad=True) for n in (4, 2, 2)]


def counted(fn: Callable[[], object]) -> int:
    stats = open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    fn()
    return stats.messages - before


STRATEGIES = ("ring", "all_gather", "ulysses", "q_exchange")


def block(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention between operations that the compiler can fuse without changing a bit."""
    return ring_attention(q * 2, k * 0.5, v + 1, **options).relu()


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "ring"),  # all strategies: test_opcheck
        # The default compiler of users, which generates code around the operator.
        pytest.param("inductor", "q_exchange", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_compiles_whole_for_any_length(backend: str, name: str) -> None:
    """fullgraph=True, one graph for three lengths, the bits of eager."""
    fn = partial(block, {"causal": True, "strategy": name})
    assert_compiles(fn, map(inputs, (7, 12, 33)), backend, fullgraph=True, dynamic=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": torch.tensor([0, 5, 5, 20], dtype=torch.int32), "causal": True},
    "window": {"window_size": (3, 1), "softmax_scale": 0.3},
    "mask": {"mask": masks.spans(20, [(2, 9), (12, 18)]), "strategy": "exchange"},
    "mask of arguments": {"mask": Mask(20, 20, True, (4, 0))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "backend": "reference"},
    "value": {"strategy": Strategy("all_gather", heads_per_chunk=2)},
}


def segments() -> SequenceLayout:
    """9 and 11 rows on two ranks."""
    return SequenceLayout.from_segments([[Segment(0, 4), Segment(15, 5)], [Segment(4, 11)]])


# Values of an option, each of which gets a graph of its own, even with dynamic=True.
CHANGES: dict[str, list[Any]] = {
    "softmax_scale": [0.3, 0.4, 0.5],
    "softcap": [30.0, 31.0],
    "window_size": [(5, 0), (6, 0), (7, 0)],
    "transport": [TransportOptions(timeout=seconds) for seconds in (200.0, 201.0)],
    "strategy": [Strategy("all_gather"), Strategy("all_gather", heads_per_chunk=2)],
}


@pytest.mark.slow
@on_ranks(2)
def test_compiles_with_options() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x, usual = inputs((9, 11)[dist.get_rank()]), {"causal": True, "backend": "reference"}
    families = [[options] for options in OPTIONS.values()]
    families += [[{**usual, name: value} for value in CHANGES[name]] for name in CHANGES]
    for every in families:
        calls = (({**one, "layout": SequenceLayout.boundaries([0, 9, 20])}, *x) for one in every)
        many = len(every) > 1
        assert_compiles(block, calls, graphs=(len(every),), fullgraph=True, dynamic=many)
    pair = {"group": mesh, "layout": (segments(), segments())}
    assert_compiles(block, [(pair, *x)], fullgraph=True)


@on_ranks(2)
def test_graphs_of_several_layouts() -> None:
    """With symbolic lengths a passed layout's numbers are symbols; one made inside is traced."""
    rank = dist.get_rank()

    def attend(layout: SequenceLayout, *x: Tensor) -> Tensor:
        return ring_attention(*x, layout=layout, causal=True)

    def attend_zigzag(*x: Tensor) -> Tensor:
        return attend(SequenceLayout.zigzag(2 * x[0].size(1), 2), *x)

    # By default torch makes a number that has changed once a symbol.
    for dynamic, expected in ((None, 2), (True, 1)):
        calls = (
            (SequenceLayout.boundaries(cuts), *inputs(cuts[rank + 1] - cuts[rank]))
            for cuts in ([0, 9, 20], [0, 11, 20], [0, 7, 20])
            for _ in range(2)  # the graph is the same for a layout that an eager call has used
        )
        assert_compiles(attend, calls, graphs=(expected,), fullgraph=True, dynamic=dynamic)
    assert_compiles(attend_zigzag, map(inputs, (7, 12)), fullgraph=True, dynamic=True)


@on_ranks(2)
def test_boundaries_are_those_of_the_forward() -> None:
    layout = SequenceLayout.contiguous(20, 2)
    x = inputs(10)
    grads = []
    for overwrite in (False, True):
        cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
        out = ring_attention(*x, cu_seqlens=cu_seqlens, causal=True, layout=layout)
        if overwrite:
            cu_seqlens.copy_(torch.tensor([0, 13, 20]))
        grads.append(list(torch.autograd.grad(out, x, torch.cos(out.detach()))))
    assert same(*grads)


@on_ranks(2)
def test_auto_stands_between_graphs() -> None:
    x, auto = inputs(4), partial(block, {"strategy": "auto"})
    assert_compiles(auto, [x], graphs=(2, 3))
    whole, _ = compile_cold(auto, fullgraph=True)
    with pytest.raises(Exception, match="strategy='auto' cannot be compiled"):
        whole(*x)


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_selective_checkpoint_does_not_run_the_ring_twice(name: str) -> None:
    """A plain checkpoint sends the forward's messages again; a selective one sends no more."""
    save = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attn.attention.default])
    again, reentrant = (partial(partial, checkpoint, use_reentrant=r) for r in (False, True))
    x, fn = inputs(10), partial(block, {"causal": True, "strategy": name})
    expected, counts = bits_of(fn, x), []
    for run in (fn, again(fn), reentrant(fn), again(fn, context_fn=save)):
        got: list[Tensor] = []
        counts.append(counted(lambda run=run, got=got: got.extend(bits_of(run, x))))  # type: ignore[misc]
        assert same(got, expected)
    forward = counted(lambda: fn(*(y.detach() for y in x)))
    plain, *recomputed, selective = counts
    assert forward > 0 and recomputed == 2 * [plain + forward] and selective == plain


@on_ranks(2)
def test_opcheck() -> None:
    """All of torch's operator checks pass, for every strategy, forward and backward."""
    from ring_attn.attention import operators as ops

    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], requires_grad=True)
    for options in (*({"causal": True, "strategy": one} for one in STRATEGIES), {"sinks": sinks}):
        with ExitStack() as stack:
            operators = {
                name: stack.enter_context(
                    mock.patch.object(ops, name, side_effect=getattr(ops, name))
                )
                for name in ("attention", "attention_backward")
            }
            bits_of(partial(ring_attention, **options), inputs(6))
        for name, called in operators.items():
            args = called.call_args.args
            if name == "attention_backward":  # has no derivative
                args = tree_map_only(Tensor, Tensor.detach, args)
            checks = torch.library.opcheck(getattr(torch.ops.ring_attn, name).default, args)
            assert set(checks.values()) == {"SUCCESS"}, (name, options)


@pytest.mark.parametrize(
    "backend", ["aten", "reference", "auto", pytest.param("triton", marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_autocast_changes_nothing(backend: str) -> None:
    """The operators compute in the dtypes of their inputs; a fused attention of torch does, too."""
    torch.manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 40, 4, 16, requires_grad=True) for _ in range(3))
    scores = [{}] if backend == "aten" else [{}, {"softcap": 5.0}]

    def run(**score: Any) -> list[Tensor]:
        options = {"backend": backend, "causal": True, **score}
        results = ring_attention(q, k, v, return_lse=True, **options)
        grads = torch.autograd.grad(results[0].sum(), (q, k, v))
        with torch.no_grad():
            layout = SequenceLayout.contiguous(80, 2)
            decoded = tree_decode(q[:, :2], k, v, layout=layout, **options)
            if backend != "aten":
                results += (ring_attention(q, k, v, return_max_logits=True, **options)[-1],)
        return [*results, *grads, decoded]

    for score in scores:
        usual = run(**score)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert all(map(torch.equal, run(**score), usual)), (score, dtype)
