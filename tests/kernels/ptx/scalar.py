"""Instructions on registers of one thread: `RULES` maps each opcode to its types and function.

Integers wrap. Floats follow IEEE; fma rounds its sum to float64 and then to float32. Nothing else
is fused, though ptxas may do so. `ex2.approx` and `div.full` give the value nearest to the true
one, where the ISA allows an error of 2 units in the last place. Keys are whole opcodes, those of
the kernels that tests run: any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    **{
        f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
        for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
}


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


def _exp2(x: Array) -> Array:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)


# -- integers


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def divide(a: Array, b: Array) -> Array:
    """The quotient rounded toward zero; all bits are set where the divisor is zero."""
    quotient = np.trunc(a / np.where(b == 0, 1, b).astype(np.float64))  # exact for 32 bits
    return np.where(b == 0, -1, quotient).astype(np.int64)


def remainder(a: Array, b: Array) -> Array:
    return np.asarray(a, np.int64) - divide(a, b) * np.asarray(b, np.int64)


def extract(a: Array, start: Array, length: Array) -> Array:
    """bfe: extracts `length` bits from bit `start`; signed kinds sign-extend the last bit."""
    start, length = (np.asarray(x & 255, np.int64) for x in (start, length))
    width = 8 * a.itemsize
    taken = np.minimum(length, np.maximum(width - start, 0))
    value = (np.asarray(a, np.int64) >> np.minimum(start, 63)) & ((1 << taken) - 1)
    if a.dtype.kind == "u":
        return value
    # A field that reaches beyond the last bit takes that bit as its sign.
    top = np.minimum(start + length - 1, width - 1)
    sign = (np.asarray(a, np.int64) >> top) & (length > 0)
    return value - (sign << taken)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: each byte is one of the eight of b (lower) and a, or copies of that byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        choice = selector >> (4 * i) & 15
        byte = (both >> (8 * (choice & 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        result |= np.where(choice & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32) << (
            8 * i
        )
    return result


# -- the table

# Name, number of sources, their types, each of which is also the result's, and the function.
ALIKE: list[tuple[str, int, str, Callable[..., Array]]] = [
    ("mov", 1, "b8 b16 b32 b64 u16 u32 u64", np.positive),
    ("mov", 1, "pred", np.array),
    ("cvta.param", 1, "u64", np.positive),
    ("cvta.global", 1, "u64", np.positive),
    ("prmt", 3, "b32", permute),
    ("and", 2, "b16 b32 b64 pred", np.bitwise_and),
    ("or", 2, "b16 b32 b64 pred", np.bitwise_or),
    ("xor", 2, "b16 b32 b64 pred", np.bitwise_xor),
    ("not", 1, "b16 b32 b64 pred", np.invert),
    ("add", 2, "s16 s32 s64 f32", np.add),
    ("sub", 2, "s16 s32 s64 f32", np.subtract),
    ("mul", 2, "f32", np.multiply),
    ("mul.lo", 2, "s32 s64", np.multiply),
    ("mad.lo", 3, "s32 s64", _multiply_add),
    ("div", 2, "s32", divide),
    ("rem", 2, "s32", remainder),
    ("min", 2, "s32 u32 s64 u64", np.minimum),
    ("max", 2, "s32 u32 s64 u64", np.maximum),
    ("max.relu", 2, "s32", lambda a, b: np.maximum(np.maximum(a, b), 0)),
    ("max", 2, "f32", np.fmax),
    ("neg", 1, "s16 s32 s64 f32", np.negative),
    ("abs", 1, "f32", np.absolute),
    ("div.full", 2, "f32", np.divide),
    ("fma.rn", 3, "f32", _fma),
    ("fma.rn.ftz", 3, "f32", _ftz(_fma)),
    ("ex2.approx", 1, "f32", _exp2),
    ("ex2.approx.ftz", 1, "f32", _ftz(_exp2)),
]
# Comparisons: with a NaN, those of floats are False.
ORDERED = "s16 u16 s32 u32 s64 u64 f32"
COMPARED = [
    ("eq", "b16 b32 b64 f32", np.equal),
    ("ne", "b16 b32 b64", np.not_equal),
    ("lt", ORDERED, np.less),
    ("le", ORDERED, np.less_equal),
    ("gt", ORDERED, np.greater),
    ("ge", ORDERED, np.greater_equal),
]
# Conversions that keep the value, or its lower bits.
CONVERTED = (
    "s64.s32",
    "u16.u8",
    "u16.u32",
    "u32.u16",
    "u16.u64",
    "s16.s8",
    "u32.u64",
    "u64.u32",
    "rn.f32.s32",
    "f32.f16",
)


def _rules() -> Iterator[tuple[str, Rule]]:
    for name, number, kinds, function in ALIKE:
        for kind in kinds.split():
            yield f"{name}.{kind}", Rule(kind, (kind,) * number, function)
    for name, kinds, function in COMPARED:
        for kind in kinds.split():
            yield f"setp.{name}.{kind}", Rule("pred", (kind, kind), function)
    for kind in ("b16", "b32", "b64"):
        yield f"shl.{kind}", Rule(kind, (kind, "u32"), np.left_shift)
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        yield f"shr.{kind}", Rule(kind, (kind, "u32"), np.right_shift)
    for kind in ("s32", "u32", "s64", "u64"):
        yield f"bfe.{kind}", Rule(kind, (kind, "u32", "u32"), extract)
    for kind in ("b16", "b32", "b64", "f32"):
        yield f"selp.{kind}", Rule(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))
    for kind, wide in (("s32", "s64"), ("u32", "u64"), ("u16", "u32")):
        product = _wide_product(DTYPES[wide])
        add: Any = lambda a, b, c, product=product: product(a, b) + c  # noqa: E731
        yield f"mul.wide.{kind}", Rule(wide, (kind, kind), product)
        yield f"mad.wide.{kind}", Rule(wide, (kind, kind, wide), add)
    high = _wide_product(DTYPES["s64"])
    yield "mul.hi.s32", Rule("s32", ("s32", "s32"), lambda a, b: high(a, b) >> 32)
    for name, number, function in (
        ("add", 2, np.add),
        ("sub", 2, np.subtract),
        ("mul", 2, np.multiply),
        ("fma.rn", 3, _fma),
    ):
        yield f"{name}.f32x2", Rule("b64", ("b64",) * number, _packed(function))
    for kinds in CONVERTED:
        result, source = kinds.split(".")[-2:]
        yield f"cvt.{kinds}", Rule(result, (source,), lambda a: a)
    yield "cvt.f32.bf16", Rule("f32", ("b16",), bf16_to_f32)
    for kind, convert in (("bf16", f32_to_bf16), ("f16", f32_to_f16_bits)):
        yield f"cvt.rn.{kind}.f32", Rule("b16", ("f32",), convert)
        yield f"cvt.rn.{kind}x2.f32", Rule("b32", ("f32", "f32"), _pair(convert))


def _packed(function: Callable[..., Array]) -> Callable[..., Array]:
    """Applies a function to both float32 of 64 bits."""
    return lambda *sources: function(*(x.view(np.float32) for x in sources)).view(np.uint64)


def _wide_product(wide: np.dtype[Any]) -> Callable[[Array, Array], Array]:
    return lambda a, b: a.astype(wide) * b.astype(wide)


RULES: dict[str, Rule] = dict(_rules())
# Opcodes that also take three sources, on sm_100.
RULES_OF_THREE = {"max.f32": Rule("f32", ("f32",) * 3, lambda a, b, c: np.fmax(np.fmax(a, b), c))}
