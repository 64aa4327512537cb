"""Compares a step on ranks with its twin in one process, and finds the contract that is broken.

A finding is a hypothesis that was tested: a rule that fits the numbers of every parameter, or a
trial, a run in which what is suspected is replaced, on the ranks or in the twin, and the difference
is gone. `HYPOTHESES` lists functions that read what was noted and yield trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
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
    """A broken contract: its name; what is wrong, where, and what to do; how that was tested."""

    contract: str
    text: str
    tested: str

    def __str__(self) -> str:
        return f"  {self.contract}: {self.text} [tested: {self.tested}]"


@dataclass(frozen=True)
class Diagnosis:
    """Differences at one world size, their reasons, and what remains without one."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding]
    unexplained: list[str]


# A finding if a run has the twin's results: changes by rank, or of the twin in its one process.
Trial = tuple[Finding, Mapping[int, Change], bool]


def diagnose(
    bounds: Mapping[str, float], twin: Outcome, ranks: Sequence[Outcome], runs: Runs
) -> Diagnosis:
    """Tests hypotheses about what differs between the ranks and the twin.

    The simplest that leaves no gradient unexplained is taken: what the numbers tell alone, or one
    trial and the numbers after it.
    """
    plain = Comparison(bounds, twin, ranks)
    findings, left = numbers = by_numbers(plain)
    if left:
        fed, attempts = Fed(twin, ranks), [numbers]
        trials = [trial for hypothesis in HYPOTHESES for trial in hypothesis(fed)]
        for in_twin, num in ((False, len(ranks)), (True, 1)):
            chosen = [trial for trial in trials if trial[2] == in_twin]
            outcomes = runs([changes for _, changes, _ in chosen], num) if chosen else []
            for (finding, _, _), new in zip(chosen, outcomes, strict=True):
                one, some = (new[0], ranks) if in_twin else (twin, new)
                found, rest = by_numbers(Comparison(bounds, one, some))
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
        parts = [key for key in found if key in LOSSES and self.is_part(key)]
        self.differences = {key: x for key, x in found.items() if not x.ok and key not in parts}

    def verdict(self, key: str, given: Tensor, factor: float = 1.0) -> Verdict:
        """Compares results of some ranks with that multiple of the twin's."""
        error, bound = distance(given, self.twin[key] * factor), self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def is_part(self, key: str) -> bool:
        """Tells whether ranks differ, and the sum or the mean of what they have is the twin's."""
        given = self.given[key]
        if len(given) < self.num or distance(given, given[0]) <= self.bounds[key]:
            return False
        whole = given.sum(0, keepdim=True)
        return any(self.verdict(key, x).ok for x in (whole, whole / self.num))

    def factor(self, keys: Sequence[str]) -> float | None:
        """The number by which all of these results differ from the twin's on every rank."""
        product = sum(float((self.given[key] * self.twin[key]).sum()) for key in keys)
        square = sum(float(self.twin[key].double().square().sum()) for key in keys) * self.num
        if not square or not product or not math.isfinite(product):
            return None
        factor = product / square
        near = float(Fraction(factor).limit_denominator(self.num))
        for x in (near, factor):
            if all(self.verdict(key, self.given[key], x).ok for key in keys):
                return x
        return None

    def some(self, keys: Sequence[str]) -> str:
        count = sum(key.startswith("gradient") for key in self.twin)
        names = listed(key.removeprefix("gradient of ") for key in keys)
        return f"{'all' if len(keys) == count else len(keys)} of {count} parameters ({names})"


def stacked(key: str, twin: Outcome, runs: Sequence[Outcome]) -> Tensor:
    """A result of all runs, NaN where one lacks it; one rank may report a loss for all."""
    right = twin.results[key].double()
    given = [run.results.get(key) for run in runs]
    if key in LOSSES:
        given = [x for x in given if x is not None] or [None]
    lacking = torch.full_like(right, math.nan)
    return torch.stack([
        lacking if x is None or x.shape != right.shape else x.double() for x in given
    ])  # fmt: skip


