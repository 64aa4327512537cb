"""Instructions on registers of one thread: `RULES` maps each opcode to its types and function.

Integers wrap. Floats follow IEEE; fma rounds its sum to float64 and then to float32. Nothing else
is fused, though ptxas may do so.
`ex2.approx` and `div.full` give the value nearest to the true one, where the ISA allows an error
of 2 units in the last place; `min` and `max` of two zeros give either zero. Keys are whole opcodes:
an instruction with an unknown modifier is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **{
        f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
        for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
}

INTEGERS = [f"{sign}{bits}" for bits in (16, 32, 64) for sign in "us"]
BITS = ("b16", "b32", "b64")


class Rule(NamedTuple):
    """Types of result and sources, and the function that computes the result."""

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Array]


# -- floats


def bf16_to_f32(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """Rounds to nearest even; every NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def f32_to_f16_bits(x: Array) -> Array:
    """Rounds to nearest even; every NaN becomes 0x7FFF."""
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def _pair(convert: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Packs two halves; the first operand is the upper half."""
    return lambda a, b: convert(a).astype(np.uint32) << 16 | convert(b)


def flush(x: Array) -> Array:
    """Replaces subnormal numbers by zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _ftz(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *sources: flush(function(*map(flush, sources)))


def _in_float64(function: Callable[..., Any]) -> Callable[..., Array]:
    """Makes a function compute in float64 and round to float32."""
    return lambda *sources: function(*(x.astype(np.float64) for x in sources)).astype(np.float32)


# -- integers


def divide(a: Array, b: Array) -> Array:
    """The quotient rounded toward zero; all bits are set where the divisor is zero."""
    quotient = np.trunc(a / np.where(b == 0, 1, b).astype(np.float64))  # exact for 32 bits
    return np.where(b == 0, -1, quotient).astype(np.int64)


def remainder(a: Array, b: Array) -> Array:
    return np.asarray(a, np.int64) - divide(a, b) * np.asarray(b, np.int64)


def _wide_product(kind: str) -> Callable[[Array, Array], Array]:
    wide = DTYPES[f"{kind[0]}{2 * int(kind[1:])}"]
    return lambda a, b: a.astype(wide) * b.astype(wide)


def _extract(kind: str) -> Callable[..., Array]:
    """bfe: extracts `length` bits from bit `start`; signed kinds sign-extend the last bit."""

    def extract(a: Array, start: Array, length: Array) -> Array:
        start, length = (np.asarray(x & 255, np.int64) for x in (start, length))
        taken = np.minimum(length, np.maximum(32 - start, 0))
        value = (np.asarray(a, np.int64) >> np.minimum(start, 63)) & ((1 << taken) - 1)
        if kind[0] == "u":
            return value
        # A field that reaches beyond bit 31 takes bit 31 as its sign.
        top = np.minimum(start + length - 1, 31)
        sign = (np.asarray(a, np.int64) >> top) & (length > 0)
        return value - (sign << taken)

    return extract


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _unordered(compare: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _not_equal(a: Array, b: Array) -> Array:
    """An ordered comparison: False with a NaN."""
    return (a != b) & ~np.isnan(a) & ~np.isnan(b)


# -- the table


def _integer_rules() -> Iterator[tuple[str, Rule]]:
    for kind in INTEGERS:
        two = (kind, kind)
        for name, ufunc in (
            ("add", np.add),
            ("sub", np.subtract),
            ("mul.lo", np.multiply),
            ("min", np.minimum),
            ("max", np.maximum),
        ):
            yield f"{name}.{kind}", Rule(kind, two, ufunc)
        yield f"mad.lo.{kind}", Rule(kind, (*two, kind), lambda a, b, c: a * b + c)
        yield f"shr.{kind}", Rule(kind, (kind, "u32"), np.right_shift)
        for name, compare in COMPARISONS.items():
            yield f"setp.{name}.{kind}", Rule("pred", two, compare)
        if kind[1:] != "64":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            yield f"mul.wide.{kind}", Rule(wide, two, _wide_product(kind))
            multiply = _wide_product(kind)
            add: Any = lambda a, b, c, multiply=multiply: multiply(a, b) + c  # noqa: E731
            yield f"mad.wide.{kind}", Rule(wide, (*two, wide), add)
        for other in INTEGERS:
            yield f"cvt.{kind}.{other}", Rule(kind, (other,), lambda a: a)
    for kind in ("u32", "s32"):
        product = _wide_product(kind)
        high: Any = lambda a, b, multiply=product: multiply(a, b) >> 32  # noqa: E731
        yield f"mul.hi.{kind}", Rule(kind, (kind, kind), high)
        yield f"div.{kind}", Rule(kind, (kind, kind), divide)
        yield f"rem.{kind}", Rule(kind, (kind, kind), remainder)
        yield f"bfe.{kind}", Rule(kind, (kind, "u32", "u32"), _extract(kind))
        yield f"cvt.rn.f32.{kind}", Rule("f32", (kind,), lambda a: a)
    for kind in ("s16", "s32", "s64"):
        yield f"neg.{kind}", Rule(kind, (kind,), np.negative)
        yield f"abs.{kind}", Rule(kind, (kind,), np.absolute)


def _bit_rules() -> Iterator[tuple[str, Rule]]:
    for kind in (*BITS, "pred"):
        for name, ufunc in (
            ("and", np.bitwise_and),
            ("or", np.bitwise_or),
            ("xor", np.bitwise_xor),
        ):
            yield f"{name}.{kind}", Rule(kind, (kind, kind), ufunc)
        yield f"not.{kind}", Rule(kind, (kind,), np.invert)
        yield f"mov.{kind}", Rule(kind, (kind,), np.positive if kind != "pred" else np.array)
    for kind in BITS:
        yield f"shl.{kind}", Rule(kind, (kind, "u32"), np.left_shift)
        for name in ("eq", "ne"):
            yield f"setp.{name}.{kind}", Rule("pred", (kind, kind), COMPARISONS[name])
    for letter, bits in itertools.product("bus", (16, 32, 64)):
        kind = f"{letter}{bits}"
        yield f"selp.{kind}", Rule(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))
        yield f"mov.{kind}", Rule(kind, (kind,), np.positive)


def _float_rules() -> Iterator[tuple[str, Rule]]:
    one, two = ("f32",), ("f32", "f32")
    simple: dict[str, tuple[tuple[str, ...], Callable[..., Array]]] = {
        "add": (two, np.add),
        "sub": (two, np.subtract),
        "mul": (two, np.multiply),
        "min": (two, np.fmin),
        "max": (two, np.fmax),
        "neg": (one, np.negative),
        "abs": (one, np.absolute),
        "fma.rn": ((*two, "f32"), _in_float64(lambda a, b, c: a * b + c)),
        "ex2.approx": (one, _in_float64(np.exp2)),
        "lg2.approx": (one, _in_float64(np.log2)),
        "rcp.approx": (one, _in_float64(np.reciprocal)),
        "div.full": (two, np.divide),
    }
    for name, (sources, function) in simple.items():
        yield f"{name}.f32", Rule("f32", sources, function)
        yield f"{name}.ftz.f32", Rule("f32", sources, _ftz(function))
    for name, compare in COMPARISONS.items():
        ordered = _not_equal if name == "ne" else compare
        yield f"setp.{name}.f32", Rule("pred", two, ordered)
        yield f"setp.{name}u.f32", Rule("pred", two, _unordered(compare))
    yield "selp.f32", Rule("f32", (*two, "pred"), lambda a, b, p: np.where(p, a, b))
    yield "mov.f32", Rule("f32", one, np.positive)
    yield "cvt.rn.bf16.f32", Rule("b16", one, f32_to_bf16)
    yield "cvt.rn.f16.f32", Rule("b16", one, f32_to_f16_bits)
    yield "cvt.rn.bf16x2.f32", Rule("b32", two, _pair(f32_to_bf16))
    yield "cvt.rn.f16x2.f32", Rule("b32", two, _pair(f32_to_f16_bits))
    yield "cvt.f32.bf16", Rule("f32", ("b16",), bf16_to_f32)
    yield "cvt.f32.f16", Rule("f32", ("f16",), lambda a: a)


RULES: dict[str, Rule] = dict((*_bit_rules(), *_integer_rules(), *_float_rules()))
