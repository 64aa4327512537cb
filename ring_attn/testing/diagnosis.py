"""Compares a step on ranks with its twin in one process, and finds the contract that is broken.

A finding is a hypothesis that was tested: a rule that fits the numbers of every parameter, or a
trial, in which what is suspected is replaced, on ranks or in the twin, and the difference goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

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
    """A broken contract: its name; what is wrong, where, and what to do."""

    contract: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """Differences at one world size, their reasons, and what remains without one."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding]
    unexplained: list[str]


# A finding if a run has the twin's results: changes by rank, or of the twin in its one process.
Trial = tuple[Finding, Mapping[int, Change], bool]

# For each forward, by rank: the rank, the number of its forward and of the twin's, and the columns
# of the twin's batch that it holds: those of the layout that gives most tokens the twin's place.
Held = list[tuple[int, int, int, Tensor]]


def diagnose(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs
) -> Diagnosis:
    """Test hypotheses about what differs between the ranks and the twin.

    The simplest that leaves no gradient unexplained is taken: what the numbers tell alone, or one
    trial and the numbers after it.
    """
    plain = compared(bounds, twin, ranks, runs, {})
    findings, left = numbers = by_numbers(plain)
    if left:
        _, held = min((held_by(x, twin, ranks) for x in LAYOUTS), key=lambda x: x[0])
        hypotheses, attempts = (_inputs, _denominators, _attention), [numbers]
        trials = [y for x in hypotheses for y in x(twin, ranks, held)]
        for in_twin, num in ((False, len(ranks)), (True, 1)):
            chosen = [trial for trial in trials if trial[2] == in_twin]
            outcomes = runs([changes for _, changes, _ in chosen], num) if chosen else []
            for (finding, changes, _), new in zip(chosen, outcomes, strict=True):
                one, some, given = (new[0], ranks, changes[0]) if in_twin else (twin, new, {})
                found, rest = by_numbers(compared(bounds, one, some, runs, given))
                known = [key for key in rest if key != "evaluation loss" or key in left]
                attempts.append(([finding, *found], known))
        whole = [x for x in attempts if not any(key.startswith("gradient") for key in x[1])]
        findings, left = min(whole, key=lambda x: (len(x[1]), len(x[0])), default=numbers)
    left = [key for key in left if key in plain.differences]
    return Diagnosis(len(ranks), plain.differences, findings, left)


class Comparison:
    """Results of ranks beside the twin's, and how far roundings move each of them."""

    def __init__(self, bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome]):
        self.bounds, self.twin, self.num = bounds, twin.results, len(ranks)
        self.given = {key: stacked(key, twin, ranks) for key in self.twin}
        found = {key: self.verdict(key, x) for key, x in self.given.items()}
        right = {key for key, x in found.items() if x.ok or key in LOSSES and self.is_part(key)}
        self.differences = {key: x for key, x in found.items() if key not in right}

    def verdict(self, key: str, given: Tensor, factor: float = 1.0) -> Verdict:
        """Compare results of some ranks with that multiple of the twin's."""
        error, bound = distance(given, self.twin[key] * factor), self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def is_part(self, key: str) -> bool:
        """Return whether ranks differ, and the sum or the mean of what they have is the twin's."""
        given = self.given[key]
        if len(given) < self.num or distance(given, given[0]) <= self.bounds[key]:
            return False
        whole = given.sum(0, keepdim=True)
        return any(self.verdict(key, x).ok for x in (whole, whole / self.num))

    def factor(self, keys: Sequence[str]) -> Fraction | float | None:
        """Return the number by which all of these results differ from the twin's on every rank."""
        product = sum(float((self.given[key] * self.twin[key]).sum()) for key in keys)
        square = sum(float(self.twin[key].double().square().sum()) for key in keys) * self.num
        if not square or not product or not math.isfinite(product):
            return None
        factor = product / square
        for x in (Fraction(factor).limit_denominator(self.num), factor):
            if all(self.verdict(key, self.given[key], float(x)).ok for key in keys):
                return x
        return None


