"""Modules and functions that mix rows: calls on the rows of each rank separately.

A trial of `audit` runs a module or function of the twin in this way. If the twin then has the
results of the ranks, it sees the rows of one rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# An argument or a result of a module.
Value: TypeAlias = Any

# Modules that compute each row by itself.
ROWWISE = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.GELU,
    nn.SiLU,
    nn.ReLU,
    nn.ModuleList,
    nn.ModuleDict,
)
# Functions of torch that may mix rows, and whose results have the same rows as their arguments.
FUNCTIONS = (
    F.pad,
    torch.roll,
    Tensor.roll,
    torch.cumsum,
    Tensor.cumsum,
    torch.flip,
    Tensor.flip,
)
# Modules of this many classes are tried, and functions in as many places.
MOST_KINDS = 12


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class, which `fully_shard` has replaced by a subclass."""
    return type(module).__name__.removeprefix("FSDP")


def mixing_kinds(outer: Sequence[nn.Module]) -> dict[str, str]:
    """Return the classes of modules that may mix rows, with the name of one module of each.

    `outer` are modules that no other module calls, and which are not tried.
    """
    found: dict[str, str] = {}
    for root in outer:
        for name, module in root.named_modules():
            if name and not isinstance(module, ROWWISE) and not any(module is x for x in outer):
                found.setdefault(kind_of(module), name)
    return dict([*found.items()][:MOST_KINDS])


def called_in_parts(
    call: Callable[..., Value],
    args: Sequence[Value],
    kwargs: Mapping[str, Value],
    columns: Sequence[Tensor],
) -> Value:
    """Return the results of a module whose calls see the rows of one rank only.

    `columns` are the rows of each rank. If the arguments have no rows, the module is called as
    usual.
    """
    rows = sum(len(of_rank) for of_rank in columns)
    given = [*args, *kwargs.values()]
    if not any(_dim_of_rows(x, rows) is not None for x in given):
        return call(*args, **kwargs)
    results = [
        call(
            *(_part(x, of_rank, rows) for x in args),
            **{name: _part(x, of_rank, rows) for name, x in kwargs.items()},
        )
        for of_rank in columns
    ]
    order = torch.cat([*columns]).argsort()
    if isinstance(results[0], tuple):
        return tuple(_joined(each, columns, order) for each in zip(*results, strict=True))
    return _joined(results, columns, order)


def _dim_of_rows(x: Value, rows: int) -> int | None:
    """Return the dim of a tensor that has the rows of a sequence; None if there is none.

    It is the second dim, (batch, rows, ...), or the last one, as for convolutions.
    """
    if not isinstance(x, Tensor) or x.ndim < 2:
        return None
    return next((dim for dim in (1, x.ndim - 1) if x.size(dim) == rows), None)


def _part(x: Value, columns: Tensor, rows: int) -> Value:
    dim = _dim_of_rows(x, rows)
    return x if dim is None else x.index_select(dim, columns)


def _joined(parts: Sequence[Value], columns: Sequence[Tensor], order: Tensor) -> Value:
    """Return the rows of all ranks in their order; what has no rows is that of the first rank."""
    first, num = parts[0], len(columns[0])
    dim = _dim_of_rows(first, num)
    return first if dim is None else torch.cat([*parts], dim).index_select(dim, order)