def distance(given: Tensor, right: Tensor) -> float:
    """The largest distance of results from another; infinite where some are not finite."""
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
            text = f"gradients agree, but {len(weights)} weights differ after the step: its rate, "
            text += "its state or the number of its steps differs between ranks"
            tested = "gradients before the optimizer's step are the twin's on every rank"
            found.append(Finding("optimizer step", text, tested))
    if names := [key for key in gradients if given.is_part(key)]:
        spread = max(distance(given.given[key], given.given[key][0]) for key in names)
        text = f"gradients of {given.some(names)} differ between ranks by up to {spread:.2g}: they "
        text += "are not summed when they are clipped or the optimizer uses them; call "
        text += "sync_gradients after the last backward"
        tested = "their sum, or their mean, over the ranks is the twin's for each of them"
        found.append(Finding("gradient sum", text, tested))
        gradients = [key for key in gradients if key not in names]
    if (factor := given.factor(gradients)) is not None:
        text = f"gradients of {given.some(gradients)} are {fraction(factor)} of the twin's: "
        text += (
            "what sums them averages over the sequence's ranks, as DDP and FSDP do"
            if factor < 1
            else "they are summed more than once, or each rank counts the loss of the whole batch"
        )
        text += f"; multiply the loss by {fraction(1 / factor)}, or sum once with sync_gradients"
        found.append(Finding("gradient scale", text, "the factor fits each of them on every rank"))
        gradients = []
    for key in [*left]:
        for factor, how in ((n, "counts each rank"), (1 / n, "is a rank's part, or averaged")):
            if given.verdict(key, given.given[key], factor).ok:
                text = f"the {key} {how}: it is {fraction(factor)} of the twin's"
                found.append(Finding(key, text, "the factor fits it on every rank"))
                left.remove(key)
    return found, [*gradients, *left]


class Fed:
    """Columns of the twin's batches that ranks hold.

    Ranks are taken to hold all columns, or those of the layout that gives most of their tokens the
    twin's place.

    Attributes:
        held: for each forward, by rank: the rank, the number of its forward and of the twin's, and
            columns, some of which may be padding beyond the twin's.
    """

    def __init__(self, twin: Outcome, ranks: Sequence[Outcome]) -> None:
        self.twin, self.ranks = twin, ranks
        tried = (self._by_layout(*x) for x in product(LAYOUTS, (1, len(ranks))))
        _, self.layout, self.held = min(tried, key=lambda x: x[0])

    def _by_layout(self, name: str, parts: int) -> tuple[float, str, Any]:
        """The number of tokens that a layout makes wrong or missing, its name, and `held`."""
        held, wrong = list[Any](), 0
        runs = (run.fed() for run in (self.twin, *self.ranks))
        for (number, _, right), *given in zip(*runs, strict=False):
            seqlen = sum(tokens.size(1) for *_, tokens in given[:parts])
            layout = SequenceLayout.from_name(name, max(parts, seqlen), parts)
            missing = {*range(right.size(1))}
            padded = F.pad(right, (0, seqlen), value=-1)
            for rank, (at, _, tokens) in enumerate(given):
                columns = layout.position_ids(rank % parts)
                if tokens.shape != (len(right), len(columns)):
                    return math.inf, name, []
                held.append((rank, at, number, columns))
                wrong += int((padded[:, columns] != tokens).sum())
                missing -= {*columns.tolist()}
            wrong += len(missing) * len(right)
        return wrong, name, held


# Inputs of ranks: the contract, the name in texts, what is replaced, and what to do.
CUT = "cut them by the layout of the tokens, as shard_batch does"
FED = {
    "tokens": ("batch", "tokens", ("tokens", "targets"), "all ranks must draw one batch"),
    "positions": ("positions", "position_ids", ("positions",), CUT),
    "targets": ("labels", "labels", ("targets",), f"shift once, mask, and {CUT}"),
}


