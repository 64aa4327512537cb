"""Bounds that hold for the rounding of any processor, from runs with random roundings.

A processor with wider vectors, fused multiplications or more threads adds in another order, so that
its results are rounded differently. The effect on the result of a whole model depends on the model,
and one plain run does not show it: the error of a single number may be 0 by luck. So the model runs
several times, and in each run

    every result of an operator, except small whole numbers such as counts, is multiplied by
    1 - eps, 1 or 1 + eps, with probabilities of 2, 96 and 2 %. That moves it by 1 to 2 units in the
    last place (ulp), on average 2.2 of their squares, so that the variance is 1/11 ulp^2, a little
    above the 1/12 ulp^2 of rounding to nearest;

    every matrix product adds its terms in another order, so that long sums have their errors, too.

To first order the error of a result is a sum of very many such moves, hence normally distributed,
and a right result is one more draw. `margin(n)` is the factor by which a further error may exceed
the largest error of `n` runs (4 ulps are added, for the last operations):

    P(|x| > margin(n) * max(|x_1|, ..., |x_n|)) = 1e-4    for normal x, x_1, ..., x_n

This holds for a single number. The largest error of a tensor varies less than the error of one of
its numbers (by the Borell-TIS inequality), so the same margin holds for tensors.

It does not hold where the roundings of a few numbers decide the result, as after a norm over two
features: tiny models need at least four.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ring_attn.core.oracle import Verdict, distance, largest
from ring_attn.torch_private import TorchDispatchMode, Untyped

T = TypeVar("T")

# The arguments of an operator of torch.
Values: TypeAlias = tuple[Untyped, ...]

aten = torch.ops.aten

# With 16 runs the margin is 2.7: an error of four times the largest one of these runs is found.
NUM_RUNS = 16

# The probability that a right result is found wrong.
FALSE_ALARM = 1e-4

# The probability of the factor 1 + eps; 1 - eps has the same.
MOVES_UP = 1 / 50

# Factors are drawn once, and read from a random index on: draws would take most of the time.
NUM_DRAWS = 1 << 17

# After its long sums a single number, such as a loss, goes through a few more operations: a
# division, the sum over ranks. Each rounds it by up to half an ulp, and few noisy runs move it
# there.
LAST_ULPS = 4

# Matrix products: the sums are over the last dim of one factor and the second last of the next.
MATRIX_PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
}

# Operators whose results are copies of their inputs, and so are not rounded.
COPIES = {
    getattr(aten, name)
    for name in [
        "_reshape_copy",
        "abs",
        "amax",
        "amin",
        "cat",
        "clamp",
        "clone",
        "constant_pad_nd",
        "embedding",
        "flip",
        "gather",
        "index",
        "index_put",
        "index_select",
        "masked_fill",
        "max",
        "maximum",
        "min",
        "minimum",
        "neg",
        "relu",
        "repeat",
        "roll",
        "slice_backward",
        "sort",
        "stack",
        "threshold_backward",
        "topk",
        "tril",
        "triu",
        "unfold_backward",
        "where",
    ]
}


class RandomRounding(TorchDispatchMode):
    """A mode in which results of operators are rounded at random, as on another processor.

    Args:
        seed: seed of the moves and of the orders of sums.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __torch_dispatch__(
        self, func: Untyped, types: object, args: Values = (), kwargs: Untyped = None
    ) -> Untyped:
        if func in MATRIX_PRODUCTS:
            args = self._in_another_order(args)
        out = func(*args, **(kwargs or {}))
        if _makes_new_results(func) and _rounds(func, args, out):
            for x in _tensors(out):
                self._move(x)
        return out

    def _in_another_order(self, args: Values) -> Values:
        """Permute the terms of the sums of a matrix product."""
        *others, a, b = args
        if type(a) is not Tensor or type(b) is not Tensor:  # a DTensor has shards of the sums
            return args
        order = torch.randperm(a.size(-1), generator=self._generator)
        return (*others, a[..., order], b[..., order, :])  # (.., m, k), (.., k, n)

    def _move(self, x: Tensor) -> None:
        x = x.to_local() if hasattr(x, "to_local") else x
        has_own_memory = aten.is_non_overlapping_and_dense(x)
        if not x.is_floating_point() or not has_own_memory:
            return
        in_memory_order = x.as_strided((x.numel(),), (1,))
        for part in in_memory_order.split(NUM_DRAWS // 2):
            moved = part * self._factors(part.numel(), x.dtype, x.device)
            part.copy_(part.where(_is_exact(part), moved))

    def _factors(self, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `num` random factors, each 1 - eps, 1 or 1 + eps."""
        key = dtype, device
        if key not in self._drawn:
            draw = torch.rand(NUM_DRAWS, generator=self._generator)
            moves = (draw < MOVES_UP).double() - (draw >= 1.0 - MOVES_UP).double()
            factors = 1.0 + torch.finfo(dtype).eps * moves
            self._drawn[key] = factors.to(device, dtype)
        start = self._random.randrange(NUM_DRAWS - num + 1)
        return self._drawn[key][start : start + num]


def _is_exact(x: Tensor) -> Tensor:
    """Return which numbers are small and whole, such as counts, whose sums are never rounded."""
    small = torch.finfo(x.dtype).eps ** -0.5  # 2,896 in float32
    return (x == x.round()) & (x.abs() < small)


@cache
def _makes_new_results(func: Untyped) -> bool:
    """Return whether an operator neither changes its inputs nor returns views of them."""
    schema = func._schema
    aliases = any(x.alias_info for x in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not aliases


def _rounds(func: Untyped, args: Values, out: Untyped) -> bool:
    """Return whether an operator rounds its results."""
    if func is aten._to_copy.default:  # rounds if the new dtype has fewer bits
        return eps_of(out) > eps_of(args[0])
    if func.overloadpacket in COPIES:
        return False
    return any(x.is_floating_point() for x in _tensors(args))


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    # torch's pytrees also find them, but took half of the time of a noisy run.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def eps_of(x: Tensor) -> float:
    """Return the distance of 1 to the next number in the dtype; 0 for integers."""
    return torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0


def noisy_runs(run: Callable[[], T], num: int = NUM_RUNS) -> list[T]:
    """Return the results of `run()` in `num` runs with random roundings.

    Args:
        run: a function that computes one result or several.
        num: number of runs; run i has seed i.

    Example:
        >>> import torch
        >>> x = torch.rand(100)
        >>> len(noisy_runs(lambda: x.exp().sum()))
        16
    """
    results = []
    for seed in range(num):
        with RandomRounding(seed):
            results.append(run())
    return results


def check_rounded(name: str, got: Tensor, oracle: Tensor, noisy: Sequence[Tensor]) -> Verdict:
    """Compare a result with the oracle: bound = margin * largest error of noisy runs + 4 ulps.

    Args:
        name: name of the result, for the verdict.
        got: the result, of any shape and floating point dtype.
        oracle: the result in float64, of the same shape.
        noisy: results of `noisy_runs`, of the same shape, in the dtype of `got`.

    Raises:
        ValueError: shapes differ, or there is no noisy run.
        TypeError: dtypes of `got` and `noisy` differ.

    Example:
        >>> import torch
        >>> x = torch.rand(100)
        >>> noisy = noisy_runs(lambda: x.exp().sum())
        >>> check_rounded("sum", x.exp().sum(), x.double().exp().sum(), noisy).ok
        True
    """
    if len(noisy) == 0:
        raise ValueError(f"{name} needs results of noisy runs, got none: call noisy_runs")
    if any(x.shape != oracle.shape for x in (got, *noisy)):
        shapes = {tuple(x.shape) for x in noisy}
        raise ValueError(
            f"{name} must have shape {tuple(oracle.shape)} as the oracle, got {tuple(got.shape)} "
            f"(noisy runs: {', '.join(map(str, shapes))})"
        )
    if any(x.dtype != got.dtype for x in noisy):
        raise TypeError(f"{name} must be {noisy[0].dtype} as in noisy runs, got {got.dtype}")
    oracle = oracle.detach().double()
    errors = [largest(distance(x.detach().double(), oracle)) for x in noisy]
    size = largest(oracle[oracle.isfinite()].abs())
    bound = rounding_bound(errors, torch.finfo(got.dtype).eps * size)
    error = largest(distance(got.detach().double(), oracle))
    return Verdict(name, error, bound, error <= bound)


def rounding_bound(errors: Sequence[float], ulp: float) -> float:
    """Return the bound of an error, from the errors of noisy runs and the ulp of the result."""
    return margin(len(errors)) * max(errors) + LAST_ULPS * ulp


@cache
def margin(num: int) -> float:
    """Return the factor by which a right error may exceed the largest error of `num` noisy runs."""
    low, high = 1.0, 1e6  # of a bisection
    while high - low > 1e-6 * high:
        middle = math.sqrt(low * high)
        if false_alarm(middle, num) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return high


def false_alarm(factor: float, num: int) -> float:
    """Return P(|x| > factor * max of |x_1|, ..., |x_num|) for normal numbers, by Simpson's rule."""
    # The largest of all is below x / factor with probability erf(x / factor / sqrt(2))^num.
    step, intervals = 0.01, 1200
    total = 0.0
    for i in range(intervals + 1):
        weight = 4 if i % 2 else 2
        if i in (0, intervals):
            weight = 1
        x = step * i
        density = math.sqrt(2 / math.pi) * math.exp(-x * x / 2)
        total += weight * density * math.erf(x / factor / math.sqrt(2)) ** num
    return total * step / 3
