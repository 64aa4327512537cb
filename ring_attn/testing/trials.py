"""Trials of `audit`: hypotheses about a step, and the runs that test them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.testing.draws import Draw, Replacement, are_same
from ring_attn.testing.observe import IGNORED, Change, Outcome
from ring_attn.testing.parted import MOST_KINDS

T = TypeVar("T")


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


class Trial(NamedTuple):
    """A run with changes; if it has the results of the twin, the finding is right.

    Attributes:
        finding: the hypothesis.
        changes: by rank; the twin has those of rank 0.
        on_ranks: whether the ranks run with the changes.
        in_twin: whether the twin, in its one process, runs with the changes.
        divides_by_zero: whether the mistake makes losses of a rank 0 / 0, which no change of the
            numerators mends.
        scale: the loss and the gradients of the twin are multiplied by it after its run.
    """

    finding: Finding
    changes: Mapping[int, Change]
    on_ranks: bool
    in_twin: bool
    divides_by_zero: bool = False
    scale: float = 1.0


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
        advice: how to fix the input.
    """

    contract: str
    text_name: str
    advice: str


CUT = "cut them by the layout of the tokens, as shard_batch does"
FED = {
    "tokens": FedInput("batch", "tokens", "all ranks must draw one batch"),
    "positions": FedInput("positions", "position_ids", CUT),
    "targets": FedInput("labels", "labels", f"shift once, mask, and {CUT}"),
}


def trials_of(
    twin: Outcome, ranks: Sequence[Outcome], unexplained: Sequence[str]
) -> Iterator[Trial]:
    """Yield all trials of a step that has different results on the ranks."""
    yield from _weights(ranks)
    _, held = min((held_by(name, twin, ranks) for name in LAYOUTS), key=lambda found: found[0])
    yield from _inputs(twin, ranks, held)
    yield from _numbers(twin, ranks, held)
    yield from _left_out(twin, ranks, held)
    yield from _summed_often(twin, ranks)
    yield from _denominators(ranks)
    yield from _divisors(ranks)
    yield from _means(ranks)
    yield from _repeated_terms(twin, ranks)
    yield from _attention(twin, ranks, held)
    yield from _dropout(twin, ranks, unexplained)
    yield from _random_numbers(twin, ranks, held)
    yield from _set_seeds(ranks)
    yield from _modules(twin, ranks, held)


def _weights(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield a trial in which all ranks begin with the weights of rank 0."""
    each = [rank.first_sums for rank in ranks]
    names = list(each[0])
    if any(list(of_rank) != names for of_rank in each):
        return
    differing = [name for name in names if len({of_rank[name] for of_rank in each}) > 1]
    if not differing:
        return
    text = (
        f"{len(differing)} weights ({listed(differing)}) differ between the ranks before the first "
        "forward: create the model with one seed on all ranks, or broadcast the weights of rank 0"
    )
    tested = "the ranks ran again with the weights of rank 0, and matched the twin"
    changes = {rank: {("weights",): True} for rank in range(len(ranks))}
    yield Trial(Finding("weights", text, tested), changes, on_ranks=True, in_twin=False)


def _inputs(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which the twin gets the inputs of the ranks."""
    for name, replaced in _replaced_inputs(twin):
        fed = FED[name]
        changes = _inputs_of_ranks(replaced, twin, ranks, held)
        wrong: set[int] = set()  # columns
        for (number, changed_name), new in changes.items():
            if changed_name.startswith(name):
                right = twin.forwards[number].values(changed_name)
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
        if name == "targets" and replaced != ("targets",) and len(replaced) == 1:
            text += f"; these are the targets of cross-entropy {replaced[0].split()[1]}"
        tested = f"the twin ran again with the {fed.text_name} of the ranks, and had their results"
        finding = Finding(fed.contract, text, tested)
        yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True)