def _inputs(fed: Fed) -> Iterator[Trial]:
    """Gives the ranks the twin's inputs, or the twin theirs."""
    for name, (contract, called, names, advice) in FED.items():
        on_ranks = {rank: dict[Any, Any]() for rank in range(len(fed.ranks))}
        whole, in_twin, ends = dict[Any, Tensor](), dict[Any, Any](), set[int]()
        for rank, at, number, columns in fed.held:
            forward, twin = fed.ranks[rank].forwards[at], fed.twin.forwards[number]
            ends |= {*columns[F.pad(columns[1:], (0, 1)) != columns + 1].tolist()}
            for x in names:
                given, right = forward.values(x), twin.values(x)
                if given is None or right is None:
                    continue
                held = columns < right.size(1)  # the others are padding
                on_ranks[rank][at, x] = new = given.clone()
                new[:, held] = right[:, columns[held]]
                whole[number, x] = right
                none = torch.full_like(right, IGNORED) if x == "targets" else right.clone()
                in_twin.setdefault((number, x), none)[:, columns[held]] = given[:, held]
        wrong, counts = set[int](), [0, 0]
        for key, right in whole.items():
            if key[1] == name:
                differs = (in_twin[key] != right).any(0)
                wrong |= {*differs.nonzero().flatten().tolist()}
                counts[0] += int((right != IGNORED).sum())
                counts[1] += int((in_twin[key] != IGNORED).sum())
        if not wrong:
            continue
        where = {rank: 0 for rank, *_, columns in fed.held if wrong.intersection(columns.tolist())}
        text = f"{called} of rows {listed(sorted(wrong))} (rank {listed(where) or 'none'}) are "
        text += f"missing or not the twin's: {advice}"
        if name == "targets" and wrong <= ends:
            text += "; shifted after cutting, the last row of a segment loses its label"
        tested = f"with the {called} of one in the other the difference is gone"
        finding = Finding(contract, text, tested)
        yield finding, on_ranks, False
        yield finding, {0: in_twin}, True
        # The twin's loss may divide by a number of labels that it counted before.
        factor = counts[0] / max(1, counts[1])
        for number in {number for number, _ in whole}:
            factors = {(number, i): factor for i in range(len(fed.twin.forwards[number].counts))}
            in_twin = in_twin | factors
        yield finding, {0: in_twin}, True


def _denominators(fed: Fed) -> Iterator[Trial]:
    """Own counts of all cross-entropies, or of one, such as that of a second head."""
    counts = [
        {(at, i): x for at, one in enumerate(run.forwards) if one.training
         for i, x in enumerate(one.counts)} for run in fed.ranks
    ]  # fmt: skip
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
            tested = "with losses weighted by their counts the difference is gone"
            yield Finding("denominator", text, tested), dict(enumerate(own)), False


def _attention(fed: Fed) -> Iterator[Trial]:
    """Gives the twin's attention the mask that the ranks' may have: it has their gradients."""
    if not fed.held:
        return
    first = [columns for *_, columns in fed.held[: len(fed.ranks)]]
    length = fed.twin.forwards[fed.held[0][2]].fed["tokens"].size(-1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    text = "the mask, or the documents' boundaries, are not seen by the attention of the ranks: "
    text += "give it attention_mask or cu_seqlens of the whole sequence"
    masks = [("mask", text, causal), ("mask", text, torch.ones_like(causal))]
    columns, lens = torch.cat(first), tuple(map(len, first))
    if columns.sort()[0].equal(torch.arange(length)):
        at = columns.argsort()
        owner = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))[at]
        text = "attention sees only the rows of its own rank: make it ring_attention, or see that "
        text += "the model's attention function is the one that was replaced"
        masks.append(("attention", text, causal & (owner[:, None] == owner)))
        for name in LAYOUTS:
            layout = SequenceLayout.from_name(name, length, len(lens))
            taken = torch.cat([layout.position_ids(rank) for rank in range(len(lens))])
            if layout.shard_lens == lens and not taken.equal(columns):
                text = f"attention takes rows for {name}, but they are cut {fed.layout}"
                masks.append(("layout", text, taken[at][:, None] >= taken[at]))
    for contract, text, seen in masks:
        tested = "with what they see in the twin the difference is gone"
        yield Finding(contract, text, tested), {0: {("seen",): seen}}, True


HYPOTHESES = (_inputs, _denominators, _attention)


def fraction(x: float) -> str:
    """A factor as text: a fraction of small numbers where it is one."""
    near = Fraction(x).limit_denominator(64)
    return str(near) if float(near) == x else f"{x:.4g}"


def listed(numbers: Iterable[object]) -> str:
    """Numbers as text, at most eight."""
    texts = [*map(str, numbers)]
    return ", ".join(texts[:8]) + (" and more" if len(texts) > 8 else "")
