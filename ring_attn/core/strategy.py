"""A strategy as a value: the core, the exchanges around it, and the names for both.

    name          core          around the core
    ring          ring
    double_ring   ring          inner rings of `inner_degree` ranks, an outer ring between them
    all_gather    all_gather
    exchange      exchange
    ulysses       (one rank)    heads for rows, among all ranks
    hybrid        ring          heads for rows, among `ulysses_degree` consecutive ranks
    q_exchange    all_gather    tail halves of the queries, with rank P-1-r

A hybrid may also have a double ring, all_gather or exchange as its core. `strategies.registry`
fills the tables of cores and names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from ring_attn.core.spec import AttentionSpec
from ring_attn.values.checks import check_flag, check_int, check_one_of


class Core(Protocol):
    """Members of a core that a `Strategy` uses; `strategies.base.StrategyCode` has the rest."""

    name: str
    options: tuple[str, ...]

    def label(self, strategy: Strategy) -> str: ...


@dataclass(frozen=True)
class Named:
    """A name for `strategy=`.

    Attributes:
        candidates: the strategies of this name with every sensible degree, of a spec, the number of
            ranks, and the ranks of a node.
        core, exchange_q: of the strategies of this name.
        degree: the field of `Strategy` that the degree sets.
        needed: whether the name has no default degree.
        only: the only degree among so many ranks; None allows any.
    """

    candidates: Callable[[AttentionSpec, int, int], Iterable[Strategy]]
    core: str
    exchange_q: bool = False
    degree: str = "ulysses_degree"
    needed: bool = False
    only: Callable[[int], int] | None = None


CORES: dict[str, Core] = {}
NAMES: dict[str, Named] = {}


@dataclass(frozen=True)
class Strategy:
    """The way in which a group of ranks shares one call, apart from the layout.

    Args:
        core: how keys and values reach the ranks: "ring", one shard a step; "all_gather", some
            heads of all shards at a time; or "exchange", needed rows straight from their owner.
        ulysses_degree: size of the groups of consecutive ranks (so that a group lies in one node)
            that first exchange heads for rows: a rank gets all rows of its group for a share of the
            heads. The core then runs between the groups. (DeepSpeed-Ulysses, arXiv 2309.14509;
            hybrid: USP, arXiv 2405.07719.)
        inner_degree: size of the inner rings of consecutive ranks. Shards pass between the inner
            rings once a round, during its computation. (LoongTrain, arXiv 2406.18485.)
        exchange_q: whether ranks r and P-1-r exchange the tail halves of their contiguous queries,
            which balances the work of a causal mask.
        heads_per_chunk: KV heads that an all_gather brings at a time, while the previous chunk is
            computed; None is 1.

    Raises:
        ValueError: an unknown core, or a number below 1.
        NotImplementedError: a combination that is not supported.

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
        check_one_of("core", self.core, [*CORES])
        check_flag("exchange_q", self.exchange_q)
        for name in ("ulysses_degree", "inner_degree", "heads_per_chunk"):
            value = getattr(self, name)
            if value is None and name == "heads_per_chunk":
                continue
            check_int(name, value, least=1)
        for name, default in (("inner_degree", 1), ("heads_per_chunk", None)):
            value = getattr(self, name)
            if value != default and name not in CORES[self.core].options:
                takers = " or ".join(repr(c) for c in CORES if name in CORES[c].options)
                raise NotImplementedError(
                    f"{name}={value} is for core {takers}, got core {self.core!r}"
                )
        if self.exchange_q and self.ulysses_degree > 1:
            raise NotImplementedError(
                "exchange_q and ulysses_degree do not go together: with all rows of a group in one "
                f"place there is nothing to balance; got ulysses_degree={self.ulysses_degree}"
            )

    @classmethod
    def from_name(cls, name: str, world_size: int, degree: int | None = None) -> Strategy:
        """The strategy of a name in the table, with a degree.

        The degree is the size of an inner ring for "double_ring", else of the groups that exchange
        heads for rows; "ring", "all_gather" and "exchange" then run between the groups. None is the
        default of the name; "hybrid" and "double_ring" have none.

        Raises:
            ValueError: an unknown name, a degree that the name cannot have, or a missing degree.

        Example:
            >>> print(Strategy.from_name("all_gather", 8, 2))
            Strategy(core='all_gather', ulysses_degree=2)
        """
        if name not in NAMES:
            raise ValueError(
                f"strategy must be one of {[*NAMES, 'auto']} or a Strategy, got {name!r}"
            )
        named = NAMES[name]
        only = None if named.only is None else named.only(world_size)
        if only is not None and degree not in (None, only):
            raise ValueError(f"the degree of {name!r} is {only} here, got {degree}")
        if named.needed and degree is None:
            raise ValueError(
                f"strategy {name!r} needs its degree: pass Strategy({named.degree}=...) that "
                f"divides {world_size}, or a mesh with two axes, the last of which is the degree, "
                "as group"
            )
        given: Mapping[str, int] = {named.degree: only or degree or 1}
        return cls(named.core, exchange_q=named.exchange_q, **given)

    @property
    def name(self) -> str:
        """The name in the table; "hybrid" also for pure Ulysses."""
        if self.exchange_q:
            return "q_exchange"
        return "hybrid" if self.ulysses_degree > 1 else CORES[self.core].label(self).split()[0]

    def __repr__(self) -> str:
        default = Strategy()
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"Strategy({', '.join(changed)})"


