"""Hypotheses about why ranks differ from their twin, each with the runs that would show it.

A hypothesis is a function that reads what was noted, and yields trials: what is wrong, and changes
of the ranks or of the twin that remove the difference if that is so. `HYPOTHESES` lists them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.testing.observe import IGNORED, Change, Forward, Outcome


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
    """A suspicion, and changes, by rank or of the twin, that remove the difference if it holds."""

    contract: str
    text: str
    changed: str
    on_ranks: Mapping[int, Change] = field(default_factory=dict)
    in_twin: Change = field(default_factory=dict)

    @property
    def finding(self) -> Finding:
        tested = f"with {self.changed} the difference is gone"
        return Finding(self.contract, self.text, tested)


class Fed:
    """Places of the ranks' rows among the tokens of the twin, counted over all its rows.

    Ranks are taken to hold rows by the layout that gives most of their tokens the twin's places.
    """

    def __init__(self, twin: Outcome, ranks: Sequence[Outcome]) -> None:
        self.twin, self.ranks = twin, ranks
        self.rows = [row for _, _, tokens in fed_forwards(twin) for row in tokens]
        self.starts = [*accumulate(map(len, self.rows), initial=0)]
        self.tokens = torch.cat(self.rows) if self.rows else torch.empty(0, dtype=torch.int64)
        n = len(ranks)
        _, self.layout, self.places = min(
            (
                self._by_layout(name, order, parts)
                for parts in range(1, n + 1) if n % parts == 0
                for name in LAYOUTS
                for order in ([i % parts for i in range(n)], [i * parts // n for i in range(n)])
            ),
            key=lambda x: x[0],
        )  # fmt: skip

    def _by_layout(
        self, name: str, order: Sequence[int], parts: int
    ) -> tuple[float, str, list[tuple[int, int, Forward, Tensor]]]:
        """The number of tokens that a layout makes wrong or missing, its name, and places."""
        found, given, first = [], [torch.empty(0, dtype=torch.int64)], 0
        for forwards in zip(*map(fed_forwards, self.ranks if self.rows else ()), strict=False):
            lens = {order[rank]: x.size(1) for rank, (_, _, x) in enumerate(forwards)}
            layout = SequenceLayout.from_name(name, max(parts, sum(lens.values())), parts)
            for rank, (at, forward, tokens) in enumerate(forwards):
                local = layout.position_ids(order[rank])
                if len(local) != tokens.size(1):
                    return math.inf, name, []
                places = [self._place(row, local, first + i) for i, row in enumerate(tokens)]
                found.append((rank, at, forward, torch.stack(places)))
                given.append(tokens.flatten())
            first += len(forwards[0][2])
        there = torch.cat([given[0], *(x[3].flatten() for x in found)])
        wrong = int(((there < 0) | (self.tokens[there] != torch.cat(given))).sum())
        return wrong + len(self.tokens) - len(there[there >= 0].unique()), name, found

    def _place(self, row: Tensor, local: Tensor, index: int) -> Tensor:
        """Places of a rank's row in that row of the twin whose tokens it has; -1 beyond its end."""
        there = [
            torch.where(local < len(x), local + start, -1)
            for x, start in zip(self.rows, self.starts, strict=False)
        ]
        equal = [(self.tokens[at] == row)[at >= 0] for at in there]
        return there[
            max(range(len(there)), key=lambda i: (bool(equal[i].all()), i == index, equal[i].sum()))
        ]

    def whole(self, name: str) -> Tensor | None:
        """A value of each token of the twin, or None if the twin does not tell it."""
        parts = [x.values(name) for _, x, _ in fed_forwards(self.twin)]
        there = [x.flatten() for x in parts if x is not None]
        return torch.cat(there) if there and len(there) == len(parts) else None

    def shown(self, places: Tensor, shift: int = 0) -> str:
        """Indices of tokens in their sequences, as text."""
        starts = torch.tensor(self.starts)
        indices = places - starts[torch.searchsorted(starts, places, right=True) - 1] + shift
        return listed(indices.unique().tolist())


def fed_forwards(run: Outcome) -> list[tuple[int, Forward, Tensor]]:
    """Forwards with gradients whose tokens are known: number, forward, tokens."""
    known = ((at, x, x.values("tokens")) for at, x in enumerate(run.forwards) if x.training)
    return [(at, x, tokens) for at, x, tokens in known if tokens is not None]


def _weights(fed: Fed) -> Iterator[Trial]:
    changed = {
        rank: other
        for rank, run in enumerate(fed.ranks)
        if (other := {
            ("weight", name): x for name, x in fed.twin.start.items()
            if (y := run.start.get(name)) is not None and y.shape == x.shape and not y.equal(x)
        })
    }  # fmt: skip
    if changed:
        name = next(iter(next(iter(changed.values()))))[1]
        yield Trial(
            "initial weights",
            f"weights of rank {listed(changed)} differ from the twin's at the first forward "
            f"({name} and others): make the model from one seed on every rank, or broadcast it",
            "the twin's weights", changed,
        )  # fmt: skip


