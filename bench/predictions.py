"""Predictions of the planner for the calls of `ring-attn bench ring`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ring_attn.backends import Purpose, choose_backend
from ring_attn.bench.ring_implementations import RingCase
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.strategy import NAMES, Strategy
from ring_attn.planning.candidates import layouts_of, strategies_for
from ring_attn.planning.choice import Candidate, Problem
from ring_attn.planning.devices import (
    DEVICES,
    Cluster,
    builtin_cluster,
    find_cluster,
    load_cluster,
    with_backend,
)
from ring_attn.planning.planner import choose


@dataclass(frozen=True, eq=False)
class Plan:
    """The planner's prediction of a case, with a given strategy or with the one that it chooses.

    Attributes:
        strategy: the strategy.
        layout: its layout.
        seconds: by mode.
        chosen: the strategy with its degrees, and the layout, as text.
    """

    strategy: Strategy
    layout: SequenceLayout
    seconds: Mapping[str, float]
    chosen: str


def cluster_of(name: str | None, device_type: str, world_size: int) -> Cluster:
    """Return a built-in cluster, that of a file, or by default that of this machine.

    Raises:
        ValueError: there is neither, or this machine's GPU is not known.
    """
    if name is None:
        return find_cluster(device_type, world_size)
    if name.upper() in DEVICES:
        return builtin_cluster(name.upper())
    if not Path(name).is_file():
        known = ", ".join(DEVICES).lower()
        raise ValueError(f"--cluster must be one of {known}, or a file, got {name!r}")
    return load_cluster(name)


def strategies_of(names: tuple[str, ...], case: RingCase, node_size: int) -> dict[str, Strategy]:
    """Return the strategies of some names with every sensible degree, by their full names.

    "all" has all names; "auto" is left out.
    """
    ranks, spec = case.world_size, case.shape.spec
    found = dict[str, Strategy]()
    for strategy in strategies_for(spec, ranks, node_size):
        if "all" in names or strategy.name_on(ranks) in names:
            found[strategy.full_name(ranks)] = strategy
    if not found and ranks == 1 and {*names} & {*NAMES}:
        found["ring"] = Strategy()  # on one rank all strategies do the same
    return found


def plan(case: RingCase, strategy: Strategy | None, layout: str, cluster: Cluster) -> Plan:
    """Simulate a strategy, or for None the best one, over a layout or over all ("auto").

    Raises:
        ValueError: the strategy cannot run the case, with the reason.
    """
    shape = case.shape
    purpose = Purpose.of(shape.mask, backward=case.backward, same_bits=None)
    backend = choose_backend(shape.spec, "auto", purpose).name
    problem = Problem(
        shape.spec,
        shape.mask,
        case.world_size,
        with_backend(cluster, backend, shape.spec),
        backend,
        same_bits=None,
        backward=case.backward,
        memory_bytes=float("inf"),
    )
    try:
        choice = choose(
            problem,
            layouts_of(problem, layout),
            None if strategy is None else [strategy],
            effort="best",
            peaks=False,
        )
    except ValueError as error:
        if strategy is None:
            raise
        # The reason follows the names of the problem, the strategy and the layout.
        named = f"{strategy.full_name(case.world_size)} ({layout}): "
        raise ValueError(str(error).rpartition(named)[2]) from None
    best: Candidate = choice.best
    assert best.prediction is not None, "the best candidate was simulated"
    forward, backward = best.prediction.forward, best.prediction.backward
    seconds = {"fwd": forward.seconds}
    if backward is not None:
        seconds |= {"bwd": backward.seconds, "fwd_bwd": forward.seconds + backward.seconds}
    chosen = f"{best.full_name} ({best.layout_name})"
    return Plan(best.strategy, choice.layout, seconds, chosen)