def family(strategy: Strategy, world_size: int) -> str:
    """The name in the table; "ulysses" if one group has all ranks."""
    whole = strategy.name == "hybrid" and strategy.ulysses_degree == world_size
    return "ulysses" if whole else strategy.name


def label(strategy: Strategy, world_size: int) -> str:
    """The strategy's name with its degrees, for tables, such as "hybrid 4 x all_gather"."""
    name, core = family(strategy, world_size), CORES[strategy.core].label(strategy)
    return {
        "q_exchange": f"q_exchange + {core}",
        "ulysses": "ulysses",
        "hybrid": f"hybrid {strategy.ulysses_degree} x {core}",
    }.get(name, core)


def resolve_strategy(
    strategy: str | Strategy, world_size: int, mesh_shape: Sequence[int] = ()
) -> Strategy:
    """The strategy as a value, with its degrees checked against the ranks.

    If the group is a mesh of `mesh_shape`, the size of its second axis is the degree of "hybrid"
    and "double_ring".
    """
    if isinstance(strategy, str):
        needed = strategy in NAMES and NAMES[strategy].needed
        of_mesh = mesh_shape[1] if needed and len(mesh_shape) == 2 else None
        strategy = Strategy.from_name(strategy, world_size, of_mesh)
    strategy = checked_strategy(strategy)
    if world_size % (strategy.ulysses_degree * strategy.inner_degree):
        raise ValueError(
            f"ulysses_degree x inner_degree must divide the world size, got "
            f"{strategy.ulysses_degree} x {strategy.inner_degree} and {world_size}"
        )
    if len(mesh_shape) == 2 and mesh_shape[1] not in (
        strategy.ulysses_degree,
        strategy.inner_degree,
    ):
        needing = ", ".join(repr(name) for name in NAMES if NAMES[name].needed)
        raise ValueError(
            f"a mesh of {mesh_shape[0]} x {mesh_shape[1]} ranks needs ulysses_degree or "
            f"inner_degree {mesh_shape[1]} ({needing}), got {strategy}; pass one axis of it, or a "
            "mesh with one axis"
        )
    return strategy


def checked_strategy(strategy: object) -> Strategy:
    """Returns a `Strategy` unchanged; TypeError for anything else."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be one of {[*NAMES, 'auto']} or a Strategy, got "
            f"{type(strategy).__name__}"
        )
    return strategy
