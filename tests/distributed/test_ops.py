"""ring_attention as an operator: compiled whole, checkpointed without a second ring, checked.

One call of the pool runs many cases: a compiler is started once in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from ring_attn import SequenceLayout, Strategy, TransportOptions, masks, ring_attention
from ring_attn.core.layout import Segment
from ring_attn.core.mask import Mask
from ring_attn.transport.p2p import open_p2p
from tests.cold import compile_cold
from tests.distributed.pool import Ended, Pool, ended

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks; compiling takes its time."""
    pool = Pool(2, group_timeout=240.0)
    yield pool
    pool.close()


def inputs(rows: int, *, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """q, k, v of this rank, the same for the same sizes."""
    torch.manual_seed(1000 * rows + dist.get_rank())
    return [torch.randn(1, rows, n, DIM, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def results(fn: Callable[..., Tensor], x: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [y.detach().requires_grad_() for y in x]
    out = fn(*leaves)
    out.backward(torch.cos(out.detach()))
    return [out.detach(), *(y.grad for y in leaves if y.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit by bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def counted(fn: Callable[[], object]) -> int:
    """Messages of this rank in a call."""
    stats = open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    fn()
    return stats.messages - before


STRATEGIES = ("ring", "all_gather", "ulysses", "q_exchange")


def block(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A little around the attention, for the compiler to fuse; exactly rounded, in any order."""
    return ring_attention(q * 2, k * 0.5, v + 1, **options).relu()


def compiled_cases(backend: str, names: tuple[str, ...]) -> dict[str, tuple[int, list[bool]]]:
    """For each strategy how many graphs, and which lengths have the bits of eager."""
    found = {}
    for name in names:
        fn = partial(block, {"causal": True, "strategy": name})
        compiled, num_graphs = compile_cold(fn, backend, fullgraph=True, dynamic=True)
        equal = [same(results(compiled, inputs(n)), results(fn, inputs(n))) for n in (7, 12, 33)]
        found[name] = num_graphs(), equal
    return found


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ("ring",)),  # all of them: test_opcheck
        # The compiler that users have: code is generated around the operator.
        pytest.param("inductor", ("all_gather", "q_exchange"), marks=pytest.mark.slow),
    ],
)
def test_compiles_whole_for_any_length(pool: Pool, backend: str, names: tuple[str, ...]) -> None:
    """fullgraph=True, one graph for three lengths, the bits of eager."""
    for found in pool.run(compiled_cases, backend, names, timeout=280):
        assert found == {name: (1, [True] * 3) for name in names}


OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": torch.tensor([0, 5, 5, 20], dtype=torch.int32), "causal": True},
    "window": {"window_size": (3, 1), "softmax_scale": 0.3},
    "mask": {"mask": masks.spans(20, [(2, 9), (12, 18)]), "strategy": "exchange"},
    "mask of arguments": {"mask": Mask(20, 20, True, (4, 0))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "backend": "reference"},
    "value": {"strategy": Strategy("all_gather", heads_per_chunk=2)},
}
# Each for 9 and 11 rows on two ranks, new at every call.
LAYOUTS: dict[str, Callable[[], SequenceLayout]] = {
    "boundaries": lambda: SequenceLayout.boundaries([0, 9, 20]),
    "segments": lambda: SequenceLayout.from_segments(
        [[Segment(0, 4), Segment(15, 5)], [Segment(4, 11)]]
    ),
}


def option_cases() -> dict[str, bool]:
    """What is passed on into a graph: layouts, documents, a mesh, sinks, a window."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    rows = (9, 11)[dist.get_rank()]

    def compiles(make: Callable[[], Any], options: dict[str, Any]) -> bool:
        compiled, _ = compile_cold(block, fullgraph=True)
        got = results(partial(compiled, {**options, "layout": make()}), inputs(rows))
        return same(got, results(partial(block, {**options, "layout": make()}), inputs(rows)))

    found = {name: compiles(LAYOUTS["boundaries"], options) for name, options in OPTIONS.items()}
    found |= {name: compiles(make, {"causal": True}) for name, make in LAYOUTS.items()}
    found["pair"] = compiles(
        lambda: (LAYOUTS["segments"](), LAYOUTS["segments"]()), {"group": mesh}
    )
    return found


@pytest.mark.slow
def test_compiles_with_options(pool: Pool) -> None:
    """Layouts that are new, documents and groups reach the operator."""
    for found in pool.run(option_cases, timeout=200):
        assert all(found.values()), found


CHANGES: dict[str, list[Any]] = {
    "softmax_scale": [0.3, 0.4, 0.5],
    "softcap": [30.0, 31.0],
    "window_size": [(5, 0), (6, 0), (7, 0)],
    "transport": [TransportOptions(timeout=seconds) for seconds in (200.0, 201.0)],
    "strategy": [Strategy("all_gather"), Strategy("all_gather", heads_per_chunk=2)],
}


def changing_options() -> dict[str, bool]:
    """Options that change from call to call of one compiled function."""

    def attend(value: Any, name: str, *x: Tensor) -> Tensor:
        return ring_attention(*x, causal=True, backend="reference", **{name: value})

    found = {}
    for name, values in CHANGES.items():
        compiled, num_graphs = compile_cold(attend, fullgraph=True, dynamic=True)
        x = inputs(8)
        pairs = [(compiled(value, name, *x), attend(value, name, *x)) for value in values]
        found[name] = all(torch.equal(*pair) for pair in pairs) and num_graphs() == len(values)
    return found


@pytest.mark.slow
def test_options_are_constants_of_a_graph(pool: Pool) -> None:
    """A number that torch would take for a symbol has a graph for each of its values."""
    for found in pool.run(changing_options, timeout=120):
        assert len(found) == len(CHANGES) and all(found.values()), found


def several_layouts() -> dict[str, Any]:
    """Layouts as arguments, and made within: equal to eager, and how many graphs there are."""
    rank = dist.get_rank()

    def attend(layout: SequenceLayout, *x: Tensor) -> Tensor:
        return ring_attention(*x, layout=layout, causal=True)

    def attend_zigzag(*x: Tensor) -> Tensor:
        return attend(SequenceLayout.zigzag(2 * x[0].size(1), 2), *x)

    found: dict[str, Any] = {}
    for dynamic in (None, True):
        compiled, num_graphs = compile_cold(attend, fullgraph=True, dynamic=dynamic)
        for cuts in ([0, 9, 20], [0, 11, 20], [0, 7, 20]):
            x = inputs(cuts[rank + 1] - cuts[rank])
            got = compiled(SequenceLayout.boundaries(cuts), *x)
            layout = SequenceLayout.boundaries(cuts)
            want = attend(layout, *x)
            # The graph is the same for a layout that an eager call has used.
            found[f"{cuts} {dynamic}"] = same([got, compiled(layout, *x)], [want, want])
        found[f"graphs {dynamic}"] = num_graphs()
    compiled, num_graphs = compile_cold(attend_zigzag, fullgraph=True, dynamic=True)
    for n in (7, 12):
        x = inputs(n)
        found[f"zigzag {n}"] = same([compiled(*x)], [attend_zigzag(*x)])
    found["graphs within"] = num_graphs()
    return found


def test_graphs_of_several_layouts(pool: Pool) -> None:
    """Where lengths are symbols a layout's numbers are; made inside, it is a part of the graph."""
    for found in pool.run(several_layouts, timeout=60):
        # By default torch takes for a symbol what has changed once.
        assert (found.pop("graphs None"), found.pop("graphs True")) == (2, 1)
        assert found.pop("graphs within") == 1
        assert len(found) == 8 and all(found.values()), found


def overwritten_boundaries() -> bool:
    """Gradients are the same where the boundaries are written over before the backward."""
    layout = SequenceLayout.contiguous(20, 2)
    x = inputs(10)
    grads = []
    for overwrite in (False, True):
        cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
        out = ring_attention(*x, cu_seqlens=cu_seqlens, causal=True, layout=layout)
        if overwrite:
            cu_seqlens.copy_(torch.tensor([0, 13, 20]))
        grads.append(list(torch.autograd.grad(out, x, torch.cos(out.detach()))))
    return same(*grads)


def test_boundaries_are_those_of_the_forward(pool: Pool) -> None:
    """A loader may use its tensors again, as between the micro-batches of a pipeline."""
    assert all(pool.run(overwritten_boundaries))


def auto_compiled() -> tuple[bool, Ended]:
    """The choice between graphs has the bits of eager; in one graph it is refused."""
    x, auto = inputs(4), partial(ring_attention, strategy="auto")
    compiled, _ = compile_cold(auto)
    equal = torch.equal(compiled(*x), auto(*x))
    whole, _ = compile_cold(auto, fullgraph=True)
    return equal, ended(lambda: whole(*x))


def test_auto_stands_between_graphs(pool: Pool) -> None:
    for equal, refused in pool.run(auto_compiled, timeout=120):
        assert equal and "strategy='auto' cannot be compiled" in refused.text


def checkpointed_messages() -> dict[str, list[int]]:
    """Messages of a step: plain, checkpointed, with the operator's results saved; of a forward."""
    save = partial(create_selective_checkpoint_contexts, [torch.ops.ring_attn.attention.default])
    again, reentrant = (partial(partial, checkpoint, use_reentrant=r) for r in (False, True))
    x, found = inputs(10), {}
    for name in STRATEGIES:
        fn = partial(block, {"causal": True, "strategy": name})
        expected = results(fn, x)
        counts = []
        for run in (fn, again(fn), reentrant(fn), again(fn, context_fn=save)):
            got: list[Tensor] = []
            counts.append(counted(lambda run=run, got=got: got.extend(results(run, x))))  # type: ignore[misc]
            assert same(got, expected), name
        found[name] = [*counts, counted(lambda fn=fn: fn(*(y.detach() for y in x)))]  # type: ignore[misc]
    return found


def test_selective_checkpoint_does_not_run_the_ring_twice(pool: Pool) -> None:
    """A plain checkpoint sends the forward's messages again; a selective one sends no more."""
    for found in pool.run(checkpointed_messages, timeout=120):
        for name, (plain, again, reentrant, selective, forward) in found.items():
            assert forward > 0 and again == reentrant == plain + forward, name
            assert selective == plain, name


def checked_operators() -> list[str]:
    """torch's own checks of both operators: schema, autograd, fakes, and under a compiler."""
    from ring_attn import ops

    calls: dict[str, list[tuple[Any, ...]]] = {"attention": [], "attention_backward": []}

    def keeping(name: str) -> Callable[..., Any]:
        real = getattr(ops, name)

        def call(*args: Any) -> Any:
            calls[name].append(args)
            return real(*args)

        return call

    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], requires_grad=True)
    with ExitStack() as stack:
        for name in calls:
            stack.enter_context(mock.patch.object(ops, name, keeping(name)))
        for strategy in STRATEGIES:
            fn = partial(ring_attention, causal=True, strategy=strategy)
            results(fn, inputs(6))
        results(partial(ring_attention, sinks=sinks), inputs(6))
    found = []
    for name, some in calls.items():
        operator = getattr(torch.ops.ring_attn, name).default
        for args in some:
            if name == "attention_backward":  # is not differentiated
                args = tree_map_only(Tensor, Tensor.detach, args)
            checks = torch.library.opcheck(operator, args)
            found.append(",".join(sorted(set(checks.values()))))
    return found


def test_opcheck(pool: Pool) -> None:
    """Every one of torch's checks succeeds, for every strategy, forward and backward."""
    for found in pool.run(checked_operators, timeout=200):
        assert found == ["SUCCESS"] * 2 * (len(STRATEGIES) + 1)
