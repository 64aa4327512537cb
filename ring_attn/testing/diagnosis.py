"""Comparison of a step on ranks with its twin in one process, and the reasons of differences.

A finding is a hypothesis that was tested. Either it is a rule that fits the numbers of every
parameter, or a trial: one input is replaced, on the ranks or in the twin, and the difference
disappears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.oracle import Verdict
from ring_attn.testing.observe import Change, Outcome
from ring_attn.testing.trials import Finding, Trial, listed, trials_of

LOSSES = ("loss", "evaluation loss")
# Begins the names of the bounds of gradients after the backward.
AFTER_BACKWARD = "after backward"

# Runs the step with changes by rank, on a number of ranks: outcomes by run and rank.
Runs = Callable[[Sequence[Mapping[int, Change]], int], list[list[Outcome]]]


@dataclass(frozen=True)
class Diagnosis:
    """Differences at one world size, their reasons, and the differences without a reason."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding]
    unexplained: list[str]


class Explanation(NamedTuple):
    """Findings, and the names of the results that none of them explains."""

    findings: list[Finding]
    unexplained: list[str]


def diagnose(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs
) -> Diagnosis:
    """Test hypotheses about the differences between the ranks and the twin.

    The simplest explanation that leaves no gradient unexplained is chosen: rules that fit the
    numbers, or one trial and rules that fit the numbers after it.
    """
    comparison = compared(bounds, twin, ranks, runs, {})
    explanation = by_numbers(comparison)
    if explanation.unexplained:
        attempts = [explanation]
        attempts += _by_trials(bounds, twin, ranks, runs, explanation.unexplained)
        without_gradients = [
            attempt
            for attempt in attempts
            if not any(key.startswith("gradient") for key in attempt.unexplained)
        ]
        explanation = min(without_gradients, key=_complexity, default=explanation)
    differences = comparison.differences
    unexplained = [key for key in explanation.unexplained if key in differences]
    findings = explanation.findings
    states = [key for key in unexplained if comparison.differs_between_ranks(key)]
    if states:
        findings = [*findings, _own_states(states)]
        unexplained = [key for key in unexplained if key not in states]
    return Diagnosis(len(ranks), differences, findings, unexplained)


def _complexity(explanation: Explanation) -> tuple[int, int]:
    return len(explanation.unexplained), len(explanation.findings)


def _by_trials(
    bounds: Mapping[str, float],
    twin: Outcome,
    ranks: Sequence[Outcome],
    runs: Runs,
    unexplained: Sequence[str],
) -> list[Explanation]:
    """Run all trials, and return an explanation for each: its finding, and rules for the rest."""
    trials = [*trials_of(twin, ranks, unexplained)]
    explanations = []

    def explain(trial: Trial, comparison: Comparison) -> None:
        findings, left = by_numbers(comparison)
        # An evaluation loss that agreed before the trial is not the trial's subject.
        left = [key for key in left if key != "evaluation loss" or key in unexplained]
        if trial.divides_by_zero:
            left = [key for key in left if not _is_loss_of_nan(key, comparison)]
        explanations.append(Explanation([trial.finding, *findings], left))

    new_ranks = _outcomes([trial for trial in trials if trial.on_ranks], len(ranks), runs)
    new_twins = _outcomes([trial for trial in trials if trial.in_twin], 1, runs)
    for trial in trials:
        of_ranks = new_ranks.get(id(trial), ranks)
        (of_twin,) = new_twins.get(id(trial), [twin])
        if not of_twin.results:  # the twin cannot run with this change
            continue
        if trial.scale != 1.0:
            of_twin = _scaled(of_twin, trial.scale)
        change = trial.changes[0] if trial.in_twin else {}
        explain(trial, compared(bounds, of_twin, of_ranks, runs, change))
    return explanations


def _scaled(twin: Outcome, factor: float) -> Outcome:
    """Return an outcome whose loss and gradients are multiplied by a factor."""
    results = {
        key: x * factor if key == "loss" or key.startswith("gradient") else x
        for key, x in twin.results.items()
    }
    return replace(twin, results=results)


def _is_loss_of_nan(key: str, comparison: Comparison) -> bool:
    """Return whether a result is a loss that is not a number on some ranks."""
    return key in ("loss", "evaluation loss") and bool(comparison.given[key].isnan().any())


def _outcomes(trials: Sequence[Trial], num: int, runs: Runs) -> dict[int, list[Outcome]]:
    """Run the step once for each trial, on a number of ranks; return outcomes by the trial's id."""
    if not trials:
        return {}
    outcomes = runs([trial.changes for trial in trials], num)
    return {id(trial): of_trial for trial, of_trial in zip(trials, outcomes, strict=True)}


