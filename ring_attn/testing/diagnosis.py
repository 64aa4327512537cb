"""Compares a step on ranks with its twin in one process, and finds the contract that is broken.

A finding is a hypothesis that was tested: a rule that fits the numbers of every parameter, or a run
in which what is suspected is replaced, on the ranks or in the twin, and the difference is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from ring_attn.core.oracle import Verdict
from ring_attn.testing.hypotheses import Finding, Trial, clipping, fraction, listed, trials
from ring_attn.testing.observe import Change, Outcome

# Results by the names that a step returns them by.
LOSSES = {"loss": "loss", "evaluation loss": "eval_loss"}

# Runs the step with changes by rank, on a number of ranks: outcomes by run and rank.
Runs = Callable[[Sequence[Mapping[int, Change]], int], list[list[Outcome | str]]]


@dataclass
class Diagnosis:
    """Differences at one world size, their reasons, and what remains without one."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)


def results_of(run: Outcome) -> dict[str, Tensor]:
    """Losses, gradients and weights of a run by name."""
    return {
        **{key: run.losses[name] for key, name in LOSSES.items() if name in run.losses},
        **{f"gradient of {name}": x for name, x in run.gradients.items()},
        **{f"weight {name}": x for name, x in run.weights.items()},
    }


def error_of(x: Tensor, y: Tensor | None) -> float:
    if y is None or x.shape != y.shape:
        return math.inf
    error = float((x.double() - y.double()).norm())
    return error if math.isfinite(error) else math.inf


class Comparison:
    """Results of ranks beside the twin's, and how far roundings move each of them.

    A result of the ranks may be twice as far from the twin as the farthest run of the twin with
    random roundings, plus a unit in its last place.
    """

    def __init__(self, bounds: Mapping[str, float], ranks: Sequence[Outcome], twin: Outcome):
        self.bounds, self.ranks, self.twin = bounds, ranks, results_of(twin)
        self.values = {key: self._values(key) for key in self.twin}
        self.differences = {key: v for key in self.twin if not (v := self._worst(key)).ok}

    def _values(self, key: str) -> list[Tensor | None]:
        """A result on each rank that has it."""
        if key in LOSSES:
            given = [x for run in self.ranks if (x := run.losses.get(LOSSES[key])) is not None]
            return [*given] or [None]
        name = key.removeprefix("gradient of ").removeprefix("weight ")
        return [results_of(run).get(key) for run in self.ranks if name in run.weights] or [None]

    def given(self, key: str) -> list[Tensor]:
        return [x for x in self.values[key] if x is not None]

    def verdict(self, key: str, x: Tensor | None, right: Tensor, factor: float = 1.0) -> Verdict:
        error, bound = error_of(right * factor, x), self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def _worst(self, key: str) -> Verdict:
        right = self.twin[key]
        verdicts = [self.verdict(key, x, right) for x in self.values[key]]
        given = self.given(key)
        if key in LOSSES and len({float(x) for x in given}) > 1:  # each rank reports its part
            total = torch.stack(given).double().sum().to(right)
            verdicts.append(min(
                (self.verdict(key, x, right) for x in (total, total / len(given))),
                key=lambda v: v.error,
            ))  # fmt: skip
            verdicts = [verdicts[-1]] if verdicts[-1].ok else verdicts
        return max(verdicts, key=lambda v: v.ratio)

    def factor(self, keys: Sequence[str], part: int | None = None) -> float | None:
        """The number by which results of the ranks, or of one of them, differ from the twin's.

        A result that all ranks share is cut into as many parts as there are ranks, as FSDP does.
        """
        pairs = [pair for key in keys for pair in self._pairs(key, part)]
        product = sum(float((x.double() * y.double()).sum()) for _, x, y in pairs)
        square = sum(float(x.double().square().sum()) for _, x, _ in pairs)
        if not square or not product or not math.isfinite(product):
            return None
        factor = product / square
        near = 1 / round(1 / factor) if 0 < factor < 1 else round(factor)  # ranks, or one by ranks
        for f in (near, factor):
            if all(self.verdict(key, y, x, f).ok for key, x, y in pairs):
                return f
        return None

    def _pairs(self, key: str, part: int | None) -> list[tuple[str, Tensor, Tensor]]:
        given, right = self.given(key), self.twin[key]
        if any(x.shape != right.shape for x in given):
            return []
        if part is not None and self.agree(key) and right.ndim:
            cut = zip(right.chunk(len(self.ranks)), given[0].chunk(len(self.ranks)), strict=True)
            return [(key, *pair) for pair in [*cut][part : part + 1]]
        return [(key, right, x) for x in (given if part is None else given[part : part + 1])]

    def agree(self, key: str) -> bool:
        first, *rest = self.values[key]
        return first is not None and all(self.verdict(key, x, first).ok for x in rest)


