"""Errors that end calls: their texts, and whether a rank has counted the call.

All errors that ranks find about each other have one form:

    what differs, and on which ranks. What to pass. (Where it was noticed; the group is lost.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ring_attn.core.facts import Facts
from ring_attn.transport.base import differences, rank_name

# Kind of a call that a rank has counted but not made.
REFUSED = "refused"

LOST = "the process group is lost: restart from a checkpoint, or make a new group on all ranks"

LEFT_OUT = (
    "Run the backward of each forward on every rank: if a loss does not depend on the output, "
    "there is no backward, so add 0 * out.sum() to the loss"
)

NO_CALL = (
    "Read the first error in its log; if a rank leaves out a call, all ranks must leave it out"
)

WHOLE_DOCUMENTS = (
    "Pass the boundaries of the documents in the whole sequence, which are the same on every rank, "
    "not those of one rank's documents"
)

# What to do if a value of a call differs; for other values, see `_remedy`.
REMEDIES = {
    "step": (
        "A rank skipped or repeated a step: all ranks must run the same steps, so do not let a "
        "rank continue after an error"
    ),
    "requires_grad": (
        "Run all ranks with gradients or all without them (torch.no_grad, frozen inputs)"
    ),
    "cu_seqlens": WHOLE_DOCUMENTS,
    "cu_seqlens_k": WHOLE_DOCUMENTS,
    "backend": "Install the same packages on every rank, or pass backend=",
    "values of sinks": "Broadcast the sinks from one rank: their values must be the same",
    "values of q": "Pass the same queries on every rank: only the cache is sharded",
    "RING_ATTN_CONFIGS": "Give every rank the same file",
}

# Values that follow from the tensors.
SIZES = ("dtype", "batch", "nheads", "nheads_kv", "headdim", "headdim_v", "seqlen_q", "seqlen_k")


def mark_counted(error: BaseException) -> None:
    """Note that the call which this error ends has been counted."""
    error._ring_attn_counted = True  # type: ignore[attr-defined]


def was_counted(error: BaseException) -> bool:
    return getattr(error, "_ring_attn_counted", False)


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def noticed(cause: str, place: str) -> str:
    """Return the text of an error that ends the group: its cause first, then the place."""
    return f"{cause}. (Noticed {place}; {LOST})"


class Disagreement(NamedTuple):
    """How the calls of ranks differ.

    Attributes:
        head: the kind of difference.
        facts: a sentence for each value that differs, by its name.
        remedy: what to do.
    """

    head: str
    facts: dict[str, str]
    remedy: str

    @staticmethod
    def of(reports: Mapping[int, Facts]) -> Disagreement | None:
        """Return how reports of global ranks differ; None if they are equal."""
        facts = differences(reports)
        if not facts:
            return None
        if "call" in facts:
            calls = {rank: report.get("call", ("none", ""))[0] for rank, report in reports.items()}
            if any(call.startswith(REFUSED) for call in calls.values()):
                return _refused_call(calls)
            head, remedy = _other_call(calls)
            return Disagreement(head, facts, remedy)
        return Disagreement("ranks disagree on the call", facts, _remedy(tuple(facts)))

    @property
    def has_places(self) -> bool:
        """Whether a layout or a mask differs, in some position or slice."""
        return bool({"layout", "mask"} & self.facts.keys())

    def text(self, places: Mapping[str, str] | None = None) -> str:
        """Return the difference and the remedy.

        `places` are the first places where a layout or a mask differs, by "layout" or "mask".
        """
        places = places or {}
        facts = [
            f"{text} ({places[name]})" if name in places else text
            for name, text in self.facts.items()
        ]
        return f"{self.head}; {'; '.join(facts)}. {self.remedy}"


def _remedy(names: tuple[str, ...]) -> str:
    """Return what to do if values with these names differ."""
    if "headdim" in names:  # the default of softmax_scale follows from it
        names = tuple(name for name in names if name != "softmax_scale")
    for name in names:
        if name in REMEDIES:
            return REMEDIES[name]
    if set(names) <= set(SIZES):
        return (
            "Pass tensors of the same sizes and dtype on every rank, and a SequenceLayout if their "
            "numbers of rows differ"
        )
    others = [name for name in names if name not in SIZES] or [*names]
    return f"Pass the same {' and '.join(others)} on every rank"


def _refused_call(calls: Mapping[int, str]) -> Disagreement:
    """Return why ranks have refused a call, and the calls of the others, given by global rank."""
    errors: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for rank, call in calls.items():
        if call.startswith(REFUSED):
            errors.setdefault(call.removeprefix(f"{REFUSED} it: "), []).append(rank)
        else:
            others.setdefault(call, []).append(rank)
    head = "; ".join(f"{_named(ranks)} refused the call: {why}" for why, ranks in errors.items())
    made = [
        f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'} in {call}"
        for call, ranks in others.items()
    ]
    remedy = "Correct these arguments; if a rank skips a call, all ranks must skip it"
    return Disagreement(head, {"call": ", ".join(made)}, remedy)


def _other_call(calls: Mapping[int, str]) -> tuple[str, str]:
    """Return the cause and the remedy for ranks in different calls, given by global rank."""
    backward = [rank for rank, call in calls.items() if call.startswith("backward")]
    if len(backward) == len(calls):
        return (
            "ranks run their backwards in different orders",
            "Run the backwards of all forwards in the same order on every rank",
        )
    if backward:
        others = [rank for rank in calls if rank not in backward]
        return (
            f"{_named(others)} skipped a backward, or made one call more than {_named(backward)}",
            LEFT_OUT,
        )
    return (
        "ranks are in different calls",
        "Make the same calls in the same order on every rank",
    )


def _named(ranks: list[int]) -> str:
    return rank_name(ranks if len(ranks) > 1 else ranks[0])