# Inputs of a forward: the contract, its name in texts, and what to do.
FED = {
    "tokens": (
        "batch", "tokens", "what draws a batch must be the same on all ranks of a sequence, and "
        "the batch of one process must be that of all ranks together",
    ),
    "positions": (
        "positions", "position_ids",
        "give layout.position_ids(rank), or let shard_batch cut the batch",
    ),
}  # fmt: skip


def _inputs(fed: Fed) -> Iterator[Trial]:
    labels = fed.whole("targets")
    for name, (contract, called, advice) in FED.items():
        whole, where = fed.whole(name), ""
        changed = defaultdict[int, dict[Any, Any]](dict)
        for rank, at, forward, places in fed.places:
            given = forward.values(name)
            if whole is None or given is None:
                continue
            right = torch.where(places < 0, given, whole[places])
            if len(wrong := (given != right).nonzero()):
                row = tuple(wrong[0].tolist())
                where = where or (
                    f"row {row[-1]} of rank {rank} has {int(given[row])}, the twin "
                    f"{int(right[row])} there"
                )
                changed[rank][at, name] = right.flatten()[: forward.fed[name].numel()]
                if name == "tokens" and labels is not None:
                    changed[rank][at, "targets"] = labels[places]
        if changed:
            yield Trial(
                contract,
                f"{called} of rank {listed(changed)} are not the twin's: {where}; {advice}",
                f"the {called} of the twin", changed,
            )  # fmt: skip


def _labels(fed: Fed) -> Iterator[Trial]:
    right = fed.whole("targets")
    if right is None or any(x.values("targets") is None for _, _, x, _ in fed.places):
        return
    got, seen = torch.full_like(right, IGNORED), torch.zeros_like(right, dtype=torch.bool)
    ends = seen.clone()
    for _, _, forward, places in fed.places:
        target, real = forward.values("targets"), places >= 0
        assert target is not None
        got[places[real]], seen[places[real]] = target[real], True
        ends[places[F.pad(places[:, 1:], (0, 1), value=-1) != places + 1]] = True
    wrong, next_but_one = got != right, right.roll(-1)
    twice = (got == next_but_one) | (got == IGNORED) | ends
    names = fed.shown(wrong.nonzero().flatten(), 1)
    # The first that holds: whether it does, the contract, and the text.
    texts = (
        (not seen.all(), "tokens",
         f"tokens {fed.shown((~seen).nonzero().flatten())} are on no rank, nor are their labels: "
         "cut any length by a layout (shard_batch), or pad, rather than drop what the ranks do not "
         "divide"),
        ((right[wrong] == IGNORED).all(), "labels",
         f"labels {names} are targets on the ranks alone: rows that are padded, masked or the last "
         "of a document must have the label -100 there too"),
        (ends[wrong].all(), "labels",
         f"labels {names} are missing or of other rows: shifted after cutting, which loses the "
         "label of the last row of a segment; shift first, then cut (shard_batch)"),
        (twice[wrong].all() and (got == next_but_one)[wrong].any(), "labels",
         f"labels {names} are those of the next token but one: they are shifted twice, before "
         "cutting and in the loss; give shift_labels, or a loss that does not shift"),
        (True, "labels",
         f"labels {names} are not the next tokens: cut labels by the layout of the tokens, shifted "
         "first (shard_batch)"),
    )  # fmt: skip
    contract, text = next(x[1:] for x in texts if x[0])
    # The twin's loss divides by the number of its labels, or by another number.
    ratio = int((right != IGNORED).sum()) / max(1, int((got != IGNORED).sum()))
    change, recounted = dict[Any, Any](), dict[Any, Any]()
    batches = [tokens for _, _, tokens in fed_forwards(fed.twin)]
    for tokens, part in zip(batches, got.split([*map(torch.numel, batches)]), strict=True):
        for at, forward in enumerate(fed.twin.forwards):  # an evaluation may have the same batch
            if (x := forward.values("tokens")) is not None and x.equal(tokens):
                # A model that shifts labels itself has one less.
                short = sum(map(torch.numel, forward.targets)) < part.numel()
                change[at, "targets"] = part.view(tokens.shape)[:, :-1] if short else part
                recounted[at, 0] = ratio
    for in_twin in (change, change | recounted):
        yield Trial(contract, text, "the ranks' labels in the twin", in_twin=in_twin)