def diagnose(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs
) -> Diagnosis:
    """Tests hypotheses about what differs between the ranks and the twin.

    The one that leaves no gradient unexplained is taken: what the numbers tell alone, one trial and
    the numbers after it, or two trials together.
    """
    plain = Comparison(bounds, ranks, twin)
    result = Diagnosis(len(ranks), plain.differences)
    if not result.differences:
        return result

    def tried(groups: Sequence[Sequence[Trial]]) -> list[tuple[list[Finding], list[str]]]:
        """Findings of each group of trials together, and results that it leaves unexplained."""
        explained = []
        of_ranks = [
            {r: {k: v for t in group for k, v in t.on_ranks.get(r, {}).items()}
             for r in range(len(ranks))} for group in groups
        ]  # fmt: skip
        of_twin = [{0: {k: v for t in group for k, v in t.in_twin.items()}} for group in groups]
        changed = [i for i, x in enumerate(of_ranks) if any(x.values())]
        some = dict(zip(changed, runs([of_ranks[i] for i in changed], len(ranks)), strict=True))
        changed = [i for i, x in enumerate(of_twin) if x[0]]
        one = dict(zip(changed, runs([of_twin[i] for i in changed], 1), strict=True))
        for i, group in enumerate(groups):
            new, (other,) = some.get(i, ranks), one.get(i, [twin])
            if isinstance(other, Outcome):
                real = [x for x in new if isinstance(x, Outcome)]
                found, left = by_numbers(Comparison(bounds, real, other))
                explained.append(([*(trial.finding for trial in group), *found], left))
        return explained

    def best() -> tuple[list[Finding], list[str]] | None:
        whole = [x for x in attempts if not any(key.startswith("gradient") for key in x[1])]
        return min(whole, key=lambda x: (len(x[1]), len(x[0])), default=None)

    # Ranks that clip their own gradients look like ranks that do not sum.
    attempts = [x for x in tried([[t] for t in clipping(twin, ranks)]) if len(x[0]) == 1]
    if not best():
        attempts.append(numbers := by_numbers(plain))
    if not best():
        found = trials(twin, ranks)
        attempts += tried([[trial] for trial in found])
    if not best():
        attempts += tried([*combinations(found, 2)])
    result.findings, left = best() or numbers
    moved = any(key.startswith("weight") for key in plain.differences)
    known = plain.differences.keys() - ({"evaluation loss"} if moved and best() else set())
    result.unexplained = [key for key in left if key in known]
    return result


def by_numbers(given: Comparison) -> tuple[list[Finding], list[str]]:
    """Rules that fit results as they are, and the results that none of them explains."""
    found, left = list[Finding](), dict.fromkeys(given.differences)
    gradients = [key for key in left if key.startswith("gradient")]
    weights = [key for key in left if key.startswith("weight")]
    for rule in (_no_targets, _not_summed, _scaled):
        for finding, keys in rule(given, [key for key in gradients if key in left]):
            found.append(finding)
            left = {key: None for key in left if key not in keys}
    if weights and not gradients:
        found.append(
            Finding(
                "optimizer step",
                f"gradients agree, but {len(weights)} weights differ after the step: its learning "
                "rate, its state or the number of its steps differs between ranks",
                "gradients before the optimizer's step are the twin's on every rank",
            )
        )
    # Weights follow from gradients, and the evaluation from weights.
    left = {key: None for key in left if key not in weights}
    if weights and found:
        left.pop("evaluation loss", None)
    for key in [key for key in LOSSES if key in left]:
        if reasons := [*_of_loss(given, key)]:
            found.append(reasons[0])
            del left[key]
    return found, [*left]