def compared(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs, change: Change
) -> Comparison:
    """Compare ranks with a twin; where weights alone differ, it steps by the ranks' gradients."""
    # Adam's first step takes a gradient's sign, which roundings decide where it is near zero.
    plain = Comparison(bounds, twin, ranks)
    if {key.split()[0] for key in plain.differences} & {"weight", "gradient"} == {"weight"}:
        stepped = runs([{0: {**change, ("gradients",): ranks[0].gradients}}], 1)[0][0]
        return Comparison(bounds, stepped, ranks)
    return plain


def stacked(key: str, twin: Outcome, runs: Sequence[Outcome]) -> Tensor:
    """Return a result of all runs, NaN where one lacks it; one rank may report a loss for all."""
    right = twin.results[key].double()
    given = [run.results.get(key) for run in runs]
    if key in LOSSES:
        given = [x for x in given if x is not None] or [None]
    lacking = torch.full_like(right, math.nan)
    return torch.stack([
        lacking if x is None or x.shape != right.shape else x.double() for x in given
    ])  # fmt: skip


def distance(given: Tensor, right: Tensor) -> float:
    """Return the largest distance of results from another; infinite where some are not finite."""
    error = float((given - right.double()).reshape(len(given), -1).norm(dim=1).max())
    return error if math.isfinite(error) else math.inf


def by_numbers(given: Comparison) -> tuple[list[Finding], list[str]]:
    """Rules that fit results as they are, and the results that none of them explains."""
    found, n = list[Finding](), given.num
    gradients = [key for key in given.differences if key.startswith("gradient")]
    weights = [key for key in given.differences if key.startswith("weight")]
    left = [key for key in given.differences if key in LOSSES]
    if weights:
        left = [key for key in left if key != "evaluation loss"]  # it follows from the weights
        if not gradients:
            text = f"{len(weights)} weights differ, even if the twin steps by the ranks' gradients"
            found.append(Finding("optimizer step", text))
    if names := [key for key in gradients if given.is_part(key)]:
        spread = max(distance(given.given[key], given.given[key][0]) for key in names)
        text = f"{len(names)} gradients ({listed(names)}) differ between ranks by up to "
        text += f"{spread:.2g}: sum them by sync_gradients, before they are clipped or used"
        found.append(Finding("gradient sum", text))
        gradients = [key for key in gradients if key not in names]
    if (factor := given.factor(gradients)) is not None:
        ratio, back = (x if isinstance(x, Fraction) else f"{x:.4g}" for x in (factor, 1 / factor))
        text = f"{len(gradients)} gradients ({listed(gradients)}) are {ratio} of the twin's: they "
        text += "are averaged, as by DDP and FSDP" if factor < 1 else "are summed more than once"
        text += f"; multiply the loss by {back}, or sum once with sync_gradients"
        found.append(Finding("gradient scale", text))
        gradients = []
    for key in [*left]:
        for ratio, how in ((Fraction(n), "counts each rank"), (Fraction(1, n), "is averaged")):
            if given.verdict(key, given.given[key], float(ratio)).ok:
                text = f"the {key} {how}: it is {ratio} of the twin's"
                found.append(Finding(key, text))
                left.remove(key)
    return found, [*gradients, *left]


def held_by(name: str, twin: Outcome, ranks: Sequence[Outcome]) -> tuple[float, Held]:
    """The number of tokens that are not the twin's if ranks hold a layout's columns, and these."""
    wrong, held = 0.0, Held()
    for (number, _, right), *given in zip(*(run.fed() for run in (twin, *ranks)), strict=False):
        seqlen = sum(tokens.size(1) for *_, tokens in given)
        layout = SequenceLayout.from_name(name, max(len(ranks), seqlen), len(ranks))
        for rank, (at, _, tokens) in enumerate(given):
            columns = layout.position_ids(rank)
            if tokens.shape != (len(right), len(columns)) or seqlen > right.size(1):
                return math.inf, []
            held.append((rank, at, number, columns))
            wrong += int((right[:, columns] != tokens).sum())
    return wrong, held


