"""Compares a step on ranks with its twin in one process, and finds the contract that is broken.

A finding is a hypothesis that was tested: a rule that fits the numbers of every parameter, or a run
in which what is suspected is replaced, on the ranks or in the twin, and the difference is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from ring_attn.core.oracle import Verdict
from ring_attn.testing.fed import Finding, Trial, fraction, listed, trials
from ring_attn.testing.observe import Change, Forward, Outcome

# Results by the names that a step returns them by.
LOSSES = {"loss": "loss", "evaluation loss": "eval_loss"}


@dataclass
class Diagnosis:
    """What differs at one world size, why, and what remains without an explanation."""

    world_size: int
    differences: dict[str, Verdict]
    findings: list[Finding] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)


# Runs the step with changes: of ranks, of the twin.
Runs = Callable[[Sequence[Mapping[int, Change]], int], list[list[Outcome | str]]]


class Bounds:
    """The twin, and how far roundings move each of its results.

    A result of the ranks may be twice as far from the twin as the farthest run of the twin with
    random roundings, plus a unit in its last place.
    """

    def __init__(self, twin: Outcome, noisy: Sequence[Outcome]) -> None:
        self.twin, self.noisy = twin, noisy
        results = results_of(twin)
        self.bounds = {
            key: 2 * max(_error(x, results_of(run).get(key)) for run in noisy)
            + torch.finfo(x.dtype).eps * float(x.double().norm())
            for key, x in results.items()
        }

    def verdict(self, key: str, x: Tensor | None, twin: Tensor, factor: float = 1.0) -> Verdict:
        """Compares a result of a rank with `factor` times the twin's."""
        error, bound = _error(twin * factor, x), self.bounds[key] * abs(factor)
        return Verdict(key, error, bound, error <= bound)

    def differences(
        self, ranks: Sequence[Outcome], twin: Outcome | None = None
    ) -> dict[str, Verdict]:
        """The worst verdict of each result that is beyond its bound."""
        expected = results_of(twin or self.twin)
        wrong = {}
        for key, x in expected.items():
            given = values(ranks, key)
            verdicts = [self.verdict(key, y, x) for y in given]
            if all(v.ok for v in verdicts):
                continue
            parts = [float(y) for y in given if y is not None] if key in LOSSES else []
            if len({*parts}) > 1:  # each rank reports its part
                sums = (sum(parts), sum(parts) / len(parts))
                if any(self.verdict(key, x.new_tensor(y), x).ok for y in sums):
                    continue
            wrong[key] = max(verdicts, key=lambda v: v.ratio)
        return wrong

    def common_factor(
        self, keys: Sequence[str], ranks: Sequence[Outcome], twin: Outcome | None = None
    ) -> float | None:
        """The number by which the results of all ranks differ from the twin's; None if no one."""
        expected = results_of(twin or self.twin)
        product = square = 0.0
        for key in keys:
            x = expected[key].double()
            for y in values(ranks, key):
                if y is not None and y.shape == x.shape:
                    product += float((x * y).sum())
                    square += float((x * x).sum())
        if not square or not math.isfinite(product) or not product:
            return None
        factor = product / square
        near = Fraction(factor).limit_denominator(64)
        if near and abs(float(near) / factor - 1) < 1e-2:
            factor = float(near)
        fits = all(
            self.verdict(key, y, expected[key], factor).ok
            for key in keys
            for y in values(ranks, key)
        )
        return factor if fits else None


def results_of(run: Outcome) -> dict[str, Tensor]:
    """Losses, gradients and weights of a run by name."""
    return {
        **{key: run.losses[name] for key, name in LOSSES.items() if name in run.losses},
        **{f"gradient of {name}": x for name, x in run.gradients.items()},
        **{f"weight {name}": x for name, x in run.weights.items()},
    }


def values(ranks: Sequence[Outcome], key: str) -> list[Tensor | None]:
    """A result on each rank that has it; of losses, what the ranks report together."""
    if key in LOSSES:
        given = [x for run in ranks if (x := run.losses.get(LOSSES[key])) is not None]
        return [*given] if given else [None]
    name = key.removeprefix("gradient of ").removeprefix("weight ")
    return [results_of(run).get(key) for run in ranks if name in run.weights] or [None]


def _error(x: Tensor, y: Tensor | None) -> float:
    if y is None or x.shape != y.shape:
        return math.inf
    error = float((x.double() - y.double()).norm())
    return error if math.isfinite(error) else math.inf


