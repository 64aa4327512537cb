"""Compiles functions as in a program that has run nothing eagerly before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ring_attn.core import layout
from tests.bounds import same


def compile_cold(
    fn: Callable[..., Any], backend: str = "eager", **options: Any
) -> tuple[Callable[..., Any], Callable[[], int]]:
    """The compiled function, and a function that counts its graphs with operations so far.

    Call the compiled function with new layouts, and before the eager call that it is compared
    with: a value cached by an eager call hides code that dynamo cannot trace.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # loads the compiler

    torch._dynamo.reset()
    layout.cached_segments_of_kind.cache_clear()
    counter = CompileCounterWithBackend(backend)

    def num_graphs() -> int:
        # A graph without any operation only holds constants, and is not counted.
        return sum(any("call" in node.op for node in made.graph.nodes) for made in counter.graphs)

    return torch.compile(fn, backend=counter, **options), num_graphs


def bits_of(fn: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors that a function returns, and their gradients."""
    outs = [x for x in tree_leaves(fn(*arguments)) if isinstance(x, Tensor)]
    wanted = [x for x in tree_leaves(list(arguments)) if isinstance(x, Tensor) and x.requires_grad]
    assert all(x.is_leaf for x in wanted)
    found = [x for x in outs if x.requires_grad]
    torch.autograd.backward(found, [x.detach().cos() for x in found])
    grads = [x.grad for x in wanted if x.grad is not None]
    for x in wanted:
        x.grad = None
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (*outs, *grads)]
    return [x.detach() for x in local]


def assert_compiles(
    fn: Callable[..., Any],
    calls: Iterable[Sequence[Any]],
    backend: str = "eager",
    *,
    graphs: tuple[int, ...] = (1,),
    **options: Any,
) -> None:
    """Asserts that calls share so many graphs, and that each has the bits of eager."""
    compiled, num_graphs = compile_cold(fn, backend, **options)
    for call in calls:
        got, want = (bits_of(one, call) for one in (compiled, fn))
        assert same(got, want), call
    assert num_graphs() in graphs, num_graphs()
