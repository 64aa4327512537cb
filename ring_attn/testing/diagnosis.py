"""Compares a step on ranks with its twin in one process, and finds the contract that is broken.

A finding is a hypothesis that was tested: a rule that fits the numbers of every parameter, or a run
in which what is suspected is replaced, on the ranks or in the twin, and the difference is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.oracle import Verdict
from ring_attn.testing.hypotheses import Finding, Trial, fraction, listed, trials
from ring_attn.testing.observe import Change, Outcome

LOSSES = ("loss", "evaluation loss")

# Runs the step with changes by rank, on a number of ranks: outcomes by run and rank.
Runs = Callable[[Sequence[Mapping[int, Change]], int], list[list[Outcome]]]


@dataclass
class Diagnosis:
    """Differences at one world size, their reasons, and what remains without one."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)


def error_of(x: Tensor, y: Tensor | None) -> float:
    if y is None or x.shape != y.shape:
        return math.inf
    error = float((x.double() - y.double()).norm())
    return error if math.isfinite(error) else math.inf


class Comparison:
    """Results of ranks beside the twin's, and how far roundings move each of them."""

    def __init__(self, bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome]):
        self.bounds, self.ranks, self.twin = bounds, ranks, twin.results
        self.given = {key: [run.results.get(key) for run in ranks] for key in self.twin}
        for key in (key for key in LOSSES if key in self.twin):  # one rank may report it for all
            self.given[key] = [x for x in self.given[key] if x is not None] or [None]
        self.differences = {key: v for key in self.twin if not (v := self._worst(key)).ok}

    def verdict(self, key: str, x: Tensor | None, factor: float = 1.0) -> Verdict:
        """Compares a result of the ranks with that multiple of the twin's."""
        error, bound = error_of(self.twin[key] * factor, x), self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def combined(self, key: str) -> dict[str, Tensor]:
        """The sum and the mean of what ranks have, where they have different parts."""
        parts = [x.double() for x in self.given[key] if x is not None]
        if len(parts) < len(self.ranks) or len({x.shape for x in parts}) > 1:
            return {}
        if self.spread(key) <= self.bounds[key]:
            return {}
        total = torch.stack(parts).sum(0)
        return {"sum": total, "mean": total / len(parts)}

    def spread(self, key: str) -> float:
        """The distance of the ranks' results from rank 0's."""
        first, *rest = self.given[key]
        return math.inf if first is None else max((error_of(first, x) for x in rest), default=0.0)

    def _worst(self, key: str) -> Verdict:
        if key in LOSSES:
            for x in self.combined(key).values():  # each rank reports its part
                if (verdict := self.verdict(key, x)).ok:
                    return verdict
        return max((self.verdict(key, x) for x in self.given[key]), key=lambda v: v.ratio)

    def factor(self, keys: Sequence[str]) -> float | None:
        """The number by which all of these results differ from the twin's on every rank."""
        pairs = [(key, self.twin[key], x) for key in keys for x in self.given[key]]
        if not all(x is not None and x.shape == y.shape for _, y, x in pairs):
            return None
        square = sum(float(y.double().square().sum()) for _, y, _ in pairs)
        product = sum(float((x.double() * y.double()).sum()) for _, y, x in pairs if x is not None)
        if not square or not product or not math.isfinite(product):
            return None
        factor = product / square
        near = float(Fraction(factor).limit_denominator(len(self.ranks)))
        fits = (f for f in (near, factor) if all(self.verdict(key, x, f).ok for key, _, x in pairs))
        return next(fits, None)


def diagnose(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs
) -> Diagnosis:
    """Tests hypotheses about what differs between the ranks and the twin.

    The simplest that leaves no gradient unexplained is taken: what the numbers tell alone, one
    trial and the numbers after it, or two trials together.
    """
    plain = Comparison(bounds, twin, ranks)
    if not plain.differences:
        return Diagnosis(len(ranks), {})

    def rerun(changes: Sequence[dict[int, Any]], before: Sequence[Outcome]) -> list[list[Outcome]]:
        """Outcomes of the ranks, or of the twin, with each of these changes."""
        changed = [i for i, x in enumerate(changes) if any(x.values())]
        new = runs([changes[i] for i in changed], len(before)) if changed else []
        found = dict(zip(changed, new, strict=True))
        return [found.get(i, [*before]) for i in range(len(changes))]

    def tried(groups: Sequence[Sequence[Trial]]) -> Iterator[tuple[list[Finding], list[str]]]:
        of_ranks = [
            {r: {k: v for t in group for k, v in t.on_ranks.get(r, {}).items()}
             for r in range(len(ranks))} for group in groups
        ]  # fmt: skip
        of_twin = [{0: {k: v for t in group for k, v in t.in_twin.items()}} for group in groups]
        new = zip(groups, rerun(of_ranks, ranks), rerun(of_twin, [twin]), strict=True)
        for group, some, (one,) in new:
            found, left = by_numbers(Comparison(bounds, one, some))
            yield [*(trial.finding for trial in group), *found], left

    findings, left = numbers = by_numbers(plain)
    attempts, found = [numbers], list[Trial]()
    for together in (1, 2):
        if left:
            found = found or trials(twin, ranks)
            attempts += tried([*combinations(found, together)])
            whole = [x for x in attempts if not any(key.startswith("gradient") for key in x[1])]
            findings, left = min(whole, key=lambda x: (len(x[1]), len(x[0])), default=numbers)
    # An evaluation follows from the weights.
    moved = any(key.startswith("weight") for key in plain.differences)
    known = plain.differences.keys() - ({"evaluation loss"} if moved else set())
    return Diagnosis(len(ranks), plain.differences, findings, [key for key in left if key in known])


