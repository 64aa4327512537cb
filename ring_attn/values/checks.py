"""Check single values that a user passes: an int, a flag, one of some names, a sequence.

Each error names the argument, the expected value and the value that was passed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor


def as_int(name: str, value: object, *, least: int | None = None) -> int:
    """Return a Python, numpy or tensor integer as an int; refuse fractions and bools."""
    number = _index(value)
    if number is None:
        raise TypeError(f"{name} must be an int, got {_shown(value)}")
    _check_range(name, number, least)
    return number


def _index(value: object) -> int | None:
    """Return an integer as an int; None for other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(cast(SupportsIndex, value))
    except (TypeError, RuntimeError):  # torch raises the second for a tensor of several numbers
        return None


def check_int(name: str, value: object, *, least: int) -> None:
    """Refuse a value that is not an int, is below `least`, or does not fit 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {_shown(value)}")
    _check_range(name, value, least)


def _check_range(name: str, value: int, least: int | None) -> None:
    """Refuse a number below `least`, and numbers that do not fit 64 bits."""
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit 64 bits, got {value}")


# The elements have the type that the caller expects, and checks.
def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """Return the elements of a sequence; refuse text."""
    if isinstance(value, Tensor) and (value.is_nested or value.ndim == 0):
        raise TypeError(f"{name} must be a sequence, got a tensor that is nested or has no dims")
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence, got {_shown(value)}")
    return tuple(value)


def as_ints(name: str, value: object) -> tuple[int, ...]:
    """Return the elements of a sequence as ints, each converted by `as_int`."""
    return tuple(as_int(f"each of {name}", element) for element in as_tuple(name, value))


def check_type(name: str, value: object, wanted: type | tuple[type, ...], words: str = "") -> None:
    """Refuse a value of another class; `words` describe the expected value in the error."""
    if not isinstance(value, wanted):
        words = words or f"a {getattr(wanted, '__name__', wanted)}"
        raise TypeError(f"{name} must be {words}, got {_shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is not a bool."""
    check_type(name, value, bool)


def check_number(name: str, value: object) -> None:
    """Refuse a value that is neither an int nor a float."""
    # `Real` is for numbers of numpy.
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a float, got {_shown(value)}")


def check_one_of(name: str, value: object, names: Sequence[str]) -> None:
    """Refuse a value that is not one of the names."""
    if not isinstance(value, str) or value not in names:
        shown = repr(value) if isinstance(value, str) else _shown(value)
        raise ValueError(f"{name} must be one of {list(names)}, got {shown}")


def check_tensor(name: str, x: object) -> None:
    """Refuse a value that is not a tensor, and nested tensors, which have no shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(
            f"{name} must be a plain tensor, got a nested tensor; convert it with "
            "torch.nested.to_padded_tensor or its values()"
        )


def check_dim(name: str, x: Tensor, dim: int) -> None:
    """Refuse a value that is not a tensor, or does not have the dim."""
    check_tensor(name, x)
    if not -x.ndim <= as_int("dim", dim) < x.ndim:
        raise ValueError(f"dim must be one of {name}'s {x.ndim} dims, got {dim}")


def _shown(value: object) -> str:
    """Return the type of a value, and the value if it is short."""
    if isinstance(value, (str, int, float, complex, bytes, torch.dtype)):
        return f"{type(value).__name__} {value!r}"
    return "None" if value is None else type(value).__name__


def check_types(
    described: object, types: type[object] | tuple[type[object], ...], *names: str
) -> None:
    """Refuse attributes of other types; bools do not count as numbers."""
    for name in names:
        value = getattr(described, name)
        if isinstance(value, bool) or not isinstance(value, types):
            allowed = types if isinstance(types, tuple) else (types,)
            words = " or ".join(each.__name__ for each in allowed).replace("NoneType", "None")
            raise TypeError(
                f"{name} of a {type(described).__name__} must be {words}, got {value!r} "
                f"({type(value).__name__})"
            )


def check_speed(described: object, *names: str) -> None:
    """Refuse attributes that are not positive; with an infinite speed, work takes no time."""
    _check_numbers(described, names, lambda x: x > 0, "positive")


def check_size(described: object, *names: str) -> None:
    """Refuse attributes below 0; infinity means that there is no limit."""
    _check_numbers(described, names, lambda x: x >= 0, "at least 0")


def check_cost(described: object, *names: str) -> None:
    """Refuse attributes that are negative or not finite."""
    _check_numbers(described, names, lambda x: 0 <= x < math.inf, "finite and at least 0")


def _check_numbers(
    described: object, names: tuple[str, ...], is_valid: Callable[[float], bool], words: str
) -> None:
    """Refuse attributes that are not numbers, or not valid; `words` describe valid numbers."""
    check_types(described, (int, float), *names)
    for name in names:
        value = getattr(described, name)
        if not is_valid(value):
            raise ValueError(f"{name} of a {type(described).__name__} must be {words}, got {value}")
