"""Comparison of a step on ranks with its twin in one process, and the reasons of differences.

A finding is a hypothesis that was tested. Either it is a rule that fits the numbers of every
parameter, or a trial: one input is replaced, on the ranks or in the twin, and the difference
disappears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.oracle import Verdict
from ring_attn.testing.observe import IGNORED, Change, Outcome

LOSSES = ("loss", "evaluation loss")

# Runs the step with changes by rank, on a number of ranks: outcomes by run and rank.
Runs = Callable[[Sequence[Mapping[int, Change]], int], list[list[Outcome]]]


@dataclass(frozen=True)
class Finding:
    """A broken contract.

    Attributes:
        contract: its name.
        text: what is wrong, where, and how to fix it.
        tested: how this was tested.
    """

    contract: str
    text: str
    tested: str


@dataclass(frozen=True)
class Diagnosis:
    """Differences at one world size, their reasons, and the differences without a reason."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding]
    unexplained: list[str]


class Trial(NamedTuple):
    """A run with changes; if it has the results of the twin, the finding is right.

    Attributes:
        finding: the hypothesis.
        changes: by rank; the twin has those of rank 0.
        on_ranks: whether the ranks run with the changes.
        in_twin: whether the twin, in its one process, runs with the changes.
    """

    finding: Finding
    changes: Mapping[int, Change]
    on_ranks: bool
    in_twin: bool


