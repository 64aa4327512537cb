"""Chooses how ranks share a call: every strategy that can, its time by simulation, and the best.

    layouts x strategies x degrees      candidates, in a fixed order
      -> refused                        with the reason: heads, layout, memory, same_bits
      -> bounded                        no faster than its busiest rank computes: not simulated if
                                        that is slower than what has been found
      -> simulated                      forward and backward on the cluster: `ring_attn.simulate`
      -> the best                       ties (within half a percent): fewer bytes, then the order

All of it is a function of the arguments. Only `agreed_strategy` talks: files and devices may differ
between ranks, so rank 0 chooses, and tells it to the others once for each kind of call.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ring_attn import balance
from ring_attn import validation as check
from ring_attn.backends import choose_backend, get_backend
from ring_attn.backends.base import folds_in_order
from ring_attn.cost import flops, gradient_packet, shard_packet
from ring_attn.devices import Cluster, Device, Link, Rate, builtin_cluster, load_cluster
from ring_attn.heads import is_replicated, share_heads
from ring_attn.layout import LAYOUTS, SequenceLayout
from ring_attn.mask import Mask
from ring_attn.memory import peak_of
from ring_attn.plan import Traveller
from ring_attn.schedule import SHARE_OF_DQ, Schedule, schedule_of
from ring_attn.simulate import Simulation, simulate
from ring_attn.spec import AttentionSpec
from ring_attn.strategies import all_gather, q_exchange, ring, ulysses
from ring_attn.strategy import NAMES, Strategy, resolve_strategy
from ring_attn.transport.base import Transport
from ring_attn.work import check_fit, pair_work

Layouts = tuple[SequenceLayout, SequenceLayout]

# What is simulated of the candidates that could be the best: only those, or of each name of
# `strategy.NAMES` at least the one with the least bound, or all.
Effort = Literal["best", "names", "all"]

# Where `explain` and `agreed_strategy` find the machine's calibration, if no cluster is given.
CLUSTER_VARIABLE = "RING_ATTN_CLUSTER"

# Ranks x steps of all that is simulated for one choice: four rings of 4096 ranks, half a minute.
# What is left then is not simulated, and said to be.
MOST_RANK_STEPS = 1 << 26

# A ring of more steps is simulated after all that are shorter.
MANY_STEPS = 16

# Balanced boundaries are sought among so many positions, so that long sequences cost no more.
BALANCE_POSITIONS = 1 << 15

# Bytes of what a rank tells about a choice.
MESSAGE_BYTES = 1024


@dataclass(frozen=True)
class Direction:
    """What one direction of a call costs, by simulation; seconds.

    Attributes:
        seconds: until the last rank is done.
        steps: in which anything is computed.
        compute: in attention, on the rank that computes longest.
        moves: in packing, adding and rounding, on the rank that does most of it.
        exposed: waiting for bytes, on the rank that waits longest.
        late: waiting for ranks that are not so far, on the rank that waits longest.
        bytes_sent: by the rank that sends most.
        messages: of the rank that takes part in most exchanges; a collective is one.
        inside_bytes: sent by all ranks within their nodes.
        between_bytes: sent by all ranks to other nodes.
        slowest_link: where the bytes are waited for longest; None where nothing is sent.
        slowest_exposed: how long they are waited for there.
    """

    seconds: float
    steps: int
    compute: float
    moves: float
    exposed: float
    late: float
    bytes_sent: int
    messages: int
    inside_bytes: int
    between_bytes: int
    slowest_link: str | None
    slowest_exposed: float

    def __add__(self, other: Direction) -> Direction:
        """One after the other; of the links that which is waited for longer."""
        slowest = max(self, other, key=lambda direction: direction.slowest_exposed)
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)
                if not f.name.startswith("slowest")}  # fmt: skip
        return Direction(
            **sums, slowest_link=slowest.slowest_link, slowest_exposed=slowest.slowest_exposed
        )

    @classmethod
    def of(cls, found: Simulation) -> Direction:
        """Of a simulation's tensors the greatest."""
        by_kind = {usage.link: usage.nbytes for usage in found.links}
        worst = found.slowest_link
        schedule = found.schedule
        return cls(
            seconds=found.seconds,
            steps=sum(any(bool(c.area.any()) for c in p.computes) for p in schedule.phases),
            compute=float(found.compute.max()),
            moves=float(found.moves.max()),
            exposed=float(found.exposed.max()),
            late=float(found.late.max()),
            bytes_sent=int(schedule.bytes_sent.max()),
            messages=int(schedule.messages.max()),
            inside_bytes=by_kind.get("inside", 0),
            between_bytes=by_kind.get("between", 0),
            slowest_link=None if worst is None else str(worst),
            slowest_exposed=0.0 if worst is None else worst.exposed,
        )


@dataclass(frozen=True)
class Prediction:
    """Both directions of a call; `backward` is None where it is not asked for."""

    forward: Direction
    backward: Direction | None

    @cached_property
    def total(self) -> Direction:
        """Their sum."""
        return self.forward if self.backward is None else self.forward + self.backward


@dataclass(frozen=True)
class Problem:
    """What is to be shared, and by whom.

    Attributes:
        spec: sizes and types.
        mask: over the whole sequence.
        world_size: number of ranks.
        cluster: what they are.
        backend: name of the backend, never "auto".
        same_bits: as for `ring_attention`.
        backward: whether gradients are wanted too.
        memory_bytes: that a rank has for its inputs and the call; infinite where it is not known.
    """

    spec: AttentionSpec
    mask: Mask
    world_size: int
    cluster: Cluster
    backend: str
    same_bits: bool | None = None
    backward: bool = True
    memory_bytes: float = float("inf")


