"""Hypotheses about why ranks differ from their twin, each with the runs that would show it.

A hypothesis is a function that reads what was noted, and yields trials: a finding, and changes of
the ranks or of the twin that remove the difference if the finding holds. `HYPOTHESES` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.testing.observe import Change, Forward, Outcome


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


@dataclass(frozen=True)
class Trial:
    """A finding, and the changes that remove the difference if it holds."""

    finding: Finding
    on_ranks: Mapping[int, Change] = field(default_factory=dict)
    in_twin: Change = field(default_factory=dict)

    @classmethod
    def of_twin(cls, contract: str, text: str, what: str, change: Change) -> Trial:
        return cls(Finding(contract, text, f"the twin {what} has the ranks' gradients"), {}, change)

    @classmethod
    def of_ranks(cls, contract: str, text: str, what: str, changes: Mapping[int, Change]) -> Trial:
        return cls(Finding(contract, text, f"with {what} the difference is gone"), changes)


class Fed:
    """The places of each rank's rows among the tokens of the twin."""

    def __init__(self, twin: Outcome, ranks: Sequence[Outcome]) -> None:
        self.forwards = [x for x in twin.trained if x.tokens is not None]
        self.batches = [x.tokens for x in self.forwards if x.tokens is not None]
        rows = [row for x in self.batches for row in x]
        self.starts = [*accumulate(map(len, rows), initial=0)]
        self.tokens = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        self.ends = torch.zeros(len(self.tokens), dtype=torch.bool)
        self.ends[[start - 1 for start in self.starts[1:]]] = True
        # As long that the tokens of one run are expected less than once by chance in the batch.
        vocabulary = max(2, len(self.tokens.unique()))
        self.run = 1 + math.ceil(math.log(max(2, len(self.tokens)), vocabulary))
        # Rows of the shards of all layouts, of most ranks first.
        self.shards = [
            ((name, n), r, layout.position_ids(r) + start)
            for n in range(len(ranks), 0, -1)
            for name in (LAYOUTS if n > 1 else LAYOUTS[:1])
            for start, row in zip(self.starts, rows, strict=False)
            if len(row) >= n
            for layout in [SequenceLayout.from_name(name, len(row), n)]
            for r in range(n)
        ]
        self.layout: tuple[str, int] | None = None
        # Rank, number of its forward, the forward, and (batch, rows) places; -1 for foreign rows.
        self.places = [
            (rank, at, x, torch.stack([self._place(row, rank) for row in x.tokens]))
            for rank, run in enumerate(ranks)
            for at, x in enumerate(run.forwards)
            if x.training and x.tokens is not None
        ]

    def _place(self, row: Tensor, rank: int) -> Tensor:
        for layout, r, at in sorted(self.shards, key=lambda x: (-x[0][1], x[1] != rank % x[0][1])):
            if len(at) == len(row) and torch.equal(self.tokens[at], row):
                self.layout = self.layout or layout if r == rank % layout[1] else self.layout
                return at
        return self._runs(row)

    def _runs(self, row: Tensor) -> Tensor:
        """Places of the longest runs of equal tokens, one after another."""
        lengths = torch.zeros(len(row) + 1, len(self.tokens) + 1, dtype=torch.int64)
        for i in range(len(row) - 1, -1, -1):
            lengths[i, :-1] = (self.tokens == row[i]) * (1 + lengths[i + 1, 1:] * ~self.ends)
        found, i = torch.full((len(row),), -1), 0
        while i < len(row):
            n, at = (int(x) for x in lengths[i].max(0))
            if n >= min(self.run, len(row) - i):
                found[i : i + n] = torch.arange(at, at + n)
            i += max(n, 1)
        return found

    def whole(self, read: Callable[[Forward], Tensor | None]) -> Tensor | None:
        """A value of each token of the twin, or None if the twin does not tell it."""
        parts = []
        for forward, tokens in zip(self.forwards, self.batches, strict=True):
            x = read(forward)
            if x is None or x.shape[-1:] != tokens.shape[-1:]:
                return None
            parts.append(x.expand(tokens.shape).flatten())
        return torch.cat(parts) if parts else None

    def expected(self, rank: int, forward: Forward) -> Tensor | None:
        """Places that the layout of the other ranks gives to this one."""
        places = [
            at for layout, r, at in self.shards
            if layout == self.layout and r == rank % layout[1]
        ]  # fmt: skip
        shape = () if forward.tokens is None else forward.tokens.shape
        return torch.stack(places) if [*shape] == [len(places), *{*map(len, places)}] else None

    def indices(self, place: int) -> int:
        """The index of a token in its sequence."""
        return place - max(start for start in self.starts if start <= place)


