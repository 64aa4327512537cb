"""Strategies as values: the core, the exchanges around it, and the names of both.

    name          core          around the core
    ring          ring
    double_ring   ring          inner rings of `inner_degree` ranks, an outer ring between them
    all_gather    all_gather
    exchange      exchange
    ulysses       (one rank)    heads for rows, among all ranks
    hybrid        ring          heads for rows, among `ulysses_degree` consecutive ranks
    q_exchange    all_gather    tail halves of the queries, with rank P-1-r

The core of a hybrid may also be a double ring, all_gather or exchange. `strategies.registry` fills
the tables of cores and names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from ring_attn.core.spec import AttentionSpec
from ring_attn.values.checks import check_flag, check_int, check_one_of


class Core(Protocol):
    """The members of a core that `Strategy` uses; `strategies.base.StrategyCode` has the others."""

    name: str
    options: tuple[str, ...]

    def full_name(self, strategy: Strategy) -> str: ...


@dataclass(frozen=True)
class Named:
    """A name for `strategy=`.

    Attributes:
        candidates: returns the strategies of this name with every sensible degree, for a spec, the
            number of ranks, and the number of ranks of a node.
        core, exchange_q: fields of the strategies of this name.
        degree: the field of `Strategy` that the degree sets.
        needed: whether a degree must be given, because the name has no default.
        only: returns the only possible degree for a number of ranks; None allows any degree.
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
        ulysses_degree: size of the groups that first exchange heads for rows: a rank gets all rows
            of its group for a share of the heads. The core then runs between the groups. A group
            has consecutive ranks, so that it lies in one node. (DeepSpeed-Ulysses, arXiv
            2309.14509; hybrid: USP, arXiv 2405.07719.)
        inner_degree: size of the inner rings of consecutive ranks. Shards are sent between the
            inner rings once per round, during its computation. (LoongTrain, arXiv 2406.18485.)
        exchange_q: whether ranks r and P-1-r exchange the tail halves of their contiguous queries,
            which balances the work of a causal mask.
        heads_per_chunk: number of KV heads that an all_gather gathers at a time, while the previous
            chunk is computed; None means 1.

    Raises:
        ValueError: an unknown core, or a number below 1.
        TypeError: a number is not an int, or `exchange_q` is not a bool.
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
                    f"{name}={value} needs core {takers}, got core {self.core!r}: change the core, "
                    f"or leave out {name}"
                )
        if self.exchange_q and self.ulysses_degree > 1:
            raise NotImplementedError(
                "exchange_q cannot be combined with ulysses_degree, because a rank that has all "
                "rows of its group has nothing to balance; got "
                f"ulysses_degree={self.ulysses_degree}"
            )

    @classmethod
    def from_name(cls, name: str, world_size: int, degree: int | None = None) -> Strategy:
        """Return the strategy of a name in the table, with a degree.

        For "double_ring" the degree is the size of an inner ring. For other names it is the size of
        the groups that exchange heads for rows; "ring", "all_gather" and "exchange" then run
        between the groups. None means the default of the name; "hybrid" and "double_ring" have no
        default.

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
            raise ValueError(
                f"the degree of {name!r} must be {only} on {world_size} ranks, got {degree}"
            )
        if named.needed and degree is None:
            raise ValueError(
                f"strategy {name!r} needs a degree, got None: pass Strategy({named.degree}=...), "
                f"which must divide {world_size}, or as group a mesh with two axes, whose second "
                "size is the degree"
            )
        given: Mapping[str, int] = {named.degree: only or degree or 1}
        return cls(named.core, exchange_q=named.exchange_q, **given)

    @property
    def name(self) -> str:
        """The name in the table, which is "hybrid" for pure Ulysses, too."""
        if self.exchange_q:
            return "q_exchange"
        return "hybrid" if self.ulysses_degree > 1 else CORES[self.core].full_name(self).split()[0]

    def name_on(self, world_size: int) -> str:
        """Return the name in the table, or "ulysses" if one group has all ranks."""
        whole = self.name == "hybrid" and self.ulysses_degree == world_size
        return "ulysses" if whole else self.name

    def full_name(self, world_size: int) -> str:
        """Return the name with the degrees, for tables, such as "hybrid 4 x all_gather"."""
        core = CORES[self.core].full_name(self)
        match self.name_on(world_size):
            case "ulysses":
                return "ulysses"
            case "hybrid":
                return f"hybrid {self.ulysses_degree} x {core}"
            case "q_exchange":
                return f"q_exchange + {core}"
            case _:
                return core

    def __repr__(self) -> str:
        default = Strategy()
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"Strategy({', '.join(changed)})"


def resolve_strategy(
    strategy: str | Strategy, world_size: int, mesh_shape: Sequence[int] = ()
) -> Strategy:
    """Return the strategy as a value, and check its degrees against the number of ranks.

    If the group is a mesh of `mesh_shape`, the size of its second axis is the degree of "hybrid"
    and "double_ring".

    Raises:
        ValueError: an unknown name, or degrees that do not fit the ranks or the mesh.
        TypeError: the strategy is neither a name nor a `Strategy`.
    """
    if isinstance(strategy, str):
        needed = strategy in NAMES and NAMES[strategy].needed
        of_mesh = mesh_shape[1] if needed and len(mesh_shape) == 2 else None
        strategy = Strategy.from_name(strategy, world_size, of_mesh)
    strategy = checked_strategy(strategy)
    degrees = (strategy.ulysses_degree, strategy.inner_degree)
    if world_size % (strategy.ulysses_degree * strategy.inner_degree):
        raise ValueError(
            "ulysses_degree x inner_degree must divide the world size, got "
            f"{strategy.ulysses_degree} x {strategy.inner_degree} and {world_size}"
        )
    if len(mesh_shape) == 2 and mesh_shape[1] not in degrees:
        needing = ", ".join(repr(name) for name in NAMES if NAMES[name].needed)
        raise ValueError(
            f"a mesh of {mesh_shape[0]} x {mesh_shape[1]} ranks needs ulysses_degree or "
            f"inner_degree {mesh_shape[1]} ({needing}), got {strategy}; pass one axis of the mesh, "
            "or a mesh with one axis"
        )
    return strategy


def checked_strategy(strategy: object) -> Strategy:
    """Return a `Strategy` unchanged, and refuse other types by a TypeError."""
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be one of {[*NAMES, 'auto']} or a Strategy, got "
            f"{type(strategy).__name__}"
        )
    return strategy