def diagnose(bounds: Bounds, ranks: Sequence[Outcome], runs: Runs) -> Diagnosis:
    """Tests hypotheses about what differs between the ranks and the twin."""
    result = Diagnosis(len(ranks), bounds.differences(ranks))
    found, left = result.findings, dict.fromkeys(result.differences)
    gradients = [key for key in left if key.startswith("gradient")]
    moved = any(key.startswith("weight") for key in left)
    explained = set[str]()
    if gradients:
        whole = _by_clipping(bounds, ranks, runs)
        found += whole or _by_numbers(bounds, ranks, gradients, explained)
        if not whole and explained < {*gradients}:
            whole = _by_trials(bounds, ranks, runs, left)
        if whole:
            found[:], explained = whole, {*gradients}
    elif moved:
        found += _by_clipping(bounds, ranks, runs) or [*_by_weights(bounds, ranks, left)]
    if found:  # weights follow from gradients, and the evaluation from weights
        followed = explained | {"evaluation loss"} if moved else explained
        left = {key: None for key in left if key not in followed and not key.startswith("weight")}
        if any(_is_nan(forward) for run in ranks for forward in run.trained):
            left.pop("loss", None)
    for key in [*left]:
        if key in LOSSES and (finding := _by_loss(bounds, ranks, key)):
            found.append(finding)
            del left[key]
    result.unexplained = [*left]
    return result


def unsteady(twin: Outcome, again: Outcome) -> list[str]:
    """Results that differ between two runs by more than a unit in the last place of the whole."""
    results = results_of(twin)
    return [
        key
        for key, x in results.items()
        if _error(x, results_of(again).get(key))
        > torch.finfo(x.dtype).eps * float(x.double().norm())
    ]


def of_twin(twin: Outcome) -> Iterator[Finding]:
    """What is wrong in one process already."""
    right = wrong = twice = 0
    for forward in twin.trained:
        if forward.tokens is None or (target := forward.target()) is None:
            continue
        for shift in range(3):
            label, row = target[:, : target.size(1) - shift], forward.tokens[:, shift:]
            same = int(((label == row) & (label != forward.ignored)).sum())
            if shift == 0:
                wrong += same
            elif shift == 1:
                right += same
            else:
                twice += same
    if max(wrong, twice) > max(2 * right, 1):
        how = (
            "the tokens themselves: they are not shifted"
            if wrong > twice
            else ("the next tokens but one: they are shifted twice")
        )
        yield Finding(
            "labels",
            f"{max(wrong, twice)} labels are {how}; the model, its loss or shard_batch has to "
            "shift them, exactly one of these",
            "the twin's targets are compared with its tokens",
        )


def _by_clipping(bounds: Bounds, ranks: Sequence[Outcome], runs: Runs) -> list[Finding]:
    norms, whole = [run.norms for run in ranks], bounds.twin.norms
    if not norms[0] or not whole:
        return []
    free = Change(clip=False)
    trial = Trial(Finding("", "", ""), dict.fromkeys(range(len(ranks)), free), free)
    ((of_ranks, twin),) = _run([trial], len(ranks), ranks, bounds.twin, runs)
    if not of_ranks or not twin or bounds.differences(of_ranks, twin):
        return []
    numbers = ", ".join(f"{x[0]:.4g} on rank {r}" for r, x in enumerate(norms) if x)
    return [
        Finding(
            "clipping",
            f"gradients are clipped by another norm than the twin's ({numbers}; twin "
            f"{whole[0]:.4g}): sum them first, and clip by the norm of all",
            "without clipping on either side the difference is gone",
        )
    ]


def _by_numbers(
    bounds: Bounds, ranks: Sequence[Outcome], keys: list[str], explained: set[str]
) -> Iterator[Finding]:
    """Rules that fit gradients as they are; adds the gradients that a rule fits to `explained`."""
    twin, world_size = results_of(bounds.twin), len(ranks)
    count = len(bounds.twin.gradients)
    empty = [r for r, run in enumerate(ranks) if any(not x.num_targets() for x in run.trained)]
    unreal = [r for r, run in enumerate(ranks) if any(_is_nan(x) for x in run.trained)]
    if unreal and set(unreal) <= set(empty):
        yield Finding(
            "denominator",
            f"the loss is divided by each rank's own count of targets, and rank {listed(unreal)} "
            "has none: 0 / 0; divide by the targets of the whole batch",
            "the loss is NaN on exactly the ranks without targets",
        )
        explained |= {*keys}
        return
    alone: dict[str, list[str]] = {"sum": [], "mean": []}
    for key in keys:
        parts = values(ranks, key)
        given = [x.double() for x in parts if x is not None]
        if len(parts) < 2 or len({x.shape for x in given}) != 1 or _agree(bounds, key, parts):
            continue
        total = torch.stack(given).sum(0)
        for op, x in (("sum", total), ("mean", total / world_size)):
            if bounds.verdict(key, x, twin[key]).ok:
                alone[op].append(key)
                break
    for op, names in alone.items():
        if names:
            explained |= {*names}
            worst = max(_error(*_two(values(ranks, key))) for key in names)
            some = "all" if len(names) == count else str(len(names))
            yield Finding(
                "gradient sum",
                f"gradients of {some} of {count} parameters differ between ranks by up to "
                f"{worst:.2g} ({_short(names)}): they are not summed"
                f"{' (averaged)' if op == 'mean' else ''} when the optimizer uses them; call "
                "sync_gradients between backward and step",
                f"the {op} over the ranks is the twin's for each of them",
            )
    rest = [key for key in keys if key not in alone["sum"] + alone["mean"]]
    factor = bounds.common_factor(rest, ranks) if rest else None
    if factor is not None:
        explained |= {*rest}
        yield _of_factor(factor, rest, count, bounds, ranks)