class Comparison:
    """The results of the ranks and of the twin, and how far roundings move each of them.

    Attributes:
        given: each result of all ranks, (ranks, *shape); a loss may be reported by one rank.
        after_backward: for each rank, `Outcome.after_backward`.
        of_twin: the same of the twin.
        owners: `Outcome.owners`.
        differences: the results that differ by more than their bounds.
    """

    def __init__(self, bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome]):
        self.bounds = bounds
        self.twin = twin.results
        self.num = len(ranks)
        self.given = {key: stacked(key, twin, ranks) for key in self.twin}
        self.after_backward = [rank.after_backward for rank in ranks]
        self.of_twin = twin.after_backward
        self.owners = ranks[0].owners
        self.differences: dict[str, Verdict] = {}
        for key, given in self.given.items():
            if key.startswith("state") and not _have_one_shape(key, twin, ranks):
                continue  # such as a cache of a rank's own rows
            verdict = self.verdict(key, given)
            # Ranks may report their parts of a loss, for logs, and hold parts of counts, which a
            # later step sums.
            is_part = (key in LOSSES and self.is_part(key)) or self.is_part_of_state(key)
            if not verdict.ok and not is_part:
                self.differences[key] = verdict

    def verdict(self, key: str, given: Tensor, factor: float = 1.0) -> Verdict:
        """Compare results of some ranks with that multiple of the twin's result."""
        error = distance(given, self.twin[key] * factor)
        bound = self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def is_part(self, key: str) -> bool:
        """Return whether ranks have different results whose sum or mean is the twin's result."""
        given = self.given[key]
        if len(given) < self.num or distance(given, given[0]) <= self.bounds[key]:
            return False
        total = given.sum(0, keepdim=True)  # (ranks, *shape) -> (1, *shape)
        return self.verdict(key, total).ok or self.verdict(key, total / self.num).ok

    def is_part_of_state(self, key: str) -> bool:
        """Return whether ranks have different states whose sum is the twin's state."""
        if not key.startswith("state"):
            return False
        total = self.given[key].sum(0, keepdim=True)  # (ranks, *shape) -> (1, *shape)
        return self.verdict(key, total).ok

    def differs_between_ranks(self, key: str) -> bool:
        """Return whether a result is a state, and ranks have different ones."""
        given = self.given[key]
        return key.startswith("state") and distance(given, given[0]) > self.bounds[key]

    def factor(self, keys: Sequence[str]) -> Fraction | float | None:
        """Return the ratio of all of these results, on every rank, to the twin's results.

        Return None if there is no common ratio.
        """
        # Least squares over all elements of the results: factor = <given, twin> / <twin, twin>.
        product = sum(float((self.given[key] * self.twin[key]).sum()) for key in keys)
        square = sum(float(self.twin[key].double().square().sum()) for key in keys) * self.num
        if not square or not product or not math.isfinite(product):
            return None
        factor = product / square
        for candidate in (Fraction(factor).limit_denominator(self.num), factor):
            if all(self.verdict(key, self.given[key], float(candidate)).ok for key in keys):
                return candidate
        return None


def compared(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs, change: Change
) -> Comparison:
    """Compare the ranks with a twin that had a change.

    If weights differ and gradients do not, compare them with a twin that steps by the gradients of
    the ranks: Adam's first step depends on the sign of a gradient, and rounding decides the sign of
    a gradient near zero.
    """
    comparison = Comparison(bounds, twin, ranks)
    kinds = {key.split()[0] for key in comparison.differences}
    if "weight" in kinds and "gradient" not in kinds:
        with_gradients = {**change, ("gradients",): ranks[0].gradients}
        ((stepped,),) = runs([{0: with_gradients}], 1)
        return Comparison(bounds, stepped, ranks)
    return comparison


def _have_one_shape(key: str, twin: Outcome, ranks: Sequence[Outcome]) -> bool:
    """Return whether all ranks have a result in the shape of the twin's."""
    shape = twin.results[key].shape
    return all(key in rank.results and rank.results[key].shape == shape for rank in ranks)


def stacked(key: str, twin: Outcome, runs: Sequence[Outcome]) -> Tensor:
    """Return a result of all runs, (runs, *shape); NaN for a run that lacks it.

    One rank may report a loss for all ranks: then there is only this one.
    """
    right = twin.results[key].double()
    given = [run.results.get(key) for run in runs]
    if key in LOSSES:
        given = [x for x in given if x is not None] or [None]
    lacking = torch.full_like(right, math.nan)
    parts = [lacking if x is None or x.shape != right.shape else x.double() for x in given]
    return torch.stack(parts)


