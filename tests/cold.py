"""Compiles functions as in a program that has run nothing eagerly before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ring_attn.core import layout


def compile_cold(
    fn: Callable[..., Any], backend: str = "eager", **options: Any
) -> tuple[Callable[..., Any], Callable[[], int]]:
    """The compiled function, and a function that counts its graphs with operations so far.

    Call the compiled function with new layouts, and before the eager call that it is compared
    with: a value cached by an eager call hides code that dynamo cannot trace.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # loads the compiler

    torch._dynamo.reset()
    layout._cached_segments_of_kind.cache_clear()
    counter = CompileCounterWithBackend(backend)

    def num_graphs() -> int:
        # A graph without any operation only holds constants, and is not counted.
        return sum(any("call" in node.op for node in made.graph.nodes) for made in counter.graphs)

    return torch.compile(fn, backend=counter, **options), num_graphs