def _replaced_inputs(twin: Outcome) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the kinds of inputs, and the inputs that a trial replaces.

    Each cross-entropy has its own targets, such as those of a second head.
    """
    given = {name for forward in twin.forwards for name in forward.fed}
    targets = sorted(name for name in given if name.startswith("targets"))
    yield "tokens", ("tokens", *targets)
    yield "positions", ("positions",)
    for chosen in _all_and_each(targets):
        yield "targets", tuple(chosen)


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
                is_targets = name.startswith("targets")
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


def _all_and_each(wrong: Iterable[T]) -> list[list[T]]:
    """Return what to change in each trial: everything that is wrong, then each part by itself."""
    parts = list(wrong)
    each = [[part] for part in parts]
    return [parts, *each] if len(parts) > 1 else each


def _numbers(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which the twin's code gives rows the numbers that they have on the ranks.

    Code numbers rows if it counts them (`torch.arange`), or takes the rows of a table by an index,
    such as the frequencies of RoPE.
    """
    changes: dict[int, Tensor] = {}  # by index of the twin's numbers
    wrong: dict[int, set[int]] = {}  # columns
    for one in held:
        rows = twin.forwards[one.twin_number].fed["tokens"].size(-1)
        of_twin = _by_place(twin, one.twin_number, rows)
        of_rank = _by_place(ranks[one.rank], one.number, len(one.columns))
        for place, numbered in of_twin.items():
            given = of_rank.get(place, [])
            if len(given) != len(numbered):
                continue
            for i, on_rank in zip(numbered, given, strict=True):
                right = changes.setdefault(i, twin.numbers[i].numbers.clone())
                new = ranks[one.rank].numbers[on_rank].numbers
                differs = one.columns[new != right[one.columns]]
                wrong.setdefault(i, set()).update(differs.tolist())
                right[one.columns] = new
    wrong = {i: columns for i, columns in wrong.items() if columns}
    for chosen in _all_and_each(wrong):
        places = listed(dict.fromkeys(twin.numbers[i].place for i in chosen))
        columns = sorted(set().union(*(wrong[i] for i in chosen)))
        holders = {one.rank for one in held if set(columns) & set(one.columns.tolist())}
        text = (
            f"rows {listed(columns)} (rank {listed(sorted(holders))}) have other numbers than in "
            f"the whole sequence, in {places}: number rows by layout.position_ids(rank), and take "
            "those rows of tables, such as the frequencies of RoPE"
        )
        tested = "the twin ran again with the ranks' numbers of rows, and had their results"
        new_numbers = {("numbers", i): changes[i] for i in chosen}
        yield Trial(
            Finding("positions", text, tested), {0: new_numbers}, on_ranks=False, in_twin=True
        )


def _by_place(outcome: Outcome, forward: int, rows: int) -> dict[str, list[int]]:
    """Return the indices of a forward's numbers of so many rows, by their place in the code."""
    found: dict[str, list[int]] = {}
    for i, one in enumerate(outcome.numbers):
        if one.forward == forward and one.numbers.numel() == rows:
            found.setdefault(one.place, []).append(i)
    return found


def _left_out(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which the twin leaves out the forwards that the ranks do not run."""
    columns = {one.rank: one.columns for one in held}
    if len(columns) != len(ranks):
        return
    of_twin = twin.fed()
    kept: set[int] = set()
    position = 0
    for forwards in zip(*(rank.fed() for rank in ranks), strict=False):
        while position < len(of_twin):
            tokens = of_twin[position].tokens
            position += 1
            if all(
                torch.equal(tokens[:, columns[rank]], forward.tokens)
                for rank, forward in enumerate(forwards)
            ):
                kept.add(of_twin[position - 1].number)
                break
    training = [one.number for one in of_twin if twin.forwards[one.number].trains]
    left_out = [number for number in training if number not in kept]
    num_kept = len(training) - len(left_out)
    if not left_out or not num_kept:
        return
    text = (
        f"the ranks run {num_kept} of the twin's {len(training)} training forwards: do not divide "
        "the number of micro-batches by the number of ranks, as all ranks share each sequence"
    )
    tested = "the twin ran again without the losses of the other forwards, and had the same results"
    # A loss that is divided by the number of forwards is divided by another number.
    for factor in (1.0, len(training) / num_kept):
        changes = {
            (number, i): 0.0 if number in left_out else factor
            for number in training
            for i, _ in enumerate(twin.forwards[number].counts)
        }
        finding = Finding("micro-batches", text, tested)
        yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True)


def _summed_often(twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield a trial in which the twin adds gradients that were summed after each micro-batch."""
    training = [number for number, forward in enumerate(twin.forwards) if forward.trains]
    if len(training) < 2:
        return
    text = (
        f"gradients are summed over the ranks after each of {len(training)} micro-batches, so that "
        "those of earlier ones, which are already summed, are summed again: sum once, after the "
        "last micro-batch"
    )
    tested = "the twin ran again with these multiples of the losses, and had the ranks' gradients"
    changes = {
        (number, i): float(len(ranks) ** num_later)
        for num_later, number in enumerate(reversed(training))
        for i, _ in enumerate(twin.forwards[number].counts)
    }
    finding = Finding("gradient sum", text, tested)
    yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True)


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
        divides_by_zero = 0 in totals
        zero = "; without targets, this is 0 / 0" if divides_by_zero else ""
        text = (
            f"{subject} is divided by each rank's own count of targets ({given}{zero}): divide by "
            "the targets of the whole batch"
        )
        tested = "the ranks ran again with this denominator, and matched the twin"
        finding = Finding("denominator", text, tested)
        yield Trial(finding, changes, on_ranks=True, in_twin=False, divides_by_zero=divides_by_zero)


