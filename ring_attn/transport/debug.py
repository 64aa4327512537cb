"""RING_ATTN_DEBUG=1: compares the arguments of all ranks before each call, and names differences.

Costs two small exchanges per call, over the ring's connections and within its timeout.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence


def debug_enabled() -> bool:
    """Whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def difference(reports: Sequence[Mapping[str, str]]) -> str | None:
    """Each differing argument with its ranks and their values, from all ranks' reports of a call.

    A rank that refuses the call reports its "error" only.
    """
    differences = [
        f"rank {rank} raised {report['error']}"
        for rank, report in enumerate(reports)
        if "error" in report
    ]
    names = set() if differences else {name for report in reports for name in report}
    for name in sorted(names):
        values = [report.get(name) for report in reports]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = ", ".join(
            f"rank {rank} has {value}" for rank, value in enumerate(values) if value != usual
        )
        differences.append(f"{name}: {odd}, the other {count} have {usual}")
    return "; ".join(differences) or None
