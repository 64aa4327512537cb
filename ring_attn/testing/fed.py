"""Hypotheses about what ranks were fed, and the changes of a run that test each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.testing.observe import Change, Forward, Outcome

# Shortest run of equal tokens by which rows are found in the sequences of the twin.
RUN = 3


@dataclass(frozen=True)
class Finding:
    """A broken contract.

    Attributes:
        contract: its short name.
        text: what is wrong, where, and what to do.
        tested: how the hypothesis was tested.
    """

    contract: str
    text: str
    tested: str


class Trial(NamedTuple):
    """A hypothesis, and the changes that would remove the difference if it holds."""

    finding: Finding
    on_ranks: dict[int, Change]
    in_twin: Change | None = None


class Fed:
    """Where the rows of each rank stand in the sequences of the twin.

    Attributes:
        places: by rank and forward, (batch, rows) of indices into all tokens of the twin, in order;
            -1 for rows that the twin does not have. None where no tokens were seen.
    """

    def __init__(self, twin: Sequence[Forward], ranks: Sequence[Outcome]) -> None:
        self.twin = [x for x in twin if x.tokens is not None]
        self.sequences: list[tuple[int, Tensor]] = []
        self.layout: tuple[str, int] | None = None
        start = 0
        for row in (row for x in self.twin if x.tokens is not None for row in x.tokens):
            self.sequences.append((start, row))
            start += len(row)
        self.size, self.world_size = start, len(ranks)
        self.places = [
            [None if x.tokens is None else self._place(x.tokens, rank) for x in run.trained]
            for rank, run in enumerate(ranks)
        ]

    def _place(self, tokens: Tensor, rank: int) -> Tensor:
        return torch.stack([self._place_row(row, rank) for row in tokens])

    def _place_row(self, row: Tensor, rank: int) -> Tensor:
        for world_size in range(self.world_size, 0, -1):
            ranks = sorted(range(world_size), key=lambda r: r != rank % world_size)
            for name in LAYOUTS if world_size > 1 else LAYOUTS[:1]:
                for start, sequence in self.sequences:
                    if len(sequence) < world_size:
                        continue
                    layout = SequenceLayout.from_name(name, len(sequence), world_size)
                    for r in ranks:
                        at = layout.position_ids(r)
                        if len(at) == len(row) and torch.equal(sequence[at], row):
                            if r == rank % world_size:
                                self.layout = self.layout or (name, world_size)
                            return at + start
        return self._runs(row)

    def _runs(self, row: Tensor) -> Tensor:
        """Places of the longest runs of equal tokens, one after another."""
        found, i = torch.full((len(row),), -1), 0
        while i < len(row):
            best, at = 0, -1
            for start, sequence in self.sequences:
                for j in (sequence == row[i]).nonzero().flatten().tolist():
                    n = min(len(sequence) - j, len(row) - i)
                    same = (sequence[j : j + n] == row[i : i + n]).int().cumprod(0).sum()
                    if int(same) > best:
                        best, at = int(same), start + j
            if best >= min(RUN, len(row) - i):
                found[i : i + best] = torch.arange(at, at + best)
            i += max(best, 1)
        return found

    def each(self, ranks: Sequence[Outcome]) -> Iterator[tuple[int, int, Forward, Tensor]]:
        """Rank, number of the forward, the forward, and its places, where tokens were seen."""
        for rank, run in enumerate(ranks):
            for index, forward in enumerate(run.trained):
                if (places := self.places[rank][index]) is not None:
                    yield rank, run.forwards.index(forward), forward, places

    def whole(self, read: Callable[[Forward], Tensor | None]) -> Tensor | None:
        """A value of each token of the twin, or None if the twin does not tell it."""
        parts = []
        for forward in self.twin:
            x = read(forward)
            if x is None or forward.tokens is None or x.shape[-1:] != forward.tokens.shape[-1:]:
                return None
            parts.append(x.expand(forward.tokens.shape).flatten())
        return torch.cat(parts) if parts else None

    def expected(self, rank: int, forward: Forward) -> Tensor | None:
        """Places that the layout of the other ranks gives to this one."""
        lengths = {len(x) for _, x in self.sequences}
        if self.layout is None or len(lengths) != 1 or forward.tokens is None:
            return None
        if len(forward.tokens) != len(self.sequences):
            return None
        name, world_size = self.layout
        layout = SequenceLayout.from_name(name, lengths.pop(), world_size)
        at = layout.position_ids(rank % world_size)
        if len(at) != forward.tokens.shape[-1]:
            return None
        return torch.stack([at + start for start, _ in self.sequences])


def positions_of(forward: Forward) -> Tensor | None:
    return forward.inputs.get("position_ids")


def trials(twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """The hypotheses for which what was noted gives a reason."""
    yield from _weights(twin, ranks)
    fed = Fed(twin.trained, ranks)
    yield from _tokens(fed, ranks)
    yield from _positions(fed, ranks)
    yield from _labels(fed, twin, ranks)
    yield from _denominators(ranks)
    yield from _accumulation(ranks)
    yield from _masks(twin)
    yield from _attention(fed, ranks)


def _weights(twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    changed, worst = {}, ""
    for rank, run in enumerate(ranks):
        other = {
            name: x
            for name, x in twin.start.items()
            if name in run.start
            and run.start[name].shape == x.shape
            and not torch.equal(run.start[name], x)
        }
        if other:
            changed[rank] = Change(weights=other)
            worst = worst or f"{len(other)} parameters, {next(iter(other))} among them"
    if changed:
        yield Trial(
            Finding(
                "initial weights",
                f"weights of rank {listed(changed)} differ from the twin's at the first forward "
                f"({worst}): make the model from the same seed on every rank, or broadcast it",
                "with the twin's weights the difference is gone",
            ),
            changed,
        )


def _tokens(fed: Fed, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    changed: dict[int, Change] = {}
    tokens = fed.whole(lambda x: x.tokens)
    targets = fed.whole(Forward.target)
    count = 0
    for rank, index, forward, places in fed.each(ranks):
        foreign = int((places < 0).sum())
        at = fed.expected(rank, forward) if foreign else None
        if not foreign:
            continue
        count += foreign
        inputs, labels = {}, {}
        if at is not None and tokens is not None:
            inputs = {index: {"input_ids": tokens[at]}}
            labels = {} if targets is None else {index: targets[at]}
        changed[rank] = Change(inputs=inputs, targets=labels)
    if changed:
        yield Trial(
            Finding(
                "batch",
                f"rank {listed(changed)} was fed {count} tokens that are not in the twin's batch: "
                "what draws a batch must be the same on all ranks of a sequence, and the batch of "
                "one process must be that of all ranks together",
                "with the twin's tokens the difference is gone",
            ),
            changed,
        )


def _positions(fed: Fed, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    whole = fed.whole(positions_of)
    changed, where = dict[int, dict[int, Any]](), ""
    for rank, index, forward, places in fed.each(ranks):
        given = positions_of(forward)
        if whole is None or given is None or given.shape[-1] != places.shape[-1]:
            continue
        right = whole[places]
        if bool(((given != right) & (places >= 0)).any()):
            changed.setdefault(rank, {})[index] = {
                "position_ids": right[: given.shape[0] if given.ndim > 1 else 1]
            }
            given = given.expand(places.shape)
            row = tuple((given != right).nonzero()[0].tolist())
            restart = bool((given[0] == torch.arange(given.shape[-1])).all())
            where = where or (
                f"position_ids {'restart' if restart else 'are wrong'} on rank {rank}: its row "
                f"{row[-1]} has position {int(given[row])}, but stands at {int(right[row])}"
            )
    if changed:
        yield Trial(
            Finding(
                "positions",
                f"{where}; give layout.position_ids(rank), or let shard_batch cut the batch",
                "with the positions of the twin the difference is gone",
            ),
            {rank: Change(inputs=inputs) for rank, inputs in changed.items()},
        )


def _labels(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    right = fed.whole(Forward.target)
    if right is None:
        return
    ignored = twin.trained[0].ignored
    got, seen = torch.full_like(right, ignored), torch.zeros_like(right, dtype=torch.bool)
    ends = set[int]()
    for _, _, forward, places in fed.each(ranks):
        target = forward.target()
        if target is None:
            return
        real = places >= 0
        got[places[real]] = torch.where(target == forward.ignored, ignored, target)[real]
        seen[places[real]] = True
        after = F.pad(places[:, 1:], (0, 1), value=-1)
        ends |= {*places[after != places + 1].tolist()}
    wrong = ((got != right) & seen).nonzero().flatten()
    if not len(wrong):
        return
    after = torch.roll(right, -1)
    starts = torch.tensor([start for start, _ in fed.sequences])
    first = starts[torch.searchsorted(starts, wrong, right=True) - 1]
    numbers = sorted({*(wrong - first + 1).tolist()})
    if {*wrong.tolist()} <= ends:
        missing = "missing" if bool((got[wrong] == ignored).all()) else "missing or of other rows"
        text = (
            f"labels {listed(numbers)} are {missing}: shifted after cutting, which "
            "loses the label of the last row of a segment; shift first, then cut (shard_batch)"
        )
    elif float((got[wrong] == after[wrong]).double().mean()) > 0.5:
        text = (
            f"{len(wrong)} labels are those of the next token but one: they are shifted twice, "
            "before cutting and in the loss; give shift_labels, or a loss that does not shift"
        )
    else:
        text = (
            f"labels {listed(numbers)} are not the next tokens: cut labels by the "
            "layout of the tokens, shifted first (shard_batch)"
        )
    changes, start = {}, 0
    for index, forward in enumerate(twin.forwards):
        if forward.training and forward.tokens is not None:
            batch, rows = forward.tokens.shape
            part = got[start : start + batch * rows].view(batch, rows)
            start += batch * rows
            short = sum(x.numel() for x in forward.targets) == batch * (rows - 1)
            changes[index] = part[:, :-1] if short else part
    yield Trial(
        Finding("labels", text, "the twin with the ranks' labels has the ranks' gradients"),
        {},
        Change(targets=changes, required=False),
    )


def _denominators(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    counts = [[x.num_targets() for x in run.trained] for run in ranks]
    if len({len(x) for x in counts}) > 1 or not any(map(sum, counts)):
        return
    numbers = ", ".join(f"{sum(x)} on rank {rank}" for rank, x in enumerate(counts))
    if all(x == counts[0] for x in counts):
        return
    changed = {}
    for rank, run in enumerate(ranks):
        factors = {}
        for at, forward in enumerate(run.trained):
            total = sum(x[at] for x in counts)
            if total and counts[rank][at]:
                index = run.forwards.index(forward)
                factors[index] = counts[rank][at] * len(ranks) / total
        changed[rank] = Change(factors=factors)
    yield Trial(
        Finding(
            "denominator",
            f"the loss is divided by each rank's own count of targets ({numbers}): divide by the "
            "targets of the whole batch",
            "with losses weighted by their counts the difference is gone",
        ),
        changed,
    )


def _accumulation(ranks: Sequence[Outcome]) -> Iterator[Trial]:
    count, world_size = len(ranks[0].trained), len(ranks)
    if count < 2 or any(len(run.trained) != count for run in ranks):
        return
    changed = {
        rank: Change(
            factors={
                run.forwards.index(forward): float(world_size) ** (i + 1 - count)
                for i, forward in enumerate(run.trained)
            }
        )
        for rank, run in enumerate(ranks)
    }
    yield Trial(
        Finding(
            "accumulation",
            f"gradients are summed after each of {count} micro-batches, so that the first counts "
            f"{fraction(float(world_size) ** (count - 1))} times: sum once, after the last",
            "with earlier losses divided by the ranks the difference is gone",
        ),
        changed,
    )


def _masks(twin: Outcome) -> Iterator[Trial]:
    names = dict.fromkeys(
        name
        for forward in twin.trained
        for name in forward.inputs
        if "mask" in name or name.startswith("cu_seq")
    )
    for name in names:
        without: dict[int, dict[str, Tensor | None]] = {
            index: {name: None} for index in range(len(twin.forwards))
        }
        yield Trial(
            Finding(
                "mask",
                f"{name} was not seen by the attention of the ranks: give it whole to attention on "
                "each rank, as a mask or as cu_seqlens of the whole sequence",
                f"the twin without {name} has the ranks' gradients",
            ),
            {},
            Change(inputs=without, required=False),
        )


def _attention(fed: Fed, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    rows = [x[0][0] for x in fed.places if x and x[0] is not None]
    if len(rows) < 2 or sorted(torch.cat(rows).tolist()) != [*range(len(fed.sequences[0][1]))]:
        return
    yield Trial(
        Finding(
            "attention",
            "attention sees only the rows of its own rank: make it ring_attention, or see that the "
            "model's attention function is the one that was replaced",
            "the twin whose attention is cut into the ranks' rows has the ranks' gradients",
        ),
        {},
        Change(rows=rows, required=False),
    )
    if fed.layout and fed.layout[0] != "contiguous":
        yield Trial(
            Finding(
                "layout",
                f"attention takes the rows for contiguous, but they are cut {fed.layout[0]}: give "
                "it the layout of the batch",
                "the twin whose attention takes the rows in the ranks' order has their gradients",
            ),
            {},
            Change(rows=[torch.cat(rows)], required=False),
        )


def fraction(x: float) -> str:
    near = Fraction(x).limit_denominator(64)
    return str(near) if near and abs(float(near) / x - 1) < 1e-3 else f"{x:.4g}"


def listed(numbers: Any) -> str:
    """Numbers as text, at most eight."""
    numbers = [*numbers]
    return ", ".join(map(str, numbers[:8])) + (" and more" if len(numbers) > 8 else "")