def _divisors(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield trials in which ranks divide losses by the mean of their divisors.

    Losses that are no cross-entropies, such as those of reinforcement learning, are often divided
    by the sum of a mask of a rank's own rows.
    """
    each = [rank.divisions for rank in ranks]
    places = [[division.place for division in of_rank] for of_rank in each]
    if any(of_rank != places[0] for of_rank in places):
        return
    wrong: dict[str, list[int]] = {}  # by place
    means: dict[int, Tensor] = {}
    for i, divisions in enumerate(zip(*each, strict=True)):
        divisors = [division.divisor for division in divisions]
        if len({divisor.shape for divisor in divisors}) > 1:
            continue
        if all(torch.equal(divisor, divisors[0]) for divisor in divisors):
            continue
        # The sum of no losses is 0, and code sets its divisor to 1 to avoid 0 / 0.
        counts = [
            divisor.masked_fill((division.dividend == 0) & (divisor <= 1), 0.0)
            for division, divisor in zip(divisions, divisors, strict=True)
        ]
        means[i] = torch.stack(counts).mean(0)
        wrong.setdefault(divisions[0].place, []).append(i)
    for chosen in _all_and_each(wrong):
        indices = [i for place in chosen for i in wrong[place]]
        changes: dict[int, Change] = {
            rank: {("divisor", i): means[i] for i in indices} for rank in range(len(ranks))
        }
        given = ", ".join(
            f"{listed(f'{x:g}' for x in of_rank[indices[0]].divisor.flatten().tolist())} on rank "
            f"{rank}"
            for rank, of_rank in enumerate(each)
        )
        text = (
            f"a loss is divided by each rank's own number in {listed(chosen)} ({given}): divide by "
            "the number of the whole batch"
        )
        tested = "the ranks ran again with this divisor, and matched the twin"
        yield Trial(Finding("denominator", text, tested), changes, on_ranks=True, in_twin=False)


def _repeated_terms(twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield a trial in which the twin's loss has all terms but cross-entropies once for each rank.

    The twin divides its cross-entropies by the number of ranks, and its loss is multiplied by it.
    """
    training = [
        (number, i)
        for number, forward in enumerate(twin.forwards)
        if forward.trains
        for i, _ in enumerate(forward.counts)
    ]
    if not training:
        return
    num = len(ranks)
    text = (
        f"terms of the loss that are no cross-entropies are counted {num} times: each rank adds "
        "the whole term, such as a penalty of weights or a loss of sums over all ranks: divide it "
        "by the number of ranks"
    )
    tested = f"the twin ran again with {num} times these terms, and had the results of the ranks"
    changes = dict.fromkeys(training, 1.0 / num)
    finding = Finding("loss terms", text, tested)
    yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True, scale=float(num))