def _no_targets(given: Comparison, keys: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    unreal = [
        r for r, run in enumerate(given.ranks)
        if any(x.loss is not None and not math.isfinite(x.loss) for x in run.trained)
    ]  # fmt: skip
    if unreal and all(any(0 in x.counts() for x in given.ranks[r].trained) for r in unreal):
        finding = Finding(
            "denominator",
            f"the loss is divided by each rank's own count of targets, and rank {listed(unreal)} "
            "has none: 0 / 0; divide by the targets of the whole batch",
            "the loss is NaN on ranks without targets alone",
        )
        yield finding, [*keys, "loss"]


def _not_summed(given: Comparison, keys: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    alone: dict[str, dict[str, float]] = {"sum": {}, "mean": {}}
    for key in keys:
        parts, n = given.given(key), len(given.values[key])
        if n < 2 or len(parts) < n or len({x.shape for x in parts}) > 1 or given.agree(key):
            continue
        total = torch.stack([x.double() for x in parts]).sum(0)
        for op, x in (("sum", total), ("mean", total / n)):
            if given.verdict(key, x, given.twin[key]).ok:
                alone[op][key] = max(error_of(parts[0], y) for y in parts)
                break
    for op, names in alone.items():
        if names:
            finding = Finding(
                "gradient sum",
                f"gradients of {_some(given, [*names])} differ between ranks by up to "
                f"{max(names.values()):.2g}: they are not summed"
                f"{' (averaged)' if op == 'mean' else ''} when the optimizer uses them; call "
                "sync_gradients between backward and step",
                f"the {op} over the ranks is the twin's for each of them",
            )
            yield finding, [*names]


def _scaled(given: Comparison, keys: list[str]) -> Iterator[tuple[Finding, list[str]]]:
    factor = given.factor(keys)
    own = [] if factor else [given.factor(keys, r) for r in range(len(given.ranks))]
    some, wrapper = _some(given, keys), next((x.wrapper for x in given.ranks if x.wrapper), "")
    if factor is not None:
        text = f"gradients of {some} are {fraction(factor)} of the twin's: "
        text += (
            f"{wrapper or 'what sums them'} averages over the sequence's ranks; multiply the loss "
            f"by {fraction(1 / factor)}, or sum with sync_gradients"
            if factor < 1
            else "they are summed more than once, or the loss of the whole batch is counted on "
            f"each rank; divide the loss by {fraction(factor)}, or sum once"
        )
        yield Finding("gradient scale", text, "the factor fits each of them on every rank"), keys
    elif own and all(own):
        numbers = ", ".join(f"{fraction(x)} on rank {r}" for r, x in enumerate(own) if x)
        text = (
            f"gradients of {some} are other multiples of the twin's on each rank ({numbers}), as "
            "if clipped or scaled by its own norm: use the norm over all ranks"
        )
        yield Finding("clipping", text, "the factor of each rank fits all of them"), keys


def _of_loss(given: Comparison, key: str) -> Iterator[Finding]:
    right, values, n = given.twin[key], given.given(key), len(given.ranks)
    if not values:
        yield Finding(key, f"the {key} is on no rank", "no rank returned it")
        return
    forwards = [[x for x in run.forwards if x.training == (key == "loss")] for run in given.ranks]
    counts = [sum(sum(x.counts()) for x in rank) for rank in forwards]
    totals = [sum(sum(x.totals) for x in rank) for rank in forwards]
    numbers = f"{listed(sorted({f'{float(x):.6g}' for x in values}))} on {n} ranks, "
    numbers += f"{float(right):.6g} in one process"
    own = f"{listed(counts)} targets: add losses and counts, then divide"
    means = [x / n if n else math.nan for x, n in zip(totals, counts, strict=True)]
    shares = [sum(counts) / count if count else math.inf for count in counts]
    predictions = [
        ("denominator", f"is the mean of the ranks' means ({numbers}), which have {own}",
         [sum(means) / n] * n),
        ("denominator", f"is divided by each rank's own count ({numbers}), of {own}",
         [float(right) * x for x in shares]),
        (key, f"is {n} of the twin's ({numbers}): it counts each rank", [float(right) * n] * n),
        (key, f"is 1/{n} of the twin's ({numbers}): it is averaged, though each rank has its part",
         [float(right) / n] * n),
    ]  # fmt: skip
    for contract, text, predicted in predictions:
        pairs = [*zip(values, predicted, strict=False)]
        if all(
            float(x) == y or given.verdict(key, x, right.new_tensor(y)).ok for x, y in pairs
        ) and any(math.isfinite(y) for y in predicted):
            yield Finding(contract, f"the {key} {text}", "that number is the reported one")


def _some(given: Comparison, keys: Sequence[str]) -> str:
    count = sum(key.startswith("gradient") for key in given.twin)
    names = [key.removeprefix("gradient of ") for key in keys]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    some = f"{'all' if len(names) == count else len(names)} of {count} parameters"
    return some + ("" if len(names) == count else f" ({', '.join(names[:3])}{more})")
