"""Compiles functions as in a program that has run nothing eagerly before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ring_attn.core import layout


def compile_cold(
    fn: Callable[..., Any], backend: str = "eager", **options: Any
) -> tuple[Callable[..., Any], Callable[[], int]]:
    """The compiled function, and how many graphs with an operation in them it has by now.

    What is compiled must see layouts that are new, and come before the eager call it is held
    against: a value that an eager call has kept hides what dynamo cannot trace.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # loads the compiler

    torch._dynamo.reset()
    layout._cached_segments_of_kind.cache_clear()
    counter = CompileCounterWithBackend(backend)

    def num_graphs() -> int:
        # Not counted: a graph without any operation, which holds what is constant.
        return sum(any("call" in node.op for node in made.graph.nodes) for made in counter.graphs)

    return torch.compile(fn, backend=counter, **options), num_graphs