def _means(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield trials in which means over the rows of a rank are means over the rows of all ranks.

    Sums of losses over the rows of a rank are those over the rows of all ranks.
    """
    each = [rank.means for rank in ranks]
    places = [[mean.place for mean in of_rank] for of_rank in each]
    if any(of_rank != places[0] for of_rank in places):
        return
    wrong: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}  # of sums or not, by place
    values: dict[int, Tensor] = {}
    totals: dict[int, int] = {}
    for i, means in enumerate(zip(*each, strict=True)):
        total = sum(mean.num_values for mean in means)
        if len({mean.value.shape for mean in means}) == 1 and total:
            is_sum = means[0].is_sum
            parts = [mean.value.double().nan_to_num() * mean.num_values for mean in means]
            values[i] = torch.stack(parts).sum(0) / (1 if is_sum else total)
            totals[i] = total
            wrong[is_sum].setdefault(means[0].place, []).append(i)
    for is_sum, by_place in wrong.items():
        for chosen in _all_and_each(by_place):
            indices = [i for place in chosen for i in by_place[place]]
            changes: dict[int, Change] = {}
            for rank, of_rank in enumerate(each):
                # The gradient of the mean over all rows, times the ranks, as gradients are summed.
                parts_of_all = {i: 1 if is_sum else totals[i] for i in indices}
                factors = {i: of_rank[i].num_values * len(ranks) / parts_of_all[i] for i in indices}
                changes[rank] = {("mean", i): (values[i], factors[i]) for i in indices}
            counts = ", ".join(
                f"{of_rank[indices[0]].num_values} on rank {r}" for r, of_rank in enumerate(each)
            )
            if is_sum:
                text = (
                    f"a sum over the rows of each sequence in {listed(chosen)} is over the rows of "
                    "one rank: sum over the ranks, before anything else is computed of it"
                )
                tested = "the ranks ran again with sums over all rows, and matched the twin"
                finding = Finding("own sum", text, tested)
            else:
                text = (
                    f"a mean in {listed(chosen)} is over the rows of one rank ({counts}): sum over "
                    "the ranks, and divide by the rows of all ranks"
                )
                tested = "the ranks ran again with means over all rows, and matched the twin"
                finding = Finding("own mean", text, tested)
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
    for seen in (causal, torch.ones_like(causal)):
        yield Trial(lost_mask, {0: {("seen",): seen}}, on_ranks=False, in_twin=True)
    local = Finding(
        "attention",
        "attention sees only the rows of its own rank: make it ring_attention, or see that the "
        "model's attention function is the one that was replaced",
        "the twin ran again with attention within the rows of each rank, and had their results",
    )
    yield Trial(local, {0: {("within",): same_owner}}, on_ranks=False, in_twin=True)
    yield from _some_local(twin, ranks, same_owner)
    detached = Finding(
        "attention",
        "keys and values get gradients only from the queries of their own rank: use "
        "ring_attention, or gather them by a function whose backward sums over the ranks",
        "the twin ran again without gradients of other ranks' queries, and had the ranks' results",
    )
    yield Trial(detached, {0: {("owner",): owner}}, on_ranks=False, in_twin=True)
    masks = ranks[0].masks
    if masks and all(rank.masks == masks for rank in ranks):
        text = (
            f"the mask of ring_attention is {masks[0]}, which is not the mask of the twin's "
            "attention: pass the mask, or the boundaries of documents, of the whole sequence"
        )
        tested = "the twin ran again with this mask, and had the results of the ranks"
        changes = {("seen", i): mask.dense() for i, mask in enumerate(masks)}
        yield Trial(Finding("mask", text, tested), {0: changes}, on_ranks=False, in_twin=True)


def _some_local(twin: Outcome, ranks: Sequence[Outcome], same_owner: Tensor) -> Iterator[Trial]:
    """Yield a trial in which the calls of attention that are no ring see the rows of one rank."""
    local = ranks[0].sees_own_rows
    num = len(twin.sees_own_rows)
    if any(local) and not all(local) and len(local) == num:
        which = [i for i, is_local in enumerate(local) if is_local]
        text = (
            f"of the {num} calls of attention, those with the numbers {listed(which)} see only "
            "the rows of their own rank: make each of them ring_attention, also those of other "
            "layers, and of other models such as a teacher"
        )
        tested = (
            "the twin ran again with these calls within the rows of each rank, and had the results "
            "of the ranks"
        )
        changes: Change = {("within", i): same_owner for i in which}
        finding = Finding("attention", text, tested)
        yield Trial(finding, {0: changes}, on_ranks=False, in_twin=True)


def _modules(twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]) -> Iterator[Trial]:
    """Yield trials in which modules of one class, or a function, see the rows of one rank only."""
    columns = [one.columns for one in held[: len(ranks)]]  # of the first forward
    if len(columns) < len(ranks):
        return
    for kind, name in twin.kinds.items():
        text = (
            f"{name} ({kind}) mixes rows, and sees only the rows of its own rank: get the rows of "
            "neighbouring ranks with ring_attn.halo, pool rows with ring_attn.pool, and sum "
            "statistics of the sequence over the ranks"
        )
        tested = (
            f"the twin ran again with {kind} on the rows of each rank separately, and had the "
            "results of the ranks"
        )
        changes: Change = {("parted", kind): columns}
        yield Trial(Finding("mixed rows", text, tested), {0: changes}, False, in_twin=True)
    for place in [*twin.functions][:MOST_KINDS]:
        text = (
            f"{place} mixes rows, and sees only the rows of its own rank: get the rows of "
            "neighbouring ranks with ring_attn.halo or ring_attn.roll"
        )
        tested = (
            "the twin ran again with this function on the rows of each rank separately, and had "
            "the results of the ranks"
        )
        changes = {("parted", place): columns}
        yield Trial(Finding("mixed rows", text, tested), {0: changes}, False, in_twin=True)


def _dropout(
    twin: Outcome, ranks: Sequence[Outcome], unexplained: Sequence[str]
) -> Iterator[Trial]:
    """Yield a trial without dropout, on the ranks and in the twin."""
    if not any(rank.has_dropout for rank in ranks):
        return
    seeds = _seeds(twin, ranks, is_dropout=True)
    if set(unexplained) == {"evaluation loss"}:
        text = "the evaluation has dropout, as in training: call model.eval() before it"
    elif seeds is not None:
        text = f"dropout: {seeds}"
    else:
        text = (
            "dropout draws other numbers on the ranks than in one process. In training this is "
            "right, if ranks draw different numbers; audit a step without dropout, and call "
            "model.eval() before an evaluation"
        )
    tested = "the ranks and the twin ran again without dropout, and had equal results"
    changes = {rank: {("no dropout",): True} for rank in range(len(ranks))}
    yield Trial(Finding("dropout", text, tested), changes, on_ranks=True, in_twin=True)


def _random_numbers(
    twin: Outcome, ranks: Sequence[Outcome], held: Sequence[Held]
) -> Iterator[Trial]:
    """Yield a trial in which each row has the same random numbers on the ranks and in the twin.

    These are of noise and random masks, in a forward or before it, and of dropout in addition.
    """
    if not _have_same_places([twin, *ranks]):
        return
    drawn_together = [*zip(twin.draws, *(rank.draws for rank in ranks), strict=True)]
    differing = [whole for whole, *each in drawn_together if not _are_the_twins(whole, each)]
    if all(draw.is_dropout for draw in differing):
        return
    changes: dict[int, Change] = {}
    for rank, outcome in enumerate(ranks):
        replacements = {}
        for i, (whole, drawn) in enumerate(zip(twin.draws, outcome.draws, strict=True)):
            replacement = _replacement(i, whole, drawn, twin, rank, held)
            if replacement is None:
                return
            replacements["drawn", i] = replacement
        changes[rank] = replacements
    places = listed(dict.fromkeys(draw.place for draw in differing if not draw.is_dropout))
    seeds = _seeds(twin, ranks, is_dropout=False)
    if seeds is None:
        seeds = (
            f"the numbers of {places} are others on the ranks than in one process. This is right "
            "if ranks should draw different numbers for their rows; else draw them for the whole "
            "sequence with one seed, and cut them by the layout"
        )
    tested = (
        "the ranks and the twin ran again with the same random numbers for each row, and had equal "
        "results"
    )
    finding = Finding("random numbers", seeds, tested)
    yield Trial(finding, changes, on_ranks=True, in_twin=True)


def _are_the_twins(whole: Draw, each: Sequence[Draw]) -> bool:
    """Return whether all ranks have drawn the numbers of the twin."""
    return all(draw.shape == whole.shape for draw in each) and are_same([whole, *each])


def _set_seeds(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Yield trials in which all ranks set the seeds of rank 0, by the function that sets them."""
    each = [rank.seeds for rank in ranks]
    places = [[(seed.function, seed.place) for seed in of_rank] for of_rank in each]
    if any(of_rank != places[0] for of_rank in places):
        return
    wrong: dict[str, list[int]] = {}
    for i, seeds in enumerate(zip(*each, strict=True)):
        if len({seed.value for seed in seeds}) > 1:
            wrong.setdefault(seeds[0].function, []).append(i)
    for chosen in _all_and_each(wrong):
        indices = [i for name in chosen for i in wrong[name]]
        first = indices[0]
        given = ", ".join(f"{seeds[first].value} on rank {r}" for r, seeds in enumerate(each))
        where = listed(dict.fromkeys(each[0][i].place for i in indices))
        text = (
            f"{listed(chosen)} gets different seeds on the ranks ({given}) in {where}, but the "
            "numbers that follow are of all rows, or of the same rows: set one seed on all ranks"
        )
        tested = "the ranks ran again with the seeds of rank 0, and matched the twin"
        changes: dict[int, Change] = {
            rank: {("seed", i): each[0][i].value for i in indices} for rank in range(len(ranks))
        }
        finding = Finding("random numbers", text, tested)
        yield Trial(finding, changes, on_ranks=True, in_twin=False)


def _have_same_places(outcomes: Sequence[Outcome]) -> bool:
    """Return whether random numbers are drawn in the same places of the code."""
    places = [[draw.place for draw in outcome.draws] for outcome in outcomes]
    return all(of_outcome == places[0] for of_outcome in places)


def _replacement(
    seed: int, whole: Draw, drawn: Draw, twin: Outcome, rank: int, held: Sequence[Held]
) -> Replacement | None:
    """Return new random numbers for what the twin and a rank have drawn; None if rows are unknown.

    Numbers of rows have one dim of another size than the twin's: rows, or batch times rows.
    """
    if whole.shape == drawn.shape:
        return Replacement(seed, whole.shape, 0, torch.empty(0, dtype=torch.int64))
    found = [one for one in held if (one.rank, one.number) == (rank, drawn.forward)]
    if not found or len(whole.shape) != len(drawn.shape):
        return None
    (one,) = found
    batch, seqlen = _shape(twin, one.twin_number)
    sizes = zip(whole.shape, drawn.shape, strict=True)
    dims = [dim for dim, (of_twin, of_rank) in enumerate(sizes) if of_twin != of_rank]
    if len(dims) != 1:
        return None
    (dim,) = dims
    num = len(one.columns)
    if (whole.shape[dim], drawn.shape[dim]) == (seqlen, num):
        return Replacement(seed, whole.shape, dim, one.columns)
    if (whole.shape[dim], drawn.shape[dim]) == (batch * seqlen, batch * num):
        rows = torch.arange(batch)[:, None] * seqlen + one.columns
        return Replacement(seed, whole.shape, dim, rows.flatten())
    return None


def _shape(outcome: Outcome, number: int) -> tuple[int, int]:
    """Return batch and rows of a forward."""
    tokens = outcome.forwards[number].values("tokens")
    assert tokens is not None, "columns are known only of forwards with tokens"
    return tokens.size(0), tokens.size(1)


def _seeds(twin: Outcome, ranks: Sequence[Outcome], *, is_dropout: bool) -> str | None:
    """Return how the seeds of the ranks are wrong; None if they are not, as far as known.

    Numbers of rows must differ between ranks. Numbers of the same shape as in the twin are of all
    rows, so they must be equal.
    """
    if not _have_same_places([twin, *ranks]):
        return None
    of_rows: list[str] = []
    of_all: list[str] = []
    for whole, *each in zip(twin.draws, *(rank.draws for rank in ranks), strict=True):
        if whole.is_dropout != is_dropout:
            continue
        is_shared = all(draw.shape == whole.shape for draw in each)
        if is_shared and not are_same(each):
            of_all.append(whole.place)
        elif not is_shared and are_same(each):
            of_rows.append(whole.place)
    texts = []
    if of_rows:
        texts.append(
            f"all ranks draw the same numbers in {listed(dict.fromkeys(of_rows))}, for different "
            "rows: seed each rank differently, after the model is created"
        )
    if of_all:
        texts.append(
            f"ranks draw different numbers in {listed(dict.fromkeys(of_all))}, which are of the "
            "same rows, or of all rows: draw them with one seed on all ranks"
        )
    return "; ".join(texts) or None


def listed(numbers: Iterable[object]) -> str:
    """Return the first eight names or numbers as a text."""
    texts = [str(x).removeprefix("gradient of ") for x in numbers]
    return ", ".join(texts[:8]) + (" and more" if len(texts) > 8 else "")