def _of_factor(
    factor: float, keys: Sequence[str], count: int, bounds: Bounds, ranks: Sequence[Outcome]
) -> Finding:
    wrapper = next((run.wrapper for run in ranks if run.wrapper), "")
    some = f"all {count}" if len(keys) == count else f"{len(keys)} of {count}"
    text = f"gradients of {some} parameters are {fraction(factor)} of the twin's"
    if len(keys) < count:
        text += f" ({_short(keys)})"
    if factor < 1:
        text += f": {wrapper or 'what sums them'} averages over the sequence's ranks; multiply the "
        text += f"loss by {fraction(1 / factor)}, or sum with sync_gradients"
    else:
        text += ": they are summed more than once, or the loss of the whole batch is counted on "
        text += f"each rank; divide the loss by {fraction(factor)}"
    return Finding("gradient scale", text, "the factor fits each of them on every rank")


def _by_trials(
    bounds: Bounds, ranks: Sequence[Outcome], runs: Runs, left: dict[str, None]
) -> list[Finding]:
    found = [*trials(bounds.twin, ranks)]
    if not found:
        return []
    keys = [key for key in results_of(bounds.twin) if key.startswith("gradient")]
    outcomes = _run(found, len(ranks), ranks, bounds.twin, runs)
    for trial, (of_ranks, twin) in zip(found, outcomes, strict=True):
        if of_ranks is None or twin is None:
            continue
        differences = bounds.differences(of_ranks, twin)
        if not any(key.startswith("gradient") for key in differences):
            if "loss" not in differences:
                left.pop("loss", None)
            return [trial.finding]
        factor = bounds.common_factor(keys, of_ranks, twin)
        if factor is not None:
            more = [_of_factor(factor, keys, len(keys), bounds, ranks)]
            # Other labels are counted in the twin only if its loss counts the targets.
            return [trial.finding, *(more if trial.finding.contract != "labels" else ())]
    return _together(found, bounds, ranks, runs)


def _together(
    found: Sequence[Trial], bounds: Bounds, ranks: Sequence[Outcome], runs: Runs
) -> list[Finding]:
    """All of two hypotheses whose changes together remove the difference."""
    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    joined = [
        Trial(a.finding, _join(a.on_ranks, b.on_ranks), _one(a.in_twin, b.in_twin))
        for a, b in pairs
    ]
    outcomes = _run(joined, len(ranks), ranks, bounds.twin, runs) if joined else []
    for (a, b), (of_ranks, twin) in zip(pairs, outcomes, strict=True):
        if of_ranks is not None and twin is not None:
            wrong = bounds.differences(of_ranks, twin)
            if not any(key.startswith("gradient") for key in wrong):
                return [a.finding, b.finding]
    return []


def _join(a: dict[int, Change], b: dict[int, Change]) -> dict[int, Change]:
    return {rank: _one(a.get(rank), b.get(rank)) or Change() for rank in {*a, *b}}


def _one(a: Change | None, b: Change | None) -> Change | None:
    if a is None or b is None:
        return a or b
    inputs = {at: {**a.inputs.get(at, {}), **b.inputs.get(at, {})} for at in {*a.inputs, *b.inputs}}
    return Change(
        inputs=inputs,
        targets={**a.targets, **b.targets},
        factors={**a.factors, **b.factors},
        rows=a.rows or b.rows,
        weights={**a.weights, **b.weights},
        clip=a.clip and b.clip,
        required=a.required and b.required,
    )