def _weights(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    changed = dict[int, Change]()
    for rank, run in enumerate(ranks):
        there = ((name, x, run.start.get(name)) for name, x in twin.start.items())
        if other := {
            ("weight", name): x
            for name, x, y in there
            if y is not None and y.shape == x.shape and not torch.equal(x, y)
        }:
            changed[rank] = other
    if changed:
        _, name = next(iter(next(iter(changed.values()))))
        yield Trial.of_ranks(
            "initial weights",
            f"weights of rank {listed(changed)} differ from the twin's at the first forward "
            f"({name} and others): make the model from one seed on every rank, or broadcast it",
            "the twin's weights", changed,
        )  # fmt: skip


def _batch(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    targets, count = fed.whole(Forward.target), 0
    changed = dict[int, dict[Any, Any]]()
    for rank, at, forward, places in fed.places:
        if foreign := int((places < 0).sum()):
            count += foreign
            change = changed.setdefault(rank, {})
            if (right := fed.expected(rank, forward)) is not None:
                change["input", at, "input_ids"] = fed.tokens[right]
                if targets is not None:
                    change["targets", at] = targets[right]
    if changed:
        yield Trial.of_ranks(
            "batch",
            f"rank {listed(changed)} was fed {count} tokens that are not in the twin's batch: what "
            "draws a batch must be the same on all ranks of a sequence, and the batch of one "
            "process must be that of all ranks together",
            "the twin's tokens", changed,
        )  # fmt: skip


def _positions(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    whole = fed.whole(lambda x: x.inputs.get("position_ids"))
    changed, where = dict[int, dict[Any, Any]](), ""
    for rank, at, forward, places in fed.places:
        given = forward.inputs.get("position_ids")
        if whole is None or given is None or given.shape[-1] != places.shape[-1]:
            continue
        right = whole[places]
        wrong = (given != right) & (places >= 0)
        if bool(wrong.any()):
            changed.setdefault(rank, {})["input", at, "position_ids"] = (
                right[: given.shape[0] if given.ndim > 1 else 1]
            )  # fmt: skip
            row = tuple(wrong.nonzero()[0].tolist())
            where = where or (
                f"position_ids {'restart' if int(given.min()) == 0 else 'are wrong'} on rank "
                f"{rank}: its row {row[-1]} has position {int(given.expand(places.shape)[row])}, "
                f"but stands at {int(right[row])}"
            )
    if changed:
        yield Trial.of_ranks(
            "positions",
            f"{where}; give layout.position_ids(rank), or let shard_batch cut the batch",
            "the positions of the twin", changed,
        )  # fmt: skip


def _labels(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    right = fed.whole(Forward.target)
    if right is None:
        return
    ignored = twin.trained[0].ignored
    got, seen = torch.full_like(right, ignored), torch.zeros_like(right, dtype=torch.bool)
    ends = set[int]()
    for _, _, forward, places in fed.places:
        if (target := forward.target()) is None:
            return
        real = places >= 0
        got[places[real]] = torch.where(target == forward.ignored, ignored, target)[real]
        seen[places[real]] = True
        after = F.pad(places[:, 1:], (0, 1), value=-1)
        ends |= {*places[after != places + 1].tolist()}
    wrong = (got != right).nonzero().flatten()
    if not len(wrong):
        return
    contract, numbers = "labels", listed(sorted({fed.indices(x) + 1 for x in wrong.tolist()}))
    if not bool(seen.all()):
        contract = "tokens"
        lost = {fed.indices(x) for x in (~seen).nonzero().flatten().tolist()}
        text = (
            f"tokens {listed(sorted(lost))} are on no rank, nor are their labels: cut any length "
            "by a layout (shard_batch), or pad, rather than drop what the ranks do not divide"
        )
    elif bool((right[wrong] == ignored).all()):
        text = (
            f"labels {numbers} are targets on the ranks alone: rows that are padded, masked or the "
            "last of a document must have the label -100 there too"
        )
    elif {*wrong.tolist()} <= ends:
        text = (
            f"labels {numbers} are missing or of other rows: shifted after cutting, which loses "
            "the label of the last row of a segment; shift first, then cut (shard_batch)"
        )
    elif bool((got[wrong] == torch.roll(right, -1)[wrong]).double().mean() > 0.5):
        text = (
            f"{len(wrong)} labels are those of the next token but one: they are shifted twice, "
            "before cutting and in the loss; give shift_labels, or a loss that does not shift"
        )
    else:
        text = (
            f"labels {numbers} are not the next tokens: cut labels by the layout of the tokens, "
            "shifted first (shard_batch)"
        )
    parts, change, recounted = got.split([*map(torch.numel, fed.batches)]), {}, {}
    ratio = int((right != ignored).sum()) / max(1, int((got != ignored).sum()))
    for at, forward in enumerate(twin.forwards):
        for tokens, part in zip(fed.batches, parts, strict=True):
            if forward.tokens is not None and torch.equal(forward.tokens, tokens):
                new = part.view(tokens.shape)
                short = forward.targets and forward.targets[0].numel() < part.numel()
                change["targets", at] = new[:, :-1] if short else new
                recounted["factor", at, 0] = ratio
    for changes in (change, change | recounted):  # the twin's loss counts the labels, or does not
        yield Trial.of_twin(contract, text, "with the ranks' labels", changes)


def _denominators(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    """Own counts of all cross-entropies of a forward, or of one; a factor of one of several."""
    counts = [[x.counts() for x in run.trained] for run in ranks]
    shapes = {tuple(map(len, x)) for x in counts}
    if len(shapes) > 1 or not (shape := shapes.pop()) or not (most := max(shape)):
        return
    for chosen in ([*range(most)], *([i] for i in range(most if most > 1 else 0))):
        name = "the loss" if len(chosen) == most else f"cross-entropy {chosen[0]} of {most}"
        own = dict[int, dict[Any, Any]]()
        for rank, run in enumerate(ranks):
            at = [i for i, x in enumerate(run.forwards) if x.training]
            own[rank] = {
                ("factor", at[j], i): counts[rank][j][i] * len(ranks) / total
                for j, n in enumerate(shape)
                for i in chosen
                if i < n and (total := sum(x[j][i] for x in counts))
            }
        numbers = [sum(one[i] for one in x for i in chosen if i < len(one)) for x in counts]
        if len({*numbers}) > 1:
            given = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(numbers))
            yield Trial.of_ranks(
                "denominator",
                f"{name} is divided by each rank's own count of targets ({given}): divide by the "
                "targets of the whole batch",
                "losses weighted by their counts", own,
            )  # fmt: skip
        for factor in (len(ranks), 1 / len(ranks)) if len(chosen) < most else ():
            yield Trial.of_ranks(
                "gradient scale",
                f"{name} is {fraction(1 / factor)} of the twin's, unlike the others: each rank has "
                "its part of one mean, so all parts of a loss take the same factor",
                f"it multiplied by {fraction(factor)}",
                {rank: dict.fromkeys(x, factor) for rank, x in own.items()},
            )  # fmt: skip


def _accumulation(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    last, *rest = [
        {("backward", at): 0.0 for at, x in enumerate(run.forwards) if x.loss is not None}
        for run in (twin, *ranks)
    ]
    if min(map(len, (last, *rest))) > 1:
        for change in (last, *rest):
            change.popitem()
        yield Trial(
            Finding(
                "accumulation",
                f"gradients of {len(last)} micro-batches before the last do not count once: sum "
                "over the ranks once, after the last, and clear gradients only before the first",
                "with the last micro-batch alone the difference is gone",
            ),
            dict(enumerate(rest)), last,
        )  # fmt: skip


def _mask(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    yield Trial.of_twin(
        "mask",
        "the mask, or the documents' boundaries, are not seen by the attention of the ranks: give "
        "attention_mask or cu_seqlens of the whole sequence to attention on each rank",
        "without them", {("causal",): True},
    )  # fmt: skip


def _attention(fed: Fed, twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    first = {rank: places[0] for rank, _, _, places in reversed(fed.places)}
    rows = [first[rank] for rank in sorted(first)]
    if len(rows) < 2 or sorted(torch.cat(rows).tolist()) != [*range(fed.starts[1])]:
        return
    yield Trial.of_twin(
        "attention",
        "attention sees only the rows of its own rank: make it ring_attention, or see that the "
        "model's attention function is the one that was replaced",
        "whose attention is cut into the ranks' rows", {("rows",): rows},
    )  # fmt: skip
    given, whole = (fed.layout or ("otherwise",))[0], torch.cat(rows)
    for name in LAYOUTS:
        layout = SequenceLayout.from_name(name, len(whole), len(rows))
        taken = torch.cat([layout.position_ids(r) for r in range(len(rows))])
        if name != given and layout.shard_lens == tuple(map(len, rows)):
            yield Trial.of_twin(
                "layout",
                f"attention takes the rows for {name}, but they are cut {given}: give it the "
                "layout of the batch",
                "whose attention takes the rows so", {("rows",): [whole[taken.argsort()]]},
            )  # fmt: skip


def clipping(twin: Outcome, ranks: Sequence[Outcome]) -> Iterator[Trial]:
    norms = [run.norms for run in (twin, *ranks)]
    if all(norms):
        numbers = ", ".join(f"{x[0]:.4g} on rank {r}" for r, x in enumerate(norms[1:]))
        yield Trial(
            Finding(
                "clipping",
                f"gradients are clipped by another norm than the twin's ({numbers}; twin "
                f"{norms[0][0]:.4g}): sum them first, and clip by the norm of all",
                "without clipping on either side the difference is gone",
            ),
            dict.fromkeys(range(len(ranks)), {("unclipped",): True}), {("unclipped",): True},
        )  # fmt: skip


HYPOTHESES = (
    _weights, _batch, _positions, _labels, _denominators, _accumulation, _mask, _attention
)  # fmt: skip


def trials(twin: Outcome, ranks: Sequence[Outcome]) -> list[Trial]:
    fed = Fed(twin, ranks)
    return [trial for made in HYPOTHESES for trial in made(fed, twin, ranks)]


def fraction(x: float) -> str:
    """A factor as text: 1/n where that is it to the digits that are shown."""
    inverse = f"{1 / x:.4g}" if x else ""
    return f"1/{inverse}" if x < 1 and inverse.isdigit() else f"{x:.4g}"


def listed(numbers: Any) -> str:
    """Numbers as text, at most eight."""
    numbers = [*numbers]
    return ", ".join(map(str, numbers[:8])) + (" and more" if len(numbers) > 8 else "")