class Held(NamedTuple):
    """The columns of the twin's batch that a rank holds in a forward.

    Attributes:
        rank: the rank.
        number: number of the rank's forward.
        twin_number: number of the twin's forward.
        columns: positions in the sequence.
    """

    rank: int
    number: int
    twin_number: int
    columns: Tensor


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
    return Diagnosis(len(ranks), differences, explanation.findings, unexplained)


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
    _, held = min((held_by(name, twin, ranks) for name in LAYOUTS), key=lambda found: found[0])
    trials = [
        *_inputs(twin, ranks, held),
        *_denominators(ranks),
        *_attention(twin, ranks, held),
        *_dropout(ranks, unexplained),
    ]
    explanations = []

    def explain(trial: Trial, comparison: Comparison) -> None:
        findings, left = by_numbers(comparison)
        # An evaluation loss that agreed before the trial is not the trial's subject.
        left = [key for key in left if key != "evaluation loss" or key in unexplained]
        explanations.append(Explanation([trial.finding, *findings], left))

    new_ranks = _outcomes([trial for trial in trials if trial.on_ranks], len(ranks), runs)
    new_twins = _outcomes([trial for trial in trials if trial.in_twin], 1, runs)
    for trial in trials:
        of_ranks = new_ranks.get(id(trial), ranks)
        (of_twin,) = new_twins.get(id(trial), [twin])
        change = trial.changes[0] if trial.in_twin else {}
        explain(trial, compared(bounds, of_twin, of_ranks, runs, change))
    return explanations


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
        differences: the results that differ by more than their bounds.
    """

    def __init__(self, bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome]):
        self.bounds = bounds
        self.twin = twin.results
        self.num = len(ranks)
        self.given = {key: stacked(key, twin, ranks) for key in self.twin}
        self.differences: dict[str, Verdict] = {}
        for key, given in self.given.items():
            verdict = self.verdict(key, given)
            # Ranks may report their parts of a loss, for logs.
            if not verdict.ok and not (key in LOSSES and self.is_part(key)):
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
    if weights:
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
    for key in [*losses]:
        for ratio, how in (
            (Fraction(given.num), "counts each rank"),
            (Fraction(1, given.num), "is averaged"),
        ):
            if given.verdict(key, given.given[key], float(ratio)).ok:
                text = f"the {key} {how}: it is {ratio} of the twin's"
                findings.append(Finding(key, text, "the numbers have this ratio"))
                losses.remove(key)
    return Explanation(findings, [*gradients, *losses])


def _missing_sum(given: Comparison, gradients: Sequence[str]) -> Finding:
    """Return the finding that ranks have parts of gradients."""
    spread = max(distance(given.given[key], given.given[key][0]) for key in gradients)
    text = (
        f"{len(gradients)} gradients ({listed(gradients)}) differ between ranks by up to "
        f"{spread:.2g}: sum them by sync_gradients, before they are clipped or used"
    )
    tested = "their sum, or their mean, over the ranks is the twin's gradient"
    return Finding("gradient sum", text, tested)


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


def held_by(name: str, twin: Outcome, ranks: Sequence[Outcome]) -> tuple[float, list[Held]]:
    """Return how many tokens differ from the twin's if ranks hold the columns of a layout.

    Return also these columns. The number is infinite if the shapes do not fit the layout.
    """
    num_wrong, held = 0.0, []
    forwards = zip(twin.fed(), *(rank.fed() for rank in ranks), strict=False)
    for twin_forward, *rank_forwards in forwards:
        right = twin_forward.tokens  # (batch, seqlen)
        seqlen = sum(forward.tokens.size(1) for forward in rank_forwards)
        layout = SequenceLayout.from_name(name, max(len(ranks), seqlen), len(ranks))
        for rank, (number, tokens) in enumerate(rank_forwards):
            columns = layout.position_ids(rank)
            if tokens.shape != (len(right), len(columns)) or seqlen > right.size(1):
                return math.inf, []
            held.append(Held(rank, number, twin_forward.number, columns))
            num_wrong += int((right[:, columns] != tokens).sum())
    return num_wrong, held


class FedInput(NamedTuple):
    """An input of the ranks, for trials.

    Attributes:
        contract: name of the contract.
        text_name: name of the input in texts.
        replaced: the inputs that a trial replaces.
        advice: how to fix the input.
    """

    contract: str
    text_name: str
    replaced: tuple[str, ...]
    advice: str


CUT = "cut them by the layout of the tokens, as shard_batch does"
FED = {
    "tokens": FedInput("batch", "tokens", ("tokens", "targets"), "all ranks must draw one batch"),
    "positions": FedInput("positions", "position_ids", ("positions",), CUT),
    "targets": FedInput("labels", "labels", ("targets",), f"shift once, mask, and {CUT}"),
}


def _inputs(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which the twin gets the inputs of the ranks."""
    for name, fed in FED.items():
        changes = _inputs_of_ranks(fed.replaced, twin, ranks, held)
        wrong: set[int] = set()  # columns
        for (number, changed_name), new in changes.items():
            if changed_name == name:
                right = twin.forwards[number].values(name)
                assert right is not None, "changes replace only inputs that the twin has"
                differs = (new != right).any(0)  # (columns,)
                wrong |= set(differs.nonzero().flatten().tolist())
        if not wrong:
            continue
        holders = {one.rank for one in held if wrong & set(one.columns.tolist())}
        text = (
            f"{fed.text_name} of rows {listed(sorted(wrong))} (rank {listed(holders) or 'none'}) "
            f"are missing or not the twin's: {fed.advice}"
        )
        if name == "targets" and wrong <= _segment_ends(held):
            text += "; shifted after cutting, the last row of a segment loses its label"
        tested = f"the twin ran again with the {fed.text_name} of the ranks, and had their results"
        finding = Finding(fed.contract, text, tested)
        yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True)


def _inputs_of_ranks(
    names: Sequence[str], twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]
) -> dict[tuple[int, str], Tensor]:
    """Return a change of the twin that puts inputs of all ranks in the columns that they hold."""
    changes: dict[tuple[int, str], Tensor] = {}
    for rank, number, twin_number, columns in held:
        for name in names:
            given = ranks[rank].forwards[number].values(name)
            right = twin.forwards[twin_number].values(name)
            if given is None or right is None:
                continue
            key = twin_number, name
            if key not in changes:
                is_targets = name == "targets"
                changes[key] = torch.full_like(right, IGNORED) if is_targets else right.clone()
            changes[key][:, columns] = given
    return changes