def distance(given: Tensor, right: Tensor) -> float:
    """Return the largest distance of results from another; infinite if one is not finite.

    `given` is (runs, *shape), and `right` has the shape.
    """
    errors = (given - right.double()).reshape(len(given), -1)  # (runs, elements)
    error = float(errors.norm(dim=1).max())
    return error if math.isfinite(error) else math.inf


def by_numbers(given: Comparison) -> Explanation:
    """Return the rules that fit the results, and the results that no rule explains."""
    findings: list[Finding] = []
    gradients = [key for key in given.differences if key.startswith("gradient")]
    weights = [key for key in given.differences if key.startswith("weight")]
    losses = [key for key in given.differences if key in LOSSES]
    states = [key for key in given.differences if key.startswith("state")]
    if weights:
        states = []  # they may follow from the weights
        losses = [key for key in losses if key != "evaluation loss"]  # it follows from the weights
        if not gradients:
            text = f"{len(weights)} weights differ, even if the twin steps by the ranks' gradients"
            tested = "the twin ran again, and its optimizer got the gradients of the ranks"
            findings.append(Finding("optimizer step", text, tested))
    not_summed = [key for key in gradients if given.is_part(key)]
    if not_summed:
        findings.append(_missing_sum(given, not_summed))
        gradients = [key for key in gradients if key not in not_summed]
    factor = given.factor(gradients)
    if factor is not None:
        findings.append(_wrong_scale(gradients, factor))
        gradients = []
    if gradients:
        factors = _factors_of_ranks(given, gradients)
        if factors is not None:
            findings.append(_scaled_before_the_sum(gradients, factors))
            gradients = []
    if gradients and _adds_up_after_backward(given, gradients):
        findings.append(_changed_after_backward(gradients))
        gradients = []
    if gradients:
        factors_of_shards = _factors_of_shards(given, gradients)
        if factors_of_shards is not None:
            findings.append(_scaled_shards(gradients, factors_of_shards))
            gradients = []
    for key in [*losses]:
        for ratio, how in (
            (Fraction(given.num), "counts each rank"),
            (Fraction(1, given.num), "is averaged"),
        ):
            if given.verdict(key, given.given[key], float(ratio)).ok:
                text = f"the {key} {how}: it is {ratio} of the twin's"
                findings.append(Finding(key, text, "the numbers have this ratio"))
                losses.remove(key)
    return Explanation(findings, [*gradients, *losses, *states])


def _own_states(states: Sequence[str]) -> Finding:
    """Return the finding that ranks have different buffers or frozen weights after the step."""
    names = listed(key.removeprefix("state ") for key in states)
    text = (
        f"{len(states)} buffers or frozen weights ({names}) that the step changes are other ones "
        "on each rank: compute them from the rows of all ranks, so sum counts and statistics over "
        "the ranks first, and use gradients that are summed"
    )
    return Finding("state", text, "they were compared after the step, between ranks and twin")


def _missing_sum(given: Comparison, gradients: Sequence[str]) -> Finding:
    """Return the finding that ranks have parts of gradients."""
    spread = max(distance(given.given[key], given.given[key][0]) for key in gradients)
    text = (
        f"{len(gradients)} gradients ({listed(gradients)}) differ between ranks by up to "
        f"{spread:.2g}: sum them by sync_gradients, before they are clipped or used"
    )
    tested = "their sum, or their mean, over the ranks is the twin's gradient"
    return Finding("gradient sum", text, tested)


def _factors_of_ranks(given: Comparison, gradients: Sequence[str]) -> list[float] | None:
    """Return a factor for each rank, by which its gradients were multiplied before they were added.

    Return None if there are no such factors, if they are equal, or if the plain sum is not a
    multiple of the twin's gradients.
    """
    names = [key.removeprefix("gradient of ") for key in gradients]
    if any(name not in after for name in names for after in given.after_backward):
        return None
    # (ranks, elements of all gradients)
    parts = torch.stack(
        [
            torch.cat([after[name].double().flatten() for name in names])
            for after in given.after_backward
        ]
    )
    used = torch.cat([given.given[key][0].flatten() for key in gradients])
    right = torch.cat([given.twin[key].double().flatten() for key in gradients])
    total = parts.sum(0)
    if not all(x.isfinite().all() and x.any() for x in (parts, used, right, total)):
        return None
    factors = torch.linalg.lstsq(parts @ parts.mT, parts @ used).solution
    of_twin = (right @ total) / total.square().sum()
    sizes = [given.twin[key].numel() for key in gradients]
    for key, got, fit, of_sum, of_right in zip(
        gradients,
        used.split(sizes),
        (factors @ parts).split(sizes),
        (of_twin * total).split(sizes),
        right.split(sizes),
        strict=True,
    ):
        bound = given.bounds[key]
        if float((got - fit).norm()) > bound or float((of_right - of_sum).norm()) > bound:
            return None
    if float(factors.max() - factors.min()) < 1e-3 * float(factors.abs().max()):
        return None
    return [float(factor) for factor in factors]


