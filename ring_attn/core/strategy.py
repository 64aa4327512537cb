"""Which strategy shares the work, as a value: the core, and what is exchanged around it.

    name          core          around it
    ring          ring
    double_ring   ring          inner rings of `inner_degree` ranks, an outer ring between them
    all_gather    all_gather
    ulysses       (one rank)    heads for rows, among all ranks
    hybrid        ring          heads for rows, among `ulysses_degree` consecutive ranks
    q_exchange    all_gather    tail halves of the queries, with rank P-1-r

A hybrid may have all_gather as its core, and double rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ring_attn.core.values import check_flag, check_one_of

# How keys and values reach the ranks; `strategies.registry.register` adds more.
CORES = ["ring", "all_gather"]
NAMES = ("ring", "double_ring", "all_gather", "ulysses", "hybrid", "q_exchange")


@dataclass(frozen=True)
class Strategy:
    """How a group of ranks shares one call, apart from the layout.

    Args:
        core: how keys and values reach the ranks: "ring", one shard a step, or "all_gather", some
            heads of all shards at a time.
        ulysses_degree: ranks that first exchange heads for rows, all rows of theirs for a share of
            the heads; consecutive ranks, so that they lie in one node. The core then runs between
            the groups. (DeepSpeed-Ulysses, arXiv 2309.14509; hybrid: USP, arXiv 2405.07719.)
        inner_degree: ranks of an inner ring, consecutive ones; shards pass between the inner rings
            once a round, while a round is computed. (LoongTrain, arXiv 2406.18485.)
        exchange_q: the tail half of a rank's contiguous queries changes places with that of rank
            P-1-r, which makes the work of a causal mask equal.
        heads_per_chunk: KV heads that an all_gather brings at a time, while the chunk before is
            computed; None is 1.

    Raises:
        ValueError: a core that does not exist, or a number below 1.
        NotImplementedError: parts that do not go together.

    Example:
        >>> Strategy(ulysses_degree=2).name
        'hybrid'
    """

    core: str = "ring"
    ulysses_degree: int = 1
    inner_degree: int = 1
    exchange_q: bool = False
    heads_per_chunk: int | None = None

    def __post_init__(self) -> None:
        check_one_of("core", self.core, CORES)
        check_flag("exchange_q", self.exchange_q)
        for name in ("ulysses_degree", "inner_degree", "heads_per_chunk"):
            value = getattr(self, name)
            if value is None and name == "heads_per_chunk":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.inner_degree > 1 and self.core != "ring":
            raise NotImplementedError(
                f"inner_degree={self.inner_degree} is for core 'ring', got core {self.core!r}"
            )
        if self.heads_per_chunk is not None and self.core != "all_gather":
            raise NotImplementedError(
                f"heads_per_chunk={self.heads_per_chunk} is for core 'all_gather', got core "
                f"{self.core!r}"
            )
        if self.exchange_q and self.ulysses_degree > 1:
            raise NotImplementedError(
                "exchange_q and ulysses_degree do not go together: with all rows of a group in one "
                f"place there is nothing to balance; got ulysses_degree={self.ulysses_degree}"
            )

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Strategy:
        """The strategy that has these `numbers`."""
        core, ulysses_degree, inner_degree, exchange_q, heads_per_chunk = numbers
        return cls(
            CORES[core], ulysses_degree, inner_degree, bool(exchange_q), heads_per_chunk or None
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The strategy as numbers, for operators that take nothing else.

        Example:
            >>> print(Strategy.from_numbers(Strategy(ulysses_degree=2).numbers))
            Strategy(ulysses_degree=2)
        """
        core = CORES.index(self.core)
        chunk = self.heads_per_chunk or 0
        return (core, self.ulysses_degree, self.inner_degree, int(self.exchange_q), chunk)

    @property
    def name(self) -> str:
        """The name in the table; "hybrid" for pure Ulysses too."""
        if self.exchange_q:
            return "q_exchange"
        if self.ulysses_degree > 1:
            return "hybrid"
        return "double_ring" if self.inner_degree > 1 else self.core

    def __str__(self) -> str:
        usual = Strategy()
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(usual, f.name)
        ]
        return f"Strategy({', '.join(given)})"


def resolve_strategy(
    strategy: str | Strategy, world_size: int, mesh_shape: Sequence[int] = ()
) -> Strategy:
    """The strategy as a value, its degrees checked against the ranks.

    Args:
        strategy: a name of the table, or a value.
        world_size: ranks of the call.
        mesh_shape: sizes of the mesh's axes where the group is a mesh; of two, the last is the
            degree of "hybrid" and "double_ring".

    Raises:
        ValueError: no such name, a degree that does not divide the ranks or is not the mesh's, or a
            name that leaves the degree open.
        TypeError: something else than a name or a `Strategy`.

    Example:
        >>> print(resolve_strategy("hybrid", 8, (4, 2)))
        Strategy(ulysses_degree=2)
    """
    if isinstance(strategy, str):
        strategy = _from_name(strategy, world_size, mesh_shape)
    strategy = checked_strategy(strategy)
    degrees = {"ulysses_degree": strategy.ulysses_degree, "inner_degree": strategy.inner_degree}
    for name, degree in degrees.items():
        if world_size % degree:
            raise ValueError(f"{name} must divide the world size, got {degree} and {world_size}")
    if world_size % (strategy.ulysses_degree * strategy.inner_degree):
        raise ValueError(
            f"ulysses_degree x inner_degree must divide the world size, got "
            f"{strategy.ulysses_degree} x {strategy.inner_degree} and {world_size}"
        )
    if len(mesh_shape) == 2 and mesh_shape[1] not in degrees.values():
        raise ValueError(
            f"a mesh of {mesh_shape[0]} x {mesh_shape[1]} ranks needs ulysses_degree or "
            f"inner_degree {mesh_shape[1]} ('hybrid', 'double_ring'), got {strategy}; pass one "
            "axis of it, or a mesh with one axis"
        )
    return strategy


def checked_strategy(strategy: object) -> Strategy:
    """A strategy that is not given by its name; TypeError for anything else."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be one of {[*NAMES, 'auto']} or a Strategy, got "
            f"{type(strategy).__name__}"
        )
    return strategy


def _from_name(name: str, world_size: int, mesh_shape: Sequence[int]) -> Strategy:
    if name not in NAMES:
        raise ValueError(f"strategy must be one of {[*NAMES, 'auto']} or a Strategy, got {name!r}")
    if name in ("hybrid", "double_ring"):
        option = "ulysses_degree" if name == "hybrid" else "inner_degree"
        if len(mesh_shape) != 2:
            raise ValueError(
                f"strategy {name!r} needs its degree: pass Strategy({option}=...) that divides "
                f"{world_size}, or a mesh with two axes, the last of which is the degree, as group"
            )
        degree = mesh_shape[1]
        return (
            Strategy(ulysses_degree=degree) if name == "hybrid" else Strategy(inner_degree=degree)
        )
    if name == "ulysses":
        return Strategy(ulysses_degree=world_size)
    if name == "q_exchange":
        return Strategy("all_gather", exchange_q=True)
    return Strategy("all_gather" if name == "all_gather" else "ring")
