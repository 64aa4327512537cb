"""Names the arguments in which calls of ranks differ.

With RING_ATTN_DEBUG=1 all ranks compare their arguments before each call. This takes two small
exchanges per call, over the ring's connections and within its timeout.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping

from ring_attn.core.facts import Facts, first_difference
from ring_attn.transport.base import rank_name


def debug_enabled() -> bool:
    """Whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def difference(reports: Mapping[int, Facts]) -> dict[str, str] | None:
    """A sentence for each differing argument, with the ranks' values; None if all are equal.

    `reports` are calls by global rank. A rank that refuses the call reports its "error" only.
    Different calls have other arguments, which are not compared.
    """
    errors = [
        f"{rank_name(rank)} raised {report['error'][0]}"
        for rank, report in reports.items()
        if "error" in report
    ]
    if errors:
        return {"error": "; ".join(errors)}
    differences = {}
    for name in ["call", *sorted({name for report in reports.values() for name in report})]:
        values = {rank: tuple(report.get(name, ("",) * 2)) for rank, report in reports.items()}
        (usual, fact), _ = Counter(values.values()).most_common(1)[0]
        odd = {rank: text for rank, (text, other) in values.items() if other != fact}
        if not odd:
            continue
        told = [f"{rank_name(rank)} has {text}" for rank, text in odd.items()]
        rest = len(values) - len(odd)
        differences[name] = f"{name}: {', '.join(told)}, the other {rest} have {usual}"
        if name == "call":
            break
    return differences or None


def place_of_difference(name: str, details: Mapping[int, str]) -> str:
    """Where layouts or masks differ first, from `Agreement.details` by global rank; or nothing."""
    each = {rank: json.loads(text)[name] for rank, text in details.items()}
    first = next(iter(each))
    for rank, others in each.items():
        for one, other in zip(each[first], others, strict=False):
            where = first_difference(other, one)
            if where is not None:
                return f" ({where}: {rank_name(rank)} against {rank_name(first)})"
    return ""