def _segment_ends(held: Sequence[Held]) -> set[int]:
    """Return the last columns of the segments that ranks hold."""
    ends: set[int] = set()
    for one in held:
        next_columns = F.pad(one.columns[1:], (0, 1))
        ends |= set(one.columns[next_columns != one.columns + 1].tolist())
    return ends


def _denominators(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield trials in which ranks divide cross-entropies by the mean count of targets.

    They change all cross-entropies, or those of one head, such as a second head.
    """
    # For each rank, the counts of targets by forward and cross-entropy.
    counts = [
        {
            (number, i): count
            for number, forward in enumerate(rank.forwards)
            for i, count in enumerate(forward.counts)
        }
        for rank in ranks
    ]
    keys = list(counts[0])
    if any(list(of_rank) != keys for of_rank in counts):
        return
    heads = {i: [key for key in keys if key[1] == i] for _, i in keys}
    subjects = {"the loss": keys}
    if len(heads) > 1:
        subjects |= {f"cross-entropy {i}": keys_of_head for i, keys_of_head in heads.items()}
    all_targets = {key: sum(of_rank[key] for of_rank in counts) for key in keys}
    for subject, chosen in subjects.items():
        totals = [sum(of_rank[key] for key in chosen) for of_rank in counts]
        if len(set(totals)) == 1:
            continue
        # The mean over the rank's own targets, times its share of all targets, times the ranks.
        changes = {
            rank: {key: of_rank[key] * len(counts) / (all_targets[key] or 1) for key in chosen}
            for rank, of_rank in enumerate(counts)
        }
        given = ", ".join(f"{total} on rank {rank}" for rank, total in enumerate(totals))
        text = (
            f"{subject} is divided by each rank's own count of targets ({given}): divide by the "
            "targets of the whole batch"
        )
        tested = "the ranks ran again with this denominator, and had the twin's results"
        finding = Finding("denominator", text, tested)
        yield Trial(finding, changes, on_ranks=True, in_twin=False)


def _attention(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which the twin's attention has a mask that the ranks may have by mistake."""
    if not held:
        return
    length = twin.forwards[held[0].twin_number].fed["tokens"].size(-1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    owner = torch.full((length,), -1)  # rank of each column
    for one in held[: len(ranks)]:  # of the first forward
        owner[one.columns] = one.rank
    same_owner = owner[:, None] == owner  # (length, length)
    lost_mask = Finding(
        "mask",
        "the mask, or the documents' boundaries, are not seen by the attention of the ranks: give "
        "it attention_mask or cu_seqlens of the whole sequence",
        "the twin ran again without this mask, and had the results of the ranks",
    )
    local = Finding(
        "attention",
        "attention sees only the rows of its own rank: make it ring_attention, or see that the "
        "model's attention function is the one that was replaced",
        "the twin ran again with attention within the rows of each rank, and had their results",
    )
    for finding, seen in (
        (lost_mask, causal),
        (lost_mask, torch.ones_like(causal)),
        (local, causal & same_owner),
    ):
        yield Trial(finding, {0: {("seen",): seen}}, on_ranks=False, in_twin=True)


def _dropout(ranks: Sequence[Outcome], unexplained: Sequence[str]) -> Iterator[Trial]:
    """Yield a trial without dropout, on the ranks and in the twin."""
    if not any(rank.has_dropout for rank in ranks):
        return
    if set(unexplained) == {"evaluation loss"}:
        text = "the evaluation has dropout, as in training: call model.eval() before it"
    else:
        text = (
            "dropout draws other numbers on the ranks than in one process. In training this is "
            "right, if ranks draw different numbers; audit a step without dropout, and call "
            "model.eval() before an evaluation"
        )
    tested = "the ranks and the twin ran again without dropout, and had equal results"
    changes = {rank: {("no dropout",): True} for rank in range(len(ranks))}
    yield Trial(Finding("dropout", text, tested), changes, on_ranks=True, in_twin=True)


def listed(numbers: Iterable[object]) -> str:
    """Return the first eight names or numbers as a text."""
    texts = [str(x).removeprefix("gradient of ") for x in numbers]
    return ", ".join(texts[:8]) + (" and more" if len(texts) > 8 else "")
