"""RING_ATTN_DEBUG=1: finds ranks that call with different arguments, before they hang.

Costs one small exchange of Python objects (pickled; use it among trusted ranks) a call.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist


def debug_enabled() -> bool:
    """Whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def check_agreement(described: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Compares what every rank of the group is about to do.

    Args:
        described: name -> value of everything that must be equal on all ranks.
        group: the ring's group; all its ranks take part.

    Raises:
        ValueError: on every rank, naming what differs, on which ranks, and how.
    """
    gathered = _gather(described, group)
    differences = [
        f"rank {rank} raised {one['error']}" for rank, one in enumerate(gathered) if "error" in one
    ]
    names = set() if differences else {name for one in gathered for name in one}
    for name in sorted(names):
        values = [repr(one.get(name)) for one in gathered]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = ", ".join(
            f"rank {rank} has {value}" for rank, value in enumerate(values) if value != usual
        )
        differences.append(f"{name}: {odd}, the other {count} have {usual}")
    if differences:
        raise ValueError("ranks disagree on the call; " + "; ".join(differences))


def tell_error(error: Exception, group: dist.ProcessGroup) -> None:
    """Takes part in the comparison for a rank whose own arguments have raised.

    The other ranks then raise as well, and name this one, instead of waiting for it.
    """
    _gather({"error": f"{type(error).__name__}: {error}"}, group)


def _gather(
    described: Mapping[str, object], group: dist.ProcessGroup
) -> list[Mapping[str, object]]:
    gathered: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, dict(described), group=group)
    return gathered
