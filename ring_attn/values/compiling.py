"""Properties that torch.compile can trace, and functions that stay outside of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

from ring_attn.torch_private import break_graph

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def kept(compute: Callable[[S], T]) -> T:
    """Make a property that is computed once per object, or at each access while dynamo traces.

    On Python 3.11 `functools.cached_property` takes a lock, which dynamo cannot trace. Also, a
    graph that read a cached value would differ from a graph traced before the value was cached.
    """
    key = f"_{compute.__name__}"

    def get(self: S) -> T:
        if torch.compiler.is_compiling():
            return compute(self)
        values = vars(self)
        if key not in values:
            values[key] = compute(self)
        return cast(T, values[key])

    return cast(T, property(get, doc=compute.__doc__))


def cached(check: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of a function that depends only on its arguments.

    It is `functools.lru_cache`, but dynamo can trace through it: while dynamo traces, the function
    runs at each call. It also runs at each call for arguments that cannot be hashed.
    """
    with_cache = lru_cache(maxsize=1024, typed=True)(check)

    @wraps(check)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return check(*args, **kwargs)
        try:
            return with_cache(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # an argument has no hash, or the function refuses an argument
            pass
        return check(*args, **kwargs)

    return call


def left_out_of_graphs(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that torch.compile breaks the graph there and runs it uncompiled.

    `torch.compiler.disable` does the same, but would load the compiler with this package.

    Args:
        reason: the error text under `fullgraph=True`: why there is no graph, and what to do.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            break_graph(reason)
            result: T = torch.compiler.disable(function)(*args, **kwargs)
            return result

        return call

    return decorate
