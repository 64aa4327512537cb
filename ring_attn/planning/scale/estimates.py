"""The door to large-scale planning: a candidate's costs, whatever ranks they are taken from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ring_attn.call import Call
from ring_attn.machines.time import Timeline, simulate
from ring_attn.planning.calls import call_of, core_of, rated_cluster
from ring_attn.planning.choice import Candidate, DirectionCost, Problem
from ring_attn.planning.memory import Peak, peak_of
from ring_attn.planning.scale.bounds import least_seconds, seconds_without_late_peers
from ring_attn.planning.scale.walks import walked_calls
from ring_attn.planning.scale.worlds import World, whole, whole_cost, whole_count, worlds_of
from ring_attn.strategies.registry import programs_of

T = TypeVar("T")


class Bounds(NamedTuple):
    """Lower bounds of a candidate's seconds.

    Attributes:
        forward, backward: seconds of compute on the busiest rank; backward 0 if it is not planned.
        busiest: this rank, of the core.
        core: the core's call, in the world that the bounds are taken from.
    """

    forward: float
    backward: float
    busiest: int
    core: Call


class Estimates:
    """Costs of a candidate, from its own ranks or from two smaller worlds.

    Attributes:
        world_sizes: numbers of ranks of these worlds.
        num_walked: number of ranks that a simulation of the first world walks.
    """

    def __init__(self, problem: Problem, candidate: Candidate, worlds: tuple[World, ...]) -> None:
        self._problem, self._candidate, self._worlds = problem, candidate, worlds

    @property
    def world_sizes(self) -> list[int]:
        return [world.problem.world_size for world in self._worlds]

    @property
    def num_walked(self) -> int:
        return len(walked_calls(*self._worlds[0]))

    @property
    def is_extrapolated(self) -> bool:
        """Whether smaller worlds stand for the candidate's ranks."""
        return len(self._worlds) > 1

    @property
    def is_rough(self) -> bool:
        """Whether the estimates can only rule the candidate out, not rank it."""
        hybrid_of_rings = self._candidate.strategy.inner_degree > 1
        return self._problem.mask.has_windows and hybrid_of_rings and self.is_extrapolated

    def bounds(self) -> Bounds:
        """Return lower bounds from the compute of the busiest rank."""
        cores = [core_of(call_of(*world)) for world in self._worlds]
        least = [
            least_seconds(*world, core) for world, core in zip(self._worlds, cores, strict=True)
        ]
        # The middle of the ranks for which the busiest rank stands.
        each = self._worlds[0].problem.each
        return Bounds(
            forward=whole(self._worlds, [one.forward for one in least]),
            backward=whole(self._worlds, [one.backward for one in least]),
            busiest=int((least[0].rank + 0.5) * each),
            core=cores[0],
        )

    def seconds_without_late_peers(self, *, backward: bool) -> float:
        """Return a lower bound: the time of one walked rank whose peers are never late."""
        return whole(
            self._worlds,
            self._each(
                lambda problem, candidate: seconds_without_late_peers(
                    problem, candidate, backward=backward
                )
            ),
        )

    def cost(self, *, backward: bool) -> DirectionCost:
        """Return the simulated cost of one direction."""

        def simulated(problem: Problem, candidate: Candidate) -> DirectionCost:
            calls = walked_calls(problem, candidate)
            programs = programs_of(calls, backward=backward)
            cluster = rated_cluster(problem, candidate)
            return DirectionCost.of(simulate(programs, calls[0], cluster))

        return whole_cost(self._worlds, self._each(simulated))

    def timelines(self, *, backward: bool) -> tuple[Timeline, ...]:
        """Return what each walked rank does when, in one direction.

        Raises:
            ValueError: smaller worlds stand for the candidate's ranks.
        """
        if self.is_extrapolated:
            raise ValueError(
                f"there is no timeline of {self._problem.world_size} ranks, whose times follow "
                f"from {' and '.join(map(str, self.world_sizes))} ranks; plan fewer ranks, or "
                "without --quick"
            )
        problem, candidate = self._worlds[0]
        calls = walked_calls(problem, candidate)
        programs = programs_of(calls, backward=backward)
        cluster = rated_cluster(problem, candidate)
        return simulate(programs, calls[0], cluster, record=True).ranks

    def peak(self) -> Peak:
        """Return the peak memory of a rank."""
        if self._problem.replicated:
            # The rows that every rank holds are as many in smaller worlds, where other steps than
            # those of their exchange may hold most.
            return self.own_peak()
        backward = self._problem.backward
        peaks = self._each(
            lambda problem, candidate: peak_of(
                call_of(problem, candidate),
                backward=backward,
                cluster=problem.cluster,
            )
        )
        return Peak(
            call=round(whole(self._worlds, [peak.call for peak in peaks])),
            communicators=whole_count(self._worlds, [peak.communicators for peak in peaks]),
        )

    def own_peak(self) -> Peak:
        """Return the peak memory of a rank, counted on the candidate's own ranks."""
        return peak_of(
            call_of(self._problem, self._candidate),
            backward=self._problem.backward,
            cluster=self._problem.cluster,
            replicated=self._problem.replicated,
        )

    def _each(self, measure: Callable[[Problem, Candidate], T]) -> list[T]:
        return [measure(*world) for world in self._worlds]


def estimates_of(problem: Problem, candidate: Candidate, *, of_compute: bool = False) -> Estimates:
    """Return the estimates of a candidate's costs.

    `of_compute`: only the time of compute is asked for, for which more problems have smaller
    worlds.
    """
    worlds = worlds_of(problem, candidate, of_compute=of_compute)
    return Estimates(problem, candidate, worlds)