def _run(
    found: Sequence[Trial], world_size: int, ranks: Sequence[Outcome], twin: Outcome, runs: Runs
) -> list[tuple[list[Outcome] | None, Outcome | None]]:
    """The outcomes of each trial on the ranks, and in the twin."""
    of_ranks = [trial.on_ranks for trial in found if trial.on_ranks]
    of_twin = [{0: trial.in_twin} for trial in found if trial.in_twin is not None]
    on_ranks = iter(runs(of_ranks, world_size) if of_ranks else [])
    in_twin = iter(runs(of_twin, 1) if of_twin else [])
    results = list[tuple[list[Outcome] | None, Outcome | None]]()
    for trial in found:
        some: Sequence[Outcome | str] = next(on_ranks) if trial.on_ranks else ranks
        one = twin if trial.in_twin is None else next(in_twin)[0]
        real = [x for x in some if isinstance(x, Outcome)]
        results.append(
            (real if len(real) == len(some) else None, None if isinstance(one, str) else one)
        )
    return results


def _by_weights(
    bounds: Bounds, ranks: Sequence[Outcome], left: Mapping[str, None]
) -> Iterator[Finding]:
    keys = [key for key in left if key.startswith("weight")]
    start = bounds.twin.start
    moved = [[run.weights[k[7:]] - start[k[7:]] for k in keys if k[7:] in start] for run in ranks]
    right = [bounds.twin.weights[k[7:]] - start[k[7:]] for k in keys if k[7:] in start]
    if not right or any(len(x) != len(right) for x in moved):
        return
    flat = torch.cat([x.flatten().double() for x in right])
    parts = [torch.cat([x.flatten().double() for x in run]) for run in moved]
    bound = math.hypot(*(bounds.bounds[key] for key in keys))
    factors = [float(x @ flat / (flat @ flat)) for x in parts]
    if all(
        float((x - c * flat).norm()) <= bound * max(abs(c), 1)
        for x, c in zip(parts, factors, strict=True)
    ):
        numbers = ", ".join(f"{fraction(c)} on rank {r}" for r, c in enumerate(factors))
        yield Finding(
            "optimizer step",
            f"gradients agree, but the optimizer moves weights by other multiples of the twin's "
            f"step ({numbers}): its learning rate, or the number of its steps, differs",
            "the factor fits all weights of each rank",
        )


def _by_loss(bounds: Bounds, ranks: Sequence[Outcome], key: str) -> Finding | None:
    twin = results_of(bounds.twin)[key]
    forwards = [
        [x for x in run.forwards if x.training == (key == "loss") and x.targets] for run in ranks
    ]
    got = values(ranks, key)[0]
    if got is None:
        return Finding(key, f"the {key} is on no rank", "no rank returned it")
    counts = [sum(x.num_targets() for x in rank) for rank in forwards]
    reported, world_size = float(got), len(ranks)
    numbers = f"{reported:.6g} on {world_size} ranks, {float(twin):.6g} in one process"
    if all(counts):
        means = [sum(x.total for x in rank) / n for rank, n in zip(forwards, counts, strict=True)]
        mean = twin.new_tensor(sum(means) / world_size)
        all_same = len({float(x) for x in values(ranks, key) if x is not None}) == 1
        if all_same and len({*counts}) > 1 and bounds.verdict(key, got, mean).ok:
            return Finding(
                "denominator",
                f"the {key} is the mean of the ranks' means ({numbers}), which have "
                f"{listed(counts)} targets: add losses and counts, then divide",
                "the mean of the means is the reported number",
            )
    factor = bounds.common_factor([key], ranks)
    if factor is not None:
        near = fraction(factor)
        known = math.isclose(factor, world_size) or math.isclose(factor, 1 / world_size)
        if known or Fraction(factor).limit_denominator(64) == factor:
            why = "counts each rank" if factor > 1 else "is averaged, though each rank has its part"
            return Finding(
                key, f"the {key} is {near} of the twin's ({numbers}): it {why}",
                "the factor fits on every rank",
            )  # fmt: skip
    return None


def _agree(bounds: Bounds, key: str, parts: Sequence[Tensor | None]) -> bool:
    first = parts[0]
    return first is not None and all(bounds.verdict(key, x, first).ok for x in parts)


def _two(parts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    given = [x for x in parts if x is not None]
    return given[0], max(given[1:], key=lambda x: _error(given[0], x))


def _is_nan(forward: Forward) -> bool:
    return forward.loss is not None and not math.isfinite(forward.loss)


def _short(keys: Sequence[str]) -> str:
    names = [key.removeprefix("gradient of ").removeprefix("weight ") for key in keys]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
