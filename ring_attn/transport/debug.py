"""Names the arguments in which calls of ranks differ.

With RING_ATTN_DEBUG=1 all ranks compare their arguments before each call. This takes two small
exchanges per call, over the ring's connections and within its timeout.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping


def debug_enabled() -> bool:
    """Whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def difference(reports: Mapping[int, Mapping[str, str]]) -> str | None:
    """Each differing argument with the ranks' values, from reports of a call by rank; or None.

    A rank that refuses the call reports its "error" only. Different calls have other arguments,
    which are not compared.
    """
    errors = [f"rank {rank} raised {x['error']}" for rank, x in reports.items() if "error" in x]
    if errors:
        return "; ".join(errors)
    differences = []
    for name in ["call", *sorted({name for report in reports.values() for name in report})]:
        values = {rank: report.get(name) for rank, report in reports.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        if count == len(values):
            continue
        odd = [f"rank {rank} has {value}" for rank, value in values.items() if value != usual]
        differences.append(f"{name}: {', '.join(odd)}, the other {count} have {usual}")
        if name == "call":
            break
    return "; ".join(differences) or None
