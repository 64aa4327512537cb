"""Values of a plan, from the problem to the choice, and their descriptions as text.

Problem     sizes, mask, ranks and machine
Candidate   a strategy over a layout: refused, ruled out, or with the Prediction of a simulation
Choice      the best candidate and all others; as text a table that ends with the reason
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from operator import add

from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.runs import plan_states
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side
from ring_attn.machines.cluster import Cluster
from ring_attn.machines.time import Simulation

# Ways in which a rank spends its time, and what it means that one takes longer.
WAYS = {
    "exposed": "which waits {} longer for bytes",
    "late": "whose ranks wait {} longer for one another",
    "compute": "whose busiest rank computes {} longer",
    "moves": "which packs, adds and rounds {} longer",
    "host": "whose devices wait {} longer for their hosts",
}

# Predictions are off by some percent (bench/results/NOTES.md), so candidates this near to the
# fastest count as equal and the first in order wins: by layout, and within a layout a ring before
# all others. The buffers of a ring do not grow with the number of ranks, and its transfers are
# hidden under compute, where a simulation errs least.
TIE = 0.025

# Columns that do not fit a table of 80 characters.
VERBOSE_COLUMNS = ("forward", "backward", "messages", "sent side")


@dataclass(frozen=True)
class DirectionCost:
    """Simulated costs of one direction of a call; seconds.

    Times but `seconds` are those of the rank with the longest, and so are bytes and messages (a
    collective is one).
    """

    seconds: float
    compute: float
    moves: float
    host: float
    exposed: float
    late: float
    bytes_sent: int
    messages: int

    def __add__(self, other: DirectionCost) -> DirectionCost:
        return DirectionCost(*map(add, astuple(self), astuple(other)))

    @classmethod
    def of(cls, simulation: Simulation) -> DirectionCost:
        """Return the costs of a simulation: of each time, the greatest over the ranks."""
        ranks = simulation.ranks
        return cls(
            seconds=simulation.seconds,
            compute=max(rank.compute for rank in ranks),
            moves=max(rank.moves for rank in ranks),
            host=max(rank.idle for rank in ranks),
            exposed=max(rank.exposed for rank in ranks),
            late=max(rank.late for rank in ranks),
            bytes_sent=max(rank.sent for rank in ranks),
            messages=max(rank.messages for rank in ranks),
        )


@dataclass(frozen=True)
class Prediction:
    """Simulated costs of both directions of a call; `backward` is None for a forward alone."""

    forward: DirectionCost
    backward: DirectionCost | None

    @cached_property
    def total(self) -> DirectionCost:
        return self.forward if self.backward is None else self.forward + self.backward


@dataclass(frozen=True)
class Problem:
    """The call to plan, and the ranks that share it.

    The backend is never "auto". `memory_bytes` is the memory of a rank for its inputs and the call,
    infinite if unknown. `exact` simulates every rank, as far as `machines.time` can; `quick` takes
    few ranks for many (`planning.scale`), each for `each` ranks.
    """

    spec: AttentionSpec
    mask: Mask
    world_size: int
    cluster: Cluster
    backend: str
    same_bits: bool | None = None
    backward: bool = True
    memory_bytes: float = float("inf")
    exact: bool = False
    recurrent: int = 0  # bytes of a recurrent layer's decay and state
    documents: tuple[int, ...] = ()  # where they start, for these layers
    quick: bool = False
    each: float = 1.0
    replicated: tuple[int, ...] = ()  # numbers of rows that every rank holds, by their owner

    @property
    def has_local_keys(self) -> bool:
        """Whether every rank holds all rows, so that no key is sent; `mask` is that of copies."""
        return bool(self.replicated) and sum(self.replicated) == self.mask.seqlen_q

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether each direction to plan is the backward."""
        return (False, True) if self.backward else (False,)