def _adds_up_after_backward(given: Comparison, gradients: Sequence[str]) -> bool:
    """Return whether the gradients after the backward add up to the twin's over the ranks.

    Then code between the backward and their first use makes them wrong.
    """
    names = [key.removeprefix("gradient of ") for key in gradients]
    everyone = [*given.after_backward, given.of_twin]
    if any(name not in after for name in names for after in everyone):
        return False
    for name in names:
        total = torch.stack([after[name].double() for after in given.after_backward]).sum(0)
        right = given.of_twin[name].double()
        if distance(total[None], right) > given.bounds.get(f"{AFTER_BACKWARD} {name}", 0.0):
            return False
    return True


def _changed_after_backward(gradients: Sequence[str]) -> Finding:
    """Return the finding that code changes gradients before they are summed over the ranks."""
    text = (
        f"{len(gradients)} gradients ({listed(gradients)}) are changed between the backward and "
        "their first use, such as by clip_grad_value_ before they are summed, or by a sum in lower "
        "precision: call sync_gradients first, on the gradients as the backward has left them"
    )
    tested = "the gradients after the backward add up to those of the twin"
    return Finding("gradient sum", text, tested)


def _scaled_before_the_sum(gradients: Sequence[str], factors: Sequence[float]) -> Finding:
    """Return the finding that ranks scale gradients by different factors before they add them."""
    shown = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    text = (
        f"{len(gradients)} gradients ({listed(gradients)}) are scaled before they are summed over "
        f"the ranks (by {shown}), as by clipping: call sync_gradients first, then clip"
    )
    tested = (
        "with these factors, the gradients after the backward add up to the ranks' gradients, and "
        "without factors to a multiple of the twin's"
    )
    return Finding("gradient sum", text, tested)


def _factors_of_shards(given: Comparison, gradients: Sequence[str]) -> dict[int, float] | None:
    """Return for each rank the ratio of its shards of gradients to those of the twin.

    Return None if there are no such ratios, or if they are equal.
    """
    names = [key.removeprefix("gradient of ") for key in gradients]
    if any(name not in given.owners for name in names):
        return None
    # Elements of all gradients.
    owners = torch.cat([given.owners[name].flatten() for name in names])
    used = torch.cat([given.given[key][0].flatten() for key in gradients])
    right = torch.cat([given.twin[key].double().flatten() for key in gradients])
    factors: dict[int, float] = {}
    for rank in owners.unique().tolist():
        used_of_rank, right_of_rank = used[owners == rank], right[owners == rank]
        square = float(right_of_rank.square().sum())
        product = float((used_of_rank * right_of_rank).sum())
        if not square or not math.isfinite(product):
            return None
        factors[rank] = product / square
    largest = max(abs(factor) for factor in factors.values())
    if max(factors.values()) - min(factors.values()) < 1e-3 * largest:
        return None
    fitted = right.clone()
    for rank, factor in factors.items():
        fitted[owners == rank] *= factor
    sizes = [given.twin[key].numel() for key in gradients]
    for key, got, fit in zip(gradients, used.split(sizes), fitted.split(sizes), strict=True):
        if float((got - fit).norm()) > given.bounds[key] * max(1.0, largest):
            return None
    return factors


def _scaled_shards(gradients: Sequence[str], factors: Mapping[int, float]) -> Finding:
    """Return the finding that ranks scale their shards of gradients by different factors."""
    shown = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in factors.items())
    text = (
        f"the shards of {len(gradients)} gradients ({listed(gradients)}) are multiples of the "
        f"twin's ({shown}), as by clipping with the norm of a rank's own shards: clip with the "
        "norm over all shards, as torch.nn.utils.clip_grad_norm_ computes it of DTensors"
    )
    tested = "with one factor for each rank, its shards of all these gradients are the twin's"
    return Finding("gradient clipping", text, tested)


def _wrong_scale(gradients: Sequence[str], factor: Fraction | float) -> Finding:
    """Return the finding that gradients are a multiple of the twin's gradients."""

    def shown(number: Fraction | float) -> str:
        return str(number) if isinstance(number, Fraction) else f"{number:.4g}"

    how = "are averaged, as by DDP and FSDP" if factor < 1 else "are summed more than once"
    text = (
        f"{len(gradients)} gradients ({listed(gradients)}) are {shown(factor)} of the twin's: they "
        f"{how}; multiply the loss by {shown(1 / factor)}, or sum once with sync_gradients"
    )
    return Finding("gradient scale", text, "all numbers of these gradients have this ratio")