# Inputs of ranks: the contract, the name in texts, what is replaced, and what to do.
CUT = "cut them by the layout of the tokens, as shard_batch does"
FED = {
    "tokens": ("batch", "tokens", ("tokens", "targets"), "all ranks must draw one batch"),
    "positions": ("positions", "position_ids", ("positions",), CUT),
    "targets": ("labels", "labels", ("targets",), f"shift once, mask, and {CUT}"),
}


def _inputs(twin: Outcome, ranks: Sequence[Outcome], held: Held) -> Iterator[Trial]:
    """Give the twin the inputs of the ranks."""
    for name, (contract, called, names, advice) in FED.items():
        changes, wrong, ends = dict[Any, Tensor](), set[int](), set[int]()
        for rank, at, number, columns in held:
            ends |= {*columns[F.pad(columns[1:], (0, 1)) != columns + 1].tolist()}
            for x in names:
                given, right = ranks[rank].forwards[at].values(x), twin.forwards[number].values(x)
                if given is not None and right is not None:
                    none = torch.full_like(right, IGNORED) if x == "targets" else right.clone()
                    changes.setdefault((number, x), none)[:, columns] = given
        for (number, x), new in changes.items():
            if x == name:
                differs = (new != twin.forwards[number].values(x)).any(0)
                wrong |= {*differs.nonzero().flatten().tolist()}
        if wrong:
            holders = {rank for rank, *_, columns in held if wrong & {*columns.tolist()}}
            text = f"{called} of rows {listed(sorted(wrong))} (rank {listed(holders) or 'none'}) "
            text += f"are missing or not the twin's: {advice}"
            if name == "targets" and wrong <= ends:
                text += "; shifted after cutting, the last row of a segment loses its label"
            yield Finding(contract, text), {0: changes}, True


def _denominators(twin: Outcome, ranks: Sequence[Outcome], held: Held) -> Iterator[Trial]:
    """Own counts of all cross-entropies, or of one, such as that of a second head."""
    counts = [
        {(at, i): x for at, one in enumerate(run.forwards) for i, x in enumerate(one.counts)}
        for run in ranks
    ]
    n, keys = len(counts), [*counts[0]]
    if any([*x] != keys for x in counts):
        return
    heads = {i: [key for key in keys if key[1] == i] for _, i in keys}
    chosen = {"the loss": keys} | {f"cross-entropy {i}": heads[i] for i in heads if len(heads) > 1}
    for what, some in chosen.items():
        totals = [sum(x[key] for key in some) for x in counts]
        if len({*totals}) > 1:
            own = [{k: x[k] * n / (sum(y[k] for y in counts) or 1) for k in some} for x in counts]
            given = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(totals))
            text = f"{what} is divided by each rank's own count of targets ({given}): divide by "
            text += "the targets of the whole batch"
            yield Finding("denominator", text), dict(enumerate(own)), False


def _attention(twin: Outcome, ranks: Sequence[Outcome], held: Held) -> Iterator[Trial]:
    """Give the twin's attention the mask that the ranks' may have: it has their gradients."""
    for _, _, number, _ in held[:1]:
        length = twin.forwards[number].fed["tokens"].size(-1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        text = "the mask, or the documents' boundaries, are not seen by the attention of the "
        text += "ranks: give it attention_mask or cu_seqlens of the whole sequence"
        masks = [("mask", text, causal), ("mask", text, torch.ones_like(causal))]
        owner = torch.full((length,), -1)
        for rank, *_, columns in held[: len(ranks)]:
            owner[columns] = rank
        text = "attention sees only the rows of its own rank: make it ring_attention, or see that "
        text += "the model's attention function is the one that was replaced"
        masks.append(("attention", text, causal & (owner[:, None] == owner)))
        for contract, text, seen in masks:
            yield Finding(contract, text), {0: {("seen",): seen}}, True


def listed(numbers: Iterable[object]) -> str:
    texts = [str(x).removeprefix("gradient of ") for x in numbers]
    return ", ".join(texts[:8]) + (" and more" if len(texts) > 8 else "")