def by_numbers(given: Comparison) -> tuple[list[Finding], list[str]]:
    """Rules that fit results as they are, and the results that none of them explains."""
    found, left = list[Finding](), [*given.differences]
    gradients = [key for key in left if key.startswith("gradient")]
    weights = [key for key in left if key.startswith("weight")]
    for rule in (_not_summed, _scaled):
        for finding, keys in rule(given, [key for key in gradients if key in left]):
            found.append(finding)
            left = [key for key in left if key not in keys]
    if weights and not gradients:
        text = (
            f"gradients agree, but {len(weights)} weights differ after the step: its learning "
            "rate, its state or the number of its steps differs between ranks"
        )
        tested = "gradients before the optimizer's step are the twin's on every rank"
        found.append(Finding("optimizer step", text, tested))
    derived = {*weights, "evaluation loss"} if weights else set()
    for key in (key for key in LOSSES if key in left and key not in derived):
        if reason := _of_loss(given, key):
            found.append(reason)
            derived.add(key)
    return found, [key for key in left if key not in derived]


def _not_summed(given: Comparison, keys: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    for op in ("sum", "mean"):
        parts = {key: given.combined(key).get(op) for key in keys}
        names = [key for key, x in parts.items() if x is not None and given.verdict(key, x).ok]
        if names:
            largest = max(given.spread(x) for x in names)
            yield Finding(
                "gradient sum",
                f"gradients of {_some(given, names)} differ between ranks by up to {largest:.2g}: "
                f"they are not summed{' (averaged)' if op == 'mean' else ''} when they are clipped "
                "or the optimizer uses them; call sync_gradients after the last backward",
                f"the {op} over the ranks is the twin's for each of them",
            ), names  # fmt: skip
            keys = [key for key in keys if key not in names]


def _scaled(given: Comparison, keys: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    if (factor := given.factor(keys)) is not None:
        text = f"gradients of {_some(given, keys)} are {fraction(factor)} of the twin's: "
        text += (
            "what sums them averages over the sequence's ranks, as DDP and FSDP do; multiply the "
            f"loss by {fraction(1 / factor)}, or sum with sync_gradients"
            if factor < 1
            else "they are summed more than once, or the loss of the whole batch is counted on "
            f"each rank; divide the loss by {fraction(factor)}, or sum once"
        )
        yield Finding("gradient scale", text, "the factor fits each of them on every rank"), keys


def _of_loss(given: Comparison, key: str) -> Finding | None:
    n, values = len(given.ranks), [x for x in given.given[key] if x is not None]
    counts = [
        sum(sum(x.counts()) for x in run.forwards if x.training == (key == "loss"))
        for run in given.ranks
    ]
    own = [sum(counts) / count if count else math.inf for count in counts]
    for contract, text, factors in (
        (key, "counts each rank", [n] * n),
        (key, "is averaged, though each rank has its part", [1 / n] * n),
        ("denominator", f"is divided by each rank's own count ({listed(counts)} targets)", own),
    ):
        pairs = zip(values, factors, strict=False)
        if values and all(given.verdict(key, x, f).ok for x, f in pairs):
            numbers = listed(sorted({f"{float(x):.6g}" for x in values}))
            text = f"the {key} {text}: {numbers} on {n} ranks, {float(given.twin[key]):.6g} in one"
            return Finding(contract, f"{text} process", "that factor is the one between them")
    return None


def _some(given: Comparison, keys: Sequence[str]) -> str:
    count = sum(key.startswith("gradient") for key in given.twin)
    if len(keys) == count:
        return f"all of {count} parameters"
    names = [key.removeprefix("gradient of ") for key in keys[:3]]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{len(keys)} of {count} parameters ({', '.join(names)}{more})"