@dataclass(frozen=True)
class Candidate:
    """A strategy over a layout, and what is known of it.

    Attributes:
        strategy: as a value.
        layouts: of the queries and of the keys.
        layout_name: "contiguous", "zigzag", "striped", "balanced" or "given".
        world_size: number of ranks.
        same_bits: whether its results have the same bits at every world size.
        travels: what goes round in the backward of its ring; None without a ring.
        at_least: seconds that it takes at least, by what its busiest rank computes.
        peak_bytes: most that a rank holds beyond its inputs.
        prediction: None where it is refused or was not simulated.
        reason: why it is refused, or was not simulated; else None.
        refused: whether it cannot be had.
        ruled_out: whether it was not simulated because its bound is no better than the best.
    """

    strategy: Strategy
    layouts: Layouts
    layout_name: str
    world_size: int
    same_bits: bool = False
    travels: Traveller | None = None
    at_least: float = 0.0
    peak_bytes: int = 0
    prediction: Prediction | None = None
    reason: str | None = None
    refused: bool = False
    ruled_out: bool = False

    @property
    def family(self) -> str:
        """The name in `strategy.NAMES`; one group of all ranks is "ulysses"."""
        name = self.strategy.name
        whole = self.strategy.ulysses_degree == self.world_size > 1
        return "ulysses" if name == "hybrid" and whole else name

    @property
    def label(self) -> str:
        """The name with its degrees."""
        return label(self.strategy, self.world_size)

    def num_steps(self, spec: AttentionSpec) -> int:
        """At most so many steps: shards that go round, or chunks of heads that are gathered."""
        if self.strategy.core == "all_gather":
            heads = -(-spec.nheads_kv // self.strategy.ulysses_degree)
            return -(-heads // (self.strategy.heads_per_chunk or 1))
        return max(1, self.world_size // self.strategy.ulysses_degree)

    @property
    def seconds(self) -> float:
        """Of both directions; infinite without a prediction."""
        return float("inf") if self.prediction is None else self.prediction.total.seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "family": self.family,
            "label": self.label,
            "strategy": asdict(self.strategy),
            "layout": self.layout_name,
            "layouts": [str(layout) for layout in self.layouts],
            "same_bits": self.same_bits,
            "travels": self.travels,
            "at_least_s": self.at_least,
            "peak_bytes": self.peak_bytes,
            "seconds": None if self.prediction is None else self.seconds,
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "reason": self.reason,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Choice:
    """The best candidate, and all others.

    Attributes:
        problem: what was asked.
        best: the candidate that takes least time.
        candidates: all, the fastest first, then those that were not simulated, then the refused.
    """

    problem: Problem
    best: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)

    @property
    def strategy(self) -> Strategy:
        """Of the best: `ring_attention(..., strategy=choice.strategy)`."""
        return self.best.strategy

    @property
    def layouts(self) -> Layouts:
        """Of the queries and of the keys, for the best."""
        return self.best.layouts

    @property
    def layout(self) -> SequenceLayout:
        """Of the queries, and of the keys where they have the same length."""
        return self.best.layouts[0]

    @cached_property
    def reason(self) -> str:
        """Why it is the best, in one sentence."""
        return _reason(self)

    def describe(self) -> str:
        """The problem in a line."""
        return describe(self.problem)

    def __str__(self) -> str:
        told = [c for c in self.candidates if c.prediction is not None]
        rows = [_header(self.problem.backward), *(_row(c, self.best) for c in told)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [describe(self.problem)]
        for row in rows:
            cells = [cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True)]
            cells += [cell.rjust(w) for cell, w in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *self.left_out(), self.reason])

    def left_out(self) -> list[str]:
        """What was refused or not simulated, and why: a line for each layout and reason."""
        groups: dict[tuple[bool, str, str], list[Candidate]] = {}
        for c in self.candidates:
            if c.prediction is None:
                # Bounds differ from candidate to candidate, their meaning does not.
                why = c.reason if c.refused or not c.ruled_out else "computes longer"
                groups.setdefault((c.refused, c.layout_name, str(why)), []).append(c)
        lines: dict[tuple[str, str, str], list[str]] = {}
        for (refused, layout, why), some in groups.items():
            if why == "computes longer":
                why = f"computes for {format_seconds(min(c.at_least for c in some))} or longer"
            names = ", ".join(c.label for c in some)
            start = "refused" if refused else "left out"
            lines.setdefault((start, names, why), []).append(layout)
        return [
            f"{start}: {', '.join(layouts)}: {names}: {why}"
            for (start, names, why), layouts in lines.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        problem = self.problem
        return {
            "world_size": problem.world_size,
            "spec": {**asdict(problem.spec), "dtype": str(problem.spec.dtype)},
            "mask": {
                "seqlen_q": problem.mask.seqlen_q,
                "seqlen_k": problem.mask.seqlen_k,
                "causal": problem.mask.causal,
                "window_size": problem.mask.window_size,
                "documents": len(problem.mask.documents),
            },
            "cluster": asdict(problem.cluster),
            "backend": problem.backend,
            "backward": problem.backward,
            "best": self.best.to_dict(),
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


# -- the public function


def explain(
    *,
    seqlen: int,
    world_size: int,
    nheads: int,
    headdim: int,
    nheads_kv: int | None = None,
    headdim_v: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seqlen_k: int | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    layout: str | SequenceLayout | Layouts = "auto",
    strategies: Sequence[str | Strategy] | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
    backward: bool = True,
    cluster: Cluster | None = None,
    device_type: str | None = None,
    memory_bytes: float | None = None,
    effort: Effort = "best",
) -> Choice:
    """How ranks share a call best, why, and what the other ways cost; needs no process group.

    Every strategy with every degree is bounded by what its busiest rank computes, and simulated
    where that does not rule it out (`ring_attn.simulate`). `strategy="auto"` chooses in the same
    way, with the layout that the call has.

    Args:
        seqlen: of the queries, all ranks together.
        world_size: number of ranks.
        nheads: q heads.
        headdim: of q and k.
        nheads_kv: kv heads; None is `nheads`.
        headdim_v: of v; None is `headdim`.
        batch: sequences.
        dtype: of q, k and v.
        seqlen_k: of the keys; None is `seqlen`.
        causal: as for `ring_attention`, likewise the next three.
        window_size: see there.
        cu_seqlens: see there; a sequence of ints does too.
        cu_seqlens_k: likewise.
        softcap: see there.
        layout: "auto" tries "contiguous", "zigzag", "striped" and boundaries that balance the work;
            one of these names; or a `SequenceLayout`, or a pair for queries and keys.
        strategies: names or values to choose among; None is all.
        backend: "auto", or a name.
        same_bits: as for `ring_attention`: True leaves only what has them.
        backward: whether the backward counts too.
        cluster: what the ranks are; None is the file named by RING_ATTN_CLUSTER, written by
            `ring-attn calibrate`, and without it what is built in for this machine's device.
        device_type: "cuda" or "cpu"; None is that of the cluster.
        memory_bytes: that a rank has for its inputs and the call; None is the device's memory.
        effort: "best" simulates what may be the best, "names" also one of each name, "all" all.

    Returns:
        `strategy` and `layout` to call with, `reason`, `candidates` with times in seconds and
        bytes; `str` of it is a table, `to_dict()` is for JSON.

    Raises:
        ValueError: sizes, mask or names that do not fit, nothing that can run, or a device that is
            not built in.
        TypeError: arguments of other types.
        OSError: RING_ATTN_CLUSTER names a file that cannot be read.

    Example:
        >>> from ring_attn.devices import builtin_cluster
        >>> choice = explain(
        ...     seqlen=1 << 20, world_size=8, nheads=32, nheads_kv=8, headdim=128, causal=True,
        ...     cluster=builtin_cluster("H100"),
        ... )
        >>> choice.best.family in ("ring", "all_gather", "ulysses", "hybrid")
        True
    """
    for name, value in (("seqlen", seqlen), ("world_size", world_size), ("batch", batch)):
        _check_count(name, value)
    nheads_kv = nheads if nheads_kv is None else nheads_kv
    headdim_v = headdim if headdim_v is None else headdim_v
    for name, value in (
        ("nheads", nheads), ("nheads_kv", nheads_kv), ("headdim", headdim), ("headdim_v", headdim_v)
    ):  # fmt: skip
        _check_count(name, value)
    if nheads % nheads_kv:
        raise ValueError(f"nheads must be a multiple of nheads_kv, got {nheads} and {nheads_kv}")
    if effort not in ("best", "names", "all"):
        raise ValueError(f"effort must be one of ['best', 'names', 'all'], got {effort!r}")
    check.check_softcap(softcap)
    check.check_same_bits(same_bits)
    mask = _mask_of(seqlen, seqlen_k, causal, window_size, cu_seqlens, cu_seqlens_k)
    if cluster is None:
        cluster = find_cluster(device_type, world_size)
    if device_type is None:
        gpu = cluster.device.peak_flops or cluster.device.memory_bytes
        device_type = "cuda" if gpu else "cpu"
    spec = AttentionSpec(device_type, dtype, batch, nheads, nheads_kv, headdim, headdim_v, softcap)
    problem = Problem(
        spec,
        mask,
        world_size,
        cluster,
        _backend_for(spec, backend),
        same_bits,
        backward,
        _memory_of(cluster) if memory_bytes is None else float(memory_bytes),
    )
    return choose(problem, _layouts_of(problem, layout), strategies, effort=effort)


def choose(
    problem: Problem,
    layouts: Mapping[str, Layouts],
    strategies: Sequence[str | Strategy] | None = None,
    *,
    effort: Effort = "best",
) -> Choice:
    """The best of all candidates; a function of the arguments alone.

    Args:
        problem: what is to be shared.
        layouts: by name, those to choose among.
        strategies: names or values to choose among; None is all.
        effort: what is simulated, see `Effort`.

    Raises:
        ValueError: a name that does not exist, or nothing that can run, with every reason.
    """
    wanted = _wanted(problem, strategies)
    found = [_bounded(problem, c) for c in _candidates(problem, layouts, wanted)]
    found = _simulated(problem, found, effort)
    usable = [c for c in found if c.prediction is not None]
    if not usable:
        reasons = sorted({f"{c.label} ({c.layout_name}): {c.reason}" for c in found})
        raise ValueError(
            f"no strategy can run {describe(problem)}: "
            + "; ".join(reasons or ["none was asked for"])
        )
    order = {id(c): index for index, c in enumerate(found)}

    def key(c: Candidate) -> tuple[float, float, float, int]:
        if c.prediction is None:
            return (1.0 + c.refused, c.at_least, 0.0, order[id(c)])
        return (0.0, float(f"{c.seconds:.3g}"), c.prediction.total.bytes_sent, order[id(c)])

    found.sort(key=key)
    return Choice(problem, found[0], tuple(found))


def schedule_for(problem: Problem, candidate: Candidate, *, backward: bool) -> Schedule:
    """What all ranks do in one direction of a candidate's call."""
    # Runs of heads of unlike sizes may each send another side round.
    travels = candidate.travels if candidate.strategy.ulysses_degree == 1 else None
    return schedule_of(
        candidate.strategy,
        problem.spec,
        candidate.layouts,
        problem.mask,
        backward=backward,
        travels=travels if backward else None,
        same_bits=candidate.same_bits,
        backend=problem.backend,
    )


# -- candidates


def label(strategy: Strategy, world_size: int) -> str:
    """The strategy's name with its degrees, for tables.

    Example:
        >>> label(Strategy("all_gather", ulysses_degree=4), 8)
        'hybrid 4 x all_gather'
    """
    text: str = strategy.core
    if strategy.heads_per_chunk is not None and strategy.heads_per_chunk > 1:
        text += f" by {strategy.heads_per_chunk} heads"
    if strategy.inner_degree > 1:
        text = f"double_ring {strategy.inner_degree}"
    if strategy.exchange_q:
        return f"q_exchange + {text}"
    if strategy.ulysses_degree > 1:
        whole = strategy.ulysses_degree == world_size
        return "ulysses" if whole else f"hybrid {strategy.ulysses_degree} x {text}"
    return text


def strategies_for(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    """Every strategy with every degree that is worth a look, in the order in which ties end.

    Example:
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 8, 2, 64, 64)
        >>> [label(strategy, 4) for strategy in strategies_for(spec, 4, 4)][:4]
        ['ring', 'all_gather', 'all_gather by 2 heads', 'ulysses']
    """
    yield Strategy()
    if world_size == 1:
        return
    divisors = [d for d in range(2, world_size) if world_size % d == 0]
    chunks = sorted({min(1 << i, spec.nheads_kv) for i in range(spec.nheads_kv.bit_length() + 1)})
    gathers = [Strategy("all_gather", heads_per_chunk=None if n == 1 else n) for n in chunks]
    yield from gathers
    yield Strategy(ulysses_degree=world_size)
    for degree in [d for d in divisors if d <= spec.nheads]:
        yield Strategy(ulysses_degree=degree)
        yield Strategy("all_gather", ulysses_degree=degree)
    for degree in _inner_degrees(divisors, world_size, node_size):
        yield Strategy(inner_degree=degree)
    yield Strategy("all_gather", exchange_q=True)
    yield Strategy(exchange_q=True)


def _inner_degrees(divisors: Sequence[int], world_size: int, node_size: int) -> list[int]:
    """Inner rings of a node, of its halves and of pairs of nodes; in one node the squarest."""
    if not divisors:
        return []
    if world_size <= node_size:
        return [min(divisors, key=lambda d: (abs(d * d - world_size), d))]
    near = [d for d in divisors if d in (node_size, node_size // 2, 2 * node_size)]
    return near or [min(divisors, key=lambda d: (abs(d - node_size), d))]


def _wanted(problem: Problem, asked: Sequence[str | Strategy] | None) -> list[Strategy]:
    """What is asked for as values; a name stands for all its degrees."""
    every = list(strategies_for(problem.spec, problem.world_size, problem.cluster.node_size))
    if asked is None:
        return every
    if isinstance(asked, (str, Strategy)):
        raise TypeError(f"strategies must be a sequence of names or values, got {asked!r}")
    wanted: list[Strategy] = []
    for one in asked:
        if isinstance(one, Strategy):
            wanted.append(one)
        elif one not in NAMES:
            raise ValueError(f"strategy must be one of {list(NAMES)} or a Strategy, got {one!r}")
        else:
            of_name = [s for s in every if _family(s, problem.world_size) == one]
            if not of_name and problem.world_size > 1:
                raise ValueError(
                    f"{one} has no degree for {problem.world_size} ranks; pass a Strategy with one"
                )
            # One rank is alone with any of them.
            wanted += of_name or every
    return list(dict.fromkeys(wanted))


def _family(strategy: Strategy, world_size: int) -> str:
    nowhere = SequenceLayout.contiguous(0, world_size)
    return Candidate(strategy, (nowhere, nowhere), "", world_size).family


def _candidates(
    problem: Problem, layouts: Mapping[str, Layouts], strategies: Sequence[Strategy]
) -> Iterator[Candidate]:
    for name, found in layouts.items():
        for strategy in strategies:
            if len(layouts) > 1 and name == "striped" and _is_hybrid(strategy, problem.world_size):
                # The rows of a group are many short runs then; zigzag has the same balance.
                continue
            yield Candidate(strategy, found, name, problem.world_size)


def _is_hybrid(strategy: Strategy, world_size: int) -> bool:
    return 1 < strategy.ulysses_degree < world_size


def _layouts_of(problem: Problem, layout: str | SequenceLayout | Layouts) -> dict[str, Layouts]:
    """The layouts to choose among, by name."""
    mask, world_size = problem.mask, problem.world_size
    if isinstance(layout, SequenceLayout):
        layout = (layout, layout)
    if not isinstance(layout, str):
        for side, one, seqlen in zip("qk", layout, (mask.seqlen_q, mask.seqlen_k), strict=True):
            if (one.world_size, one.seqlen) != (world_size, seqlen):
                raise ValueError(
                    f"the layout of {side} must be over {seqlen} positions and {world_size} ranks, "
                    f"got {one}"
                )
        return {"given": (layout[0], layout[1])}
    names = [*LAYOUTS, "balanced"]
    if layout != "auto" and layout not in names:
        raise ValueError(
            f"layout must be 'auto', one of {names} or a SequenceLayout, got {layout!r}"
        )
    found: dict[str, Layouts] = {}
    for name in names if layout == "auto" else [layout]:
        if name == "balanced":
            found[name] = _balanced(problem)
        else:
            q, k = (
                SequenceLayout.from_name(name, n, world_size)
                for n in (mask.seqlen_q, mask.seqlen_k)
            )
            found[name] = (q, k)
    return found


def _balanced(problem: Problem) -> Layouts:
    """Boundaries with equal mask area, on a grid of positions; a block counts as its middle row."""
    mask, world_size, backend = problem.mask, problem.world_size, get_backend(problem.backend)
    step = -(-mask.seqlen_q // BALANCE_POSITIONS)
    if folds_in_order(backend) and mask.seqlen_q >= 8 * backend.bits_unit * world_size:
        step = -(-step // backend.bits_unit) * backend.bits_unit
    starts = torch.arange(0, mask.seqlen_q, step)
    rows = torch.full_like(starts, step)
    rows[-1] = mask.seqlen_q - int(starts[-1])
    first, last = mask.visible_runs(starts + rows // 2)
    in_steps = balance.by_cost((last - first) * rows, world_size).cuts
    assert in_steps is not None, "by_cost makes boundaries"
    cuts = [min(cut * step, mask.seqlen_q) for cut in in_steps]
    queries = SequenceLayout.boundaries(cuts)
    if mask.seqlen_k == mask.seqlen_q:
        return queries, queries
    return queries, SequenceLayout.contiguous(mask.seqlen_k, world_size)


# -- refusals, bounds and memory


def _bounded(problem: Problem, candidate: Candidate) -> Candidate:
    """With its choices and its bound; or refused."""
    strategy, spec = candidate.strategy, problem.spec
    try:
        resolve_strategy(strategy, problem.world_size)
        check_fit(*candidate.layouts, problem.mask)
        core_spec, layouts = core_of(candidate, spec)
        check_fit(*layouts, problem.mask)
        why_not = _why_not_same_bits(problem, strategy, layouts)
        if problem.same_bits and why_not is not None:
            raise NotImplementedError(f"same_bits=True cannot be had here: {why_not}")
        same_bits = why_not is None if problem.same_bits is None else problem.same_bits
        travels: Traveller | None = None
        if strategy.core == "ring" and layouts[0].world_size > 1:
            cheaper = _cheaper_traveller(core_spec, layouts, problem.mask)
            travels = "kv" if same_bits else cheaper
        candidate = replace(
            candidate,
            same_bits=same_bits,
            travels=travels,
            at_least=_least_seconds(
                problem, strategy, layouts, _share_at_queries(strategy, same_bits, travels)
            ),
        )
    except (ValueError, NotImplementedError) as error:
        return replace(candidate, reason=str(error), refused=True)
    return candidate


def _with_memory(problem: Problem, candidate: Candidate) -> Candidate:
    """With its peak memory; refused where a rank has less."""
    peak = peak_of(
        candidate.strategy,
        problem.spec,
        candidate.layouts,
        problem.mask,
        backend=problem.backend,
        same_bits=candidate.same_bits,
        travels=candidate.travels or "kv",
        backward=problem.backward,
    )
    candidate = replace(candidate, peak_bytes=peak)
    inputs = _input_bytes(problem, candidate.layouts)
    if peak + inputs <= problem.memory_bytes:
        return candidate
    reason = (
        f"needs {format_bytes(peak)} beside {format_bytes(inputs)} of inputs, a rank has "
        f"{format_bytes(int(problem.memory_bytes))}"
    )
    return replace(candidate, reason=reason, refused=True)


def core_of(candidate: Candidate, spec: AttentionSpec) -> tuple[AttentionSpec, Layouts]:
    """Sizes and layouts of the core, after the exchange of heads or of queries."""
    strategy, (layout_q, layout_kv) = candidate.strategy, candidate.layouts
    if strategy.exchange_q:
        return spec, (q_exchange.exchanged_layout(layout_q), layout_kv)
    degree = strategy.ulysses_degree
    if degree == 1:
        return spec, candidate.layouts
    share = max(share_heads(spec.nheads, spec.nheads_kv, degree), key=lambda s: s.num)
    merged_q, merged_kv = (ulysses.merge_groups(one, degree)[0] for one in candidate.layouts)
    return replace(spec, nheads=share.num, nheads_kv=share.num_kv), (merged_q, merged_kv)


def _why_not_same_bits(problem: Problem, strategy: Strategy, layouts: Layouts) -> str | None:
    """None where the call would have the same bits at every world size, else the reason."""
    spec, degree = problem.spec, strategy.ulysses_degree
    if degree > 1 and is_replicated(
        share_heads(spec.nheads, spec.nheads_kv, degree), spec.nheads_kv
    ):
        return f"with ulysses_degree {degree} a kv head is on several ranks"
    if strategy.core == "all_gather":
        return all_gather.why_not_same_bits(layouts, problem.backend)
    return ring.why_not_same_bits(layouts, problem.mask, problem.backend, strategy.inner_degree)


@lru_cache(maxsize=64)
def _cheaper_traveller(spec: AttentionSpec, layouts: Layouts, mask: Mask) -> Traveller:
    """`cost.choose_traveller`: every shard and its gradients make as many moves on either side."""

    def total(travels: Traveller) -> int:
        rows = pair_work(*layouts, mask).travelling(travels).count.tolist()
        return sum(
            shard_packet(spec, travels, n).nbytes + gradient_packet(spec, travels, n).nbytes
            for n in rows
        )

    return "q" if total("q") < total("kv") else "kv"


def _share_at_queries(strategy: Strategy, same_bits: bool, travels: Traveller | None) -> float:
    """What of the backward is computed where the queries are, and not where the keys are."""
    if strategy.core == "all_gather":
        return SHARE_OF_DQ if same_bits else 1.0
    return 0.0 if travels == "q" else 1.0


def _least_seconds(
    problem: Problem, strategy: Strategy, layouts: Layouts, at_queries: float
) -> float:
    """What the busiest rank computes: the core's tiles at the device's rates, launches included."""
    spec, device = problem.spec, problem.cluster.device
    heads = -(-spec.nheads // strategy.ulysses_degree) / spec.nheads
    at_once = strategy.core == "all_gather"

    def busiest(backward: bool) -> float:
        rate = device.backward if backward else device.forward
        per_pair = flops(1, spec, backward=backward) * heads
        share = at_queries if backward else 1.0
        return _busiest(layouts, problem.mask, rate, per_pair, backward, at_once, share)

    return busiest(False) + (busiest(True) if problem.backward else 0.0)


@lru_cache(maxsize=256)
def _busiest(
    layouts: Layouts,
    mask: Mask,
    rate: Rate,
    per_pair: float,
    backward: bool,
    at_once: bool,
    at_queries: float,
) -> float:
    """Seconds of one direction; `at_once` is one launch for the shards of all ranks."""
    work = pair_work(*layouts, mask)
    seen = work.area > 0
    # The mean of both sides in the backward; the lesser of the two is on the safe side.
    rows = torch.minimum(work.q.count, work.kv.count) if backward else work.q.count

    def seconds(dim: int) -> Tensor:
        columns = work.area.sum(dim).double() + rate.row_columns * (rows * seen).sum(dim)
        columns += rate.edge_columns * (work.edge * seen).sum(dim)
        launches = seen.any(dim) if at_once else seen.sum(dim)
        return columns * per_pair / rate.flops + launches * rate.launch

    if at_queries == 1.0:
        return float(seconds(1).max())
    return float((at_queries * seconds(1) + (1 - at_queries) * seconds(0)).max())


def _input_bytes(problem: Problem, layouts: Layouts) -> int:
    """q, k and v of the rank with most rows, and dout where there is a backward."""
    spec = problem.spec
    dim_q = spec.headdim + (spec.headdim_v if problem.backward else 0)
    dim_kv = spec.headdim + spec.headdim_v
    most = max(
        rows * spec.nheads * dim_q + rows_kv * spec.nheads_kv * dim_kv
        for rows, rows_kv in zip(*(layout.shard_lens for layout in layouts), strict=True)
    )
    return most * spec.batch * spec.dtype.itemsize


# -- simulation


def _simulated(problem: Problem, found: list[Candidate], effort: Effort) -> list[Candidate]:
    """With predictions: by their bounds, and long rings last, only where they may be the best."""
    candidates = dict(enumerate(found))
    waiting = [i for i, c in candidates.items() if not c.refused]

    def turn(index: int) -> tuple[bool, float, int]:
        candidate = candidates[index]
        return candidate.num_steps(problem.spec) > MANY_STEPS, candidate.at_least, index

    best, left = float("inf"), MOST_RANK_STEPS
    for index in sorted(waiting, key=turn):
        candidate = candidates[index]
        steps = candidate.num_steps(problem.spec)
        if effort != "all" and candidate.at_least >= best:
            reason = f"computes for at least {format_seconds(candidate.at_least)}"
            candidates[index] = replace(candidate, reason=reason, ruled_out=True)
        elif steps * problem.world_size > left:
            reason = f"not simulated: its {steps} steps are beyond what one choice takes"
            candidates[index] = replace(candidate, reason=reason)
        else:
            candidates[index] = done = _predicted(problem, candidate)
            best = min(best, done.seconds)
            left -= steps * problem.world_size
    if effort == "names":
        for index in _of_each_name(candidates):
            plain = replace(candidates[index], reason=None, ruled_out=False)
            candidates[index] = _predicted(problem, plain)
    return list(candidates.values())


def _of_each_name(candidates: Mapping[int, Candidate]) -> Iterator[int]:
    """Of each name of which nothing was simulated the least bound, on the layout of the best."""
    best = min(candidates.values(), key=lambda c: c.seconds)
    for name in NAMES:
        of_name = {i: c for i, c in candidates.items() if c.family == name and not c.refused}
        if any(c.prediction is not None for c in of_name.values()):
            continue
        ruled_out = [i for i, c in of_name.items() if c.ruled_out]
        if ruled_out:
            yield min(
                ruled_out,
                key=lambda i: (
                    candidates[i].layout_name != best.layout_name, candidates[i].at_least, i
                ),
            )  # fmt: skip


def _predicted(problem: Problem, candidate: Candidate) -> Candidate:
    """With its memory and both directions; refused where a rank has less, or nobody knows how."""
    candidate = _with_memory(problem, candidate)
    if candidate.refused:
        return candidate
    try:
        schedules = [
            schedule_for(problem, candidate, backward=backward)
            for backward in ((False, True) if problem.backward else (False,))
        ]
    except NotImplementedError as error:
        return replace(candidate, reason=str(error), refused=True)
    found = [Direction.of(simulate(schedule, problem.cluster)) for schedule in schedules]
    return replace(candidate, prediction=Prediction(found[0], found[1] if found[1:] else None))


# -- words


def describe(problem: Problem) -> str:
    """The problem in a line."""
    mask, spec, cluster = problem.mask, problem.spec, problem.cluster
    rows = f"{mask.seqlen_q}" + (f" x {mask.seqlen_k}" if mask.seqlen_k != mask.seqlen_q else "")
    kinds = ["causal" if mask.causal else "full"]
    if mask.window_size != (-1, -1):
        kinds.append(f"window {mask.window_size[0]},{mask.window_size[1]}")
    if len(mask.documents) > 1:
        kinds.append(f"{len(mask.documents)} documents")
    return (
        f"{rows} rows on {problem.world_size} x {cluster.device.name} (nodes of "
        f"{cluster.node_size}), {spec.nheads}/{spec.nheads_kv} heads of {spec.headdim}, "
        f"{str(spec.dtype).removeprefix('torch.')}, {', '.join(kinds)}, "
        f"{'forward and backward' if problem.backward else 'forward'}"
    )


def _header(backward: bool) -> tuple[str, ...]:
    return (
        "", "strategy", "layout", "forward", "backward" if backward else "", "total", "exposed",
        "sent", "messages", "peak", "travels",
    )  # fmt: skip


def _row(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    start = ("*" if candidate is best else "", candidate.label, candidate.layout_name)
    prediction = candidate.prediction
    if prediction is None:
        return (*start, *7 * ("",))
    back = prediction.backward
    return (
        *start,
        format_seconds(prediction.forward.seconds),
        "" if back is None else format_seconds(back.seconds),
        format_seconds(candidate.seconds),
        format_seconds(prediction.total.exposed),
        format_bytes(prediction.total.bytes_sent),
        str(prediction.total.messages),
        format_bytes(candidate.peak_bytes),
        candidate.travels or "",
    )


def _reason(choice: Choice) -> str:
    """The best against the best of another name, and what the difference is."""
    best = choice.best
    others = [c for c in choice.candidates if c.prediction is not None and c.family != best.family]
    if not others:
        same = [c for c in choice.candidates if c.prediction is not None and c is not best]
        if same:
            return f"{best.label}: {_faster(best, same[0])}, {_fault(best, same[0])}"
        slower = [c for c in choice.candidates if not c.refused and c is not best]
        why = (
            "every other is refused" if not slower else "every other computes longer than it takes"
        )
        return (
            f"{best.label}: {why}" if len(choice.candidates) > 1 else f"{best.label}: the only one"
        )
    return f"{best.label}: {_faster(best, others[0])}, {_fault(best, others[0])}"


def _faster(best: Candidate, other: Candidate) -> str:
    gain = other.seconds / best.seconds - 1.0 if best.seconds else 0.0
    where = "" if other.layout_name == best.layout_name else f" over {other.layout_name} shards"
    if gain < 0.005:
        return f"as fast as {other.label}{where}"
    return f"{100 * gain:.0f} % faster than {other.label}{where}"


def _fault(best: Candidate, other: Candidate) -> str:
    """What most of the difference is."""
    assert best.prediction and other.prediction, "only candidates with a prediction are compared"
    ours, theirs = best.prediction.total, other.prediction.total
    if other.seconds <= 1.005 * best.seconds:
        fewer = theirs.bytes_sent - ours.bytes_sent
        return (
            f"which sends {format_bytes(fewer)} more"
            if fewer > 0
            else "which comes after it in order"
        )
    more = {
        name: getattr(theirs, name) - getattr(ours, name)
        for name in ("exposed", "late", "compute", "moves")
    }
    worst = max(more, key=lambda name: more[name])
    if more["compute"] > 0.5 * (other.seconds - best.seconds):
        # That others wait for the busiest rank follows from it.
        worst = "compute"
    amount = format_seconds(more[worst])
    return {
        "exposed": f"which waits {amount} longer for bytes ({theirs.slowest_link})",
        "late": f"whose ranks wait {amount} longer for one another",
        "compute": f"whose busiest rank computes {amount} longer",
        "moves": f"which packs, adds and rounds {amount} longer",
    }[worst]


def format_seconds(seconds: float) -> str:
    """Three digits with their unit: 0.00123 is "1.23 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def format_bytes(nbytes: int) -> str:
    """Three digits with their unit, of 1000: 1230 is "1.23 kB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


# -- what is not given


def find_cluster(device_type: str | None = None, world_size: int | None = None) -> Cluster:
    """The cluster of this machine: RING_ATTN_CLUSTER's, else what is built in for its device.

    GPUs are in nodes of LOCAL_WORLD_SIZE (8 without a launcher), with NVLink inside and 400 Gb/s
    between. The CPU's description is a rough one; `ring-attn calibrate` measures it.

    Args:
        device_type: "cuda" or "cpu"; None is "cuda" where torch has a GPU.
        world_size: of several calibrations in the file that which is nearest.

    Raises:
        ValueError: a GPU that is not built in, or a file that is no calibration.
        OSError: a file that cannot be read.
    """
    path = os.environ.get(CLUSTER_VARIABLE)
    if path:
        return load_cluster(path, world_size)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if device_type == "cpu":
        return cpu_cluster(local or world_size or 1)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    for known in ("A100", "H100", "H200", "B200"):
        if known in name:
            return builtin_cluster(known, node_size=local or 8)
    raise ValueError(
        f"there is no built-in description of this machine ({name}): pass cluster=, or run "
        f"`ring-attn calibrate --json PATH` and set {CLUSTER_VARIABLE}=PATH"
    )


def cpu_cluster(node_size: int = 1) -> Cluster:
    """Ranks of one core each that talk over gloo: what a core does, to a factor of two.

    Example:
        >>> cpu_cluster(4).device.name
        'CPU core'
    """
    # torch's operator on one core with AVX512 (bench/results/NOTES.md): 83 and 77 GFLOP/s.
    forward, backward = Rate(83e9, 1e-4, 30.0, 300.0), Rate(77e9, 1e-4, 60.0, 300.0)
    core = Device("CPU core", 0.0, forward, backward, 4e9)
    return Cluster(core, node_size, Link("gloo", 4e-4, 1.5e9), Link("gloo between", 5e-4, 1.1e9))


def _backend_for(spec: AttentionSpec, backend: str) -> str:
    """The backend by name; for GPUs that are not here, what "auto" would take there."""
    if spec.device_type == "cuda" and not torch.cuda.is_available():
        if backend != "auto":
            return get_backend(backend).name
        return "aten" if spec.dtype == torch.float64 or spec.headdim > 256 else "triton"
    return choose_backend(spec, backend).name


def _memory_of(cluster: Cluster) -> float:
    return cluster.device.memory_bytes or float("inf")


def _mask_of(
    seqlen: int,
    seqlen_k: int | None,
    causal: bool,
    window_size: Sequence[int],
    cu_seqlens: Tensor | Sequence[int] | None,
    cu_seqlens_k: Tensor | Sequence[int] | None,
) -> Mask:
    if seqlen_k is not None:
        _check_count("seqlen_k", seqlen_k)
    window = check.check_window(window_size, causal)
    cu_q = check.check_cu_seqlens("cu_seqlens", _tensor(cu_seqlens))
    cu_k = check.check_cu_seqlens("cu_seqlens_k", _tensor(cu_seqlens_k))
    check.check_documents(cu_q, cu_k)
    cu_k = cu_q if cu_k is None else cu_k
    seqlen_k = seqlen if seqlen_k is None else seqlen_k
    return check.check_mask(Mask(seqlen, seqlen_k, causal, window, cu_q, cu_k))


def _tensor(values: Tensor | Sequence[int] | None) -> Tensor | None:
    return values if values is None or isinstance(values, Tensor) else torch.tensor(list(values))


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


# -- the same on every rank


# By transport, so that it goes with its group: what was agreed on for which arguments.
_agreed: weakref.WeakKeyDictionary[Any, dict[object, Strategy]] = weakref.WeakKeyDictionary()

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, NotImplementedError, RuntimeError)
}


def agreed_strategy(
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    transport: Transport,
    *,
    backend: str,
    same_bits: bool | None,
    backward: bool,
    node_size: int | None = None,
) -> Strategy:
    """The strategy of `strategy="auto"`: rank 0's choice, the same on every rank.

    At the first call with new arguments rank 0 chooses, and every rank gathers 1 KiB of every other
    over the transport; later ones are looked up, without work or communication. Ranks can differ in
    RING_ATTN_CLUSTER, in their files and in their devices; in the arguments they cannot.

    Args:
        spec: of the call, likewise the next two.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        transport: of this rank among all ranks of the call.
        backend: the name that was chosen, not "auto".
        same_bits: as for `ring_attention`.
        backward: whether gradients are wanted.
        node_size: consecutive ranks that are a node, where a mesh tells it.

    Raises:
        ValueError: ranks with different arguments, by number; or what rank 0 raised, on all alike.
        RuntimeError: a rank did not take part in time.
    """
    if transport.world_size == 1:
        return Strategy()
    key = (spec, layouts, mask, backend, same_bits, backward, node_size)
    known = _agreed.setdefault(transport, {})
    if key not in known:

        def chosen() -> Strategy:
            cluster = find_cluster(spec.device_type, transport.world_size)
            if node_size is not None:
                # A node's ports are those of the cluster's own nodes.
                cluster = replace(cluster, node_size=node_size, ports=None)
            problem = Problem(
                spec, mask, transport.world_size, cluster, backend, same_bits, backward,
                _memory_of(cluster),
            )  # fmt: skip
            return choose(problem, {"given": layouts}).strategy

        device = torch.device(spec.device_type)
        known[key] = _told_by_first(repr(key), chosen, transport, device)
    return known[key]


def _told_by_first(
    arguments: str, chosen: Callable[[], Strategy], transport: Transport, device: torch.device
) -> Strategy:
    """Runs `chosen` on rank 0, and gives its result or its error on every rank."""
    mine: dict[str, Any] = {"arguments": hashlib.sha256(arguments.encode()).hexdigest()}
    if transport.rank == 0:
        try:
            mine["strategy"] = asdict(chosen())
        except Exception as error:
            mine["error"] = [type(error).__name__, str(error)]
    told = _gathered(mine, transport, device)
    odd = [rank for rank, one in enumerate(told) if one["arguments"] != told[0]["arguments"]]
    if odd:
        raise ValueError(
            f"strategy='auto' needs the same arguments on every rank: ranks {odd} have others than "
            "rank 0; RING_ATTN_DEBUG=1 says which"
        )
    if "error" in told[0]:
        name, text = told[0]["error"]
        raise _ERRORS.get(name, ValueError)(f"strategy='auto', chosen by rank 0: {text}")
    return Strategy(**told[0]["strategy"])


def _gathered(
    mine: Mapping[str, Any], transport: Transport, device: torch.device
) -> list[dict[str, Any]]:
    """What every rank tells, as JSON in messages of one length."""
    text = json.dumps(mine)
    if len(text) > MESSAGE_BYTES:  # a long error; in JSON a character takes up to 6 bytes
        name, words = mine["error"]
        text = json.dumps({**mine, "error": [name, words[: MESSAGE_BYTES // 8] + " ..."]})
    message = bytearray(text.encode().ljust(MESSAGE_BYTES))
    send = torch.frombuffer(message, dtype=torch.uint8).to(device)
    recv = torch.empty(transport.world_size * MESSAGE_BYTES, dtype=torch.uint8, device=device)
    try:
        transport.all_gather("shards", 0, send, recv)
        transport.wait("shards")
    except RuntimeError as error:
        raise RuntimeError(
            "strategy='auto': the ranks choose together at the first call with new arguments, and "
            f"not all of them came: {error}"
        ) from error
    parts = bytes(recv.cpu().tolist())
    return [
        json.loads(parts[start : start + MESSAGE_BYTES])
        for start in range(0, len(parts), MESSAGE_BYTES)
    ]