def _denominators(fed: Fed) -> Iterator[Trial]:
    """Own counts of all cross-entropies, in training or evaluation, or of one; a factor of one."""
    runs, n = [run.forwards for run in fed.ranks], len(fed.ranks)
    counts = [
        {(at, i): x for at, one in enumerate(run) for i, x in enumerate(one.counts())}
        for run in runs
    ]
    if len({tuple(x) for x in counts}) > 1:
        return
    losses = max((i for _, i in counts[0]), default=-1) + 1
    training = [key for key in counts[0] if runs[0][key[0]].training]
    chosen = [("the loss", training)]
    chosen.append(("the evaluation loss", [key for key in counts[0] if key not in training]))
    if losses > 1:
        chosen += [(f"cross-entropy {i} of {losses}", [key for key in training if key[1] == i])
                   for i in range(losses)]  # fmt: skip
    for text, keys in chosen:
        totals = [sum(x[k] for k in keys) for x in counts]
        if len({*totals}) > 1:
            own = [{k: x[k] * n / (sum(y[k] for y in counts) or 1) for k in keys} for x in counts]
            given = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(totals))
            yield Trial(
                "denominator",
                f"{text} is divided by each rank's own count of targets ({given}): divide by the "
                "targets of the whole batch",
                "losses weighted by their counts", dict(enumerate(own)),
            )  # fmt: skip
        for factor in (n, 1 / n) if text.startswith("cross") else ():
            yield Trial(
                "gradient scale",
                f"{text} is {fraction(1 / factor)} of the twin's, unlike the others: each rank has "
                "its part of one mean, so all parts of a loss take the same factor",
                f"it multiplied by {fraction(factor)}",
                dict.fromkeys(range(n), dict.fromkeys(keys, factor)),
            )  # fmt: skip


def _accumulation(fed: Fed) -> Iterator[Trial]:
    def but_last(run: Outcome) -> Change:
        training = [at for at, x in enumerate(run.forwards) if x.training and x.targets]
        return {(at, i): 0.0 for at in training[:-1] for i in range(len(run.forwards[at].targets))}

    if in_twin := but_last(fed.twin):
        yield Trial(
            "accumulation",
            "gradients of micro-batches before the last do not count once: sum over the ranks "
            "once, after the last, and clear gradients only before the first",
            "the last micro-batch alone",
            {rank: but_last(run) for rank, run in enumerate(fed.ranks)}, in_twin,
        )  # fmt: skip


def _attention(fed: Fed) -> Iterator[Trial]:
    """Gives the twin's attention the mask that the ranks' may have: it has their gradients."""
    length = len(fed.rows[0]) if fed.rows else 0
    for seen in (torch.ones(length, length).tril(), torch.ones(length, length)):
        yield Trial(
            "mask",
            "the mask, or the documents' boundaries, are not seen by the attention of the ranks: "
            "give attention_mask or cu_seqlens of the whole sequence to attention on each rank",
            "a twin without them", in_twin={("seen",): seen.bool()},
        )  # fmt: skip
    first = {rank: places[0] for rank, _, _, places in reversed(fed.places)}
    held = [first[rank] for rank in sorted(first)]
    places, lens = torch.cat([*held, torch.empty(0)]).long(), tuple(map(len, held))
    if len(held) < 2 or not places.sort()[0].equal(torch.arange(length)):
        return

    def by_order(values: Tensor) -> Tensor:
        at = values[places.argsort()]
        return at[:, None] >= at

    owner = torch.arange(len(held)).repeat_interleave(torch.tensor(lens))[places.argsort()]
    yield Trial(
        "attention",
        "attention sees only the rows of its own rank: make it ring_attention, or see that the "
        "model's attention function is the one that was replaced",
        "attention of the twin cut into the ranks' rows",
        in_twin={("seen",): by_order(torch.arange(length)) & (owner[:, None] == owner)},
    )  # fmt: skip
    for name in LAYOUTS:
        layout = SequenceLayout.from_name(name, length, len(held))
        taken = torch.cat([layout.position_ids(rank) for rank in range(len(held))])
        if layout.shard_lens == lens and not taken.equal(places):
            yield Trial(
                "layout",
                f"attention takes the rows for {name}, but they are cut {fed.layout}: give it the "
                "layout of the batch",
                "rows taken so in the twin", in_twin={("seen",): by_order(taken)},
            )  # fmt: skip


HYPOTHESES = (_weights, _inputs, _labels, _denominators, _accumulation, _attention)


def trials(twin: Outcome, ranks: Sequence[Outcome]) -> list[Trial]:
    fed = Fed(twin, ranks)
    return [trial for made in HYPOTHESES for trial in made(fed)]


def fraction(x: float) -> str:
    """A factor as text: a fraction of small numbers where it is one."""
    near = Fraction(x).limit_denominator(64)
    return str(near) if float(near) == x else f"{x:.4g}"


def listed(numbers: Iterable[object]) -> str:
    """Numbers as text, at most eight."""
    texts = [*map(str, numbers)]
    return ", ".join(texts[:8]) + (" and more" if len(texts) > 8 else "")
