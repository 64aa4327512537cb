"""Random numbers that a step draws, and numbers that replace them.

A trial of `audit` gives each row the same numbers on the ranks and in the twin: it draws numbers
for the whole sequence, and each rank uses the numbers of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# Ranks that have the same seed draw these many equal numbers, if they draw so many.
NUM_COMPARED = 64
# torch draws normal numbers in blocks of 16, and the last ones again: they depend on the shape.
NUM_LAST = 16

# Functions that set seeds, by module and name.
SEEDS = (
    ("torch", "manual_seed"),
    ("random", "seed"),
    ("numpy.random", "seed"),
    ("numpy.random", "default_rng"),
)
# Methods that set seeds, by module and class. `random.Random` calls `seed` when it is made.
SEED_METHODS = (
    ("torch", "Generator", ("manual_seed",)),
    ("random", "Random", ("seed",)),
    ("numpy.random", "RandomState", ("__init__", "seed")),
    *(
        ("numpy.random", name, ("__init__",))
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "SeedSequence")
    ),
)
# Names of their first argument.
SEED_NAMES = ("seed", "a", "x", "entropy")

# An argument of a function of torch.
Value: TypeAlias = Any


class Draw(NamedTuple):
    """Random numbers that were drawn at once.

    Attributes:
        forward: number of the forward in which, or before which, they were drawn.
        place: file and line of the code.
        shape: of the numbers.
        first: the first numbers, (at most NUM_COMPARED,).
        is_dropout: whether these are the elements that dropout kept.
    """

    forward: int
    place: str
    shape: torch.Size
    first: Tensor
    is_dropout: bool


class Seed(NamedTuple):
    """A seed that code sets.

    Attributes:
        function: the function or class that sets it, such as "numpy.random.seed".
        place: file and line of the code.
        value: the seed.
    """

    function: str
    place: str
    value: Value


def are_same(draws: Sequence[Draw]) -> bool:
    """Return whether ranks have drawn the same numbers, as ranks with one seed do."""
    num = min(len(draw.first) for draw in draws)
    shapes = {draw.shape for draw in draws}
    if len(shapes) > 1:
        fewest = min(shape.numel() for shape in shapes)
        num = min(num, max(1, fewest - NUM_LAST))
    expected = draws[0].first[:num]
    return all(torch.equal(draw.first[:num], expected) for draw in draws)


class Replacement(NamedTuple):
    """Random numbers for the whole sequence; each rank uses the numbers of its rows.

    Attributes:
        seed: the seed from which they are drawn.
        shape: of the numbers for the whole sequence.
        dim: the dim of the rows.
        rows: (rows,), the rows of this rank; without effect if the rank has the whole shape.
    """

    seed: int
    shape: torch.Size
    dim: int
    rows: Tensor

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers from [0, 1), in the shape and on the device of a tensor."""
        return self._taken(torch.rand(self.shape, generator=self._generator()), like)

    def normal(self, like: Tensor) -> Tensor:
        """Return normal numbers, in the shape and on the device of a tensor."""
        return self._taken(torch.randn(self.shape, generator=self._generator()), like)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _taken(self, whole: Tensor, like: Tensor) -> Tensor:
        if whole.shape != like.shape:
            whole = whole.index_select(self.dim, self.rows)
        return whole.to(like.device)


def _rand(new: Replacement, drawn: Tensor, *_: Value, **__: Value) -> Tensor:
    return new.uniform(drawn)


def _randn(new: Replacement, drawn: Tensor, *_: Value, **__: Value) -> Tensor:
    return new.normal(drawn)


def _uniform_(new: Replacement, drawn: Tensor, _: Tensor, *limits: float, **named: Value) -> Tensor:
    low = limits[0] if limits else named.get("from", 0.0)
    high = limits[1] if len(limits) > 1 else named.get("to", 1.0)
    return low + (high - low) * new.uniform(drawn)


def _normal_(
    new: Replacement, drawn: Tensor, _: Tensor, mean: float = 0.0, std: float = 1.0, **__: Value
) -> Tensor:
    return mean + std * new.normal(drawn)


def _exponential_(
    new: Replacement, drawn: Tensor, _: Tensor, lambd: float = 1.0, **__: Value
) -> Tensor:
    return -torch.log1p(-new.uniform(drawn)) / lambd


def _bernoulli(
    new: Replacement, drawn: Tensor, probabilities: Tensor, p: float | None = None, **__: Value
) -> Tensor:
    return new.uniform(drawn) < (probabilities if p is None else p)


def _bernoulli_(
    new: Replacement, drawn: Tensor, _: Tensor, p: Tensor | float = 0.5, **__: Value
) -> Tensor:
    return new.uniform(drawn) < p


# Functions of torch that draw random numbers. From their replacement, what they have drawn, and
# their arguments, the functions on the right compute what they would have drawn.
RANDOM: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.rand_like: _rand,
    torch.randn: _randn,
    torch.randn_like: _randn,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}


def kept(new: Replacement, input: Tensor, p: float) -> Tensor:
    """Return an input after dropout whose random numbers are replaced."""
    is_kept = new.uniform(input) >= p
    return input * is_kept / (1.0 - p) if p < 1.0 else input * 0.0