@dataclass(frozen=True)
class Candidate:
    """A strategy over a layout, with its predicted costs or the reason for having none.

    Attributes:
        layout_name: "contiguous", "zigzag", "striped", "balanced" or "given".
        same_bits: whether its results have the same bits at every world size.
        sent_side: side that is sent in the backward by ring and exchange; else None.
        bounds: lower bounds of the seconds forward and backward, from the busiest rank alone.
        busiest: a rank that computes longest.
        kv_rows: rows of keys by which the backward's kernel is chosen, see
            `StrategyCode.decisive_rows`.
        sends_together: whether the backward sends gradients together with shards; None before it is
            chosen.
        steps: upper bound of the steps of a direction.
        peak_bytes: most bytes that a rank holds beyond its inputs.
        communicator_bytes: bytes that NCCL's communicators hold on a rank for all calls, estimated.
        prediction: None if refused (it cannot run as asked) or not simulated.
        reason: why the candidate is refused or was not simulated; else None.
        ruled_out: whether it was not simulated because `at_least` is above the best time.
    """

    strategy: Strategy
    layouts: Layouts
    layout_name: str
    world_size: int
    same_bits: bool = False
    sent_side: Side | None = None
    bounds: tuple[float, float] = (0.0, 0.0)
    busiest: int = 0
    kv_rows: int | None = None
    sends_together: bool | None = None
    steps: int = 1
    peak_bytes: int = 0
    communicator_bytes: int = 0
    prediction: Prediction | None = None
    reason: str | None = None
    refused: bool = False
    ruled_out: bool = False

    @property
    def name(self) -> str:
        """The name in `strategy.NAMES`; a Ulysses group of all ranks is "ulysses", not "hybrid"."""
        return self.strategy.name_on(self.world_size)

    @property
    def full_name(self) -> str:
        """The name with the degrees, such as "hybrid 4 x all_gather"."""
        return self.strategy.full_name(self.world_size)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equal shards, except for 1 %."""
        return all(max(x.shard_lens) <= 1.01 * min(x.shard_lens) for x in self.layouts)

    @property
    def at_least(self) -> float:
        return sum(self.bounds)

    @property
    def seconds(self) -> float:
        """Predicted seconds of both directions; infinite without a prediction."""
        return float("inf") if self.prediction is None else self.prediction.total.seconds

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "full_name": self.full_name,
            "strategy": asdict(self.strategy),
            "layout": self.layout_name,
            "layouts": [str(layout) for layout in self.layouts],
            "same_bits": self.same_bits,
            "sent_side": self.sent_side,
            "at_least_s": self.at_least,
            "peak_bytes": self.peak_bytes,
            "communicator_bytes": self.communicator_bytes,
            "seconds": None if self.prediction is None else self.seconds,
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "reason": self.reason,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Choice:
    """The best candidate, and all others in order.

    Attributes:
        problem: the call and the ranks.
        best: the first of the candidates within `TIE` of the fastest.
        candidates: all, in this order: within `TIE`, slower (by time), not simulated,
            refused.
        replicated: costs of the exchange of rows that every rank holds, forward and backward, which
            all candidates have in addition to their own; empty without such rows.
    """

    problem: Problem
    best: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    replicated: tuple[DirectionCost, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """The best strategy: `ring_attention(..., strategy=choice.strategy)`."""
        return self.best.strategy

    @property
    def layouts(self) -> Layouts:
        """Layouts of the queries and of the keys, of the best candidate."""
        return self.best.layouts

    @property
    def layout(self) -> SequenceLayout:
        """Layout of the queries, and of the keys if both have the same length."""
        return self.best.layouts[0]

    @cached_property
    def reason(self) -> str:
        """A sentence that compares the best with the fastest of another name, else with any."""
        best, others = self.best, [c for c in self.candidates if c is not self.best]
        if self.problem.has_local_keys:
            return f"{best.full_name}: every rank holds all rows, so no key is sent"
        simulated = [c for c in others if c.prediction is not None]
        compared = [c for c in simulated if c.name != best.name] or simulated
        if compared:
            return f"{best.full_name}: {_comparison(best, compared[0])}"
        slower = [c.at_least for c in others if not c.refused]
        if not slower:
            return f"{best.full_name}: the only candidate"
        gain = min(slower) / best.seconds - 1.0
        return f"{best.full_name}: every other candidate takes at least {100 * gain:.0f} % longer"

    @property
    def traffic(self) -> list[str]:
        """A line about the states of recurrent layers in the best layout; none without them."""
        problem = self.problem
        if not (nbytes := problem.recurrent * problem.spec.batch):
            return []
        way = plan_states(self.layout, problem.documents, nbytes)
        sent = max(map(way.sent, range(problem.world_size))) * nbytes
        text = f"each recurrent layer: a rank sends at most {format_bytes(sent)} forward, by "
        return [text + f"{way.algorithm} in {len(way.rounds)} rounds"]

    @property
    def exchange(self) -> list[str]:
        """A line about the rows that every rank holds; none without them."""
        if not self.replicated:
            return []
        parts = [
            f"{format_bytes(cost.bytes_sent)} and {format_seconds(cost.seconds)} {words}"
            for words, cost in zip(("forward", "backward"), self.replicated, strict=False)
        ]
        return [
            f"{sum(self.problem.replicated)} rows on every rank: each call takes at most "
            f"{', '.join(parts)} more, exposed"
        ]

    @property
    def communicators(self) -> list[str]:
        """The memory of the best candidate's communicators in a line; empty without NCCL."""
        nbytes = self.best.communicator_bytes
        if not nbytes:
            return []
        text = "NCCL's communicators: {} on a rank for all layers (estimate by NCCL's defaults)"
        return [text.format(format_bytes(nbytes))]

    @property
    def rates(self) -> str:
        """The source of the kernels' speeds."""
        kind, _, detail = self.problem.cluster.device.source.partition(": ")
        return f"kernel speeds: {kind} ({detail})" if detail else f"kernel speeds: {kind}"

    def __str__(self) -> str:
        return self.table(verbose=True)

    def table(self, *, verbose: bool) -> str:
        """The candidates; unless verbose, the simulated ones alone, in 80 columns."""
        listed = [c for c in self.candidates if c.prediction is not None]
        cells = [_cells(c, self.best) for c in listed]
        names = [name for name in cells[0] if verbose or name not in VERBOSE_COLUMNS]
        rows = [names, *([row[name] for name in names] for row in cells)]
        others = self.left_out()
        if not verbose:
            hidden = len(self.candidates) - len(listed)
            others = [f"{hidden} others are slower, or refused: --verbose"] if hidden else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [describe(self.problem)]
        for row in rows:
            padded = [cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True)]
            padded += [cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join(padded).rstrip())
        rest = [
            *others,
            *self.traffic,
            *self.exchange,
            *self.communicators,
            self.rates,
            self.reason,
        ]
        return "\n".join([*lines, *rest])

    def left_out(self) -> list[str]:
        """A line for each reason why candidates are refused or not simulated."""
        groups: dict[str, list[str]] = {}
        for c in self.candidates:
            if c.prediction is None:
                # The reasons of those ruled out differ only in the bounds: one group.
                why = "left out: slower" if c.ruled_out else f"left out: {c.reason}"
                why = f"refused: {c.reason}" if c.refused else why
                groups.setdefault(why, []).append(f"{c.full_name} ({c.layout_name})")
        return [f"{why}: {', '.join(names)}" for why, names in groups.items()]

    def to_dict(self) -> dict[str, object]:
        problem = self.problem
        return {
            "world_size": problem.world_size,
            "spec": {**asdict(problem.spec), "dtype": str(problem.spec.dtype)},
            "mask": {
                "seqlen_q": problem.mask.seqlen_q,
                "seqlen_k": problem.mask.seqlen_q
                if problem.has_local_keys
                else problem.mask.seqlen_k,
                "words": problem.mask.words,
                "slices": len(problem.mask.slices),
                "area": problem.mask.area,
            },
            "cluster": asdict(problem.cluster),
            "backend": problem.backend,
            "rates": problem.cluster.device.source,
            "backward": problem.backward,
            "recurrent": self.traffic,
            "replicated": [asdict(cost) for cost in self.replicated],
            "best": self.best.to_dict(),
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


def describe(problem: Problem) -> str:
    """The problem in a line."""
    mask, spec, cluster = problem.mask, problem.spec, problem.cluster
    rows = f"{mask.seqlen_q}"
    if mask.seqlen_k != mask.seqlen_q and not problem.has_local_keys:
        rows += f" x {mask.seqlen_k}"
    return (
        f"{rows} rows on {problem.world_size} x {cluster.device.name} (nodes of "
        f"{cluster.node_size}), {spec.nheads}/{spec.nheads_kv} heads of {spec.headdim}, "
        f"{dtype_name(spec.dtype)}, {mask.words}, "
        f"{'forward and backward' if problem.backward else 'forward'}"
    )


def _cells(candidate: Candidate, best: Candidate) -> dict[str, str]:
    """The row of a simulated candidate, by the names of the columns."""
    prediction = candidate.prediction
    assert prediction is not None, "only simulated candidates have a row"
    back = prediction.backward
    return {
        "": "*" if candidate is best else "",
        "strategy": candidate.full_name,
        "layout": candidate.layout_name,
        "forward": format_seconds(prediction.forward.seconds),
        "backward": "" if back is None else format_seconds(back.seconds),
        "total": format_seconds(candidate.seconds),
        "exposed": format_seconds(prediction.total.exposed),
        "sent": format_bytes(prediction.total.bytes_sent),
        "messages": str(prediction.total.messages),
        "peak": format_bytes(candidate.peak_bytes),
        "sent side": candidate.sent_side or "",
    }


def _comparison(best: Candidate, other: Candidate) -> str:
    """How much faster or slower the best is, and the largest part of a difference in time."""
    assert best.prediction and other.prediction, "only candidates with a prediction are compared"
    where = "" if other.layout_name == best.layout_name else f" over {other.layout_name} shards"
    if best.seconds > 1.005 * other.seconds:
        slower = 100 * (best.seconds / other.seconds - 1.0)
        return (
            f"{slower:.1f} % slower than {other.full_name}{where}. Up to {100 * TIE:g} % counts as "
            f"equal, and {best.full_name} comes before it in the planner's fixed order"
        )
    if other.seconds <= 1.005 * best.seconds:
        # Differences below 0.5 % mean nothing.
        return f"as fast as {other.full_name}{where}"
    ours, theirs = best.prediction.total, other.prediction.total
    more = {name: getattr(theirs, name) - getattr(ours, name) for name in WAYS}
    worst = max(more, key=lambda name: more[name])
    if more["compute"] > 0.5 * (other.seconds - best.seconds):
        # The other ranks wait because the busiest one computes longer.
        worst = "compute"
    gain = 100 * (other.seconds / best.seconds - 1.0)
    why = WAYS[worst].format(format_seconds(more[worst]))
    return f"{gain:.0f} % faster than {other.full_name}{where}, {why}"


def format_seconds(seconds: float) -> str:
    """Three digits with their unit: 0.00123 is "1.23 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(nbytes: int) -> str:
    """Three digits with their decimal unit: 1230 is "1.23 kB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"
